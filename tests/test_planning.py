"""Planning: predictions equal what a run does, limits hold, no data are opened."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from dpcsgp import training
from dpcsgp.config import AlgorithmConfig, Config, load_config, make_config, to_toml
from dpcsgp.errors import ConfigError
from dpcsgp.graphs import directed_ring
from dpcsgp.network import Simulator
from dpcsgp.planning import (
    Limits,
    Plan,
    Row,
    declared_facts,
    diagnose,
    radius_curves,
    search,
    search_features,
    sweep,
)
from dpcsgp.planning.outlook import DISTANCE, Gossip, Outlook, foresee
from dpcsgp.planning.search import choose, mark_front
from dpcsgp.runs.build import build_run
from dpcsgp.runs.data import load_builtin_data
from dpcsgp.runs.design import design_run
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.summary import write_results

DIGITS = [
    "task.name=digits",
    "task.model=mlp:16",
    "graph.num_nodes=4",
    "privacy.epsilon=4",
    "run.checkpoint_every=0",
]
LIMITS = Limits(megabytes=0.01, minutes=1)


@pytest.fixture(scope="module")
def plan() -> Plan:
    config = load_config(None, DIGITS)
    return search(config, declared_facts(config), LIMITS)


def test_declared_facts_are_those_of_the_loaded_data() -> None:
    for settings in (DIGITS, [*DIGITS, "task.features=dct:4", "graph.num_nodes=7"]):
        config = load_config(None, settings)
        assert declared_facts(config) == load_builtin_data(config).facts


def test_facts_of_published_data_need_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPCSGP_CACHE", str(tmp_path / "empty"))
    facts = declared_facts(Config(), num_examples=50)
    assert facts.num_examples == (50,) * 10
    assert facts.input_shape == (1, 28, 28)
    assert not (tmp_path / "empty").exists()


def test_every_plan_is_within_the_limits(plan: Plan) -> None:
    assert plan.rows
    assert all(row.bytes_per_edge <= 10_000 and row.seconds <= 60 for row in plan.rows)
    assert len(plan.rows) < plan.num_tried
    assert any(
        row.config.algorithm.name == "local" and row.bytes_per_edge == 0 for row in plan.rows
    )


def test_predicted_bytes_noise_and_rate_are_those_of_the_run(plan: Plan, tmp_path: Path) -> None:
    quickest = {}
    for row in sorted(plan.rows, key=lambda row: row.config.algorithm.steps):
        quickest.setdefault(row.exchange, row)
    assert {"rot:1", "rot:2", "block:30", "local"} <= set(quickest)
    for name, row in quickest.items():
        config = make_config(
            {**row.config.model_dump(), "run": {"evaluate_every": 0, "checkpoint_every": 0}}
        )
        data = load_builtin_data(config)
        design = design_run(config, data.facts)
        folder = ResultsFolder.create(tmp_path / name.replace(":", "-"), config)
        run = build_run(design, data, Simulator(design.topology), folder)
        summary = write_results(folder, design, run, training.train(run))
        assert summary["bytes_per_edge"] == row.bytes_per_edge, name
        assert summary["mixing_rate"] == row.mixing_rate
        assert max(summary["noise_multiplier"]) == pytest.approx(
            row.outlook.noise_multiplier, rel=1e-9
        )
        assert summary["epsilon"] <= 4.0


def test_the_chosen_settings_survive_toml(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(to_toml(plan.chosen.config))
    assert load_config(tmp_path / "plan.toml") == plan.chosen.config


def test_impossible_limits_are_refused_with_a_remedy() -> None:
    config = load_config(None, DIGITS)
    with pytest.raises(ConfigError, match=r"none of \d+ plans fits; allow more"):
        search(config, declared_facts(config), Limits(minutes=0.0))
    with pytest.raises(ConfigError, match="--max-megabytes -1"):
        Limits(megabytes=-1)
    with pytest.raises(ConfigError, match=r"privacy\.epsilon is a list"):
        search(
            load_config(None, [*DIGITS, "privacy.epsilon=[1,2,3,4]"]),
            declared_facts(config),
            LIMITS,
        )


@pytest.mark.slow
def test_low_frequencies_are_tried_for_large_pictures_and_plain_networks_only() -> None:
    def tried(*settings: str) -> set[str]:
        config = load_config(
            None, ["task.model=mlp:4", "graph.num_nodes=2", "privacy.epsilon=8", *settings]
        )
        found = search_features(config, 30, Limits(megabytes=0.002))
        return {row.config.task.features for row in found.rows}

    assert tried("task.name=mnist") == {"standardize", "dct:10"}
    assert tried("task.name=digits") == {"standardize"}


def test_histograms_with_a_linear_model_are_planned_where_any_model_will_do() -> None:
    config = load_config(
        None,
        ["task.name=mnist", "graph.num_nodes=3", "privacy.epsilon=4", "run.checkpoint_every=0"],
    )
    found = search_features(config, 30, Limits(megabytes=0.02), free_model=True)
    models = {row.config.task.features: row.config.task.model for row in found.rows}
    assert models == {"standardize": "mlp:128", "dct:10": "mlp:128", "hog:8": "logistic"}
    ends = [row for row in found.rows if row.exchange.startswith("end ")]
    # only convex models can be averaged at the end
    assert {row.config.task.features for row in ends} == {"hog:8"}
    alone = [
        row for row in found.rows if row.exchange == "local" and row.config.task.features == "hog:8"
    ]
    assert max(row.bytes_per_edge for row in alone) == 0 < min(row.bytes_per_edge for row in ends)
    sent = {row.bytes_per_edge for row in ends if row.exchange == "end rot:3"}
    assert len(sent) == 1  # rounds at the end only, however many steps


def outlook(shortfall: float) -> Outlook:
    return Outlook(1.0, 1.0, 0.1, 0.1, 1.0, 0.0, shortfall)


def row(shortfall: float, num_bytes: int, seconds: float) -> Row:
    return Row(Config(), 1, 1.0, num_bytes, 0, seconds, outlook(shortfall))


def test_the_front_holds_what_nothing_beats_and_the_choice_is_quick() -> None:
    rows = mark_front(
        [row(0.2, 10, 1), row(0.1, 20, 9), row(0.101, 20, 5), row(0.3, 10, 1), row(0.1005, 30, 9)]
    )
    assert [(r.outlook.shortfall, r.on_front) for r in rows] == [
        (0.1, True),
        (0.1005, False),
        (0.101, True),
        (0.2, True),
        (0.3, False),
    ]
    assert choose(rows).seconds == 5


def test_the_outlook_follows_its_formula() -> None:
    settings = AlgorithmConfig(steps=25, momentum=0.0, learning_rate_decay=1.0, polish_rounds=0)
    gossip = Gossip(radius=0.0, disagreement=0.0, num_averaged=4)
    found = foresee(settings, gossip, dim=100, noise_multiplier=2.0, clip_norm=1.0, batch_size=10)
    strength = math.sqrt(0.25 + 100 * (2 / 10) ** 2 / 4)
    assert found.gradient_noise == pytest.approx(0.1)
    # rounded to two digits
    assert found.learning_rate == pytest.approx(DISTANCE / (5 * strength), rel=0.05)
    assert found.shortfall == pytest.approx(strength / 5)
    assert found.model_noise == pytest.approx(found.learning_rate * 0.1 * 5)  # 25 independent steps


def test_the_outlook_is_better_with_more_nodes_steps_and_polish_and_less_noise() -> None:
    settings = AlgorithmConfig(steps=30, polish_rounds=0)
    gossip = Gossip(radius=0.8, disagreement=2.0, num_averaged=10)

    def shortfall(
        settings: AlgorithmConfig = settings, gossip: Gossip = gossip, noise: float = 10.0
    ) -> float:
        return foresee(settings, gossip, 1000, noise, 1.0, 1000).shortfall

    usual = shortfall()
    assert shortfall(noise=5.0) < usual
    assert shortfall(settings.model_copy(update={"steps": 60})) < usual
    assert shortfall(settings.model_copy(update={"polish_rounds": 3})) < usual
    assert shortfall(gossip=Gossip(0.8, 2.0, num_averaged=5)) > usual
    assert shortfall(gossip=Gossip(0.8, 8.0, num_averaged=10)) > usual


def test_momentum_gathers_noise_as_simulated() -> None:
    settings = AlgorithmConfig(steps=40, momentum=0.5, learning_rate_decay=0.2)
    found = foresee(settings, Gossip(0.0, 0.0, 1), 10, 3.0, 1.0, 100)
    random = np.random.default_rng(0)
    model, velocity = np.zeros(40_000), np.zeros(40_000)
    for step in range(40):
        velocity = 0.5 * velocity + 0.03 * random.standard_normal(40_000)
        model -= found.learning_rate * (1 - 0.8 * step / 39) * velocity
    assert found.model_noise == pytest.approx(model.std(), rel=0.02)


@pytest.mark.parametrize(
    ("settings", "healthy"),
    [
        (["compression.spec=rand:0.5", "algorithm.mixing_rate=1"], False),
        (["compression.spec=rand:0.5"], True),
        (["compression.spec=gsgd:8"], False),
        (["compression.spec=sign"], True),
        (["compression.spec=sign", "algorithm.mixing_rate=1"], False),
        (["algorithm.name=dp-block", "compression.spec=none"], True),
        (["algorithm.name=dp-block", "compression.spec=gsgd:8/64"], True),
        (
            ["algorithm.name=dp-block", "compression.spec=rot:1"],
            False,
        ),  # a spread of half the displacement stays
        (["algorithm.name=dp-block", "compression.spec=gsgd:4"], False),  # grows
        (["algorithm.name=dp-block", "compression.spec=top:0.1"], False),  # no law
        (["algorithm.name=dp-sgp"], True),
        (["algorithm.name=local"], True),
        (["graph.num_nodes=1"], True),
    ],
)
def test_the_diagnosis_knows_healthy_from_unhealthy(settings: list[str], healthy: bool) -> None:
    found = diagnose(load_config(None, settings), dim=101_770, examples_per_node=6000)
    assert found.healthy is healthy
    assert found.verdict


def test_a_round_costs_what_one_more_round_of_a_run_costs() -> None:
    for spec in ("rot:1", "gsgd:4/64", "rand:0.5"):
        config = load_config(None, [*DIGITS, f"compression.spec={spec}"])
        design = design_run(config, declared_facts(config))
        found = diagnose(config, design.dim, 375)
        assert found.bytes_per_round == design.algorithm.wire_bytes(design.dim, 1)


def test_the_sweep_shows_which_compressors_need_a_smaller_rate() -> None:
    rows = {
        found.compressor: found
        for found in sweep(directed_ring(10), 101_770, ["rand:0.9", "rand:0.1", "gsgd:8"])
    }
    assert rows["rand:0.9"].radius_at_one == pytest.approx(0.96, abs=0.01)
    assert rows["rand:0.1"].radius_at_one == pytest.approx(1.15, abs=0.01)
    assert rows["rand:0.1"].best_radius < 1
    assert math.isnan(rows["gsgd:8"].best_rate)


def test_radius_curves_leave_out_what_has_no_law() -> None:
    rates, curves = radius_curves(
        directed_ring(5), 1000, ["rot:1", "sign", "top:0.1", "rot:1"], num_rates=5
    )
    assert list(curves) == ["rot:1"]
    assert rates[-1] == 1.0
    assert len(curves["rot:1"]) == 5


def test_a_growing_residual_is_warned_about_and_a_settled_one_is_not() -> None:
    def rows(*ratios: float) -> list[dict[str, float]]:
        return [{"step": 0.0, "residual_ratio": ratio} for ratio in ratios]

    with pytest.warns(UserWarning, match=r"residual .* has grown from 0\.5 to 3"):
        training.warn_if_residual_grows(rows(0.4, 0.5, 0.8, 1.0, 2.0, 3.0))
    training.warn_if_residual_grows(rows(0.5, 0.8, 1.0, 0.9, 3.0))
    training.warn_if_residual_grows(rows(0.5, 3.0))
    training.warn_if_residual_grows(rows(0.5, 0.51, 0.52, 0.53, 0.54))
