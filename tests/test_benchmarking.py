"""Benchmarks run on tiny sizes and state consistent outcomes; speed is not tested here."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

from dpcsgp.benchmarking import GROUPS, benchmark, opacus_modes
from dpcsgp.benchmarking.models import CASES
from dpcsgp.benchmarking.stopwatch import Ratio, Times, compare, measure
from dpcsgp.cli.main import app
from dpcsgp.errors import ConfigError


@pytest.mark.parametrize("group", ["models", "compression", "mixing", "noise", "step"])
def test_every_group_gives_finite_ratios_with_their_spread(group: str) -> None:
    outcome = benchmark(group, quick=True).as_dict()
    json.dumps(outcome, allow_nan=False)
    assert outcome["ratios"]
    for ratio in outcome["ratios"]:
        assert ratio["group"] == group
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"] < math.inf
        assert ratio["limit"] is None and ratio["passed"] is None
    assert len(outcome["profile"]) == (10 if group == "step" else 0)


def test_clipping_compares_with_plain_sgd_and_with_opacus_where_it_is() -> None:
    outcome = benchmark("clipping", quick=True)
    peers = [ratio.peer for ratio in outcome.ratios]
    assert peers[:2] == ["plain SGD", "plain SGD"]
    if opacus_modes.is_installed():
        assert set(peers[2:]) <= {f"Opacus {mode}" for mode in opacus_modes.MODES}
        assert sum("its best mode here" in ratio.note for ratio in outcome.ratios) == 1
    else:
        assert opacus_modes.MISSING in outcome.notes


def test_models_are_named_that_cannot_be_built_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of other libraries are left out with what to install, and the rest is measured."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("transformers", "peft") else found(name),
    )
    outcome = benchmark("models", quick=True)
    assert {ratio.name for ratio in outcome.ratios} == {
        name for name, case in CASES.items() if not case.needs
    }
    assert any("BERT, LoRA" in note and "transformers peft" in note for note in outcome.notes)


@pytest.mark.slow
def test_scale_measures_each_size_in_its_own_process_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = tmp_path / "scale.png"
    monkeypatch.setattr(
        sys, "argv", ["dpcsgp", "benchmark", "scale", "--quick", "--json", "--figure", str(figure)]
    )
    with pytest.raises(SystemExit) as ended:
        app()
    assert not ended.value.code
    outcome = json.loads(capsys.readouterr().out)
    assert [point["num_nodes"] for point in outcome["scale"]] == [2, 4]
    assert all(point["peak"] > point["before"] / 2 > 0 for point in outcome["scale"])
    assert figure.stat().st_size > 1000


def test_the_sense_of_a_limit() -> None:
    def ratio(value: float, at_least: bool) -> Ratio:
        return Ratio(
            "g", "ours", "peer", value, value, value, 1.0, 1.0, limit=2.0, at_least=at_least
        )

    assert ratio(1.9, at_least=False).passed and not ratio(2.1, at_least=False).passed
    assert ratio(2.1, at_least=True).passed and not ratio(1.9, at_least=True).passed


def test_a_speed_up_is_peer_over_ours_and_rounds_are_paired() -> None:
    times = {
        "ours": Times((1.0, 2.0, 4.0), (1.0, 1.0, 1.0)),
        "peer": Times((3.0, 6.0, 12.0), (5.0, 5.0, 5.0)),
    }
    faster = compare("g", times, "ours", "peer", clock="wall", at_least=True)
    assert (faster.low, faster.value, faster.high) == (3.0, 3.0, 3.0)
    assert faster.value_cpu == 5.0
    assert compare("g", times, "ours", "peer", clock="wall").value == pytest.approx(1 / 3)


def test_ways_are_timed_in_turn() -> None:
    order: list[str] = []
    times = measure(
        {name: lambda name=name: order.append(name) for name in "ab"}, rounds=2, warm_up=1
    )
    assert order == ["a", "b"] * 3
    assert len(times["a"].wall) == len(times["b"].cpu) == 2


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=rf"benchmark 'speed': expected one of {', '.join(GROUPS)}"
    ):
        benchmark("speed")
