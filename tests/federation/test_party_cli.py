"""`dpcsgp party` and `dpcsgp federation`, from new keys to consent, as people type it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from made_parties import PLAN
from typer.testing import CliRunner, Result

from dpcsgp.cli.main import cli
from dpcsgp.errors import ConfigError
from dpcsgp.federation.consent import require_consent
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.roster import Roster

PROMISE = ("--num-examples", "90", "--epsilon", "2", "--delta", "1e-3")


def run(*words: str | Path, answer: str | None = None, code: int = 0) -> Result:
    result = CliRunner().invoke(
        cli, [str(word) for word in words], input=answer, env={"COLUMNS": "100"}
    )
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three parties, a plan and a roster, all made by commands."""
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(PLAN)
    for letter in "ab":
        run("party", "new", f"lab-{letter}", "--address", f"{letter}.example:7400", *PROMISE)
    run("party", "new", "lab-c", "--outbound-only")
    run("party", "card", "--folder", "lab-c", *PROMISE)
    run("federation", "new", "plan.toml", *cards(), "--out", "federation.toml")
    return tmp_path


def cards() -> list[str]:
    return [f"lab-{letter}/lab-{letter}.card.toml" for letter in "abc"]


def test_approving_shows_the_terms_asks_and_records(here: Path) -> None:
    roster, party = Roster.load(Path("federation.toml")), PartyFolder.open(Path("lab-c"))
    refused = run("party", "approve", "federation.toml", "--folder", "lab-c", answer="n\n", code=1)
    assert not list(party.consents.iterdir())
    for word in (
        "eps 2, delta 0.001 for 90",
        "lab-a",
        str(roster.ends),
        roster.words,
        "5 releases",
    ):
        assert word in refused.output
    run("party", "approve", "federation.toml", "--folder", "lab-c", code=1)  # nobody answers
    assert not list(party.consents.iterdir())
    run("party", "approve", "federation.toml", "--folder", "lab-c", answer="y\n")
    assert require_consent(party, roster).fingerprint == roster.fingerprint


def test_whom_a_promise_trusts_is_said(here: Path) -> None:
    """Noise that pairs share protects only while few enough of the others collude."""
    assert (
        "even if all others"
        in run("party", "approve", "federation.toml", "--folder", "lab-a", "--yes").output
    )
    Path("plan.toml").write_text(PLAN + "[privacy]\nmax_colluders = 1\n")
    run("federation", "new", "plan.toml", *cards(), "--out", "b.toml")
    output = run("party", "approve", "b.toml", "--folder", "lab-a", "--yes").output
    shown = json.loads(run("federation", "show", "b.toml", "--json").stdout)
    assert shown["max_colluders"] == 1
    assert all(1.9 < party["epsilon_of_plan"] <= 2.0 for party in shown["parties"])
    all_collude = shown["parties"][0]["epsilon_all_collude"]
    assert all_collude >= shown["parties"][0]["epsilon_of_plan"]
    words = " ".join(output.replace("│", " ").split())
    assert "as long as at most 1 of the others" in words
    assert f"eps {all_collude:.4g} if all of them do" in words


def test_earlier_promises_are_remembered(here: Path) -> None:
    run("federation", "new", "plan.toml", *cards(), "--out", "second.toml")
    run("party", "approve", "federation.toml", "--folder", "lab-a", "--yes")
    output = run("party", "approve", "second.toml", "--folder", "lab-a", "--yes").output
    assert "approved before: 1 other federations, eps 2 in all" in output


def test_the_folder_is_found_where_there_is_only_one(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="lab-a, lab-b, lab-c; give --folder"):
        run("party", "card")
    monkeypatch.chdir(here / "lab-b")
    assert 'name = "lab-b"' in run("party", "card").output
    (here / "alone").mkdir()
    (here / "lab-b").rename(here / "alone" / "lab-b")
    monkeypatch.chdir(here / "alone")
    run("party", "approve", here / "federation.toml", "--yes")
    assert list((here / "alone" / "lab-b" / "consents").iterdir())


def test_show_gives_all_figures_as_json(here: Path) -> None:
    shown = json.loads(run("federation", "show", "federation.toml", "--json").stdout)
    roster = Roster.load(Path("federation.toml"))
    assert shown["fingerprint"] == roster.fingerprint and shown["words"] == roster.words
    assert shown["healthy"] and shown["bytes_per_edge"] > 0
    assert [party["name"] for party in shown["parties"]] == ["lab-a", "lab-b", "lab-c"]
    assert all(party["noise_multiplier"] > 0.5 for party in shown["parties"])
    text = run("federation", "show", "federation.toml").output
    assert "gossip is healthy" in text and roster.words in text


def test_two_rosters_are_compared_field_by_field(here: Path) -> None:
    assert "equal" in run("federation", "show", "federation.toml", "federation.toml").output
    Path("longer.toml").write_text(PLAN.replace("steps = 5", "steps = 7"))
    run("federation", "new", "longer.toml", *cards(), "--out", "b.toml")
    output = run("federation", "show", "federation.toml", "b.toml", code=1).output
    assert "settings.algorithm.steps: 5 / 7" in output
    found = json.loads(
        run("federation", "show", "federation.toml", "b.toml", "--json", code=1).stdout
    )
    assert {each["field"] for each in found["differences"]} == {"id", "settings.algorithm.steps"}


def test_nothing_is_overwritten(here: Path) -> None:
    before = Path("federation.toml").read_bytes(), Path("lab-a/key.pem").read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        run("federation", "new", "plan.toml", *cards(), "--out", "federation.toml")
    with pytest.raises(ConfigError, match="never overwritten"):
        run("party", "new", "lab-a", "--outbound-only")
    assert before == (Path("federation.toml").read_bytes(), Path("lab-a/key.pem").read_bytes())


def test_what_the_cards_replace_is_said(here: Path) -> None:
    Path("plan.toml").write_text(PLAN + "[privacy]\nepsilon = 0.5\ndelta = 1e-3\n")
    output = run("federation", "new", "plan.toml", *cards(), "--out", "b.toml").output
    assert re.findall(r"note: (\S+ = \S+) of the plan", output) == ["privacy.epsilon = 0.5"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["party", "new", "x"], "--address HOST:PORT or --outbound-only"),
        (["party", "new", "x", "--outbound-only", "--address", "x:1"], "one of them"),
        (["party", "new", "x", "--address", "x"], "expected HOST:PORT"),
        (["party", "new", "x", "--outbound-only", "--epsilon", "1"], "--num-examples, --delta too"),
        (["party", "card", "--folder", "lab-a", "--epsilon", "-1"], "epsilon = -1.0"),
        (["party", "card", "--folder", "lab-a", "--epsilon", "nan"], "epsilon = nan"),
        (["party", "card", "--folder", "lab-a", "--delta", "1"], "delta = 1.0"),
        (["party", "card", "--folder", "."], "party new"),
        (["federation", "show", "a", "b", "c"], "give one, or two"),
        (["federation", "show", "nowhere.toml"], "no such file"),
        (["federation", "new", "plan.toml", "lab-a/key.pem"], "card lab-a/key.pem is damaged"),
        (["federation", "new", "lab-a", "lab-a/key.pem"], "plan lab-a"),
        (["federation", "new", "plan.toml", "x", "--ends", "soon"], "card x"),
    ],
)
def test_wrong_words_are_refused(here: Path, words: list[str], problem: str) -> None:
    before = sorted(os.listdir())
    with pytest.raises(ConfigError, match=problem):
        run(*words)
    assert sorted(os.listdir()) == before


def test_a_wrong_day_is_refused(here: Path) -> None:
    with pytest.raises(ConfigError, match="--ends soon"):
        run("federation", "new", "plan.toml", *cards(), "--ends", "soon", "--out", "b.toml")


def test_a_status_is_read_without_torch(here: Path) -> None:
    """It is asked every few seconds, and a process that imports torch takes seconds itself."""
    (here / "lab-a" / "runs").mkdir()
    results = here / "lab-a" / "runs" / "results"
    results.mkdir()
    pointer = {"run_id": "r", "folder": str(results)}
    (here / "lab-a" / "runs" / "0123456789abcdef.json").write_text(json.dumps(pointer))
    facts = {"updated": 0.0, "phase": "training", "waiting_for": [], "peers": [], "party": "a"}
    counts = dict.fromkeys(
        ("round", "rounds", "step", "steps", "releases", "epsilon", "epsilon_budget", "delta"), 1
    )
    more = {"bytes_per_edge": 0, "metric": "", "waiting_share": 0.0, "page": "", "log": []}
    (results / "status.json").write_text(json.dumps({**facts, **counts, **more}))
    script = (
        "import sys; from dpcsgp.cli.main import cli\n"
        "try: cli(['party', 'status', '--folder', 'lab-a'])\n"
        "except SystemExit as end: print('code', end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "last seen" in done.stdout and "code 1 False" in done.stdout, done
