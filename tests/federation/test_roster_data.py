"""What a roster says about everybody's examples: read back as written, and old ones as ever."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_parties import PLAN, cards_of, make_parties, plan_of
from torch import nn

from dpcsgp.console.federations import overview, own_part
from dpcsgp.errors import ConfigError, DataError
from dpcsgp.federation import roster_checks
from dpcsgp.federation.agreement import Agreement, examine
from dpcsgp.federation.amending import Amendment, amend, check_succession
from dpcsgp.federation.data_form import check_form, check_loss, leaves_in, loss_name
from dpcsgp.federation.data_shape import DataShape
from dpcsgp.federation.differences import differences
from dpcsgp.federation.files import Fields, parse_table
from dpcsgp.federation.founding import found
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.version_start import book_lost
from dpcsgp.privacy.ledger_format import read_ledger
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.tasks.node_data import RowForm
from dpcsgp.tasks.trees import Packing, skeleton_of

CLASSES = "num_classes = 3"
NESTED = """inputs = [
  {name = "image", shape = [2, 2], dtype = "float32"},
  {name = "text[0]", shape = [], dtype = "int64"},
]
num_classes = 3"""


def data_of(text: str) -> DataShape:
    return DataShape.take(Fields(parse_table(text, "plan"), "plan, data"))


def agreed(root: Path, data: str, model: nn.Module | None = None, more: str = "") -> Agreement:
    plan = PLAN.replace(CLASSES, data) + more
    if "inputs" in data:
        plan = plan.replace("input_shape = [4]\n", "")
    folders = [PartyFolder.open(root / letter) for letter in "abc" if (root / letter).exists()]
    return found(plan_of(root, plan), cards_of(folders or make_parties(root)), model=model)


def shown(part: Any) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as caught:
        console.print(part, soft_wrap=True)
    return caught.get()


def test_a_roster_that_was_written_before_keeps_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[1] / "data" / "roster-of-classes.toml"
    monkeypatch.setattr(roster_checks, "utc_today", lambda: datetime.date(2027, 1, 1))
    roster = Roster.load(path)
    assert roster.text() == path.read_text()
    assert roster.fingerprint == "66d2940b552c7669aabe94616763b4a40873801644949ef76b1402982179e62c"
    assert roster.data == DataShape((4,), 3) and roster.facts.unit == "example"


@pytest.mark.parametrize(
    ("data", "told", "outputs"),
    [
        (CLASSES, "inputs [4], 3 classes", 3),
        ('loss = "cross_entropy"\nnum_classes = 3', "inputs [4], 3 classes", 3),
        ('classes = ["b", "a c"]', "inputs [4], 2 classes (b, a c)", 2),
        ("classes = [7, 3, 5]\nnum_classes = 3", "3 classes (7, 3, 5)", 3),
        ('loss = "mse"', "targets: a number, mean squared error", 1),
        ('loss = "mse"\ntarget_shape = [2, 3]', "targets [2, 3], mean squared error", 6),
        ('loss = "own:huber"\ntarget_shape = [2]', "targets [2], loss own:huber", 2),
        ('loss = "own:focal"\nnum_classes = 4', "4 classes, loss own:focal", 4),
    ],
)
def test_losses_and_targets_are_read_back_as_written(
    tmp_path: Path, data: str, told: str, outputs: int
) -> None:
    agreement = agreed(tmp_path, data)
    again = Roster.parse(agreement.roster.text())
    assert again == agreement.roster and again.fingerprint == agreement.roster.fingerprint
    assert again.data.num_outputs == outputs
    assert agreement.design.module(torch.zeros(5, 4)).shape == (5, outputs)
    assert told in shown(overview(agreement)) and examine(again).answer() == agreement.answer()
    # Without the words of the default, the roster is the one that was always made.
    if data == 'loss = "cross_entropy"\nnum_classes = 3':
        assert again.content()["data"] == {"input_shape": [4], "num_classes": 3}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("", "num_classes is missing"),
        ('loss = "hinge"\nnum_classes = 3', "loss = 'hinge': expected"),
        ('loss = "own:os.system(1)"\nnum_classes = 3', "expected"),
        ('loss = "mse"\nnum_classes = 3', 'num_classes = 3: .* with loss = "mse"'),
        ("num_classes = 3\ntarget_shape = [2]", "target_shape = .* goes with num_classes"),
        ('loss = "mse"\ntarget_shape = [0]', r"target_shape = \[0\]: expected 0 to 4"),
        ('loss = "own:huber"', "one description of the targets"),
        ('loss = "own:huber"\nnum_classes = 3\ntarget_shape = []', "one description"),
        ('classes = ["a"]', "2 or more different labels"),
        ('classes = ["a", "a"]', "2 or more different labels"),
        ('classes = ["a", 1]', "2 or more different labels"),
        ("classes = [true, false]", "classes = True: expected"),
        ("classes = [[1], [2]]", "classes = .* expected whole numbers, or text"),
        ('classes = ["a", " b"]', "without blanks"),
        ('classes = ["a", "b"]\nnum_classes = 3', "num_classes = 3: expected 2"),
        (NESTED + "\ninput_shape = [4]", "either input_shape or inputs"),
        (NESTED.replace("int64", "int9"), "dtype = 'int9': expected"),
        (NESTED.replace("text[0]", "image"), "different names"),
    ],
)
def test_what_does_not_go_together_is_refused(data: str, problem: str) -> None:
    head = "" if "inputs" in data else "input_shape = [4]\n"
    with pytest.raises(ConfigError, match=problem):
        data_of(head + data)


def test_weights_of_classes_need_classes(tmp_path: Path) -> None:
    weighted = PLAN.replace(CLASSES, 'loss = "mse"').replace(
        'name = "own"', 'name = "own"\nclass_weights = [1.0, 2.0]'
    )
    with pytest.raises(ConfigError, match=r'class_weights = .* with data.loss = "mse"'):
        found(plan_of(tmp_path, weighted), cards_of(make_parties(tmp_path)))


def test_nested_inputs_are_for_models_of_the_parties_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.inputs = image float32 \[2, 2\].*of your own"):
        agreed(tmp_path, NESTED)
    roster = agreed(tmp_path, NESTED, nn.Linear(5, 3)).roster
    again = Roster.parse(roster.text())
    assert again == roster and again.facts.input_shape == (5,)
    other = replace(roster, data=replace(roster.data, inputs=roster.data.inputs[:1]))
    assert [each.field for each in differences(roster, other)] == ["data.inputs"]


def form(inputs: Any, targets: Any) -> RowForm:
    packed = []
    for tree in (inputs, targets):
        skeleton = skeleton_of(tree)
        leaves = list(tree.values()) if isinstance(tree, dict) else [tree]
        leaves = [
            part for leaf in leaves for part in (leaf if isinstance(leaf, tuple) else (leaf,))
        ]
        packed.append(Packing.of(skeleton, leaves))
    return RowForm(*packed)


def test_every_difference_from_the_form_in_the_roster_is_named() -> None:
    shape = data_of(NESTED)
    image, word, label = torch.zeros(9, 2, 2), torch.zeros(9).long(), torch.zeros(9).long()
    right = form({"image": image, "text": (word,)}, label)
    check_form(right, None, shape)
    assert leaves_in(right.inputs) == shape.inputs
    check_form(form({"text": (word,), "image": image}, label), None, shape)  # in any order
    wrong = form({"picture": image, "text": (word.float(),)}, label.float())
    with pytest.raises(DataError) as caught:
        check_form(wrong, None, shape)
    for words in ("no image", "no picture", r"text[0] float32 []", "torch.float32 of shape []"):
        assert words in str(caught.value)
    numbers = data_of('input_shape = [4]\nloss = "mse"\ntarget_shape = [2]')
    check_form(form(torch.zeros(9, 4), torch.zeros(9, 2)), None, numbers)
    with pytest.raises(DataError, match=r"shape \[3\], the roster says \[2\]"):
        check_form(form(torch.zeros(9, 4), torch.zeros(9, 3)), None, numbers)


def test_a_loss_of_ones_own_is_known_by_its_name() -> None:
    def huber(outputs: Any, targets: Any) -> Any:
        return nn.functional.huber_loss(outputs, targets, reduction="none")

    shape = data_of('input_shape = [4]\nloss = "own:huber"\ntarget_shape = []')
    assert check_loss(shape, huber) is huber
    assert loss_name(nn.HuberLoss(reduction="none")) == "own:HuberLoss"
    with pytest.raises(ConfigError, match="lives in the parties' Python"):
        check_loss(shape, None)
    other: Any = loss_name
    with pytest.raises(ConfigError, match="names 'own:huber', the given one is 'own:loss_name'"):
        check_loss(shape, other)
    with pytest.raises(ConfigError, match="names 'own:huber', the given one is 'mse'"):
        check_loss(shape, "mse")
    with pytest.raises(ConfigError, match="has no name"):
        check_loss(shape, lambda outputs, targets: outputs)
    plain = data_of("input_shape = [4]\nnum_classes = 3")
    assert check_loss(plain, None) == check_loss(plain, "cross_entropy") == "cross_entropy"
    with pytest.raises(ConfigError, match="names 'cross_entropy', the given one is 'own:huber'"):
        check_loss(plain, huber)


PERSONS = "\n[privacy]\nmax_rows_per_unit = 4\n"


def test_a_promise_to_persons_is_in_the_roster_and_in_words(tmp_path: Path) -> None:
    agreement = agreed(tmp_path, CLASSES, more=PERSONS)
    again = Roster.parse(agreement.roster.text())
    assert again == agreement.roster and again.facts.unit == "person"
    assert examine(again).answer()["unit"] == "person"
    words = "90 declared persons with all their rows, at most 4 of which count in one step"
    assert words in shown(own_part(agreement, "lab-a", []))
    assert "persons" in shown(overview(agreement))
    plain = agreed(tmp_path, CLASSES)
    assert "max_rows_per_unit" not in plain.roster.text()
    assert "person" not in shown(overview(plain))
    with pytest.raises(ConfigError, match="does not say whose a row is"):
        found(
            plan_of(tmp_path, '[task]\nname = "digits"\nmodel = "logistic"' + PERSONS),
            cards_of([PartyFolder.open(tmp_path / letter) for letter in "abc"]),
        )


@pytest.mark.parametrize("before", [0, 4])
def test_no_version_changes_who_is_promised_privacy(tmp_path: Path, before: int) -> None:
    old = agreed(tmp_path, CLASSES, more=PERSONS if before else "")
    with pytest.raises(ConfigError, match="max_rows_per_unit is the same in all versions"):
        amend(old.roster, Amendment(2, settings=(f"privacy.max_rows_per_unit={before + 1}",)))
    new = amend(old.roster, Amendment(2, settings=("algorithm.steps=9",))).roster
    assert new.config.privacy.max_rows_per_unit == before
    # A roster that was changed by hand says so, too.
    privacy = new.config.privacy.model_copy(update={"max_rows_per_unit": 4 - before})
    forged = replace(new, config=new.config.model_copy(update={"privacy": privacy}))
    with pytest.raises(ConfigError, match=r"settings.privacy.max_rows_per_unit: .* / "):
        check_succession(old, forged)


def test_a_ledger_that_was_lost_is_booked_for_persons_where_they_were_promised(
    tmp_path: Path,
) -> None:
    old = agreed(tmp_path, CLASSES, more=PERSONS).roster
    new = amend(old, Amendment(2, rejoin=("lab-a",))).roster
    folder = ResultsFolder.create(tmp_path / "run", new.config)
    assert book_lost(folder, new, 0, new.config) == 2
    (ledger,) = (folder.path / "ledger").glob("node-*.jsonl")
    assert read_ledger(ledger).header.unit == "person"
