"""Own models and data: laws of the API, everything it refuses before a release, nodes of all kinds,
real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import dpcsgp
from dpcsgp.config import load_config
from dpcsgp.errors import ConfigError, DataError, DpcsgpError, ModelError
from dpcsgp.privacy import Ledger, read_ledgers
from dpcsgp.runs.data import load_builtin_data

FAST = {
    "algorithm.steps": 6,
    "algorithm.learning_rate": 1.0,
    "algorithm.polish_rounds": 1,
    "run.evaluate_every": 2,
    "run.checkpoint_every": 2,
}
SIZES = (200, 125, 275)


def blobs(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return two clouds of points that a line can tell apart."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (size,), generator=random)
    return torch.randn(size, 3, generator=random) + (4.0 * labels[:, None] - 2.0), labels


NODES = [blobs(size, seed) for seed, size in enumerate(SIZES)]
TEST = blobs(60, 9)


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def fit(out: Path | None, **changes: Any) -> dpcsgp.Result:
    settings = {**FAST, **changes.pop("settings", {})}
    known = {
        "model": small_model(),
        "node_data": NODES,
        "test_data": TEST,
        "epsilon": 8.0,
        "delta": 1e-3,
    }
    return dpcsgp.train(**{**known, **changes}, settings=settings, out=out)


class Pairs(Dataset[tuple[Tensor, int]]):
    """The same examples one by one."""

    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.inputs, self.labels = data

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], int(self.labels[index])


def parameters(module: nn.Module) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for value in module.parameters()])


def test_importing_the_package_needs_no_torch() -> None:
    code = "import sys, dpcsgp; assert 'train' in dir(dpcsgp); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_learns_and_its_results_agree(tmp_path: Path) -> None:
    model = small_model()
    before = parameters(model).clone()
    seen: list[dict[str, Any]] = []
    result = fit(tmp_path / "run", model=model, on_evaluation=seen.append)
    assert torch.equal(parameters(model), before)  # the caller's model stays as it was
    assert result.summary["accuracy_node_mean"] > 0.9
    assert result.summary["private"] and 0.9 * 8 < result.epsilon <= 8
    assert [row["step"] for row in seen] == [row["step"] for row in result.history] == [0, 2, 4, 6]
    assert {
        node: sum(count for _, count in found) for node, found in result.releases().items()
    } == {0: 6, 1: 6, 2: 6}
    assert sorted(result.models) == [0, 1, 2]
    accuracy = float((result.model(TEST[0]).argmax(1) == TEST[1]).double().mean())
    assert accuracy == pytest.approx(result.summary["accuracy_average_model"])
    stored = dpcsgp.load_model(result.folder, small_model())
    assert torch.equal(parameters(stored), parameters(result.model))
    stored = dpcsgp.load_model(result.folder, small_model(), node=2)
    assert torch.equal(parameters(stored), parameters(result.models[2]))
    forbidden = ("norm", "clipped", "batch", "index", "gradient", "loss")
    assert not [key for row in seen for key in row if any(word in key for word in forbidden)]


def test_datasets_and_tensors_are_the_same_data(tmp_path: Path) -> None:
    arrays = [(inputs.double().numpy(), labels.numpy()) for inputs, labels in NODES]
    forms = {
        "tensors": NODES,
        "pairs": [Pairs(data) for data in NODES],
        "tensor datasets": [TensorDataset(*data) for data in NODES],
        "arrays": arrays,
    }
    found = [
        parameters(fit(tmp_path / name, node_data=data, settings={"privacy.seed": 1}).model)
        for name, data in forms.items()
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_regression_and_a_metric_of_ones_own(tmp_path: Path) -> None:
    data = [(inputs, inputs.sum(1)) for inputs, _ in NODES]
    # outputs (E, 1) for targets (E,): broadcast, they would be an E x E table
    model = nn.Sequential(nn.Linear(3, 1))
    result = fit(tmp_path / "a", model=model, node_data=data, test_data=data[0], loss="mse",
                 settings={"algorithm.steps": 30, "algorithm.learning_rate": 0.3})  # fmt: skip
    errors = [row["mean_squared_error_node_mean"] for row in result.history]
    assert errors[-1] < 0.3 * errors[0]

    def largest_error(outputs: Tensor, targets: Tensor) -> Tensor:
        assert outputs.shape == (200, 1) and not outputs.requires_grad
        return (outputs.squeeze(1) - targets).abs().max()

    result = fit(
        tmp_path / "b",
        model=model,
        node_data=data,
        test_data=data[0],
        metrics={"largest_error": largest_error},
        loss=lambda outputs, targets: (outputs.squeeze(1) - targets).abs(),
    )
    assert set(result.history[0]) > {"largest_error_nodes", "largest_error_average_model"}
    assert not any("accuracy" in key for key in result.summary)


def test_without_test_data_nothing_is_measured(tmp_path: Path) -> None:
    result = fit(tmp_path / "run", test_data=None)
    assert (
        not any(key.endswith("_node_mean") for key in result.summary) and len(result.history) == 4
    )


class Mixing(nn.Module):
    """Subtracts the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.linear(inputs)
        return outputs - outputs.mean(0)


class Unused(nn.Module):
    """Has a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs)


class Gated(nn.Module):
    """Has a layer whose per-example gradients cannot be formed."""

    def __init__(self) -> None:
        super().__init__()
        self.gated = nn.LSTM(1, 6, batch_first=True, proj_size=4)
        self.last = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.gated(inputs[:, :, None])[0][:, -1])


class Careless(nn.Module):
    """Writes into its input, or into the output of its layer."""

    def __init__(self, into_input: bool) -> None:
        super().__init__()
        self.linear, self.into_input = nn.Linear(3, 2), into_input

    def forward(self, inputs: Tensor) -> Tensor:
        if self.into_input:
            inputs += 1
        return self.linear(inputs).relu_()


class Stream(IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Iterator[Any]:
        return iter([])


def ragged(items: list[Any]) -> list[Any]:
    return [NODES[0], NODES[1], items]


GOOD = [(torch.zeros(3), 1)] * 4
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "batch norm": (
        {"model": nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))},
        ["'1' (BatchNorm1d)", "nn.GroupNorm(4, 8)"],
    ),
    "mixed examples": ({"model": Mixing()}, ["depends on the other examples"]),
    "unused parameters": ({"model": Unused()}, ["'spare.weight'", "requires_grad_(False)"]),
    "input in place": ({"model": Careless(True)}, ["changes its input in place"]),
    "no gradient per example": ({"model": Gated()}, ["'gated'", "proj_size=4 has no per-example"]),
    "scalar loss": ({"loss": cross_entropy}, ["one value per example", "reduction='none'"]),
    "loss not a tensor": (
        {"loss": lambda outputs, targets: 1.0},
        ["one value per example", "float"],
    ),
    "unknown loss": ({"loss": "hinge"}, ["loss = 'hinge'", '"mse"']),
    "model does not fit": ({"model": nn.Linear(4, 2)}, ["fail on test inputs of shape (3,)"]),
    "shape": (
        {"node_data": ragged([*GOOD, (torch.zeros(4), 1)])},
        ["node 2, example 4", "(4,)", "(3,)"],
    ),
    "no tensor": (
        {"node_data": ragged([*GOOD, ("text", 1)])},
        ["node 2, example 4: input", "str", "ToTensor"],
    ),
    "no pair": (
        {"node_data": ragged([*GOOD, torch.zeros(3)])},
        ["node 2, example 4", "pair (input, target)"],
    ),
    "lengths": (
        {"node_data": ragged([])[:2] + [(torch.zeros(5, 3), torch.zeros(4))]},
        ["node 2: 5 inputs but 4"],
    ),
    "other shape": (
        {"node_data": [*NODES[:2], (torch.zeros(5, 4), torch.zeros(5).long())]},
        ["node 2: inputs", "(4,)"],
    ),
    "label": (
        {"node_data": ragged([*GOOD, (torch.zeros(3), 2)])},
        ["node 2, example 4: label 2", "0 to 1"],
    ),
    "stream": (
        {"node_data": ragged(Stream())},  # type: ignore[arg-type]
        ["node 2", "Stream has no length", "map-style"],
    ),
    "no data": ({"node_data": [None, None]}, ["no node has an example"]),
    "number of nodes": ({"settings": {"graph.num_nodes": 4}}, ["3 entries", "graph.num_nodes = 4"]),
    "setting": ({"settings": {"privacy.epsilom": 1}}, ["did you mean 'epsilon'"]),
    "declared sizes": ({"num_examples": (200, 125, 274)}, ["num_examples[2] = 274", "275"]),
    "taken name": (
        {"metrics": {"epsilon": lambda outputs, targets: 0.01}},
        ["metrics['epsilon']", "name of your own"],
    ),
    "no mapping": ({"metrics": [lambda outputs, targets: 0.01]}, ["metrics: expected a mapping"]),
    "no model": ({"model": "mlp:128"}, ["model: expected an nn.Module", "str"]),
    "no noise": ({"settings": {"privacy.noise": "none"}}, ["without noise there is no eps"]),
    "metric": (
        {"metrics": {"odd": lambda outputs, targets: outputs}},
        ["metrics['odd']", "one number"],
    ),
    "augmentation": (
        {"settings": {"task.augmentation": "flip"}},
        ["expected images (C, H, W)", "(3,)"],
    ),
    "batch too large": (
        {"settings": {"privacy.expected_batch_size": 150}},
        ["node 1 has 125 examples"],
    ),
    "one place": ({"settings": {"algorithm.name": "dp-sgd"}}, ["trains in one place"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_released(tmp_path: Path, name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(DpcsgpError) as caught:
        fit(tmp_path / "run", **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    releases = [
        file
        for file in (tmp_path / "run").rglob("*.jsonl")
        if len(file.read_text().splitlines()) > 1
    ]
    assert not releases


def test_in_place_operations_are_warned_about(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="'linear' \\(Linear\\) are changed in place"):
        fit(tmp_path / "run", model=Careless(False))


def test_a_node_without_data_takes_part(tmp_path: Path) -> None:
    for name, nothing in {
        "none": None,
        "empty": (torch.zeros(0, 3), torch.zeros(0).long()),
    }.items():
        result = fit(
            tmp_path / name,
            node_data=[NODES[0], nothing, NODES[2]],
            settings={"graph.name": "directed_ring"},
        )
        assert result.summary["releases"] == [6, 0, 6]
        assert result.history[-1]["epsilon_nodes"][1] == 0
        assert result.history[-1]["accuracy_nodes"][1] > 0.8  # it has learned from the others


def test_a_node_whose_budget_ends_keeps_gossiping(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = {"graph.name": "directed_ring"}
    fit(out, epsilon=[2.0, 4.0, 8.0], settings=settings, should_stop=lambda step: step == 2)
    with Ledger.open(
        out / "ledger" / "node-0001.jsonl"
    ) as ledger:  # it crashed alone, after two more releases
        event = ledger.releases()[0][0]
        for step in (2, 3):
            ledger.record(step, 0, event)
    result = fit(out, epsilon=[2.0, 4.0, 8.0], settings=settings, resume=True)
    assert result.summary["stopped_because"] == "completed"
    # node 1 made its last two steps without a release
    assert result.summary["releases"] == [
        6,
        6,
        6,
    ]
    assert all(
        spent <= limit
        for spent, limit in zip(result.history[-1]["epsilon_nodes"], [2, 4, 8], strict=True)
    )
    whole = fit(tmp_path / "whole", epsilon=[2.0, 4.0, 8.0], settings=settings)
    assert result.summary["bytes_per_edge"] == whole.summary["bytes_per_edge"]


def sgd_step(data: list[tuple[Tensor, Tensor]], weights: list[float]) -> Tensor:
    """Return parameters after one step along the weighted mean of the nodes' mean gradients."""
    model = small_model()
    losses = [
        weight * cross_entropy(model(x), y) for (x, y), weight in zip(data, weights, strict=True)
    ]
    torch.stack(losses).sum().backward()
    moved = [value - value.grad for value in model.parameters()]  # type: ignore[operator]
    return torch.cat([value.detach().reshape(-1) for value in moved])


@pytest.mark.parametrize("weighting", ["equal", "examples"])
def test_nodes_count_equally_or_by_their_examples(tmp_path: Path, weighting: str) -> None:
    settings = {
        "algorithm.name": "sgp", "graph.name": "complete", "algorithm.steps": 1,
        "algorithm.momentum": 0, "algorithm.node_weights": weighting, "privacy.noise": "none",
        "privacy.clip_norm": 1e6, "privacy.expected_batch_size": list(SIZES),
        "compression.spec": "none",
    }  # fmt: skip
    result = fit(tmp_path / "run", settings=settings, epsilon=None)
    weights = [1 / 3] * 3 if weighting == "equal" else [size / sum(SIZES) for size in SIZES]
    torch.testing.assert_close(
        parameters(result.model), sgd_step(NODES, weights), rtol=1e-5, atol=1e-6
    )
    other = [1 / 3] * 3 if weighting == "examples" else [size / sum(SIZES) for size in SIZES]
    assert not torch.allclose(
        parameters(result.model), sgd_step(NODES, other), rtol=1e-5, atol=1e-6
    )


def test_a_resumed_run_ends_where_a_whole_one_does(tmp_path: Path) -> None:
    seeded = {"privacy.seed": 4}
    whole = fit(tmp_path / "whole", settings=seeded)
    fit(tmp_path / "cut", settings=seeded, should_stop=lambda step: step == 3)
    with pytest.raises(ConfigError, match=r"algorithm.learning_rate = 2.0.*started with 1.0"):
        fit(tmp_path / "cut", settings={**seeded, "algorithm.learning_rate": 2.0}, resume=True)
    with pytest.raises(ConfigError, match="already holds a run"):
        fit(tmp_path / "cut", settings=seeded)
    resumed = fit(tmp_path / "cut", settings=seeded, resume=True)
    assert torch.equal(parameters(whole.model), parameters(resumed.model))
    assert [row["step"] for row in resumed.history] == [0, 2, 4, 6]


def test_ctrl_c_saves_and_can_be_continued(tmp_path: Path) -> None:
    def interrupt(row: dict[str, Any]) -> None:
        if row["step"] == 2 and not row.get("final"):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="resume=True"):
        fit(tmp_path / "run", on_evaluation=interrupt)
    result = fit(tmp_path / "run", resume=True)
    assert result.summary["stopped_because"] == "completed" and result.summary["releases"] == [
        6,
        6,
        6,
    ]


def test_frozen_parameters_and_dropout(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    with pytest.warns(UserWarning, match="Dropout"):
        result = fit(tmp_path / "run", model=model)
    trained = result.model
    assert isinstance(trained, nn.Sequential)
    assert torch.equal(parameters(trained[0]), parameters(model[0]))
    assert not torch.equal(parameters(trained[2]), parameters(model[2]))
    # eval(): the same every time
    accuracy = float((trained(TEST[0]).argmax(1) == TEST[1]).double().mean())
    assert accuracy == pytest.approx(result.summary["accuracy_average_model"])


def test_a_folder_of_an_own_task_says_where_it_comes_from(tmp_path: Path) -> None:
    fit(tmp_path / "run")
    config = load_config(tmp_path / "run" / "config.toml")
    assert config.task.model.startswith("own:Sequential:")
    with pytest.raises(ConfigError, match=r"live in a Python script.*dpcsgp.train"):
        load_builtin_data(config)
    with pytest.raises(ModelError, match=r"Sequential.*with an instance"):
        dpcsgp.load_model(tmp_path / "run")
    with pytest.raises(
        ModelError,
        match=r"class Sequential.*other names or shapes.*given Linear \(8 trained parameters\)",
    ):
        dpcsgp.load_model(tmp_path / "run", nn.Linear(3, 2))
    with pytest.raises(
        ModelError, match="other names or shapes"
    ):  # as many numbers, in another order
        dpcsgp.load_model(
            tmp_path / "run",
            nn.Sequential(nn.Linear(3, 8, bias=False), nn.Linear(8, 1, bias=False)),
        )
    with pytest.raises(ModelError, match=r"instance of nn\.Module"):
        dpcsgp.load_model(
            tmp_path / "run",
            lambda: nn.Linear(3, 2),  # pyright: ignore[reportArgumentType]
        )
    with pytest.raises(DataError, match="not a results folder"):
        dpcsgp.load_model(tmp_path)


def test_a_model_that_a_config_names_is_rebuilt(tmp_path: Path) -> None:
    from dpcsgp.runs.design import design_run
    from dpcsgp.runtime.requests import PreparedRequest
    from dpcsgp.runtime.session import run_simulated

    config = load_config(
        None, ["task.name=digits", "task.model=mlp:16", "graph.num_nodes=3", "algorithm.steps=3"]
    )
    data = load_builtin_data(config)
    design = design_run(config, data.facts)
    outcome = run_simulated(PreparedRequest(design, data, tmp_path / "run"))
    module = dpcsgp.load_model(tmp_path / "run")
    accuracy = float((module(data.test[0]).argmax(1) == data.test[1]).double().mean())
    assert accuracy == pytest.approx(outcome.summary["accuracy_average_model"])


TWIN = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from torch.utils.data import Dataset
import dpcsgp
from test_api import NODES, TEST, FAST, Pairs, small_model
from dpcsgp.network.torch_distributed import ProcessEnvironment, nodes_of_ranks

class Foreign(Dataset):
    def __init__(self, size): self.size = size
    def __len__(self): return self.size
    def __getitem__(self, index): raise RuntimeError("another node's data were touched")

place, out = ProcessEnvironment.from_environment(), Path(sys.argv[1])
hosted = range(3) if place is None else nodes_of_ranks(3, 2)[place.rank]
settings = {{**FAST, "privacy.seed": 2}}
lengths = [NODES[node] if node in hosted else Foreign(len(NODES[node][1])) for node in range(3)]
first = dpcsgp.train(small_model(), lengths, test_data=TEST, settings=settings, out=out / "first")
nothing = [NODES[node] if node in hosted else None for node in range(3)]
second = dpcsgp.train(small_model, nothing, test_data=TEST, settings=settings, out=out / "second",
                      num_examples=[len(data[1]) for data in NODES])
hosted = range(2) if place is None else nodes_of_ranks(2, 2)[place.rank]
third = dpcsgp.train(small_model, [NODES[0], None], test_data=TEST, settings=settings,
                     out=out / "third")
assert third.summary["releases"] == [6, 0] and third.nodes == tuple(hosted)
assert len(first.history) == 4
assert float((first.model(TEST[0]).argmax(1) == TEST[1]).double().mean()) > 0.5
"""


@pytest.mark.slow
def test_the_same_script_under_torchrun_gives_the_same_models(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(TWIN.format(tests=str(Path(__file__).parent))))
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    commands: dict[str, list[str]] = {"alone": [sys.executable], "together": torchrun}
    for name, words in commands.items():
        done = subprocess.run(
            [*words, str(script), str(tmp_path / name)],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    for start in ("first", "second", "third"):
        alone, together = (
            dpcsgp.load_model(tmp_path / name / start, small_model()) for name in commands
        )
        assert torch.equal(parameters(alone), parameters(together))


class Looking(nn.Module):
    """Would keep what it sees, if it were let."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.words = nn.Embedding(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(self.words(inputs).mean(1))


def test_a_word_past_the_vocabulary_is_refused_before_anything_is_released(tmp_path: Path) -> None:
    words = [torch.randint(4, (50, 6)), torch.randint(4, (50, 6))]
    words[1][17, 2] = 4
    nodes = [(part, torch.randint(2, (50,))) for part in words]
    with pytest.raises(DataError, match="node 1, example 17"):
        dpcsgp.train(Looking(), nodes, epsilon=4.0, delta=1e-3, out=tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.jsonl"))


def test_a_callback_can_neither_change_what_is_recorded_nor_lose_what_was_paid(
    tmp_path: Path,
) -> None:
    def meddle(row: dict[str, Any]) -> None:
        row["epsilon_nodes"][:] = [0.0] * 3
        if row["step"] == 4:
            raise ValueError("a mistake of the caller's")

    settings = {"algorithm.steps": 8, "run.evaluate_every": 2, "run.checkpoint_every": 0}
    with pytest.raises(ValueError, match="mistake of the caller"):
        fit(tmp_path / "run", settings=settings, on_evaluation=meddle)
    result = fit(tmp_path / "run", settings=settings, resume=True)
    assert result.summary["stopped_because"] == "completed"
    assert result.summary["releases"] == [8] * 3  # no step was made twice
    assert all(min(row["epsilon_nodes"]) > 0 for row in result.history if row["step"] > 0)


def test_the_same_data_in_two_places_is_warned_about(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="nodes 0 and 2 are given the same data"):
        fit(tmp_path / "run", node_data=[NODES[0], NODES[1], NODES[0]])
    with pytest.warns(UserWarning, match="test_data are those of node 1"):
        fit(tmp_path / "other", test_data=NODES[1])


def test_a_delta_that_promises_nothing_is_warned_about(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"privacy\.delta = 0\.01 for the 200 examples of node 0"):
        fit(tmp_path / "run", delta=0.01)


def test_two_runs_in_one_second_get_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = {fit(None, settings={"algorithm.steps": 1}).folder for _ in range(3)}
    assert len(folders) == 3


def test_a_node_may_hold_fewer_examples_than_it_declares(tmp_path: Path) -> None:
    """What is public (rate, divisor, ledger) follows the declared number; the missing ones are
    blanks."""
    inputs, targets = torch.randn(60, 4), torch.randint(0, 2, (60,))
    settings = {
        "algorithm.steps": 3, "privacy.expected_batch_size": 20, "privacy.noise": "none",
        "privacy.seed": 1, "graph.name": "complete",
    }  # fmt: skip
    data = [(inputs[:30], targets[:30]), (inputs[30:60], targets[30:60]), None]
    result = dpcsgp.train(
        nn.Linear(4, 2),
        data,
        test_data=(inputs, targets),
        num_examples=(40, 30, 25),
        settings=settings,
        out=tmp_path / "run",
    )
    assert result.summary["stopped_because"] == "completed"
    rates = {
        ledger.header.node: {event.sampling_rate for event, _ in ledger.releases()}
        for ledger in read_ledgers(tmp_path / "run")
    }
    assert rates == {0: {20 / 40}, 1: {20 / 30}, 2: {20 / 25}}


def test_a_model_that_fails_the_row_check_leaves_its_ledgers_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise ModelError("rows depend on each other")

    with monkeypatch.context() as patch:
        patch.setattr("dpcsgp.privacy.private_gradients.engine_with_equal_rows", refuse)
        # The caught error holds every frame, as a notebook does.
        with pytest.raises(ModelError, match="rows depend") as caught:
            fit(tmp_path / "run")
    assert fit(tmp_path / "run", resume=True).summary["stopped_because"] == "completed"
    assert caught.value.__traceback__ is not None
