"""Every exit code of `dpcsgp party` and `federation`, as real commands give it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from commands import commands, until
from running import DIGITS, make_federation, releases_in

from dpcsgp.cli.exit_codes import ExitCode, code_of_ending, code_of_error
from dpcsgp.errors import CheckpointError, DpcsgpError, LedgerError, WaitStoppedError
from dpcsgp.records.ending import Ending

ROOT = Path(__file__).parents[2]
RUN = ("party", "run", "federation.toml", "--folder")
LONG = DIGITS.replace("steps = 12", "steps = 150")


def test_every_code_has_its_section_in_the_documentation() -> None:
    titles = re.findall(r"^## (.*)$", (ROOT / "docs/exit-codes.md").read_text(), re.MULTILINE)
    assert titles == [f"{code.value}: {code.title}" for code in ExitCode]
    for code in ExitCode:
        # What people are told leads to the section, as Markdown makes its anchor.
        anchor = re.sub(r"[^\w\- ]", "", f"{code.value}: {code.title}").replace(" ", "-")
        assert code.hint.endswith(f"docs/exit-codes.md#{anchor}")


def test_the_service_restarts_after_a_crash_and_not_after_a_refusal() -> None:
    unit = (ROOT / "docs/operating/dpcsgp-party.service").read_text()
    (prevented,) = re.findall(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE)
    final = {ExitCode.REFUSED, ExitCode.RESTORED_BACKUP, ExitCode.DIVERGED, ExitCode.RECORDS}
    assert set(map(int, prevented.split())) == final
    assert "Restart=on-failure" in unit and f"SuccessExitStatus={ExitCode.STOPPED:d}" in unit


def test_the_more_special_kind_decides() -> None:
    full = LedgerError("no room")
    full.__cause__ = OSError(28, "No space left on device")
    assert code_of_error(full) is ExitCode.DISK
    assert (
        code_of_error(LedgerError("x")) is code_of_error(CheckpointError("x")) is ExitCode.RECORDS
    )
    assert code_of_error(WaitStoppedError("x")) is ExitCode.STOPPED
    assert code_of_error(DpcsgpError("x")) is ExitCode.FAILED
    for ending in Ending:
        assert (code_of_ending(ending, handed_over=False) == 0) is False
    assert code_of_ending(Ending.COMPLETED, handed_over=True) == 0


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_finds_nothing_wrong_with_the_service(tmp_path: Path) -> None:
    unit = (ROOT / "docs/operating/dpcsgp-party.service").read_text()
    here = tmp_path / "dpcsgp-party.service"
    here.write_text(unit.replace("/opt/dpcsgp/bin/dpcsgp", sys.executable))
    words = ["systemd-analyze", "verify", str(here)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.slow
def test_refused_given_up_damaged_and_full(tmp_path: Path) -> None:
    make_federation(tmp_path, 2)
    with commands(tmp_path) as start:
        consents = tmp_path / "lab-0" / "consents"
        consents.rename(tmp_path / "consents")
        assert "has not approved" in start(*RUN, "lab-0").ends(ExitCode.REFUSED)
        (tmp_path / "consents").rename(consents)
        start(*RUN, "lab-0", "--page", "0.0.0.0:0").ends(ExitCode.REFUSED)
        start("federation", "show", "nowhere.toml").ends(ExitCode.REFUSED)
        start("party", "run").ends(ExitCode.REFUSED)
        start("party", "check", "federation.toml", "--folder", "lab-0").ends(ExitCode.FAILED)
        # No room for the first file, then none for a longer one.
        text = start(*RUN, "lab-0", most_bytes=0).ends(ExitCode.DISK)
        assert "cannot be written" in text and "exit code 7, disk full" in text
        text = start(*RUN, "lab-0", "--patience", "1").ends(ExitCode.GAVE_UP)
        assert "party 'lab-1' (node 1) has given no sign of life" in text
        assert "docs/exit-codes.md#3-waiting-gave-up" in text
        (journal,) = tmp_path.glob("lab-0/runs/*/journal")
        owner = next(path for path in journal.iterdir() if path.suffix == ".json")
        owner.write_text("{}")
        text = start(*RUN, "lab-0").ends(ExitCode.RECORDS)
        assert "exit code 6, records damaged or in use" in text
        assert not list(tmp_path.glob("lab-0/runs/*/ledger/kept/*"))  # nothing was released


@pytest.mark.slow
def test_diverged(tmp_path: Path) -> None:
    # A step of some 1e42 is no number of 32 bits.
    plan = DIGITS.replace("[algorithm]", "[algorithm]\nlearning_rate = 1e30")
    make_federation(tmp_path, 2, plan + "[privacy]\nclip_norm = 1e15\n")
    with commands(tmp_path) as start:
        both = [start(*RUN, name) for name in ("lab-0", "lab-1")]
        until(lambda: any(each.process.exitcode is not None for each in both))
        ended = next(each for each in both if each.process.exitcode is not None)
        text = ended.ends(ExitCode.DIVERGED)
        assert "diverged" in text and "completed" not in text and "not finished" in text


@pytest.mark.slow
def test_stopped_restored_and_done(tmp_path: Path) -> None:
    """One federation: killed, taken back to a backup, brought back, stopped, ended."""
    make_federation(tmp_path, 2, LONG)
    party, newest = tmp_path / "lab-1", tmp_path / "newest"
    with commands(tmp_path) as start:
        first = start(*RUN, "lab-0", "--log-file", "lines.log")
        second = start(*RUN, "lab-1")
        until(lambda: releases_in(party) >= 20)
        second.kill()
        shutil.copytree(party, tmp_path / "old")
        before = releases_in(party)
        second = start(*RUN, "lab-1")
        until(lambda: releases_in(party) >= before + 20)
        second.kill()
        log = tmp_path / "lines.log"
        until(lambda: "waiting for lab-1" in log.read_text())  # a short wait is not worth a line
        party.rename(newest)
        (tmp_path / "old").rename(party)
        text = start(*RUN, "lab-1").ends(ExitCode.RESTORED_BACKUP)
        assert "exit code 4, restored from an older backup" in text
        shutil.rmtree(party)
        newest.rename(party)
        os.kill(first.process.pid, signal.SIGTERM)
        text = first.ends(ExitCode.STOPPED)
        assert "not the result of the federation" in text and "docs/exit-codes.md#130" in text
        start("party", "status", "--folder", "lab-0").ends(ExitCode.FAILED)
        lines = (tmp_path / "lines.log").read_text()
        for word in ("listens on", "is connected", "round ", "saved step", "waiting for lab-1"):
            assert word in lines, word
        both = [start(*RUN, name) for name in ("lab-0", "lab-1")]
        for each in both:
            assert "not finished" not in each.ends(ExitCode.DONE)
        start("party", "status", "--folder", "lab-0").ends(ExitCode.DONE)
