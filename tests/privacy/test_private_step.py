"""A private step: recorded first, secret masks, weights on noisy values, no row that shows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_clipping import clip_and_sum, per_example_gradients, squared
from torch import Tensor, nn

from dpcsgp.errors import BudgetExceededError, PrivateStepError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import GaussianMechanism, clipping_engine
from dpcsgp.privacy.budget import Budget
from dpcsgp.privacy.ledger import LedgerBook, read_ledger
from dpcsgp.privacy.private_gradients import PrivateGradients
from dpcsgp.randomness import PrivateRandomness

SIZES = (20, 40, 20)
NODES = (3, 5, 8)


class Step:
    """Private gradients of three nodes, first and last of one shape, with chosen data."""

    def __init__(
        self,
        folder: Path,
        module: nn.Module | None = None,
        loss: Callable[[Any, Tensor], Tensor] = squared,
        *,
        noise: float = 0.0,
        random: PrivateRandomness | None = None,
        budget: int | None = None,
        weights: tuple[float, ...] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.module = module or nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
        dim = ParameterLayout.of(self.module).dim
        self.model_ND = 0.5 * torch.randn(3, dim)
        self.inputs, self.targets = torch.randn(3, max(SIZES), 6), torch.randn(3, max(SIZES), 2)
        self.book = LedgerBook(folder, NODES, "run")
        self.files = [folder / f"node-{node:04d}.jsonl" for node in NODES]
        noises = (noise, 2 * noise, 3 * noise)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = clipping_engine(self.module, loss)
        self.gradients = PrivateGradients(
            source=self,
            engine=engine,
            mechanism=GaussianMechanism(0.5, noises, SIZES, SIZES),
            budget=Budget(NODES, [budget] * 3),
            ledger=self.book,
            random=random or PrivateRandomness.seeded(0, NODES),
            nodes=NODES,
            attempt=0,
            node_weights=weights,
        )

    @property
    def held_examples(self) -> tuple[int, ...]:
        return SIZES

    def public_rows(self, count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 6), torch.randn(count, 2)

    def examples(
        self, indices_NE: Tensor, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        node = torch.tensor(rows if rows is not None else range(3))[:, None]
        return self.inputs[node, indices_NE].clone(), self.targets[node, indices_NE].clone()

    def __call__(self, step: int = 0) -> Tensor:
        return self.gradients(self.model_ND, step)

    def counts(self) -> list[int]:
        return [read_ledger(path).count for path in self.files]


def test_every_node_gets_the_clipped_mean_of_its_own_examples(tmp_path: Path) -> None:
    step = Step(tmp_path)
    for row, size in enumerate(SIZES):
        own = per_example_gradients(
            step.module,
            squared,
            step.model_ND[row],
            step.inputs[row, :size, None],
            step.targets[row, :size],
        )
        torch.testing.assert_close(step()[row], clip_and_sum(own, 0.5) / size)


def test_a_release_is_spent_and_recorded_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = Step(tmp_path, noise=1.0, budget=7), []

    def engine_sum(*arguments: Any) -> Tensor:
        seen.append((step.counts(), list(step.gradients.budget.remaining)))
        raise RuntimeError

    monkeypatch.setattr(step, "examples", engine_sum)
    with pytest.raises(PrivateStepError):
        step()
    assert seen == [([1, 1, 1], [6, 6, 6])]
    events = [read_ledger(path).events[0] for path in step.files]
    assert [event.noise_multiplier for event in events] == [1.0, 2.0, 3.0]


def test_a_spent_budget_releases_nothing(tmp_path: Path) -> None:
    step = Step(tmp_path, noise=1.0, budget=2)
    assert all(bool(step(number).any(dim=1).all()) for number in range(2))
    assert step.counts() == [2, 2, 2]
    assert not step(2).any()
    assert step.counts() == [2, 2, 2]
    with pytest.raises(BudgetExceededError, match="node 3"):
        step.gradients.budget.spend(0)


def test_node_weights_scale_what_is_private_already(tmp_path: Path) -> None:
    weights = (4.0, 0.5, 1.0)
    plain, weighted = (
        Step(tmp_path / "a", noise=1.0)(),
        Step(tmp_path / "b", noise=1.0, weights=weights)(),
    )
    torch.testing.assert_close(weighted, plain * torch.tensor(weights)[:, None])


def masked(folder: Path, random: PrivateRandomness, public_seed: int = 0) -> Tensor:
    """Return a step of a model with Dropout on equal rows: only masks tell two steps apart."""
    step = Step(
        folder,
        nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 2)).train(),
        random=random,
    )
    step.inputs, step.targets = torch.ones_like(step.inputs), torch.ones_like(step.targets)
    torch.manual_seed(public_seed)
    return step()


def test_masks_follow_the_secret_key_and_no_public_seed(tmp_path: Path) -> None:
    one, same = (
        masked(tmp_path / str(seed), PrivateRandomness.seeded(1, NODES), public_seed=seed)
        for seed in (10, 11)
    )
    torch.testing.assert_close(one, same)
    others = [
        masked(tmp_path / f"key {number}", PrivateRandomness.fresh(NODES), public_seed=10)
        for number in range(2)
    ]
    assert float((others[0] - others[1]).abs().max()) > 1e-3
    assert float((others[0] - one).abs().max()) > 1e-3


def refuses_large(outputs: Tensor, targets: Tensor) -> Tensor:
    """Raise, and quote the row, where a target is large; warn of every row that is there."""
    if bool((targets > 1e3).any()):
        raise ValueError(f"bad target {float(targets.max())}")
    if bool(targets.any()):
        warnings.warn("targets are there", UserWarning, stacklevel=1)
    return squared(outputs, targets)


@pytest.mark.parametrize("bad", [[(0, 7)], [(1, 0), (1, 39)], [(0, 0), (1, 20), (2, 19)]])
def test_a_row_that_raises_counts_as_zero_and_touches_no_other(
    tmp_path: Path, bad: list[tuple[int, int]]
) -> None:
    step, random = Step(tmp_path, loss=refuses_large), torch.Generator().manual_seed(1)
    whole = step()
    gone = torch.zeros_like(whole)
    for row, place in bad:
        own = per_example_gradients(
            step.module,
            squared,
            step.model_ND[row],
            step.inputs[row, place, None][None],
            step.targets[row, place][None],
        )
        gone[row] += clip_and_sum(own, 0.5) / SIZES[row]
        step.targets[row, place] = 1e4 * (1 + torch.rand(2, generator=random))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(step(), whole - gone)
    assert not caught


def test_what_fails_on_blank_rows_is_told_without_a_word_about_the_examples(tmp_path: Path) -> None:
    def fails(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ValueError(f"target {float(targets.abs().max())}")

    with pytest.raises(PrivateStepError) as caught:
        Step(tmp_path, loss=fails)()
    assert "ValueError" in str(caught.value) and "target " not in str(caught.value)
