"""How a later version of a roster begins: from the models as they are, with the ledger as it is.

    last round of the old version -> own model kept in `start/` -> network of the new version
    -> everybody's model to everybody, where somebody joined or few rounds are left
    -> first checkpoint -> training

Gossip starts anew: weights at one, the anchor at the public initial model, public copies at zero or
at what was handed over. So models need not fit together, and every party may begin with the one it
has. A newcomer takes the mean of the models that its staying senders hand over. A model is
post-processing of releases that are in the ledgers: handing it over costs nothing.

Whatever is killed in between is done again with the same values: the model in `start/` is written
once, and the frame with it is journaled before it leaves.

Legend: N hosted nodes (here one), S senders heard, B bytes of a frame, D coordinates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dpcsgp.algorithms.error_feedback import PublicCopies
from dpcsgp.algorithms.lagged_dp_csgp import LaggedDPCSGP
from dpcsgp.config import Config
from dpcsgp.errors import WaitStoppedError
from dpcsgp.federation.history import released_by
from dpcsgp.federation.late_gradients import BackgroundGradients
from dpcsgp.federation.party_network import PartyNetwork
from dpcsgp.federation.party_status import StatusKeeper
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.rounds import Rounds
from dpcsgp.federation.run_place import START, home_of
from dpcsgp.federation.turn_log import NO_GRADIENT
from dpcsgp.privacy.ledger import LedgerBook
from dpcsgp.records.checkpoint import Checkpoint, CheckpointFolder
from dpcsgp.records.ending import Ending
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.wording import standing
from dpcsgp.training import Progress, Run, record, save_checkpoint

_MODEL: Final = "model_ND"
log = logging.getLogger(__name__)


def starts_of(folder: ResultsFolder, roster: Roster, config: Config) -> CheckpointFolder:
    """Return where the model is kept with which a version begins."""
    place = home_of(folder.path, roster) / START
    return CheckpointFolder(place, folder.run_id, config=config.fingerprint())


def put_in_before(starts: CheckpointFolder, roster: Roster) -> int:
    """Return the last gradient that was put in before a version began; -1: there is none before."""
    if not roster.history:
        return NO_GRADIENT
    step = roster.history[-1].steps
    found = step in starts.complete_steps()
    return int(starts.load(step).meta.get("put_in", step - 1)) if found else step - 1


def keep_start(
    starts: CheckpointFolder,
    roster: Roster,
    model_ND: Tensor,
    progress: Progress | None,
    run: Run,
    ahead: Iterable[int] = (),
) -> None:
    """Write down the model with which this party begins a version.

    Args:
        starts: where.
        roster: the version that begins.
        model_ND: the model.
        progress: how far the version before came; None: this party was not in it.
        run: its parts, or those of the new version.
        ahead: steps from this version's first one on that have been released already.
    """
    last = roster.history[-1]
    late = run.late if progress is not None else None
    memory = progress.memory if progress is not None else {}
    tensors = {_MODEL: model_ND, **memory}
    meta = {
        "traffic": run.network.traffic.as_dict(),
        "seconds": progress.elapsed() if progress is not None else 0.0,
        "reached": progress.state.step if progress is not None else 0,
        "put_in": late.last_put_in(last.rounds)
        if isinstance(late, BackgroundGradients)
        else last.steps - 1,
        "ahead": sorted(ahead),
    }
    starts.save(last.steps, tensors, meta)


def begin_version(
    run: Run,
    network: PartyNetwork,
    rounds: Rounds,
    name: str,
    starts: CheckpointFolder,
    keeper: StatusKeeper,
) -> Progress | None:
    """Make the first checkpoint of a later version, unless there is one.

    Returns:
        None, or where it stands if it was stopped while others' models were awaited.
    """
    assert run.checkpoints is not None
    roster, step = rounds.roster, rounds.roster.history[-1].steps
    if run.checkpoints.complete_steps():
        return None
    if not starts.complete_steps():
        assert name in roster.newcomers  # all others have finished the version before
        start_ND = run.anchor_D.expand(len(run.network.nodes), -1).clone()
        keep_start(starts, roster, start_ND, None, run)
    start = starts.load(step)
    traffic = {**start.meta["traffic"], "rounds": 0}  # a journal of its own
    network.traffic.restore(**traffic)
    model_ND = start.tensors[_MODEL]
    progress = _progress(run, rounds, model_ND, start, None)
    # Something to show, should the others not come.
    run.recorder.keep_until(step - 1)
    record(run, progress)
    keeper.standing = standing(run, progress)
    if roster.hands_over:
        try:
            heard_SD = _handed_over(network, model_ND)
        except WaitStoppedError:
            progress.ending, progress.detail = Ending.INTERRUPTED, f" at step {step}"
            return progress
        if name in roster.newcomers:
            model_ND = _mean_of_staying(network, roster, name, heard_SD, model_ND)
        progress = _progress(run, rounds, model_ND, start, heard_SD)
    save_checkpoint(run, progress)
    log.info("version %d of the roster began at round %d", roster.version, rounds.first)
    return None


def _progress(
    run: Run, rounds: Rounds, model_ND: Tensor, start: Checkpoint, heard_SD: Tensor | None
) -> Progress:
    """Return the first progress of a version: gossip starts anew from the model."""
    state = run.algorithm.init(model_ND.clone(), run.anchor_D)
    state = state._replace(step=start.step, round=rounds.first)
    # Everybody who hears a node was told its model to the last bit.
    if heard_SD is not None and isinstance(run.algorithm, LaggedDPCSGP):
        state = run.algorithm.told(state, heard_SD - run.anchor_D, run.network)
    elif heard_SD is not None and "x_hat_ND" in state._fields:
        copies = PublicCopies.heard(heard_SD - run.anchor_D, run.network)
        state = state._replace(**copies._asdict())
    fresh = run.optimizer.init(model_ND)
    memory = {name: start.tensors.get(name, zero) for name, zero in fresh.items()}
    return Progress(state, memory, seconds=start.meta["seconds"])


def _handed_over(network: PartyNetwork, model_ND: Tensor) -> Tensor:
    """Hand the own model over and return those of all senders (S, D); not finite ones are zero."""
    raw_NB = model_ND.contiguous().numpy().astype("<f4").view(np.uint8)
    models_SD = network.exchange(torch.from_numpy(raw_NB.copy())).numpy().view("<f4")
    heard_SD = torch.from_numpy(models_SD.astype(np.float32))
    for row, sender in enumerate(network.senders):
        if not heard_SD[row].isfinite().all():
            log.warning("node %d handed over a model that is not finite", sender)
            heard_SD[row] = 0.0
    return heard_SD


def _mean_of_staying(
    network: PartyNetwork, roster: Roster, name: str, heard_SD: Tensor, model_ND: Tensor
) -> Tensor:
    """Return the model that a newcomer begins with."""
    names = {row: roster.parties[sender].name for row, sender in enumerate(network.senders)}
    stay = {row: sender for row, sender in names.items() if sender not in roster.newcomers}
    if not stay:
        log.warning("no party that stays sends to %s: it begins with the initial model", name)
        return model_ND
    log.info("%s begins with the models of %s", name, ", ".join(stay.values()))
    return heard_SD[list(stay)].double().mean(0, keepdim=True).to(model_ND.dtype)


def book_lost(folder: ResultsFolder, roster: Roster, node: int, config: Config) -> int:
    """Bring the ledger of a restored party up: whatever it may have released counts as spent.

    By the round that the roster names it has made at most one release per step. Those that its
    ledger lacks get a line now, before anything else can be released.

    Args:
        folder: the party's results folder.
        roster: the version that is to begin.
        node: of the party in it.
        config: settings of this start.

    Returns:
        How many lines were added.
    """
    name = roster.parties[node].name
    if not roster.history or name not in roster.history[-1].restored:
        return 0
    lost = released_by(roster.history, name)
    book = LedgerBook(
        folder.path / "ledger",
        [node],
        folder.run_id,
        config=config.fingerprint(),
        deltas=[roster.parties[node].promised.delta],
        events=[next(iter(lost.values()), None)],
        private=config.privacy.seed is None,
        unit=roster.facts.unit,
        begun_as=folder.ledger_nodes([node]),
    )
    try:
        return book.record_lost(node, lost)
    finally:
        book.close()
