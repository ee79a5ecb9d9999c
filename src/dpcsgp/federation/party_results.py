"""What a party writes at the end of a start: its own model, and a summary of who contributed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dpcsgp.federation.contributions import contributions
from dpcsgp.federation.late_gradients import gradients_heard
from dpcsgp.federation.party_request import PreparedParty
from dpcsgp.federation.succession import told_before
from dpcsgp.records.ending import Ending
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.summary import summarise
from dpcsgp.training import Progress, Run


def write_results(
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
    given = gradients_heard(run, progress.state)
    heard = contributions(
        roster,
        node,
        made,
        rounds.end,
        rounds.first,
        given,
        polished=rounds.until is None,
        settled=not prepared.request.cut,
    )
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
        "max_lag": roster.config.network.max_lag,
        "late_gradients": roster.config.network.late_gradients,
        "waiting_share": getattr(run.network, "waiting_share", None),
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
