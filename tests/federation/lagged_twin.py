"""What the simulator makes of the turns that parties have on disk: the same, to the last bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from running import SEED, request_of, results_of
from safetensors.torch import load_file

from dpcsgp.config import change_config
from dpcsgp.federation.party_run import prepare_party
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.run_place import JOURNAL
from dpcsgp.federation.turn_log import TURNS, PartyTurn
from dpcsgp.network.late_simulator import LateSimulator
from dpcsgp.network.virtual_time import NO_GRADIENT, Timeline, Turn
from dpcsgp.privacy import read_ledgers, releases_by_node
from dpcsgp.runs.build import build_run
from dpcsgp.runs.data import load_builtin_data
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.simulated_lateness import with_lateness
from dpcsgp.training import train


def turns_of(root: Path, node: int) -> list[PartyTurn]:
    """Return what a party has written down: frames taken, and gradient, by round."""
    lines = (results_of(root, node) / JOURNAL / TURNS).read_text().splitlines()
    return [
        PartyTurn(tuple(credits), gradient, tuple(ahead))
        for _, credits, gradient, ahead, _ in map(json.loads, lines)
    ]


def timeline_of(root: Path, roster: Roster) -> Timeline:
    """Return the course that the parties really took."""
    steps, skips = roster.config.algorithm.steps, roster.config.network.late_gradients == "skip"
    turns = []
    for node in range(len(roster.parties)):
        found = turns_of(root, node)
        turns.append(
            tuple(
                Turn(
                    float(round_),
                    turn.credits,
                    turn.gradient if skips else (round_ if round_ < steps else NO_GRADIENT),
                    turn.ahead,
                )
                for round_, turn in enumerate(found)
            )
        )
    return Timeline(tuple(turns), (0.0,) * len(turns), steps)


def check_lagged_twin(root: Path, roster: Roster) -> Timeline:
    """Compare models, ledgers and bytes of all parties with a simulation of their own turns."""
    config = change_config(roster.config, {"privacy.seed": SEED})
    prepared, timeline = prepare_party(request_of(root, 0)), timeline_of(root, roster)
    design = prepared.design
    folder = ResultsFolder.create(root / "simulated", config)
    network = LateSimulator(design.topology, timeline, config.network.max_lag)
    data = load_builtin_data(config)  # a party keeps its own share only
    run = with_lateness(build_run(design, data, network, folder), config)
    run = replace(run, checkpoints=None)
    progress = train(run)
    run.gradients.ledger.close()
    models_ND = run.algorithm.model(progress.state)
    releases = releases_by_node(read_ledgers(folder.path / "ledger"))
    for node in range(len(roster.parties)):
        results = results_of(root, node)
        found = load_file(results / "model.safetensors")["node_models"][0]
        assert torch.equal(found, models_ND[node]), node
        assert releases_by_node(read_ledgers(results / "ledger")) == {node: releases[node]}
        summary = json.loads((results / "summary.json").read_bytes())
        assert summary["bytes_per_edge"] == network.traffic.bytes_per_edge
        assert summary["stopped_because"] == "completed" and summary["handed_over"]
    return timeline
