"""Directions made of private gradients: those of torch's optimizers, the same after a resume, the
same in one process and in several."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dpcsgp
from dpcsgp.algorithms.optimizers import Adam, Momentum, Optimizer, memory_of_ready
from dpcsgp.algorithms.rates import rate_schedule
from dpcsgp.cli.main import cli
from dpcsgp.config import Config, load_config
from dpcsgp.errors import ConfigError

RATE, STEPS, DECAY = 0.05, 12, 0.3


def walk(optimizer: Optimizer, start_ND: Tensor, grads: list[Tensor]) -> Tensor:
    """Descend as `training` does where nothing is exchanged and y = 1."""
    x_ND, memory = start_ND.clone(), optimizer.init(start_ND)
    for grad_ND in grads:
        direction_ND, memory = optimizer.direction(grad_ND.clone(), memory)
        x_ND = x_ND - RATE * (direction_ND + optimizer.weight_decay * x_ND)
    return x_ND


@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_adam_is_adamw_and_momentum_is_sgd(decay: float) -> None:
    torch.manual_seed(0)
    start, grads = torch.randn(2, 7), [torch.randn(2, 7) for _ in range(STEPS)]
    ours = walk(Adam(weight_decay=decay), start, grads)
    theirs = nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=RATE, weight_decay=decay)
    for grad in grads:
        theirs.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
    if not decay:
        theirs = nn.Parameter(start.clone())
        plain = torch.optim.SGD([theirs], lr=RATE, momentum=0.6)
        for grad in grads:
            theirs.grad = grad.clone()
            plain.step()
        torch.testing.assert_close(walk(Momentum(0.6), start, grads), theirs.detach())


def test_moments_count_the_gradients_that_a_node_has_seen() -> None:
    """Node 0 sees every gradient, node 1 the last four only: each moves as torch's Adam would."""
    torch.manual_seed(0)
    adam, grads, late = Adam(), [torch.randn(2, 7) for _ in range(STEPS)], STEPS - 4
    x_ND, memory = torch.zeros(2, 7), adam.init(torch.zeros(2, 7))
    for step, grad_ND in enumerate(grads):
        ready = (True, step >= late)
        direction_ND, after = adam.direction(grad_ND.clone(), memory)
        memory = memory_of_ready(memory, after, ready)
        x_ND = x_ND - RATE * direction_ND * torch.tensor(ready)[:, None]
    assert memory["count_N1"].flatten().tolist() == [STEPS, 4]
    for node, seen in enumerate((grads, grads[late:])):
        theirs = nn.Parameter(torch.zeros(7))
        optimizer = torch.optim.Adam([theirs], lr=RATE)
        for grad_ND in seen:
            theirs.grad = grad_ND[node].clone()
            optimizer.step()
        torch.testing.assert_close(x_ND[node], theirs.detach(), rtol=1e-5, atol=1e-6)


def test_decay_does_not_enter_the_velocity() -> None:
    start = torch.ones(1, 3)
    moved = walk(Momentum(0.9, DECAY), start, [torch.zeros(1, 3)] * STEPS)
    torch.testing.assert_close(moved, start * (1 - RATE * DECAY) ** STEPS)


def test_nodes_count_by_their_weights_and_one_without_data_stays() -> None:
    torch.manual_seed(0)
    grads = [
        torch.randn(1, 5).expand(3, 5) * torch.tensor([[1.0], [50.0], [0.0]]) for _ in range(4)
    ]
    moved = walk(Adam(node_weights=(0.5, 1.5, 1.0)), torch.zeros(3, 5), grads)
    torch.testing.assert_close(moved[1], 3 * moved[0])  # Adam alone would make both equal
    assert torch.equal(moved[2], torch.zeros(5))


def test_rates_follow_their_forms() -> None:
    linear, cosine = (rate_schedule(form, 2.0, 0.5, 5) for form in ("linear", "cosine"))
    assert callable(linear) and callable(cosine)
    assert [linear(step) for step in (0, 2, 4, 9)] == [2.0, 1.5, 1.0, 1.0]
    assert [round(cosine(step), 6) for step in (0, 2, 4)] == [2.0, 1.5, 1.0]
    assert cosine(1) > linear(1) and cosine(3) < linear(3)
    constant = rate_schedule("constant", 2.0, 0.5, 5, warmup_steps=4)
    assert callable(constant)
    assert [constant(step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_adam_has_defaults_of_its_own() -> None:
    found = load_config(None, ["algorithm.optimizer=adam"]).algorithm
    assert (found.learning_rate, found.momentum) == (0.03, 0.0)
    kept = load_config(None, ["algorithm.optimizer=adam", "algorithm.learning_rate=0.2"])
    assert kept.algorithm.learning_rate == 0.2


def test_keys_that_came_later_count_in_the_digest_only_where_they_are_set() -> None:
    before = Config().fingerprint()
    assert load_config(None, ["run.trackers=['tensorboard']"]).fingerprint() == before
    for setting in ("algorithm.optimizer=adam", "algorithm.weight_decay=0.01"):
        assert load_config(None, [setting]).fingerprint() != before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["algorithm.optimizer=adamw"], ["algorithm.optimizer = 'adamw'", "'adam'"]),
        (["algorithm.optimizer=adam", "algorithm.momentum=0.5"], ["momentum = 0.5", "adam_betas"]),
        (
            ["algorithm.optimizer=adam", "privacy.max_colluders=3"],
            ["max_colluders = 3", "not cancel", '"sgd"'],
        ),
        (["algorithm.adam_betas=[0.9]"], ["algorithm.adam_betas", "2 items"]),
        (["algorithm.adam_betas=[0.9,1]"], ["algorithm.adam_betas", "less than 1"]),
        (["algorithm.weight_decay=0.5"], ["weight_decay = 0.5", "0.17"]),
        (["algorithm.warmup_steps=30"], ["warmup_steps = 30", "30 steps"]),
        (["algorithm.learning_rate_schedule=step"], ["learning_rate_schedule", "'cosine'"]),
    ],
)
def test_what_cannot_be_is_named(settings: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def digits(out: Path, *changes: str) -> list[str]:
    settings = {
        "task.name": "digits",
        "task.model": "logistic",
        "graph.num_nodes": 3,
        "algorithm.steps": 5,
        "algorithm.optimizer": "adam",
        "algorithm.weight_decay": 0.1,
        "algorithm.learning_rate_schedule": "cosine",
        "algorithm.warmup_steps": 2,
        "privacy.epsilon": 8,
        "privacy.seed": 1,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return [*words, *changes, "--out", str(out)]


def models(folder: Path) -> Tensor:
    return load_file(folder / "model.safetensors")["node_models"]


@pytest.mark.slow
def test_one_process_and_several_make_the_same_steps(tmp_path: Path) -> None:
    for command in ("run", "launch"):
        with pytest.raises(SystemExit) as ended:
            cli([command, *digits(tmp_path / command)])
        assert ended.value.code == 0
    assert torch.equal(models(tmp_path / "run"), models(tmp_path / "launch"))


def fit(out: Path, **changes: Any) -> dpcsgp.Result:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(90, 4, generator=random)
    data = inputs, (inputs[:, 0] > 0).long()
    torch.manual_seed(0)
    settings = {
        "algorithm.optimizer": "adam",
        "algorithm.learning_rate": 0.3,
        "algorithm.weight_decay": 0.05,
        "algorithm.learning_rate_schedule": "cosine",
        "algorithm.warmup_steps": 2,
        "algorithm.steps": 8,
        "privacy.seed": 5,
    }
    nodes = [tuple(part[start : start + 30] for part in data) for start in (0, 30, 60)]
    return dpcsgp.train(
        nn.Linear(4, 2), nodes, test_data=data, epsilon=8.0, delta=1e-3,
        settings=settings | changes.pop("settings", {}), out=out, **changes,
    )  # fmt: skip


def test_a_run_with_adam_goes_on_where_it_was_stopped_to_the_last_bit(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    assert whole.summary["accuracy_node_mean"] > 0.6 and whole.summary["optimizer"] == "adam"
    fit(tmp_path / "cut", should_stop=lambda step: step == 5)
    fit(tmp_path / "cut", resume=True)
    assert torch.equal(models(tmp_path / "whole"), models(tmp_path / "cut"))
    # The theorem speaks of gradient steps: nothing is claimed.
    assert whole.summary["theorem_satisfied"] is None and math.isfinite(whole.epsilon)


def test_adam_moves_and_spends_as_sgd_does(tmp_path: Path) -> None:
    """Post-processing: the same releases, the same eps, other models."""
    sgd = fit(
        tmp_path / "sgd",
        settings={"algorithm.optimizer": "sgd", "algorithm.momentum": 0, "algorithm.steps": 8},
    )
    adam = fit(tmp_path / "adam")
    assert adam.epsilon == sgd.epsilon and adam.summary["releases"] == sgd.summary["releases"]
    assert not torch.equal(models(tmp_path / "sgd"), models(tmp_path / "adam"))
