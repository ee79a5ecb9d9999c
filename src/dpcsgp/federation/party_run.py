"""One party's run of a roster, from consent to its results; the same start goes on after any end.

Everything that can be refused is refused before a folder is made or a byte is sent. Nothing is
released before every receiver has said what it holds from this party.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from torch import nn

from dpcsgp.config import Config, change_config
from dpcsgp.errors import ConfigError, WaitStoppedError
from dpcsgp.federation.agreement import Agreement, examine
from dpcsgp.federation.consent import require_consent
from dpcsgp.federation.contributions import contributions
from dpcsgp.federation.lagged_network import LaggedPartyNetwork
from dpcsgp.federation.late_gradients import gradients_heard, lateness, with_late_gradients
from dpcsgp.federation.party_data import NO_EXAMPLES, OwnExamples, load_own_data
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.party_network import PartyNetwork
from dpcsgp.federation.party_status import StatusKeeper
from dpcsgp.federation.peers import Peer, Self
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.run_place import JOURNAL, STATUS, open_place
from dpcsgp.records.ending import Ending
from dpcsgp.runs.build import build_run
from dpcsgp.runs.data import RunData
from dpcsgp.runs.design import RunDesign, check_device
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.summary import summarise
from dpcsgp.runs.wording import first_metric, standing, standing_at
from dpcsgp.runtime.reporting import ShowStanding
from dpcsgp.runtime.session import NO_HOOKS, Hooks, Outcome, newest_checkpoint, write_page
from dpcsgp.runtime.signals import StopSignal
from dpcsgp.training import Progress, Run, train

PHASE_OF_ENDING: Final = {Ending.COMPLETED: "ended", Ending.INTERRUPTED: "interrupted"}


@final
@dataclass(frozen=True)
class PartyRequest:
    """What one party wants to run.

    Attributes:
        party: its folder.
        roster: what all agreed on.
        examples: its own examples; none for a data set that everybody has.
        out: the results folder; None: inside of the party's folder.
        listen: HOST:PORT to listen on; None: the address of its card.
        device: where gradients are computed.
        seed: of private noise, for experiments: the run is then not private.
        patience: seconds without a sign of life after which a wait fails; 0: wait for ever; None:
            as the roster says.
        model: at its start, where it is not one of the package's.
    """

    party: PartyFolder
    roster: Roster
    examples: OwnExamples = NO_EXAMPLES
    out: Path | None = None
    listen: str | None = None
    device: str = "cpu"
    seed: int | None = None
    patience: float | None = None
    model: nn.Module | None = None

    @property
    def patience_seconds(self) -> float | None:
        """The patience asked for here, or else that of the roster; None: wait for ever."""
        agreed = self.roster.config.network.patience
        if self.patience is not None:
            return self.patience or None
        return None if agreed == "forever" else agreed

    @property
    def node(self) -> int:
        """The party's node."""
        return self.roster.node_of(self.party.name)

    def config(self) -> Config:
        """Return the roster's settings with those of this machine."""
        local: dict[str, Any] = {"run.device": self.device}
        if self.seed is not None:
            local["privacy.seed"] = self.seed
        return change_config(self.roster.config, local)


@final
@dataclass(frozen=True)
class PreparedParty:
    """A request that was checked: consent, roster, data. Nothing was spent or written."""

    request: PartyRequest
    agreement: Agreement
    design: RunDesign
    data: RunData

    @property
    def rounds(self) -> int:
        """Exchanges of the whole plan, polishing included."""
        return self.design.rounds + self.design.config.algorithm.polish_rounds

    def size_of_round(self, round_: int) -> int:
        """Return the public size of every frame of a round in bytes; 0: no such round."""
        design = self.design
        method = design.algorithm if round_ < design.rounds else design.polish
        # Blocks take turns: sizes repeat after all of them.
        turn = round_ % design.config.num_blocks
        size = method.wire_bytes(design.dim, turn + 1) - method.wire_bytes(design.dim, turn)
        return size if round_ < self.rounds else 0


def prepare_party(request: PartyRequest, hooks: Hooks = NO_HOOKS) -> PreparedParty:
    """Check consent, roster and data.

    Raises:
        ConfigError: the party has not approved this roster, it is over, or cannot be run.
        DataError: the data are not those that the roster speaks of.
    """
    require_consent(request.party, request.roster)
    refuse_unsupported(request.roster)
    config = request.config()
    check_device(config.run.device)
    # Computed anew at every start: the file may have changed hands.
    agreement = examine(request.roster, request.model)
    design = replace(agreement.design, config=config)
    with hooks.reporter.downloads() as downloads:
        data = load_own_data(request.roster, request.node, request.examples, design, downloads)
    return PreparedParty(request, agreement, design, data)


def run_party(prepared: PreparedParty, folder: ResultsFolder, hooks: Hooks = NO_HOOKS) -> Outcome:
    """Take part until the end, a stop or an error; results are in the folder in any case.

    Args:
        prepared: the checked request.
        folder: from `results_folder`, which refuses a second folder for one roster.
        hooks: what the caller adds.
    """
    reporter, roster, node = hooks.reporter, prepared.request.roster, prepared.request.node
    reporter.plan(prepared.design)
    on_row = hooks.on_start(folder.path)
    with closing(open_network(prepared, folder.path / JOURNAL)) as network:
        keeper = StatusKeeper(folder.path / STATUS, roster, network, node, prepared.rounds)
        with keeper, StopSignal(_stopper(reporter.say, network), hooks.should_stop) as stop:
            run = _built(prepared, network, folder, on_row)
            with closing(run.gradients.ledger), reporter.progress() as show:
                progress = _to_the_end(run, network, keeper, stop, show)
                summary = _write_results(prepared, folder, run, progress)
                if summary["handed_over"]:
                    run.gradients.forget_all()
            keeper.phase = PHASE_OF_ENDING.get(progress.ending, "failed")
    # Without public test data nothing is measured, and there is nothing to draw.
    measured, _ = first_metric(run.recorder.rows[-1])
    page = write_page(folder.path) if hooks.write_page and measured else None
    reporter.outcome(summary, folder.path, page)
    return Outcome(summary, run, progress, folder.path, stop.asked)


def results_folder(request: PartyRequest) -> ResultsFolder:
    """Return where this run lives, from its first start on."""
    return open_place(request.party, request.roster, request.out, request.config())


def open_network(prepared: PreparedParty, journal: Path) -> PartyNetwork:
    """Open the journal and begin to listen and to call."""
    request, config = prepared.request, prepared.design.config
    words = (
        own_end(request),
        peers_of(request.roster),
        request.roster.topology,
        bytes.fromhex(request.roster.fingerprint),
        journal,
        prepared.size_of_round,
        config.algorithm.steps,
        request.patience_seconds,
    )
    if config.network.max_lag:
        return LaggedPartyNetwork(*words, config.network.max_lag)
    return PartyNetwork(*words)


def own_end(request: PartyRequest) -> Self:
    """Return this party as its own network sees it."""
    card = request.party.card
    listen = None if card.address is None else request.listen or card.address
    certificate = card.certificate_pem.encode()
    return Self(request.node, card.name, request.party.key_pem(), certificate, listen)


def peers_of(roster: Roster) -> list[Peer]:
    """Return all parties as others see them."""
    return [
        Peer(node, card.name, card.certificate_pem.encode(), card.address)
        for node, card in enumerate(roster.parties)
    ]


def refuse_unsupported(roster: Roster) -> None:
    """Refuse settings for which parties would have to agree on more than a roster holds."""
    privacy, algorithm = roster.config.privacy, roster.config.algorithm
    if privacy.max_colluders != "all":
        raise ConfigError(
            f"privacy.max_colluders = {privacy.max_colluders}: parties cannot share noise yet, "
            "because pairs without an edge have no way to agree on a key; have a roster made with "
            'privacy.max_colluders = "all"'
        )
    if roster.config.method.blocks and algorithm.block_order == "random":
        raise ConfigError(
            'algorithm.block_order = "random": parties need to know the size of every message '
            'beforehand; have a roster made with algorithm.block_order = "round-robin"'
        )


def _stopper(say: Callable[[str], None], network: PartyNetwork) -> Callable[[str], None]:
    """Return what hears of a signal: a wait for others ends as well."""

    def stop(text: str) -> None:
        network.stop()
        say(text)

    return stop


def _built(
    prepared: PreparedParty,
    network: PartyNetwork,
    folder: ResultsFolder,
    on_row: Callable[[dict[str, Any]], None],
) -> Run:
    """Put the run together; what was sent is forgotten once no checkpoint leads back to it."""
    run = build_run(
        prepared.design,
        prepared.data,
        network,
        folder,
        keep_all_releases=True,
        on_row=on_row,
    )
    every = prepared.design.config.algorithm.gossip_every
    return replace(
        with_late_gradients(run, prepared.design, prepared.data),
        hosts_all=False,
        on_saved=lambda oldest: network.forget_before(oldest // every),
    )


def _to_the_end(
    run: Run, network: PartyNetwork, keeper: StatusKeeper, stop: StopSignal, show: ShowStanding
) -> Progress:
    """Train, then stay until every receiver has all messages."""

    def watch(progress: Progress) -> None:
        keeper.standing = standing(run, progress)
        keeper.phase = "polishing" if progress.rounds_polished else "training"
        show(keeper.standing)

    def say_wait(names: tuple[str, ...]) -> None:
        if keeper.standing is not None:
            show(replace(keeper.standing, waiting_for=names))

    keeper.on_wait = say_wait
    checkpoint = newest_checkpoint(run)
    with lateness(run):
        progress = train(run, watch, _Gate(run, network, stop, keeper), checkpoint)
    if progress.ending is Ending.COMPLETED:
        keeper.phase = "handing over"
        try:
            network.finish()
        except WaitStoppedError:
            progress.ending = Ending.INTERRUPTED
            progress.detail = ": trained to the end, but others still lack the last messages"
    return progress


@final
@dataclass
class _Gate:
    """Asked before every step: meets the receivers before the first new release, then stops.

    A party that was restored from an older backup is recognised by what its receivers hold. Steps
    whose release was kept need nobody: the others may have left.
    """

    run: Run
    network: PartyNetwork
    stop: StopSignal
    keeper: StatusKeeper
    met: bool = False

    def __call__(self, step: int) -> bool:
        kept = self.run.gradients.kept
        if not self.met and kept is not None and not kept.steps_from(step):
            if self.keeper.standing is None:
                self.keeper.standing = standing_at(self.run, step)
            self.keeper.phase = "meeting the others"
            self.network.meet_receivers()
            self.met = True
            self.keeper.phase = "training"
        return self.stop.is_set(step)


def _write_results(
    prepared: PreparedParty, folder: ResultsFolder, run: Run, progress: Progress
) -> dict[str, Any]:
    """Write the own model, then the summary, which says who contributed."""
    models_ND = run.algorithm.model(progress.state)
    folder.write_model(None, models_ND, run.network.nodes)
    summary = {**summarise(prepared.design, run, progress), **_own_part(prepared, run, progress)}
    folder.write_summary(summary)
    return summary


def _own_part(prepared: PreparedParty, run: Run, progress: Progress) -> dict[str, Any]:
    """Return what a party's summary has beside that of a run: its own promise, and the others."""
    roster, node = prepared.request.roster, prepared.request.node
    promise = roster.parties[node].promised
    rounds = run.network.traffic.rounds
    heard = contributions(
        roster, node, rounds, prepared.rounds, gradients_heard(run, progress.state)
    )
    return {
        "party": roster.parties[node].name,
        "node": node,
        "federation": roster.id,
        "version": roster.version,
        "fingerprint": roster.fingerprint,
        "epsilon_claimed": promise.epsilon,
        "delta": promise.delta,
        "rounds": rounds,
        "max_lag": roster.config.network.max_lag,
        "late_gradients": roster.config.network.late_gradients,
        "waiting_share": getattr(run.network, "waiting_share", None),
        "rounds_planned": prepared.rounds,
        "contributions": [asdict(each) for each in heard],
        # Every receiver has every message: this party is needed no more.
        "handed_over": progress.ending is Ending.COMPLETED,
    }
