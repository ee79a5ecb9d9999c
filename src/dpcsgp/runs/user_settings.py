"""A user's own model: its settings, its losses and metrics, and how it is named and stored."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from dpcsgp.config import Config, change_config, load_config
from dpcsgp.errors import ConfigError, ModelError
from dpcsgp.evaluation import RESERVED_KEYS
from dpcsgp.modes import uncompiled
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.model_checks import check_model
from dpcsgp.randomness import torch_seed
from dpcsgp.tasks import LossPerExample
from dpcsgp.tasks.measures import DirectedMetric
from dpcsgp.tasks.node_data import NodeData
from dpcsgp.tasks.supervised import LOSSES, Metric, OwnMetric, classification_loss


def settle(
    model: nn.Module | Callable[[], nn.Module],
    node_data: Sequence[NodeData],
    config: Config | Path | str | None,
    settings: Mapping[str, Any] | Sequence[str],
    epsilon: float | Sequence[float] | None,
    delta: float | Sequence[float] | None,
    started: Config | None = None,
) -> tuple[nn.Module, Config]:
    """Return a checked copy of the module, and all settings of the run.

    `started` are the settings of the run that is continued, if any.
    """
    # Settings: the file or the defaults, then the number of nodes, then the changes.
    if not isinstance(config, Config):
        config = load_config(None if config is None else Path(config))
    _refuse_other_words(settings)
    if node_data and "num_nodes" not in config.graph.model_fields_set:
        config = change_config(config, {"graph.num_nodes": len(node_data)})
    config = change_config(config, settings)
    config = _weighted_by_examples(config, started)
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
    model = built_module(model, config.run.seed)
    if epsilon is not None and config.privacy.noise == "none":
        raise ConfigError(
            f'epsilon = {epsilon} with privacy.noise = "none": without noise there is no eps; '
            "leave one of them out"
        )
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        check_model(model)
    # A copy: the caller's own module is never trained.
    module = uncompiled(model).float()
    check_model(module, warn=False)  # `design_run` warns; refused here before data are read
    # Written into the settings, so that a resumed run can be held against it.
    own: dict[str, Any] = {
        "task.name": "own",
        "task.model": described_model(module),
        "task.features": "none",
        "task.partition": "own",
    }
    for name, value in (("privacy.epsilon", epsilon), ("privacy.delta", delta)):
        if value is not None:
            own[name] = list(value) if isinstance(value, Sequence) else value
    return module, change_config(config, own)


def built_module(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the caller's module.

    A function that builds it is called under the public seed, so that all start with the same one.
    """
    if not isinstance(model, nn.Module) and callable(model):
        with torch_seed(seed, "initial model"):
            model = model()
    if not isinstance(model, nn.Module):
        raise ModelError(
            "model: expected an nn.Module, or a function that builds one, got "
            f"{type(model).__name__}"
        )
    return model


def _refuse_other_words(settings: Mapping[str, Any] | Sequence[str]) -> None:
    """Refuse settings in another form, in the words of Python and not of the command line."""
    form = 'write {"algorithm.steps": 60} or ["algorithm.steps=60"]'
    if isinstance(settings, str) or not isinstance(settings, Mapping | Sequence):
        raise ConfigError(f"settings = {settings!r}: expected a mapping or a list; {form}")
    for name in settings:
        value = settings[name] if isinstance(settings, Mapping) else None
        named = isinstance(name, str) and "." in name.partition("=")[0]
        if not named or isinstance(value, Mapping):
            raise ConfigError(f"settings[{name!r}]: expected section.key and a value; {form}")
        if not isinstance(settings, Mapping) and "=" not in name:
            raise ConfigError(f"settings: {name!r} has no value; {form}")


def _weighted_by_examples(config: Config, started: Config | None) -> Config:
    """Let nodes count by their examples, unless the caller decided or began otherwise.

    A node with three examples would bring as much noise as all others together.
    """
    if "node_weights" in config.algorithm.model_fields_set or not config.method.sends:
        return config
    weights = "examples" if started is None else started.algorithm.node_weights
    return change_config(config, {"algorithm.node_weights": weights})


def described_model(module: nn.Module) -> str:
    """Name a model of the caller's own.

    Class, digest of names and shapes of what is trained, digest of what is not.
    """
    layout = ParameterLayout.of(module)
    shapes = repr(
        [(name, tuple(shape)) for name, shape in zip(layout.names, layout.shapes, strict=True)]
    ).encode()
    # Frozen parameters and buffers by their values: they are part of the public start.
    fixed = hashlib.blake2b(digest_size=4)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name not in layout.names:
            fixed.update(
                name.encode()
                + tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
    trained = hashlib.blake2b(shapes, digest_size=4).hexdigest()
    return f"own:{type(module).__name__}:{trained}:{fixed.hexdigest()}"


def loss_and_metrics(
    loss: str | LossPerExample,
    metrics: Mapping[str, OwnMetric] | None,
    class_weights: Sequence[float] = (),
) -> tuple[LossPerExample, dict[str, Metric]]:
    """Return the loss per example, and the metrics that go with it beside the caller's own.

    Args:
        loss: a name of this package's, or a function.
        metrics: name -> function, or a pair of a function and "higher" or "lower".
        class_weights: public factors of the cross-entropy, one per class; empty: none.
    """
    if class_weights and loss != "cross_entropy":
        raise ConfigError(
            f'task.class_weights = {list(class_weights)}: only loss = "cross_entropy" has classes; '
            "leave the weights out, or multiply them into a loss of your own"
        )
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ConfigError(
                f'loss = {loss!r}: expected "cross_entropy", "mse", or a function (outputs, '
                "targets) -> loss per example"
            )
        # A loss of this package comes with the metrics that go with it.
        function, usual = LOSSES[loss]
        function = classification_loss(class_weights) if loss == "cross_entropy" else function
    else:
        function, usual = (
            loss,
            {"test_loss": lambda outputs, targets: loss(outputs, targets).double().mean()},
        )
    return function, {**usual, **checked_metrics(metrics or {})}


def checked_metrics(metrics: Mapping[str, OwnMetric]) -> dict[str, Metric]:
    """Return metrics with their directions; names that a run writes itself are refused."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics: expected a mapping from names to functions, got {type(metrics).__name__}"
        )
    return {name: _checked_metric(name, metric) for name, metric in metrics.items()}


def _checked_metric(name: Any, metric: Any) -> Metric:
    direction = None
    if isinstance(metric, tuple) and len(metric) == 2:
        metric, direction = metric
        if direction not in ("higher", "lower"):
            raise ConfigError(
                f"metrics[{name!r}]: direction {direction!r}; say which values are better: "
                f'"higher" or "lower", as in {{{name!r}: (function, "higher")}}'
            )
    if not isinstance(name, str) or f"{name}_nodes" in RESERVED_KEYS or not callable(metric):
        raise ConfigError(
            f"metrics[{name!r}]: expected a name of your own and a function; "
            f"{', '.join(RESERVED_KEYS)} are written by the run"
        )
    function: Any = metric
    return function if direction is None else DirectedMetric(function, direction)


def refuse_other_model(folder: Path, config: Config, model: nn.Module) -> None:
    """Refuse a model whose trained parameters differ from those in the folder.

    Names and shapes are compared.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model: expected an instance of nn.Module, got {type(model).__name__}")
    # "own:CLASS:TRAINED:FIXED": only TRAINED must agree; frozen values are the given model's.
    stored, given = (text.split(":")[1:3] for text in (config.task.model, described_model(model)))
    if stored[1:] != given[1:]:
        layout = ParameterLayout.of(model)
        raise ModelError(
            f"{folder} holds a model of class {stored[0]} whose trained parameters have other "
            "names or shapes than those of the "
            f"given {given[0]} ({layout.dim:,} trained parameters); give an instance of the "
            "class that was trained, with the "
            "same parameters frozen"
        )


def filled_module(module: nn.Module, flat_D: Tensor) -> nn.Module:
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
