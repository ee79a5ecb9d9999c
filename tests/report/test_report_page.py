"""The page: tells what the files say, and warns where a number must not be believed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dpcsgp.errors import ConfigError
from dpcsgp.report import write_report
from dpcsgp.report.folders import read_many
from dpcsgp.report.notices import notices
from dpcsgp.report.page_tables import account, comparison, differing_settings

MakeFolder = Callable[..., Path]


class Page(HTMLParser):
    """The parts of a page that tests look at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def titles(folders: list[Path]) -> list[tuple[str, str]]:
    return [(notice.severity, notice.title) for notice in notices(read_many(folders))]


def test_one_run_has_its_headlines_figures_and_account(make_folder: MakeFolder) -> None:
    folder = make_folder()
    path = write_report([folder])
    assert path == folder / "report.html"
    page = Page(path)
    for words in (
        "89.1 %",
        "87.3 %",
        "0.499",
        "δ = 1e-4",
        "add or remove one example of one node",
        "0.41 MB",
        "Private yes",
    ):
        assert words in page.text
    assert page.source.count('<div class="chart">') == 5
    assert "4.321" in page.text  # noise multiplier, in the account of the nodes
    assert "sortable" not in re.sub(r"<(style|script)>.*?</\1>", "", page.source, flags=re.DOTALL)


@pytest.fixture(scope="module")
def page_of_four(four_folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(write_report(four_folders, tmp_path_factory.mktemp("page") / "new" / "four.html"))


def test_many_runs_are_compared(page_of_four: Page) -> None:
    page = page_of_four
    assert "4 runs compared" in page.text
    assert "Best accuracy, node mean 89.4 % exact" in page.text
    assert "346" in page.text
    assert "3 of 4" in page.text
    for warning in (
        "Not private: seeded noise",
        "Less private than claimed",
        "3 of 4 runs are private",
    ):
        assert warning in page.text
    assert "Theorem not satisfied" not in page.text
    assert page.source.count('data-run="') == 4
    assert 'id="differing"' in page.source


def test_the_page_is_self_contained_and_well_formed(page_of_four: Page) -> None:
    page = page_of_four
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert not re.search(r"@import|url\((?!#)|<metadata|<!DOCTYPE svg", page.source)
    assert len(set(page.ids)) == len(page.ids)
    assert set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", page.source)) <= set(page.ids)
    assert not {"#010101", "#020202"} & set(re.findall(r"#[0-9a-f]{6}", page.source))


def test_the_same_folders_give_the_same_page(
    four_folders: list[Path], page_of_four: Page, tmp_path: Path
) -> None:
    assert (
        write_report(four_folders, tmp_path / "again.html").read_text(encoding="utf-8")
        == page_of_four.source
    )


def test_text_is_escaped(make_folder: MakeFolder, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    folders = [
        make_folder("a", stopped_because=evil, task=evil, graph=evil),
        make_folder('<b>"$x^2$'),
    ]
    page = Page(write_report(folders, tmp_path / "page.html"))
    assert page.tags.count("script") == 1
    assert evil in page.text
    assert '<b>"$x^2$' not in page.source


def test_where_the_page_goes(
    make_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [make_folder("a"), make_folder("b")]
    monkeypatch.chdir(tmp_path)
    assert write_report(folders) == Path("report.html")
    assert (tmp_path / "report.html").exists()
    with pytest.raises(ConfigError, match="is a folder"):
        write_report(folders, tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(folders, folders[0] / "summary.json" / "page.html")
    with pytest.raises(ConfigError, match="no results folder"):
        write_report([])


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"seeded": True, "private": False}, ("danger", "Not private: seeded noise")),
        ({"epsilon": math.inf, "private": False}, ("danger", "Not private: no meaningful noise")),
        ({"epsilon": 20.3, "private": False}, ("danger", "Less private than claimed")),
        ({"private": False}, ("danger", "Not private")),
        ({"stopped_because": "diverged: step 12, node 3"}, ("danger", "Diverged")),
        ({"stopped_because": "interrupted at step 3 of 30"}, ("caution", "Ended early")),
        ({"stopped_because": "privacy budget spent at step 3 of 30"}, ("caution", "Ended early")),
        ({"mixing_radius": 1.08}, ("caution", "Gossip is not stable")),
        ({"stopped_because": "finished early at step 3 of 30"}, ("hint", "Ended early")),
    ],
)
def test_each_reason_for_doubt_is_said(
    make_folder: MakeFolder, changes: dict[str, Any], warning: tuple[str, str]
) -> None:
    assert titles([make_folder(**changes)]) == [warning, ("hint", "Nothing to compare with")]


def test_a_sound_run_beside_its_control_is_not_warned_about(make_folder: MakeFolder) -> None:
    runs = [make_folder("a", mixing_radius="nan", theorem_satisfied=True)]
    runs.append(make_folder("b", algorithm="local", bytes_per_step=0))
    assert titles(runs) == [("hint", "Privacy adds up over runs")]
    assert "ε = 0.998, δ = 2e-4" in notices(read_many(runs))[0].text


def test_a_control_on_other_data_is_none(make_folder: MakeFolder) -> None:
    runs = [
        make_folder("a"),
        make_folder("b", algorithm="local", bytes_per_step=0, partition="shards:2"),
    ]
    assert ("hint", "Nothing to compare with") in titles(runs)


def test_costs_are_not_summed_over_different_relations_or_seeds(make_folder: MakeFolder) -> None:
    runs = [make_folder("a"), make_folder("b", neighbouring_relation="replace one example")]
    assert "their costs add up" in notices(read_many(runs))[-1].text
    runs = [make_folder("c"), make_folder("d", seeded=True, private=False)]
    assert ("hint", "Privacy adds up over runs") not in titles(runs)


def test_missing_optional_values_are_dashes(make_folder: MakeFolder) -> None:
    folder = make_folder()
    (folder / "summary.json").write_text('{"algorithm": "dp-csgp", "private": true}')
    rows = [{"step": step, "accuracy_node_mean": 0.1 * step} for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_report([folder]))
    assert "Accuracy, node mean 20.0 %" in page.text
    assert "Worst node –" in page.text
    assert "Verified ε –" in page.text


@pytest.mark.parametrize(
    "shape", ["one row", "diverged", "no noise", "loss", "many nodes", "one node"]
)
@pytest.mark.filterwarnings("error")
def test_unusual_runs_are_drawn(make_folder: MakeFolder, shape: str) -> None:
    folder = make_folder(
        nodes={"many nodes": 200, "one node": 1}.get(shape, 4),
        bytes_per_step=0 if shape == "one node" else 99,
    )
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    rows = [json.loads(line) for line in (lines[-1:] if shape == "one row" else lines)]
    if shape == "diverged":
        rows[-1] |= {
            "accuracy_nodes": ["nan"] * 4,
            "accuracy_node_mean": "nan",
            "disagreement": "inf",
        }
    if shape == "no noise":
        rows = [row | {"epsilon_nodes": ["inf"] * 4} for row in rows]
    if shape == "one node":
        rows = [row | {"disagreement": 0.0} for row in rows]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text.replace("accuracy_", "loss_") if shape == "loss" else text)
    page = Page(write_report([folder]))
    assert page.source.count("<figcaption>") == 5
    missing = {
        "no noise": "No run has a finite ε",
        "one node": "No message was sent",
        "loss": "Loss, node mean",
    }
    assert missing.get(shape, "Accuracy, node mean") in page.text


def test_sorting_values_are_numbers_even_where_text_is_rounded(four_folders: list[Path]) -> None:
    table = comparison(read_many(four_folders), "accuracy")
    cells = {
        title: [row[column] for row in table.rows] for column, title in enumerate(table.columns)
    }
    assert [cell.text for cell in cells["MB per edge"]] == ["0.41", "12.2", "0", "9.15"]
    assert cells["MB per edge"][0].order == 13_667 * 30 / 1e6
    assert cells["Disagreement"][2] == type(cells["Disagreement"][2])("–", None, numeric=True)


def test_every_node_is_accounted_for(make_folder: MakeFolder) -> None:
    (run,) = read_many([make_folder(nodes=3, releases=[30, 20, 10], noise_multiplier=2.0)])
    table = account(run, "accuracy")
    assert [row[1].text for row in table.rows] == ["30", "20", "10"]
    assert {row[3].text for row in table.rows} == {"2"}
    assert [row[0].text for row in table.rows] == ["0", "1", "2"]


def test_only_differing_settings_are_listed(four_folders: list[Path]) -> None:
    differing = differing_settings(read_many(four_folders))
    assert list(differing) == ["algorithm.name", "compression.spec"]
    assert differing["compression.spec"] == ["rot:1", "none", "none", "rand:0.75"]
