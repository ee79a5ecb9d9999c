"""Promises to whole persons over two versions of a roster: in step, with lag, with shared noise."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from commands import commands
from made_parties import PLAN
from running import make_federation, request_of, results_of

from dpcsgp.federation.amending import Amendment, amend
from dpcsgp.federation.consent import approve
from dpcsgp.federation.party_data import OwnExamples
from dpcsgp.federation.party_run import results_folder
from dpcsgp.privacy import read_ledgers, releases_by_node
from dpcsgp.privacy.ledger_format import read_ledger

PERSONS = PLAN.replace("steps = 5", "steps = 8") + "\n[privacy]\nmax_rows_per_unit = 3\n"
LABS = range(3)


def write_visits(path: Path, seed: int) -> None:
    """Write a table of visits: four findings, whose they are, and a class."""
    chance = np.random.default_rng(seed)
    whose = np.repeat(np.arange(30), chance.integers(1, 6, 30))
    rows = chance.normal(size=(len(whose), 4))
    lines = [
        ",".join([*map(repr, row.tolist()), f"patient-{owner}", str(int(row[0] > 0))])
        for row, owner in zip(rows, whose, strict=True)
    ]
    path.write_text("\n".join(["a,b,c,d,id,y", *lines]), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    ["", "max_colluders = 1\n", "\n[network]\nmax_lag = 2\n"],
    ids=["in step", "shared noise", "lag"],
)
def test_persons_stay_the_unit_when_a_roster_is_amended(tmp_path: Path, more: str) -> None:
    one = make_federation(tmp_path, len(LABS), PERSONS + more, examples=40)
    for lab in LABS:
        write_visits(tmp_path / f"{lab}.csv", lab)
        given = OwnExamples(str(tmp_path / f"{lab}.csv"), unit="id")
        folder = results_folder(request_of(tmp_path, lab, given, seed=None))
        assert folder.path.is_dir()
    two = amend(one, Amendment(4, settings=("algorithm.steps=10",))).roster
    (tmp_path / "v2.toml").write_text(two.text(), encoding="utf-8")
    with commands(tmp_path) as start:
        for lab in LABS:
            approve(request_of(tmp_path, lab).party, two)
        labs = [
            start("party", "run", "v2.toml", "--folder", f"lab-{lab}", "--data", f"{lab}.csv",
                  "--unit", "id")
            for lab in LABS
        ]  # fmt: skip
        for command in labs:
            command.ends(0)
    for lab in LABS:
        folder = results_of(tmp_path, lab)
        summary = json.loads((folder / "summary.json").read_bytes())
        assert summary["private"] and summary["handed_over"]
        assert "person" in summary["neighbouring_relation"]
        (ledger,) = (folder / "ledger").glob("node-*.jsonl")
        assert read_ledger(ledger).header.unit == "person"
        (releases,) = releases_by_node(read_ledgers(folder / "ledger")).values()
        assert sum(count for _, count in releases) == 10
        assert 0 < summary["epsilon"] <= 4.0
