"""Plant each mutant in a copy of the sources and run its tests; print those that none sees.

The tests must pass on an unchanged copy first. Exit code 1 if fewer than 95 % of the mutants are
killed, 2 if an entry of the lists is broken: its old text moved, or the mutant cannot even be
imported, which no test has to see.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mutant_lists import REPOSITORY, Mutant, load_mutants

_WANTED: Final = 0.95
_LONGEST: Final = 600.0  # seconds for the tests of one mutant
_OUTCOMES: Final = {0: "survived", 1: "killed"}  # pytest's exit codes; others: no tests were run


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: killed, survived or broken."""

    mutant: Mutant
    outcome: str
    seconds: float
    detail: str


def run_tests(sources: Path, tests: Sequence[str], marks: str) -> tuple[int, str]:
    """Run tests against these sources.

    Return pytest's exit code (-1: too long) and its last line.
    """
    settings = {
        "PYTHONPATH": str(sources),
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(sources / "hypothesis"),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks]
    command += [f"--basetemp={sources / 'tmp'}", *(f"tests/{test}" for test in tests)]
    try:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=_LONGEST,
        )
    except subprocess.TimeoutExpired:
        return -1, f"not done after {_LONGEST:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (lines or done.stdout.splitlines() or [done.stderr])[-1]


def copy_sources(original: Path, scratch: Path) -> Path:
    """Return a copy in a folder of its own, compiled loops included."""
    target = Path(tempfile.mkdtemp(dir=scratch))
    shutil.copytree(
        original, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tmp", "hypothesis")
    )
    return target


def check_unchanged(original: Path, mutants: Iterable[Mutant]) -> None:
    """Refuse to start where tests fail without a mutant, or read other sources than the copy."""
    where = "import dpcsgp, sys; print(dpcsgp.__file__)"
    environment = os.environ | {"PYTHONPATH": str(original)}
    imported = subprocess.run(
        [sys.executable, "-c", where], env=environment, capture_output=True, text=True
    ).stdout
    if not Path(imported.strip()).is_relative_to(original):
        raise SystemExit(
            f"the tests would import {imported.strip()!r} instead of the copy in {original}"
        )
    tests: dict[str, dict[str, None]] = {}
    for mutant in mutants:
        tests.setdefault(mutant.marks, {}).update(dict.fromkeys(mutant.tests))
    for marks, names in tests.items():
        code, line = run_tests(original, list(names), marks)
        if code != 0:
            raise SystemExit(f"the tests do not pass on the sources as they are: {line}")


def judge(mutant: Mutant, original: Path, scratch: Path) -> Verdict:
    """Plant a mutant in a copy and see whether its tests notice."""
    started = time.monotonic()
    copied = copy_sources(original, scratch)
    try:
        file = copied / "dpcsgp" / mutant.file
        file.write_text(mutant.applied(file.read_text()))
        code, line = run_tests(copied, mutant.tests, mutant.marks)
        outcome = _OUTCOMES.get(code, "broken")
    except ValueError as error:
        outcome, line = "broken", str(error)
    finally:
        shutil.rmtree(copied)
    verdict = Verdict(mutant, outcome, time.monotonic() - started, line)
    print(
        f"{outcome:<9}{verdict.seconds:5.0f} s  {mutant.file:<32}{mutant.name}  {line[:110]}",
        flush=True,
    )
    return verdict


def chosen(mutants: Sequence[Mutant], only: Sequence[str]) -> list[Mutant]:
    """Return the mutants named, or those of the files named; all if none is."""
    found = [mutant for mutant in mutants if not only or mutant.name in only or mutant.file in only]
    unknown = set(only) - {name for mutant in found for name in (mutant.name, mutant.file)}
    if unknown:
        raise SystemExit(
            f"--only = {', '.join(sorted(unknown))}: no mutant and no file of the lists has this "
            "name"
        )
    return found


def report(verdicts: Sequence[Verdict], seconds: float) -> int:
    """Print what the files add up to and who is left; return the exit code."""
    print(f"\n{'file':<32}{'mutants':>8}{'killed':>8}{'survived':>10}{'broken':>8}")
    for file in [*dict.fromkeys(verdict.mutant.file for verdict in verdicts), "all"]:
        own = [verdict.outcome for verdict in verdicts if file in (verdict.mutant.file, "all")]
        killed, survived, broken = (
            own.count(outcome) for outcome in ("killed", "survived", "broken")
        )
        print(f"{file:<32}{len(own):>8}{killed:>8}{survived:>10}{broken:>8}")
    for verdict in verdicts:
        if verdict.outcome != "killed":
            print(
                f"{verdict.outcome}: {verdict.mutant.file}, {verdict.mutant.name}: {verdict.detail}"
            )
    outcomes = [verdict.outcome for verdict in verdicts]
    share = outcomes.count("killed") / len(outcomes)
    print(f"{share:.1%} killed (at least {_WANTED:.0%} must be), {seconds / 60:.1f} minutes")
    if "broken" in outcomes:
        return 2
    return 0 if share >= _WANTED else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="names of mutants, or of their files"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants are tried at a time")
    parser.add_argument(
        "--trust", action="store_true", help="do not run the tests on the sources as they are first"
    )
    arguments = parser.parse_args()
    mutants, started = chosen(load_mutants(), arguments.only), time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="dpcsgp-mutants-"))
    try:
        original = copy_sources(REPOSITORY / "src", scratch)
        if not arguments.trust:
            check_unchanged(original, mutants)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            verdicts = list(pool.map(lambda mutant: judge(mutant, original, scratch), mutants))
    finally:
        shutil.rmtree(scratch)
    return report(verdicts, time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())
