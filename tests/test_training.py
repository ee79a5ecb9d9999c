"""The loop, end to end on scikit-learn's digits: laws of privacy, of bytes, and of going on after a
stop."""

from __future__ import annotations

import json
import shutil
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dpcsgp import training
from dpcsgp.config import Config, load_config
from dpcsgp.errors import CheckpointError, ConfigError, PrivateStepError
from dpcsgp.network import Simulator
from dpcsgp.privacy import Ledger, LedgerBook, clipping_engine
from dpcsgp.privacy.kept_releases import KeptReleases
from dpcsgp.randomness import PairStreams, PrivateRandomness
from dpcsgp.runs.build import build_run
from dpcsgp.runs.data import BuiltinData, load_builtin_data
from dpcsgp.runs.design import RunDesign, design_run
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.summary import write_results

SMALL = [
    "task.name=digits",
    "task.model=mlp:16",
    "graph.name=random_digraph",
    "graph.num_nodes=4",
    "algorithm.steps=12",
    "algorithm.learning_rate=1.0",
    "privacy.expected_batch_size=64",
    "privacy.epsilon=4",
    "run.evaluate_every=4",
    "run.checkpoint_every=3",
]


class Wiretap(Simulator):
    """A network that keeps a copy of every frame that left."""

    def __init__(self, design: RunDesign) -> None:
        super().__init__(design.topology)
        self.frames: list[Tensor] = []

    def exchange(self, frames_NB: Tensor) -> Tensor:
        self.frames.append(frames_NB.clone())
        return super().exchange(frames_NB)


def prepare(out: Path, *settings: str) -> tuple[training.Run, RunDesign, ResultsFolder]:
    config = load_config(None, [*SMALL, *settings])
    data, design = build(config)
    folder = ResultsFolder.create(out, config)
    run = build_run(design, data, Wiretap(design), folder)
    return run, design, folder


def build(config: Config) -> tuple[BuiltinData, RunDesign]:
    data = load_builtin_data(config)
    return data, design_run(config, data.facts)


def resume(out: Path) -> tuple[training.Run, training.Progress]:
    folder, config = ResultsFolder.reopen(out)
    data, design = build(config)
    run = build_run(design, data, Wiretap(design), folder)
    assert run.checkpoints is not None
    checkpoint = run.checkpoints.load_common([run.checkpoints.complete_steps()])
    return run, training.train(run, resume_from=checkpoint)


def frames(run: training.Run) -> list[Tensor]:
    assert isinstance(run.network, Wiretap)
    return run.network.frames


def test_a_run_learns_and_its_three_numbers_agree(tmp_path: Path) -> None:
    run, design, folder = prepare(tmp_path / "run")
    summary = write_results(folder, design, run, training.train(run))
    assert summary["accuracy_node_mean"] > 0.5
    assert summary["private"] and summary["epsilon"] <= 4
    assert summary["epsilon"] == pytest.approx(4, rel=0.02)
    sent = sum(frame.shape[1] for frame in frames(run))
    assert summary["bytes_per_edge"] == sent == design.bytes_per_edge()
    assert summary["releases"] == [12] * 4
    degrees = [len(design.topology.receivers_from(node)) - 1 for node in range(4)]
    assert summary["bytes_sent_per_node"] == sent * max(degrees)
    assert json.loads((folder.path / "summary.json").read_text())["stopped_because"] == "completed"


def test_the_ledger_holds_as_many_releases_as_steps(tmp_path: Path) -> None:
    run, _, _ = prepare(tmp_path / "run")
    training.train(run)
    assert all(
        sum(count for _, count in run.gradients.ledger.releases(node)) == 12 for node in range(4)
    )


def test_the_ledger_is_on_disk_before_the_message_leaves(tmp_path: Path) -> None:
    run, _, _ = prepare(tmp_path / "run")
    seen: list[int] = []
    real = run.network.exchange

    def exchange(frames_NB: Tensor) -> Tensor:
        lines = (tmp_path / "run" / "ledger" / "node-0000.jsonl").read_text().splitlines()
        seen.append(len(lines) - 1)
        return real(frames_NB)

    run.network.exchange = exchange  # type: ignore[method-assign]
    training.train(run)
    assert seen[:12] == list(range(1, 13))


def test_a_seeded_run_repeats_and_says_that_it_is_not_private(tmp_path: Path) -> None:
    finals = []
    for name in ("a", "b"):
        run, design, folder = prepare(tmp_path / name, "privacy.seed=5")
        progress = training.train(run)
        assert write_results(folder, design, run, progress)["private"] is False
        finals.append(progress.state.x_ND)
    assert torch.equal(finals[0], finals[1])


def test_private_runs_differ(tmp_path: Path) -> None:
    finals = [training.train(prepare(tmp_path / name)[0]).state.x_ND for name in "ab"]
    assert not torch.equal(finals[0], finals[1])


@pytest.mark.parametrize("stop_at", [1, 5, 11])
def test_a_seeded_run_resumed_anywhere_ends_bit_identical(tmp_path: Path, stop_at: int) -> None:
    whole = training.train(
        prepare(tmp_path / "whole", "privacy.seed=5", "compression.spec=gsgd:4/64")[0]
    )
    run, _, _ = prepare(tmp_path / "cut", "privacy.seed=5", "compression.spec=gsgd:4/64")
    cut = training.train(run, should_stop=lambda step: step == stop_at)
    assert cut.stopped_because == f"interrupted at step {stop_at} of 12"
    run.gradients.ledger.close()
    run, resumed = resume(tmp_path / "cut")
    assert resumed.stopped_because == "completed"
    assert all(
        torch.equal(getattr(whole.state, name), value)
        for name, value in resumed.state._asdict().items()
        if isinstance(value, Tensor)
    )
    assert run.network.traffic.bytes_per_edge == run.algorithm.wire_bytes(run.anchor_D.numel(), 15)


def test_an_error_while_polishing_leaves_the_last_step_to_resume_from(tmp_path: Path) -> None:
    settings = ("privacy.seed=5", "algorithm.average_last=4", "algorithm.polish_rounds=3")
    complete = training.train(prepare(tmp_path / "complete", *settings)[0])
    run, _, _ = prepare(tmp_path / "cut", *settings)

    def fail(progress: training.Progress) -> None:
        if progress.rounds_polished == 2:
            raise ValueError("a mistake in a callback")

    with pytest.raises(ValueError, match="a mistake"):
        training.train(run, watch=fail)
    run.gradients.ledger.close()
    _, resumed = resume(tmp_path / "cut")
    assert torch.equal(resumed.state.x_ND, complete.state.x_ND)
    assert resumed.rounds_polished == 3


class PowerCut(BaseException):
    """Ends everything at once: unlike a mistake in a callback, nothing can be saved any more."""


def crash_at_step_5(progress: training.Progress) -> None:
    if progress.state.step == 5:
        raise PowerCut


@pytest.mark.parametrize("shared", [(), ("privacy.max_colluders=1",)])
def test_after_a_crash_the_same_messages_leave_again_and_nothing_is_paid_twice(
    tmp_path: Path, shared: tuple[str, ...]
) -> None:
    run, _, _ = prepare(tmp_path / "run", *shared)
    with pytest.raises(PowerCut):
        training.train(run, watch=crash_at_step_5)
    before = frames(run)
    run.gradients.ledger.close()
    run, resumed = resume(tmp_path / "run")
    assert resumed.stopped_because == "completed"
    # Steps 3 and 4 are not in the checkpoint: they were sent, and are sent again bit for bit.
    assert torch.equal(before[3], frames(run)[0]) and torch.equal(before[4], frames(run)[1])
    assert [sum(n for _, n in run.gradients.ledger.releases(node)) for node in range(4)] == [12] * 4
    assert 3.9 < max(run.gradients.epsilon_spent()) <= 4


@pytest.mark.parametrize("shared", [(), ("privacy.max_colluders=1",)])
@pytest.mark.parametrize(
    "moment",
    ["before it is kept", "before the ledger", "between two lines", "before the message"],
)
def test_a_crash_at_the_worst_moment_of_a_step_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, shared: tuple[str, ...]
) -> None:
    run, _, _ = prepare(tmp_path / "run", *shared)
    places: dict[str, tuple[Any, str]] = {
        "before it is kept": (KeptReleases, "keep"),
        "before the ledger": (LedgerBook, "record"),
        "between two lines": (Ledger, "write"),
        "before the message": (Wiretap, "exchange"),
    }
    owner, name = places[moment]
    honest, calls = getattr(owner, name), []

    def cut(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == (4 * 4 + 3 if moment == "between two lines" else 5):
            raise PowerCut  # in the fifth step; two of four nodes have their line
        return honest(*arguments)

    monkeypatch.setattr(owner, name, cut)
    with pytest.raises(PowerCut):
        training.train(run)
    monkeypatch.undo()
    before = frames(run)
    run.gradients.ledger.close()
    run, resumed = resume(tmp_path / "run")
    assert resumed.stopped_because == "completed"
    sent_before, sent_after = before[3:], frames(run)
    assert all(map(torch.equal, sent_before, sent_after))
    assert [sum(n for _, n in run.gradients.ledger.releases(node)) for node in range(4)] == [12] * 4
    assert run.gradients.kept is not None and run.gradients.kept.find(0) is None


def test_a_release_that_is_not_kept_is_made_anew_and_counts_again(tmp_path: Path) -> None:
    run, _, _ = prepare(tmp_path / "run", "privacy.replay_reserve=4")
    with pytest.raises(PowerCut):
        training.train(run, watch=crash_at_step_5)
    before = frames(run)
    run.gradients.ledger.close()
    shutil.rmtree(tmp_path / "run" / "ledger" / "kept")
    run, resumed = resume(tmp_path / "run")
    assert resumed.stopped_because == "completed"
    # steps 3 and 4 were released twice
    assert sum(count for _, count in run.gradients.ledger.releases(0)) == 14
    assert max(run.gradients.epsilon_spent()) <= 4
    assert not torch.equal(before[3], frames(run)[0])


def test_without_a_reserve_the_run_stops_early_instead_of_overspending(tmp_path: Path) -> None:
    run, _, _ = prepare(tmp_path / "run")
    with pytest.raises(PowerCut):
        training.train(run, watch=crash_at_step_5)
    run.gradients.ledger.close()
    shutil.rmtree(tmp_path / "run" / "ledger" / "kept")
    run, resumed = resume(tmp_path / "run")
    assert resumed.stopped_because == "privacy budget spent at step 10 of 12"
    assert max(run.gradients.epsilon_spent()) <= 4


def steps_in_ledger(out: Path, node: int = 0) -> list[int]:
    lines = (out / "ledger" / f"node-{node:04d}.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines[1:]]


def test_a_kept_release_is_paid_although_an_earlier_step_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut between keep and ledger at step 5; then step 3 is lost and released a second time."""
    run, _, _ = prepare(tmp_path / "run", "privacy.replay_reserve=4")
    honest, calls = LedgerBook.record, []

    def cut(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 6:
            raise PowerCut
        honest(*arguments)

    monkeypatch.setattr(LedgerBook, "record", cut)
    with pytest.raises(PowerCut):
        training.train(run)
    monkeypatch.undo()
    run.gradients.ledger.close()
    (tmp_path / "run" / "ledger" / "kept" / "step-000003.part-0-of-1.safetensors").unlink()
    resume(tmp_path / "run")
    assert sorted(steps_in_ledger(tmp_path / "run")) == sorted([*range(12), 3])


def test_a_crash_between_lines_at_the_end_of_unequal_budgets_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("privacy.max_colluders=1", "privacy.epsilon=[4,4,4,9]")
    run, _, _ = prepare(tmp_path / "run", *settings)
    honest, calls = Ledger.write, []

    def cut(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 4 * 11 + 2:  # node 0 has its last line, the others do not
            raise PowerCut
        honest(*arguments)

    monkeypatch.setattr(Ledger, "write", cut)
    with pytest.raises(PowerCut):
        training.train(run)
    monkeypatch.undo()
    run.gradients.ledger.close()
    run, resumed = resume(tmp_path / "run")
    assert resumed.stopped_because == "completed"
    assert [steps_in_ledger(tmp_path / "run", node) for node in range(4)] == [[*range(12)]] * 4


def test_nodes_too_unequal_for_shared_noise_are_refused_before_anything_is_spent(
    tmp_path: Path,
) -> None:
    unequal = ("privacy.epsilon=[30,0.05,0.05,0.05]", "privacy.expected_batch_size=[370,1,1,1]")
    with pytest.raises(ConfigError, match="too unequal for shared noise"):
        prepare(tmp_path / "run", "privacy.max_colluders=1", *unequal)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["cut", "other run", "other step", "no numbers"])
def test_a_damaged_kept_release_is_refused_with_the_way_out(tmp_path: Path, damage: str) -> None:
    run, _, _ = prepare(tmp_path / "run")
    with pytest.raises(PowerCut):
        training.train(run, watch=crash_at_step_5)
    run.gradients.ledger.close()
    kept = tmp_path / "run" / "ledger" / "kept" / "step-000004.part-0-of-1.safetensors"
    if damage == "cut":
        kept.write_bytes(kept.read_bytes()[:100])
    elif damage == "other run":
        assert run.gradients.kept is not None
        name = run.gradients.kept.run_id.encode()
        kept.write_bytes(kept.read_bytes().replace(name, b"0" * len(name)))
    elif damage == "no numbers":
        kept.write_bytes(kept.read_bytes()[:-4] + b"\x00\x00\xc0\x7f")
    else:
        kept.write_bytes(kept.with_name("step-000003.part-0-of-1.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="delete the file to allow that"):
        resume(tmp_path / "run")


def test_a_run_that_has_ended_keeps_no_releases(tmp_path: Path) -> None:
    run, _, _ = prepare(tmp_path / "run")
    training.train(run)
    run.gradients.forget_all()
    assert not (tmp_path / "run" / "ledger" / "kept").exists()


def test_no_pair_stream_meets_two_sums_over_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look at every stream that is drawn, before the crash and after it."""
    drawn: Counter[bytes] = Counter()
    honest = PairStreams.bytes

    def watched(self: PairStreams, *arguments: Any) -> Any:
        out = honest(self, *arguments)
        drawn[out[:32].tobytes()] += 1
        return out

    monkeypatch.setattr(PairStreams, "bytes", watched)
    run, _, _ = prepare(tmp_path / "run", "privacy.max_colluders=1", "privacy.replay_reserve=4")
    with pytest.raises(PowerCut):
        training.train(run, watch=crash_at_step_5)
    run.gradients.ledger.close()
    shutil.rmtree(tmp_path / "run" / "ledger" / "kept")  # the worst case: steps are made anew
    resume(tmp_path / "run")
    # six pairs, two streams each, 5 steps and then 9
    assert len(drawn) == 6 * 2 * (5 + 9) and set(drawn.values()) == {1}


def test_noise_comes_before_encoding(tmp_path: Path) -> None:
    """The first message of a node is its noised gradient: encoded before the noise, it would be far
    smaller."""
    settings = ["privacy.epsilon=0.2", "compression.spec=none", "algorithm.momentum=0"]
    run, _, _ = prepare(tmp_path / "run", *settings)
    training.train(run, should_stop=lambda step: step == 1)
    dim = run.anchor_D.numel()
    payload = frames(run)[0][:, -4 * dim - 16 : -16].contiguous().view(torch.float32)
    noise_norm = run.gradients.mechanism.noise_multipliers[0] * dim**0.5 / 64
    assert float(payload.norm(dim=1).mean()) == pytest.approx(noise_norm, rel=0.1)
    assert noise_norm > 3  # a mean of gradients clipped to norm 1 could never be as long


def test_huge_clip_and_no_noise_is_sgd(tmp_path: Path) -> None:
    settings = [
        "privacy.noise=none",
        "privacy.clip_norm=1e6",
        "algorithm.momentum=0",
        "algorithm.steps=1",
    ]
    settings += [
        "privacy.expected_batch_size=375",
        "algorithm.name=local",
        "algorithm.polish_rounds=0",
    ]
    run, design, _ = prepare(tmp_path / "run", *settings)
    state = training.train(run).state
    module, task = design.module, run.task
    inputs, targets = task.examples(torch.arange(375).expand(4, -1))
    loss = task.loss(module(inputs[2]), targets[2]).mean()
    gradient = torch.cat(
        [g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))]
    )
    assert torch.allclose(state.x_ND[2], -1.0 * gradient, atol=1e-5)


def test_a_node_whose_budget_ends_keeps_gossiping_without_releases(tmp_path: Path) -> None:
    run, _, _ = prepare(tmp_path / "run", "algorithm.steps=6")
    run.gradients.budget.remaining[1] = 2
    progress = training.train(run)
    assert progress.stopped_because == "completed"
    assert [
        sum(count for _, count in run.gradients.ledger.releases(node)) for node in range(4)
    ] == [
        6,
        2,
        6,
        6,
    ]


def test_per_node_budgets_and_batch_sizes(tmp_path: Path) -> None:
    run, _, _ = prepare(
        tmp_path / "run", "privacy.epsilon=[1,2,4,8]", "privacy.expected_batch_size=[16,32,64,64]"
    )
    training.train(run)
    assert all(
        spent <= limit
        for spent, limit in zip(run.gradients.epsilon_spent(), [1, 2, 4, 8], strict=True)
    )
    assert all(
        spent > 0.9 * limit
        for spent, limit in zip(run.gradients.epsilon_spent(), [1, 2, 4, 8], strict=True)
    )


def test_nodes_of_unlike_size_get_the_same_gradients_as_in_one_pass(tmp_path: Path) -> None:
    settings = (
        "task.partition=dirichlet:0.3",
        "privacy.expected_batch_size=auto",
        "privacy.noise=none",
        "privacy.seed=5",
    )
    run, _, _ = prepare(tmp_path / "groups", *settings)
    groups = run.gradients.mechanism.rows_of_same_shape()
    assert len(groups) > 1
    assert sorted(row for group in groups.values() for row in group) == [0, 1, 2, 3]
    model_ND = run.anchor_D.expand(4, -1).contiguous()
    grouped_ND = run.gradients(model_ND, 0)
    indices_NE, present_NE = run.gradients.mechanism.draw(0, run.gradients.random, [True] * 4)
    sums_ND = run.gradients.engine.clipped_sum(
        model_ND, *run.task.examples(indices_NE), present_NE, run.gradients.mechanism.clip_norm
    )
    divisors = torch.tensor(run.gradients.mechanism.expected_batch_sizes)[:, None]
    assert torch.allclose(grouped_ND.double(), sums_ND.double() / divisors, atol=1e-6)


def test_nothing_unaccounted_is_recorded(tmp_path: Path) -> None:
    run, design, folder = prepare(tmp_path / "run")
    write_results(folder, design, run, training.train(run))
    keys = {key for row in run.recorder.rows for key in row} | set(
        json.loads((folder.path / "summary.json").read_text())
    )
    forbidden = ("loss", "norm", "clipped", "batch", "index", "indices", "gradient")
    assert not [key for key in keys if any(word in key for word in forbidden)]


@pytest.mark.parametrize(
    "name", ["dp-block", "local-then-average", "dp2sgd", "dp-sgp", "dp-sgd", "local"]
)
def test_all_private_methods_go_through_the_same_loop(tmp_path: Path, name: str) -> None:
    settings = [f"algorithm.name={name}", "compression.spec=none"]
    run, design, folder = prepare(tmp_path / name, *settings)
    summary = write_results(folder, design, run, training.train(run))
    assert summary["accuracy_node_mean"] > 0.3
    assert summary["epsilon"] <= 4
    assert (summary["bytes_per_edge"] == 0) == (name in ("local", "dp-sgd")) or summary[
        "num_nodes"
    ] == 1
    assert summary["bytes_per_edge"] == design.bytes_per_edge()


def test_local_then_average_sends_nothing_before_the_polish_rounds(tmp_path: Path) -> None:
    seeds = ("privacy.seed=5", "compression.spec=none")
    alone, _, _ = prepare(
        tmp_path / "alone", *seeds, "algorithm.name=local", "algorithm.polish_rounds=0"
    )
    then, _, _ = prepare(
        tmp_path / "then", *seeds, "algorithm.name=local-then-average", "algorithm.polish_rounds=40"
    )
    model_ND = alone.algorithm.model(training.train(alone).state)
    progress = training.train(then)
    assert len(frames(then)) == 40  # the polish rounds, nothing before
    averaged_ND = then.algorithm.model(progress.state)
    assert torch.allclose(averaged_ND, model_ND.mean(0).expand_as(averaged_ND), atol=1e-4)


def test_local_then_average_needs_polish_rounds() -> None:
    with pytest.raises(ConfigError, match="polish_rounds = 0"):
        load_config(None, ["algorithm.name=local-then-average", "algorithm.polish_rounds=0"])


def test_the_last_iterates_are_averaged_before_the_polish_rounds(tmp_path: Path) -> None:
    settings = ("privacy.seed=5", "algorithm.name=local", "algorithm.polish_rounds=0")
    run, _, _ = prepare(tmp_path / "plain", *settings)
    models: list[Tensor] = []
    training.train(
        run, watch=lambda progress: models.append(run.algorithm.model(progress.state).clone())
    )
    averaging, _, _ = prepare(tmp_path / "averaged", *settings, "algorithm.average_last=4")
    progress = training.train(averaging)
    expected_ND = torch.stack(models[-4:]).mean(0)
    assert torch.allclose(averaging.algorithm.model(progress.state), expected_ND, atol=1e-6)
    assert progress.state.step == 12


def test_averaging_survives_an_interruption(tmp_path: Path) -> None:
    settings = ("privacy.seed=5", "algorithm.average_last=6")
    whole = training.train(prepare(tmp_path / "whole", *settings)[0])
    run, _, _ = prepare(tmp_path / "cut", *settings)
    training.train(run, should_stop=lambda step: step == 8)
    run.gradients.ledger.close()
    run, resumed = resume(tmp_path / "cut")
    assert torch.equal(run.algorithm.model(whole.state), run.algorithm.model(resumed.state))


def test_a_diverging_run_ends_with_what_it_has(tmp_path: Path) -> None:
    config = load_config(
        None,
        [*SMALL, "compression.spec=rand:0.1", "algorithm.mixing_rate=1", "algorithm.steps=1500",
         "algorithm.learning_rate=30", "privacy.noise=none", "graph.name=directed_exponential",
         "run.evaluate_every=0", "run.checkpoint_every=0"],
    )  # fmt: skip
    data = load_builtin_data(config)
    design = design_run(config, data.facts, allow_divergence=True)
    folder = ResultsFolder.create(tmp_path / "run", config)
    run = build_run(design, data, Simulator(design.topology), folder)
    summary = write_results(folder, design, run, training.train(run))
    assert summary["stopped_because"].startswith("diverged")
    assert "node" in summary["stopped_because"] and "step" in summary["stopped_because"]


def test_the_callbacks_see_public_facts_only(tmp_path: Path) -> None:
    run, _, _ = prepare(tmp_path / "run", "algorithm.steps=2")
    seen: list[Any] = []

    def watch(progress: training.Progress) -> None:
        seen.append(progress.state.step)

    training.train(run, watch=watch)
    assert seen == [1, 2, 2, 2, 2]


def test_an_error_on_private_data_does_not_quote_them(tmp_path: Path) -> None:
    run, _, _ = prepare(tmp_path / "run")

    class Failing:
        def clipped_sum(self, *arguments: object) -> Tensor:
            raise IndexError("Target 777 is out of bounds.")

    with pytest.raises(PrivateStepError) as caught:
        training.train(replace(run, gradients=replace(run.gradients, engine=Failing())))
    assert "777" not in str(caught.value) and "IndexError" in str(caught.value)
    assert "777" in str(caught.value.__cause__)


def test_dropout_masks_come_from_the_private_stream(tmp_path: Path) -> None:
    run, _, _ = prepare(tmp_path / "run", "privacy.seed=5", "privacy.noise=none")
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 10))
    dim = sum(p.numel() for p in module.parameters())
    # Nothing kept: the same step is computed again.
    gradients = replace(run.gradients, engine=clipping_engine(module, run.task.loss), kept=None)
    run = replace(run, gradients=gradients)
    model_ND = torch.ones(4, dim)
    torch.manual_seed(1)
    first_ND = run.gradients(model_ND, 0)
    torch.manual_seed(2)  # whoever knows torch's seed knows nothing
    assert torch.equal(run.gradients(model_ND, 0), first_ND)
    for secret in (PrivateRandomness.seeded(6, range(4)), PrivateRandomness.fresh(range(4))):
        # the same batch for every key
        full = replace(
            run.gradients.mechanism, expected_batch_sizes=run.gradients.mechanism.num_examples
        )
        ours, theirs = (
            replace(run.gradients, mechanism=full, random=key)
            for key in (run.gradients.random, secret)
        )
        assert not torch.allclose(ours(model_ND, 0), theirs(model_ND, 0), rtol=1e-3)


def test_a_residual_that_rises_is_a_sign_only_where_no_law_is_known(tmp_path: Path) -> None:
    """With a law the start has judged already, and residuals of short runs rise for a while."""
    for spec, warned in (("top:0.1", True), ("rot:1", False)):
        run, *_ = prepare(tmp_path / spec[:3], f"compression.spec={spec}")
        progress = training.train(run)
        for ratio in (1e-9, 1e-8, 1e-7, 1e-6):
            run.recorder.rows.append({"step": 0, "residual_ratio": ratio})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.record(run, progress)
        found = [w for w in caught if "gossip may be diverging" in str(w.message)]
        assert bool(found) == warned, spec
