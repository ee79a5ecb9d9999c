"""The private step: what is held and what is declared, and rows that model or loss cannot bear."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import Budget, GaussianMechanism, LedgerBook, PrivateGradients, clipping_engine
from dpcsgp.privacy.clipping.engine import CheckedEngine
from dpcsgp.privacy.passes import PassShape
from dpcsgp.randomness import PrivateRandomness
from dpcsgp.runs.user_data import UserData
from dpcsgp.tasks.supervised import LOSSES


def released(folder: Path, inputs: Tensor, targets: Tensor, declared: int) -> Tensor:
    """Return the sum of clipped gradients of a full batch, without noise."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 2))
    loss, metrics = LOSSES["cross_entropy"]
    task = UserData.collect([(inputs, targets)], (0,), None, loss, metrics, (declared,)).task(
        module, (0,)
    )
    gradients = PrivateGradients(
        task,
        clipping_engine(module, loss),
        GaussianMechanism(1.0, (0.0,), (declared,), (declared,)),
        Budget.unlimited((0,)),
        LedgerBook(folder, (0,), "run"),
        PrivateRandomness.fresh([0]),
        (0,),
        0,
    )
    return gradients(ParameterLayout.of(module).flatten(module)[None], 0) * declared


def test_examples_that_are_declared_but_not_held_are_blanks(tmp_path: Path) -> None:
    inputs, targets = torch.randn(30, 4), torch.randint(0, 2, (30,))
    found = [
        released(tmp_path / str(declared), inputs, targets, declared) for declared in (30, 40, 300)
    ]
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-5, atol=1e-6)


class Picky(nn.Module):
    """Raises where a value is above ten, and warns where one is above five."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if bool((inputs > 10).any()):
            raise ValueError("a row is above ten")
        if bool((inputs > 5).any()):
            warnings.warn("a row is above five", stacklevel=1)
        return self.linear(inputs)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def picky_sum(engine: CheckedEngine, inputs: Tensor, targets: Tensor, present: Tensor) -> Tensor:
    model_1D = torch.full((1, 5), 0.3)
    shape = PassShape(16, 3)
    return engine.clipped_sum(
        model_1D, inputs[None].clone(), targets[None].clone(), present[None], 0.5, shape
    )[0].double()


@pytest.mark.parametrize("raising", [[0], [7], [47], [3, 4], [0, 11, 30, 46], list(range(48))])
def test_a_row_that_raises_counts_as_zero_and_the_others_keep_their_bits(
    raising: list[int],
) -> None:
    engine = clipping_engine(Picky(), squared)
    torch.manual_seed(1)
    inputs, targets, present = torch.randn(48, 4), torch.randn(48), torch.ones(48, dtype=torch.bool)
    without = present.clone()
    without[raising] = False
    expected = picky_sum(engine, inputs, targets, without)
    inputs[raising] = 11.0
    ours = picky_sum(engine, inputs, targets, present)
    assert float((ours - expected).norm()) < 1e-6 * max(1.0, float(expected.norm()))


def test_a_row_that_warns_says_nothing_to_anybody() -> None:
    engine = clipping_engine(Picky(), squared)
    inputs, targets, present = torch.randn(48, 4), torch.randn(48), torch.ones(48, dtype=torch.bool)
    inputs[5] = 6.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = picky_sum(engine, inputs, targets, present)
    present[5] = False
    assert float((whole - picky_sum(engine, inputs, targets, present)).norm()) == pytest.approx(
        0.5, rel=1e-5
    )


def test_what_fails_on_blank_rows_fails_in_public() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            raise RuntimeError("no kernel for this")

    engine = clipping_engine(Broken(), squared)
    with pytest.raises(RuntimeError, match="no kernel"):
        picky_sum(engine, torch.randn(48, 4), torch.randn(48), torch.ones(48, dtype=torch.bool))


class Rows:
    """Examples of two nodes, all with gradient one; each node holds one less than it declares."""

    held_examples = (99, 299)

    def examples(
        self, indices_NE: Tensor, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        return torch.ones(*indices_NE.shape, 1), torch.zeros(indices_NE.shape)

    def public_rows(self, count: int) -> tuple[Tensor, Tensor]:
        return torch.ones(count, 1), torch.zeros(count)


def test_no_drawn_example_is_lost_where_nodes_of_several_shapes_draw_many(tmp_path: Path) -> None:
    """An example that is declared but not held takes a place too: it must not push others out."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False))
    mechanism = GaussianMechanism(1.0, (0.0, 0.0), (8, 40), (100, 300))
    random, held = PrivateRandomness.seeded(0, (0, 1)), torch.tensor(Rows.held_examples)[:, None]
    gradients = PrivateGradients(
        source=Rows(),
        engine=clipping_engine(module, lambda outputs, targets: outputs[:, 0]),
        mechanism=mechanism,
        budget=Budget.unlimited((0, 1)),
        ledger=LedgerBook(tmp_path, (0, 1), "run"),
        random=random,
        nodes=(0, 1),
    )
    places, overflowing = mechanism.shapes[0].places, 0
    assert len(mechanism.rows_of_same_shape()) == 2
    for step in range(20_000):
        indices_NE, drawn_NE = mechanism.draw(step, random, [True, True])
        present_NE = drawn_NE & (indices_NE < held)
        count, kept = int(drawn_NE[0].sum()), int(present_NE[0].sum())
        if not count > places >= kept:
            continue
        overflowing += 1
        sums_N = gradients(torch.ones(2, 1), step)[:, 0] * torch.tensor([8.0, 40.0])
        assert sums_N.tolist() == pytest.approx(present_NE.sum(1).tolist(), rel=1e-6)
    assert overflowing >= 2  # such draws occurred
