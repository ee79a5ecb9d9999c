"""`dpcsgp demo`: ten private nodes learn MNIST together, and alone, at the same budget."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

# The control trains without messages. Alone, a node's noise is not averaged away, which wants a
# smaller learning rate.
LOCAL = ["algorithm.name=local", "algorithm.learning_rate=2.0", "algorithm.polish_rounds=0"]


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder for both runs; default: a new one under runs/.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value for both runs.", metavar="KEY=VALUE"),
    ] = None,
) -> None:
    """Train 10 private nodes on MNIST, then each alone with the same budget; show both on a page.

    Example:

    ```
    dpcsgp demo --set task.name=fashion_mnist
    ```
    """
    from rich.console import Console

    from dpcsgp.console.reporter import ConsoleReporter
    from dpcsgp.console.tables import outcome_table
    from dpcsgp.privacy import composed_epsilon, read_ledgers, releases_by_node
    from dpcsgp.report import write_report
    from dpcsgp.runtime.requests import BuiltinRequest
    from dpcsgp.runtime.session import Hooks, run_simulated

    console = Console()
    folder = out or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    hooks, common = Hooks(ConsoleReporter(console), write_page=True), tuple(settings or ())
    console.rule("together: compressed, private gossip")
    request = BuiltinRequest(settings=common, out=folder / "together")
    together = run_simulated(request, hooks).summary
    console.rule("alone: the zero-byte control, same budget")
    request = BuiltinRequest(settings=(*LOCAL, *common), out=folder / "alone")
    alone = run_simulated(request, hooks).summary
    console.print(outcome_table(together, alone))
    # Two runs on the same examples: their releases are composed, node by node.
    by_node = releases_by_node(read_ledgers([folder / "together", folder / "alone"]))
    epsilon = max(composed_epsilon(releases, together["delta"]) for releases in by_node.values())
    console.print(
        f"Both runs used the same examples: whoever sees both learns at most eps = {epsilon:.3f} "
        f"(delta = {together['delta']:g}) about any one of them.",
        soft_wrap=True,
    )
    page = write_report([folder / "together", folder / "alone"], folder / "report.html")
    console.print(
        f"open this page: {page.resolve()}", style="bold", soft_wrap=True, highlight=False
    )
