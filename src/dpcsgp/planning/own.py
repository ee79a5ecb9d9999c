"""A plan for one's own model and data: settings, noise and costs, with no private data opened.

Shapes, declared sizes and the budget decide (`runs.default_settings` states the rule, which
`dpcsgp.train` follows too). Public test data make it better: the length of their gradients at the
start tells whether the clip norm fits, and time and memory are measured on them.

Legend: J examples.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

import torch
from torch import Tensor, nn

from dpcsgp.config import Config, change_config, per_node
from dpcsgp.errors import ConfigError, DpcsgpError, ModelError
from dpcsgp.planning.pass_costs import places_of_step, probe_bytes
from dpcsgp.planning.timing import (
    PublicRows,
    StepTimes,
    first_use,
    gradient_bytes,
    state_bytes,
    time_exchange,
    time_parts,
)
from dpcsgp.runs.default_settings import (
    RULED,
    is_open,
    open_settings,
    with_defaults,
)
from dpcsgp.runs.design import RunDesign, design_run
from dpcsgp.runs.facts import Facts
from dpcsgp.runs.noise_verdict import noise_share, noise_verdict
from dpcsgp.runs.public_checks import Gradients, gradient_norms
from dpcsgp.runs.script_words import script_words
from dpcsgp.runs.user_data import UserData
from dpcsgp.runs.user_settings import loss_and_metrics, settle
from dpcsgp.tasks import LossPerExample
from dpcsgp.tasks.collating import Collate
from dpcsgp.tasks.node_data import NodeData

_ROWS: Final = 32  # public examples whose gradients are looked at


@final
@dataclass(frozen=True, repr=False, eq=False)
class OwnPlan:
    """Settings for a model and nodes, and what a run with them costs.

    `seconds` and `memory_bytes` are None where no examples of inputs are known, `gradients` without
    test data. `noise_share` is how far noise moves the model, over the length of the path that
    clipped gradients can take it: above 0.5 noise dominates.
    """

    design: RunDesign
    chosen: tuple[str, ...]  # names of the settings that the rule filled in
    noise_share: float
    gradients: Gradients | None
    seconds: float | None
    memory_bytes: int | None

    @property
    def settings(self) -> dict[str, Any]:
        """Budget and chosen values, for `dpcsgp.train(..., settings=plan.settings)`."""
        names = ("privacy.epsilon", "privacy.clip_norm", *RULED)
        flat = self.design.config.flat()
        return {name: flat[name] for name in names}

    def config(self) -> Config:
        """Return all settings, for `dpcsgp.train(..., config=plan.config())`."""
        return self.design.config

    @property
    def bytes_per_edge(self) -> int:
        """Bytes that a whole run puts on one edge."""
        return self.design.bytes_per_edge()

    @property
    def noise_multipliers(self) -> tuple[float, ...]:
        """Noise of each node, in clip norms; 0 for nodes without examples."""
        return self.design.mechanism.noise_multipliers

    @property
    def verdict(self) -> str:
        """Say in one line what the noise will do, and if the clip norm is far off."""
        misfit = ""
        if self.gradients is not None:
            privacy = self.design.config.privacy
            misfit = self.gradients.misfit(privacy.clip_norm, max(privacy.max_rows_per_unit, 1))
        return "; ".join(filter(None, (noise_verdict(self.noise_share), misfit)))

    def rows(self) -> dict[str, str]:
        """Return the plan line by line, as it is printed."""
        config, mechanism = self.design.config, self.design.mechanism
        return {
            "verdict": self.verdict,
            "nodes": f"{len(mechanism.num_examples)}, {_span(mechanism.num_examples)} examples",
            "model": f"{self.design.dim:,} trained coordinates",
            "eps": f"{_span(per_node(config.privacy.epsilon, config.num_nodes))}, delta "
            f"{_span(per_node(config.privacy.delta, config.num_nodes))}",
            "steps": str(config.algorithm.steps),
            "learning rate": f"{config.algorithm.learning_rate:g}",
            "batch size": _span(mechanism.expected_batch_sizes),
            "clip norm": f"{config.privacy.clip_norm:g}{self._clipped()}",
            "noise": f"{_span(self.noise_multipliers)} x clip norm, on the sum of a batch",
            "compression": config.compression.spec if config.method.compresses else "none",
            "bytes per edge": f"{self.bytes_per_edge:,}",
            "time": _time(self.seconds),
            "memory": _memory(self.memory_bytes),
            "by the rule": ", ".join(self.chosen) or "nothing: everything was set",
        }

    def _clipped(self) -> str:
        if self.gradients is None:
            return ""
        return (
            f" ({self.gradients.share_clipped:.0%} of public gradients are longer at the start, "
            f"median {self.gradients.median:.2g})"
        )

    def __repr__(self) -> str:
        lines = [
            textwrap.fill(f"{name:<15}{value}", 78, initial_indent="  ", subsequent_indent=" " * 17)
            for name, value in self.rows().items()
        ]
        return "\n".join(("Plan", *lines))


def plan(
    model: nn.Module | Callable[[], nn.Module],
    num_examples: int | Sequence[int],
    *,
    epsilon: float | Sequence[float] | None = None,
    delta: float | Sequence[float] | None = None,
    loss: Literal["cross_entropy", "mse"] | LossPerExample = "cross_entropy",
    test_data: NodeData = None,
    input_shape: Sequence[int] | None = None,
    config: Config | Path | str | None = None,
    settings: Mapping[str, Any] | Sequence[str] = (),
    classes: Sequence[Any] | None = None,
    collate: Collate | None = None,
) -> OwnPlan:
    """Choose settings for your model and nodes, and say what a run with them costs.

    No private data are needed: shapes, declared sizes and the budget decide. What `settings` or
    `config` decide stays as it is.

    Args:
        model: The module, or a function that builds it, as in `train`.
        num_examples: Declared examples of every node (one number: a single node); 0: a node
            without data.
        epsilon: Budget of every node, or one per node.
        delta: The same for delta.
        loss: As in `train`.
        test_data: Public data, as in `train`: the clip norm is fitted to their gradients, and time
            and memory are measured with them.
        input_shape: Shape of one input without batch axis, for time and memory without test data;
            known already where the model begins with a linear layer.
        config: All settings, or a TOML file.
        settings: Changes to them.
        classes: As in `train`.
        collate: As in `train`.

    Returns:
        `settings` for `train(settings=...)`, `config()`, noise and costs; printing shows them all.

    Raises:
        DpcsgpError: for models, sizes or settings that cannot be used.

    >>> found = plan(nn.Linear(30, 2), [60, 80, 90], epsilon=2.0, delta=1e-3)
    >>> found.settings["algorithm.steps"], found.settings["privacy.expected_batch_size"]
    (40, [60, 80, 90])
    """
    sizes = _checked_sizes(num_examples)
    module, whole = settle(model, [None] * len(sizes), config, settings, epsilon, delta)
    loss_function, metrics = loss_and_metrics(loss, None)
    data = None
    if test_data is not None:
        data = UserData.collect(
            [None] * len(sizes), [], test_data, loss_function, metrics, sizes,
            whole.run.test_examples, classes, collate,
        )  # fmt: skip
        data.connect(module)
    chosen = list(open_settings(whole))
    norms_J = None
    if data is not None and data.test is not None:
        norms_J = gradient_norms(module, data.loss, data.test, _ROWS)
    if norms_J is not None and is_open(whole, "privacy.clip_norm"):
        whole, chosen = _fitted_clip_norm(whole, norms_J), [*chosen, "privacy.clip_norm"]
    whole = with_defaults(whole, module, sizes, classes=loss == "cross_entropy")
    with script_words():
        facts = data.facts if data else Facts(tuple(input_shape or ()), 0, sizes)
        design = design_run(whole, facts, module=module)
    rows = _public_rows(design, data, loss_function, input_shape)
    seconds, memory = _costs(design, rows) if rows else (None, None)
    gradients = None if norms_J is None else Gradients.of(norms_J, whole.privacy.clip_norm)
    return OwnPlan(design, tuple(chosen), noise_share(design), gradients, seconds, memory)


def _checked_sizes(num_examples: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(num_examples, int):
        num_examples = [num_examples]
    sizes = tuple(int(size) for size in num_examples)
    if not sizes or min(sizes) < 0 or not any(sizes):
        raise ConfigError(
            f"num_examples = {list(num_examples)}: expected one number per node, at least one of "
            "them above 0"
        )
    return sizes


def _fitted_clip_norm(config: Config, norms_J: Tensor) -> Config:
    """Lower the clip norm to the median of public gradients where they are shorter.

    Noise is made for the clip norm: shorter gradients would drown in it. Longer ones are clipped,
    and the learning rate counts in clip norms, so that nothing is gained by raising it.
    """
    median = float(norms_J.median())
    fitted = min(config.privacy.clip_norm, float(f"{median:.1g}"))
    return change_config(config, {"privacy.clip_norm": fitted if fitted > 0 else 1.0})


def _public_rows(
    design: RunDesign,
    data: UserData | None,
    loss: LossPerExample,
    input_shape: Sequence[int] | None,
) -> PublicRows | None:
    """Return examples to time with: public ones, or random ones of a known shape."""
    if data is not None:
        assert data.test is not None
        inputs, targets = data.test
        return PublicRows(inputs[:8], targets[:8], data.loss, len(inputs))
    shape = input_shape or _first_inputs(design.module)
    if shape is None:
        return None
    # The loss of outputs themselves: targets of the right form are not known.
    return PublicRows(torch.rand(8, *shape), torch.zeros(8), _sum_of_outputs, 0)


def _sum_of_outputs(outputs: Any, targets: Tensor) -> Tensor:
    logits = getattr(outputs, "logits", outputs)
    return logits.flatten(1).square().sum(1) + 0.0 * targets


def _first_inputs(module: nn.Module) -> tuple[int, ...] | None:
    """Return the shape of inputs where a model begins with a linear layer."""
    if not isinstance(module, nn.Sequential | nn.Linear):
        return None
    layers = (layer for layer in module.modules() if not isinstance(layer, nn.Sequential))
    first = next((layer for layer in layers if not isinstance(layer, nn.Flatten)), None)
    return (first.in_features,) if isinstance(first, nn.Linear) else None


def _costs(design: RunDesign, rows: PublicRows) -> tuple[float, int]:
    """Return seconds and bytes of a whole run, all nodes in this process."""
    try:
        times: StepTimes = time_parts(design, rows)
    except DpcsgpError:
        raise
    except Exception as error:
        raise ModelError(
            f"model and loss fail on inputs of shape {tuple(rows.inputs.shape[1:])}: {error}; give "
            "input_shape=(...) of one input, or test_data"
        ) from error
    num_nodes = design.topology.num_nodes
    sends = design.config.method.sends and num_nodes > 1
    exchange = time_exchange(design) if sends else 0.0
    places = math.ceil(places_of_step(design) / num_nodes)
    seconds = times.seconds(design.config, places, exchange)
    steps = state_bytes(design) + gradient_bytes(design, times)
    # The checks at the start are over before the first step, and so is what they held.
    probes = probe_bytes(design, rows.inputs, rows.targets, rows.loss, times.passes)
    return seconds, max(steps, first_use(design.module) + int(probes))


def _span(values: Sequence[float]) -> str:
    some = [value for value in values if value] or [0]
    low, high = min(some), max(some)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown; give input_shape or test_data"
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"


def _memory(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "unknown; give input_shape or test_data"
    size = f"{num_bytes / 1e9:.2g} GB" if num_bytes > 1e9 else f"{max(num_bytes / 1e6, 1):.0f} MB"
    return f"about {size} beside the program itself, all nodes in one process"
