"""Settings: good ones come through unchanged, bad ones are named with field, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpcsgp.config import load_config, make_config, per_node, to_toml
from dpcsgp.errors import ConfigError
from dpcsgp.runs.design import design_run
from dpcsgp.runs.facts import declared_facts


def test_toml_round_trip(tmp_path: Path) -> None:
    config = load_config(
        None, ["privacy.epsilon=[1,2,3]", "graph.num_nodes=3", "task.name=digits", "privacy.seed=4"]
    )
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load_config(path) == config
    assert load_config(path).fingerprint() == config.fingerprint()


def test_settings_beat_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[privacy]\nepsilon = 2\n")
    assert load_config(path, ["privacy.epsilon=3"]).privacy.epsilon == 3


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("privacy.epsilom=1", ["privacy.epsilom", "did you mean 'epsilon'"]),
        ("privcy.epsilon=1", ["[privcy]", "did you mean 'privacy'"]),
        ("privacy.epsilon=0", ["privacy.epsilon = 0", "greater than 0"]),
        ("privacy.delta=1", ["privacy.delta = 1", "less than 1"]),
        ("privacy.delta=0", ["privacy.delta = 0", "greater than 0"]),
        ("privacy.clip_norm=-2", ["privacy.clip_norm = -2", "greater than 0"]),
        ("algorithm.mixing_rate=1.5", ["algorithm.mixing_rate = 1.5", "'auto'"]),
        ("graph.name=ring", ["graph.name = 'ring'", "directed_ring"]),
        ("graph.name=edges", ["graph.edges_file"]),
        (
            "task.augmentation_multiplicity=4",
            ["augmentation_multiplicity = 4", 'task.augmentation = "crop-flip"'],
        ),
        ("graph.num_nodes=0", ["graph.num_nodes = 0"]),
        ("privacy.epsilon=[1,2]", ["privacy.epsilon has 2 values", "one per node"]),
        ("algorithm.name=sgp", ["privacy.noise", "dp-sgp"]),
        ("epsilon=1", ["section.key=value"]),
    ],
)
def test_bad_settings_name_field_value_and_remedy(setting: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [setting])
    assert all(word in str(caught.value) for word in words), str(caught.value)


# What float32 states, clocks and arrays cannot hold ended in a traceback, some in the first step.
@pytest.mark.parametrize(
    ("setting", "bound"),
    [
        ("algorithm.learning_rate=1e39", "1e+30"),
        ("algorithm.learning_rate=inf", "1e+30"),
        ("algorithm.learning_rate=1e-320", "1e-30"),
        ("algorithm.adam_epsilon=1e39", "1e+30"),
        ("algorithm.weight_decay=1e39", "1e+30"),
        ("algorithm.polish_rounds=10000000000000000000000", "1e+09"),
        ("privacy.clip_norm=1e39", "1e+18"),
        ("privacy.clip_norm=1e-320", "1e-09"),
        ("privacy.epsilon=inf", "finite number"),
        ("privacy.epsilon=[1,inf]", "finite number"),
        ("privacy.c2=1e-320", "1e-30"),
        ("task.class_weights=[1,1e39]", "1e+30"),
        ("graph.num_nodes=100000000000000000000000", "100000"),
        ("network.timeout_seconds=inf", "1e+09"),
        ("network.patience=1e308", "1e+09"),
        ("simulation.slow_factor=inf", "1e+09"),
        ("run.memory_limit_gb=1e308", "1e+09"),
        ("run.memory_limit_gb=1e-320", "1e-06"),
    ],
)
def test_numbers_beyond_what_a_run_can_compute_with_are_refused(setting: str, bound: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [setting])
    text = str(caught.value)
    assert text.startswith(f"{setting.partition('=')[0]} = ") and bound in text, text


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        load_config(Path("nowhere.toml"))


def test_broken_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[privacy\n")
    with pytest.raises(ConfigError, match=r"broken\.toml cannot be read"):
        load_config(path)


def test_a_table_is_expected() -> None:
    with pytest.raises(ConfigError, match="expected a table"):
        make_config({"privacy": 3})


def test_per_node_values() -> None:
    assert per_node(2, 3) == (2, 2, 2)
    assert per_node([1, 2, 3], 3) == (1, 2, 3)


@pytest.mark.parametrize(
    "path",
    sorted((Path(__file__).parents[1] / "configs").glob("*.toml")),
    ids=lambda path: path.name,
)
def test_every_config_that_comes_with_the_project_can_be_designed(path: Path) -> None:
    config = load_config(path)
    assert design_run(config, declared_facts(config)).mechanism.noise_multipliers[0] > 0
