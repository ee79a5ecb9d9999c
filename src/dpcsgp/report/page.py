"""Write one self-contained page about one or many runs; it asks nothing of the outside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dpcsgp.errors import ConfigError
from dpcsgp.records.names import shown_model
from dpcsgp.report.charts import DETAILED_RUNS, charts
from dpcsgp.report.folders import RunResults, is_party, metric_of, read_many, shown_metrics
from dpcsgp.report.formatting import (
    DASH,
    duration,
    epsilon,
    megabytes,
    plain_text,
    score,
    significant,
)
from dpcsgp.report.gradient_counts import count_table
from dpcsgp.report.notices import notices
from dpcsgp.report.page_tables import (
    account,
    comparison,
    differing_settings,
    final_score,
    settings_by_section,
    worst_score,
)
from dpcsgp.report.palette import COLOURS, colour_name, marker_sign
from dpcsgp.report.party_part import contribution_table, rounds_done, rule_of_arrival
from dpcsgp.report.verdict import verdict

FILE_NAME = "report.html"


@final
@dataclass(frozen=True)
class Headline:
    """One large number with its name and a line that explains it."""

    name: str
    value: str
    note: str = ""
    tone: str = ""  # "good", "bad" or neither


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of these results folders and return its path.

    Without `out` the page of one folder goes into it, that of several into the current folder, as
    `report.html`.
    """
    if not folders:
        raise ConfigError("no results folder given; for example `dpcsgp report runs/first`")
    runs = read_many([Path(folder) for folder in folders])
    path = out or (Path(folders[0]) if len(runs) == 1 else Path()) / FILE_NAME
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; name a file, for example {path / FILE_NAME}")
    page = render(runs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out {path} cannot be written: {error.strerror}; choose another file"
        ) from None
    return path


def render(runs: Sequence[RunResults]) -> str:
    """Return the page as HTML; every text is escaped, figures are inline."""
    environment = Environment(
        loader=PackageLoader("dpcsgp.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(_context(runs))


def _context(runs: Sequence[RunResults]) -> dict[str, Any]:
    metrics = shown_metrics(runs)
    drawn = charts(runs, metrics)
    alone = len(runs) == 1
    first = metric_of(runs[0], metrics)
    headlines = _headlines_of_one(runs[0], first) if alone else _headlines_of_many(runs, metrics)
    return {
        "title": _title(runs),
        "subtitle": _subtitle(runs),
        "verdict": verdict(runs, metrics),
        "headlines": headlines,
        "notices": notices(runs),
        "charts": [(chart, Markup(chart.svg)) for chart in drawn],
        "runs": [_run(index, run, metric_of(run, metrics)) for index, run in enumerate(runs)],
        "detailed": len(runs) <= DETAILED_RUNS,
        "parties": all(map(is_party, runs)),
        "comparison": comparison(runs, metrics),
        "differing": {} if alone else differing_settings(runs),
        "palette": [(colour_name(index), *pair) for index, pair in enumerate(COLOURS)],
    }


def _title(runs: Sequence[RunResults]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs compared"
    # A party's folder is named by a fingerprint, which tells a reader nothing.
    return runs[0].text("party") if is_party(runs[0]) else runs[0].name


def _subtitle(runs: Sequence[RunResults]) -> str:
    """Name what the runs share: method, task, graph, compression."""
    parts = []
    for key, pattern in (
        ("algorithm", "{}"),
        ("task", "{}"),
        ("model", "{}"),
        ("partition", "partition {}"),
        ("num_nodes", "{} nodes"),
        ("graph", "{}"),
        ("compression", "compression {}"),
        ("steps", "{} steps"),
    ):
        values = {run.text(key) for run in runs}
        # "own" says nothing: model and data are the caller's.
        if len(values) == 1 and (value := values.pop()) and value != "own":
            parts.append(pattern.format(shown_model(value).replace("_", " ")))
    return " · ".join(parts)


def _headlines_of_one(run: RunResults, metric: str) -> list[Headline]:
    name = metric.replace("_", " ").capitalize()
    average = score(metric, final_score(run, metric, "_average_model"))
    private = run.summary["private"]
    asked = significant(run.number("epsilon_claimed"))
    reached = [
        Headline(
            f"{name}, node mean",
            score(metric, final_score(run, metric, "_node_mean")),
            f"average model {average}",
        ),
        Headline(
            "Worst node",
            score(metric, worst_score(run, metric)),
            f"of {plain_text(run.summary.get('num_nodes'))} nodes",
        ),
    ]
    return [
        *(_party_headlines(run, metric) if is_party(run) else reached),
        Headline(
            "Verified ε",
            epsilon(run.number("epsilon")),
            f"δ = {significant(run.number('delta'))} · asked for {asked} · {_relation(run)}"
            f"{_colluders(run)}",
            "bad" if run.exceeds_claim or run.number("epsilon") == math.inf else "",
        ),
        Headline(
            "Sent per directed edge",
            megabytes(run.number("bytes_per_edge")),
            f"{megabytes(run.number('bytes_sent_per_node'))} per node · "
            f"{duration(run.number('seconds'))}",
        ),
        Headline(
            "Private", "yes" if private else "no", _private_note(run), "good" if private else "bad"
        ),
    ]


def _party_headlines(run: RunResults, metric: str) -> list[Headline]:
    """Return what a party reached: it knows its own node only."""
    parties = plain_text(run.summary.get("num_nodes"))
    ending = "not finished" if run.unfinished else "every receiver has every message"
    return [
        Headline(
            f"{metric.replace('_', ' ').capitalize()}, own model",
            score(metric, final_score(run, metric, "_node_mean")),
            f"party {run.text('party')}, one of {parties}; its public test data",
        ),
        Headline("Rounds", rounds_done(run), ending, "bad" if run.unfinished else "good"),
    ]


def _colluders(run: RunResults) -> str:
    """Say against whom eps holds where noise is shared; empty with independent noise."""
    colluders = run.summary.get("max_colluders", "all")
    if colluders == "all":
        return ""
    alone = epsilon(run.epsilon_all_collude)
    return f" · against any {colluders} colluders, {alone} if all others collude"


def _headlines_of_many(runs: Sequence[RunResults], metrics: Sequence[str]) -> list[Headline]:
    private = sum(run.summary["private"] for run in runs)
    sent = [run.number("bytes_per_edge") for run in runs]
    sent = [value for value in sent if math.isfinite(value)]
    # nan compares with nothing; minus infinity never wins
    epsilons = [run.number("epsilon") for run in runs]
    known = [-math.inf if math.isnan(value) else value for value in epsilons]
    spent = runs[known.index(max(known))]
    headlines = [headline for metric in metrics for headline in _best(runs, metric, metrics)]
    between = _range(sent) if sent else DASH
    return [
        *headlines,
        Headline(
            "Largest verified ε",
            epsilon(spent.number("epsilon")),
            f"δ = {significant(spent.number('delta'))} · {spent.name} · {_relation(spent)}",
        ),
        Headline("Sent per directed edge", between, "fewest and most of all runs"),
        Headline(
            "Private",
            f"{private} of {len(runs)}",
            "runs",
            "good" if private == len(runs) else "bad",
        ),
    ]


def _best(runs: Sequence[RunResults], metric: str, metrics: Sequence[str]) -> list[Headline]:
    """Return the best run by mean and, where one metric is shown, by worst node."""

    def mean(run: RunResults) -> float:
        return final_score(run, metric, "_node_mean")

    def least(run: RunResults) -> float:
        return worst_score(run, metric)

    asked = [(f"Best {metric.replace('_', ' ')}, node mean", mean)]
    asked += [("Best worst node", least)] if len(metrics) == 1 else []
    headlines = []
    for title, of in asked:
        known = [run for run in runs if math.isfinite(of(run))]
        pick = min if known and known[0].lower_is_better(metric) else max
        best = pick(known, key=of) if known else None
        headlines.append(
            Headline(title, score(metric, of(best)), best.name) if best else Headline(title, DASH)
        )
    return headlines


def _range(sent: Sequence[float]) -> str:
    low, high = significant(min(sent) / 1e6), megabytes(max(sent))
    return high if megabytes(min(sent)) == high else f"{low}–{high}"


def _relation(run: RunResults) -> str:
    words = run.text("neighbouring_relation").replace("_", " ").replace("-", " ")
    return words or "neighbouring relation not recorded"


def _private_note(run: RunResults) -> str:
    if run.summary["private"]:
        return "fresh secret noise, ε within what was asked for"
    return "seeded noise" if run.summary.get("seeded") is True else "see the warnings"


def _run(index: int, run: RunResults, metric: str) -> dict[str, Any]:
    """Return everything the page tells about one run alone."""
    # a damaged environment file must not cost the page
    packages = run.environment.get("packages")
    software = {key: value for key in ("python", "platform") if (value := run.environment.get(key))}
    return {
        "number": index + 1,
        "name": run.name,
        "method": run.text("algorithm"),
        "compression": run.text("compression"),
        "score": score(metric, final_score(run, metric, "_node_mean")),
        "colour": colour_name(index),
        "sign": marker_sign(index),
        "settings": settings_by_section(run),
        "software": software | (packages if isinstance(packages, dict) else {}),
        "account": account(run, metric),
        "contributions": contribution_table(run),
        "arrival": rule_of_arrival(run),
        "gradients": count_table(run),
        "facts": _facts(run),
        "remarks": run.remarks,
    }


def _facts(run: RunResults) -> dict[str, str]:
    """Return the lines above the account of the nodes."""
    satisfied = run.summary.get("theorem_satisfied")
    conditions = "does not speak of this run"
    if satisfied is not None:
        conditions = "holds for these settings" if satisfied else "asks for milder compression"
    return {
        "Neighbouring relation": _relation(run),
        "Verified ε": f"{epsilon(run.number('epsilon'))} at δ = {significant(run.number('delta'))}",
        "Claimed ε": significant(run.number("epsilon_claimed")),
        "Mixing rate": significant(run.number("mixing_rate")),
        "Mixing radius": significant(run.number("mixing_radius")),
        "The paper's theorem": conditions,
        "Ended": run.text("stopped_because") or DASH,
    }
