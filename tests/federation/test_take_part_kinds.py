"""`dpcsgp.take_part` with any input, loss and unit, as `dpcsgp.train` takes them: its twin.

Two parties in processes of their own, over TLS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parent))
from parties import free_address
from running import FORKS, unblock_signals

import dpcsgp
from dpcsgp.config import change_config
from dpcsgp.errors import ConfigError, DataError, DpcsgpError
from dpcsgp.federation.cards import Promise
from dpcsgp.federation.consent import approve
from dpcsgp.federation.founding import Plan, found
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.roster import Roster

NAMES = ("north", "south")
LONGEST = 6
WORDS = f"""
inputs = [
  {{ name = "words", shape = [{LONGEST}], dtype = "int64" }},
  {{ name = "age", shape = [1], dtype = "float32" }},
]
"""


class Reader(nn.Module):
    """Words of a text, and an age: two values come out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.head = nn.Linear(5, 2)

    def forward(self, words: Tensor, age: Tensor) -> Tensor:
        return self.head(torch.cat([self.table(words).mean(1), age], 1))


torch.manual_seed(0)
START = Reader()


class Notes(Dataset[Any]):
    """Notes of different lengths, with an age, whose they are, and a target."""

    def __init__(self, seed: int, label: Callable[[int], Any], rows: int = 60) -> None:
        chance = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, LONGEST + 1, (rows,), generator=chance)
        self.words = [torch.randint(1, 20, (int(n),), generator=chance) for n in lengths]
        self.ages = torch.rand(rows, 1, generator=chance)
        self.label = label

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {"words": self.words[index], "age": self.ages[index], "whose": index // 2}
        return {**row, "label": self.label(index)}


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Bring a note to the public length."""
    (row,) = rows
    words = nn.functional.pad(row["words"], (0, LONGEST - len(row["words"])))
    label = row["label"]
    return {
        "words": words[None],
        "age": row["age"][None],
        "label": [label] if isinstance(label, str) else torch.as_tensor(label)[None],
    }


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return one loss per example."""
    return nn.functional.huber_loss(outputs, targets, reduction="none").mean(1)


def make(root: Path, data: str, more: str = "") -> Roster:
    """Let two parties approve a roster for a model of their own."""
    parties = [
        PartyFolder.create(root / name, name, free_address(), Promise(70, 4.0, 1e-3))
        for name in NAMES
    ]
    plan = f'[task]\nname = "own"\n[data]\n{data}\n[algorithm]\nsteps = 4\n{more}'
    (root / "plan.toml").write_text(plan)
    cards = [party.card for party in parties]
    roster = found(Plan.load(root / "plan.toml"), cards, model=START).roster
    (root / "federation.toml").write_text(roster.text())
    for party in parties:
        approve(party, roster)
    return Roster.load(root / "federation.toml")


def join(root: Path, name: str, data: Any, **words: Any) -> dpcsgp.Result:
    given = {"model": START, "seed": 3, "patience": 20.0, **words}
    return dpcsgp.take_part(root / "federation.toml", root / name, data=data, **given)


class Rest(Dataset[Any]):
    """Notes that do not say whose they are."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def __len__(self) -> int:
        return len(self.notes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.notes[index]
        del row["whose"]
        return row


def numbers(index: int) -> Tensor:
    return torch.tensor([float(index % 5), 1.0])


def label(index: int) -> str:
    return ("sick", "well")[index % 2]


# What both parties give to `take_part` beside their data, and `train` in their place.
GIVEN: dict[str, dict[str, Any]] = {
    "numbers": {"loss": huber, "collate": padded},
    "persons": {"unit": "whose", "collate": padded},
}


def data_of(kind: str, node: int) -> Any:
    return Rest(Notes(node, numbers)) if kind == "numbers" else Notes(node, label)


def take_part(root: str, kind: str, node: int) -> None:
    """Be one party, in a process of its own: datasets share the generators of a process."""
    unblock_signals()
    torch.set_num_threads(1)
    test = data_of(kind, 5)
    join(Path(root), NAMES[node], data_of(kind, node), test_data=test, **GIVEN[kind])


def check_against_train(root: Path, roster: Roster, kind: str, **more: Any) -> list[dpcsgp.Result]:
    """Train in a federation and in one process, and compare the models bit for bit."""
    processes = [FORKS.Process(target=take_part, args=(str(root), kind, k)) for k in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        assert process.exitcode == 0
    # The same call again finds it done.
    data = [data_of(kind, node) for node in (0, 1)]
    results = [join(root, NAMES[node], data[node], **GIVEN[kind]) for node in (0, 1)]
    config = change_config(roster.config, {"privacy.seed": 3})
    given = {**GIVEN[kind], **more}
    twin = dpcsgp.train(
        START, data, config=config, num_examples=[70, 70], out=root / "twin", **given
    )
    for node, result in enumerate(results):
        assert result.summary["handed_over"] and result.releases()[node] == twin.releases()[node]
        mine, theirs = result.models[node].state_dict(), twin.models[node].state_dict()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs), node
        # What is handed out takes the arguments that its class takes.
        outputs = result.models[node](torch.ones(3, LONGEST).long(), torch.ones(3, 1))
        assert outputs.shape == (3, 2)
        loaded = dpcsgp.load_model(result.folder, Reader(), node=node)
        assert torch.equal(loaded.state_dict()["head.bias"], mine["head.bias"])
    return results


def test_nested_inputs_and_a_loss_of_ones_own(tmp_path: Path) -> None:
    roster = make(tmp_path, f'{WORDS}\nloss = "own:huber"\ntarget_shape = [2]')
    for result in check_against_train(tmp_path, roster, "numbers"):
        assert "test_loss_node_mean" in result.history[0]
        assert "accuracy_node_mean" not in result.history[0]


def test_persons_text_labels_and_nested_inputs_together(tmp_path: Path) -> None:
    labels, more = 'classes = ["well", "sick"]', "[privacy]\nmax_rows_per_unit = 2\n"
    roster = make(tmp_path, f"{WORDS}\n{labels}", more)
    for result in check_against_train(tmp_path, roster, "persons", classes=["well", "sick"]):
        assert result.classes == ("well", "sick")
        assert "person" in result.summary["neighbouring_relation"]
        assert "accuracy_node_mean" in result.history[0]


def test_what_differs_from_the_roster_is_refused_with_nothing_spent(tmp_path: Path) -> None:
    make(tmp_path, f'{WORDS}\nloss = "own:huber"\ntarget_shape = [2]')
    right = Rest(Notes(1, numbers))
    words, ages = torch.ones(9, LONGEST), torch.rand(9, 1)
    targets = torch.rand(9, 2)
    for data, given, problem in (
        (right, {}, "lives in the parties' Python"),
        (right, {"loss": numbers}, "names 'own:huber', the given one is 'own:numbers'"),
        (right, {"loss": huber}, "need the same shape"),  # not collated
        (({"words": words, "age": ages}, targets), {"loss": huber}, r"words float32 \[6\], the ro"),
        (({"words": words.long()}, targets), {"loss": huber}, "no age, the roster says age"),
        ((words, targets), {"loss": huber}, "one tensor float32"),
        (right, {"loss": huber, "unit": "age"}, "leave it out"),
    ):
        with pytest.raises(DpcsgpError, match=problem) as caught:
            join(tmp_path, "north", data, **given)
        assert isinstance(caught.value, ConfigError | DataError)
    with pytest.raises(DataError, match="one table, and the roster says inputs words"):
        join(tmp_path, "north", "notes.csv", loss=huber)
    assert not (tmp_path / "north" / "runs").exists()
