"""Rows on which a model raises leave nothing behind; what the cut of a model rests on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpcsgp.errors import ModelError
from dpcsgp.privacy.frozen_rows import FrozenRows
from dpcsgp.privacy.model_probes import check_examples_independent
from dpcsgp.runs.frozen_split import NoSplit, find_split

MISSING = -999.0


class Hoard(nn.Module):
    """Hidden layers are put in a list that is emptied at the end, and perhaps at the beginning."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.first, self.seen = first, list[Tensor]()
        self.one, self.two = (nn.Linear(size, 8).requires_grad_(False) for size in (2, 8))
        self.head = nn.Linear(16, 2)

    def forward(self, rows: Tensor) -> Tensor:
        if self.first:
            self.seen.clear()
        self.seen.append(self.one(rows).tanh())
        if bool((rows == MISSING).any()):
            raise ValueError("a missing value")
        self.seen.append(self.two(self.seen[-1]).tanh())
        features = torch.cat(self.seen[:2], dim=1)
        self.seen.clear()
        return self.head(features)


class Cut(nn.Module):
    """Sequences are cut to the longest of the batch, and averaged over what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8).requires_grad_(False), nn.Linear(8, 2)

    def forward(self, words: Tensor) -> Tensor:
        longest = max(1, int((words != 0).sum(dim=1).max()))
        return self.head(self.words(words[:, :longest]).mean(dim=1))


class Started(nn.Module):
    """A head that starts at zero, and depends on more than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8).requires_grad_(False)
        self.head = self.Head()

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shift = nn.Linear(8, 2), nn.Parameter(torch.zeros(2))
            self.skip = torch.zeros(8)
            nn.init.zeros_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)

        def forward(self, features: Tensor) -> Tensor:
            return self.linear(features + self.skip) + self.shift

    def forward(self, rows: Tensor) -> Tensor:
        self.head.skip = rows.repeat(1, 2)
        return self.head(self.body(rows))


def test_a_model_that_keeps_what_raised_is_refused() -> None:
    with pytest.raises(ModelError, match=r"layer 'two' \(Linear\): after an exception there"):
        check_examples_independent(Hoard(), torch.zeros(2))
    assert check_examples_independent(Hoard(first=True), torch.zeros(2)) == ()


def test_features_of_others_do_not_change_where_a_row_raises() -> None:
    torch.manual_seed(0)
    rows, public = torch.randn(100, 2), (torch.randn(32, 2), torch.zeros(32))
    frozen = FrozenRows.checked(Hoard(), "head", public, 64)
    expected, hostile = frozen.features(rows), rows.clone()
    hostile[37, 1] = MISSING
    found = frozen.features(hostile)
    others = torch.arange(100) != 37
    assert torch.equal(found[others], expected[others]) and bool(found[37].isnan().all())


def test_what_fails_on_blanks_too_is_raised() -> None:
    """Not a matter of rows: memory is short, say. Silence would ruin the run."""
    model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2))
    frozen = FrozenRows.checked(model, "1", (torch.randn(32, 2), torch.zeros(32)), 64)
    broken = frozen._module.get_submodule("0")
    for layer in (broken, frozen._untouched.get_submodule("0")):
        layer.register_forward_pre_hook(_no_memory)
    with pytest.raises(MemoryError):
        frozen._pass(torch.randn(10, 2), range(64), torch.zeros(64, 8))


def _no_memory(*_: object) -> None:
    raise MemoryError


def test_rows_that_are_cut_to_the_longest_pass_alone() -> None:
    torch.manual_seed(0)
    public = torch.randint(1, 20, (64, 12)), torch.zeros(64)  # all of full length
    frozen = FrozenRows.checked(Cut(), "head", public, 64)
    assert frozen.rows_per_pass == 1


def test_a_head_that_starts_at_zero_hides_nothing() -> None:
    with pytest.raises(NoSplit, match="depends on more than what it is given"):
        find_split(Started(), torch.randn(64, 4), False)
