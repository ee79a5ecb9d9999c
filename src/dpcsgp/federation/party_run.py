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

from dpcsgp.errors import ConfigError, WaitStoppedError
from dpcsgp.federation.agreement import examine
from dpcsgp.federation.archive import Ended
from dpcsgp.federation.consent import require_consent
from dpcsgp.federation.contributions import contributions
from dpcsgp.federation.party_data import load_own_data
from dpcsgp.federation.party_network import PartyNetwork
from dpcsgp.federation.party_request import PartyRequest, PreparedParty, leaves
from dpcsgp.federation.party_status import StatusKeeper
from dpcsgp.federation.peers import Self
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.rounds import Rounds
from dpcsgp.federation.run_place import (
    JOURNAL,
    STATUS,
    home_of,
    open_place,
    previous_roster,
)
from dpcsgp.federation.succession import (
    archives_of,
    check_own_history,
    moved_on,
    over_here,
    peers_of,
    refuse_later_frames,
    refuse_wrong_history,
    told_before,
)
from dpcsgp.federation.version_start import (
    begin_version,
    book_lost,
    keep_start,
    starts_of,
)
from dpcsgp.records.checkpoint import Checkpoint
from dpcsgp.records.ending import Ending
from dpcsgp.runs.build import build_run
from dpcsgp.runs.design import check_device
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.summary import summarise
from dpcsgp.runs.wording import first_metric, standing, standing_at
from dpcsgp.runtime.reporting import ShowStanding
from dpcsgp.runtime.session import NO_HOOKS, Hooks, OnRow, Outcome, newest_checkpoint, write_page
from dpcsgp.runtime.signals import StopSignal
from dpcsgp.training import Progress, Run, train

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
    reporter = hooks.reporter
    reporter.plan(prepared.design)
    on_row = hooks.on_start(folder.path)
    # A version before this one comes first, as far as it goes.
    outcome = _finish_previous(prepared, folder, hooks, on_row)
    if outcome is None:
        outcome = _run_version(prepared, folder, hooks, on_row)
    # Without public test data nothing is measured, and there is nothing to draw.
    measured, _ = first_metric(outcome.run.recorder.rows[-1])
    page = write_page(folder.path) if hooks.write_page and measured else None
    reporter.outcome(outcome.summary, folder.path, page)
    return outcome


def _run_version(
    prepared: PreparedParty, folder: ResultsFolder, hooks: Hooks, on_row: OnRow
) -> Outcome:
    """Run one version of the roster to its end, or until the next one begins."""
    reporter, roster, node = hooks.reporter, prepared.request.roster, prepared.request.node
    book_lost(folder, roster, node, prepared.design.config)
    with closing(open_network(prepared, folder.path)) as network:
        keeper = StatusKeeper(folder.path / STATUS, roster, network, node, prepared.rounds)
        with keeper, StopSignal(_stopper(reporter.say, network), hooks.should_stop) as stop:
            run = _built(prepared, network, folder, on_row)
            with closing(run.gradients.ledger), reporter.progress() as show:
                progress = _to_the_end(prepared, folder, run, network, keeper, stop, show)
                summary = _write_results(prepared, folder, run, progress)
                if summary["handed_over"]:
                    run.gradients.forget_all()
            keeper.phase = PHASE_OF_ENDING.get(progress.ending, "failed")
    return Outcome(summary, run, progress, folder.path, stop.asked)


def _finish_previous(
    prepared: PreparedParty, folder: ResultsFolder, hooks: Hooks, on_row: OnRow
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
    outcome = _finish_previous(old, place, hooks, on_row)
    if outcome is None:
        outcome = _run_version(old, place, hooks, on_row)
    progress = outcome.progress
    reached = progress.state.step >= old.rounds.last_step
    if outcome.stop_asked or progress.ending is Ending.DIVERGED or not (reached or cut):
        return outcome
    keep_start(starts, roster, outcome.run.algorithm.model(progress.state), progress, outcome.run)
    return None


def results_folder(request: PartyRequest) -> ResultsFolder:
    """Return where this run lives, from its first start on."""
    return open_place(request.party, request.roster, request.out, request.config())


def open_network(prepared: PreparedParty, results: Path) -> PartyNetwork:
    """Open the journal and begin to listen and to call; earlier versions still answer."""
    request, rounds = prepared.request, prepared.rounds
    return PartyNetwork(
        own_end(request),
        peers_of(request.roster),
        request.roster.topology,
        bytes.fromhex(request.roster.fingerprint),
        home_of(results, request.roster) / JOURNAL,
        rounds.size_of_frame,
        prepared.design.config.algorithm.steps,
        request.patience,
        archives=archives_of(request.party, rounds, results, request.model),
        over=over_here(request.roster),
        ended=(
            Ended(moved_on(request.until), rounds.end - rounds.shift) if request.until else None
        ),
    )


def own_end(request: PartyRequest) -> Self:
    """Return this party as its own network sees it."""
    card = request.party.card
    listen = None if card.address is None else request.listen or card.address
    certificate = card.certificate_pem.encode()
    return Self(request.node, card.name, request.party.key_pem(), certificate, listen)


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


def _checkpoint_before(run: Run, rounds: Rounds) -> Checkpoint | None:
    """Return the newest checkpoint from which the last step of this version can be reached."""
    assert run.checkpoints is not None
    newest = newest_checkpoint(run)
    if newest is None or newest.step <= rounds.last_step:
        return newest
    steps = [s for s in run.checkpoints.complete_steps() if s <= rounds.last_step]
    if not steps:
        raise ConfigError(
            f"this party has made step {newest.step} already, and the next version of the roster "
            f"begins after step {rounds.last_step}; have it amended with a later --at-round"
        )
    return run.checkpoints.load(steps[-1])


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
    every, shift = prepared.design.config.algorithm.gossip_every, prepared.rounds.shift
    return replace(
        run,
        hosts_all=False,
        on_saved=lambda oldest: network.forget_before(oldest // every - shift),
    )


def _to_the_end(
    prepared: PreparedParty,
    folder: ResultsFolder,
    run: Run,
    network: PartyNetwork,
    keeper: StatusKeeper,
    stop: StopSignal,
    show: ShowStanding,
) -> Progress:
    """Train, then stay until every receiver has all messages."""
    request, rounds = prepared.request, prepared.rounds

    def watch(progress: Progress) -> None:
        keeper.standing = standing(run, progress)
        keeper.phase = "polishing" if progress.rounds_polished else "training"
        show(keeper.standing)

    def say_wait(names: tuple[str, ...]) -> None:
        if keeper.standing is not None:
            show(replace(keeper.standing, waiting_for=names))

    keeper.on_wait = say_wait
    if request.cut:
        refuse_later_frames(network, rounds)
        network.stop()  # what is there is used, and nothing is waited for
    if request.roster.history:
        keeper.phase = "beginning the version"
        starts = starts_of(folder, request.roster, prepared.design.config)
        stopped = begin_version(run, network, rounds, request.party.name, starts, keeper)
        if stopped is not None:
            return stopped
    gate = _Gate(run, network, stop, keeper, rounds, request.cut)
    progress = train(run, watch, gate, _checkpoint_before(run, rounds))
    if leaves(request) and progress.state.step == rounds.last_step:
        progress.ending = Ending.COMPLETED
        progress.detail = f": left after round {rounds.end}, as the roster says"
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
    rounds: Rounds
    cut: bool
    met: bool = False

    def __call__(self, step: int) -> bool:
        kept = self.run.gradients.kept
        if self.rounds.until is not None:
            # The next version begins here, or wherever nothing released is left to be used.
            used_up = kept is not None and step not in kept.steps_from(step)
            if step >= self.rounds.last_step or (self.cut and used_up):
                return True
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
    own = _own_part(prepared, run, progress, told_before(folder.path, prepared.request.roster))
    summary = {**summarise(prepared.design, run, progress), **own}
    folder.write_summary(summary)
    return summary


def _own_part(
    prepared: PreparedParty, run: Run, progress: Progress, earlier: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return what a party's summary has beside that of a run: its own promise, and the others."""
    roster, node = prepared.request.roster, prepared.request.node
    promise = roster.parties[node].promised
    rounds = prepared.rounds
    made = rounds.made(run.network.traffic.rounds)
    heard = contributions(roster, node, made, rounds.end, rounds.first)
    parts = [asdict(each) for each in heard]
    return {
        "party": roster.parties[node].name,
        "node": node,
        "federation": roster.id,
        "version": roster.version,
        "fingerprint": roster.fingerprint,
        "epsilon_claimed": promise.epsilon,
        "delta": promise.delta,
        "rounds": made,
        "rounds_planned": rounds.end,
        "contributions": parts,
        "versions": [
            *earlier,
            {
                "version": roster.version,
                "fingerprint": roster.fingerprint,
                "first_round": rounds.first,
                "rounds": made,
                "contributions": parts,
            },
        ],
        # Every receiver has every message: this party is needed no more.
        "handed_over": progress.ending is Ending.COMPLETED,
    }
