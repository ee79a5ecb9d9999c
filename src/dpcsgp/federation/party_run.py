"""One party's run of a roster, from consent to its results; the same start goes on after any end.

Everything that can be refused is refused before a folder is made or a byte is sent. Nothing is
released before every receiver has said what it holds from this party.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from dpcsgp.errors import ConfigError, JournalInUseError
from dpcsgp.federation.agreement import examine
from dpcsgp.federation.archive import Ended
from dpcsgp.federation.consent import require_consent
from dpcsgp.federation.lagged_network import LaggedPartyNetwork
from dpcsgp.federation.late_gradients import with_late_gradients
from dpcsgp.federation.notice_board import NoticeBoard
from dpcsgp.federation.party_data import load_own_data
from dpcsgp.federation.party_network import PartyNetwork
from dpcsgp.federation.party_pairs import PartyPairs
from dpcsgp.federation.party_request import PartyRequest, PreparedParty
from dpcsgp.federation.party_results import write_results
from dpcsgp.federation.party_status import StatusKeeper
from dpcsgp.federation.party_steps import Gate, to_the_end
from dpcsgp.federation.peers import Self
from dpcsgp.federation.run_place import (
    JOURNAL,
    home_of,
    open_place,
    previous_roster,
    released_steps,
    spent_in,
)
from dpcsgp.federation.status_file import STATUS, read_status
from dpcsgp.federation.status_page import StatusPage, opened_page
from dpcsgp.federation.succession import (
    archives_of,
    check_own_history,
    moved_on,
    notice_board,
    over_here,
    peers_of,
    refuse_wrong_history,
    steps_ahead,
)
from dpcsgp.federation.version_start import book_lost, keep_start, put_in_before, starts_of
from dpcsgp.records.ending import Ending
from dpcsgp.records.trackers import Trackers, check_trackers
from dpcsgp.runs.build import build_run
from dpcsgp.runs.design import check_device
from dpcsgp.runs.folder import ResultsFolder, write_classes
from dpcsgp.runs.user_data import UserData
from dpcsgp.runtime.session import NO_HOOKS, Hooks, OnRow, Outcome, also_tracked, write_page
from dpcsgp.runtime.signals import StopSignal
from dpcsgp.training import Run

PHASE_OF_ENDING: Final = {Ending.COMPLETED: "ended", Ending.INTERRUPTED: "interrupted"}


def prepare_party(request: PartyRequest, hooks: Hooks = NO_HOOKS) -> PreparedParty:
    """Check consent, roster, its history, and data.

    Raises:
        ConfigError: the party has not approved this roster, it is over, or cannot be run.
        DataError: the data are not those that the roster speaks of.
    """
    require_consent(request.party, request.roster)
    if request.until is None:
        refuse_wrong_history(request.party, request.roster, request.out, request.model)
    return _prepared(request, hooks)


def _prepared(request: PartyRequest, hooks: Hooks) -> PreparedParty:
    """Check roster and data; whoever asks has seen to consent."""
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
    reporter, config = hooks.reporter, prepared.design.config
    reporter.plan(prepared.design)
    if isinstance(prepared.data, UserData):
        write_classes(folder.path, prepared.data.classes)
    trackers = Trackers(config.run.trackers, folder.path, folder.run_id, config.flat())
    on_row = also_tracked(hooks.on_start(folder.path), trackers)
    # The page before anything else: a port in use is refused before anybody is called.
    with trackers, opened_page(prepared.request.page) as shown:
        if shown is not None:
            reporter.say(f"status page: {shown.url}")
        if text := _other_address(prepared.request):
            reporter.say(text)
        # A version before this one comes first, as far as it goes.
        outcome = _finish_previous(prepared, folder, hooks, on_row, shown)
        if outcome is None:
            outcome = _run_version(prepared, folder, hooks, on_row, shown)
        trackers.close(outcome.progress.stopped_because)
    page = write_page(folder.path) if hooks.write_page else None
    reporter.outcome(outcome.summary, folder.path, page)
    return outcome


def _run_version(
    prepared: PreparedParty,
    folder: ResultsFolder,
    hooks: Hooks,
    on_row: OnRow,
    shown: StatusPage | None,
) -> Outcome:
    """Run one version of the roster to its end, or until the next one begins."""
    reporter, roster, node = hooks.reporter, prepared.request.roster, prepared.request.node
    book_lost(folder, roster, node, prepared.design.config)
    board = notice_board(home_of(folder.path, roster), roster, node, prepared.design)
    with _saying_who_runs(prepared, folder.path):
        opened = open_network(prepared, folder.path, board)
    with closing(opened) as network:
        keeper = StatusKeeper(folder.path / STATUS, roster, network, node, prepared.rounds)
        # A start that has no step left to make tells what was spent, too.
        delta = roster.parties[node].promised.delta
        keeper.releases, keeper.epsilon = spent_in(folder.path, delta)
        if shown is not None:
            keeper.page = shown.url
            shown.show(lambda: keeper.latest)
        with keeper, StopSignal(_stopper(reporter.say, network), hooks.should_stop) as stop:
            pairs = _pairs(prepared, network, board)
            run = _built(prepared, network, folder, pairs, on_row)
            with closing(run.gradients.ledger), reporter.progress() as show:
                gate = Gate(run, network, stop, keeper, prepared, pairs, reporter.say)
                progress = to_the_end(folder, gate, show)
                summary = write_results(prepared, folder, run, progress)
                if summary["handed_over"]:
                    run.gradients.forget_all()
            keeper.phase = PHASE_OF_ENDING.get(progress.ending, "failed")
    return Outcome(summary, run, progress, folder.path, stop.asked)


def _finish_previous(
    prepared: PreparedParty,
    folder: ResultsFolder,
    hooks: Hooks,
    on_row: OnRow,
    shown: StatusPage | None,
) -> Outcome | None:
    """Bring the version before this one to its end, and keep the model that this one begins with.

    Returns:
        None if this version can begin; otherwise why the one before ended too early.
    """
    request = prepared.request
    roster, name = request.roster, request.party.name
    starts = starts_of(folder, roster, prepared.design.config)
    if not roster.history or starts.complete_steps():
        return None
    check_own_history(folder.path, roster, name)
    if name in roster.newcomers:
        return None
    before = previous_roster(request.party, roster, folder.path)
    assert before is not None  # `refuse_wrong_history`, before a folder was made
    # Where one version is cut off, those before it are as well: whom they wait for is gone.
    cut = request.cut or roster.history[-1].cut
    old = _prepared(replace(request, roster=before, until=roster, cut=cut), hooks)
    place = open_place(request.party, before, folder.path, old.design.config)
    outcome = _finish_previous(old, place, hooks, on_row, shown)
    if outcome is None:
        outcome = _run_version(old, place, hooks, on_row, shown)
    progress = outcome.progress
    reached = progress.state.step >= old.rounds.last_step
    if outcome.stop_asked or progress.ending is Ending.DIVERGED or not (reached or cut):
        return outcome
    ahead = [step for step in released_steps(folder.path) if step >= roster.history[-1].steps]
    model_ND = outcome.run.algorithm.model(progress.state)
    keep_start(starts, roster, model_ND, progress, outcome.run, ahead)
    return None


def results_folder(request: PartyRequest) -> ResultsFolder:
    """Return where this run lives, from its first start on."""
    return open_place(request.party, request.roster, request.out, request.config())


def open_network(
    prepared: PreparedParty, results: Path, board: NoticeBoard | None = None
) -> PartyNetwork:
    """Open the journal and begin to listen and to call; earlier versions still answer."""
    request, rounds, config = prepared.request, prepared.rounds, prepared.design.config
    words = (
        own_end(request),
        peers_of(request.roster),
        request.roster.topology,
        bytes.fromhex(request.roster.fingerprint),
        home_of(results, request.roster) / JOURNAL,
        rounds.size_of_frame,
        config.algorithm.steps,
        request.patience_seconds,
    )
    until = request.until
    archives = archives_of(request.party, rounds, results, request.model)
    over = over_here(request.roster)
    ended = Ended(moved_on(until), rounds.end - rounds.shift) if until else None
    if not config.network.max_lag:
        return PartyNetwork(*words, notices=board, archives=archives, over=over, ended=ended)
    return LaggedPartyNetwork(
        *words,
        max_lag=config.network.max_lag,
        notices=board,
        archives=archives,
        over=over,
        ended=ended,
        first=rounds.first,
        hands_over=request.roster.hands_over,
    )


@contextmanager
def _saying_who_runs(prepared: PreparedParty, results: Path) -> Iterator[None]:
    """Where the journal is in use, say which version runs here, in which process."""
    request = prepared.request
    wanted = request.until or request.roster
    try:
        yield
    except JournalInUseError as error:
        try:
            found = read_status(results / STATUS)
        except ConfigError:
            raise error from None
        if not found["running"]:
            raise
        again = (
            "stop it with Ctrl-C, then run this line again"
            if found["version"] < wanted.version
            else "leave it alone, it need not be started twice (`dpcsgp party status` shows it)"
        )
        raise JournalInUseError(
            f"version {found['version']} of this federation is running here (pid {found['pid']}); "
            + again
        ) from None


def _pairs(
    prepared: PreparedParty, network: PartyNetwork, board: NoticeBoard | None
) -> PartyPairs | None:
    """Return the partners of this party in shared noise, if it has any."""
    if board is None:
        return None
    request = prepared.request
    return PartyPairs(request.party, request.roster, board, network.pass_on, network.max_lag)


def own_end(request: PartyRequest) -> Self:
    """Return this party as its own network sees it."""
    card = request.party.card
    listen = None if card.address is None else request.listen or card.address
    certificate, key, roster = (
        card.certificate_pem.encode(),
        request.party.key_pem(),
        request.roster,
    )
    is_new = bool(roster.history) and card.name not in roster.history[-1].parties
    hint = "a party that still runs an earlier version of the roster cannot know this one"
    return Self(request.node, card.name, key, certificate, listen, hint if is_new else "")


def _other_address(request: PartyRequest) -> str:
    """Say that the others call another address than the one listened on; "": they do not."""
    called, listen = request.party.card.address, request.listen
    if called is None or listen in (None, called):
        return ""
    return (
        f"listening on {listen}; the others call {called}, the address on this party's card: "
        "calls have to be forwarded from there"
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
    on_row: OnRow,
) -> Run:
    """Put the run together; what was sent is forgotten once no checkpoint leads back to it."""
    run = build_run(
        prepared.design,
        prepared.data,
        network,
        folder,
        checkpoint_reach=steps_ahead(prepared.request.roster, prepared.request.node),
        keep_all_releases=True,
        partners=pairs,
        is_promised=True,
        on_row=on_row,
    )
    every, shift = prepared.design.config.algorithm.gossip_every, prepared.rounds.shift
    roster = prepared.request.roster
    before = put_in_before(starts_of(folder, roster, prepared.design.config), roster)
    return replace(
        with_late_gradients(run, prepared.design, prepared.data, before),
        hosts_all=False,
        on_saved=lambda oldest: network.forget_before(oldest // every - shift),
    )
