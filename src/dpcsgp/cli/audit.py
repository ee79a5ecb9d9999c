"""`dpcsgp audit`: attack the message stream with canaries and set a lower bound on eps beside the reported one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dpcsgp.auditing import Audit

EXAMPLES = """
Examples:

    dpcsgp audit                                     # the demo's promise

    dpcsgp audit my.toml --set privacy.epsilon=2 --trials 4000

    dpcsgp audit --break noise                       # must fail: a tenth of the noise

    dpcsgp audit --break clipping --json

The exit code is 0 if the lower bound is at most the reported eps, else 1. A correct mechanism is flagged in at most one
audit out of twenty.
"""


def audit(
    config_file: Annotated[Path | None, typer.Argument(help="TOML file; without it the defaults are used.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, may be repeated.", metavar="KEY=VALUE")
    ] = None,
    trials: Annotated[int, typer.Option(help="Independent victims, half of them with the canary.", min=80)] = 1000,
    fault: Annotated[
        str | None, typer.Option("--break", help="Break the mechanism: noise, clipping or order.", metavar="FAULT")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Attack the message stream with canaries; compare a lower bound on eps with the reported eps."""
    from dpcsgp import auditing
    from dpcsgp.config import load_config

    result = auditing.audit(load_config(config_file, settings or []), trials, fault)
    if as_json:
        values = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in result.as_dict().items()
        }
        typer.echo(json.dumps(values, allow_nan=False))
    else:
        _print(result)
    if not result.passed:
        raise typer.Exit(1)


audit.__doc__ = (audit.__doc__ or "") + "\n" + EXAMPLES


def _print(result: Audit) -> None:
    from rich.console import Console
    from rich.table import Table

    from dpcsgp.privacy.accounting import describe_epsilon

    table = Table(title="audit of the message stream", show_header=False, title_justify="left")
    rows = {
        "method": f"{result.algorithm}, compression {result.compression}"
        + (f", BROKEN ON PURPOSE: {result.fault}" if result.fault else ""),
        "promise": f"{result.steps} releases, noise multiplier {result.noise_multiplier:.4g}, "
        f"sampling rate {result.sampling_rate:.4g}, {result.neighbouring_relation}",
        "attacker": f"hears {result.messages_per_trial} rounds of messages; best score: {result.attack}",
        "unseen trials": f"{result.hits} of {result.positives} canaries found, "
        f"{result.false_alarms} of {result.negatives} false alarms",
        "reported eps": f"{describe_epsilon(result.epsilon_claimed)} at delta {result.delta:g}",
        f"lower bound on eps ({100 * result.confidence:g} %)": describe_epsilon(result.epsilon_lower_bound),
        "for any mechanism": describe_epsilon(result.epsilon_lower_bound_any_mechanism),
        "seconds": f"{result.seconds:.1f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    if result.passed:
        console.print("passed: the attack shows nothing beyond the reported eps", style="green")
    else:
        console.print("FAILED: the attack shows more than the reported eps allows", style="bold red")
