"""Copies of a ledger count once, forks add up, older states are refused, and format 1 lives on."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path

import pytest

from dpcsgp.errors import ConfigError, LedgerError
from dpcsgp.privacy import LedgerHead, check_heads, ledger_heads
from dpcsgp.privacy.accounting import ReleaseEvent
from dpcsgp.privacy.ledger import (
    Fork,
    Ledger,
    LedgerBook,
    LedgerHeader,
    read_ledger,
    read_ledgers,
    releases_by_node,
)
from dpcsgp.privacy.ledger_format import GENESIS, encode_line

EVENT = ReleaseEvent("poisson", 2048 / 6000, 11.2)
OTHER = ReleaseEvent("uniform", 0.1, 30.0)
HEADER = LedgerHeader(run_id="9f3c", node=3, config="c0ffee", delta=1e-4, event=EVENT)
FORMAT_1 = Path(__file__).parent / "data" / "ledger-format-1.jsonl"


def started(folder: Path, releases: int) -> Path:
    """Start a ledger and return its folder."""
    with Ledger.create(folder / "node-0003.jsonl", HEADER) as ledger:
        for step in range(releases):
            ledger.record(step, 0, EVENT)
    return folder


def continued(folder: Path, releases: int, event: ReleaseEvent = EVENT) -> Path:
    """Go on with exactly the steps and attempts that every other copy goes on with."""
    with Ledger.open(folder / "node-0003.jsonl") as ledger:
        for step in range(releases):
            ledger.record(step, 1, event)
    return folder


def copied(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder, folder.with_name(name)))


def torn(folder: Path, num_bytes: int = 9) -> Path:
    path = folder / "node-0003.jsonl"
    path.write_bytes(path.read_bytes()[:-num_bytes])
    return folder


def counted(*folders: Path) -> int:
    """Return what the ledgers add up to, after checking that their order does not matter."""
    totals = {
        sum(ledger.count for ledger in read_ledgers(order))
        for order in itertools.permutations(folders)
    }
    assert len(totals) == 1
    return totals.pop()


def forks(*folders: Path) -> list[Fork]:
    return [fork for ledger in read_ledgers(folders) for fork in ledger.forks]


# Copies and forks


def test_two_copies_that_are_both_continued_add_up(tmp_path: Path) -> None:
    first = started(tmp_path / "a", 5)
    second = copied(first, "b")
    assert counted(first, second) == 5
    continued(first, 15)
    continued(second, 15)  # the same steps, attempt and event: only the name of the start differs
    assert counted(first, second) == 5 + 15 + 15
    (fork,) = forks(first, second)
    assert (fork.common, fork.own) == (5, 15)


def test_releases_of_each_kind_are_added(tmp_path: Path) -> None:
    first = started(tmp_path / "a", 2)
    second = continued(copied(first, "b"), 3, OTHER)
    continued(first, 4)
    (releases,) = releases_by_node(read_ledgers([first, second])).values()
    assert dict(releases) == {EVENT: 6, OTHER: 3}


def test_copies_and_copies_of_a_prefix_count_once(tmp_path: Path) -> None:
    first = started(tmp_path / "a", 2)
    early = copied(first, "early")
    continued(first, 3)
    late = copied(first, "late")
    continued(first, 1)
    assert counted(first, early, late) == 6
    assert forks(first, early, late, first) == []


def test_a_fork_of_a_fork(tmp_path: Path) -> None:
    trunk = started(tmp_path / "trunk", 4)
    branch = continued(copied(trunk, "branch"), 5)
    twig = continued(copied(branch, "twig"), 6)
    old_branch = copied(branch, "old-branch")
    continued(branch, 7)
    continued(trunk, 8)
    assert counted(trunk, branch, twig, old_branch) == 4 + 5 + 6 + 7 + 8
    assert len(forks(trunk, branch, twig, old_branch)) == 2


@pytest.mark.parametrize("seed", range(8))
def test_any_tree_of_copies_counts_what_was_recorded(tmp_path: Path, seed: int) -> None:
    dice, folders = random.Random(seed), [started(tmp_path / "0", 2)]
    recorded = 2
    for name in range(1, 7):
        if dice.random() < 0.6:
            folders.append(copied(dice.choice(folders), str(name)))
        else:
            releases = dice.randrange(1, 4)
            continued(dice.choice(folders), releases, dice.choice([EVENT, OTHER]))
            recorded += releases
    # Lost is only what no folder has: nothing, as copying never takes a folder away.
    assert sum(ledger.count for ledger in read_ledgers(folders)) == recorded


def test_a_ledger_that_was_started_again_is_added(tmp_path: Path) -> None:
    first, second = started(tmp_path / "a", 3), started(tmp_path / "b", 3)
    assert counted(first, second) == 6


def test_a_torn_line_is_the_same_release_in_all_copies(tmp_path: Path) -> None:
    whole = started(tmp_path / "whole", 4)
    cut = torn(copied(whole, "cut"))  # copied while the last line was being written
    shorter = torn(copied(whole, "shorter"), 30)
    repaired = continued(copied(cut, "repaired"), 2)
    assert counted(whole, cut, shorter) == 4
    assert counted(cut, repaired) == 6
    assert forks(whole, cut, shorter) == forks(cut, repaired) == []


def test_a_torn_line_of_another_start_is_added(tmp_path: Path) -> None:
    first = started(tmp_path / "a", 4)
    second = torn(continued(copied(first, "b"), 1))
    continued(first, 2)
    assert counted(first, second) == 4 + 2 + 1
    third = torn(continued(copied(first, "c"), 1))
    fourth = torn(continued(copied(first, "d"), 1))
    assert counted(third, fourth) == 6 + 1 + 1


def test_every_start_has_a_name_of_its_own(tmp_path: Path) -> None:
    folder = continued(continued(started(tmp_path / "a", 2), 1), 1)
    lines = (folder / "node-0003.jsonl").read_text().splitlines()
    header, *names = [json.loads(line)["start"] for line in lines]
    assert names[0] == names[1] == header
    assert len(set(names)) == 3
    assert all(len(name) == 16 for name in names)


# Heads that were written down elsewhere


def test_a_ledger_that_was_taken_back_is_refused(tmp_path: Path) -> None:
    folder = started(tmp_path / "a", 3)
    backup = copied(folder, "backup")
    continued(folder, 2)
    heads = ledger_heads(folder)
    assert [(head.node, head.count, head.run_id) for head in heads] == [(3, 5, "9f3c")]
    check_heads(continued(folder, 1), heads)  # longer is fine
    check_heads(folder, ledger_heads(backup))
    with pytest.raises(LedgerError, match=r"node 3: .* \(5 releases.*has 3 releases.*older copy"):
        check_heads(backup, heads)
    continued(backup, 9)  # as long as you like: it is another continuation
    with pytest.raises(LedgerError, match="Restore the newest copy"):
        check_heads(backup, heads)
    with pytest.raises(LedgerError, match="expected head"):
        read_ledgers(backup, heads)
    assert read_ledgers([backup, folder], heads)[0].forks  # one of them contains it


def test_a_foreign_or_missing_ledger_is_refused(tmp_path: Path) -> None:
    heads = ledger_heads(started(tmp_path / "a", 3))
    with pytest.raises(LedgerError, match=r"has 3 releases.*another run"):
        check_heads(started(tmp_path / "b", 3), heads)
    LedgerBook(tmp_path / "c", [0], "9f3c").close()
    with pytest.raises(LedgerError, match="there is no ledger of this node"):
        check_heads(tmp_path / "c", heads)


def test_a_head_is_a_word_that_can_be_copied(tmp_path: Path) -> None:
    (head,) = ledger_heads(torn(started(tmp_path / "a", 3)))
    assert head.count == 2  # a torn record has no checksum yet
    check_heads(continued(tmp_path / "a", 1), [LedgerHead.parse(str(head))])
    for word in ("", "3", "3:2", "3:2:abc", f"x:2:{head.head}", f"3:-1:{head.head}", f"{head} "):
        with pytest.raises(ConfigError, match="expected NODE:COUNT:HEAD"):
            LedgerHead.parse(word)


# Format 1, as the releases before wrote it


def old_ledger(folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(FORMAT_1, folder / "node-0003.jsonl")
    return folder


def test_a_ledger_of_format_1_is_read_and_continued(tmp_path: Path) -> None:
    folder = old_ledger(tmp_path / "a")
    contents = read_ledger(folder / "node-0003.jsonl")
    assert (contents.header, contents.count, contents.last_attempt) == (HEADER, 4, 1)
    head = contents.head
    torn(continued(folder, 2))
    with Ledger.open(folder / "node-0003.jsonl") as ledger:
        ledger.check_against(head, 4)
        ledger.record(6, 2, EVENT)
        assert ledger.count == 7
    assert read_ledger(folder / "node-0003.jsonl").continues(head, 4)


def test_copies_of_format_1_fork_when_they_are_continued(tmp_path: Path) -> None:
    first, second = old_ledger(tmp_path / "a"), old_ledger(tmp_path / "b")
    assert counted(first, second) == 4
    continued(first, 3)
    assert counted(first, second) == 7
    continued(second, 3)
    assert counted(first, second) == 10


@pytest.mark.parametrize("start", [None, 5, "", "5d1e"])
@pytest.mark.parametrize("line", [0, 1])
def test_every_line_of_format_2_names_its_start(tmp_path: Path, line: int, start: object) -> None:
    records = [HEADER.as_record("5d1e" * 4), *[release(step, "5d1e" * 4) for step in range(3)]]
    write(tmp_path / "good.jsonl", records)
    assert read_ledger(tmp_path / "good.jsonl").count == 3
    records[line]["start"] = start
    write(tmp_path / "bad.jsonl", records)
    with pytest.raises(LedgerError, match=f"line {line + 1}: the name of its start is missing"):
        read_ledger(tmp_path / "bad.jsonl")


def release(step: int, start: str) -> dict[str, object]:
    event = {"sampling": "poisson", "sampling_rate": 0.5, "noise_multiplier": 2.0}
    return {"kind": "release", "start": start, "step": step, "attempt": 0, **event}


def write(path: Path, records: list[dict[str, object]]) -> None:
    """Write lines with the right checksums, whatever they say."""
    prev, body = GENESIS, b""
    for record in records:
        line, prev = encode_line(record, prev)
        body += line
    path.write_bytes(body)
