"""`dpcsgp plan`: what a run will cost and which settings to choose, before any data are opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpcsgp.cli.options import AsJson, RunOrFile, Settings, as_settings, settings_file
from dpcsgp.cli.own_plan import (
    is_own_model,
    one_number,
    plan_own_model,
    refuse_limits,
    write_settings,
)
from dpcsgp.records.metrics import strict_json

if TYPE_CHECKING:
    from dpcsgp.config import Config
    from dpcsgp.planning import Limits, Plan, Row


Features = Annotated[
    str | None,
    typer.Option(
        help="Same as task.features; default: tries 'standardize', low frequencies and, "
        "without --model, HOG."
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="Write the chosen settings here.", metavar="FILE.toml")
]
NumExamples = Annotated[
    str | None,
    typer.Option(
        help="Declared examples per node, or for a model of your own one number per node: "
        "60,80,90. Default: an even share of the published ones.",
        metavar="NUMBERS",
    ),
]
Megabytes = Annotated[float | None, typer.Option(help="Most megabytes (10^6 bytes) over one edge.")]
Minutes = Annotated[
    float | None, typer.Option(help="Most minutes of training, all nodes in one process.")
]


def plan(
    config_file: RunOrFile = None,
    settings: Settings = None,
    task: Annotated[str | None, typer.Option(help="Same as task.name.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Same as task.model, or module:function that builds a model of your own."
        ),
    ] = None,
    features: Features = None,
    graph: Annotated[str | None, typer.Option(help="Same as graph.name.")] = None,
    num_nodes: Annotated[int | None, typer.Option(help="Same as graph.num_nodes.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Same as privacy.epsilon.")] = None,
    delta: Annotated[float | None, typer.Option(help="Same as privacy.delta.")] = None,
    max_colluders: Annotated[
        str | None, typer.Option(help="Same as privacy.max_colluders: a number, or all.")
    ] = None,
    num_examples: NumExamples = None,
    max_megabytes: Megabytes = None,
    max_minutes: Minutes = None,
    loss: Annotated[
        str, typer.Option(help="Of a model of your own: cross_entropy or mse.")
    ] = "cross_entropy",
    input_shape: Annotated[
        str | None,
        typer.Option(help="Of one input of your own model: 3,32,32.", metavar="NUMBERS"),
    ] = None,
    out: Out = None,
    top: Annotated[int, typer.Option(min=1, help="Number of rows to show.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Choose settings before any data are opened, and say what a run with them costs.

    For the built-in data sets many batch sizes, steps and ways of exchanging are tried. For a model
    of your own (--model module:function, found from this folder) the settings follow from shapes,
    the nodes' declared sizes and the budget, as in dpcsgp.train. docs/stability.md and
    docs/own-data.md state the rules.

    Examples: plan within limits, then train as planned:

    ```
    dpcsgp plan --epsilon 0.5 --max-megabytes 1 --out plan.toml
    dpcsgp run plan.toml
    dpcsgp plan --epsilon 0.2 --max-colluders 3 --max-megabytes 1.3
    dpcsgp plan --task digits --num-nodes 4 --epsilon 4 --model mlp:16 --json
    ```

    A model of your own, four nodes:

    ```
    dpcsgp plan --model my_model:build --num-examples 60,80,90,100 --epsilon 2
    ```
    """
    from rich.console import Console

    from dpcsgp.config import load_config
    from dpcsgp.planning import Limits

    own = model is not None and is_own_model(model)
    shortcuts = {
        "task.name": task,
        "task.model": None if own else model,
        "task.features": features,
        "graph.name": graph,
        "graph.num_nodes": num_nodes,
        "privacy.epsilon": epsilon,
        "privacy.delta": delta,
        "privacy.max_colluders": max_colluders,
    }
    changes, config_file = [*(settings or []), *as_settings(shortcuts)], settings_file(config_file)
    if model is not None and own:
        refuse_limits(task, features, max_megabytes, max_minutes)
        plan_own_model(model, num_examples, config_file, changes, loss, input_shape, out, as_json)
        return
    config = load_config(config_file, changes)
    # what the caller has decided is not varied; a file decides about the features
    decided = {setting.partition("=")[0].strip() for setting in settings or []}
    decided |= {key for key, value in shortcuts.items() if value is not None}
    decided |= {"task.features"} if config_file else set()
    console, limits = Console(quiet=as_json), Limits(max_megabytes, max_minutes)
    with console.status("planning") as status:
        found = _search(config, one_number(num_examples), limits, status.update, decided)
    if out is not None:
        write_plan(out, found.chosen)
    if as_json:
        typer.echo(strict_json(_answer(found, top)))
    else:
        _print(console, found, top, out)


def _search(
    config: Config,
    num_examples: int | None,
    limits: Limits,
    show: Callable[[str], None],
    decided: set[str],
) -> Plan:
    """Search over plans for these features, or over public features (and their models) too."""
    from dpcsgp.planning import declared_facts, search, search_features

    if "task.features" in decided:
        return search(config, declared_facts(config, num_examples), limits, show)
    free_model = "task.model" not in decided
    return search_features(config, num_examples, limits, show, free_model=free_model)


def write_plan(path: Path, row: Row) -> None:
    """Write the settings of one row as TOML that `dpcsgp run` accepts."""
    cost = f"{row.bytes_per_edge:,} bytes per edge, about {row.seconds:.0f} s in one process"
    write_settings(path, row.config, cost)


def _shown(found: Plan, top: int) -> list[Row]:
    """Return the chosen row, the best without messages, and the best of every way of exchanging."""
    # rows come best first, so the first of a kind is its best
    best: dict[tuple[str, str], Row] = {}
    for row in found.rows:
        best.setdefault((row.exchange, row.config.task.features), row)
    silent = [row for row in best.values() if not row.config.method.sends][:1]
    rows = list({id(row): row for row in (found.chosen, *silent, *best.values())}.values())
    return sorted(rows[:top], key=lambda row: row.outlook.shortfall)


def _answer(found: Plan, top: int) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "chosen": _as_dict(found.chosen, True),
        "rows": [_as_dict(row, row is found.chosen) for row in _shown(found, top)],
        "num_within_limits": len(found.rows),
        "num_tried": found.num_tried,
    }


def _as_dict(row: Row, chosen: bool) -> dict[str, Any]:
    config: Config = row.config
    return {
        "chosen": chosen,
        "on_front": row.on_front,
        "algorithm": config.algorithm.name,
        "exchange": row.exchange,
        "features": config.task.features,
        "model": config.task.model,
        "steps": config.algorithm.steps,
        "batch_size": row.batch_size,
        "learning_rate": row.outlook.learning_rate,
        "mixing_rate": row.mixing_rate,
        "noise_multiplier": row.outlook.noise_multiplier,
        "gradient_noise": row.outlook.gradient_noise,
        "model_noise": row.outlook.model_noise,
        "reference": row.outlook.reference,
        "noise_to_reference": row.outlook.noise_to_reference,
        "disagreement": row.outlook.disagreement,
        "shortfall": row.outlook.shortfall,
        "bytes_per_edge": row.bytes_per_edge,
        "memory_bytes": row.memory_bytes,
        "seconds": row.seconds,
    }


def _inputs(row: Row) -> str:
    """Return the features, and whether the model on them is linear."""
    return row.config.task.features + (" lin." if row.config.task.model == "logistic" else "")


def _print(console: Any, found: Plan, top: int, out: Path | None) -> None:
    chosen = found.chosen
    console.print(_choice(chosen), highlight=False, soft_wrap=True)
    console.print(_table(found, top))
    names = [row.exchange for row in _shown(found, top)]
    for line in _legend(names, len(found.rows), found.num_tried):
        console.print(line, highlight=False, markup=False, emoji=False)
    if out is not None:
        console.print(f"settings: {out}    next: dpcsgp run {out}", highlight=False, soft_wrap=True)


def _choice(row: Row) -> str:
    """Say what was chosen and what it costs."""
    settings = row.config.algorithm
    return (
        f"chosen: {row.exchange}, {settings.steps} steps with batches of {row.batch_size}, "
        f"learning rate {settings.learning_rate:g}\n"
        f"it costs {row.bytes_per_edge / 1e6:.3g} MB per edge, about {row.seconds / 60:.1f} min "
        f"and {row.memory_bytes / 1e9:.2g} GB, all nodes in one process"
    )


def _table(found: Plan, top: int) -> Any:
    from rich.table import Table

    privacy = found.chosen.config.privacy
    title = f"{found.chosen.config.task.name}, eps {privacy.epsilon}, delta {privacy.delta}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("", "exchange", "features"):
        table.add_column(name, no_wrap=True)
    for name in ("steps", "batch", "rate", "noise", "shortfall", "MB/edge", "GB", "min"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in _shown(found, top):
        sign = ("->" if row is found.chosen else "  ") + ("*" if row.on_front else "")
        outlook = row.outlook
        table.add_row(
            sign,
            row.exchange,
            _inputs(row),
            str(row.config.algorithm.steps),
            str(row.batch_size),
            f"{outlook.learning_rate:g}",
            f"{outlook.noise_multiplier:.3g}",
            f"{outlook.shortfall:.4f}",
            f"{row.bytes_per_edge / 1e6:.3f}",
            f"{row.memory_bytes / 1e9:.2f}",
            f"{row.seconds / 60:.1f}",
            style="bold" if row is found.chosen else "",
        )
    return table


def _legend(names: Sequence[str], num_rows: int, num_tried: int) -> list[str]:
    """Explain the columns, and of the ways of exchanging those that are shown."""
    marks = "".join(names)
    ways = {
        "rot:": "rot:b: b bits a coordinate, after a random rotation",
        "gsgd:": "gsgd:b/k: b bits a coordinate, one scale for k of them",
        "rand:": "rand:p: a random share p of the coordinates",
        "none": "none: messages as they are",
        "q-block:": "q-block:k: one of k blocks of coordinates a round, in 8 bits",
        " /": "/3: an exchange in every third step only",
        "end ": "end: an exchange after the last step only",
        "local": "local: nothing is sent",
    }
    if any(name.startswith("block:") for name in names):
        ways = {"block:": "block:k: one of k blocks of coordinates a round, exactly", **ways}
    return [
        f"{num_rows} of {num_tried} plans are within the limits; -> is chosen.",
        "*: no other plan is as good in shortfall, bytes and time.",
        "noise: standard deviation on the sum of a batch, in clip norms.",
        "shortfall: how far noise and few steps are expected to keep the model from "
        "its best; smaller is better, and only differences within this table mean something.",
        *(text for mark, text in ways.items() if mark in marks),
    ]
