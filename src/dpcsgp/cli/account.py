"""`dpcsgp account`: what ledgers add up to, or what planned releases would cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpcsgp.cli.ledger import ExpectHead, expected_heads
from dpcsgp.cli.options import AsJson
from dpcsgp.errors import ConfigError
from dpcsgp.records.metrics import strict_json

if TYPE_CHECKING:
    from rich.console import Console

    from dpcsgp.privacy.events import ReleaseEvent
    from dpcsgp.privacy.ledger import LedgerContents, LedgerHead

DEFAULT_DELTA = 1e-4


Ledgers = Annotated[
    list[Path] | None,
    typer.Argument(help="Ledger files or results folders.", metavar="[LEDGER_OR_FOLDER]..."),
]
Delta = Annotated[float | None, typer.Option(help="Default: the ledgers' own, else 1e-4.")]
Noise = Annotated[float | None, typer.Option(help="Noise on the sum / clip norm.")]
Wanted = Annotated[
    float | None, typer.Option(help="Print the noise multiplier that gives this eps.")
]
Rate = Annotated[str | None, typer.Option(help="Batch size / examples: 0.01 or 2048/6000.")]


def account(
    ledgers: Ledgers = None,
    delta: Delta = None,
    noise_multiplier: Noise = None,
    epsilon: Wanted = None,
    sampling_rate: Rate = None,
    steps: Annotated[int | None, typer.Option(help="Number of releases.")] = None,
    sampling: Annotated[str, typer.Option(help="poisson or uniform.")] = "poisson",
    paper: Annotated[
        bool, typer.Option("--paper", help="The noise of Proposition 1: claimed beside verified.")
    ] = False,
    num_examples: Annotated[
        int | None, typer.Option(help="Examples per node, for --paper.")
    ] = None,
    c2: Annotated[float, typer.Option(help="The constant of Proposition 1, for --paper.")] = 1.0,
    figure: Annotated[
        Path | None,
        typer.Option(help="Draw eps against the number of colluders to FILE.png, .pdf or .svg."),
    ] = None,
    expect_head: ExpectHead = None,
    as_json: AsJson = False,
) -> None:
    """Compute eps: of ledgers, of planned releases, or the noise for a wanted eps.

    Examples: what one run spent, node by node; what runs on the same data add up to:

    ```
    dpcsgp account runs/first
    dpcsgp account runs/first runs/second --delta 1e-5
    ```

    With noise that cancels (privacy.max_colluders): eps for every number of colluders, as a figure:

    ```
    dpcsgp account runs/first --figure colluders.png
    ```

    What planned releases cost; the noise that a wanted eps takes; the paper's rule:

    ```
    dpcsgp account --noise-multiplier 1.1 --sampling-rate 0.01 --steps 1000
    dpcsgp account --epsilon 0.5 --sampling-rate 2048/6000 --steps 30
    dpcsgp account --paper --epsilon 0.5 --num-examples 6000 --steps 10000
    ```
    """
    planned = {
        "--noise-multiplier": noise_multiplier,
        "--epsilon": epsilon,
        "--sampling-rate": sampling_rate,
        "--steps": steps,
        "--num-examples": num_examples,
    }
    if expect_head and not ledgers:
        raise ConfigError(
            "--expect-head: give the ledgers that must contain it, such as runs/first"
        )
    if figure is not None and not ledgers:
        raise ConfigError("--figure: give the ledgers to draw, such as runs/first")
    # Three questions: what was spent, what the paper's rule is worth, what a plan would cost.
    if ledgers:
        _refuse([name for name, value in planned.items() if value is not None], paper)
        answer = _of_ledgers(ledgers, delta, expected_heads(expect_head))
    elif paper:
        answer = _of_paper(planned, DEFAULT_DELTA if delta is None else delta, c2, sampling)
    else:
        answer = _of_plan(planned, DEFAULT_DELTA if delta is None else delta, sampling)
    if figure is not None:
        _draw(answer, figure)
    if as_json:
        typer.echo(strict_json(answer))
    else:
        _print(answer)


def _refuse(given: Sequence[str], paper: bool) -> None:
    """Refuse options about planned releases beside ledgers of real ones."""
    extra = [*given, *["--paper"] * paper]
    if extra:
        raise ConfigError(
            f"{extra[0]}: not used with ledgers, which hold it; leave it out or leave out the "
            "ledgers"
        )


def _require(planned: dict[str, Any], *names: str) -> None:
    """Refuse a plan without the options that are named; the last name is the reason."""
    *needed, reason = names
    missing = [name for name in needed if planned[name] is None]
    if missing:
        raise ConfigError(
            f"{missing[0]}: needed with {reason}; see `dpcsgp account --help` for examples"
        )


def _of_ledgers(
    paths: list[Path], delta: float | None, heads: Sequence[LedgerHead] = ()
) -> dict[str, Any]:
    """Compose all releases per node."""
    from dpcsgp.privacy.ledger import common_delta, read_ledgers, releases_by_node

    ledgers = read_ledgers(paths, heads)
    delta = common_delta(delta, [ledger.header for ledger in ledgers])
    # all releases of a node add up, whichever run they belong to
    by_node = releases_by_node(ledgers)
    most = max(
        (len(event.by_colluders) for found in by_node.values() for event, _ in found), default=0
    )
    nodes = [_of_node(ledgers, node, releases, delta, most) for node, releases in by_node.items()]
    stated = {
        event.max_colluders
        for releases in by_node.values()
        for event, _ in releases
        if event.max_colluders is not None
    }
    return {
        "epsilon": max(row["epsilon"] for row in nodes),
        # Runs with different promises hold together against the smallest number of them.
        "max_colluders": min(stated) if stated else "all",
        "epsilon_all_collude": max(row["epsilon_all_collude"] for row in nodes),
        "epsilon_by_colluders": [
            max(row["epsilon_by_colluders"][colluders] for row in nodes)
            for colluders in range(most)
        ],
        "delta": delta,
        "neighbouring_relation": " / ".join(
            sorted({row["neighbouring_relation"] for row in nodes})
        ),
        "private": all(row["private"] for row in nodes),
        "nodes": nodes,
        "notes": _notes(ledgers),
    }


def _of_node(
    ledgers: list[LedgerContents],
    node: int,
    releases: Sequence[tuple[ReleaseEvent, int]],
    delta: float,
    most_colluders: int,
) -> dict[str, Any]:
    """Compose the releases of one node."""
    from dpcsgp.privacy.accounting import composed_epsilon, composed_relation, epsilon_against
    from dpcsgp.privacy.events import relation_of_unit

    own = [ledger for ledger in ledgers if ledger.header.node == node]
    return {
        "node": node,
        "runs": len({ledger.header.run_id for ledger in own}),
        "releases": sum(count for _, count in releases),
        "epsilon": composed_epsilon(releases, delta),
        "epsilon_all_collude": epsilon_against(releases, delta, "all"),
        "epsilon_by_colluders": [
            epsilon_against(releases, delta, colluders) for colluders in range(most_colluders)
        ],
        "neighbouring_relation": relation_of_unit(composed_relation(releases), _common_unit(own)),
        "private": all(ledger.header.private for ledger in own),
    }


def _common_unit(ledgers: list[LedgerContents]) -> str:
    """Return what all ledgers together promise: persons only where every single one does."""
    return "person" if all(each.header.unit == "person" for each in ledgers) else "example"


def _notes(ledgers: list[LedgerContents]) -> list[str]:
    notes = [
        f"{ledger.path}: the last record is torn and counts as spent"
        for ledger in ledgers
        if ledger.torn_event is not None
    ]
    notes += _fork_notes(ledgers)
    if not all(ledger.header.private for ledger in ledgers):
        notes.append(
            "some noise came from a seed: whoever knows it can subtract the noise, so these "
            "releases are not private"
        )
    return notes


def _fork_notes(ledgers: list[LedgerContents]) -> list[str]:
    """Name what was added because one run was continued, or started, more than once."""
    notes = [
        f"fork: {fork.path} continues a copy of {ledger.path} after {fork.common} releases; its "
        f"{fork.own} further releases are added"
        for ledger in ledgers
        for fork in ledger.forks
    ]
    # two ledgers of one run and node that share no line: the run was started twice
    first: dict[tuple[str, int], LedgerContents] = {}
    for ledger in ledgers:
        other = first.setdefault((ledger.header.run_id, ledger.header.node), ledger)
        if other is not ledger:
            both = f"{ledger.path} and {other.path}"
            notes.append(f"{both} are of one run and node but share no line; both are added")
    return notes


def _of_plan(planned: dict[str, Any], delta: float, sampling: str) -> dict[str, Any]:
    """Account for planned releases: eps from the noise, or the noise from eps."""
    from dpcsgp.privacy import accounting

    noise, target = planned["--noise-multiplier"], planned["--epsilon"]
    if (noise is None) == (target is None):
        raise ConfigError(
            "give ledgers, or --noise-multiplier, or --epsilon (one of them); see `dpcsgp "
            "account --help` for examples"
        )
    _require(planned, "--sampling-rate", "--steps", "--noise-multiplier or --epsilon")
    plan = {
        "sampling_rate": _rate(planned["--sampling-rate"]),
        "steps": planned["--steps"],
        "delta": delta,
        "sampling": sampling,
    }
    # Calibrated noise is accounted for like any other: the printed eps is what it really gives.
    if noise is None:
        noise = accounting.calibrate_noise(epsilon=target, **plan)
    return {
        "epsilon": accounting.epsilon(noise_multiplier=noise, **plan),
        **({"epsilon_wanted": target} if target is not None else {}),
        "noise_multiplier": noise,
        **plan,
        "neighbouring_relation": accounting.neighbouring_relation(sampling),
    }


def _of_paper(planned: dict[str, Any], delta: float, c2: float, sampling: str) -> dict[str, Any]:
    """Set the eps that Proposition 1 names beside what its noise gives and the noise it takes."""
    from dpcsgp.privacy import accounting

    _require(planned, "--epsilon", "--num-examples", "--steps", "--paper")
    claimed, num_examples = planned["--epsilon"], planned["--num-examples"]
    steps = planned["--steps"]
    # the proposition draws one example per step
    plan: dict[str, Any] = {
        "sampling_rate": 1 / num_examples if num_examples > 0 else 0.0,
        "steps": steps,
        "delta": delta,
        "sampling": sampling,
    }
    noise = accounting.paper_noise_multiplier(claimed, delta, steps, num_examples, c2)
    return {
        "epsilon_claimed": claimed,
        "epsilon": accounting.epsilon(noise_multiplier=noise, **plan),
        "noise_multiplier": noise,
        "noise_multiplier_needed": accounting.calibrate_noise(epsilon=claimed, **plan),
        "c2": c2,
        **plan,
        "neighbouring_relation": accounting.neighbouring_relation(sampling),
    }


def _rate(text: str) -> float:
    """Read `0.01` or `2048/6000`."""
    try:
        above, slash, below = text.partition("/")
        return float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f"--sampling-rate = {text!r}: expected a number such as 0.01 or a fraction such as "
            "2048/6000"
        ) from None


LABELS = {
    "epsilon_claimed": "eps claimed",
    "epsilon_wanted": "eps wanted",
    "epsilon": "eps verified",
    "max_colluders": "holds against colluders",
    "epsilon_all_collude": "eps if all others collude",
    "delta": "delta",
    "noise_multiplier": "noise multiplier",
    "noise_multiplier_needed": "noise multiplier that gives the claimed eps",
    "c2": "c2",
    "sampling_rate": "sampling rate",
    "sampling": "sampling",
    "steps": "releases",
    "neighbouring_relation": "neighbouring data sets",
}


def _draw(answer: dict[str, Any], path: Path) -> None:
    """Draw eps against the number of colluders, one line for the worst node."""
    from dpcsgp.report.colluders_figure import write_colluders_figure

    rows = answer["epsilon_by_colluders"]
    if not rows:
        raise ConfigError(
            "--figure: these releases have independent noise, so eps is the same for every number "
            "of colluders; it differs for runs with privacy.max_colluders"
        )
    write_colluders_figure(path, rows, answer["max_colluders"], answer["delta"])


def _print_colluders(console: Console, answer: dict[str, Any]) -> None:
    """Print eps for every number of colluders, where it depends on them."""
    from rich.table import Table

    from dpcsgp.privacy.accounting import describe_epsilon

    rows = answer.get("epsilon_by_colluders")
    if not rows:
        return
    table = Table("colluders", "eps, worst node", title="who may tell all they know")
    last = len(rows) - 1
    for colluders, epsilon in enumerate(rows):
        name = f"{colluders} (all others)" if colluders == last else str(colluders)
        mark = "bold" if colluders == answer["max_colluders"] else ""
        table.add_row(name, describe_epsilon(epsilon), style=mark)
    console.print(table)


def _print(answer: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from dpcsgp.privacy.accounting import describe_epsilon

    def shown(key: str, value: Any) -> str:
        if key.startswith("epsilon"):
            return describe_epsilon(value)
        if key == "max_colluders":
            return "all others" if value == "all" else f"any {value} others"
        return f"{value:.6g}" if isinstance(value, float) else str(value)

    console = Console()
    if "nodes" in answer:
        table = Table(
            "node", "runs", "releases", "eps", "neighbouring data sets", title="eps spent, per node"
        )
        for row in answer["nodes"]:
            cells = [row["node"], row["runs"], row["releases"], describe_epsilon(row["epsilon"])]
            table.add_row(*map(str, cells), row["neighbouring_relation"])
        console.print(table)
    summary = Table(show_header=False, box=None)
    for key, label in LABELS.items():
        if key in answer:
            summary.add_row(
                label, shown(key, answer[key]), style="bold" if key == "epsilon" else ""
            )
    console.print(summary)
    _print_colluders(console, answer)
    for note in answer.get("notes", []):
        console.print(f"note: {note}", markup=False)
