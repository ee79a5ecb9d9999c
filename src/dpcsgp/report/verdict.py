"""The page's first sentences: what was reached and what it reveals, without the paper's words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpcsgp.report.folders import RunResults, is_party, metric_of
from dpcsgp.report.formatting import epsilon, megabytes, plain_text, score, significant
from dpcsgp.report.page_tables import final_score, worst_score


def verdict(runs: Sequence[RunResults], metrics: Sequence[str]) -> str:
    """Say how one run ended, or how many of several can be trusted with private data."""
    if len(runs) == 1:
        run = runs[0]
        return f"{_reached(run, metric_of(run, metrics))} {_revealed(run)} {_sent(run)}".strip()
    private = sum(bool(run.summary["private"]) for run in runs)
    if private == len(runs):
        return f"All {len(runs)} runs are private: each keeps the ε that was asked for."
    if not private:
        return f"None of the {len(runs)} runs is private; the warnings below say why."
    return f"{private} of {len(runs)} runs are private; the warnings below say which are not."


def _reached(run: RunResults, metric: str) -> str:
    mean, least = final_score(run, metric, "_node_mean"), worst_score(run, metric)
    if run.diverged:
        return "The models became infinite: the run failed."
    if not math.isfinite(mean):
        return "The models were not measured, because no test data were given."
    name, nodes = metric.replace("_", " "), plain_text(run.summary.get("num_nodes"))
    if is_party(run):  # it knows its own node only
        over = "The federation is not finished." if run.unfinished else ""
        return (
            f"On its public test data the model of party {run.text('party')}, one of {nodes}, has "
            f"{name} {score(metric, mean)}. {over}"
        ).strip()
    if nodes == "1":
        return f"On public test data the model has {name} {score(metric, mean)}."
    return (
        f"On public test data the models of {nodes} nodes have {name} {score(metric, mean)} on "
        f"average, {score(metric, least)} at the worst node."
    )


def _revealed(run: RunResults) -> str:
    if not run.summary["private"]:
        return "The run is not private: the warnings below say why."
    colluders = run.summary.get("max_colluders", "all")
    who = "Whoever sees every message"
    if colluders != "all":
        who += f" and knows what any {colluders} other nodes know"
    spent, delta = epsilon(run.number("epsilon")), significant(run.number("delta"))
    return f"{who} learns about any one example no more than ε = {spent} allows (δ = {delta})."


def _sent(run: RunResults) -> str:
    if run.sends_nothing:
        return "No message was sent."
    return f"{megabytes(run.number('bytes_per_edge'))} went over each link."
