"""Your model, your data: train any PyTorch module privately over nodes that each hold a dataset.

`train` simulates all nodes in this process; the same script started by torchrun trains each
process's share of the nodes over real connections. Everything that cannot be private is refused
before any budget is spent, on the machine that holds the data, and private data are never used for
a check of the model.

Legend: N hosted nodes, D coordinates, J examples.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from dpcsgp.config import Config, change_config, load_config
from dpcsgp.console.session import new_folder, refuse_changed_settings
from dpcsgp.errors import ConfigError, DataError, DivergenceError, ModelError
from dpcsgp.network.torch_distributed import ProcessEnvironment, nodes_of_ranks
from dpcsgp.own_run import OwnRun
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import ReleaseEvent, read_ledgers, releases_by_node
from dpcsgp.privacy.model_checks import check_model
from dpcsgp.randomness import torch_seed
from dpcsgp.records.metrics import read_rows
from dpcsgp.runs.design import design_run
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.user_data import UserData
from dpcsgp.runtime.process import MACHINE_SETTINGS
from dpcsgp.runtime.session import Outcome
from dpcsgp.tasks import LossPerExample
from dpcsgp.tasks.node_data import NodeData
from dpcsgp.tasks.supervised import LOSSES, Metric
from dpcsgp.training import RESERVED_KEYS

__all__ = ["Result", "load_model", "train"]


@final
@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """What a run left. Models are post-processing of what was released: they may be shown to
    anybody.

    `summary` holds eps as verified from the ledger, bytes as sent, and the metrics; `history` one
    row per evaluation."""

    folder: Path
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    nodes: tuple[int, ...]
    _module: nn.Module
    _models_ND: Tensor
    _average_D: Tensor | None  # None: this process cannot know it

    @cached_property
    def models(self) -> dict[int, nn.Module]:
        """Node -> its own de-biased model, of the nodes that this process hosts."""
        return {
            node: _filled(self._module, self._models_ND[row]) for row, node in enumerate(self.nodes)
        }

    @cached_property
    def model(self) -> nn.Module:
        """The average of all nodes' models."""
        if self._average_D is None:
            raise DataError(
                "the average model is known only where all nodes' models are: these processes "
                "share no disk; "
                "use result.models[node], or put the folders together"
            )
        return _filled(self._module, self._average_D)

    @property
    def epsilon(self) -> float:
        """The largest eps over the nodes, verified from the ledger."""
        return float(self.summary["epsilon"])

    @property
    def ledger(self) -> Path:
        """The folder of the ledgers, one file per node; `dpcsgp account FOLDER` prints them."""
        return self.folder / "ledger"

    def releases(self) -> dict[int, list[tuple[ReleaseEvent, int]]]:
        """Read and verify the ledgers: node -> what it released and how often."""
        return releases_by_node(read_ledgers(self.ledger))

    def __repr__(self) -> str:
        means = [f"{key.removesuffix('_node_mean')} {value:.4g}" for key, value in self.summary.items()
                 if key.endswith("_node_mean")]  # fmt: skip
        return f"Result({', '.join([*means, f'epsilon {self.epsilon:.4g}', str(self.folder)])})"


def train(
    model: nn.Module | Callable[[], nn.Module],
    node_data: Sequence[NodeData],
    *,
    test_data: NodeData = None,
    loss: Literal["cross_entropy", "mse"] | LossPerExample = "cross_entropy",
    metrics: Mapping[str, Metric] | None = None,
    epsilon: float | Sequence[float] | None = None,
    delta: float | Sequence[float] | None = None,
    config: Config | Path | str | None = None,
    settings: Mapping[str, Any] | Sequence[str] = (),
    num_examples: Sequence[int] | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    on_evaluation: Callable[[dict[str, Any]], None] | None = None,
    should_stop: Callable[[int], bool] | None = None,
    allow_divergence: bool = False,
    verbose: bool = False,
) -> Result:
    """Train a model over nodes that keep their data, with differential privacy for every example of
    every node.

    Args:
        model: The module at its starting point, which everybody knows (pretrained on public data is
        fine), or a function
            that builds it, called under the public seed `run.seed`. It is copied and trained in
            float32; parameters with `requires_grad=False` stay as they are.
        node_data: One entry per node: a map-style dataset of (input, target) pairs, a pair of
        tensors or arrays, or None
            for a node without data (it passes messages on and gets a model too).
        test_data: Public data for evaluation, in the same form. What is measured on them is
        recorded and printed. loss: "cross_entropy", "mse", or a function (outputs, targets) -> one
        loss per example. metrics: Name -> function (outputs, targets) of the whole test set -> one
        number. Default: accuracy, mean squared
            error, or for a loss of your own `test_loss`.
        epsilon: Budget of every node, or one per node; the same as `privacy.epsilon`. delta: The
        same as `privacy.delta`; well below 1 / (examples of a node). config: All settings: a
        `Config`, or a TOML file. `graph.num_nodes` follows from `node_data`. settings: Changes to
        them, `{"algorithm.steps": 60}` or `["algorithm.steps=60"]`. num_examples: Declared, public
        number of examples per node; default: the lengths of the datasets. A node may hold
            fewer than it declares, which hides how many it has: the others count as blanks. Needed
            where a process is not given the data of nodes that it does not host (None in
            `node_data`).
        out: Results folder; default: a new one under runs/. Needed under torchrun, the same for all
        processes. resume: Continue the run in `out`, with the same arguments. on_evaluation: Called
        with every row of the history as it is written: public values only. should_stop: Called with
        the number of steps done; True ends the run there, to be resumed later. allow_divergence:
        Run even if gossip is known to diverge with these settings. verbose: Print the plan, a line
        of progress and the outcome.

    Ctrl-C finishes the step, saves everything and raises KeyboardInterrupt.
    """
    place, node_data = ProcessEnvironment.from_environment(), list(node_data)
    module, whole = _settle(model, node_data, config, settings, epsilon, delta)
    hosted = (
        range(len(node_data))
        if place is None
        else nodes_of_ranks(len(node_data), place.world_size)[place.rank]
    )
    loss_function, wanted = _loss_and_metrics(loss, metrics)
    data = UserData.collect(
        node_data, hosted, test_data, loss_function, wanted, num_examples, whole.run.test_examples
    )
    design = design_run(whole, data.facts, allow_divergence or resume, module)
    data.check(module, design.mechanism.expected_batch_sizes)
    clean = copy.deepcopy(module)  # what is handed out has never seen an example
    folder = _folder(whole, out, resume, place)
    watch = on_evaluation or (lambda row: None)
    run = OwnRun(design, data, folder, resume, watch, should_stop or (lambda step: False), verbose)
    outcome = run.simulate() if place is None else run.take_part(place)
    outcome.run.ledger.close()
    reason = str(outcome.summary["stopped_because"])
    if reason.startswith("diverged"):
        raise DivergenceError(f"{reason}; lower algorithm.learning_rate. Results so far: {folder}")
    return _result(folder, outcome, clean)


def load_model(
    results_folder: Path | str, model: nn.Module | None = None, node: int | None = None
) -> nn.Module:
    """Return the trained module of a results folder: the average model, or one node's.

    Models that a config names are built anew. For a model of your own give an instance of it: a
    copy gets the trained parameters; frozen ones and buffers are the instance's."""
    folder = Path(results_folder)
    if not (folder / "config.toml").exists():
        raise DataError(f"{folder} is not a results folder: config.toml is missing")
    config = load_config(folder / "config.toml")
    if model is None:
        if config.task.name == "own":
            raise ModelError(
                f"{folder} holds a model of your own ({config.task.model.split(':')[1]}), and "
                "only its parameters "
                "are kept: load_model(folder, model) with an instance of it"
            )
        from dpcsgp.runs.facts import declared_facts
        from dpcsgp.tasks import build_model

        facts = declared_facts(config)
        model = build_model(config.task.model, facts.input_shape, facts.num_classes)
    elif config.task.name == "own":
        _refuse_other_model(folder, config, model)
    return _filled(model, _stored(folder, node))


def _described(module: nn.Module) -> str:
    """Name a model of the caller's own: class, digest of names and shapes of what is trained,
    digest of what is not."""
    layout = ParameterLayout.of(module)
    shapes = repr(
        [(name, tuple(shape)) for name, shape in zip(layout.names, layout.shapes, strict=True)]
    ).encode()
    fixed = hashlib.blake2b(digest_size=4)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name not in layout.names:
            fixed.update(
                name.encode()
                + tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
    return f"own:{type(module).__name__}:{hashlib.blake2b(shapes, digest_size=4).hexdigest()}:{fixed.hexdigest()}"


def _refuse_other_model(folder: Path, config: Config, model: nn.Module) -> None:
    """Refuse a model whose trained parameters have other names or shapes than those in the
    folder."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model: expected an instance of nn.Module, got {type(model).__name__}")
    stored, given = (text.split(":")[1:3] for text in (config.task.model, _described(model)))
    if stored[1:] != given[1:]:
        layout = ParameterLayout.of(model)
        raise ModelError(
            f"{folder} holds a model of class {stored[0]} whose trained parameters have other "
            "names or shapes than those of the "
            f"given {given[0]} ({layout.dim:,} trained parameters); give an instance of the "
            "class that was trained, with the "
            "same parameters frozen"
        )


def _stored(folder: Path, node: int | None) -> Tensor:
    """Return the flat parameters of one node (None: of the average model)."""
    path = folder / "model.safetensors"
    if not path.exists():
        raise DataError(
            f"{path} is missing: the run has not ended yet; continue it with resume=True"
        )
    tensors = load_file(path)
    if node is None:
        if "average_model" not in tensors:
            raise DataError(
                f"{path} holds the models of some nodes only, so no average; give node=0 and so on"
            )
        return tensors["average_model"]
    if not 0 <= node < len(tensors["node_models"]):
        raise DataError(
            f"node = {node}: {path} holds the models of {len(tensors['node_models'])} nodes, "
            "from 0 on"
        )
    return tensors["node_models"][node]


def _filled(module: nn.Module, flat_D: Tensor) -> nn.Module:
    """Return a copy of the module with these parameters, in eval() mode."""
    layout = ParameterLayout.of(module)
    if layout.dim != flat_D.numel():
        raise ModelError(
            f"the stored model has {flat_D.numel():,} trained parameters, the given one "
            f"{layout.dim:,}; give an instance of "
            "the class that was trained, with the same parameters frozen"
        )
    filled = copy.deepcopy(module)
    layout.load(filled, flat_D)
    return filled.eval()


def _settle(
    model: nn.Module | Callable[[], nn.Module],
    node_data: Sequence[NodeData],
    config: Config | Path | str | None,
    settings: Mapping[str, Any] | Sequence[str],
    epsilon: float | Sequence[float] | None,
    delta: float | Sequence[float] | None,
) -> tuple[nn.Module, Config]:
    """Return a checked copy of the module, and all settings of the run."""
    if not isinstance(config, Config):
        config = load_config(None if config is None else Path(config))
    if isinstance(settings, str):
        raise ConfigError(f"settings = {settings!r}: expected a list of settings, or a mapping")
    if node_data and "num_nodes" not in config.graph.model_fields_set:
        config = change_config(config, {"graph.num_nodes": len(node_data)})
    config = change_config(config, settings)
    if config.graph.num_nodes != len(node_data):
        raise ConfigError(
            f"node_data has {len(node_data)} entries for graph.num_nodes = "
            f"{config.graph.num_nodes}; give one per node "
            "(None: no data)"
        )
    if config.method.one_place and len(node_data) > 1:
        raise ConfigError(
            f'algorithm.name = "{config.algorithm.name}" trains in one place: give node_data with '
            "one dataset of everybody"
        )
    if not isinstance(model, nn.Module) and callable(model):
        with torch_seed(config.run.seed, "initial model"):
            model = model()
    if not isinstance(model, nn.Module):
        raise ModelError(
            "model: expected an nn.Module, or a function that builds one, got "
            f"{type(model).__name__}"
        )
    if epsilon is not None and config.privacy.noise == "none":
        raise ConfigError(
            f'epsilon = {epsilon} with privacy.noise = "none": without noise there is no eps; '
            "leave one of them out"
        )
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        check_model(model)
    module = copy.deepcopy(model).float()
    with warnings.catch_warnings():  # `design` warns; here it is refused before large data are read
        warnings.simplefilter("ignore")
        check_model(module)
    own: dict[str, Any] = {
        "task.name": "own",
        "task.model": _described(module),
        "task.features": "none",
        "task.partition": "own",
    }
    for name, value in (("privacy.epsilon", epsilon), ("privacy.delta", delta)):
        if value is not None:
            own[name] = list(value) if isinstance(value, Sequence) else value
    return module, change_config(config, own)


def _loss_and_metrics(
    loss: str | LossPerExample, metrics: Mapping[str, Metric] | None
) -> tuple[LossPerExample, Mapping[str, Metric]]:
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ConfigError(
                f'loss = {loss!r}: expected "cross_entropy", "mse", or a function (outputs, '
                "targets) -> loss per example"
            )
        function, usual = LOSSES[loss]
    else:
        function, usual = (
            loss,
            {"test_loss": lambda outputs, targets: loss(outputs, targets).double().mean()},
        )
    return function, usual if metrics is None else _checked_metrics(metrics)


def _checked_metrics(metrics: Mapping[str, Metric]) -> Mapping[str, Metric]:
    """Refuse names under which a run writes down other things."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics: expected a mapping from names to functions, got {type(metrics).__name__}"
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or f"{name}_nodes" in RESERVED_KEYS or not callable(metric):
            raise ConfigError(
                f"metrics[{name!r}]: expected a name of your own and a function; "
                f"{', '.join(RESERVED_KEYS)} are written by the run"
            )
    return metrics


def _folder(
    config: Config, out: Path | str | None, resume: bool, place: ProcessEnvironment | None
) -> Path:
    """Return the results folder, or refuse one that holds another run."""
    if out is None:
        if resume or place is not None:
            raise ConfigError(
                "out: name the results folder when resuming, and under torchrun the same for all "
                "processes"
            )
        return new_folder(config)
    folder = Path(out)
    if not resume:
        if place is None and (folder / "config.toml").exists():
            raise ConfigError(
                f"out = {folder} already holds a run; continue it with resume=True, or name "
                "another folder"
            )
        return folder
    before, now = (_flat(settings) for settings in (ResultsFolder.reopen(folder)[1], config))
    changed = [name for name in now if before[name] != now[name] and name not in MACHINE_SETTINGS]
    if changed:
        raise ConfigError(
            f"resume: {changed[0]} = {now[changed[0]]!r}, but {folder} was started with "
            f"{before[changed[0]]!r}; continue "
            "with the same settings, or start a new run in another folder (both ledgers then count)"
        )
    refuse_changed_settings(folder, ResultsFolder.reopen(folder)[1])
    return folder


def _flat(config: Config) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, table in config.model_dump().items()
        for key, value in table.items()
    }


def _result(folder: Path, outcome: Outcome, module: nn.Module) -> Result:
    """Collect what the run left in its folder and in this process."""
    return Result(
        folder=folder,
        summary=outcome.summary,
        history=read_rows(folder / "metrics.jsonl"),
        nodes=tuple(outcome.run.network.nodes),
        _module=module,
        _models_ND=outcome.run.algorithm.model(outcome.progress.state),
        _average_D=load_file(folder / "model.safetensors").get("average_model"),
    )
