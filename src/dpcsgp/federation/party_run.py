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
from dpcsgp.federation.notice_board import NoticeBoard
from dpcsgp.federation.party_data import NO_EXAMPLES, OwnExamples, load_own_data
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.party_network import PartyNetwork
from dpcsgp.federation.party_pairs import PartyPairs
from dpcsgp.federation.party_status import StatusKeeper
from dpcsgp.federation.peers import Peer, Self
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.run_place import JOURNAL, NOTICES, STATUS, open_place
from dpcsgp.federation.status_page import PageAddress, opened_page
from dpcsgp.records.ending import Ending, Stop
from dpcsgp.records.trackers import Trackers, check_trackers
from dpcsgp.runs.build import build_run
from dpcsgp.runs.data import RunData
from dpcsgp.runs.design import RunDesign, check_device
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.summary import summarise
from dpcsgp.runs.wording import first_metric, standing, standing_at
from dpcsgp.runtime.reporting import ShowStanding
from dpcsgp.runtime.session import (
    NO_HOOKS,
    Hooks,
    Outcome,
    also_tracked,
    newest_checkpoint,
    write_page,
)
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
        patience: seconds without a sign of life after which a wait fails; None: wait for ever.
        model: at its start, where it is not one of the package's.
        page: where a page about the run listens; None: there is none.
        trackers: where this party's evaluations are shown too; a roster has no say in it.
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
    page: PageAddress | None = None
    trackers: tuple[str, ...] = ()

    @property
    def node(self) -> int:
        """The party's node."""
        return self.roster.node_of(self.party.name)

    def config(self) -> Config:
        """Return the roster's settings with those of this machine."""
        # What a roster says about trackers is nobody else's business.
        local: dict[str, Any] = {"run.device": self.device, "run.trackers": list(self.trackers)}
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
    check_trackers(config.run.trackers)
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
    config = prepared.design.config
    trackers = Trackers(config.run.trackers, folder.path, folder.run_id, config.flat())
    on_row = also_tracked(hooks.on_start(folder.path), trackers)
    board = _notice_board(prepared, folder)
    with (
        # The page first: a port in use is refused before anybody is called.
        opened_page(prepared.request.page) as shown,
        closing(open_network(prepared, folder.path / JOURNAL, board)) as network,
    ):
        keeper = StatusKeeper(folder.path / STATUS, roster, network, node, prepared.rounds)
        if shown is not None:
            keeper.page = shown.url
            shown.show(lambda: keeper.latest)
            reporter.say(f"status page: {shown.url}")
        with keeper, StopSignal(_stopper(reporter.say, network), hooks.should_stop) as stop:
            pairs = _pairs(prepared, network, board)
            run = _built(prepared, network, folder, pairs, on_row)
            with closing(run.gradients.ledger), trackers, reporter.progress() as show:
                gate = _Gate(run, network, stop, keeper, pairs)
                progress = _to_the_end(run, network, keeper, gate, show)
                summary = _write_results(prepared, folder, run, progress)
                trackers.close(progress.stopped_because)
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


def open_network(
    prepared: PreparedParty, journal: Path, board: NoticeBoard | None = None
) -> PartyNetwork:
    """Open the journal and begin to listen and to call."""
    request = prepared.request
    return PartyNetwork(
        own_end(request),
        peers_of(request.roster),
        request.roster.topology,
        bytes.fromhex(request.roster.fingerprint),
        journal,
        prepared.size_of_round,
        prepared.design.config.algorithm.steps,
        request.patience,
        notices=board,
    )


def _notice_board(prepared: PreparedParty, folder: ResultsFolder) -> NoticeBoard | None:
    """Return where notices of starts are kept; None: noise is independent."""
    if prepared.design.mechanism.shared is None:
        return None
    return NoticeBoard(folder.path / NOTICES, prepared.request.roster, prepared.request.node)


def _pairs(
    prepared: PreparedParty, network: PartyNetwork, board: NoticeBoard | None
) -> PartyPairs | None:
    """Return the partners of this party in shared noise, if it has any."""
    if board is None:
        return None
    request = prepared.request
    return PartyPairs(request.party, request.roster, board, network.pass_on)


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
    algorithm = roster.config.algorithm
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
    pairs: PartyPairs | None,
    on_row: Callable[[dict[str, Any]], None],
) -> Run:
    """Put the run together; what was sent is forgotten once no checkpoint leads back to it."""
    run = build_run(
        prepared.design,
        prepared.data,
        network,
        folder,
        keep_all_releases=True,
        partners=pairs,
        on_row=on_row,
    )
    every = prepared.design.config.algorithm.gossip_every
    return replace(
        run,
        hosts_all=False,
        on_saved=lambda oldest: network.forget_before(oldest // every),
    )


def _to_the_end(
    run: Run, network: PartyNetwork, keeper: StatusKeeper, gate: _Gate, show: ShowStanding
) -> Progress:
    """Train, then stay until every receiver has all messages."""

    def watch(progress: Progress) -> None:
        keeper.standing = standing(run, progress)
        keeper.releases, keeper.rows = sum(run.gradients.num_releases()), run.recorder.rows
        keeper.phase = "polishing" if progress.rounds_polished else "training"
        show(keeper.standing)

    def say_wait(names: tuple[str, ...]) -> None:
        if keeper.standing is not None:
            show(replace(keeper.standing, waiting_for=names))

    keeper.on_wait = say_wait
    checkpoint = newest_checkpoint(run)
    progress = train(run, watch, gate, checkpoint)
    keeper.standing = standing(run, progress)  # with the last evaluation
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

    A party that was restored from an older backup is recognised by what its receivers hold. With
    shared noise, everybody's first notice is awaited too. Steps whose release was kept need nobody:
    the others may have left.
    """

    run: Run
    network: PartyNetwork
    stop: StopSignal
    keeper: StatusKeeper
    pairs: PartyPairs | None = None
    met: bool = False

    def __call__(self, step: int) -> Stop | None:
        kept = self.run.gradients.kept
        if not self.met and kept is not None and not kept.steps_from(step):
            if self.keeper.standing is None:
                self.keeper.standing = standing_at(self.run, step)
                self.keeper.releases = sum(self.run.gradients.num_releases())
                self.keeper.rows = self.run.recorder.rows
            self.keeper.phase = "meeting the others"
            self.network.meet_receivers()
            if self.pairs is not None:
                peers, missing = peers_of(self.keeper.roster), self.pairs.missing
                self.network.wait_for(
                    lambda: [peers[node] for node in missing(step)], "first notice"
                )
            self.met = True
            self.keeper.phase = "training"
        wanted = self.stop.is_set(step)
        if wanted is Stop.FINISH:
            raise ConfigError(
                f'should_stop returned "finish" at step {step}: the roster fixes the number of '
                "steps, because the others wait for this party's messages; return True to stop and "
                "go on later"
            )
        return wanted


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
    heard = contributions(roster, node, run.network.traffic.rounds, prepared.rounds)
    return {
        "party": roster.parties[node].name,
        "node": node,
        "federation": roster.id,
        "version": roster.version,
        "fingerprint": roster.fingerprint,
        "epsilon_claimed": promise.epsilon,
        "delta": promise.delta,
        "rounds": run.network.traffic.rounds,
        "rounds_planned": prepared.rounds,
        "contributions": [asdict(each) for each in heard],
        # Every receiver has every message: this party is needed no more.
        "handed_over": progress.ending is Ending.COMPLETED,
    }
