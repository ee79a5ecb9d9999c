"""What holds between versions of a roster: frames do not cross, lost releases are counted once."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from parties import federation, open_network

from dpcsgp.algorithms.error_feedback import PublicCopies
from dpcsgp.errors import WaitStoppedError, WireError
from dpcsgp.federation.archive import Archive, Ended
from dpcsgp.federation.journal import Holding, Journal
from dpcsgp.federation.peers import Peer
from dpcsgp.graphs import directed_ring
from dpcsgp.network import Simulator
from dpcsgp.privacy import ReleaseEvent, composed_epsilon, read_ledgers
from dpcsgp.privacy.accounting import calibrate_noise
from dpcsgp.privacy.ledger import LedgerBook

OLD, NEW = bytes(32), bytes(range(32))
EVENT = ReleaseEvent("poisson", 0.3, 2.0)


def test_frames_of_one_version_are_none_of_the_next(tmp_path: Path) -> None:
    """Their chains begin with the roster: a replayed frame fails its digest."""
    sent = Journal(tmp_path / "sender", OLD, 1, [], [])
    sent.release(0, b"frame")
    chain = sent.own_chain(1)
    assert chain is not None
    Journal(tmp_path / "old", OLD, 0, [1], []).receive(1, 0, b"frame", chain)
    with pytest.raises(WireError, match="digest does not match"):
        Journal(tmp_path / "new", NEW, 0, [1], []).receive(1, 0, b"frame", chain)


def test_own_frames_after_the_end_of_a_version_are_owed_to_nobody(tmp_path: Path) -> None:
    peer = Peer(1, "bert", b"", None)
    journal = Journal(tmp_path, OLD, 0, [], [peer], end=2)
    for round_ in range(3):  # the third was under way when the next version came
        journal.release(round_, b"frame")
    assert journal.released == 2
    for rounds, lacking in ((1, [peer]), (2, [])):
        chain = journal.own_chain(rounds)
        assert chain is not None
        journal.hear_holding(1, Holding(rounds, chain))
        assert journal.unacknowledged() == lacking


def test_an_older_version_still_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """anna has gone on: bert gets her old frame all the same, and is told where it ended."""
    ring = directed_ring(2)
    selves, peers = federation(2)
    old = Journal(tmp_path / "old", OLD, 0, [1], [peers[1]])
    old.release(0, b"x" * 100)
    old.close()
    ended = Ended("version 2 took effect", 1)
    archive = Archive(
        0, peers, ring, OLD, tmp_path / "old", lambda round_: 0 if round_ else 100, ended
    )
    anna = open_network(
        selves[0], peers, ring, tmp_path / "new", 100, roster_digest=NEW, archives=[archive]
    )
    bert = open_network(selves[1], peers, ring, tmp_path / "bert", 100, roster_digest=OLD)
    try:
        frame_NB = torch.zeros(1, 100, dtype=torch.uint8)
        assert bytes(bert.exchange(frame_NB)[0].tolist()) == b"x" * 100
        threading.Timer(2.0, bert.stop).start()  # she is alive: patience would not end it
        with pytest.raises(WaitStoppedError):
            bert.exchange(frame_NB)
        assert "in round 1: version 2 took effect" in caplog.text
    finally:
        bert.close()
        anna.close()


def test_lost_releases_are_written_once_and_count(tmp_path: Path) -> None:
    def opened() -> LedgerBook:
        return LedgerBook(tmp_path, [1], "run", deltas=[1e-3], events=[EVENT], begun_as=[4])

    book = opened()
    for step in (0, 1):
        book.record(step, 0, {1: EVENT})
    book.close()
    louder = ReleaseEvent("poisson", 0.3, 1.0)
    for added in (3, 0):  # a crash in between means to do it again
        book = opened()
        assert book.record_lost(1, dict.fromkeys(range(5), louder)) == added
        assert book.next_attempt() == 2
        book.close()
    (ledger,) = read_ledgers(tmp_path)
    assert ledger.header.node == 4 and ledger.releases() == [(EVENT, 2), (louder, 3)]
    lines = [json.loads(line) for line in (tmp_path / "node-0004.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("lost")] == [2, 3, 4]


def test_noise_pays_for_what_was_spent() -> None:
    fresh = calibrate_noise(epsilon=2.0, delta=1e-4, sampling_rate=0.3, steps=20)
    spent = [(ReleaseEvent("poisson", 0.3, 2 * fresh), 10)]
    noise = calibrate_noise(epsilon=2.0, delta=1e-4, sampling_rate=0.3, steps=20, spent=spent)
    assert noise > fresh
    event = ReleaseEvent("poisson", 0.3, noise)
    assert 0.998 * 2.0 < composed_epsilon([*spent, (event, 20)], 1e-4) <= 2.0
    # A plan that goes on as it was has the noise that it had.
    spent = [(ReleaseEvent("poisson", 0.3, fresh), 5)]
    again = calibrate_noise(epsilon=2.0, delta=1e-4, sampling_rate=0.3, steps=15, spent=spent)
    assert again == fresh


def test_copies_that_were_told_in_full_are_those_of_gossip() -> None:
    """What nodes pull towards is the weighted mean of the copies, minus the own one."""
    network, x_ND = Simulator(directed_ring(3)), torch.randn(3, 5)
    copies = PublicCopies.heard(x_ND, network)
    assert torch.equal(copies.x_hat_ND, x_ND)
    torch.testing.assert_close(copies.pull_ND, network.mix(x_ND) - x_ND.double())
