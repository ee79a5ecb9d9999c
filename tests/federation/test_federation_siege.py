"""A federation at work under attack: nobody gets in, memory is bounded, the bits are the same."""

from __future__ import annotations

import os
import random
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from parties import certificate
from raw_caller import RawCaller, framed
from running import DIGITS, Running, check_twin, make_federation, running

from dpcsgp.federation import transport_messages as messages
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.party_run import peers_of
from dpcsgp.federation.roster import Roster

PLAN = DIGITS.replace("[run]", "[run]\nevaluate_every = 1")
TARGET = 1  # lab-0 sends to lab-1, which sends to lab-2: a ring


@dataclass
class Siege:
    """Attacks on one party, each in a thread of its own until the siege ends.

    Attributes:
        root: of the federation; attackers have stolen what a test gives them.
        roster: of the federation.
        ended: set when the attackers are to leave.
        outcomes: what came of each kind of attack.
    """

    root: Path
    roster: Roster
    ended: threading.Event = field(default_factory=threading.Event)
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = (self.roster.parties[TARGET].address or "").rpartition(":")
        return host, int(port)

    def key_of(self, node: int) -> tuple[bytes, bytes]:
        folder = PartyFolder.open(self.root / f"lab-{node}")
        return folder.key_pem(), folder.card.certificate_pem.encode()

    def call(self, kind: str, identity: Any, node: int, method: str, *said: bytes) -> None:
        """Call once, say something, and note how the call was ended."""
        with RawCaller(peers_of(self.roster)[TARGET], method, node, identity) as caller:
            code, _ = caller.say(*said).refusal()
            self.outcomes[f"{kind}: {code.name}"] += 1

    def hello(self, node: int, **changes: Any) -> bytes:
        facts = messages.Facts.now(bytes.fromhex(self.roster.fingerprint), node, TARGET)
        return messages.hello(messages.Facts(**{**vars(facts), **changes}))

    def strangers(self) -> None:
        self.call("nobody", None, 0, "push", self.hello(0))
        self.call("unknown", certificate("lab-0"), 0, "push", self.hello(0))

    def members(self) -> None:
        """A member on an edge that it has not, in another's name, and with an old roster."""
        lab_2 = self.key_of(2)
        self.call("wrong edge", lab_2, 2, "push", self.hello(2))
        self.call("another's name", lab_2, 0, "hello", self.hello(0))
        self.call("old roster", lab_2, 2, "hello", self.hello(2, roster="00" * 32))

    def thief(self) -> None:
        """Somebody with the key of lab-0 replays and invents frames; lab-0 gets its line back."""
        wrong = [framed(0, bytes(134), bytes(32)), b"f" + os.urandom(200), os.urandom(50)]
        self.call("thief", self.key_of(0), 0, "push", self.hello(0), random.choice(wrong))
        self.ended.wait(1.0)

    def old_tls(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        with suppress(OSError), socket.create_connection(self.address, 5) as connection:
            context.wrap_socket(connection)
            self.outcomes["old TLS: accepted"] += 1
        self.ended.wait(0.2)

    def endless(self) -> None:
        """A stream of noise without end, and one that comes byte by byte."""
        with suppress(OSError), socket.create_connection(self.address, 5) as connection:
            while not self.ended.is_set():
                connection.sendall(os.urandom(2**16))
        with suppress(OSError), socket.create_connection(self.address, 5) as connection:
            for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500):
                connection.sendall(bytes([byte]))
                if self.ended.wait(0.1):
                    break

    def idle(self) -> None:
        held = []
        with suppress(OSError):
            held += [socket.create_connection(self.address, 5) for _ in range(200)]
        self.ended.wait(5.0)
        for connection in held:
            connection.close()

    def keep(self, attack: Callable[[], None]) -> threading.Thread:
        """Repeat an attack until the siege ends."""

        def repeat() -> None:
            while not self.ended.is_set():
                with suppress(grpc.RpcError, StopIteration):
                    attack()
                self.ended.wait(0.05)

        thread = threading.Thread(target=repeat, name=attack.__name__)
        thread.start()
        return thread


def peak_memory(parties: Running, node: int) -> int:
    """Return the most memory that a party has had, in MB (Linux)."""
    lines = Path(f"/proc/{parties.processes[node].pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc")
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
@pytest.mark.parametrize(
    ("pause", "steps"),
    [
        pytest.param(0.2, 40, marks=pytest.mark.slow),
        pytest.param(0.5, 240, marks=[pytest.mark.stress, pytest.mark.timeout(900)]),
    ],
)
def test_a_siege_changes_nothing(tmp_path: Path, pause: float, steps: int) -> None:
    plan = PLAN.replace("steps = 12", f"steps = {steps}")
    roster = make_federation(tmp_path, 3, plan)
    siege = Siege(tmp_path, roster)
    attacks = (siege.strangers, siege.members, siege.thief, siege.old_tls, siege.endless)
    with running(tmp_path, 3, pause=pause, quick=False) as parties:
        parties.start()
        parties.until_step(TARGET, 2)
        attackers = [siege.keep(attack) for attack in (*attacks, siege.idle)]
        before = peak_memory(parties, TARGET)
        try:
            parties.until_step(TARGET, steps - 2, seconds=60 + 2 * pause * steps)
            grown = peak_memory(parties, TARGET) - before
        finally:
            siege.ended.set()
            for attacker in attackers:
                attacker.join()
        parties.wait()
    check_twin(tmp_path, roster)
    assert grown < 64, f"{grown} MB more"
    accepted = {kind for kind in siege.outcomes if kind.endswith(("OK", "accepted"))}
    assert not accepted, siege.outcomes
    met = {kind.partition(":")[0] for kind in siege.outcomes}
    assert met >= {"nobody", "unknown", "wrong edge", "another's name", "old roster", "thief"}
    assert sum(siege.outcomes.values()) > steps, time.monotonic()
