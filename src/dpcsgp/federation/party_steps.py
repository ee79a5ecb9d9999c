"""The steps of one party under one version of its roster, from its checkpoint to the handing over.

The loop is that of `training.train`; what a party adds is asked before every step (`Gate`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import final

from dpcsgp.algorithms.lagged_dp_csgp import LaggedDPCSGP
from dpcsgp.errors import ConfigError, WaitStoppedError, WireError
from dpcsgp.federation.late_gradients import BackgroundGradients, lateness
from dpcsgp.federation.party_network import PartyNetwork
from dpcsgp.federation.party_pairs import PartyPairs
from dpcsgp.federation.party_request import PreparedParty, leaves
from dpcsgp.federation.party_status import StatusKeeper
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.rounds import Rounds
from dpcsgp.federation.succession import peers_of, refuse_later_frames, remedy_of_round
from dpcsgp.federation.version_start import begin_version, starts_of
from dpcsgp.records.checkpoint import Checkpoint
from dpcsgp.records.ending import Ending, Stop
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.wording import standing, standing_at
from dpcsgp.runtime.reporting import ShowStanding
from dpcsgp.runtime.session import newest_checkpoint
from dpcsgp.runtime.signals import StopSignal
from dpcsgp.training import Progress, Run, record, train

log = logging.getLogger(__name__)


@final
@dataclass
class Gate:
    """Asked before every step: meets the receivers before the first new release, then stops.

    A party that was restored from an older backup is recognised by what its receivers hold. With
    shared noise, everybody's first notice is awaited too. Steps whose release was kept need nobody:
    the others may have left.

    Attributes:
        run: the parts.
        network: as this party sees it.
        stop: what a signal or the caller asks for.
        keeper: of the status.
        prepared: the checked request.
        pairs: the partners in shared noise, if there are any.
        say: tells the operator one sentence.
        met: whether the receivers have been met since this start.
    """

    run: Run
    network: PartyNetwork
    stop: StopSignal
    keeper: StatusKeeper
    prepared: PreparedParty
    pairs: PartyPairs | None = None
    say: Callable[[str], None] = lambda text: None
    met: bool = False

    def __call__(self, step: int) -> Stop | None:
        """Return whether to stop before this step."""
        if self._next_version_begins(step):
            return Stop.PAUSE
        if not self.met and not self._is_made(step):
            self._meet(step)
        wanted = self.stop.is_set(step)
        if wanted is Stop.FINISH:
            raise ConfigError(
                f'should_stop returned "finish" at step {step}: the roster fixes the number of '
                "steps, because the others wait for this party's messages; return True to stop and "
                "go on later"
            )
        return wanted

    def _next_version_begins(self, step: int) -> bool:
        """Say whether the version ends here: as planned, or where no release is left to be used."""
        rounds = self.prepared.rounds
        if rounds.until is None:
            return False
        return step >= rounds.last_step or (self.prepared.request.cut and not self._is_made(step))

    def _is_made(self, step: int) -> bool:
        """Say whether nothing has to be drawn for a step: an earlier start has seen to it."""
        late, kept = self.run.late, self.run.gradients.kept
        if isinstance(late, BackgroundGradients):
            return late.is_played(step)
        return kept is not None and step in kept.steps_from(step)

    def _meet(self, step: int) -> None:
        """Wait until every receiver has said what it holds, and all partners have told a key."""
        keeper = self.keeper
        if keeper.standing is None:
            keeper.standing = standing_at(self.run, step)
            keeper.releases = sum(self.run.gradients.num_releases())
            keeper.rows = self.run.recorder.rows
        keeper.phase = "meeting the others"
        self.network.meet_receivers()
        if self.pairs is not None:
            peers, missing = peers_of(keeper.roster), self.pairs.missing
            self.network.wait_for(lambda: [peers[node] for node in missing(step)], "first notice")
        self.met = True
        keeper.phase = "training"


def to_the_end(folder: ResultsFolder, gate: Gate, show: ShowStanding) -> Progress:
    """Train, then stay until every receiver has all messages.

    Args:
        folder: the results folder.
        gate: the run, its network and its status, and who asks for a stop.
        show: is told where the run stands.
    """
    prepared, run, network, keeper = gate.prepared, gate.run, gate.network, gate.keeper
    request, rounds = prepared.request, prepared.rounds
    _show_waits(keeper, show)
    if request.cut:
        refuse_later_frames(network, rounds)
        network.stop()  # what is there is used, and nothing is waited for
    if request.roster.history:
        keeper.phase = "beginning the version"
        starts = starts_of(folder, request.roster, prepared.design.config)
        stopped = begin_version(run, network, rounds, request.party.name, starts, keeper)
        if stopped is not None:
            return stopped
    progress = _trained(gate, rounds, show)
    cut_off = rounds.until is not None and progress.state.step == rounds.last_step
    waits = cut_off and not request.cut and progress.ending is Ending.INTERRUPTED
    if waits and not _settled(gate, progress):
        return progress
    if leaves(request) and cut_off:
        progress.ending = Ending.COMPLETED
        progress.detail = f": left after round {rounds.end}, as the roster says"
    if progress.ending is Ending.COMPLETED:
        keeper.phase = "handing over"
        try:
            network.finish(gate.say)
        except WaitStoppedError:
            progress.ending = Ending.INTERRUPTED
            names = ", ".join(network.waiting_for)
            progress.detail = f": trained to the end, {names} has not confirmed the last messages"
    return progress


def _trained(gate: Gate, rounds: Rounds, show: ShowStanding) -> Progress:
    """Train from the newest checkpoint that leads to the end of this version."""
    run, keeper = gate.run, gate.keeper

    def watch(progress: Progress) -> None:
        keeper.standing = standing(run, progress)
        keeper.releases, keeper.rows = sum(run.gradients.num_releases()), run.recorder.rows
        keeper.phase = "polishing" if progress.rounds_polished else "training"
        show(keeper.standing)

    with lateness(run), _naming_parties(keeper.roster):
        progress = train(run, watch, gate, _checkpoint_before(run, rounds))
    keeper.standing = standing(run, progress)  # with the last evaluation
    return progress


def _settled(gate: Gate, progress: Progress) -> bool:
    """Take what is under way when a version ends before its plan; say whether all of it came.

    Checkpoints of the version are left as they are: it may end at another round after all.
    """
    run, network = gate.run, gate.network
    if not isinstance(run.algorithm, LaggedDPCSGP):  # in step nothing is
        return True
    gate.keeper.phase = "ending the version"
    try:
        with _naming_parties(gate.keeper.roster):
            progress.state = run.algorithm.settle(progress.state, network, run.public)
    except WaitStoppedError:
        names = ", ".join(network.waiting_for)
        progress.detail = f": the last messages of {names} before the next version have not come"
        return False
    run.recorder.keep_until(progress.state.step)
    record(run, progress, final=True)
    return True


@contextmanager
def _naming_parties(roster: Roster) -> Iterator[None]:
    """Say by name whose frame was refused, in the error and on the status page."""
    try:
        yield
    except WireError as error:
        if error.sender is not None:
            error.args = (f"party '{roster.parties[error.sender].name}': {error}",)
        log.error("%s", error)
        raise


def _show_waits(keeper: StatusKeeper, show: ShowStanding) -> None:
    def say_wait(names: tuple[str, ...]) -> None:
        if keeper.standing is not None:
            show(replace(keeper.standing, waiting_for=names))

    keeper.on_wait = say_wait


def _checkpoint_before(run: Run, rounds: Rounds) -> Checkpoint | None:
    """Return the newest checkpoint from which the last step of this version can be reached."""
    assert run.checkpoints is not None
    newest = newest_checkpoint(run)
    if newest is None or newest.step <= rounds.last_step:
        return newest
    steps = [s for s in run.checkpoints.complete_steps() if s <= rounds.last_step]
    if not steps:
        made, every = newest.step, rounds.design.config.algorithm.gossip_every
        raise ConfigError(
            f"this party has made step {made} already, and the next version of the roster begins "
            f"after step {rounds.last_step} (round {rounds.end}); "
            + remedy_of_round(rounds.roster, run.network.nodes[0], -(-made // every))
        )
    return run.checkpoints.load(steps[-1])
