"""`dpcsgp benchmark`: speed as ratios against peers and limits, all measured in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpcsgp.cli.options import AsJson
from dpcsgp.records.metrics import strict_json

if TYPE_CHECKING:
    from rich.table import Table

    from dpcsgp.benchmarking import Measurements, Ratio


def benchmark(
    group: Annotated[
        str,
        typer.Argument(
            help="clipping, models, compression, mixing, noise, step, scale or all (of these); "
            "federation; link.",
            metavar="[GROUP]",
        ),
    ] = "all",
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: see that it runs, nothing else.")
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="With scale: cost against the number of nodes. With link: accuracy against time.",
            metavar="FILE.png",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure ratios against plain SGD, Opacus and torch, and hold them to their limits.

    Exit code 1 if a limit is broken. Opacus comes with `pip install "dpcsgp[bench]"`; without it
    its rows are left out, and so are models of transformers and peft where these are missing.

    `federation` starts parties on this machine and compares them with `launch`. `link` lets ten
    parties learn MNIST over links of 4 Mbit/s with 50 ms delay, with small and with exact messages.

    Examples: a few seconds; some minutes and 8 GB of memory; 10 to 1000 simulated nodes; parties
    beside `launch`, minutes; thin links, minutes:

    ```
    dpcsgp benchmark noise
    dpcsgp benchmark all --json > speed.json
    dpcsgp benchmark scale --figure docs/figures/scale.png
    dpcsgp benchmark federation
    dpcsgp benchmark link --figure docs/figures/link.png
    ```
    """
    from dpcsgp.errors import ConfigError

    # Refused before minutes of measuring.
    if figure is not None and group not in ("scale", "all", "link"):
        raise ConfigError(
            f"--figure {figure}: drawn from the groups scale and link; use `dpcsgp benchmark scale "
            f"--figure {figure}`"
        )
    outcome = _measured(group, quick)
    if figure is not None:
        _draw(figure, outcome, quick)
    if as_json:
        typer.echo(strict_json(outcome.as_dict()))
    else:
        _print(outcome, figure)
    # None: a ratio that is held to no limit
    if any(ratio.passed is False for ratio in outcome.ratios):
        raise typer.Exit(1)


def _measured(group: str, quick: bool) -> Measurements:
    from dpcsgp.benchmarking import benchmark as measure

    # Parties stand above the other groups: a federation uses all of them.
    if group == "federation":
        from dpcsgp.federation.overhead import benchmark_federation

        return benchmark_federation(quick)
    if group == "link":
        from dpcsgp.federation.link_trial import benchmark_link

        return benchmark_link(quick, lambda text: typer.echo(text, err=True))
    return measure(group, quick)


def _draw(figure: Path, outcome: Measurements, quick: bool) -> None:
    if not outcome.curves:
        from dpcsgp.report.scale_figure import write_scale_figure

        write_scale_figure(figure, [point.as_dict() for point in outcome.scale])
        return
    from dpcsgp.federation.link_trial import link_title
    from dpcsgp.report.link_figure import write_link_figure

    write_link_figure(figure, outcome.curves, *link_title(quick))


def _print(outcome: Measurements, figure: Path | None) -> None:
    from rich.console import Console

    console = Console()
    console.print(_ratio_table(outcome.ratios))
    if outcome.scale:
        console.print(_scale_table(outcome))
    if outcome.hotspots:
        console.print(_profile_table(outcome))
    for note in outcome.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    if figure is not None:
        console.print(f"figure: {figure}", highlight=False, soft_wrap=True)


def _ratio_table(ratios: list[Ratio]) -> Table:
    """Two lines for every ratio: the numbers, and below them against what, and a note."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title="ratios: median over rounds, quartiles in brackets",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for heading in ("", "ratio", "limit", "", "ours", "peer"):
        table.add_column(heading, justify="left" if not heading else "right")
    for ratio in ratios:
        limit = "" if ratio.limit is None else f"{'>=' if ratio.at_least else '<='} {ratio.limit:g}"
        verdict = {None: "", True: "[green]pass[/]", False: "[bold red]FAIL[/]"}[ratio.passed]
        against = "; ".join(filter(None, [f"against {ratio.peer}", ratio.note, _clocks(ratio)]))
        table.add_row(
            f"{escape(ratio.name)}\n  [dim]{escape(against)}[/]",
            f"{ratio.value:.2f}\n({ratio.low:.2f}-{ratio.high:.2f})",
            limit,
            verdict,
            _amount(ratio.ours, ratio.unit),
            _amount(ratio.peers, ratio.unit),
        )
    return table


def _clocks(ratio: Ratio) -> str:
    """Say what both clocks gave, where both were read."""
    if ratio.value_wall is None or ratio.value_cpu is None:
        return ""
    return f"wall {ratio.value_wall:.2f}, processor {ratio.value_cpu:.2f}"


def _amount(value: float, unit: str) -> str:
    return f"{value / 1e6:,.0f} MB" if unit == "B" else f"{1e3 * value:,.2f} ms"


def _scale_table(outcome: Measurements) -> Table:
    from rich.table import Table

    table = Table(title="cost per node and step", title_justify="left")
    for heading in ("nodes", "wall", "processor", "peak memory", "tensors of N x D float32"):
        table.add_column(heading, justify="right")
    for point in outcome.scale:
        times = (_amount(point.wall, "s"), _amount(point.cpu, "s"))
        peak = _amount(point.peak, "B")
        table.add_row(str(point.num_nodes), *times, peak, f"{point.matrices:.1f}")
    return table


def _profile_table(outcome: Measurements) -> Table:
    from rich.table import Table

    table = Table(title="profile of one step: time in the function itself", title_justify="left")
    for heading in ("function", "per step", "share", "calls"):
        table.add_column(heading, justify="left" if heading == "function" else "right")
    for spot in outcome.hotspots:
        seconds, share = _amount(spot.seconds, "s"), f"{100 * spot.share:.1f} %"
        table.add_row(spot.function, seconds, share, f"{spot.calls:.0f}")
    return table
