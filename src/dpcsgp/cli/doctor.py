"""`dpcsgp doctor`: will gossip be healthy, what does a message cost, is this machine fit?"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpcsgp.cli.options import AsJson, RunOrFile, Settings, as_settings, settings_file
from dpcsgp.records.metrics import strict_json

if TYPE_CHECKING:
    from dpcsgp.graphs import TheoremReport, Topology
    from dpcsgp.planning import Diagnosis, SweepRow

FIGURE_SPECS = ("rand:0.9", "rand:0.5", "rand:0.1", "gsgd:8/512", "gsgd:4/64", "rot:1")


Sweep = Annotated[bool, typer.Option("--sweep", help="Table of many compressors on this graph.")]


def doctor(
    config_file: RunOrFile = None,
    settings: Settings = None,
    graph: Annotated[str | None, typer.Option(help="Same as graph.name.")] = None,
    num_nodes: Annotated[int | None, typer.Option(help="Same as graph.num_nodes.")] = None,
    edge_probability: Annotated[
        float | None, typer.Option(help="Same as graph.edge_probability.")
    ] = None,
    graph_seed: Annotated[int | None, typer.Option(help="Same as graph.seed.")] = None,
    edges_file: Annotated[
        Path | None, typer.Option(help='Same as graph.edges_file, with graph.name = "edges".')
    ] = None,
    compressor: Annotated[str | None, typer.Option(help="Same as compression.spec.")] = None,
    mixing_rate: Annotated[
        str | None, typer.Option(help='Same as algorithm.mixing_rate: a number or "auto".')
    ] = None,
    dim: Annotated[
        int | None, typer.Option(help="Coordinates; default: those of the configured model.")
    ] = None,
    sweep: Sweep = False,
    paper: Annotated[
        bool, typer.Option("--paper", help="Also show the constants and conditions of the theorem.")
    ] = False,
    figure: Annotated[
        Path | None, typer.Option(help="Draw radius against mixing rate.", metavar="FILE.png")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Will nodes with these settings come to agree, what does a message cost, is this machine fit?

    Exit code 1: unhealthy, the models would drift apart or blow up; 2: wrong input.

    Examples: the settings of a run; a graph and a compressor; all compressors on a graph; the
    conditions of the convergence theorem, which hardly any setting that trains well satisfies:

    ```
    dpcsgp doctor my.toml --set compression.spec=rot:1
    dpcsgp doctor runs/first
    dpcsgp doctor --graph directed_ring --compressor rand:0.5 --mixing-rate 1
    dpcsgp doctor --graph random_digraph --num-nodes 20 --sweep --figure r.png
    dpcsgp doctor --paper
    ```
    """
    from dpcsgp.config import load_config
    from dpcsgp.planning import diagnose
    from dpcsgp.planning import sweep as sweep_graph

    shortcuts = {
        "graph.name": "edges" if edges_file and not graph else graph,
        "graph.num_nodes": num_nodes,
        "graph.edge_probability": edge_probability,
        "graph.seed": graph_seed,
        "graph.edges_file": edges_file,
        "compression.spec": compressor,
        "algorithm.mixing_rate": mixing_rate,
    }
    file = settings_file(config_file)
    config = load_config(file, [*(settings or []), *as_settings(shortcuts)])
    dim, examples = _size(config, dim, file.parent if file is not None else Path())
    found = diagnose(config, dim, examples)
    rows = sweep_graph(found.topology, dim, max_lag=config.network.max_lag) if sweep else []
    if figure is not None:
        _draw(figure, found)
    if as_json:
        typer.echo(strict_json({**_answer(found), "sweep": [asdict(row) for row in rows]}))
    else:
        _print(found, rows, figure, paper)
    if not found.healthy:
        raise typer.Exit(1)


def _draw(path: Path, found: Diagnosis) -> None:
    """Draw the radius of this compressor, where it has one, beside that of common ones."""
    from dpcsgp.planning import radius_curves
    from dpcsgp.report.stability_figure import write_radius_figure

    specs = [found.compressor.spec, *FIGURE_SPECS] if found.stability else list(FIGURE_SPECS)
    # Compressors without a law are left out of the figure.
    curves = radius_curves(found.topology, found.dim, specs)
    write_radius_figure(path, _title(found.topology, found.dim), *curves)


def _size(config: Any, dim: int | None, folder: Path) -> tuple[int, int]:
    """Return the number of coordinates and of examples per node, from declared shapes.

    Those of a model of one's own are in the folder of its run.
    """
    from dpcsgp.parameters import ParameterLayout
    from dpcsgp.planning import declared_facts
    from dpcsgp.runs.facts import OwnFacts
    from dpcsgp.tasks import build_model

    if config.task.name == "own":
        own = OwnFacts.read(folder)
        smallest = min(size for size in own.num_examples if size)
        return own.num_coordinates if dim is None else dim, smallest
    # From the catalogue: no data file is opened.
    facts = declared_facts(config)
    if dim is None:
        model = build_model(config.task.model, facts.input_shape, facts.num_classes)
        dim = ParameterLayout.of(model).dim
    return dim, min(facts.num_examples)


def _title(topology: Topology, dim: int) -> str:
    return f"{topology.name}, {topology.num_nodes} nodes, {dim:,} coordinates"


def _answer(found: Diagnosis) -> dict[str, Any]:
    """Return all findings under the names that `--json` prints."""
    # Verdict, setting, contraction, price of a message, then the theorem.
    stability = found.stability
    return {
        "healthy": found.healthy,
        "verdict": found.verdict,
        "graph": found.topology.name,
        "num_nodes": found.topology.num_nodes,
        "num_edges": len(found.topology.edges),
        "strongly_connected": True,  # a topology that is not cannot be built
        "column_stochastic": True,
        "doubly_stochastic": found.topology.is_doubly_stochastic,
        "algorithm": found.algorithm,
        "compressor": found.compressor.spec,
        "dim": found.dim,
        "mixing_rate": found.mixing_rate,
        "radius": found.radius,
        "radius_at_one": stability.radius_at_one if stability else None,
        "advised_rate": stability.advised_rate if stability else None,
        "advised_radius": stability.advised_radius if stability else None,
        "classification": stability.verdict if stability else None,
        "rounds_to_halve": found.rounds_to_halve,
        "steady_state_disagreement": found.disagreement,
        "spread_that_stays": found.spread,
        "noise_of_message": found.sharing.of_message if found.sharing else 1.0,
        "noise_of_average": found.sharing.of_average if found.sharing else 1.0,
        "bytes_per_round": found.bytes_per_round,
        "paper_bits_per_round": found.paper_bits_per_round,
        **_theorem_answer(found.theorem),
    }


def _theorem_answer(theorem: TheoremReport) -> dict[str, Any]:
    """Return the theorem's constants and conditions under the names that `--json` prints."""
    constants = theorem.constants
    return {
        "second_eigenvalue": constants.second_eigenvalue,
        "lambda_spectral": constants.decay_spectral,
        "constant_spectral": constants.constant_spectral,
        "lambda_frobenius": constants.decay_frobenius,
        "constant_frobenius": constants.constant_frobenius,
        "beta": constants.smallest_mass,
        "phi_min": float(constants.stationary.min()),
        "phi_max": float(constants.stationary.max()),
        "distance_to_identity": constants.distance_to_identity,
        "omega": theorem.omega,
        "largest_omega_spectral": constants.largest_omega_spectral,
        "largest_omega_frobenius": constants.largest_omega_frobenius,
        "theorem_steps": theorem.steps,
        "theorem_learning_rate": theorem.learning_rate,
        "theorem_examples": theorem.required_examples,
        "proposition_epsilon_floor": theorem.epsilon_floor,
        "theorem_satisfied": theorem.holds,
        "conditions": [asdict(condition) for condition in theorem.conditions],
    }


def _print(found: Diagnosis, rows: list[SweepRow], figure: Path | None, paper: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    word, style = ("healthy", "bold green") if found.healthy else ("unhealthy", "bold red")
    console.print(word, style=style, end=": ")
    console.print(found.verdict, highlight=False, markup=False, soft_wrap=True)
    answer = _answer(found)
    table = Table(show_header=False, title=_title(found.topology, found.dim), title_justify="left")
    for name, value in (_lines(answer) | machine_lines()).items():
        table.add_row(name, value)
    console.print(table)
    if paper:
        _print_theory(console, found, answer)
    if rows:
        console.print(_sweep_table(rows))
        console.print(
            "at 1: the disagreement of the nodes is multiplied by this in every round, with mixing "
            "rate 1; best rate: what algorithm.mixing_rate = auto takes."
        )
    if figure is not None:
        console.print(f"figure: {figure}", highlight=False, soft_wrap=True)


def _print_theory(console: Any, found: Diagnosis, answer: dict[str, Any]) -> None:
    """Print the paper's constants and conditions, which inform and do not decide."""
    from rich.table import Table

    constants = Table(show_header=False, title="constants of the paper", title_justify="left")
    for name, value in _paper_lines(answer).items():
        constants.add_row(name, value)
    console.print(constants)
    theory = Table("theory asks", "", "", title="Theorem 1 and Proposition 1", title_justify="left")
    for condition in found.theorem.conditions:
        theory.add_row(condition.name, "yes" if condition.holds else "no", condition.sentence)
    console.print(theory)


def _lines(a: dict[str, Any]) -> dict[str, str]:
    """Return what was found, line by line, for somebody who has not read the paper."""
    lines = {
        "links": f"{a['num_edges']}, all one-way; every node is reached from every other",
        "method": f"{a['algorithm']}, compression {a['compressor']}, mixing rate "
        f"{a['mixing_rate']:.4g}",
        "disagreement, per round": "x "
        + _number(a["radius"], "unknown: no radius exists for this compressor"),
        "rounds until it is half": _number(a["rounds_to_halve"], "unknown"),
        "one message": f"{a['bytes_per_round']:,} bytes",
    }
    if (a["noise_of_message"], a["noise_of_average"]) != (1.0, 1.0):
        lines["shared noise"] = (
            f"noise of a message x {a['noise_of_message']:.2f}, "
            f"of the average x {a['noise_of_average']:.2f} of independent noise"
        )
    # Only error feedback has a rate to advise.
    if a["classification"] is not None:
        advised = (
            "no rate is stable" if math.isnan(a["advised_rate"]) else f"{a['advised_rate']:.4g}"
        )
        cautious = " (cautious, tested only)" if a["classification"] == "no law" else ""
        lines["advised mixing rate"] = f"{advised}{cautious}"
    if a["spread_that_stays"] > 0:
        lines["spread that stays"] = (
            f"{a['spread_that_stays']:.2g} of the displacement that all nodes share"
        )
    return lines


def machine_lines() -> dict[str, str]:
    """Return whether this machine is fit: versions, threads, room on the disk."""
    import os
    import platform
    import shutil
    from importlib.metadata import version

    import torch

    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    crowded = "; more than cores: set OMP_NUM_THREADS" if threads > cores else ""
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    scarce = "" if free > 1 else "; runs may fail: free some, or use --out elsewhere"
    return {
        "installed": f"dpcsgp {version('dpcsgp')}, torch {torch.__version__}, Python "
        f"{platform.python_version()}",
        "threads": f"{threads} of torch on {cores} cores{crowded}",
        "disk": f"{free:.1f} GB free in this folder{scarce}",
    }


def _paper_lines(a: dict[str, Any]) -> dict[str, str]:
    """Return the paper's constants, line by line."""
    doubly = "yes" if a["doubly_stochastic"] else "no: push-sum weights correct for it"
    lines = {"columns sum to one": "yes", "doubly stochastic": doubly}
    if a["classification"] is not None:
        lines["radius at mixing rate 1"] = _number(a["radius_at_one"], "no radius exists")
        lines["radius at the advised rate"] = _number(a["advised_radius"], "no radius exists")
        lines["behaviour"] = a["classification"]
    return lines | {
        "disagreement, unit noise per round": _number(a["steady_state_disagreement"], "unknown"),
        "one message, by formula": f"{a['paper_bits_per_round']:,} bits",
        "lambda (|lambda_2|)": f"{a['lambda_spectral']:.4g} ({a['second_eigenvalue']:.4g})",
        "C, spectral / Frobenius norm": f"{a['constant_spectral']:.4g} / "
        f"{a['constant_frobenius']:.4g} (lambda {a['lambda_frobenius']:.4g} with the latter)",
        "beta, smallest push-sum weight": f"{a['beta']:.4g}",
        "phi": f"{a['phi_min']:.4g} to {a['phi_max']:.4g}",
        "|A - I|": f"{a['distance_to_identity']:.4g}",
        "omega": f"{a['omega']:.4g}; Theorem 1 permits {a['largest_omega_spectral']:.4g} "
        f"(spectral), {a['largest_omega_frobenius']:.4g} (Frobenius)",
    }


def _number(value: float, otherwise: str, digits: int = 4) -> str:
    if math.isnan(value):
        return otherwise
    return "none: it grows" if math.isinf(value) else f"{value:.{digits}g}"


def _sweep_table(rows: list[SweepRow]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(
        title="compressors on this graph", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    for name in (
        "compressor",
        "radius\nat 1",
        "\nat 1",
        "best\nrate",
        "radius\nthere",
        "rounds\nto halve",
        "bytes\na round",
    ):
        table.add_column(
            name, justify="left" if name in ("compressor", "\nat 1") else "right", no_wrap=True
        )
    for row in rows:
        # Red: the paper's mixing rate 1 would not do.
        bad = row.verdict_at_one in ("divergent", "heavy-tailed")
        table.add_row(
            row.compressor,
            _number(row.radius_at_one, "-", 3),
            row.verdict_at_one,
            _number(row.best_rate, "none", 3),
            _number(row.best_radius, "-", 3),
            _number(row.rounds_to_halve, "-", 3),
            f"{row.bytes_per_round:,}",
            style="red" if bad else "",
        )
    return table
