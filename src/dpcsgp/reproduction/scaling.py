"""Theorem 1's speed-up: squared gradient norm against the number of nodes, at fixed eps.

The problem is smooth and not convex: logistic regression on synthetic examples of norm one (so that
no gradient is ever clipped) with the public, non-convex regulariser `weight * sum w^2 / (1 + w^2)`.
As in the theorem, the learning rate grows like sqrt(n) and the left side is the squared gradient
norm of the average model over all data, averaged over the steps; it should fall like n^(-1/2).

Legend: N nodes, J examples per node, E places of a batch, D coordinates.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from dpcsgp.algorithms import DPCSGP
from dpcsgp.compression import parse_compressor
from dpcsgp.graphs import best_mixing_rate, directed_exponential
from dpcsgp.network import Simulator
from dpcsgp.privacy import GaussianMechanism, calibrate_noise
from dpcsgp.randomness import PrivateRandomness, PublicRandomness, torch_seed
from dpcsgp.report import Curve, accuracy_panels, save_figure, write_csv
from dpcsgp.reproduction.experiment import Experiment
from dpcsgp.reproduction.outcome import markdown

NODES = (4, 8, 16, 32, 64)
DIM, EXAMPLES, BATCH, STEPS, EPSILON, DELTA = 100, 2000, 500, 1000, 1.0, 1e-4
LARGEST_GRADIENT = 1.0  # of the logistic loss at |x| = 1
REGULARISER = 1e-3
RATE_AT_ONE_NODE = 1.0
LOOK_EVERY = 5
COMPRESSOR = "gsgd:8/64"


def scaling(experiment: Experiment) -> list[Path]:
    """Fit the slope of log(squared gradient norm) against log(n); Theorem 1 says -1/2."""
    # two repeats at least: the confidence interval needs them
    nodes = NODES[:4] if experiment.quick else NODES
    repeats = max(experiment.repeats, 2) if experiment.quick else experiment.repeats
    rows: list[dict[str, Any]] = []
    total = len(nodes) * repeats
    for number in nodes:
        for seed in range(1, repeats + 1):
            experiment.show(f"{number} nodes, seed {seed}", len(rows), total)
            norm = mean_squared_gradient(number, seed)
            rows.append({"nodes": number, "seed": seed, "squared_gradient_norm": norm})
    experiment.show("done", total, total)
    slope, low, high = fit_slope(rows)
    files = [
        write_csv(experiment.out / "table.csv", rows),
        *save_figure(_figure(rows, nodes), experiment.out / "figure"),
    ]
    verdict = "contains" if low <= -0.5 <= high else "does not contain"
    page = experiment.write_page(
        "Theorem 1's speed-up with the number of nodes",
        f"{EXAMPLES} examples per node, {DIM} coordinates, verified eps {EPSILON} (delta "
        f"{DELTA:g}), {STEPS} steps, expected batch {BATCH}, `{COMPRESSOR}` at the advised rate, "
        f"directed exponential graph, learning rate {RATE_AT_ONE_NODE:g} sqrt(n).",
        f"Slope {slope:.3f}, 95 % confidence interval {low:.3f} to {high:.3f}, which {verdict} "
        "the theorem's -1/2.",
        markdown(_means(rows, nodes), ["nodes", "squared_gradient_norm", "times_sqrt_n"]),
        "![squared gradient norm against nodes](figure.png)",
    )
    return [*files, page]


def mean_squared_gradient(num_nodes: int, seed: int) -> float:
    """Train once; return the mean over steps of |gradient of the average model|^2."""
    inputs_NJD, signs_NJ = _examples(num_nodes, seed)
    # as in the theorem: learning rate proportional to sqrt(n), here at the advised mixing rate
    topology, compressor = directed_exponential(num_nodes), parse_compressor(COMPRESSOR)
    algorithm = DPCSGP(
        compressor,
        RATE_AT_ONE_NODE * math.sqrt(num_nodes),
        best_mixing_rate(topology, compressor, DIM),
    )
    # noise for the budget; with examples of norm one no gradient exceeds the clip norm
    noise = calibrate_noise(
        epsilon=EPSILON, delta=DELTA, sampling_rate=BATCH / EXAMPLES, steps=STEPS
    )
    sizes = (noise,) * num_nodes, (BATCH,) * num_nodes, (EXAMPLES,) * num_nodes
    mechanism = GaussianMechanism(LARGEST_GRADIENT, *sizes)
    network, nodes = Simulator(topology), range(num_nodes)
    public, private = PublicRandomness(seed, nodes), PrivateRandomness.seeded(seed, nodes)
    state, found = algorithm.init(torch.zeros(num_nodes, DIM)), []
    for step in range(STEPS):
        if step % LOOK_EVERY == 0:
            found.append(_squared_norm(algorithm.average(state), inputs_NJD, signs_NJ))
        models_ND = algorithm.model(state)

        def clipped_sum(
            indices_NE: Tensor, present_NE: Tensor, models_ND: Tensor = models_ND
        ) -> Tensor:
            rows_N1 = torch.arange(num_nodes)[:, None]
            inputs_NED, signs_NE = inputs_NJD[rows_N1, indices_NE], signs_NJ[rows_N1, indices_NE]
            weights_NE = _slopes(models_ND, inputs_NED, signs_NE) * present_NE
            return torch.einsum("ne,ned->nd", weights_NE, inputs_NED)

        # the regulariser is public: its gradient needs neither clipping nor noise
        grad_ND = mechanism.release(clipped_sum, step, private, [True] * num_nodes)
        state = algorithm.step(
            state, grad_ND.add_(_regulariser_gradient(models_ND)), network, public
        )
    return float(np.mean(found))


def fit_slope(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Return the least-squares slope in logarithms and its 95 % confidence interval."""
    found: Any = stats.linregress(
        np.log([row["nodes"] for row in rows]),
        np.log([row["squared_gradient_norm"] for row in rows]),
    )
    margin = float(stats.t.ppf(0.975, len(rows) - 2) * found.stderr)
    return float(found.slope), float(found.slope) - margin, float(found.slope) + margin


def _examples(num_nodes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw examples of norm one, and labels that a hidden direction gets right in 9 of 10."""
    with torch_seed(seed, "scaling"):
        hidden_D = torch.randn(DIM)
        inputs_NJD = torch.randn(num_nodes, EXAMPLES, DIM)
        flips_NJ = torch.rand(num_nodes, EXAMPLES) < 0.1
    inputs_NJD /= inputs_NJD.norm(dim=2, keepdim=True)
    signs_NJ = torch.sign(inputs_NJD @ hidden_D)
    return inputs_NJD, torch.where(flips_NJ, -signs_NJ, signs_NJ)


def _slopes(models_ND: Tensor, inputs_NED: Tensor, signs_NE: Tensor) -> Tensor:
    """Return the factor of each gradient: `d/ds log(1 + exp(-y s)) = -y sigmoid(-y s)`."""
    score_NE = torch.einsum("nd,ned->ne", models_ND, inputs_NED) * signs_NE
    return -signs_NE * torch.sigmoid(-score_NE)


def _regulariser_gradient(models_ND: Tensor) -> Tensor:
    return REGULARISER * 2 * models_ND / (1 + models_ND**2) ** 2


def _squared_norm(model_D: Tensor, inputs_NJD: Tensor, signs_NJ: Tensor) -> float:
    weights_NJ = _slopes(model_D.expand(len(inputs_NJD), -1), inputs_NJD, signs_NJ)
    grad_D = torch.einsum("nj,njd->d", weights_NJ, inputs_NJD) / signs_NJ.numel()
    return float((grad_D + _regulariser_gradient(model_D)).square().sum())


def _means(rows: list[dict[str, Any]], nodes: tuple[int, ...]) -> list[dict[str, Any]]:
    means = [
        np.mean([row["squared_gradient_norm"] for row in rows if row["nodes"] == number])
        for number in nodes
    ]
    return [
        {
            "nodes": number,
            "squared_gradient_norm": float(mean),
            "times_sqrt_n": float(mean) * math.sqrt(number),
        }
        for number, mean in zip(nodes, means, strict=True)
    ]


def _figure(rows: list[dict[str, Any]], nodes: tuple[int, ...]) -> Any:
    columns = [
        [row["squared_gradient_norm"] for row in rows if row["nodes"] == number] for number in nodes
    ]
    values = np.log10(np.array(columns)).T
    reference = values[:, 0].mean() - 0.5 * np.log10(np.array(nodes) / nodes[0])
    curves = [Curve("measured", nodes, values), Curve("slope -1/2", nodes, reference[None])]
    return accuracy_panels(
        {"Theorem 1": curves}, "nodes", "log10 of the squared gradient norm", log_x=True
    )
