"""Five parties on five hosts with a bad network between them end as `dpcsgp run` does."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hosts import Hosts, hosts
from running import DIGITS, Running, check_twin, make_federation, running

from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.transport_grpc import der_of

PLAN = (
    DIGITS.replace("[run]", "[run]\nevaluate_every = 1")
    .replace("steps = 12", "steps = 20")
    .replace("directed_ring", "directed_exponential")
)


def addresses(made: Hosts) -> list[str | None]:
    return [made.address(host) for host in range(len(made.names))]


def cut_off(made: Hosts, parties: Running, seconds: float, apart: frozenset[int]) -> None:
    """Part the network for a while; nobody ends, and everybody waits in the end."""
    before, made.weather.apart = made.counts["cut off"], apart
    time.sleep(seconds)
    assert made.counts["cut off"] > before
    assert all(process.exitcode is None for process in parties.processes.values())
    made.weather.apart = frozenset()


@pytest.mark.slow
def test_five_hosts_end_as_the_simulator_does_after_kills_and_a_partition(tmp_path: Path) -> None:
    with hosts(5) as made:
        roster = make_federation(tmp_path, 5, PLAN, addresses=addresses(made))
        with running(tmp_path, 5, pause=0.1, hosts=made.names) as parties:
            parties.start()
            parties.until_step(0, 2)
            assert parties.kill_at_random(3, random.Random(1)) == 3
            cut_off(made, parties, 6.0, frozenset({0, 3}))
            parties.wait()
    check_twin(tmp_path, roster)


@pytest.mark.slow
def test_who_listens_in_sees_no_payload_and_no_name(tmp_path: Path) -> None:
    with hosts(3) as made:
        made.listening = True
        roster = make_federation(tmp_path, 3, addresses=addresses(made))
        with running(tmp_path, 3, hosts=made.names) as parties:
            parties.start()
            parties.wait()
    seen = b"".join(bytes(stream) for stream in made.heard.values())
    taps = [(tmp_path / f"tap-{node}").read_text().splitlines() for node in range(3)]
    samples = {bytes.fromhex(json.loads(line)[3]) for lines in taps for line in lines}
    assert len(seen) > 30_000 and len(samples) == 3 * 14
    names = ["lab-", "dpcsgp", "digits", "logistic", "rot:1", "steps", "learning_rate", "roster"]
    secrets = [*samples, *(name.encode() for name in names)]
    secrets += [roster.fingerprint.encode(), bytes.fromhex(roster.fingerprint)]
    certificate = PartyFolder.open(tmp_path / "lab-0").card.certificate_pem.encode()
    secrets += [der_of(certificate, "lab-0")[40:70]]
    assert not [secret for secret in secrets if secret in seen]
