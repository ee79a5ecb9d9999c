"""`dpcsgp audit`: attack our own messages and draw our own mechanism.

Prints how small a fault each check would have caught.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpcsgp.cli.options import AsJson, RunOrFile, Settings, settings_file
from dpcsgp.records.metrics import strict_json

if TYPE_CHECKING:
    from rich.console import Console

    from dpcsgp.auditing import Audit, Check, MechanismAudit


def audit(
    config_file: RunOrFile = None,
    settings: Settings = None,
    trials: Annotated[
        int, typer.Option(help="Independent victims, half of them with the canary.", min=80)
    ] = 1000,
    draws: Annotated[
        int, typer.Option(help="Releases of the mechanism alone.", min=10_000)
    ] = 100_000,
    fault: Annotated[
        str | None,
        typer.Option("--break", help="Break the mechanism on purpose: see above.", metavar="FAULT"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Attack our own messages and draw our own mechanism: do they keep the reported eps?

    Two parts. The message stream of whole trainings is attacked with canaries, which bounds eps
    from below; at small eps the bound is near 0 and says nothing. The mechanism itself is drawn
    100000 times and held against the law that it states; for every property the smallest fault is
    printed that would have been caught.

    Examples: the demo's promise; that of a run; another eps; more draws, so that smaller faults
    show:

    ```
    dpcsgp audit
    dpcsgp audit runs/first
    dpcsgp audit --set privacy.epsilon=2 --trials 4000
    dpcsgp audit --draws 400000 --trials 80
    ```

    These two must fail:

    ```
    dpcsgp audit --break noise
    dpcsgp audit --break drawn-size --json
    ```

    With noise that cancels, observers are given as many colluders as the promise allows for; this
    one is given one more, and must fail:

    ```
    dpcsgp audit --set privacy.max_colluders=2
    dpcsgp audit --set privacy.max_colluders=2 --break one-more-colluder
    ```

    For persons as the unit of privacy every row of the canary's is longer than the clip norm; rows
    that are clipped one by one must fail:

    ```
    dpcsgp audit --set privacy.max_rows_per_unit=4
    dpcsgp audit --set privacy.max_rows_per_unit=4 --break rows-apart
    ```

    What --break plants: noise (a tenth of it), clipping (none), order (messages encoded before the
    noise), rate (sampling rate + 20 %), double-rate, reused-noise (of step 2k at 2k + 1),
    same-batch (in every step), mean-clipping (by the mean norm of the batch), drawn-size (as the
    divisor), copied-noise (of even coordinates to odd ones), rows-apart (of a person, with
    privacy.max_rows_per_unit); with privacy.max_colluders also
    pair-stream-twice (of step 2k at 2k + 1), pair-sign (not flipped), one-more-colluder and
    pair-within (taken back at 2k + 1).

    The exit code is 1 if the lower bound exceeds the reported eps or a property of the mechanism
    does not hold, else 0. A correct mechanism is flagged by the attack in at most one audit out of
    twenty, by the draws in one out of 100000.
    """
    from dpcsgp import auditing
    from dpcsgp.config import load_config
    from dpcsgp.runs.facts import OwnFacts

    file = settings_file(config_file)
    config = load_config(file, settings or [])
    sizes = None
    if config.task.name == "own":
        sizes = OwnFacts.read(file.parent if file is not None else Path()).num_examples
    result = auditing.audit(config, trials, fault, draws, sizes)
    if as_json:
        typer.echo(strict_json(result.as_dict()))
    else:
        _print(result)
    if not result.passed:
        raise typer.Exit(1)


def _print(result: Audit) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    _print_stream(console, result)
    _print_mechanism(console, result.mechanism)
    console.print(f"{result.seconds:.0f} seconds")
    if result.passed:
        console.print(_all_clear(result), style="green")
    else:
        parts = {
            "message stream": result.stream_passed,
            "mechanism": result.mechanism.passed,
        }
        console.print(
            f"FAILED: {' and '.join(name for name, passed in parts.items() if not passed)}",
            style="bold red",
        )


def _all_clear(result: Audit) -> str:
    power = f"{result.mechanism.power:.0%}"
    laws = f"passed: the mechanism keeps its law down to the faults in the last column ({power})"
    # An attack that could not have shown anything is no evidence, and is called so.
    if result.stream_informative:
        return f"{laws}; the attack on the messages shows nothing beyond the reported eps"
    return f"{laws}; the attack on the messages was not informative"


def _print_stream(console: Console, result: Audit) -> None:
    """Print what was promised, what the attacker found, and what these trials could have shown."""
    from rich.table import Table

    from dpcsgp.auditing import FAULTS
    from dpcsgp.privacy.accounting import describe_epsilon

    table = Table(title="audit of the message stream", show_header=False, title_justify="left")
    percent = f"({100 * result.confidence:g} %)"
    rows = {
        "method": f"{result.algorithm}, compression {result.compression}",
        "promise": f"{result.steps} releases, noise multiplier {result.noise_multiplier:.4g}, "
        f"sampling rate {result.sampling_rate:.4g}, {result.neighbouring_relation}",
        "attacker": f"hears {result.messages_per_trial} rounds of messages; best score: "
        f"{result.attack}",
        "unseen trials": f"{result.hits} of {result.positives} canaries found, "
        f"{result.false_alarms} of {result.negatives} false alarms",
        "reported eps": f"{describe_epsilon(result.epsilon_claimed)} at delta {result.delta:g}",
        f"lower bound on eps {percent}": describe_epsilon(result.epsilon_lower_bound),
        "for any mechanism": describe_epsilon(result.epsilon_lower_bound_any_mechanism),
        "most that these trials can show": f"{describe_epsilon(result.epsilon_reachable)}; "
        f"for any mechanism {describe_epsilon(result.epsilon_reachable_any_mechanism)}",
    }
    if result.attacks_releases:
        what = "Adam" if result.optimizer == "adam" else "weight decay"
        rows["attacked"] = (
            f"the releases, as SGD would send them. The run's messages are made of the same "
            f"releases by {what}, a public rule (post-processing): they can reveal no more"
        )
    if result.fault:
        table.add_row("BROKEN ON PURPOSE", f"{result.fault}: {FAULTS[result.fault]}")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    console.print(_stream_verdict(result), style="bold red" if not result.stream_passed else "")
    console.print()


def _stream_verdict(result: Audit) -> str:
    bound, claim = f"{result.epsilon_lower_bound:.2f}", f"{result.epsilon_claimed:.2f}"
    if not result.stream_passed:
        return f"FLAGGED: the attack shows {bound}, more than the reported eps of {claim} allows"
    if not result.stream_informative:
        return (
            f"not informative at this eps: a bound of {bound} beside {claim}; "
            "the mechanism audit below is what speaks"
        )
    return f"nothing beyond the reported eps: a bound of {bound} beside {claim}"


def _print_mechanism(console: Console, found: MechanismAudit) -> None:
    """Print every property: how far off it was, and from where on that would have been caught."""
    from rich.table import Table

    table = Table(title="audit of the mechanism", title_justify="left", pad_edge=False, box=None)
    for name in ("property", "off by", f"caught from ({found.power:.0%})", ""):
        table.add_column(
            name, justify="left" if name in ("property", "") else "right", no_wrap=True
        )
    for check in found.checks:
        verdict = "[bold red]FLAGGED[/]" if check.flagged else "ok"
        table.add_row(check.name, _size(check, check.seen), _smallest(check), verdict)
    console.print(table)
    console.print(
        f"{found.draws} releases: {found.nodes} nodes, {found.steps} steps, {found.coordinates} "
        f"coordinates; noise multiplier {found.noise_multiplier:.4g}; {found.sampling} batches of "
        f"{found.expected_batch_size} out of {found.num_examples}, which stand for "
        f"{found.stated_batch_size} out of {found.stated_examples}. All checks together raise a "
        f"false alarm in one audit out of {1 / found.false_alarm_level:.0f}."
    )


def _smallest(check: Check) -> str:
    # no fault is large enough for an infinite bound; a comparison without chance catches any
    if math.isinf(check.smallest):
        return "too few draws"
    return _size(check, check.smallest) if check.smallest > 0 else "any"


def _size(check: Check, value: float) -> str:
    if check.unit.startswith("%"):
        return f"{100 * value:.2g} {check.unit}"
    return f"{value:.2g} {check.unit}"
