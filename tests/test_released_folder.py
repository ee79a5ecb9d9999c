"""A results folder that version 0.1.0 wrote still loads, accounts, reports and resumes: nothing
spent is forgotten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import dpcsgp
from dpcsgp.privacy import composed_epsilon, read_ledgers
from dpcsgp.report import write_report
from dpcsgp.runtime.requests import BuiltinRequest
from dpcsgp.runtime.session import run_simulated

RELEASED = Path(__file__).parent / "data" / "released-0.1.0"
DONE, PLANNED = 50, 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of a run of four nodes on the digits that was interrupted at step 50 of 300."""
    shutil.copytree(RELEASED, tmp_path / "run")
    return tmp_path / "run"


def test_it_accounts(folder: Path) -> None:
    ledgers = read_ledgers(folder)
    assert [ledger.count for ledger in ledgers] == [DONE] * 4
    spent = max(composed_epsilon(ledger.releases(), 1e-4) for ledger in ledgers)
    assert spent == pytest.approx(
        json.loads((folder / "summary.json").read_text())["epsilon"], rel=1e-3
    )


def test_it_loads_and_reports(folder: Path, tmp_path: Path) -> None:
    models = [dpcsgp.load_model(folder, node=node) for node in range(4)]
    assert models[0](torch.zeros(1, 64)).shape == (1, 10)
    assert "interrupted" in write_report([folder], tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_it_resumes_and_the_budget_holds_for_both_parts(folder: Path) -> None:
    before = [ledger.count for ledger in read_ledgers(folder)]
    summary = run_simulated(BuiltinRequest(out=folder, resume=True)).summary
    after = read_ledgers(folder)
    assert summary["stopped_because"] == "completed"
    assert [ledger.count - count for ledger, count in zip(after, before, strict=True)] == [
        PLANNED - DONE
    ] * 4
    assert max(composed_epsilon(ledger.releases(), 1e-4) for ledger in after) <= 4.0
