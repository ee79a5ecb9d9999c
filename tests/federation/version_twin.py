"""What a simulation makes of the turns that parties have on disk, from version to version.

Every version is played by its own turns up to the round at which the next one takes effect; what is
under way is taken then, and gossip starts anew from the models: the same, to the last bit.

Legend: N nodes, D coordinates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from amended import SEED, party
from torch import Tensor

from dpcsgp.algorithms.lagged_dp_csgp import LaggedDPCSGP
from dpcsgp.config import change_config
from dpcsgp.federation.agreement import examine
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.run_place import JOURNAL, home_of
from dpcsgp.federation.run_pointers import latest_place
from dpcsgp.federation.turn_log import TURNS, PartyTurn
from dpcsgp.network import Simulator
from dpcsgp.network.late_simulator import LateSimulator
from dpcsgp.network.virtual_time import NO_GRADIENT, Timeline, Turn
from dpcsgp.records.checkpoint import Checkpoint
from dpcsgp.runs.build import build_run
from dpcsgp.runs.data_files import TableForm, load_examples
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.simulated_lateness import with_lateness
from dpcsgp.runs.user_data import UserData
from dpcsgp.runs.user_settings import loss_and_metrics
from dpcsgp.training import Progress, Run, train

_PENDING = "pending_ND"


def turns_of(root: Path, name: str, roster: Roster) -> list[PartyTurn]:
    """Return what a party has written down under a version, by round from its first one on."""
    path = home_of(latest_place(party(root, name)), roster) / JOURNAL / TURNS
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        PartyTurn(tuple(credits), gradient, tuple(ahead))
        for _, credits, gradient, ahead, _ in map(json.loads, lines)
    ]


def turns_until(root: Path, name: str, roster: Roster, until: Roster | None) -> list[PartyTurn]:
    """Return the turns of a party that count: those before the next version begins."""
    found = turns_of(root, name, roster)
    return found if until is None else found[: until.history[-1].rounds - first_round(roster)]


def first_round(roster: Roster) -> int:
    return roster.history[-1].rounds if roster.history else 0


@dataclass(frozen=True)
class Played:
    """How a version ended: models, the optimizer's memory, and gradients not put in, by name."""

    models: Mapping[str, Tensor]
    memory: Mapping[str, Mapping[str, Tensor]]
    pending: Mapping[str, Tensor]


def play(root: Path, versions: Sequence[Roster], most: int | None = None) -> list[Played]:
    """Return how each of these versions ends, by the turns on disk; only so many at most."""
    found: list[Played] = []
    for place, roster in enumerate(versions[:most]):
        until = versions[place + 1] if place + 1 < len(versions) else None
        # A release may be put in under the next version only.
        used = {
            card.name: {
                turn.gradient
                for each in versions[place:]
                for turn in turns_of(root, card.name, each)
            }
            for card in roster.parties
        }
        before = found[-1] if found else None
        found.append(_played(root, roster, until, before, used))
    return found


def _played(
    root: Path,
    roster: Roster,
    until: Roster | None,
    before: Played | None,
    used: Mapping[str, set[int]],
) -> Played:
    names = [card.name for card in roster.parties]
    run = _run(root, roster, until, used)
    start = None if before is None else _start(run, roster, before)
    last = roster.config.algorithm.steps if until is None else until.history[-1].steps
    progress = train(run, should_stop=lambda step: step >= last and until is not None,
                     resume_from=start)  # fmt: skip
    if until is not None and isinstance(run.algorithm, LaggedDPCSGP):
        progress.state = run.algorithm.settle(progress.state, run.network, run.public)
    run.gradients.ledger.close()
    models_ND = run.algorithm.model(progress.state)
    memory = {
        name: {key: rows_ND[node] for key, rows_ND in progress.memory.items()}
        for node, name in enumerate(names)
    }
    models = dict(zip(names, models_ND, strict=True))
    return Played(models, memory, _pending(run, names, progress))


def _pending(run: Run, names: Sequence[str], progress: Progress) -> dict[str, Tensor]:
    tensors: Mapping[str, Tensor] = {} if run.late is None else run.late.tensors()  # type: ignore[attr-defined]
    rows_ND = tensors.get(_PENDING, torch.zeros_like(run.algorithm.model(progress.state)))
    return dict(zip(names, rows_ND, strict=True))


def _run(root: Path, roster: Roster, until: Roster | None, used: Mapping[str, set[int]]) -> Run:
    config = change_config(roster.config, {"privacy.seed": SEED})
    design = replace(examine(roster).design, config=config)
    folder = ResultsFolder.create(root / f"twin-{roster.version}", config)
    lag = config.network.max_lag
    network = (
        LateSimulator(roster.topology, _timeline(root, roster, until), lag)
        if lag
        else Simulator(roster.topology)
    )
    run = with_lateness(build_run(design, _data(root, roster), network, folder), config)
    if run.late is not None:
        run.late._begun = [used[card.name] for card in roster.parties]  # type: ignore[attr-defined]
    return replace(run, checkpoints=None)


def _timeline(root: Path, roster: Roster, until: Roster | None) -> Timeline:
    """Return the course that the parties really took; nothing stands for earlier rounds."""
    settings = roster.config
    steps, skips = settings.algorithm.steps, settings.network.late_gradients == "skip"
    first, none, turns = first_round(roster), Turn(0.0, (), NO_GRADIENT), []
    for card in roster.parties:
        mine = [
            Turn(
                float(round_),
                turn.credits,
                turn.gradient if skips else (round_ if round_ < steps else NO_GRADIENT),
                turn.ahead,
            )
            for round_, turn in enumerate(turns_until(root, card.name, roster, until), start=first)
        ]
        turns.append((*[none] * first, *mine))
    return Timeline(tuple(turns), (0.0,) * len(turns), steps)


def _data(root: Path, roster: Roster) -> UserData:
    form, sizes = TableForm(input_shape=roster.data.input_shape), roster.facts.num_examples
    parts = [load_examples(str(root / f"{card.name}.npz"), form).data for card in roster.parties]
    test = load_examples(str(root / "test.npz"), form).data
    loss, metrics = loss_and_metrics("cross_entropy", None, roster.config.task.class_weights)
    looked_at = roster.config.run.test_examples
    return UserData.collect(parts, range(len(parts)), test, loss, metrics, sizes, looked_at)


def _start(run: Run, roster: Roster, before: Played) -> Checkpoint:
    """Return how a version begins, as a checkpoint: from the models, or those handed over."""
    names, joined = [card.name for card in roster.parties], roster.newcomers
    told_ND = torch.stack(
        [run.anchor_D if name in joined else before.models[name] for name in names]
    )
    x_ND = told_ND.clone()
    for node, name in enumerate(names):
        senders = [s for s in roster.topology.senders_to(node) if names[s] not in joined]
        if name in joined and senders:
            x_ND[node] = told_ND[senders].double().mean(0).to(x_ND.dtype)
    state: Any = run.algorithm.init(x_ND, run.anchor_D)
    if roster.hands_over:
        assert isinstance(run.algorithm, LaggedDPCSGP)
        state = run.algorithm.told(state, told_ND - run.anchor_D, run.network)
    tensors = {key: value for key, value in state._asdict().items() if isinstance(value, Tensor)}
    for key, zeros_ND in run.optimizer.init(x_ND).items():
        rows = [before.memory.get(name, {}).get(key, zeros_ND[0]) for name in names]
        tensors[key] = torch.stack(rows)
    if run.late is not None:
        zeros_D = torch.zeros_like(run.anchor_D)
        tensors[_PENDING] = torch.stack([before.pending.get(name, zeros_D) for name in names])
    last = roster.history[-1]
    meta = {
        "round": last.rounds,
        "traffic": {**run.network.traffic.as_dict(), "rounds": last.rounds},
        "ledger": run.gradients.ledger.heads(),
        "seconds": 0.0,
    }
    return Checkpoint(last.steps, tensors, meta)
