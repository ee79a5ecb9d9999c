"""The report of one party: its own model, who contributed, and no success before the end."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpcsgp.report import write_report
from dpcsgp.runs.wording import outcome_rows

MakeFolder = Callable[..., Path]


def party(done: int, planned: int = 30, **changes: Any) -> dict[str, Any]:
    """Return what a party's summary has beside that of a run."""
    entries = [
        {"party": name, "node": node, "distance": away, "first_round": 0, "rounds": planned}
        | {"last_round": max(done - max(away, 1), -1)}
        for node, (name, away) in enumerate((("north", 0), ("south", 1), ("west", 2)))
    ]
    return {
        "party": "north",
        "num_nodes": 3,
        "rounds": done,
        "rounds_planned": planned,
        "contributions": entries,
        "handed_over": done == planned,
        **changes,
    }


def page_of(folder: Path) -> str:
    return re.sub(r"\s+", " ", write_report([folder]).read_text(encoding="utf-8"))


def cells(page: str) -> list[str]:
    (table,) = re.findall(r'<table class="narrow contributions">(.*?)</table>', page)
    return re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", table)


def test_a_party_speaks_of_its_own_model(make_folder: MakeFolder) -> None:
    page = page_of(make_folder(nodes=1, **party(30)))
    assert "Accuracy, own model" in page and "party north, one of 3" in page
    assert "Worst node</dt>" not in page and "node mean</dt>" not in page
    assert "every receiver has every message" in page and "Not finished" not in page
    assert cells(page)[4:] == [
        *("north", "0", "itself", "0 to 29 of 30"),
        *("south", "1", "directly", "0 to 29 of 30"),
        *("west", "2", "over 2 edges", "0 to 28 of 30"),
    ]


def test_a_party_is_called_by_its_name_and_asked_for_no_run_that_it_cannot_make(
    make_folder: MakeFolder,
) -> None:
    page = page_of(make_folder(nodes=1, **party(30)))
    assert "<h1>north</h1>" in page
    assert "Nothing to compare with" not in page
    assert "Nothing to compare with" in page_of(make_folder("alone"))


def test_nothing_of_a_party_is_called_that_of_all_nodes(make_folder: MakeFolder) -> None:
    page = page_of(make_folder(nodes=1, **party(30))).split("</style>")[1]
    assert "The party's own model after each evaluation" in html.unescape(page)
    assert "Verified ε of this party" in page
    for words in ("ean over the nodes", "ode mean", "every node", "their mean", "spent most"):
        assert words not in page, words
    assert "Disagreement between nodes" not in page


@pytest.mark.parametrize(
    "reason",
    [
        "interrupted at step 12 of 30",
        "interrupted: trained to the end, a has not confirmed the last messages",
        "privacy budget spent at step 12 of 30",
        "completed",  # whatever the text says: what was not handed over is not done
    ],
)
def test_a_part_of_a_federation_is_no_success(make_folder: MakeFolder, reason: str) -> None:
    changes = party(12, stopped_because=reason)
    page = page_of(make_folder(nodes=1, **changes))
    notice = re.findall(r'<li class="notice danger">.*?</li>', page)[0]
    assert "Not finished" in notice and "after round 12 of 30" in notice
    assert "not the result of the federation" in notice
    assert '<div class="headline bad"> <dt>Rounds</dt>' in page
    assert "Ended early" not in page  # said once, and more gravely


def test_one_that_was_never_heard_is_named(make_folder: MakeFolder) -> None:
    page = page_of(make_folder(nodes=1, **party(1, stopped_because="interrupted at step 1")))
    assert cells(page)[-4:] == ["west", "2", "over 2 edges", "none"]


def test_other_counts_per_party_have_columns_of_their_own(make_folder: MakeFolder) -> None:
    changes = party(30)
    for entry in changes["contributions"]:
        entry["gradients_skipped"] = 7
    page = page_of(make_folder(nodes=1, **changes))
    assert cells(page)[4] == "Gradients skipped" and cells(page)[-1] == "7"


def test_gradients_of_late_parties_are_told(make_folder: MakeFolder) -> None:
    """A party knows its own number and that of those it hears; of others it claims nothing."""
    changes = party(33, 33, steps=30, max_lag=3)
    for entry, count in zip(changes["contributions"], (30, 4, None), strict=True):
        entry["gradients"] = count
    page = page_of(make_folder(nodes=1, **changes))
    assert cells(page)[4] == "Gradients put in"
    assert cells(page)[9::5] == ["30 of 30", "4 of 30", "not told here"]
    assert "Gradients put in: south 4 of 30." in page and "Not everybody contributed" in page
    assert "Messages may be 3 rounds late" in page and "t + d - 1" not in page


def test_the_first_sentence_speaks_of_one_party(make_folder: MakeFolder) -> None:
    page = page_of(make_folder(nodes=1, **party(30)))
    (verdict,) = re.findall(r'<p class="verdict">(.*?)</p>', page)
    assert "the model of party north, one of 3, has accuracy" in verdict
    assert "nodes" not in verdict and "not finished" not in verdict
    page = page_of(make_folder("second", nodes=1, **party(12)))
    assert "The federation is not finished." in page


@pytest.mark.parametrize("short", [False, True])
def test_a_played_clock_says_how_often_each_node_contributed(
    make_folder: MakeFolder, short: bool
) -> None:
    counts = [30, 3 if short else 30]
    played = {"rounds": 30, "contributed": counts, "waiting_share": [0.1, 0.25]}
    page = page_of(make_folder(nodes=2, simulated=played))
    (table,) = re.findall(r'<table class="narrow gradients">(.*?)</table>', page)
    found = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", table)
    assert found[3:] == ["node 0", "30 of 30", "10 %", "node 1", f"{counts[1]} of 30", "25 %"]
    assert ("Gradients put in: node 1 3 of 30." in page) == short


@pytest.mark.parametrize("damaged", [1, {}, {"contributed": "x"}, {"contributed": [None, "x"]}])
def test_a_damaged_clock_does_not_cost_the_page(make_folder: MakeFolder, damaged: object) -> None:
    assert "contributed" not in page_of(make_folder(simulated=damaged)).split("</style>")[1]


@pytest.mark.parametrize("damaged", [None, "x", [1], {"party": 1}])
def test_damaged_contributions_do_not_cost_the_page(
    make_folder: MakeFolder, damaged: object
) -> None:
    page = page_of(make_folder(nodes=1, **party(30, contributions=damaged)))
    assert "contributions" not in page.split("</style>")[1]


def test_other_runs_have_no_such_part(make_folder: MakeFolder) -> None:
    page = page_of(make_folder())
    assert "Whose messages" not in page and "Not finished" not in page and "Worst node" in page


def test_the_closing_table_speaks_of_the_own_model(make_folder: MakeFolder) -> None:
    summary: dict[str, Any] = {
        **dict.fromkeys(("epsilon", "epsilon_claimed", "delta", "bytes_per_edge", "seconds"), 1.0),
        **dict.fromkeys(("bytes_sent_per_node", "accuracy_node_mean"), 0.5),
        "neighbouring_relation": "",
        "private": True,
        "stopped_because": "completed",
    }
    assert "accuracy, mean over nodes" in outcome_rows(summary)
    rows = outcome_rows({**summary, "party": "north"})
    assert rows["accuracy, own model"] == "50.00 %" and "accuracy, mean over nodes" not in rows
