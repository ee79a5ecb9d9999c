"""Draw the pictures of docs/concepts.md from computed values, and print the numbers that the page
quotes.

    python docs/figures/make_concepts.py [FOLDER]

Legend: N nodes, D coordinates, T rounds.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from dpcsgp.compression import parse_compressor
from dpcsgp.graphs import Topology, from_edges, graph_constants
from dpcsgp.privacy import calibrate_noise, epsilon
from dpcsgp.randomness import PublicRandomness
from dpcsgp.report.palette import colour

# Drawn at the width of a phone's page, so that 12 points stay 12 points there.
WIDTH = 5.2
STYLE: Any = {
    "font.size": 12,
    "axes.titlesize": 12.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "lines.linewidth": 2.2,
    "legend.fontsize": 11,
    "legend.framealpha": 0.9,
}
EDGES = [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3), (2, 5), (3, 4), (4, 0), (4, 5), (5, 0)]
ROUNDS = 16
START_N = np.array([6.0, 1.0, 3.0, 8.0, 2.0, 4.0])
DIM = 4096


def graph() -> Topology:
    """Return the digraph of the page: six nodes with one to three receivers each."""
    return from_edges(6, EDGES, name="six nodes")


def draw_graph(topology: Topology) -> Figure:
    """Draw the nodes on a circle, one-way links as arrows, and the shares of node 0."""
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set(xlim=(-1.45, 1.45), ylim=(-1.3, 1.3))
    angle_N = np.pi / 2 - 2 * np.pi * np.arange(topology.num_nodes) / topology.num_nodes
    place_N2 = np.stack([np.cos(angle_N), np.sin(angle_N)], axis=1)
    for sender, receiver in topology.edges:
        arrow = FancyArrowPatch(
            tuple(place_N2[sender]), tuple(place_N2[receiver]), arrowstyle="-|>", mutation_scale=18, shrinkA=19, shrinkB=19,
            connectionstyle="arc3,rad=0.12", linewidth=2, color=colour(0) if sender == 0 else "#8a949e",
        )  # fmt: skip
        axes.add_patch(arrow)
        if sender == 0:
            along_2 = place_N2[receiver] - place_N2[sender]
            aside_2 = np.array([along_2[1], -along_2[0]]) / np.linalg.norm(along_2)
            place_2 = (place_N2[sender] + place_N2[receiver]) / 2 + 0.06 * np.linalg.norm(along_2) * aside_2
            share = f"1/{round(1 / topology.weights[receiver, 0])}"
            axes.text(
                float(place_2[0] + 0.13 * aside_2[0]),
                float(place_2[1] + 0.13 * aside_2[1]),
                share,
                color=colour(0),
                ha="center",
                va="center",
            )
    for node, (x, y) in enumerate(place_N2):
        axes.scatter(
            [x], [y], s=1100, color=colour(0) if node == 0 else "white", edgecolor=colour(0), linewidth=2, zorder=3
        )
        axes.text(
            x, y, str(node), ha="center", va="center", color="white" if node == 0 else colour(0), zorder=4, size=14
        )
    axes.text(place_N2[0][0] - 0.24, place_N2[0][1] + 0.05, "keeps 1/4", color=colour(0), ha="right")
    return figure


def push_sum(topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """Return numerators x and weights y (T + 1, N) of push-sum from `START_N`: both are multiplied
    by A in a round."""
    x_TN, y_TN = [START_N], [np.ones(topology.num_nodes)]
    for _ in range(ROUNDS):
        x_TN.append(topology.weights @ x_TN[-1])
        y_TN.append(topology.weights @ y_TN[-1])
    return np.array(x_TN), np.array(y_TN)


def draw_push_sum(topology: Topology) -> Figure:
    """Draw weights, numerators and their quotients against rounds."""
    x_TN, y_TN = push_sum(topology)
    figure = Figure(figsize=(WIDTH, 7.2), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    titles = (
        "weights y: they settle, but not at 1",
        "numerators x: each node ends elsewhere",
        "models z = x / y: all at the average",
    )
    for axes, values_TN, title in zip(panels, (y_TN, x_TN, x_TN / y_TN), titles, strict=True):
        for node in range(topology.num_nodes):
            axes.plot(values_TN[:, node], color=colour(node), label=f"node {node}")
        axes.set_title(title, loc="left")
    panels[2].axhline(START_N.mean(), color="black", linestyle=":", linewidth=1.5)
    panels[0].legend(ncols=3, loc="upper right", handlelength=1.2, columnspacing=1)
    panels[0].set_ylim(0, 2.6)
    panels[2].set_xlabel("round")
    settled_N = graph_constants(topology).stationary * topology.num_nodes
    print("push-sum weights after", ROUNDS, "rounds:", np.round(y_TN[-1], 3).tolist())
    print("limit n * phi:", np.round(settled_N, 3).tolist())
    print(f"average {START_N.mean():g}; models after {ROUNDS} rounds:", np.round((x_TN / y_TN)[-1], 3).tolist())
    return figure


def residuals(spec: str, rounds: int, drift: float) -> np.ndarray:
    """Return |x - x_hat| / |x_0| after each round of x_hat += Q(x - x_hat), while x moves by
    `drift` |x_0| a round."""
    compressor, random = parse_compressor(spec), PublicRandomness(0, [0])
    generator = torch.Generator().manual_seed(0)
    x_1D = torch.randn(1, DIM, generator=generator)
    start, x_hat_1D, found = x_1D.norm(), torch.zeros_like(x_1D), [1.0]
    for round_ in range(rounds):
        wire_1B = compressor.encode(x_1D - x_hat_1D, random, round_)
        x_hat_1D = x_hat_1D + compressor.decode(wire_1B, DIM, random, round_)
        found.append(float((x_1D - x_hat_1D).norm() / start))
        step_1D = torch.randn(1, DIM, generator=generator)
        x_1D = x_1D + step_1D * (drift * start / step_1D.norm())
    return np.array(found)


def draw_error_feedback() -> Figure:
    """Draw the residual of one node's public copy under rot:1, for a model that rests and one that
    moves."""
    rounds, drift = 14, 0.05
    resting_T, moving_T = residuals("rot:1", rounds, 0.0), residuals("rot:1", rounds, drift)
    left_over = math.sqrt(1 - 2 / math.pi)
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.axhline(left_over, color="#8a949e", linestyle="--", label="no memory: the same error "
                                                                   "for ever")
    axes.semilogy(moving_T, "s-", color=colour(1), label="the model moves by 5 % a round")
    axes.semilogy(resting_T, "o-", color=colour(0), label="the model rests")
    axes.set(xlabel="round", ylim=(3e-4, 1.5))
    axes.set_title("what the others do not know yet, |x - x_hat| / |x|", loc="left")
    axes.legend(loc="lower left")
    factor = (resting_T[10] / resting_T[0]) ** 0.1
    size = parse_compressor("rot:1").num_bytes(DIM)
    print(f"rot:1, {DIM} coordinates: {size} bytes a round instead of {4 * DIM}")
    print(f"residual per round, resting model: {factor:.3f} measured, {left_over:.3f} = sqrt(1 - "
          "2/pi) predicted")
    expected = drift * math.sqrt(left_over**2 / (1 - left_over**2))
    print(f"moving model: settles at {moving_T[-5:].mean():.3f}, predicted {expected:.3f}")
    return figure


def draw_budget() -> Figure:
    """Draw eps against releases: noise that was calibrated for 30 releases, and half and twice as
    much."""
    rate, delta, planned, budget = 2048 / 6000, 1e-4, 30, 0.5
    noise = calibrate_noise(epsilon=budget, delta=delta, sampling_rate=rate, steps=planned)
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes: Axes = figure.subplots()
    steps_T = np.array([0, 1, 2, *range(3, 61, 3)])
    for index, (factor, label) in enumerate(
        ((0.5, "half the noise"), (1.0, "calibrated for 30 steps"), (2.0, "twice the noise"))
    ):
        eps_T = [
            0.0 if steps == 0 else epsilon(noise_multiplier=factor * noise, sampling_rate=rate, steps=int(steps), delta=delta)
            for steps in steps_T
        ]  # fmt: skip
        axes.plot(steps_T, eps_T, color=colour((1, 0, 2)[index]), label=label)
        print(f"noise multiplier {factor * noise:.2f}: eps {eps_T[12]:.3f} after 30 releases, "
              f"{eps_T[-1]:.3f} after 60")
    axes.axhline(budget, color="black", linestyle=":", linewidth=1.5)
    axes.plot([planned], [budget], "o", color=colour(0), markersize=9)
    axes.set(xlabel="releases (steps)", ylim=(0, 1.7), xlim=(0, 60))
    axes.set_title("eps spent, delta 1e-4; the dotted line is the budget", loc="left")
    axes.legend(loc="upper left")
    return figure


def main() -> None:
    """Write all pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        topology = graph()
        pictures = {
            "graph": draw_graph(topology),
            "push-sum": draw_push_sum(topology),
            "error-feedback": draw_error_feedback(),
            "budget": draw_budget(),
        }
        for name, figure in pictures.items():
            figure.savefig(folder / f"concept-{name}.png", dpi=150)


if __name__ == "__main__":
    main()
