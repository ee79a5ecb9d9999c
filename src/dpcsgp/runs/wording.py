"""A run in words: what is about to happen, where it stands, and how it ended.

Only public values are told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from dpcsgp.config import Config
from dpcsgp.records.metrics import usual_direction
from dpcsgp.records.names import model_name
from dpcsgp.runs.default_settings import CHOSEN
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.node_noise import average_noise
from dpcsgp.runs.noise_verdict import noise_share, noise_verdict
from dpcsgp.training import Progress, Run


@final
@dataclass(frozen=True)
class Standing:
    """Where a run stands.

    Attributes:
        step: gradient steps done, of `steps`.
        polished: polish rounds done, of `polish_rounds`.
        metric: name of the first metric; empty: nothing is measured.
        score: its mean over the nodes at the last evaluation.
        scored_at: the step of that evaluation.
        others: names and means of further metrics.
        epsilon: the largest eps spent so far.
        bytes_per_edge: bytes on one edge so far.
        waiting_for: names of the parties that this one waits for.
    """

    step: int
    steps: int
    polished: int
    polish_rounds: int
    metric: str
    score: float
    scored_at: int
    epsilon: float
    bytes_per_edge: float
    waiting_for: tuple[str, ...] = ()
    others: tuple[tuple[str, float], ...] = ()

    @property
    def done(self) -> int:
        """Steps and rounds done."""
        return self.step + self.polished

    @property
    def total(self) -> int:
        """Steps and rounds of the whole run."""
        return self.steps + self.polish_rounds

    def __str__(self) -> str:
        polish = f" + polish {self.polished}" if self.polished else ""
        # Names come early: a narrow terminal cuts off the end.
        waiting = f"  waiting for {some_names(self.waiting_for)}" if self.waiting_for else ""
        is_old = self.metric and (self.polished or self.scored_at < self.step)
        scores = ((self.metric, self.score), *self.others)
        score = "  ".join(_score(*named) for named in scores)
        score += f" (step {self.scored_at})" if is_old else ""
        return (
            f"step {self.step}/{self.steps}{polish}{waiting}  {score}  "
            f"eps {self.epsilon:.3f}  {self.bytes_per_edge / 1e6:.3f} MB/edge"
        )


def some_names(names: Sequence[str], most: int = 3) -> str:
    """Join names; of many only the first ones.

    >>> some_names(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def standing(run: Run, progress: Progress) -> Standing:
    """Say where a run of this process stands."""
    return standing_at(run, progress.state.step, progress.rounds_polished)


def standing_at(run: Run, step: int, polished: int = 0) -> Standing:
    """Say where a run of this process stands after so many steps and polish rounds."""
    # The score is that of the last evaluation, which may be some steps old.
    row = run.recorder.rows[-1]
    metric, values = first_metric(row)
    return Standing(
        step=step,
        steps=run.schedule.steps,
        polished=polished,
        polish_rounds=run.schedule.polish_rounds,
        metric=metric,
        score=sum(values) / len(values) if values else 0.0,
        scored_at=run.recorder.rows[-1]["step"],
        epsilon=max(run.gradients.epsilon_spent()),
        bytes_per_edge=run.network.traffic.bytes_per_edge,
        others=tuple((name, row[f"{name}_node_mean"]) for name in other_metrics(row)),
    )


def other_metrics(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row's further metrics; a line of progress has room for two."""
    first, _ = first_metric(row)
    names = [key.removesuffix("_node_mean") for key in row if key.endswith("_node_mean")]
    return [name for name in names if name != first][:2]


def first_metric(row: Mapping[str, Any]) -> tuple[str, list[float]]:
    """Return the name of a row's first metric and its values by node; accuracy goes first."""
    names = [key.removesuffix("_node_mean") for key in row if key.endswith("_node_mean")]
    if not names:
        return "", []
    name = "accuracy" if "accuracy" in names else names[0]
    return name, row[f"{name}_nodes"]


def _score(metric: str, value: float) -> str:
    if not metric:
        return "nothing measured"
    return f"accuracy {100 * value:.1f} %" if metric == "accuracy" else f"{metric} {value:.4g}"


def plan_rows(design: RunDesign) -> dict[str, str]:
    """Say what is about to happen and what it will cost."""
    config, mechanism = design.config, design.mechanism
    # One number where all nodes have the same, otherwise the smallest and the largest.
    noise = sorted(set(mechanism.noise_multipliers))
    batches = sorted(set(mechanism.expected_batch_sizes))
    own = config.task.name == "own"
    model, size = model_name(config.task.model), f"{design.dim:,} coordinates"
    named = f"{config.task.name}, {model}, features {config.task.features} ({size})"
    partition = "" if own else f", partition {config.task.partition}"
    rows = {
        "verdict": noise_verdict(noise_share(design)) if own else "",
        "task": f"your own data, {model} ({size})" if own else named,
        "nodes": f"{design.topology.num_nodes}, graph {config.graph.name}{partition}",
        "method": _method(config),
        "mixing rate": _mixing(design),
        "noise": f"{config.privacy.noise}, multiplier {_range(noise)}, "
        f"clip norm {config.privacy.clip_norm:g}",
        "shared noise": _shared(design),
        "noise of the average": _average_noise(design),
        "batch": f"{config.privacy.sampling}, expected size {_range(batches)}",
        "steps": f"{config.algorithm.steps}, learning rate {config.algorithm.learning_rate:g}",
        "chosen by rule": dict(design.facts.details).get(CHOSEN, ""),
        "traffic": f"{design.bytes_per_edge() / 1e6:.3f} MB per edge",
    }
    # Methods without a mixing rate leave that row empty, and so do nodes of equal noise.
    return {name: value for name, value in rows.items() if value}


def outcome_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Say what a run reached, what it revealed, and what it sent."""
    return {
        # Reached, then revealed, then sent.
        **_scores(summary),
        "verified eps": f"{float(summary['epsilon']):.4f} "
        f"(claimed {float(summary['epsilon_claimed']):g})",
        **_collusion(summary),
        "delta": f"{summary['delta']:g}",
        "neighbouring data sets": str(summary["neighbouring_relation"]),
        "private": _private(summary),
        "sent per edge": f"{summary['bytes_per_edge'] / 1e6:.3f} MB",
        "sent per node": f"{summary['bytes_sent_per_node'] / 1e6:.3f} MB",
        "seconds": f"{summary['seconds']:.1f}",
        **_virtual_time(summary),
        "stopped because": str(summary["stopped_because"]),
    }


def _virtual_time(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of a clock that was played, or of a party that waited for others."""
    rows = {}
    if (played := summary.get("simulated")) is not None:
        counts = ", ".join(map(str, played["contributed"]))
        rows["rounds per virtual minute"] = f"{float(played['rounds_per_minute']):.1f}"
        rows["gradients of each node"] = counts
        shares = ", ".join(f"{100 * share:.0f}" for share in played["waiting_share"])
        rows["time spent waiting (%)"] = shares
    elif (share := summary.get("waiting_share")) is not None:
        rows["time spent waiting"] = f"{100 * share:.0f} %"
    return rows


def _scores(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of all metrics, or one that says that nothing was measured."""
    suffix = "_node_mean"
    names = [key.removesuffix(suffix) for key in summary if key.endswith(suffix)]
    rows: dict[str, str] = {}
    for name in names:
        show = _percent if name == "accuracy" else _number
        if "party" in summary:  # it knows its own node only
            rows[f"{name}, own model"] = show(summary.get(f"{name}_node_mean"))
            continue
        rows[f"{name}, mean over nodes"] = show(summary.get(f"{name}_node_mean"))
        rows[f"{name}, worst node"] = show(_worst(summary, name))
        rows[f"{name}, average model"] = show(summary.get(f"{name}_average_model"))
    return rows or {"measured": "nothing: no test data were given"}


def _worst(summary: Mapping[str, Any], metric: str) -> float | None:
    """Return the worst node's value; older folders have only the smallest."""
    if f"{metric}_node_worst" in summary or usual_direction(metric) == "lower":
        return summary.get(f"{metric}_node_worst")
    return summary.get(f"{metric}_node_min")


def _method(config: Config) -> str:
    compresses = config.method.compresses
    compression = f", compression {config.compression.spec}" if compresses else ""
    return f"{config.algorithm.name}, {config.algorithm.steps} steps{compression}"


def _shared(design: RunDesign) -> str:
    """Say how much of the noise cancels; empty with independent noise."""
    colluders, law = design.config.privacy.max_colluders, design.mechanism.shared
    if colluders == "all":
        return ""
    if law is None:
        return f"none: with {colluders} colluders, sharing would not make the average cleaner"
    noise = design.mechanism.noise_multipliers
    alone = sum((m * s) ** 2 for m, s in zip(noise, law.sensitivities, strict=True))
    average = math.sqrt(law.variance_of_average() * len(noise) ** 2 / alone)
    single = math.sqrt(law.variance_of_release() * len(noise) / alone)
    return (
        f"holds against {colluders} colluders; noise of the average x {average:.2f}, "
        f"of a message x {single:.2f}"
    )


def _collusion(summary: Mapping[str, Any]) -> dict[str, str]:
    """Say against whom eps holds, and what is left if nobody else is honest."""
    colluders = summary.get("max_colluders", "all")
    if colluders == "all":
        return {}
    return {
        "holds against": f"all messages together with any {colluders} other nodes",
        "eps if all collude": f"{float(summary['epsilon_all_collude']):.4f}",
    }


def _mixing(design: RunDesign) -> str:
    if design.mixing_rate is None or design.mixing_radius is None:
        return ""
    radius = design.mixing_radius
    # nan is the only number that differs from itself: no law.
    known = f"radius {radius:.3f}" if radius == radius else "no radius exists for this compressor"
    return f"{design.mixing_rate:.3g} ({known})"


def _average_noise(design: RunDesign) -> str:
    """Show both ways of counting nodes where they differ."""
    found = average_noise(design)
    if not design.config.method.sends or math.isclose(found.equal, found.examples, rel_tol=0.05):
        return ""
    counts = design.config.algorithm.node_weights
    return (
        f"{found.equal:.3g} a coordinate if nodes count equally, {found.examples:.3g} if by their "
        f'examples (algorithm.node_weights = "{counts}")'
    )


def _range(values: Sequence[float]) -> str:
    low, high = values[0], values[-1]
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _private(summary: Mapping[str, Any]) -> str:
    if summary["private"]:
        return "yes"
    if summary["seeded"]:
        return "no: the noise is seeded"
    return "no: verified eps is above the claim"
