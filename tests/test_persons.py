"""Privacy of whole persons in `dpcsgp.train`: what is counted, drawn, promised and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpcsgp
from dpcsgp.cli.account import _of_ledgers
from dpcsgp.errors import ConfigError, ModelError, RefusedDataError
from dpcsgp.privacy.clipping.engine import CheckedEngine
from dpcsgp.privacy.ledger_format import read_ledger
from dpcsgp.runs.user_units import separate_units

CAP = {"privacy.max_rows_per_unit": 3}
FAST = {
    **CAP,
    "algorithm.steps": 4,
    "run.checkpoint_every": 1,
    "privacy.seed": 1,
    "privacy.expected_batch_size": "auto",  # a third
}


def table(persons: int, seed: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return inputs, targets and whose they are: one to seven rows per person."""
    chance = np.random.default_rng(seed)
    whose = chance.permutation(np.repeat(np.arange(persons), chance.integers(1, 8, persons)))
    inputs = torch.tensor(chance.normal(size=(len(whose), 4)), dtype=torch.float32)
    return inputs, (inputs[:, 0] > 0).long(), whose


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def train(out: Path, seeds: tuple[int, ...] = (1, 2), **arguments: Any) -> dpcsgp.Result:
    tables = [table(20, seed) for seed in seeds]
    given = {"unit": [whose for *_, whose in tables], "settings": FAST, **arguments}
    data = [(inputs, targets) for inputs, targets, _ in tables]
    return dpcsgp.train(
        model(), data, test_data=table(9, 3)[:2], epsilon=2.0, delta=1e-3, out=out, **given
    )


def test_persons_are_counted_and_promised_with_all_rows(tmp_path: Path) -> None:
    result = train(tmp_path / "run", settings={key: FAST[key] for key in FAST if "seed" not in key})
    relation = "add or remove one person with all rows, declared number unchanged"
    assert result.summary["neighbouring_relation"] == relation and result.summary["private"]
    header = read_ledger(tmp_path / "run" / "ledger" / "node-0000.jsonl").header
    assert header.unit == "person"
    (event, count), *_ = result.releases()[0]
    assert event.sampling_rate == 6 / 20 and count == 4  # a third of 20 persons, not of their rows
    assert relation in _of_ledgers([tmp_path / "run"], None)["neighbouring_relation"]


def test_a_ledger_of_examples_beside_one_of_persons_promises_examples(tmp_path: Path) -> None:
    train(tmp_path / "persons")
    without = {**FAST, "privacy.max_rows_per_unit": 0}
    train(tmp_path / "rows", unit=None, settings=without)
    both = _of_ledgers([tmp_path / "persons", tmp_path / "rows"], None)
    assert "person" not in both["neighbouring_relation"]


class Rows(Dataset[Any]):
    """Rows that are dicts, read one by one; each draws a little noise, so they are read lazily."""

    def __init__(self, inputs: Tensor, targets: Tensor, whose: np.ndarray) -> None:
        self.parts = inputs, targets, whose

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, targets, whose = self.parts
        noisy = inputs[index] + 1e-3 * torch.randn(4)
        return {"x": noisy, "who": int(whose[index]), "labels": targets[index]}


class Named(nn.Module):
    """Takes its inputs by name; one that it does not know would be an error."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_column_by_name_says_whose_a_row_is_and_the_model_does_not_see_it(
    tmp_path: Path,
) -> None:
    tables = [table(20, seed) for seed in (1, 2)]
    test = {"x": table(9, 3)[0], "labels": table(9, 3)[1]}
    columns = [{"x": x, "who": who.tolist(), "labels": y} for x, y, who in tables]
    lazy = [Rows(*each) for each in tables]
    sums = []
    for number, data in enumerate((columns, lazy)):
        result = dpcsgp.train(
            Named(),
            data,
            test_data=test,
            epsilon=2.0,
            delta=1e-3,
            out=tmp_path / str(number),
            unit="who",
            settings=FAST,
        )
        assert result.releases()[1][0][0].sampling_rate == 6 / 20
        sums.append(result.model(test["x"]))
    assert float((sums[0] - sums[1]).detach().abs().max()) < 0.1  # the same persons were drawn


def test_a_table_gives_its_column() -> None:
    inputs, targets, whose = table(5, 0)
    frame = pd.DataFrame(inputs.numpy(), columns=list("abcd")).assign(who=whose)
    (rest,), test, units = separate_units("who", [(frame, targets)], (frame, targets), 2)
    assert isinstance(rest, tuple) and list(rest[0].columns) == list("abcd")
    assert isinstance(test, tuple) and list(test[0].columns) == list("abcd")
    assert units is not None and len(units.by_node[0]) == 5


def test_a_stopped_run_of_persons_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    train(tmp_path / "run", should_stop=lambda step: step == 2)
    resumed = train(tmp_path / "run", resume=True)
    probe = table(9, 3)[0]
    assert torch.equal(resumed.model(probe), whole.model(probe))
    with pytest.raises(ConfigError, match="max_rows_per_unit"):
        train(tmp_path / "run", resume=True, settings={**FAST, "privacy.max_rows_per_unit": 2})


def test_more_persons_may_be_declared_than_there_are(tmp_path: Path) -> None:
    result = train(tmp_path / "run", num_examples=[30, 20])
    assert result.releases()[0][0][0].sampling_rate == 10 / 30
    with pytest.raises(RefusedDataError, match="20 persons"):
        train(tmp_path / "other", num_examples=[19, 20])


def test_a_person_in_rows_of_any_order_is_the_same_person(tmp_path: Path) -> None:
    """With a cap that nobody exceeds, the order of rows changes rounding at most."""
    inputs, targets, whose = table(12, 5)
    settings = {**FAST, "privacy.max_rows_per_unit": 8}
    # persons are numbered as they come, so rows move only within and between persons' blocks
    sorted_rows = np.argsort(whose, kind="stable")
    backwards = np.concatenate([np.flatnonzero(whose == who)[::-1] for who in range(12)])
    found = []
    for name, order in (("sorted", sorted_rows), ("backwards", backwards)):
        result = dpcsgp.train(
            model(),
            [(inputs[order], targets[order])],
            epsilon=2.0,
            delta=1e-3,
            out=tmp_path / name,
            unit=[whose[order]],
            settings={**settings, "algorithm.name": "dp-sgd"},
        )
        found.append(result.model(inputs).detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"settings": {"algorithm.steps": 2}}, ConfigError, "privacy.max_rows_per_unit"),
        ({"unit": None}, ConfigError, "every example is its own unit"),
        ({"unit": [[1, 2]]}, ConfigError, "1 entries for 2 nodes"),
        ({"unit": [[1, 2], [1, 2]]}, RefusedDataError, "2 identifiers"),
        ({"unit": [None, None]}, RefusedDataError, "no identifiers"),
        ({"unit": "who"}, RefusedDataError, "no such column"),
        (
            {"settings": {**FAST, "task.augmentation": "flip"}},
            ConfigError,
            "rows of a person have no augmented views",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_spent(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        train(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


def test_no_identifier_leaves_the_process(tmp_path: Path) -> None:
    """Not in any file of the results folder: neither as text nor inside of it."""
    tables = [table(20, seed) for seed in (1, 2)]
    unit = [[f"secret-{who}-person" for who in whose] for *_, whose in tables]
    train(tmp_path / "run", unit=unit)
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"secret-" not in path.read_bytes(), path
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["num_nodes"] == 2


class _Damaged(Rows):
    """Rows of which the fourth cannot be read, or does not say whose it is."""

    raises = True

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        if index == 3 and self.raises:
            raise OSError("what the row holds")
        if index == 3:
            del row["who"]
        return row


@pytest.mark.parametrize(("raises", "words"), [(True, "cannot be read"), (False, "no field 'who'")])
def test_a_row_that_does_not_say_whose_it_is_is_refused_at_its_owner(
    raises: bool, words: str
) -> None:
    rows = _Damaged(*table(5, 0))
    rows.raises = raises
    with pytest.raises(RefusedDataError, match=f"node 0, example 3: .*{words}") as caught:
        separate_units("who", [rows], None, 2)
    assert "row" not in caught.value.told  # the others hear of it, but not why


def test_a_node_without_rows_needs_no_column() -> None:
    (data,), _, units = separate_units("who", [[]], None, 2)
    assert data == [] and units is not None and len(units.by_node[0]) == 0


class _Kept(Rows):
    """Rows that keep the view that they drew at the first reading."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.kept: dict[int, dict[str, Any]] = {}

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


def test_views_that_rows_keep_are_refused_before_identifiers_are_read() -> None:
    with pytest.raises(RefusedDataError, match=r"example 1: .* none when it is read again"):
        separate_units("who", [_Kept(*table(5, 0))], None, 2)


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_an_engine_that_adds_rows_up_wrongly_is_found_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Such as a mean over a person's rows, or a clip norm for each of them."""
    honest = CheckedEngine.clipped_sum

    def wrong(self: CheckedEngine, *words: Any, filled_NEM: Tensor | None = None) -> Tensor:
        found = honest(self, *words, filled_NEM=filled_NEM)
        return found if filled_NEM is None else share * found

    monkeypatch.setattr(CheckedEngine, "clipped_sum", wrong)
    with pytest.raises(ModelError, match="not the sum of the gradients"):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()
