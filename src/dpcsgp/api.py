"""Your model, your data: train any PyTorch module privately over nodes that each hold a dataset.

`train` simulates all nodes in this process; the same script started by torchrun trains each
process's share of the nodes over real connections. Everything that cannot be private is refused
before any budget is spent, on the machine that holds the data, and private data are never used for
a check of the model.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from safetensors.torch import load_file
from torch import nn

from dpcsgp.config import Config, load_config
from dpcsgp.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    ModelError,
    RefusedDataError,
)
from dpcsgp.modes import uncompiled
from dpcsgp.network.torch_distributed import ProcessEnvironment, nodes_of_ranks
from dpcsgp.records.ending import Ending
from dpcsgp.records.metrics import read_rows
from dpcsgp.records.trackers import check_trackers
from dpcsgp.runs.default_settings import CHOSEN, open_settings, with_defaults
from dpcsgp.runs.design import RunDesign, design_run
from dpcsgp.runs.epochs import with_epochs
from dpcsgp.runs.facts import declared_facts, write_own_facts
from dpcsgp.runs.folder import (
    ResultsFolder,
    new_folder,
    refuse_changed_settings,
    write_classes,
)
from dpcsgp.runs.node_noise import warn_about_dominating_noise
from dpcsgp.runs.noise_verdict import warn_about_hopeless_noise, warn_about_usual_budget
from dpcsgp.runs.onnx_export import example_arguments
from dpcsgp.runs.public_checks import warn_about_clip_norm
from dpcsgp.runs.repeats import digests_of, remember, warn_about_repeats
from dpcsgp.runs.result import Result
from dpcsgp.runs.script_words import named_callback, script_words
from dpcsgp.runs.stored_models import stored_model
from dpcsgp.runs.user_data import UserData
from dpcsgp.runs.user_settings import (
    filled_module,
    loss_and_metrics,
    refuse_other_model,
    settle,
)
from dpcsgp.runs.user_units import Unit, separate_units
from dpcsgp.runtime.process import run_process
from dpcsgp.runtime.process_agreement import MACHINE_SETTINGS
from dpcsgp.runtime.reporting import PlainText, Silent
from dpcsgp.runtime.requests import PreparedRequest, RefusedRequest, RunRequest
from dpcsgp.runtime.session import NO_HOOKS, Hooks, Outcome, run_simulated
from dpcsgp.tasks import LossPerExample, build_model
from dpcsgp.tasks.collating import Collate
from dpcsgp.tasks.node_data import NodeData, node_list
from dpcsgp.tasks.supervised import OwnMetric

__all__ = ["Result", "load_model", "train"]

# Starts of this process: under torchrun every one needs names of its own in the store.
_starts: Final = itertools.count()


def train(
    model: nn.Module | Callable[[], nn.Module],
    node_data: Iterable[NodeData],
    *,
    test_data: NodeData = None,
    loss: Literal["cross_entropy", "mse"] | LossPerExample = "cross_entropy",
    metrics: Mapping[str, OwnMetric] | None = None,
    epsilon: float | Sequence[float] | None = None,
    delta: float | Sequence[float] | None = None,
    epochs: float | None = None,
    config: Config | Path | str | None = None,
    settings: Mapping[str, Any] | Sequence[str] = (),
    num_examples: Sequence[int] | None = None,
    unit: Unit | None = None,
    classes: Sequence[Any] | None = None,
    collate: Collate | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    on_evaluation: Callable[[dict[str, Any]], None] | None = None,
    should_stop: Callable[[int], object] | None = None,
    allow_divergence: bool = False,
    verbose: bool = False,
) -> Result:
    """Train a model over nodes that keep their data, with privacy for every example of every node.

    Args:
        model: The module at its starting point, which everybody knows (pretrained on public data is
            fine), or a function that builds it, called under the public seed `run.seed`. It is
            copied and trained in float32; parameters with `requires_grad=False` stay as they are.
        node_data: One entry per node: a pair (inputs, targets) of tensors, arrays, tables or lists,
            a map-style dataset of such pairs or of dicts with "labels", or None for a node without
            data (it passes messages on and gets a model too). Inputs may be tuples and dicts, also
            nested: a dict becomes keyword arguments of `forward`, a tuple positional ones.
        test_data: Public data for evaluation, in the same form. What is measured on them is
            recorded and printed.
        loss: "cross_entropy", "mse", or a function (outputs, targets) -> one loss per example.
        metrics: Name -> function (outputs, targets) of the whole test set -> one number, or a pair
            of it and "higher" or "lower": which values are better (default: "lower" for names with
            "loss", "error", "mae" and the like). They come beside accuracy, mean squared error, or
            for a loss of your own `test_loss`.
        epsilon: Budget of every node, or one per node; the same as `privacy.epsilon`, which is 0.5
            if nobody gives one (a warning says so).
        delta: The same as `privacy.delta`; well below 1 / (examples of a node).
        epochs: How often each example is drawn, in expectation, instead of `algorithm.steps`.
        config: All settings: a `Config`, or a TOML file. `graph.num_nodes` follows from
            `node_data`.
        settings: Changes to them, `{"algorithm.steps": 60}` or `["algorithm.steps=60"]`. Unless
            you set it, `algorithm.node_weights` is "examples": nodes count by declared sizes.
            Learning rate, steps, batch size, compression and delta that nobody set follow from
            shapes, sizes and budget; `dpcsgp.plan` shows them beforehand.
        num_examples: Declared, public number of examples per node; default: the lengths of the
            datasets. A node may hold fewer than it declares, which hides how many it has: the
            others count as blanks. Needed where a process is not given the data of nodes that it
            does not host (None in `node_data`).
        unit: Whose rows belong together, for privacy of whole persons: for every node one
            identifier per row (None: no data), or the name of a column, which the model then does
            not see. A person's rows are drawn together and their gradients are clipped as one;
            `num_examples` and batch sizes count persons. Needs `privacy.max_rows_per_unit`, the
            public number of a person's rows that count in a step. Identifiers stay in this process.
        classes: All labels that may occur, in the order of the model's outputs: public. Default for
            targets that are text: the labels of the test data, sorted; numbers stay as they are.
        collate: Brings rows of different lengths to one public shape: called with a list of one
            row, returns a batch of one, padded to a length that everybody may know.
        out: Results folder; default: a new one under runs/. Needed under torchrun, the same for all
            processes.
        resume: Continue the run in `out`, with the same arguments.
        on_evaluation: Called with every row of the history as it is written: public values only.
        should_stop: Called with the number of steps done. True ends the run there, to be resumed
            later; "finish" or `dpcsgp.Stop.FINISH` makes it the last step: polish rounds follow.
        allow_divergence: Run even if gossip is known to diverge with these settings.
        verbose: Print the plan, lines of progress and the outcome.

    Returns:
        Models, verified eps, and everything else that the run left in its folder.

    Raises:
        DpcsgpError: for what cannot be trained privately, before anything is released.
        DivergenceError: if the models became infinite.
        KeyboardInterrupt: after Ctrl-C; the step is finished and everything saved first.
    """
    environment, nodes = ProcessEnvironment.from_environment(), node_list(node_data)
    watch = named_callback("on_evaluation", on_evaluation)
    stop = named_callback("should_stop", should_stop)
    # Settings and model first: they are refused before large data are read.
    started = _started(out, resume)
    module, whole = settle(model, nodes, config, settings, epsilon, delta, started)
    if environment is None or environment.rank == 0:
        check_trackers(whole.run.trackers)
    cap = whole.privacy.max_rows_per_unit
    clean = copy.deepcopy(module)  # what is handed out has never seen an example
    loss_function, wanted = loss_and_metrics(loss, metrics, whole.task.class_weights)
    try:
        nodes, test_data, units = separate_units(unit, nodes, test_data, cap)
        hosted = _hosted(len(nodes), environment)
        data = UserData.collect(
            nodes, hosted, test_data, loss_function, wanted, num_examples,
            whole.run.test_examples, classes, collate, units,
        )  # fmt: skip
        data = data.with_fact(CHOSEN, ", ".join(open_settings(whole)))
        whole = with_epochs(whole, epochs, data.facts.num_examples)
        whole = with_defaults(
            whole, module, data.facts.num_examples, classes=loss == "cross_entropy", started=started
        )
        design, data = _designed(whole, module, data, allow_divergence or resume)
    except RefusedDataError as error:
        _tell_of_refusal(error, whole, out, environment)
        raise
    folder = _folder(whole, out, started, environment)
    warn_about_dominating_noise(design)
    if not resume:
        warn_about_usual_budget(design)
    warn_about_hopeless_noise(design)
    warn_about_clip_norm(whole, module, data.loss, data.test)
    digests = _digests(whole, data)
    warn_about_repeats(digests, folder)

    def start(folder: Path) -> Callable[[dict[str, Any]], None]:
        write_classes(folder, data.classes)
        write_own_facts(folder, design.dim, data.facts.num_examples)
        remember(digests, folder)
        return watch

    request = PreparedRequest(design, data, folder, resume)
    reporter = PlainText() if verbose else Silent()
    hooks = Hooks(reporter=reporter, should_stop=stop, on_start=start, write_page=verbose)
    return _result(_run(request, environment, hooks), clean, data)


def _designed(
    config: Config, module: nn.Module, data: UserData, allow_divergence: bool
) -> tuple[RunDesign, UserData]:
    """Return the checked design, and the data with all that is measured on them."""
    data.connect(module)
    data = data.with_accuracy(module)
    with script_words():
        design = design_run(config, data.facts, allow_divergence, module)
    data.check(module, design.mechanism.expected_batch_sizes)
    return design, data


def _digests(config: Config, data: UserData) -> dict[int, bytes]:
    """Return digests of the data; none for runs without secret noise, which promise nothing."""
    private = config.privacy.noise != "none" and config.privacy.seed is None
    return digests_of(data.parts) if private else {}


def _tell_of_refusal(
    error: RefusedDataError,
    config: Config,
    out: Path | str | None,
    environment: ProcessEnvironment | None,
) -> None:
    """Let the other processes hear that a node's data were refused, and nothing else."""
    if environment is not None and out is not None:
        _run(RefusedRequest(config, error, Path(out)), environment, NO_HOOKS)


def _hosted(num_nodes: int, environment: ProcessEnvironment | None) -> Sequence[int]:
    if environment is None:
        return range(num_nodes)
    return nodes_of_ranks(num_nodes, environment.world_size)[environment.rank]


@script_words()
def _run(request: RunRequest, environment: ProcessEnvironment | None, hooks: Hooks) -> Outcome:
    """Train in this process alone, or with the others that torchrun started."""
    if environment is not None:
        attempt = environment.attempt + 10**6 * next(_starts)
        outcome = run_process(request, replace(environment, attempt=attempt), hooks)
    else:
        outcome = run_simulated(request, hooks)
    if outcome.stop_asked:
        raise KeyboardInterrupt(f"stopped; continue with out={str(outcome.folder)!r}, resume=True")
    return outcome


def load_model(
    results_folder: Path | str, model: nn.Module | None = None, node: int | None = None
) -> nn.Module:
    """Return the trained module of a results folder: the average model, or one node's.

    Models that a config names are built anew. For a model of your own give an instance of it: a
    copy gets the trained parameters; frozen ones and buffers are the instance's.

    Args:
        results_folder: what a run left.
        model: an instance of the class that was trained; None: a model that the config names.
        node: whose model, by its number in the run; None: the average of all nodes. A machine that
            shares no disk with the others keeps the models of its own nodes.

    Raises:
        DataError: if the folder holds no such model.
        ModelError: if the given module is another one than was trained.
    """
    folder = Path(results_folder)
    if not (folder / "config.toml").exists():
        raise DataError(f"{folder} is not a results folder: config.toml is missing")
    config = load_config(folder / "config.toml")
    if model is None:
        own = config.task.model.startswith("own:")
        if (folder / "federation.toml").exists() and not own:
            model = _model_of_roster(folder / "federation.toml")
        elif config.task.name == "own":
            raise ModelError(
                f"{folder} holds a model of your own ({config.task.model.split(':')[1]}), and only "
                "its parameters are kept: load_model(folder, model) with an instance of it"
            )
        else:
            facts = declared_facts(config)
            model = build_model(config.task.model, facts.input_shape, facts.num_classes)
    elif config.task.model.startswith("own:"):
        model = uncompiled(model) if isinstance(model, nn.Module) else model
        refuse_other_model(folder, config, model)
    return filled_module(model, stored_model(folder, config, node))


def _model_of_roster(path: Path) -> nn.Module:
    """Return the model that the parties of a federation started from."""
    from dpcsgp.federation.agreement import initial_module
    from dpcsgp.federation.roster import Roster

    roster = Roster.load(path)
    return initial_module(roster.config, roster.data)


@script_words()
def _started(out: Path | str | None, resume: bool) -> Config | None:
    """Return the settings of the run that is to be continued; None: a new one."""
    if not resume:
        return None
    if out is None:
        raise ConfigError("out: name the results folder when resuming")
    return ResultsFolder.reopen(Path(out))[1]


@script_words()
def _folder(
    config: Config,
    out: Path | str | None,
    started: Config | None,
    environment: ProcessEnvironment | None,
) -> Path:
    """Return the results folder, or refuse one that holds another run."""
    if out is None:
        if environment is not None:
            raise ConfigError(
                "out: name the results folder under torchrun, the same for all processes"
            )
        return new_folder(config)
    folder = Path(out)
    if started is None:
        if environment is None and (folder / "config.toml").exists():
            raise ConfigError(
                f"out = {folder} already holds a run; continue it with resume=True, or name "
                "another folder"
            )
        return folder
    before, now = started.flat(), config.flat()
    for name, value in now.items():
        if before[name] != value and name not in MACHINE_SETTINGS:
            raise ConfigError(
                f"resume: {name} = {value!r}, but {folder} was started with {before[name]!r}; "
                "continue with the same settings, or start a new run in another folder (both "
                "ledgers then count)"
            )
    refuse_changed_settings(folder, started)
    return folder


def _result(outcome: Outcome, module: nn.Module, data: UserData) -> Result:
    """Collect what the run left in its folder and in this process, unless it diverged."""
    folder = outcome.folder
    if outcome.progress.ending is Ending.DIVERGED:
        raise DivergenceError(
            f"{outcome.progress.stopped_because}; lower algorithm.learning_rate. "
            f"Results so far: {folder}"
        )
    return Result(
        folder=folder,
        summary=outcome.summary,
        history=read_rows(folder / "metrics.jsonl"),
        nodes=tuple(outcome.run.network.nodes),
        _module=module,
        _models_ND=outcome.run.algorithm.model(outcome.progress.state),
        _average_D=load_file(folder / "model.safetensors").get("average_model"),
        classes=data.classes,
        _arguments=example_arguments(module, data.form.inputs),
    )
