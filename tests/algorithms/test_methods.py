"""The table of methods: every row builds what its traits promise, and wrong names are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpcsgp.algorithms import METHODS, Method, MethodSettings
from dpcsgp.algorithms.methods import find_method
from dpcsgp.compression import parse_compressor
from dpcsgp.config import load_config
from dpcsgp.errors import ConfigError
from dpcsgp.graphs import from_edges
from dpcsgp.network import Simulator
from dpcsgp.randomness import PublicRandomness

IRREGULAR = from_edges(3, [(0, 1), (1, 2), (2, 0), (0, 2)])  # push-sum weights leave 1
SETTINGS = MethodSettings(parse_compressor("rot:2"), 0.1, mixing_rate=0.5, num_blocks=3)


@pytest.mark.parametrize("name", METHODS)
def test_traits_are_what_the_method_does(name: str) -> None:
    row = METHODS[name]
    method, network, random = (
        row.build(SETTINGS),
        Simulator(IRREGULAR),
        PublicRandomness(0, [0, 1, 2]),
    )
    state = method.init(torch.randn(3, 40), torch.zeros(40))
    for _ in range(2):
        state = method.gossip(method.descend(state, torch.randn(3, 40)), network, random)
    assert (method.wire_bytes(40, 2) > 0) == row.sends
    assert network.traffic.bytes_per_edge == method.wire_bytes(40, 2)
    assert (method.residual_ratio(state) is not None) == row.error_feedback
    coarser = row.build(MethodSettings(parse_compressor("rot:1"), 0.1, 0.5, num_blocks=3))
    assert (coarser.wire_bytes(4000, 2) < method.wire_bytes(4000, 2)) == row.compresses
    whole = row.build(MethodSettings(SETTINGS.compressor, 0.1, 0.5, num_blocks=1))
    assert (whole.wire_bytes(4000, 2) > method.wire_bytes(4000, 2)) == row.blocks


@pytest.mark.parametrize("name", METHODS)
def test_model_fields_of_all_processes_give_models_and_average(name: str) -> None:
    """What several processes leave behind is joined onto the state of one that hosts one node."""
    method = METHODS[name].build(SETTINGS)
    network, random, start_ND = (
        Simulator(IRREGULAR),
        PublicRandomness(0, [0, 1, 2]),
        torch.randn(3, 40),
    )
    anchor_D = torch.randn(40)
    state = method.init(start_ND, anchor_D)
    for _ in range(2):
        state = method.gossip(method.descend(state, torch.randn(3, 40)), network, random)
    fields = {field: getattr(state, field) for field in method.model_fields}
    assert all(len(value) == 3 for value in fields.values())
    joined = method.init(start_ND[:1], anchor_D)._replace(**fields)
    assert torch.equal(method.model(joined), method.model(state))
    assert torch.equal(method.average(joined), method.average(state))


def test_dp_sgd_has_one_node_and_blocks_are_counted_where_there_are_any() -> None:
    assert load_config(None, ["algorithm.name=dp-sgd"]).num_nodes == 1
    assert load_config(None, ["algorithm.name=local"]).num_nodes == 10
    assert load_config(None, ["algorithm.name=dp-block"]).num_blocks == 10
    assert load_config(None, ["algorithm.name=dp-sgp"]).num_blocks == 1


def test_messages_without_error_feedback_are_exact_unless_asked() -> None:
    assert load_config(None, ["algorithm.name=dp-block"]).compression.spec == "none"
    asked = ["algorithm.name=dp-block", "compression.spec=gsgd:8/64"]
    assert load_config(None, asked).compression.spec == "gsgd:8/64"
    assert load_config(None, ["algorithm.name=dp-csgp"]).compression.spec == "rot:1"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dp-csg", ["algorithm.name = 'dp-csg'", "'dp-sgd' or 'local'", "did you mean 'dp-csgp'?"]),
        ("3", ["algorithm.name = 3", "should be 'dp-csgp'"]),
        ("[1]", ["algorithm.name = [1]", "should be 'dp-csgp'"]),
        ("no_such_module:LAZY", ["no_such_module cannot be imported", "PYTHONPATH"]),
        ("json:dumps", ["module json has no", "Method named dumps", "Method(build=...)"]),
        ("os.path;x:LAZY", ["should be 'module:attribute'"]),
        (":", ["should be 'module:attribute'"]),
    ],
)
def test_wrong_names_are_refused(name: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"algorithm.name={name}"])
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_error_feedback_compresses() -> None:
    with pytest.raises(ConfigError, match="compresses=True"):
        Method(METHODS["local"].build, error_feedback=True)


def test_a_method_of_ones_own_is_taken_from_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from dpcsgp.algorithms import METHODS\nHERE = METHODS['choco-sgd']\n"
    (tmp_path / "own_choco.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_method("own_choco:HERE") is METHODS["choco-sgd"]
    with pytest.raises(ConfigError, match="is the non-private method"):
        load_config(None, ["algorithm.name=own_choco:HERE"])


def test_the_table_needs_no_torch() -> None:
    code = (
        "import sys, dpcsgp.config; dpcsgp.config.load_config(); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
