"""Data as people have them: tables, text labels, nested inputs, datasets read row by row; what is
missing or out of range is refused where the data are, before anything is spent."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import textwrap
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from scipy.sparse import csr_matrix
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import dpcsgp
from dpcsgp.config import load_config
from dpcsgp.console.tables import plan_table
from dpcsgp.errors import ConfigError, DataError, RefusedDataError
from dpcsgp.privacy import read_ledgers
from dpcsgp.report.folders import read_results
from dpcsgp.runs.design import design_run
from dpcsgp.runs.facts import Facts
from dpcsgp.runs.range_checks import check_ranges
from dpcsgp.runs.user_data import UserData
from dpcsgp.tasks.supervised import LOSSES
from test_api import NODES, TEST, fit, parameters, small_model

SEEDED = {"privacy.seed": 1}


def released(folder: Path) -> bool:
    return any(len(file.read_text().splitlines()) > 1 for file in folder.rglob("*.jsonl"))


def changed(row: int, column: int, value: float) -> list[tuple[Tensor, Tensor]]:
    """Return the nodes' data with one value of node 1 replaced."""
    nodes = [(inputs.clone(), labels) for inputs, labels in NODES]
    nodes[1][0][row, column] = value
    return nodes


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_with_their_place(
    tmp_path: Path, value: float
) -> None:
    nodes = changed(17, 2, value)
    nodes[1][0][40] = value
    words = r"node 1: 2 of 125 examples .* not finite \(first: example 17, column 2\)"
    with pytest.raises(RefusedDataError, match=words) as caught:
        fit(tmp_path / "run", node_data=nodes)
    assert not released(tmp_path)
    # the others hear whose data they were, and nothing of what is in them
    assert "node 1" in caught.value.told
    assert not any(word in caught.value.told for word in ("17", "125", "finite", "column"))


def test_missing_targets_test_data_and_pixels_are_refused_too(tmp_path: Path) -> None:
    broken = torch.full((5,), float("nan"))
    with pytest.raises(DataError, match=r"node 0: 5 of 5 .*first: example 0, target"):
        dpcsgp.train(nn.Linear(3, 1), [(torch.zeros(5, 3), broken)], loss="mse", out=tmp_path / "a")
    inputs = TEST[0].clone()
    inputs[3, 0] = float("nan")
    with pytest.raises(DataError, match=r"test_data: 1 of 60 .*example 3, column 0"):
        fit(tmp_path / "b", test_data=(inputs, TEST[1]))
    images = torch.zeros(6, 2, 4, 4)
    images[5, 1, 2, 3] = float("inf")
    with pytest.raises(DataError, match=r"first: example 5, at \(1, 2, 3\)"):
        dpcsgp.train(
            nn.Sequential(nn.Flatten(), nn.Linear(32, 2)),
            [(images, torch.zeros(6).long())],
            out=tmp_path / "c",
        )
    pairs = [(torch.zeros(3), 0)] * 9 + [(torch.tensor([0.0, float("nan"), 0.0]), 1)]
    with pytest.raises(DataError, match=r"node 1: 1 of 10 .*example 9, column 1"):
        fit(tmp_path / "d", node_data=[NODES[0], pairs])
    assert not released(tmp_path)


UNEQUAL = [*NODES, (NODES[0][0][:3], NODES[0][1][:3])]


def test_nodes_count_by_their_examples_unless_the_caller_says_otherwise(tmp_path: Path) -> None:
    def weights(name: str, **changes: Any) -> str:
        folder = fit(tmp_path / name, **changes).folder
        return load_config(folder / "config.toml").algorithm.node_weights

    assert weights("default") == "examples"
    assert weights("equal", settings={"algorithm.node_weights": "equal"}) == "equal"
    assert weights("alone", settings={"algorithm.name": "local"}) == "equal"
    # a run that was begun otherwise, by an older release for example, goes on as it began
    chosen = {"algorithm.node_weights": "equal"}
    fit(tmp_path / "old", settings=chosen, should_stop=lambda step: step == 2)
    assert fit(tmp_path / "old", resume=True).summary["stopped_because"] == "completed"


def test_a_small_node_that_would_dominate_the_noise_is_named_with_both_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"algorithm.steps": 1, "algorithm.node_weights": "equal"}
    with pytest.warns(UserWarning, match=r"node 3 \(3 examples\) brings \d+% .*\"examples\""):
        fit(tmp_path / "equal", node_data=UNEQUAL, settings=settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*of the noise of the average")
        fit(tmp_path / "examples", node_data=UNEQUAL, settings={"algorithm.steps": 1}, verbose=True)
    line = next(line for line in capsys.readouterr().out.splitlines() if "of the average" in line)
    assert "if nodes count equally" in line and "if by their examples" in line


def test_unscaled_public_data_are_warned_about_and_private_ones_are_not_looked_at(
    tmp_path: Path,
) -> None:
    large = [(1000 * inputs, labels) for inputs, labels in NODES]
    with pytest.warns(UserWarning, match=r"column \d of the inputs is about .* scale columns"):
        fit(tmp_path / "a", test_data=(1000 * TEST[0], TEST[1]))
    with pytest.warns(UserWarning, match="whole inputs have a length of about"):
        fit(tmp_path / "b", test_data=(TEST[0] / 1000, TEST[1]))
    data = [(inputs, 100 * inputs.sum(1)) for inputs, _ in NODES]
    with pytest.warns(UserWarning, match=r"targets are about .* published deviation"):
        fit(tmp_path / "c", model=nn.Linear(3, 1), node_data=data, loss="mse",
            test_data=(TEST[0], 100 * TEST[0].sum(1)))  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="test_data")
        fit(tmp_path / "d", node_data=large)
        fit(tmp_path / "e")


NAMES = np.array(["sick", "well"])  # sorted: sick is 0


class Rows(Dataset[Any]):
    """Gives rows made by a function."""

    def __init__(self, count: int, row: Callable[[int], Any]) -> None:
        self.count, self.row = count, row

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.row(index)


def as_frames(data: tuple[Tensor, Tensor]) -> Any:
    frame = pd.DataFrame(data[0].numpy(), columns=["a", "b", "c"])
    frame["outcome"] = data[1].numpy()
    return frame[["a", "b", "c"]], frame["outcome"]


FORMS: dict[str, Callable[[tuple[Tensor, Tensor]], Any]] = {
    "frames": as_frames,
    "one-column frame as target": lambda data: (as_frames(data)[0], as_frames(data)[1].to_frame()),
    "lists": lambda data: (data[0].tolist(), data[1].tolist()),
    "list of pairs": lambda data: list(zip(data[0].tolist(), data[1].tolist(), strict=True)),
    "big endian": lambda data: (data[0].numpy().astype(">f8"), data[1].numpy().astype(">i2")),
    "backwards": lambda data: (data[0].numpy()[::-1][::-1], data[1].numpy().astype(np.uint16)),
    "objects": lambda data: (data[0].numpy().astype(object), data[1].numpy().astype(object)),
    "masked": lambda data: (np.ma.masked_array(data[0].numpy()), data[1].bool().numpy()),
    "sparse": lambda data: (csr_matrix(data[0].numpy()), data[1].numpy()),
    "loader": lambda data: DataLoader(TensorDataset(*data), batch_size=7, shuffle=True),
    "subset": lambda data: Subset(TensorDataset(*data), range(len(data[1]))),
    "columns by name": lambda data: {"x": data[0], "labels": data[1]},
    "rows by name": lambda data: Rows(
        len(data[1]), lambda i: {"x": data[0][i], "label": data[1][i]}
    ),
    "text": lambda data: (data[0], NAMES[data[1].numpy()].tolist()),
    "text in frames": lambda data: (data[0], pd.Series(NAMES[data[1].numpy()], dtype="category")),
    "text in rows": lambda data: Rows(
        len(data[1]), lambda i: (data[0][i], str(NAMES[int(data[1][i])]))
    ),
}


class Named(nn.Module):
    """A model whose input has a name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    folder = tmp_path_factory.mktemp("tensors")
    return parameters(fit(folder / "run", model=Named(), settings=SEEDED).model)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings("ignore:.*DataLoader only its dataset")
def test_the_same_examples_in_any_form_give_the_same_model(
    tmp_path: Path, name: str, expected: Tensor
) -> None:
    form = FORMS[name]
    result = fit(
        tmp_path / "run",
        model=Named(),
        node_data=[form(data) for data in NODES],
        test_data=form(TEST),
        settings=SEEDED,
    )
    assert torch.equal(parameters(result.model), expected)
    if name.startswith("text"):
        assert result.classes == ("sick", "well")
        assert json.loads((result.folder / "classes.json").read_text()) == ["sick", "well"]
    else:
        assert result.classes is None and not (result.folder / "classes.json").exists()


def test_a_loader_is_said_to_give_only_its_dataset(tmp_path: Path) -> None:
    loaders = [DataLoader(TensorDataset(*data)) for data in NODES]
    with pytest.warns(UserWarning, match="only its dataset is used") as caught:
        fit(tmp_path / "run", node_data=loaders, settings={"algorithm.steps": 1})
    texts = [str(one.message) for one in caught if "only its dataset" in str(one.message)]
    assert len(texts) == 1 and texts[0].startswith("node 0 and 2 more")


def test_the_order_of_text_labels_is_public(tmp_path: Path) -> None:
    """A private label never enters the mapping: it is refused, and the others do not hear it."""
    nodes = [(inputs, NAMES[labels.numpy()].tolist()) for inputs, labels in NODES]
    test = (TEST[0], NAMES[TEST[1].numpy()].tolist())
    with pytest.raises(RefusedDataError, match=r"node 0: targets hold text.*classes=\[") as caught:
        fit(tmp_path / "a", node_data=nodes, test_data=None)
    nodes[1][1][8] = "dead"
    with pytest.raises(RefusedDataError, match="node 1, example 8: label 'dead' is not among the 2"
                       ) as caught:  # fmt: skip
        fit(tmp_path / "b", node_data=nodes, test_data=test)
    assert "dead" not in caught.value.told
    rows: list[Any] = [Rows(len(y), lambda i, x=x, y=y: (x[i], y[i])) for x, y in nodes]
    with pytest.raises(RefusedDataError, match="node 1, example 8: label 'dead'"):
        fit(tmp_path / "c", node_data=rows, test_data=test)
    model = nn.Linear(3, 3)
    order = ["well", "sick", "dead"]
    result = fit(tmp_path / "d", model=model, node_data=nodes, test_data=test, classes=order)
    assert result.classes == ("well", "sick", "dead")
    numbers = [(inputs, 7 + labels) for inputs, labels in NODES]  # labels need not start at 0
    result = fit(tmp_path / "e", node_data=numbers, test_data=None, classes=[7, 8])
    assert result.classes == (7, 8)


MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "one dataset": ({"node_data": TensorDataset(*NODES[0])}, ["one entry per node", "[data]"]),
    "one pair": ({"node_data": NODES[0]}, ["one entry per node", "random_split"]),
    "one loader": ({"node_data": DataLoader(TensorDataset(*NODES[0]))}, ["one entry per node"]),
    "one frame": ({"node_data": as_frames(NODES[0])[0]}, ["one entry per node", "DataFrame"]),
    "frame without target": (
        {"node_data": [as_frames(NODES[0])[0]]},
        ["node 0 is a table without targets (DataFrame)", "(inputs, targets)"],
    ),
    "tensors without targets": (
        {"node_data": [None, NODES[0][0], NODES[1][0]]},
        ["node 1 is a table without targets (Tensor)", "(inputs, targets)"],
    ),
    "pair in a list": ({"node_data": list(NODES[0])}, ["one entry per node", "[data]"]),
    "words of other programs": (
        {"settings": {"privacy.max_physical_batch_size": 8}},
        ["privacy.max_physical_batch_size", "did you mean run.max_rows_per_pass"],
    ),
    "text column": (
        {"node_data": [(as_frames(NODES[0])[0].assign(sex="f"), NODES[0][1]), *NODES[1:]]},
        ["node 0", "'sex'", "hold no numbers"],
    ),
    "text inputs": (
        {"node_data": [(np.array([["a"], ["b"]]), np.array([0, 1])), *NODES[1:]]},
        ["node 0: inputs hold text"],
    ),
    "dates": (
        {"node_data": [(np.zeros((2, 3), dtype="M8[D]"), np.array([0, 1])), *NODES[1:]]},
        ["node 0: inputs are datetime64", "as days"],
    ),
    "ragged": (
        {"node_data": [([[1.0], [1.0, 2.0]], [0, 1]), *NODES[1:]]},
        ["node 0: inputs are lists of unequal lengths"],
    ),
    "no labels": (
        {"node_data": [{"a": NODES[0][0], "b": NODES[0][1]}, *NODES[1:]]},
        ["node 0", "'a', 'b'", "rename the target"],
    ),
    "nested settings": (
        {"settings": {"algorithm": {"steps": 3}}},
        ["settings['algorithm']", '{"algorithm.steps": 60}'],
    ),
    "repeated classes": ({"classes": ["a", "a"]}, ["classes = ['a', 'a']", "different labels"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_with_what_to_write(tmp_path: Path, name: str) -> None:
    changes, words = MISTAKES[name]
    with pytest.raises((ConfigError, DataError)) as caught:
        fit(tmp_path / "run", **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "--set" not in str(caught.value)


class Output(OrderedDict[str, Any]):
    """A record like those of transformers."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


class Reader(nn.Module):
    """Reads words under a mask, as BERT does, and a few numbers besides."""

    def __init__(self, words: int = 20, numbers: int = 0) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(words, 8), nn.Linear(8 + numbers, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, extra: Any = None) -> Output:
        vectors = self.words(input_ids) * attention_mask[..., None]
        pooled = vectors.sum(1) / attention_mask.sum(1, keepdim=True).clamp(min=1)
        if extra is not None:
            pooled = torch.cat([pooled, extra["numbers"]], dim=1)
        return Output(logits=self.last(pooled), states=(vectors,))


def sentences(count: int, seed: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=chance)
    ids = torch.randint(1, 10, (count, 6), generator=chance) + 10 * labels[:, None]
    mask = (torch.arange(6) < torch.randint(2, 7, (count, 1), generator=chance)).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


SENTENCES = [sentences(size, seed) for seed, size in enumerate((90, 120))]


def test_dict_rows_reach_the_model_as_keywords_and_its_logits_are_used(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Reader()
    rows = [
        Rows(len(part["labels"]), lambda i, part=part: {key: part[key][i] for key in part})
        for part in SENTENCES
    ]
    settings = {**SEEDED, "algorithm.steps": 20, "algorithm.learning_rate": 3.0}
    found = [
        fit(tmp_path / name, model=model, node_data=data, test_data=sentences(50, 9),
            settings=settings)
        for name, data in {"columns": SENTENCES, "rows": rows}.items()
    ]  # fmt: skip
    assert torch.equal(parameters(found[0].model), parameters(found[1].model))
    assert found[0].summary["accuracy_node_mean"] > 0.8
    test = sentences(50, 9)
    # what comes out is the caller's own model: it takes its own arguments
    outputs = found[0].model(test["input_ids"], attention_mask=test["attention_mask"])
    right = (outputs.logits.argmax(1) == test["labels"]).double().mean()
    assert float(right) == pytest.approx(found[0].summary["accuracy_average_model"])
    loaded = dpcsgp.load_model(found[0].folder, Reader())
    assert torch.equal(parameters(loaded), parameters(found[0].model))


def test_a_masked_model_is_trained_as_one_whose_mask_is_made_inside(tmp_path: Path) -> None:
    """The packed row carries every bit: a model that is given ids and mask apart takes the same
    steps as one that is given one tensor."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Reader()

        def forward(self, both: Tensor) -> Tensor:
            return self.inner(both[:, 0], both[:, 1]).logits

    torch.manual_seed(0)
    apart, whole = Reader(), Whole()
    whole.inner.load_state_dict(apart.state_dict())
    stacked = [
        (torch.stack([part["input_ids"], part["attention_mask"]], dim=1), part["labels"])
        for part in SENTENCES
    ]
    one = fit(tmp_path / "a", model=apart, node_data=SENTENCES, test_data=None, settings=SEEDED)
    other = fit(tmp_path / "b", model=whole, node_data=stacked, test_data=None, settings=SEEDED)
    assert torch.equal(parameters(one.model), parameters(other.model))


def mixed(part: dict[str, Tensor]) -> tuple[Any, Tensor]:
    numbers = torch.randn(len(part["labels"]), 3, generator=torch.Generator().manual_seed(1))
    tree = {
        "input_ids": part["input_ids"].clone(),
        "attention_mask": part["attention_mask"].to(torch.uint8),
        "extra": {"numbers": numbers},
    }
    return tree, part["labels"]


@pytest.mark.parametrize("tested", [True, False])
def test_nested_inputs_of_mixed_numbers(tmp_path: Path, tested: bool) -> None:
    result = fit(
        tmp_path / "run",
        model=Reader(numbers=3),
        node_data=[mixed(part) for part in SENTENCES],
        test_data=mixed(sentences(50, 9)) if tested else None,
    )
    assert result.summary["stopped_because"] == "completed"
    tuples = [(tuple(mixed(part)[0].values()), part["labels"]) for part in SENTENCES]
    other = fit(tmp_path / "tuples", model=Reader(numbers=3), node_data=tuples, test_data=None)
    assert other.summary["stopped_because"] == "completed"
    broken = mixed(SENTENCES[1])
    broken[0]["input_ids"][3, 2] = 2**24 + 1
    with pytest.raises(RefusedDataError, match=r"node 1: a whole number is above 2\^24"):
        fit(tmp_path / "large", model=Reader(numbers=3), node_data=[mixed(SENTENCES[0]), broken])


def test_nested_targets_reach_loss_and_metrics_as_they_were(tmp_path: Path) -> None:
    def loss(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        error = (outputs.squeeze(1) - targets["value"]).square()
        return error * targets["weight"]

    def counted(outputs: Tensor, targets: dict[str, Tensor]) -> int:
        assert set(targets) == {"value", "weight"} and targets["weight"].dtype == torch.int64
        return len(outputs)

    data = [
        (inputs, {"value": inputs.sum(1), "weight": torch.ones(len(inputs)).long()})
        for inputs, _ in NODES
    ]
    result = fit(tmp_path / "run", model=nn.Linear(3, 1), node_data=data, test_data=data[0],
                 loss=loss, metrics={"count": counted})  # fmt: skip
    assert result.summary["count_node_mean"] == 200


def test_a_word_past_the_vocabulary_is_named_without_running_the_model_on_private_rows(
    tmp_path: Path,
) -> None:
    seen: list[Tensor] = []

    class Watched(Reader):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, extra: Any = None) -> Output:
            seen.append(input_ids.detach().clone())
            return super().forward(input_ids, attention_mask, extra)

    own = UserData.collect(SENTENCES, (0, 1), None, *LOSSES["cross_entropy"])
    model = Watched()
    own.connect(model)
    check_ranges(model, own.loss, own.form, own.test, own.parts)
    # two made-up examples for inputs and two for targets, per node: no private row
    rows = [ids for batch in seen for ids in batch]
    private = torch.cat([part["input_ids"] for part in SENTENCES])
    assert len(rows) == 8 and not any((private == row).all(1).any() for row in rows)
    marked = [{**part, "input_ids": part["input_ids"].clone()} for part in SENTENCES]
    marked[1]["input_ids"][44, 3] = 20
    with pytest.raises(RefusedDataError, match="node 1, example 44: model and loss fail on it"):
        fit(tmp_path / "other", model=Reader(), node_data=marked, test_data=None)
    assert not released(tmp_path)


def test_labels_past_an_own_loss_are_found_too(tmp_path: Path) -> None:
    weights = torch.tensor([1.0, 2.0])

    def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, weights, reduction="none")

    nodes = [(inputs, labels.clone()) for inputs, labels in NODES]
    fit(tmp_path / "good", loss=weighted)
    nodes[2][1][5] = 2
    with pytest.raises(RefusedDataError, match="node 2, example 5: model and loss fail on it"):
        fit(tmp_path / "bad", loss=weighted, node_data=nodes)


def padded(rows: list[Any]) -> dict[str, Tensor]:
    """Pad words to six, as a tokenizer does with padding="max_length"."""
    (row,) = rows
    length = len(row["words"])
    ids = torch.zeros(1, 6, dtype=torch.int64)
    ids[0, :length] = row["words"]
    mask = (torch.arange(6) < length).long()[None]
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([row["label"]])}


def test_rows_of_different_lengths_are_collated_one_by_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Reader()
    ragged = [
        [
            {"words": ids[: int(mask.sum())], "label": int(label)}
            for ids, mask, label in zip(*part.values(), strict=True)
        ]
        for part in SENTENCES
    ]
    changes = {"model": model, "test_data": None, "settings": SEEDED}
    found = fit(tmp_path / "a", node_data=ragged, collate=padded, **changes)
    expected = fit(tmp_path / "b", node_data=SENTENCES, **changes)
    assert torch.equal(parameters(found.model), parameters(expected.model))
    with pytest.raises(RefusedDataError, match=r"collate returned inputs of shapes \(\d,\) and "
                       r"\(\d,\).*one fixed, public length"):  # fmt: skip
        fit(tmp_path / "c", node_data=[[{**row, "labels": 1} for row in part] for part in ragged],
            collate=lambda rows: {"x": rows[0]["words"][None], "labels": [0]}, **changes
        )  # fmt: skip
    with pytest.raises(RefusedDataError, match="returned a batch of"):
        fit(tmp_path / "d", node_data=ragged, **changes,
            collate=lambda rows: {"x": torch.zeros(2, 3), "labels": torch.zeros(2)})  # fmt: skip
    with pytest.raises(DataError, match="collate works on rows"):
        fit(tmp_path / "e", node_data=SENTENCES, collate=padded, **changes)
    # public test data may come padded, as columns
    changes["test_data"] = SENTENCES[0]
    result = fit(tmp_path / "f", node_data=ragged, collate=padded, **changes)
    assert result.summary["accuracy_node_mean"] >= 0


class Augmented(Dataset[Any]):
    """Adds noise from torch, numpy and random to its rows, and counts how often it is asked."""

    def __init__(self, data: tuple[Tensor, Tensor], noise: float) -> None:
        self.data, self.noise, self.calls = data, noise, 0

    def __len__(self) -> int:
        return len(self.data[1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.calls += 1
        inputs = self.data[0][index]
        if self.noise:
            drawn = torch.rand(()) + np.random.random() + random.random()  # noqa: NPY002
            inputs = inputs + self.noise * drawn
        return inputs, self.data[1][index]


def numpy_state() -> np.ndarray:
    state: Any = np.random.get_state()  # noqa: NPY002
    return state[1].copy()


def test_random_transforms_happen_at_every_draw_and_leave_the_callers_generators_alone(
    tmp_path: Path,
) -> None:
    sets = [Augmented(data, 0.1) for data in NODES]
    model, settings = small_model(), {**SEEDED, "privacy.expected_batch_size": 40}
    states = torch.get_rng_state(), numpy_state(), random.getstate()
    result = fit(tmp_path / "a", model=model, node_data=sets, settings=settings)
    assert torch.equal(states[0], torch.get_rng_state()) and states[2] == random.getstate()
    assert (states[1] == numpy_state()).all()
    # six steps of 40 rows and more, besides one look at all rows
    assert all(data.calls >= len(data) + 6 * 40 for data in sets)
    again = fit(tmp_path / "b", model=model, node_data=sets, settings=settings)
    assert torch.equal(parameters(result.model), parameters(again.model))  # seeded: repeatable
    other = fit(
        tmp_path / "c", model=model, node_data=sets, settings={**settings, "privacy.seed": 2}
    )
    assert not torch.equal(parameters(result.model), parameters(other.model))
    plain = [Augmented(data, 0.0) for data in NODES]
    fit(tmp_path / "d", model=model, node_data=plain, settings=settings)
    assert all(data.calls <= len(data) + 100 for data in plain)  # always the same: read once


def test_two_draws_of_one_example_have_views_of_their_own() -> None:
    data = [Augmented(part, 1.0) for part in NODES[:2]]
    own = UserData.collect(data, (0, 1), None, *LOSSES["cross_entropy"])
    task: Any = own.task(nn.Linear(3, 2), (0, 1))
    indices = torch.zeros(2, 4, dtype=torch.int64)
    seeds = torch.tensor([[1, 2, 1, 3], [1, 2, 1, 3]])
    inputs, _, readable = task.read_examples(indices, seeds, [4, 3])
    assert torch.equal(inputs[0, 0], inputs[0, 2])  # a view follows its seed, not its companions
    assert not torch.equal(inputs[0, 0], inputs[0, 1])
    assert readable.tolist() == [[True] * 4, [True, True, True, False]]


def test_randomness_that_nobody_can_seed_is_refused(tmp_path: Path) -> None:
    own = np.random.default_rng(0)
    rows = Rows(50, lambda i: (NODES[0][0][i] + float(own.random()), NODES[0][1][i]))
    with pytest.raises(RefusedDataError, match="node 2, example 0: reading it twice"):
        fit(tmp_path / "run", node_data=[NODES[0], NODES[1], rows])


def test_views_that_a_dataset_keeps_are_refused(tmp_path: Path) -> None:
    """They would be drawn at the start under known seeds, by the number of a row."""
    kept: dict[int, Tensor] = {}

    def row(index: int) -> tuple[Tensor, Tensor]:
        if index not in kept:
            kept[index] = NODES[0][0][index] + torch.randn(3)
        return kept[index], NODES[0][1][index]

    with pytest.raises(RefusedDataError, match=r"node 2, example 1: .* none when it is read again"):
        fit(tmp_path / "run", node_data=[NODES[0], NODES[1], Rows(50, row)])


def test_unseeded_views_are_found_where_only_later_rows_have_them(tmp_path: Path) -> None:
    """Data are often sorted by class, and often one class alone is augmented."""
    own = np.random.default_rng(0)
    rows = Rows(50, lambda i: (NODES[0][0][i] + (i > 40) * float(own.random()), NODES[0][1][i]))
    with pytest.raises(RefusedDataError, match=r"node 2, example 4\d: reading it twice"):
        fit(tmp_path / "run", node_data=[NODES[0], NODES[1], rows])


def test_a_row_that_fails_only_later_counts_as_a_blank_and_nobody_is_told(tmp_path: Path) -> None:
    """A file that vanishes in the middle of a run: the run goes on as if the row were not there."""
    gone = False

    def row(index: int) -> tuple[Tensor, Tensor]:
        if gone and index == 7:
            raise OSError("the disk is gone")
        return NODES[0][0][index] + 0 * torch.rand(()), NODES[0][1][index]

    def vanish(values: dict[str, Any]) -> None:
        nonlocal gone
        gone = values["step"] >= 2

    settings = {**SEEDED, "privacy.expected_batch_size": 125}
    nodes = [Rows(200, row), *NODES[1:]]
    result = fit(tmp_path / "run", node_data=nodes, settings=settings, on_evaluation=vanish)
    assert result.summary["stopped_because"] == "completed" and gone
    assert [sum(n for _, n in ledger.releases()) for ledger in read_ledgers(result.ledger)] == [
        6
    ] * 3


def test_data_that_do_not_fit_are_read_when_they_are_drawn_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [Augmented(data, 0.0) for data in NODES]
    held = fit(tmp_path / "held", node_data=sets, settings=SEEDED)
    before = [data.calls for data in sets]
    monkeypatch.setattr("dpcsgp.runs.user_data.MOST_BYTES_IN_MEMORY", 2000)
    read = fit(tmp_path / "read", node_data=sets, settings=SEEDED)
    assert torch.equal(parameters(held.model), parameters(read.model))
    assert all(data.calls > 2 * calls for data, calls in zip(sets, before, strict=True))


REFUSAL = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import dpcsgp
from test_api import FAST, NODES, TEST, small_model
from dpcsgp.network.torch_distributed import ProcessEnvironment

place, nodes = ProcessEnvironment.from_environment(), [list(data) for data in NODES[:2]]
more = {{}}
if sys.argv[2] == "values":
    nodes[1][0] = nodes[1][0].clone()
    nodes[1][0][17, 2] = float("nan")
else:  # more persons than were declared
    more = {{"unit": [list(range(len(data[0]))) for data in nodes], "num_examples": [200, 60]}}
    FAST["privacy.max_rows_per_unit"] = 1
told = Path(sys.argv[1]) / f"told-{{place.rank}}"
try:
    dpcsgp.train(small_model, [tuple(data) for data in nodes], test_data=TEST, settings=FAST,
                 out=Path(sys.argv[1]) / "run", epsilon=8.0, delta=1e-3, **more)
except Exception as error:
    told.write_text(f"{{type(error).__name__}}: {{error}}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("values", ("node 1: 1 of 125 examples", "example 17")),
        ("persons", ("node 1: its data have 125 persons, but num_examples[1] = 60",)),
    ],
)
def test_other_processes_hear_only_whose_data_were_refused(
    tmp_path: Path, fault: str, words: tuple[str, ...]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(REFUSAL.format(tests=str(Path(__file__).parent))))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(script), str(tmp_path), fault],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=100,  # they do not wait for the time-out of the start
    )
    assert done.returncode == 0, done.stderr[-3000:]
    other, owner = ((tmp_path / f"told-{rank}").read_text() for rank in range(2))
    assert owner.startswith("RefusedDataError: ") and all(word in owner for word in words)
    assert "the data of node 1 were refused" in other
    assert not any(word in other for word in ("17", "125", "60", "finite"))
    assert not released(tmp_path)


LARGE = """
import sys
import torch
from torch.utils.data import Dataset
import dpcsgp

class Large(Dataset):
    def __len__(self):
        return 200_000
    def __getitem__(self, index):
        row = torch.zeros(1000)
        row[index % 1000] = 1.0
        return row, index % 2

settings = {"privacy.expected_batch_size": 1000, "algorithm.steps": 5}
dpcsgp.train(torch.nn.Linear(1000, 2), [Large()], epsilon=2.0, delta=1e-6, settings=settings,
             out=sys.argv[1])
# not ru_maxrss: that begins with what the parent had
(peak,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak.split()[1])
"""


@pytest.mark.slow
def test_rows_that_do_not_fit_train_in_little_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(tmp_path / "run")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) < 1_500_000  # kilobytes; the rows alone are 800 MB


APART = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import dpcsgp, torch
from test_api import FAST, NODES, TEST, parameters, small_model
from dpcsgp.network.torch_distributed import ProcessEnvironment

rank = ProcessEnvironment.from_environment().rank
out = Path(sys.argv[1]) / f"host-{{rank}}"  # as on machines that share no disk
result = dpcsgp.train(small_model, NODES, test_data=TEST, settings=FAST, out=out)
for node, model in result.models.items():
    torch.save(parameters(model), out / f"model-{{node}}.pt")
"""


@pytest.mark.slow
def test_a_machines_own_folder_names_its_nodes_rightly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(APART.format(tests=str(Path(__file__).parent))))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    hosted = {0: (0, 1), 1: (2,)}
    for listed in (True, False):
        for host, nodes in hosted.items():
            folder = tmp_path / f"host-{host}"
            if not listed:  # as an earlier release left it
                tensors = load_file(folder / "model.safetensors")
                del tensors["nodes"]
                save_file(tensors, folder / "model.safetensors")
            for node in nodes:
                found = parameters(dpcsgp.load_model(folder, small_model(), node=node))
                assert torch.equal(found, torch.load(folder / f"model-{node}.pt"))
            missing = 2 - 2 * host
            words = rf"node = {missing}: .* these nodes: {', '.join(map(str, nodes))}$"
            with pytest.raises(DataError, match=words):
                dpcsgp.load_model(folder, small_model(), node=missing)
            with pytest.raises(DataError, match=r"some nodes only \(of 3\).*node=k"):
                dpcsgp.load_model(folder, small_model())


def test_a_second_run_on_the_same_examples_says_that_eps_adds_up(tmp_path: Path) -> None:
    inputs = torch.randn(90, 3)
    nodes = [(inputs[:50], torch.zeros(50).long()), (inputs[50:], torch.ones(40).long())]
    changes: dict[str, Any] = {"node_data": nodes, "settings": {"algorithm.steps": 2}}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*trained on before")
        fit(tmp_path / "first", **changes, should_stop=lambda step: step == 1)
        fit(tmp_path / "first", **changes, resume=True)  # the same run
    changes["node_data"] = [(data[0].clone(), data[1]) for data in nodes]  # other objects
    with pytest.warns(UserWarning, match=r"node 0 and 1 more: trained on before, in .*first"):
        fit(tmp_path / "second", **changes)


def test_dropout_is_warned_about_once_shortly_and_only_if_it_drops(tmp_path: Path) -> None:
    layers = [layer for _ in range(9) for layer in (nn.Linear(3, 3), nn.Dropout(0.1))]
    with pytest.warns(UserWarning, match="Dropout layers") as caught:
        fit(tmp_path / "a", model=nn.Sequential(*layers, nn.Linear(3, 2)))
    texts = [str(one.message) for one in caught if "Dropout" in str(one.message)]
    assert len(texts) == 1 and "and 6 more" in texts[0] and len(texts[0]) < 250
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dropout layers")
        fit(tmp_path / "b", model=nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.Linear(3, 2)))


def test_dropout_that_is_switched_off_is_not_warned_about(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dropout layers")
        fit(tmp_path / "run", model=model.eval())


def test_errors_speak_python_to_scripts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume=True: .* holds no run") as caught:
        fit(tmp_path / "nothing", resume=True)
    assert "--" not in str(caught.value)
    settings = {"compression.spec": "rand:0.5", "algorithm.mixing_rate": 1.0}
    with pytest.raises(ConfigError, match="allow_divergence=True") as caught:
        fit(tmp_path / "run", node_data=[*NODES, *NODES, *NODES, *NODES], settings=settings)
    assert "--" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_a_report_of_an_unfinished_own_run_names_the_script(tmp_path: Path) -> None:
    fit(tmp_path / "run", should_stop=lambda step: step == 2)
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(DataError, match=r"script that started it.*resume=True\)"):
        read_results(tmp_path / "run", "run")


def test_names_with_colons_are_shown_as_they_are(tmp_path: Path) -> None:
    class M(nn.Linear):
        """Called like an emoji."""

    folder = fit(tmp_path / "run", model=M(3, 2), settings={"algorithm.steps": 1}).folder
    config = load_config(folder / "config.toml")
    design = design_run(config, Facts((3,), 0, (200, 125, 275)), module=nn.Linear(3, 2))
    text = io.StringIO()
    Console(width=200, file=text).print(plan_table(design))
    assert ":M:" in config.task.model and "M (8 coordinates)" in text.getvalue()


def test_progress_says_how_old_its_score_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path / "run", verbose=True, settings={"run.evaluate_every": 4, "algorithm.steps": 10})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    by_step = {line.split("/")[0].split()[1]: line for line in lines}
    assert "(step" not in by_step["4"] and "(step 4)" in by_step["6"]
    assert "polish 1" in lines[-1] and "(step 8)" in lines[-1]
