"""`dpcsgp doctor` as a user meets it: verdicts, exit codes, the sweep and the figure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dpcsgp.cli.main import app

EXPONENTIAL = ("--graph", "directed_exponential", "--num-nodes", "10", "--dim", "101770")


class Terminal:
    """Runs commands inside this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr."""
        self._monkeypatch.setattr(sys, "argv", ["dpcsgp", "doctor", *words])
        with pytest.raises(SystemExit) as ended:
            app()
        captured = self._capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), captured.out, captured.err

    def answer(self, *words: str) -> tuple[int, dict[str, Any]]:
        """Return exit code and the parsed JSON."""
        code, out, _ = self(*words, "--json")
        return code, json.loads(out)


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return Terminal(capsys, monkeypatch)


def test_a_divergent_setting_ends_with_code_1_and_the_rate_that_works(doctor: Terminal) -> None:
    code, out, _ = doctor(*EXPONENTIAL, "--compressor", "rand:0.5", "--mixing-rate", "1")
    text = " ".join(out.split())
    assert code == 1
    assert "unhealthy: Gossip with rand:0.5 diverges at mixing rate 1" in text
    assert "Use mixing_rate = 0.3" in text
    assert "1.075" in text


def test_the_advised_rate_is_healthy(doctor: Terminal) -> None:
    code, out, _ = doctor(*EXPONENTIAL, "--compressor", "rand:0.5")
    assert code == 0
    assert out.startswith("healthy: ")
    assert "Theorem" not in out
    code, answer = doctor.answer(*EXPONENTIAL, "--compressor", "rand:0.5", "--mixing-rate", "auto")
    assert (code, answer["healthy"]) == (0, True)
    assert answer["mixing_rate"] == answer["advised_rate"]
    assert answer["radius"] < 1 < answer["radius_at_one"]


def test_the_constants_of_the_theory_are_shown(doctor: Terminal) -> None:
    code, answer = doctor.answer(*EXPONENTIAL, "--compressor", "gsgd:16", "--mixing-rate", "1")
    assert code == 0
    assert answer["lambda_spectral"] == pytest.approx(0.6, abs=1e-3)
    assert answer["largest_omega_spectral"] == pytest.approx(0.040, abs=5e-4)
    assert answer["theorem_steps"] == pytest.approx(9.6, abs=0.05)
    assert answer["theorem_examples"] == pytest.approx(612_000, rel=1e-3)
    assert [condition["holds"] for condition in answer["conditions"]] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert answer["theorem_satisfied"] is False


def test_the_paper_speaks_only_when_it_is_asked(doctor: Terminal) -> None:
    _, plain, _ = doctor(*EXPONENTIAL)
    assert not {"omega", "lambda", "beta", "Proposition"} & set(plain.split())
    assert all(word in plain for word in ("threads", "installed", "disk"))
    _, full, _ = doctor(*EXPONENTIAL, "--paper")
    assert "Theorem 1 and Proposition 1" in full
    assert "omega" in full


def test_compressors_without_a_law_say_so_and_get_a_cautious_rate(doctor: Terminal) -> None:
    code, out, _ = doctor(*EXPONENTIAL, "--compressor", "sign")
    assert code == 0
    assert "no radius exists" in out
    assert "cautious" in out
    code, answer = doctor.answer(*EXPONENTIAL, "--compressor", "top:0.1", "--mixing-rate", "1")
    assert code == 1
    assert answer["radius"] is None
    assert 0 < answer["advised_rate"] < 0.1


def test_the_sweep_covers_masks_dithers_and_rotations(doctor: Terminal) -> None:
    code, answer = doctor.answer(
        "--graph", "directed_ring", "--num-nodes", "10", "--dim", "101770", "--sweep"
    )
    assert code == 0
    radii = {row["compressor"]: row["radius_at_one"] for row in answer["sweep"]}
    published = {
        "rand:0.9": 0.96,
        "rand:0.75": 0.98,
        "rand:0.6": 1.02,
        "rand:0.5": 1.06,
        "rand:0.1": 1.15,
    }
    assert {spec: round(radii[spec], 2) for spec in published} == published
    assert {"gsgd:8", "gsgd:8/512", "gsgd:4/64", "rot:1", "rot:4"} <= set(radii)
    _, out, _ = doctor("--graph", "directed_ring", "--num-nodes", "4", "--dim", "1000", "--sweep")
    assert "gsgd:8/512" in out
    assert "divergent" in out


def test_the_figure_is_written(doctor: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "new" / "radius.png"
    code, out, _ = doctor("--num-nodes", "4", "--dim", "1000", "--figure", str(path))
    assert code == 0
    assert "radius.png" in out
    assert path.read_bytes().startswith(b"\x89PNG")


def test_blocks_are_healthy_on_every_graph(doctor: Terminal) -> None:
    words = (
        "--set",
        "algorithm.name=dp-block",
        "--compressor",
        "none",
        "--graph",
        "star",
        "--num-nodes",
        "5",
    )
    code, answer = doctor.answer(*words)
    assert code == 0
    assert 0 < answer["radius"] < 1
    assert answer["doubly_stochastic"] is False
    assert answer["beta"] < 1


def test_a_config_file_and_an_edges_file_are_read(doctor: Terminal, tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("0 1\n1 2\n2 0\n2 1\n")
    (tmp_path / "my.toml").write_text('[task]\nname = "digits"\nmodel = "logistic"\n')
    words = ("--edges-file", str(tmp_path / "edges.txt"), "--num-nodes", "3")
    code, answer = doctor.answer(str(tmp_path / "my.toml"), *words)
    assert code == 0
    assert (answer["num_edges"], answer["dim"]) == (4, 650)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--graph", "ringg"], "graph.name = 'ringg'"),
        (["--compressor", "gsgd:1"], "2 to 16"),
        (["--mixing-rate", "2"], "algorithm.mixing_rate = 2"),
        (["--dim", "0"], "--dim 0"),
        (["nowhere.toml"], "nowhere.toml: there is no such config file (TOML) or results folder"),
        (["--figure", "radius.txt", "--num-nodes", "3", "--dim", "10"], "ends in .png"),
    ],
)
def test_wrong_input_ends_with_code_2_and_a_remedy(
    doctor: Terminal, words: list[str], message: str
) -> None:
    code, _, err = doctor(*words)
    assert code == 2
    assert message in " ".join(err.split())


def test_a_graph_in_pieces_is_wrong_input(doctor: Terminal, tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("0 1\n1 0\n1 2\n")
    code, _, err = doctor("--edges-file", str(tmp_path / "edges.txt"), "--num-nodes", "3")
    assert code == 2
    assert "not strongly connected" in err


@pytest.mark.parametrize("command", ["doctor", "plan", "audit", "report", "account"])
def test_a_path_where_nothing_is_says_what_was_looked_for(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def typed(path: Path) -> str:
        monkeypatch.setattr(sys, "argv", ["dpcsgp", command, str(path)])
        with pytest.raises(SystemExit) as ended:
            app()
        assert ended.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    text = typed(tmp_path / "nowhere")
    assert "nowhere" in text and "no such" in text and "results folder" in text
    assert "config file" in text or command in ("report", "account")
    (tmp_path / "empty").mkdir()
    assert "empty" in (text := typed(tmp_path / "empty"))
    assert any(name in text for name in ("config.toml", "summary.json", "ledger"))
