"""A first day with the program, point by point: what a new user brings works at once, or is refused
with the reason and the way out.

| point | here | more in |
|---|---|---|
| 1 a small node | `test_01` | test_own_data.py |
| 2 missing values | `test_02` | test_own_data.py |
| 3 optimizer, decay, epochs | `test_03` | algorithms/test_optimizers.py, test_planning.py |
| 4 memory | `test_04` | test_own_data.py (rows that do not fit) |
| 5 random transforms | `test_05` | test_own_data.py |
| 6 several organisations | `test_06` | federation/ |
| 7 whose model | `test_07` | test_own_data.py |
| 8 own metrics | `test_08_*` | |
| 9 any input | `test_09` | test_own_data.py, test_any_model.py |
| 10 private rows at the start | `test_10` | test_own_data.py |
| 11 errors that name the right thing | `test_11_*` | test_own_data.py |
| 12 early stopping | `test_12_*` | |
| 13 words | `test_13` | report/test_report_page.py, cli/ |
| 14 installing | `test_14_*` | |
| 15 small things | `test_15_*` | test_own_data.py, report/, cli/test_help.py |
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpcsgp
from dpcsgp.errors import ConfigError, DataError, DpcsgpError
from dpcsgp.report import write_report

ROOT = Path(__file__).parents[1]
RANDOM = torch.Generator().manual_seed(0)
INPUTS = torch.randn(240, 4, generator=RANDOM)
LABELS = (INPUTS[:, 0] + 0.3 * torch.randn(240, generator=RANDOM) > 0).long()
NODES = [(INPUTS[start : start + 60], LABELS[start : start + 60]) for start in (0, 60, 120)]
TEST = INPUTS[180:], LABELS[180:]


def fit(out: Path, **changes: Any) -> dpcsgp.Result:
    torch.manual_seed(1)
    settings = {"algorithm.steps": 4, "algorithm.learning_rate": 1.0, "run.evaluate_every": 2}
    known: dict[str, Any] = {
        "model": nn.Linear(4, 2),
        "node_data": NODES,
        "test_data": TEST,
        "epsilon": 8.0,
        "delta": 1e-3,
    }
    settings |= {"privacy.seed": 1} | changes.pop("settings", {})
    settings = {key: value for key, value in settings.items() if value is not None}
    return dpcsgp.train(**{**known, **changes}, settings=settings, out=out)


def test_01_a_small_node_does_not_ruin_the_model_in_silence(tmp_path: Path) -> None:
    small = [*NODES, (INPUTS[:3], LABELS[:3])]
    result = fit(tmp_path / "a", node_data=small)
    assert 'node_weights = "examples"' in (result.folder / "config.toml").read_text()
    with pytest.warns(UserWarning, match=r"node 3 \(3 examples\) brings 9\d% of the noise"):
        fit(tmp_path / "b", node_data=small, settings={"algorithm.node_weights": "equal"})


def test_02_missing_values_are_refused_before_anything_is_spent(tmp_path: Path) -> None:
    holes = INPUTS[:60].clone()
    holes[5:50, 3] = float("nan")
    with pytest.raises(DataError, match=r"node 0: 45 of 60 .*not finite.*example 5, column 3"):
        fit(tmp_path / "run", node_data=[(holes, LABELS[:60]), *NODES[1:]])
    assert not (tmp_path / "run").exists()


def test_03_adam_weight_decay_and_epochs_are_settings(tmp_path: Path) -> None:
    adam = {"algorithm.optimizer": "adam", "algorithm.learning_rate": None}
    steps = {"algorithm.steps": None, "algorithm.weight_decay": 0.01}
    steps |= {"privacy.expected_batch_size": 20}
    result = fit(tmp_path / "run", epochs=2, settings={**adam, **steps})
    assert result.summary["steps"] == 6  # a third of the examples is drawn in a step
    by_rule = fit(tmp_path / "rule", epochs=3, settings={**adam, "algorithm.steps": None})
    assert by_rule.summary["steps"] == 3  # batches of all examples, if nobody says otherwise
    with pytest.raises(ConfigError, match=r"epochs = 2 and algorithm.steps = 4: give one"):
        fit(tmp_path / "both", epochs=2)
    with pytest.raises(ConfigError, match=r"epochs = -1: expected a number above 0"):
        fit(tmp_path / "few", epochs=-1, settings={"algorithm.steps": None})


def test_04_a_batch_is_not_one_backward_pass() -> None:
    from dpcsgp.privacy import GaussianMechanism

    mechanism = GaussianMechanism(1.0, (1.0,), (5000,), (50_000,), "poisson")
    (shape,) = mechanism.rows_of_same_shape()
    assert shape.passes > 1 and shape.places * shape.passes >= 5000


class Noisy(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        self.calls = 0

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.calls += 1
        return INPUTS[index] + 0.1 * torch.randn(4), int(LABELS[index])


def test_05_random_transforms_happen_at_every_draw(tmp_path: Path) -> None:
    data = Noisy()
    fit(tmp_path / "run", node_data=[data, *NODES[1:]])
    looked_at = data.calls
    fit(tmp_path / "longer", node_data=[data, *NODES[1:]], settings={"algorithm.steps": 8})
    assert data.calls - looked_at > looked_at + 40  # four more steps of about twenty rows


def test_06_organisations_have_a_way_that_their_it_can_open(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "federation.md").read_text()
    assert "TLS" in page and "port" in page
    machines = (ROOT / "docs" / "multi-machine.md").read_text()
    assert "--max-restarts" in machines


def test_07_a_folder_of_some_nodes_names_them_rightly(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = fit(tmp_path / "run").folder
    tensors = load_file(folder / "model.safetensors")
    whole = dpcsgp.load_model(folder, nn.Linear(4, 2), node=1).state_dict()
    part = {"node_models": tensors["node_models"][1:2], "nodes": torch.tensor([1])}
    save_file(part, folder / "model.safetensors")
    alone = dpcsgp.load_model(folder, nn.Linear(4, 2), node=1).state_dict()
    assert all(torch.equal(alone[name], whole[name]) for name in whole)
    with pytest.raises(DataError, match=r"node = 0: .* these nodes: 1"):
        dpcsgp.load_model(folder, nn.Linear(4, 2), node=0)


def ranking(outputs: Tensor, targets: Tensor) -> Tensor:
    score = outputs[:, 1] - outputs[:, 0]
    return (score[targets == 1][:, None] > score[targets == 0][None]).double().mean()


def cost(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).double().mean()


def test_08_own_metrics_stand_beside_accuracy_with_their_direction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = {"auc": (ranking, "higher"), "cost": (cost, "lower"), "rank": ranking}
    result = fit(tmp_path / "run", metrics=metrics, verbose=True)
    printed, summary = capsys.readouterr().out, result.summary
    assert "accuracy" in printed and "auc 0." in printed and "cost, worst node" in printed
    directions = {"accuracy": "higher", "auc": "higher", "cost": "lower", "rank": "higher"}
    assert summary["metric_directions"] == directions
    last = result.history[-1]
    assert summary["cost_node_worst"] == max(last["cost_nodes"])
    assert summary["cost_node_min"] == min(last["cost_nodes"])  # the old key says what it says
    assert summary["accuracy_node_worst"] == summary["accuracy_node_min"]
    assert "A high mark" not in (result.folder / "report.html").read_text()


def test_08_an_error_is_printed_as_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def pair(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs[:, 0]

    nodes = [pair(inputs) for inputs, _ in NODES]
    model = nn.Linear(4, 1)
    result = fit(
        tmp_path / "mse", model=model, node_data=nodes, test_data=pair(TEST[0]), loss="mse",
        verbose=True,
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert "accuracy" not in printed and "mean_squared_error" in printed
    worst = max(result.history[-1]["mean_squared_error_nodes"])
    assert result.summary["mean_squared_error_node_worst"] == worst
    # Runs that measure different things are compared all the same.
    other = fit(tmp_path / "accuracy")
    page = write_report([result.folder, other.folder], tmp_path / "page.html").read_text()
    assert "mean squared error" in page and "Best accuracy" in page


def test_08_a_loss_of_ones_own_keeps_accuracy_and_class_weights_are_a_setting(
    tmp_path: Path,
) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        weights = torch.tensor([1.0, 3.0])
        return nn.functional.cross_entropy(outputs, targets, weights, reduction="none")

    by_hand = fit(tmp_path / "a", loss=loss)
    assert {"accuracy_node_mean", "test_loss_node_mean"} <= set(by_hand.summary)
    by_setting = fit(tmp_path / "b", settings={"task.class_weights": [1, 3]})
    plain = fit(tmp_path / "c")
    found = [result.state_dict()["weight"] for result in (by_hand, by_setting, plain)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    for settings, words in (
        ({"task.class_weights": [1, 2, 3]}, "3 values for 2 classes"),
        ({"task.class_weights": [1, 0]}, "task.class_weights"),
    ):
        with pytest.raises(ConfigError, match=words):
            fit(tmp_path / "d", settings=settings)
    with pytest.raises(ConfigError, match=r"only loss = .cross_entropy. has classes"):
        fit(tmp_path / "d", loss=loss, settings={"task.class_weights": [1, 3]})


def test_08_an_error_inside_a_metric_names_it_before_anything_is_spent(tmp_path: Path) -> None:
    def broken(outputs: Tensor, targets: Tensor) -> float:
        raise KeyError("no such column")

    with pytest.raises(KeyError) as caught:
        fit(tmp_path / "run", metrics={"auc": broken})
    assert any("metrics['auc']" in note for note in caught.value.__notes__)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"metrics\['auc'\]: direction 'up'.*\"higher\""):
        fit(tmp_path / "run", metrics={"auc": (ranking, "up")})


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        return self.layer(values * mask)


def test_09_dicts_tuples_and_loaders_are_inputs(tmp_path: Path) -> None:
    def named(inputs: Tensor) -> dict[str, Tensor]:
        return {"values": inputs, "mask": torch.ones(len(inputs), 4)}

    nodes = [(named(inputs), labels) for inputs, labels in NODES]
    result = fit(tmp_path / "a", model=TwoInputs(), node_data=nodes, test_data=None)
    assert result.model(**named(TEST[0])).shape == (60, 2)
    with pytest.warns(UserWarning, match="DataLoader"):
        fit(tmp_path / "b", node_data=[DataLoader(TensorDataset(*NODES[0])), *NODES[1:]])


class Counting(nn.Module):
    rows = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        if bool((inputs == 77.0).any()):  # only private rows hold it
            Counting.rows += 1
        return self.layer(inputs)


def test_10_private_rows_do_not_pass_through_the_model_before_the_first_step(
    tmp_path: Path,
) -> None:
    marked = [(torch.full((60, 4), 77.0), labels) for _, labels in NODES]
    fit(
        tmp_path / "run", model=Counting(), node_data=marked, should_stop=lambda step: True
    )  # stopped before the first step
    assert Counting.rows == 0


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "not a list": ({"node_data": NODES[0]}, r"list.*one entry per node|one entry per node"),
    "strings without test labels": (
        {"node_data": [(INPUTS[:60], np.array(["a", "b"] * 30))], "test_data": None},
        "classes=",
    ),
    "nested settings": ({"settings": {"algorithm": {"steps": 3}}}, r'\{"algorithm.steps": 60\}'),
    "no number": ({"epochs": "3", "settings": {"algorithm.steps": None}}, "epochs = '3'"),
    "no function": ({"should_stop": 5}, "should_stop = 5: expected a function"),
    "unknown key": ({"settings": {"algorithm.optimiser": "adam"}}, "did you mean 'optimizer'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_11_mistakes_are_named_with_what_to_write(tmp_path: Path, name: str) -> None:
    changes, words = MISTAKES[name]
    with pytest.raises(DpcsgpError, match=words) as caught:
        fit(tmp_path / "run", **changes)
    assert "--set" not in str(caught.value)


def test_11_tables_are_taken_as_they_are(tmp_path: Path) -> None:
    frame = pd.DataFrame(INPUTS[:60].numpy(), columns=list("abcd"))
    column = pd.Series(np.where(LABELS[:60] == 1, "ill", "well"))
    labels = [np.where(part == 1, "ill", "well") for _, part in NODES[1:]]
    nodes = [(frame, column), (NODES[1][0], labels[0]), (NODES[2][0], labels[1])]
    test = TEST[0], np.where(TEST[1] == 1, "ill", "well")
    assert fit(tmp_path / "run", node_data=nodes, test_data=test).classes == ("ill", "well")


@pytest.mark.parametrize("answer", ["finish", dpcsgp.Stop.FINISH])
def test_12_stop_and_finish_polishes_and_leaves_a_model(tmp_path: Path, answer: str) -> None:
    result = fit(tmp_path / "run", should_stop=lambda step: answer if step == 2 else False)
    summary = result.summary
    assert summary["stopped_because"] == "finished early at step 2 of 4"
    assert summary["releases"] == [2, 2, 2] and result.epsilon < 8
    assert result.history[-1]["round"] == 2 + 3  # the polish rounds were made
    polished = fit(tmp_path / "whole", settings={"algorithm.steps": 4})
    assert polished.history[-1]["round"] == 4 + 3
    # Somebody who changes their mind can still go on to the last step.
    further = fit(tmp_path / "run", resume=True)
    assert further.summary["stopped_because"] == "completed"
    assert further.summary["releases"] == [4, 4, 4]


def test_12_a_wrong_answer_and_errors_in_callbacks_are_named_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"should_stop returned 'end'.*\"finish\""):
        fit(tmp_path / "a", should_stop=lambda step: "end")

    class Patience(Exception):
        """Raised by a library that ends trials."""

    def watch(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            raise Patience("enough")

    with pytest.raises(Patience) as caught:
        fit(tmp_path / "b", on_evaluation=watch)
    assert any("on_evaluation" in note and "resume" in note for note in caught.value.__notes__)
    result = fit(tmp_path / "b", resume=True)
    assert result.summary["releases"] == [4, 4, 4]  # what was paid for was kept


def test_13_the_page_speaks_to_people_who_have_not_read_the_paper(tmp_path: Path) -> None:
    folder = fit(tmp_path / "run", settings={"privacy.seed": None}, verbose=True).folder
    page = (folder / "report.html").read_text()
    verdict = page.split('class="verdict">')[1].split("</p>")[0]
    assert verdict.startswith("On public test data the models of 3 nodes have accuracy")
    assert "learns about any one example no more than ε = " in verdict
    assert "Theorem" not in page and "own:Linear" not in page.split("<main")[0]


def test_14_the_package_says_how_to_install_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / project["readme"]).read_text()
    assert "pip install dpcsgp" in page
    assert "](docs/" not in page and "configs/" not in page  # would break on an index page
    for extra in ("tensorboard", "mlflow", "wandb", "onnx"):
        assert extra in project["optional-dependencies"] and extra in page
    assert "pip install" in (ROOT / "README.md").read_text()


def test_14_imports_are_light() -> None:
    code = (
        "import sys, torch, dpcsgp; dpcsgp.train; late = ('scipy.signal', 'scipy.stats', 'numba', "
        "'matplotlib', 'networkx', 'mlflow', 'wandb', 'onnx', 'tensorboard', 'rich', 'grpc'); "
        "print([name for name in late if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


OTHER_SYSTEM = """
import os, sys
for name in ("fcntl", "resource", "termios", "pwd", "grp", "posix_ipc"):
    sys.modules[name] = None
del os.fork
opened = os.open
def strict(path, *rest, **more):
    if os.path.isdir(path):
        raise PermissionError(13, "a folder", str(path))
    return opened(path, *rest, **more)
os.open = strict
import dpcsgp.records.files
dpcsgp.records.files.SYNCS_FOLDERS = False
import torch, dpcsgp
inputs = torch.randn(60, 4)
data = inputs, (inputs[:, 0] > 0).long()
result = dpcsgp.train(torch.nn.Linear(4, 2), [data] * 2, test_data=data, epsilon=4.0, delta=1e-3,
                      settings={"algorithm.steps": 2}, out=sys.argv[1])
print(result.summary["releases"])
"""


def test_14_the_simulator_needs_neither_fork_nor_locks(tmp_path: Path) -> None:
    words = [sys.executable, "-W", "ignore", "-c", OTHER_SYSTEM, str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == "[2, 2]", done.stderr[-2000:]


def test_15_small_things(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class M(nn.Linear):
        """Called like an emoji."""

    result = fit(tmp_path / "run", model=M(4, 2), verbose=True, test_data=None)
    printed = capsys.readouterr().out
    assert "your own data, M (10 coordinates)" in printed  # neither an emoji nor a digest
    assert "nothing: no test data were given" in printed
    page = (result.folder / "report.html").read_text()  # the page of a run without test data
    assert "Nothing was measured" in page
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dropless = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.0))
        fit(tmp_path / "dropout", model=dropless)


def test_15_a_second_run_on_the_same_data_says_that_eps_adds_up(tmp_path: Path) -> None:
    secret = {"privacy.seed": None}
    data = [(inputs + 0.25, labels) for inputs, labels in NODES]
    first = fit(tmp_path / "a", node_data=data, settings=secret)
    with pytest.warns(UserWarning, match=r"eps of both runs adds up.*dpcsgp account"):
        second = fit(tmp_path / "b", node_data=data, settings=secret)
    page = write_report([first.folder, second.folder], tmp_path / "page.html").read_text()
    joint = page.split("together they guarantee ε = ")[1].split(",")[0]
    assert second.epsilon < float(joint) < first.epsilon + second.epsilon


def test_results_can_be_taken_elsewhere(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="an extra: dpcsgp[onnx]")
    pytest.importorskip("onnxscript", reason="an extra: dpcsgp[onnx]")
    from onnx.reference import ReferenceEvaluator  # pyright: ignore[reportMissingImports]

    result = fit(tmp_path / "run")
    with pytest.raises(DataError, match=r"node = 9: .* nodes 0, 1, 2"):
        result.state_dict(node=9)
    loaded = nn.Linear(4, 2)
    loaded.load_state_dict(result.state_dict(node=2))
    assert torch.equal(loaded(TEST[0]), result.models[2](TEST[0]))
    graph = onnx.load(result.to_onnx(tmp_path / "model.onnx"))
    onnx.checker.check_model(graph)
    name = graph.graph.input[0].name
    found: Any = ReferenceEvaluator(graph).run(None, {name: TEST[0][:7].numpy()})
    np.testing.assert_allclose(found[0], result.model(TEST[0][:7]).detach().numpy(), atol=1e-6)
    assert json.loads((result.folder / "summary.json").read_text())["steps"] == 4
