"""What would silently give a useless model or a wrong promise is refused, or said at the start.

What is said of private rows is said on the machine that holds them, and is written nowhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpcsgp
from dpcsgp.config import load_config
from dpcsgp.errors import ModelError
from dpcsgp.evaluation import warn_if_not_finite
from dpcsgp.records.names import shown_model
from dpcsgp.report import write_report
from dpcsgp.runs import row_digests

RANDOM = torch.Generator().manual_seed(0)
INPUTS = torch.randn(480, 4, generator=RANDOM)
LABELS = (INPUTS[:, 0] > 0).long()
NODES = [(INPUTS[start : start + 120], LABELS[start : start + 120]) for start in (0, 120, 240)]
TEST = INPUTS[360:], LABELS[360:]


def rows(start: int, stop: int, inputs: Tensor = INPUTS) -> tuple[Tensor, Tensor]:
    return inputs[start:stop], LABELS[start:stop]


def told(out: Path, **changes: Any) -> list[str]:
    """Train until before the first step; return all warnings, which name this file."""
    torch.manual_seed(1)
    settings = {"algorithm.steps": 4, "privacy.seed": 1} | changes.pop("settings", {})
    known: dict[str, Any] = {
        "model": nn.Linear(4, 2),
        "node_data": NODES,
        "test_data": TEST,
        "epsilon": 8.0,
        "delta": 1e-3,
        "should_stop": lambda step: True,
        "out": out,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dpcsgp.train(**{**known, **changes}, settings=settings)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def test_a_sound_run_is_told_nothing(tmp_path: Path) -> None:
    assert told(tmp_path / "run") == []


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs[:, :1].log().expand(-1, 4))


def test_a_model_whose_first_outputs_are_not_finite_is_refused(tmp_path: Path) -> None:
    bad = int((TEST[0][:, 0] < 0).sum())
    with pytest.raises(ModelError, match=rf"outputs for {bad} of 120 test rows are not finite"):
        told(tmp_path / "run", model=Logarithm())
    assert not (tmp_path / "run").exists()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + torch.tensor([0.0, 0.0, -torch.inf])


def test_a_loss_that_is_not_finite_is_refused_and_ruled_out_classes_are_not(tmp_path: Path) -> None:
    def infinite(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none") / targets

    with pytest.raises(ModelError, match=r"losses for \d+ of 120 test rows are not finite"):
        told(tmp_path / "loss", loss=infinite)

    assert told(tmp_path / "masked", model=Masked()) == []


def test_a_metric_that_becomes_missing_is_said_once() -> None:
    def row(step: int, *values: float) -> dict[str, Any]:
        return {"step": step, "auc_node_mean": sum(values), "auc_nodes": list(values)}

    history = [row(0, 0.5, 0.6)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_not_finite(history)
    history.append(row(4, 0.5, float("nan")))
    with pytest.warns(UserWarning, match=r"auc: not a finite number .* step 4 \(1 of 2 models\)"):
        warn_if_not_finite(history)
    history.append(row(8, float("nan"), float("nan")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_not_finite(history)


def test_a_run_with_a_metric_that_is_missing_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="precision: not a finite number") as caught:
        dpcsgp.train(
            nn.Linear(4, 2), NODES, test_data=TEST, epsilon=8.0, delta=1e-3, out=tmp_path / "run",
            settings={"algorithm.steps": 2, "run.evaluate_every": 1, "privacy.seed": 1},
            metrics={"precision": lambda outputs, targets: float("nan")},
        )  # fmt: skip
    assert len(caught) == 1


HOPELESS: dict[str, dict[str, Any]] = {
    "eps": {"epsilon": 0.001},
    "columns": {
        "model": lambda: nn.Linear(5000, 2),
        "node_data": [(torch.randn(50, 5000), LABELS[:50]) for _ in range(3)],
        "test_data": None,
        "epsilon": 1.0,
    },
    "one row each": {"node_data": [rows(node, node + 1) for node in range(3)], "epsilon": 2.0},
}


@pytest.mark.parametrize("name", HOPELESS)
def test_noise_that_dominates_is_said_by_train_as_by_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    changes = HOPELESS[name]
    found = told(tmp_path / "run", verbose=True, **changes)
    sizes = [len(labels) for _, labels in changes.get("node_data", NODES)]
    planned = dpcsgp.plan(
        changes.get("model", nn.Linear(4, 2)), sizes, epsilon=changes["epsilon"], delta=1e-3,
        settings={"algorithm.steps": 4},
    )  # fmt: skip
    assert "noise dominates" in planned.verdict
    assert [text for text in found if text.startswith(planned.verdict)] != []
    assert planned.verdict in capsys.readouterr().out


def test_the_table_of_a_sound_run_has_the_verdict_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(tmp_path / "run", verbose=True) == []
    assert "small noise: noise moves the model" in capsys.readouterr().out


def test_test_data_that_are_private_rows_are_noticed(tmp_path: Path) -> None:
    (text,) = told(tmp_path / "mixed", test_data=rows(100, 200))
    assert "test_data: at least half of the rows are private rows" in text
    (text,) = told(tmp_path / "most", test_data=rows(290, 420))
    assert "private rows" in text
    assert told(tmp_path / "few", test_data=rows(340, 400)) == []  # a third
    # The same object is said once, in other words.
    (text,) = told(tmp_path / "object", test_data=NODES[0])
    assert "test_data are those of node 0" in text
    assert "half of the rows" not in "".join(
        path.read_text() for path in tmp_path.rglob("*") if path.suffix in (".json", ".toml")
    )


def test_rows_at_two_nodes_are_noticed(tmp_path: Path) -> None:
    (text,) = told(tmp_path / "a", node_data=[rows(0, 100), rows(50, 200), rows(200, 360)])
    assert "nodes 0 and 1: at least half" in text and "eps of both adds up" in text
    assert told(tmp_path / "b", node_data=[rows(0, 100), rows(60, 200), rows(200, 360)]) == []
    shuffled = torch.randperm(120, generator=RANDOM)
    copied = INPUTS[:120][shuffled].clone(), LABELS[:120][shuffled].clone()
    (text,) = told(tmp_path / "c", node_data=[*NODES, copied])
    assert "nodes 0 and 3" in text
    (text,) = told(tmp_path / "d", node_data=[NODES[0], NODES[0], NODES[1]])
    assert "nodes 0 and 1 are given the same data" in text


@pytest.mark.parametrize("levels", [2, 3, 5])
@pytest.mark.parametrize("columns", [2, 4, 8])
def test_rows_that_are_alike_by_chance_are_not_suspected(
    monkeypatch: pytest.MonkeyPatch, levels: int, columns: int
) -> None:
    spoken: list[str] = []
    monkeypatch.setattr(row_digests, "tell", spoken.append)
    draws = torch.Generator().manual_seed(levels * columns)
    for size in (3, 10, 50, 400, 3000):
        parts = {
            node: stacked(torch.randint(levels, (size, columns), generator=draws).float())
            for node in range(5)
        }
        test = stacked(torch.randint(levels, (60, columns), generator=draws).float())
        row_digests.warn_about_rows_given_twice(parts, test)
    assert spoken == []


def stacked(inputs: Tensor) -> Any:
    from dpcsgp.tasks.examples import collect_examples

    return collect_examples((inputs, inputs[:, 0].long()), len(inputs), "node", None, torch.inf)


def test_digests_tell_rows_apart_by_every_byte() -> None:
    values = torch.zeros(2 + 4 * 31, 31)
    for place in range(31):
        for row, value in enumerate((1.0, -1.0, 1e-40, -0.5)):
            values[1 + 4 * place + row, place] = value
    digests = row_digests._hashed(values, 0)
    assert len(set(digests.tolist())) == len(values) - 1  # the first and the last are equal
    for kind in (torch.uint8, torch.int64, torch.bool, torch.float64, torch.bfloat16):
        digests = row_digests._hashed(torch.eye(7).to(kind), 0)
        assert len(set(digests.tolist())) == 7


@pytest.mark.parametrize(
    ("clip_norm", "words"),
    [(200.0, r"too large: .* median length of \d.*noise is \d+ times"), (0.001, "very small")],
)
def test_a_clip_norm_far_off_is_said_by_train_and_plan(
    tmp_path: Path, clip_norm: float, words: str
) -> None:
    import re

    settings = {"privacy.clip_norm": clip_norm}
    (text,) = told(tmp_path / "run", settings=settings)
    assert re.search(words, text)
    sizes = [120, 120, 120]
    planned = dpcsgp.plan(nn.Linear(4, 2), sizes, epsilon=8.0, test_data=TEST, settings=settings)
    assert re.search(words, planned.verdict)
    fitting = dpcsgp.plan(nn.Linear(4, 2), sizes, epsilon=8.0, test_data=TEST)
    assert "clip_norm" not in fitting.verdict
    assert told(tmp_path / "untested", settings=settings, test_data=None) == []


def constant(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).float() + 0.0 * outputs.sum(1)


DEAD: dict[str, Callable[[], dict[str, Any]]] = {
    "loss": lambda: {"loss": constant},
    "last layer": lambda: {"model": nn.Sequential(nn.Linear(4, 2), nn.Threshold(1e3, 0.0))},
}


@pytest.mark.parametrize("test_data", [TEST, None])
@pytest.mark.parametrize("name", DEAD)
def test_a_loss_that_teaches_nothing_is_refused(tmp_path: Path, name: str, test_data: Any) -> None:
    words = r"its gradient is zero on all \d+ (test|random) rows tried"
    with pytest.raises(ModelError, match=words):
        told(tmp_path / "run", test_data=test_data, **DEAD[name]())


def test_a_head_that_starts_at_zero_may_be_trained(tmp_path: Path) -> None:
    head = nn.Linear(8, 2)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    assert told(tmp_path / "a", model=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), head)) == []

    def rare(outputs: Tensor, targets: Tensor) -> Tensor:  # most rows have no gradient
        return (outputs[:, 0] - outputs[:, 1]).abs().sub(1.5).clamp_min(0.0)

    told(tmp_path / "b", loss=rare)


def test_the_usual_eps_is_named_unless_somebody_gave_one(tmp_path: Path) -> None:
    (text,) = told(tmp_path / "a", epsilon=None)
    assert text.startswith("epsilon: not given, so 0.5 is used")
    assert told(tmp_path / "b", epsilon=None, settings={"privacy.epsilon": 8.0}) == []
    config = load_config(None, ["privacy.epsilon=8", "graph.num_nodes=3"])
    assert told(tmp_path / "c", epsilon=None, config=config) == []
    assert told(tmp_path / "d", epsilon=None, settings={"privacy.noise": "none"}) == []


def test_private_columns_on_another_scale_are_named_to_their_owner(tmp_path: Path) -> None:
    grams = INPUTS.clone()
    grams[:, 2] *= 1000
    (text,) = told(tmp_path / "a", node_data=[rows(0, 120, grams), *NODES[1:]])
    assert "node 0, column 2 of the inputs is more than 1000 times larger than in test" in text
    (text,) = told(tmp_path / "b", node_data=[NODES[0], rows(120, 240, INPUTS / 500), NODES[2]])
    assert "node 1, column" in text and "smaller than in test_data" in text
    tenfold = INPUTS * 30
    assert told(tmp_path / "c", node_data=[rows(0, 120, tenfold), *NODES[1:]]) == []
    # Columns of two modes, which lie on either side of the middle, have no other scale.
    modes = torch.where(torch.rand(480, 4, generator=RANDOM) < 0.45, 1e-3, 1.0)
    few = torch.where(torch.rand(480, 4, generator=RANDOM) < 0.55, 1e-3, 1.0)
    parts = [rows(start, start + 120, modes) for start in (0, 120, 240)]
    assert [text for text in told(tmp_path / "d", node_data=parts, test_data=rows(360, 480, few))
            if "scale" in text] == []  # fmt: skip


@pytest.mark.parametrize(("mark", "words"), [(-999.0, "holds -999"), (1e30, r"beyond 1e\+20")])
def test_marks_for_missing_values_are_named_to_their_owner(
    tmp_path: Path, mark: float, words: str
) -> None:
    import re

    marked = INPUTS.abs()
    marked[17, 3] = mark
    (text,) = told(tmp_path / "a", node_data=[rows(0, 120, marked), *NODES[1:]])
    assert re.search(rf"node 0, column 3 of the inputs .*{words}.*missing value", text)
    wide = INPUTS * 700  # where -999 is a number like others
    wide[17, 3] = -999.0
    everywhere = [rows(start, start + 120, wide) for start in (0, 120, 240)]
    found = told(tmp_path / "b", node_data=everywhere, test_data=None)
    assert [text for text in found if "missing value" in text] == []


def test_the_page_says_plainly_what_it_shows(tmp_path: Path) -> None:
    def pair(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs[:, 0]

    told(
        tmp_path / "run", node_data=[pair(inputs) for inputs, _ in NODES], loss="mse",
        model=nn.Sequential(nn.Linear(4, 1)), test_data=pair(TEST[0]), should_stop=None,
        metrics={"mae": lambda outputs, targets: (outputs[:, 0] - targets).abs().mean()},
    )  # fmt: skip
    page = write_report([tmp_path / "run"]).read_text()
    assert "A low mark" not in page and "A high mark is a node left behind" in page
    assert "own:Sequential" not in page and "Sequential (own)" in page
    assert "zero-byte" not in page and "Nothing to compare with" in page
    assert shown_model("mlp:128") == "mlp:128"
