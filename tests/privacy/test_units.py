"""A person's rows are one example: clipped as one, drawn as one, and blanks of it count nothing.

Legend: N nodes, E places for persons, M rows of a person at most, D coordinates.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from itertools import product
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
from reference_clipping import per_example_gradients
from torch import Tensor, nn
from worst_case import CASES, KINDS, LOSSES, Bench

from dpcsgp.errors import ConfigError, ModelError, RefusedDataError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import clipping_engine
from dpcsgp.privacy.clipping.engine import CheckedEngine
from dpcsgp.privacy.fetching import DrawnBatch, chosen_places
from dpcsgp.privacy.passes import SUM_SLACK, PassShape
from dpcsgp.privacy.row_checks import engine_with_equal_rows, units_of_rows
from dpcsgp.randomness import PrivateRandomness
from dpcsgp.tasks.units import UnitRows, UnitTask

MOST = 3
SHAPE = PassShape(16, 1, 2)


def unit_engine(bench: Bench, most: int = MOST) -> CheckedEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return clipping_engine(bench.module, bench.loss, rows_per_unit=most)


def total(
    engine: CheckedEngine,
    bench: Bench,
    persons: tuple[Tensor, Tensor],
    filled_EM: Tensor,
    present_E: Tensor,
    clip: float,
    shape: PassShape = SHAPE,
) -> Tensor:
    """Return the clipped sum of these persons in double precision."""
    inputs, targets = persons
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return engine.clipped_sum(
            bench.model_1D,
            inputs[None].clone(),
            targets[None].clone(),
            present_E[None],
            clip,
            shape,
            filled_EM[None],
        )[0].double()


def persons_of(bench: Bench, count: int, kind: str) -> tuple[Tensor, Tensor]:
    inputs, targets = bench.rows(count * MOST, kind)
    return inputs.unflatten(0, (count, MOST)), targets.unflatten(0, (count, MOST))


def some_rows(count: int) -> Tensor:
    """Say which rows there are: one, two or all of a person's."""
    return torch.arange(MOST) <= (torch.arange(count) % MOST)[:, None]


@pytest.mark.parametrize("case", CASES)
def test_the_sum_of_a_persons_gradients_is_clipped(case: str) -> None:
    bench, count = Bench(case, "absolute", 0), 5
    inputs, targets = torch.randn(count, MOST, *bench.shape), None
    with torch.no_grad():
        targets = bench.module(inputs.flatten(0, 1)).flatten(1).unflatten(0, (count, MOST)) + 0.3
    filled_EM, everybody = some_rows(count), torch.ones(count, dtype=torch.bool)
    rows_BD = per_example_gradients(
        bench.module,
        bench.loss,
        bench.model_1D[0],
        inputs.flatten(0, 1)[:, None],
        targets.flatten(0, 1),
    )
    persons_ED = (rows_BD.unflatten(0, (count, MOST)) * filled_EM[:, :, None]).sum(1).double()
    engine = unit_engine(bench)
    free = total(engine, bench, (inputs, targets), filled_EM, everybody, 1e6)
    torch.testing.assert_close(free, persons_ED.sum(0), rtol=1e-3, atol=1e-4)
    # Clipped: along the person's gradient, no longer than the clip norm, and hardly shorter.
    clip = float(persons_ED.norm(dim=1).min()) / 3
    for person in range(count):
        only = torch.arange(count) == person
        found = total(engine, bench, (inputs, targets), filled_EM, only, clip)
        direction = persons_ED[person] / persons_ED[person].norm()
        assert float(found.norm()) <= clip * (1 + 1e-6)
        assert float(found @ direction) >= 0.85 * clip


@pytest.mark.parametrize("case", CASES)
def test_rows_that_a_person_does_not_have_count_for_exactly_nothing(case: str) -> None:
    bench, count = Bench(case, "absolute", 1), 5
    inputs, targets = persons_of(bench, count, "kink, different")
    targets, filled_EM = targets + 0.1, some_rows(count)
    other_inputs, other_targets = inputs.clone(), targets.clone()
    other_inputs[~filled_EM] = 3.0 * torch.randn_like(other_inputs[~filled_EM])
    other_targets[~filled_EM] = -7.0
    everybody, engine = torch.ones(count, dtype=torch.bool), unit_engine(bench)
    few = engine.slower()
    # One person at a time: there gradients stay in ghost form, which measures activations too.
    slowest = None if CASES[case].slow or few is None else few.slower()
    for each in filter(None, (engine, slowest)):
        for clip in (1e6, 0.1):
            first = total(each, bench, (inputs, targets), filled_EM, everybody, clip)
            again = total(each, bench, (other_inputs, other_targets), filled_EM, everybody, clip)
            assert torch.equal(first, again) and bool(first.any())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_no_hostile_person_moves_a_sum_further_than_stated(case: str, loss: str) -> None:
    """One person with all rows is taken out; a hole stays, or the last person fills it."""
    bench, chance = Bench(case, loss, 2), torch.Generator().manual_seed(0)
    public = units_of_rows((torch.randn(64, *bench.shape), torch.randn(64, _width(bench))), MOST)
    engine, fixed = engine_with_equal_rows(
        unit_engine(bench), bench.model_1D[0], public, lambda fixed: {SHAPE: 1}
    )
    for kind in KINDS:
        count = (1, 2, 7, 16, 17)[int(torch.randint(5, (), generator=chance))]
        clip = (1.0, 1e-4, 30.0)[int(torch.randint(3, (), generator=chance))]
        persons = persons_of(bench, count, kind)
        filled_EM = some_rows(count) if count % 2 else torch.ones(count, MOST, dtype=torch.bool)
        filled_EM[0] = True  # the one who goes has as many rows as there may be
        everybody = torch.ones(count, dtype=torch.bool)
        whole_D = total(engine, bench, persons, filled_EM, everybody, clip)
        hole_D = total(engine, bench, persons, filled_EM, torch.arange(count) != 0, clip)
        assert float((whole_D - hole_D).norm()) <= clip * (1 + SUM_SLACK), (kind, count, clip)
        if not fixed and count > 1:
            order = [count - 1, *range(1, count - 1)]
            moved = persons[0][order], persons[1][order]
            moved_D = total(engine, bench, moved, filled_EM[order], everybody[order], clip)
            assert float((whole_D - moved_D).norm()) <= clip * (1 + SUM_SLACK), (kind, count, clip)


def _width(bench: Bench) -> int:
    with torch.no_grad():
        return bench.module(torch.randn(2, *bench.shape)).flatten(1).shape[1]


def test_a_person_on_whose_row_the_model_raises_counts_for_nothing() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            if bool((inputs > 100).any()):
                raise ValueError("too large")
            return self.linear(inputs)

    module = Picky()
    engine = clipping_engine(module, lambda out, t: (out[:, 0] - t).square(), rows_per_unit=2)
    flat_1D = ParameterLayout.of(module).flatten(module)[None]
    inputs, targets = torch.randn(1, 8, 2, 4), torch.randn(1, 8, 2)
    filled, present = torch.ones(1, 8, 2, dtype=torch.bool), torch.ones(1, 8, dtype=torch.bool)

    def summed(inputs: Tensor, present: Tensor) -> Tensor:
        return engine.clipped_sum(
            flat_1D, inputs.clone(), targets.clone(), present, 0.5, SHAPE, filled
        )

    hostile, without = inputs.clone(), present.clone()
    hostile[0, 3, 1] = 1e3
    without[0, 3] = False
    expected = summed(inputs, without).double()  # by halves: added up in another order
    torch.testing.assert_close(summed(hostile, present), expected, rtol=0, atol=1e-6)
    assert float((summed(inputs, present) - expected).norm()) > 0.1


@pytest.mark.parametrize("case", ["linear 8-1", "convolution", "lstm, explicit", "tokens"])
def test_fewer_rows_per_pass_give_the_same_sums(case: str) -> None:
    """Up to rounding: which form gradients take does not follow from how little memory there is."""
    bench, count = Bench(case, "absolute", 3), 11
    inputs, targets = persons_of(bench, count, "kink, different")
    targets, filled_EM = targets + 0.2, some_rows(count)
    everybody, sums = torch.ones(count, dtype=torch.bool), []
    for rows, shape in ((1, PassShape(1, 1, 11)), (9, PassShape(3, 1, 4)), (64, PassShape(16))):
        engine = unit_engine(bench).with_most_rows(rows)
        sums.append(total(engine, bench, (inputs, targets), filled_EM, everybody, 0.3, shape))
    for other in sums[1:]:
        assert float((other - sums[0]).norm()) <= 1e-5 * 0.3 * count


def test_shapes_that_do_not_fit_are_refused() -> None:
    bench = Bench("linear 8-1", "absolute", 0)
    persons, present = (torch.randn(2, MOST, 8), torch.randn(2, MOST, 1)), torch.ones(2).bool()
    with pytest.raises(ModelError, match="filled rows"):
        unit_engine(bench).clipped_sum(
            bench.model_1D, persons[0][None], persons[1][None], present[None], 1.0
        )
    with pytest.raises(ModelError, match="leading axes"):
        total(unit_engine(bench, 2), bench, persons, torch.ones(2, 3).bool(), present, 1.0)
    with pytest.raises(ConfigError, match="max_rows_per_unit"):
        clipping_engine(bench.module, bench.loss, views=2, rows_per_unit=2)


class Persons:
    """Rows whose input is their own number; persons 0, 1, 2, ... have 1, 2, 3, ... rows."""

    max_rows_per_unit = MOST

    def __init__(self, persons: int = 8) -> None:
        self.units = UnitRows.of(np.repeat(np.arange(persons), np.arange(1, persons + 1)), "here")
        self.unreadable: set[int] = set()

    @property
    def rows(self) -> Persons:
        return self

    def unit_sizes(self, row: int, units_E: np.ndarray) -> np.ndarray:
        return self.units.sizes(units_E)

    def unit_rows(self, row: int, units_E: np.ndarray, places_EM: np.ndarray) -> np.ndarray:
        return self.units.at(units_E, places_EM)

    def examples(
        self, indices_NE: Tensor, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError("rows are read")

    def read_examples(
        self,
        indices_NE: Tensor,
        seeds_NE: Tensor,
        widths_N: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        readable = torch.tensor([int(i) not in self.unreadable for i in indices_NE.flatten()])
        values = torch.where(readable.view_as(indices_NE), indices_NE, 0)
        return values[:, :, None].float(), values, readable.view_as(indices_NE)


def fetched(persons: Persons, drawn: list[int], step: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return row numbers (E, M), which of them count, and who is there; pass by pass."""
    shape, random = PassShape(2), PrivateRandomness.seeded(5, (0,))
    present = torch.ones(1, len(drawn), dtype=torch.bool)
    batch = DrawnBatch(persons, (0,), torch.tensor([drawn]), present, shape, random, step)
    parts = [batch(slice(start, start + 2)) for start in range(0, len(drawn), 2)]
    numbers, filled, there = (
        torch.cat([part[which] for part in parts], dim=1)[0]  # pyright: ignore[reportArgumentType, reportCallIssue]
        for which in (0, 3, 2)
    )
    return numbers[:, :, 0].long(), filled, there


def test_a_person_brings_all_rows_up_to_the_cap_and_copies_of_the_first_elsewhere() -> None:
    persons = Persons()
    numbers, filled, there = fetched(persons, [2, 0, 1, 7])
    assert bool(there.all()) and filled.sum(1).tolist() == [3, 1, 2, 3]
    assert numbers[:3].tolist() == [[3, 4, 5], [0, 0, 0], [1, 2, 1]]
    assert len(numbers[3].unique()) == MOST and set(numbers[3].tolist()) <= set(range(28, 36))


def test_of_more_rows_every_subset_is_equally_likely_and_by_place_alone() -> None:
    persons, counts = Persons(), torch.zeros(5)
    for step in range(600):
        numbers, _, _ = fetched(persons, [0, 4], step)
        counts[numbers[1] - 10] += 1
    assert float((counts / 600 - MOST / 5).abs().max()) < 0.09  # about 4.5 deviations
    # whoever else was drawn: the same place and step choose the same of a person's rows
    assert torch.equal(fetched(persons, [1, 4, 2])[0][1], fetched(persons, [6, 4, 7])[0][1])
    choices = {tuple(sorted(fetched(persons, [7] * 8, step)[0][0].tolist())) for step in range(9)}
    places = {tuple(sorted(each.tolist())) for each in fetched(persons, [7] * 8)[0]}
    assert len(choices) > 4 and len(places) > 4


def test_every_subset_of_a_person_s_rows_comes_from_as_many_words() -> None:
    """Of all words modulo 3, 4 and 5 as many lead to each of the ten subsets of 3 of 5 rows."""
    words = np.array(list(product(range(3), range(4), range(5))), dtype=np.uint64)
    chosen = chosen_places(np.full(len(words), 5), words)
    counts = Counter(tuple(sorted(each)) for each in chosen.tolist())
    assert len(counts) == 10 and set(counts.values()) == {6}
    assert all(len(set(each)) == 3 for each in chosen.tolist())
    # Who has no more rows than the cap brings all of them, whatever the words are.
    for size in range(4):
        assert (chosen_places(np.full(len(words), size), words) == np.arange(3)).all()


def test_a_node_without_persons_has_no_rows() -> None:
    empty = UnitTask(None, (None, UnitRows.of([], "node 1")), (4, 4), MOST)  # pyright: ignore[reportArgumentType]
    for row in range(2):
        assert not empty.unit_sizes(row, np.zeros(4, dtype=np.int64)).any()
        zeros_EM = np.zeros((4, MOST), dtype=np.int64)
        assert not empty.unit_rows(row, zeros_EM[:, 0], zeros_EM).any()


def test_rows_that_cannot_be_read_are_blanks_and_nobody_else_notices() -> None:
    persons = Persons()
    persons.unreadable = {0, 3, 5}
    numbers, filled, there = fetched(persons, [2, 0, 1])
    assert there.tolist() == [True, False, True]
    assert filled[0].tolist() == [False, True, False] and numbers[0].tolist() == [4, 4, 4]


def test_identifiers_of_any_kind_bring_rows_together() -> None:
    for ids in (["b", "a", "b"], np.array([7, 3, 7]), torch.tensor([0, 9, 0]), (2.5, 1.0, 2.5)):
        units = UnitRows.of(ids, "node 0")
        assert len(units) == 2 and units.num_rows == 3
        assert units.sizes(np.arange(2)).tolist() == [2, 1]
        assert units.at(np.arange(2), np.array([[0, 1], [0, 0]])).tolist() == [[0, 2], [1, 1]]
    for missing in ([1, None], np.array([1.0, np.nan]), ["a", ""]):
        with pytest.raises(RefusedDataError, match="example 1"):
            UnitRows.of(missing, "node 0")
    with pytest.raises(RefusedDataError, match="one identifier per row"):
        UnitRows.of(np.zeros((2, 2)), "node 0")


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([123, "123"], "example 1: its identifier is text, that of example 0 is a number"),
        (["7", 7.0, "7"], "example 1: its identifier is a number"),
        ([b"a", "a"], "two persons"),
        ([(1, "a"), ("1", "a")], "two persons"),
        ([Decimal("NaN"), Decimal("NaN")], "example 0: its identifier is missing"),
        ([(1, float("nan")), (1, float("nan"))], "example 0: its identifier is missing"),
        (["a", " "], "example 1: its identifier is missing"),
        ([object(), object()], "identifier is a object; expected a number or text"),
        ([complex("nan")], "expected a number or text"),
        ([torch.tensor([1, 2])], "identifier is a Tensor; expected a number or text"),
        ([np.array([1, 2])], "identifier is a ndarray; expected a number or text"),
        ({"a": 1, "b": 2}, "expected one identifier per row"),
    ],
)
def test_one_person_cannot_pass_for_two(ids: Any, words: str) -> None:
    with pytest.raises(RefusedDataError, match=words):
        UnitRows.of(ids, "node 0")


def test_equal_identifiers_of_one_kind_are_one_person() -> None:
    pairs = ([1, 1.0, True], [np.int8(1), torch.tensor(1)], [np.array([1]), 1], [("a", 1)] * 2)
    for ids in (*pairs, [UUID(int=5), UUID(int=5)], np.array(["2026-01-01"] * 2, "datetime64[D]")):
        assert len(UnitRows.of(ids, "node 0")) == 1


@pytest.mark.parametrize("other", ["A12", "1e999", "nan", " ", None])
def test_nobody_is_split_in_two_by_what_somebody_else_is_called(other: str | None) -> None:
    ids = [text for number in range(40) for text in (f"{number}", f" {number}.0 ", f"0{number}")]
    assert len(UnitRows.of(ids, "node 0")) == 40
    assert len(UnitRows.of(np.array(ids), "node 0")) == 40
    if other is None or not other.strip():
        with pytest.raises(RefusedDataError, match="missing"):
            UnitRows.of([*ids, other], "node 0")
        return
    assert len(UnitRows.of([*ids, other], "node 0")) == 41
    assert len(UnitRows.of([("ward", text) for text in [*ids, other]], "node 0")) == 41
