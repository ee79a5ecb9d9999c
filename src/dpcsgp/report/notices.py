"""What a reader must know before believing a number: warnings drawn from the summaries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, final

from dpcsgp.errors import DpcsgpError
from dpcsgp.privacy.accounting import composed_epsilon
from dpcsgp.privacy.ledger_reading import read_ledgers, releases_by_node
from dpcsgp.records.ending import Ending
from dpcsgp.report import gradient_counts
from dpcsgp.report.folders import RunResults, is_party
from dpcsgp.report.formatting import epsilon, significant

Severity = Literal["danger", "caution", "hint"]
MOST_ACCOUNTED = 4  # runs whose ledgers are accounted for together: it takes a second or two
SAME_DATA = ("task", "partition", "model", "features", "num_nodes")


@final
@dataclass(frozen=True)
class Notice:
    """One warning, the runs it is about (none: all of them), and what to do."""

    severity: Severity
    title: str
    text: str
    runs: tuple[str, ...] = ()


def notices(runs: Sequence[RunResults]) -> list[Notice]:
    """Return all warnings, the gravest first; what several runs share is said once."""
    shared: dict[tuple[Severity, str, str], list[str]] = {}
    for run in runs:
        for check in CHECKS:
            found = check(run)
            if found:
                shared.setdefault((found.severity, found.title, found.text), []).append(run.name)
    result = [Notice(*key, tuple(names)) for key, names in shared.items()]
    result += [hint for hint in (_missing_control(runs), _composition(runs)) if hint]
    return sorted(result, key=lambda notice: ("danger", "caution", "hint").index(notice.severity))


def _seeded(run: RunResults) -> Notice | None:
    if run.summary.get("seeded") is not True:
        return None
    text = "The noise was drawn from a seed, so anyone who knows the seed can take it off again. "
    text += "Fine for experiments; for real data leave privacy.seed unset."
    return Notice("danger", "Not private: seeded noise", text)


def _no_noise(run: RunResults) -> Notice | None:
    if run.number("epsilon") != math.inf:
        return None
    text = "The verified ε is infinite: nothing bounds what the messages reveal about an example. "
    text += 'Use a private method and privacy.noise = "calibrated".'
    return Notice("danger", "Not private: no meaningful noise", text)


def _above_claim(run: RunResults) -> Notice | None:
    if not run.exceeds_claim:
        return None
    verified, claimed = epsilon(run.number("epsilon")), significant(run.number("epsilon_claimed"))
    text = f"The accountant verifies ε = {verified}, above the {claimed} that was asked for. "
    text += 'Trust the verified number; privacy.noise = "calibrated" meets the claim.'
    return Notice("danger", "Less private than claimed", text)


def _unexplained(run: RunResults) -> Notice | None:
    if run.summary["private"] or _seeded(run) or _no_noise(run) or _above_claim(run):
        return None
    return Notice("danger", "Not private", "The run's own summary says private: false.")


def _diverged(run: RunResults) -> Notice | None:
    if not run.diverged:
        return None
    text = f"{run.text('stopped_because')}. Compression and mixing rate do not fit this graph: "
    text += 'set algorithm.mixing_rate = "auto" or choose a finer compressor.'
    return Notice("danger", "Diverged", text)


def _unfinished(run: RunResults) -> Notice | None:
    """Say that a party's run is not over: no part of a federation is called a success."""
    if not run.unfinished:
        return None
    reason, rounds = run.text("stopped_because"), run.summary.get("rounds")
    text = f"{reason[:1].upper()}{reason[1:]}. " if reason != "completed" else ""
    text += f"This is one party's model after round {rounds} of {run.summary.get('rounds_planned')}"
    text += ", not the result of the federation. The same `dpcsgp party run` goes on."
    return Notice("danger", "Not finished", text)


def _fewer_gradients(run: RunResults) -> Notice | None:
    """Name those whose examples count less, because their gradients were late."""
    who = gradient_counts.missing(run)
    if not who:
        return None
    text = f"Gradients put in: {who}. The examples of these nodes count less in the models."
    return Notice("caution", "Not everybody contributed every time", text)


def _ended_early(run: RunResults) -> Notice | None:
    reason = run.text("stopped_because")
    if run.diverged or run.unfinished or reason in ("", "completed"):
        return None
    wanted = Ending.of(reason) is Ending.FINISHED_EARLY  # the caller's own rule said so
    severity: Severity = "hint" if wanted else "caution"
    return Notice(severity, "Ended early", f"{reason[0].upper()}{reason[1:]}.")


def _unstable(run: RunResults) -> Notice | None:
    radius = run.number("mixing_radius")
    if not radius >= 1 or run.diverged:
        return None
    text = f"The gossip step's radius is {significant(radius, 4)}; "
    text += 'from 1 on errors grow in the mean square. Set algorithm.mixing_rate = "auto".'
    return Notice("caution", "Gossip is not stable", text)


def _unmeasured(run: RunResults) -> Notice | None:
    if run.metrics:
        return None
    text = "No test data were given, so nobody knows how good the models are. "
    text += "Give public test data, for example dpcsgp.train(..., test_data=...)."
    return Notice("caution", "Nothing was measured", text)


CHECKS: tuple[Callable[[RunResults], Notice | None], ...] = (
    _seeded,
    _no_noise,
    _above_claim,
    _unexplained,
    _diverged,
    _unfinished,
    _fewer_gradients,
    _ended_early,
    _unstable,
    _unmeasured,
)


def _missing_control(runs: Sequence[RunResults]) -> Notice | None:
    """Point out runs that nothing without communication is shown beside."""
    # a control counts only for runs on the same data, partition and model
    controls = [_same_data(run) for run in runs if run.trained_alone]
    # The roster of a party fixes the method: it cannot run the control.
    sending = [run for run in runs if not run.sends_nothing and not is_party(run)]
    lonely = [run.name for run in sending if _same_data(run) not in controls]
    if not lonely:
        return None
    text = "No run here shows how good nodes are that train alone and send nothing. Run the same "
    text += 'settings with algorithm.name = "local" and report both: only then do results per '
    text += "byte mean something."
    return Notice("hint", "Nothing to compare with", text, tuple(lonely) if len(runs) > 1 else ())


def _composition(runs: Sequence[RunResults]) -> Notice | None:
    """Remind that eps of several runs on the same data add up."""
    # runs without noise, without releases or with seeded noise promise nothing that could add up
    private = [
        run for run in runs if math.isfinite(run.number("epsilon")) and run.number("epsilon") > 0
    ]
    private = [run for run in private if run.summary.get("seeded") is not True]
    if len(private) < 2:
        return None
    text = f"Each ε is for one run alone. If {len(private)} of these runs used the same private "
    text += "examples and all were published, "
    total, delta = (sum(run.number(key) for run in private) for key in ("epsilon", "delta"))
    if len({run.text("neighbouring_relation") for run in private}) > 1 or math.isnan(delta):
        return Notice("hint", "Privacy adds up over runs", text + "their costs add up.")
    joint = _joint_epsilon(private) if len(private) <= MOST_ACCOUNTED else None
    if joint is not None:
        largest = max(run.number("delta") for run in private)
        text += f"together they guarantee ε = {epsilon(joint)}, δ = {significant(largest)} "
        text += "(from their ledgers, as dpcsgp account computes it)."
    else:
        text += f"together they guarantee only ε = {epsilon(total)}, δ = {significant(delta)} "
        text += "(sums; dpcsgp account computes less from the ledgers)."
    return Notice("hint", "Privacy adds up over runs", text)


def _joint_epsilon(runs: Sequence[RunResults]) -> float | None:
    """Return eps of all runs' releases together, for the node that spent most.

    None: a ledger is missing, damaged, or of another kind.
    """
    delta = max(run.number("delta") for run in runs)
    try:
        by_node = releases_by_node(read_ledgers([run.path for run in runs]))
        return max(composed_epsilon(releases, delta) for releases in by_node.values())
    except (DpcsgpError, ValueError):
        return None


def _same_data(run: RunResults) -> tuple[str, ...]:
    return tuple(run.text(key) for key in SAME_DATA)
