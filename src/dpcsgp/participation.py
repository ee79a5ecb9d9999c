"""Your model, your data, your node: take part in a federation from Python.

`dpcsgp party run` is the same for models that a roster names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import nn

from dpcsgp.api import Result
from dpcsgp.errors import DivergenceError
from dpcsgp.federation.agreement import initial_module
from dpcsgp.federation.party_data import OwnExamples
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.party_request import PartyRequest, as_leaver
from dpcsgp.federation.party_run import prepare_party, results_folder, run_party
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.run_place import finished_summary
from dpcsgp.federation.status_page import PageAddress
from dpcsgp.records.ending import Ending
from dpcsgp.records.metrics import read_rows
from dpcsgp.runs.onnx_export import example_arguments
from dpcsgp.runs.script_words import named_callback
from dpcsgp.runs.user_data import UserData
from dpcsgp.runs.user_settings import built_module
from dpcsgp.runs.user_units import Unit
from dpcsgp.runtime.reporting import PlainText, Silent
from dpcsgp.runtime.session import Hooks, Outcome
from dpcsgp.tasks import LossPerExample
from dpcsgp.tasks.collating import Collate
from dpcsgp.tasks.node_data import NodeData
from dpcsgp.tasks.supervised import OwnMetric

__all__ = ["take_part"]


def take_part(
    roster: Path | str,
    party: Path | str,
    *,
    data: NodeData | str = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    test_data: NodeData | str = None,
    loss: Literal["cross_entropy", "mse"] | LossPerExample | None = None,
    metrics: Mapping[str, OwnMetric] | None = None,
    target: str | Sequence[str] | None = None,
    unit: Unit | None = None,
    collate: Collate | None = None,
    out: Path | str | None = None,
    listen: str | None = None,
    device: str = "cpu",
    seed: int | None = None,
    patience: float | None = None,
    page: int | str | None = None,
    on_evaluation: Callable[[dict[str, Any]], None] | None = None,
    should_stop: Callable[[int], object] | None = None,
    trackers: Sequence[str] = (),
    verbose: bool = False,
) -> Result:
    """Take part in a federation as one of its parties; the same call goes on after any end.

    Args:
        roster: The file that this party has approved.
        party: The party's folder.
        data: Its own examples, as an entry of `node_data` in `train`, or a file as
            `dpcsgp party run --data` takes it. None for a data set that everybody has.
        model: The module at its start, or a function that builds it under the public seed, if the
            roster was made with a model of the parties' own.
        test_data: Public data for evaluation, in the same form.
        loss: The function (outputs, targets) -> one loss per example, where the roster names one of
            the parties' own, with that name. None: the loss that the roster names.
        metrics: As in `train`.
        target: Columns of a table that hold the targets; default: the last ones.
        unit: Whose each row is, where the roster promises privacy to persons: the name of a column
            (of a .npz file: of an array), or one identifier per row. Identifiers stay here.
        collate: As in `train`.
        out: Results folder; default: in the party's folder. One roster has one results folder.
        listen: HOST:PORT to listen on; default: the address on the party's card.
        device: Where gradients are computed.
        seed: For experiments: fixed private noise. The run is then not private.
        patience: Seconds of a peer's silence after which to give up; 0: never; default:
            `network.patience` of the roster.
        page: Port of this machine at which a page and metrics show how it goes; 0: any free one,
            which `dpcsgp party status` names. None: there is none.
        on_evaluation: Called with every row of the history as it is written.
        should_stop: Called with the number of steps done; True ends this start there.
        trackers: Any of "tensorboard", "mlflow", "wandb": this party's evaluations go there too.
        verbose: Print the plan, lines of progress and the outcome.

    Returns:
        The party's own model, its verified eps, and what else is in its results folder.

    Raises:
        DpcsgpError: for what is refused, before anything is released.
        KeyboardInterrupt: after Ctrl-C; everything is saved first.
    """
    agreed = Roster.load(Path(roster))
    request = PartyRequest(
        PartyFolder.open(Path(party)),
        agreed,
        OwnExamples(data, target, test_data, metrics, unit, loss, collate),
        Path(out) if out is not None else None,
        listen,
        device,
        seed,
        patience,
        built_module(model, agreed.config.run.seed) if model is not None else None,
        page=PageAddress.parse(str(page)) if page is not None else None,
        trackers=tuple(trackers),
    )
    watch = named_callback("on_evaluation", on_evaluation)
    hooks = Hooks(
        reporter=PlainText() if verbose else Silent(),
        should_stop=named_callback("should_stop", should_stop),
        on_start=lambda folder: watch,
        write_page=verbose,
    )
    return _result(request, hooks)


def _result(request: PartyRequest, hooks: Hooks) -> Result:
    """Run a party, unless it has ended before; collect what is in its folder."""
    request = as_leaver(request)
    prepared, results = prepare_party(request, hooks), results_folder(request)
    # What is handed out has never seen an example.
    clean = initial_module(request.roster.config, request.roster.data, request.model)
    summary = finished_summary(results, request.roster)
    if summary is None:
        outcome = run_party(prepared, results, hooks)
        _raise_if_ended_early(outcome)
        summary = outcome.summary
    history = read_rows(results.path / "metrics.jsonl")
    models_ND = load_file(results.path / "model.safetensors")["node_models"]
    data = prepared.data if isinstance(prepared.data, UserData) else None
    return Result(
        results.path,
        summary,
        history,
        (request.node,),
        clean,
        models_ND,
        None,
        data.classes if data is not None else None,
        example_arguments(clean, data.form.inputs) if data is not None else None,
    )


def _raise_if_ended_early(outcome: Outcome) -> None:
    if outcome.stop_asked:
        raise KeyboardInterrupt("stopped; the same call goes on")
    if outcome.progress.ending is Ending.DIVERGED:
        raise DivergenceError(f"{outcome.progress.stopped_because}; see {outcome.folder}")
