"""`dpcsgp benchmark`: speed as ratios against peers and limits, all measured in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

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
            help="clipping, models, compression, mixing, noise, step, scale or all.",
            metavar="[GROUP]",
        ),
    ] = "all",
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: see that it runs, nothing else.")
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(help="Draw cost and memory against the number of nodes.", metavar="FILE.png"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure ratios against plain SGD, Opacus and torch, and hold them to their limits.

    Exit code 1 if a limit is broken. Opacus comes with `pip install "dpcsgp[bench]"`; without it
    its rows are left out, and so are models of transformers and peft where these are missing.

    Examples: a few seconds; some minutes and 8 GB of memory; 10 to 1000 simulated nodes:

    ```
    dpcsgp benchmark noise
    dpcsgp benchmark all --json > speed.json
    dpcsgp benchmark scale --figure docs/figures/scale.png
    ```
    """
    from dpcsgp.benchmarking import benchmark as measure
    from dpcsgp.errors import ConfigError

    # Refused before minutes of measuring.
    if figure is not None and group not in ("scale", "all"):
        raise ConfigError(
            f"--figure {figure}: drawn from the group scale; use `dpcsgp benchmark scale "
            f"--figure {figure}`"
        )
    outcome = measure(group, quick)
    if figure is not None:
        from dpcsgp.report.scale_figure import write_scale_figure

        write_scale_figure(figure, [point.as_dict() for point in outcome.scale])
    if as_json:
        typer.echo(strict_json(outcome.as_dict()))
    else:
        _print(outcome, figure)
    # None: a ratio that is held to no limit
    if any(ratio.passed is False for ratio in outcome.ratios):
        raise typer.Exit(1)


_WIDE: Final = 120  # columns that a row of all parts needs
_VERDICTS: Final = {None: "", True: "[green]pass[/]", False: "[bold red]FAIL[/]"}


def _print(outcome: Measurements, figure: Path | None) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=150)  # into a file: no line is broken
    console.print(_ratio_table(outcome.ratios, console.width))
    if outcome.scale:
        console.print(_scale_table(outcome))
    if outcome.hotspots:
        console.print(_profile_table(outcome))
    for note in outcome.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    if figure is not None:
        console.print(f"figure: {figure}", highlight=False, soft_wrap=True)


def _ratio_table(ratios: list[Ratio], width: int = 150) -> Table:
    """Put one ratio in a row; on a narrow terminal its parts stand under each other."""
    from rich.table import Table

    wide = width >= _WIDE
    headings = ("", "against", "ratio", "limit", "", "ours", "peer", "wall / cpu")
    headings = headings if wide else ("", "ratio", "limit", "ours, peer")
    table = Table(title="ratios: median over rounds, quartiles in brackets", title_justify="left")
    for heading in headings:
        justify = "left" if heading in ("", "against") else "right"
        table.add_column(heading, justify=justify, overflow="fold")
    for ratio in ratios:
        table.add_row(*(_wide_row(ratio) if wide else _narrow_row(ratio)))
    return table


def _wide_row(ratio: Ratio) -> tuple[str, ...]:
    clocks = "" if ratio.value_wall is None else f"{ratio.value_wall:.2f} / {ratio.value_cpu:.2f}"
    return (
        f"{ratio.name}\n  [dim]{ratio.note}[/]" if ratio.note else ratio.name,
        ratio.peer,
        f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})",
        _limit(ratio),
        _VERDICTS[ratio.passed],
        _amount(ratio.ours, ratio.unit),
        _amount(ratio.peers, ratio.unit),
        clocks,
    )


def _narrow_row(ratio: Ratio) -> tuple[str, ...]:
    lines = [ratio.name, f"  against {ratio.peer}", f"  [dim]{ratio.note}[/]" if ratio.note else ""]
    return (
        "\n".join(line for line in lines if line),
        f"{ratio.value:.2f}\n({ratio.low:.2f}-{ratio.high:.2f})",
        f"{_limit(ratio)}\n{_VERDICTS[ratio.passed]}",
        f"{_amount(ratio.ours, ratio.unit)}\n{_amount(ratio.peers, ratio.unit)}",
    )


def _limit(ratio: Ratio) -> str:
    sense = "at least" if ratio.at_least else "at most"
    return "" if ratio.limit is None else f"{sense} {ratio.limit:g}"


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
        justify = "left" if heading == "function" else "right"
        table.add_column(heading, justify=justify, overflow="fold")
    for spot in outcome.hotspots:
        seconds, share = _amount(spot.seconds, "s"), f"{100 * spot.share:.1f} %"
        table.add_row(spot.function, seconds, share, f"{spot.calls:.0f}")
    return table
