"""How good are the settings that `dpcsgp.train` chooses? Compared with a grid of twelve.

Five data sets of scikit-learn, five unequal nodes, a network with one hidden layer of 16 units,
delta 1e-3. Prints a table for docs/own-data.md: the node mean with no settings but eps, and that of
the best of the grid (four learning rates times three numbers of steps, everything else as the rule
has it). Seeds fix split, start and noise, so that the table can be repeated; the rule was tuned
with other seeds.

The best of twelve noisy means flatters: other seeds do not repeat it (the column "when chosen" has
it, together with the luck of the seeds). So the best is chosen on some seeds, all twelve first and
then the best four on more of them, and both it and the rule are scored on others. With few seeds
the choice may miss the best, in favour of the rule: in simulated runs of wine and iris by 0.7
points or less with `--seeds 4`, of breast cancer by 0.3 or less with `--seeds 2`.

    python docs/make_defaults.py --data wine,iris --epsilon 1,8 --seeds 4
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn

import dpcsgp
from dpcsgp.errors import DivergenceError
from dpcsgp.runs.user_data import UserData

LOADERS: Final = {
    "breast cancer": datasets.load_breast_cancer,
    "wine": datasets.load_wine,
    "digits": datasets.load_digits,
    "iris": datasets.load_iris,
    "diabetes": datasets.load_diabetes,
}
SHARES: Final = (
    60,
    80,
    90,
    100,
    120,
)  # of the nodes, out of 569 examples; the others are for tests
RATES: Final = (0.1, 0.3, 1.0, 3.0)
STEPS: Final = (15, 50, 150)
GRID: Final = tuple(
    {"algorithm.learning_rate": rate, "algorithm.steps": steps}
    for rate, steps in itertools.product(RATES, STEPS)
)
FIRST_SEED: Final = 1000
SHARES_OF_SEEDS: Final = (0, 1, 4, 16)  # all of the grid; the finalists; the scores
FINALISTS: Final = 4
SCRATCH: Final = "/dev/shm" if Path("/dev/shm").is_dir() else None  # ledgers wait for no disk


class Case(NamedTuple):
    """A data set in memory, and what its model looks like."""

    inputs: Tensor
    targets: Tensor
    num_outputs: int
    loss: Any


def load(name: str) -> Case:
    """Return a data set whose columns were scaled by constants that count as published."""
    table, labels = LOADERS[name](return_X_y=True)
    inputs = torch.as_tensor(table, dtype=torch.float32)
    if name == "breast cancer":
        inputs = inputs.log1p()
    if name == "digits":  # pictures have one scale for all pixels
        inputs = (inputs - inputs.mean()) / inputs.std()
    else:
        inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    if name == "diabetes":
        targets = torch.as_tensor(labels, dtype=torch.float32)
        return Case(inputs, (targets - targets.mean()) / targets.std(), 1, "mse")
    return Case(inputs, torch.as_tensor(labels), len(np.unique(labels)), "cross_entropy")


def score(case: Case, epsilon: float, settings: Mapping[str, Any], seed: int) -> float:
    """Train once, and return the nodes' mean accuracy, or mean squared error."""
    total = len(case.inputs)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    bounds = np.cumsum(SHARES) * total // 569
    *nodes, test = np.split(order.numpy(), bounds)

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(case.inputs.shape[1], 16), nn.ReLU(), nn.Linear(16, case.num_outputs)
        )

    # Hundreds of runs of models that are known to be fine: they are not probed again.
    not_probed = mock.patch.object(UserData, "check", return_value=None)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder, warnings.catch_warnings(), not_probed:
        warnings.simplefilter("ignore")
        result = dpcsgp.train(
            model,
            [(case.inputs[rows], case.targets[rows]) for rows in nodes],
            test_data=(case.inputs[test], case.targets[test]),
            loss=case.loss,
            epsilon=epsilon,
            delta=1e-3,
            settings={
                "run.seed": seed,
                "privacy.seed": seed,  # for the table only: whoever knows it knows the noise
                "run.evaluate_every": 0,
                "run.checkpoint_every": 0,
                **settings,
            },
            out=Path(folder) / "run",
        )
    key = "mean_squared_error" if case.loss == "mse" else "accuracy"
    return float(result.summary[f"{key}_node_mean"])


def scores(
    case: Case, epsilon: float, settings: Mapping[str, Any], seeds: Iterable[int]
) -> list[float]:
    """Return one score for each seed; a run that diverged counts as guessing."""
    found = []
    for seed in seeds:
        try:
            found.append(score(case, epsilon, settings, seed))
        except DivergenceError:
            found.append(1e3 if case.loss == "mse" else 0.0)
    return found


def best_of(
    grid: Sequence[Mapping[str, Any]], case: Case, epsilon: float, first: range, more: range
) -> tuple[Mapping[str, Any], float]:
    """Return the best settings and their mean: all on the first seeds, the best of them on more."""
    sign = -1.0 if case.loss == "mse" else 1.0
    tried = [(settings, scores(case, epsilon, settings, first)) for settings in grid]
    tried.sort(key=lambda row: sign * np.mean(row[1]), reverse=True)
    final = [
        (settings, found + scores(case, epsilon, settings, more))
        for settings, found in tried[:FINALISTS]
    ]
    best, found = max(final, key=lambda row: sign * np.mean(row[1]))
    return best, float(np.mean(found))


class Comparison(NamedTuple):
    """The rule's score, and that of the best of the grid, with its settings.

    `when_chosen` is what the best had on the seeds that chose it, `uncertainty` the standard error
    of the difference of the two scores.
    """

    name: str
    epsilon: float
    chosen: float
    best: float
    best_settings: Mapping[str, Any]
    when_chosen: float
    uncertainty: float

    @property
    def good_enough(self) -> bool:
        """Tell whether the rule is within 2 points of accuracy, or 10 % of the error."""
        if self.name == "diabetes":
            return self.chosen <= 1.1 * self.best
        return self.chosen >= self.best - 0.02


def compare(
    names: Iterable[str], epsilons: Iterable[float], seeds: int, grid: Iterable[Mapping[str, Any]]
) -> Iterator[Comparison]:
    """Compare the settings that nobody chose with the best of a grid, on seeds of their own.

    Of 16 x `seeds` seeds a quarter chooses the best of the grid.
    """
    first, more, scored = (
        range(FIRST_SEED + start * seeds, FIRST_SEED + stop * seeds)
        for start, stop in itertools.pairwise(SHARES_OF_SEEDS)
    )
    grid = list(grid)
    for name, epsilon in itertools.product(names, epsilons):
        case = load(name)
        best, before = best_of(grid, case, epsilon, first, more)
        theirs = np.array(scores(case, epsilon, best, scored))
        ours = np.array(scores(case, epsilon, {}, scored))
        error = float((theirs - ours).std(ddof=1) / len(ours) ** 0.5)
        means = float(ours.mean()), float(theirs.mean())
        yield Comparison(name, epsilon, *means, best, before, error)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default=",".join(LOADERS), help="names, with commas")
    parser.add_argument("--epsilon", default="1,2,8", help="budgets, with commas")
    parser.add_argument(
        "--seeds", type=int, default=4, help="of every setting; scores have 12 times more"
    )
    wanted = parser.parse_args()
    print("| data | eps | by the rule | best of the grid | +- | at | when chosen |")
    print("|---|---|---|---|---|---|---|")
    budgets = [float(text) for text in wanted.epsilon.split(",")]
    for row in compare(wanted.data.split(","), budgets, wanted.seeds, GRID):
        at = "rate {}, {} steps".format(*row.best_settings.values())
        sign = "" if row.good_enough else " (!)"
        values = f"{row.chosen:.3f}{sign} | {row.best:.3f} | {row.uncertainty:.3f}"
        where = f"{at} | {row.when_chosen:.3f}"
        print(f"| {row.name} | {row.epsilon:g} | {values} | {where} |", flush=True)


if __name__ == "__main__":
    main()
