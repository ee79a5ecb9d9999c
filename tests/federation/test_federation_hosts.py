"""Five parties on five hosts with a bad network between them end as `dpcsgp run` does."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hosts import Hosts, Weather, can_call, hosts
from running import DIGITS, Running, check_twin, make_federation, running

from dpcsgp.errors import ConfigError
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


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_five_hosts_end_as_the_simulator_does_whatever_the_network_does(tmp_path: Path) -> None:
    plan = PLAN.replace("steps = 20", "steps = 400")  # more than 20 kills take
    with hosts(5) as made:
        made.weather = Weather(delay=0.1, spread=0.05, loss=0.05)
        roster = make_federation(tmp_path, 5, plan, addresses=addresses(made))
        with running(tmp_path, 5, hosts=made.names, quick=False) as parties:
            parties.start(0, 1, 2, 3)
            time.sleep(120)
            assert parties.status(3)["waiting_for"] == ["lab-4"]
            parties.start(4)
            parties.until_step(0, 5, seconds=180)
            cut_off(made, parties, 60.0, frozenset({1, 2}))
            assert parties.kill_at_random(20, random.Random(2), pauses=(0.5, 8.0)) == 20
            parties.wait(seconds=900)
        assert made.counts["lost"] > 0.03 * made.counts["forwarded"]
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


@pytest.mark.slow
def test_two_parties_that_nobody_can_call_take_part_as_the_refusal_proposes(
    tmp_path: Path,
) -> None:
    with hosts(5) as made:
        made.weather.closed = frozenset({1, 3})
        reached = [None if host in (1, 3) else made.address(host) for host in range(5)]
        plan = DIGITS.replace("directed_ring", "directed_exponential")
        with pytest.raises(ConfigError, match="lab-1 -> lab-3") as refused:
            make_federation(tmp_path, 5, plan, addresses=reached)
        # The proposal is followed to the letter.
        _, words, lines = str(refused.value).partition("edges.txt:\n")
        assert words, str(refused.value)
        (tmp_path / "edges.txt").write_text(lines, encoding="utf-8")
        listed = f'name = "edges"\nedges_file = "{tmp_path / "edges.txt"}"'
        plan = DIGITS.replace('name = "directed_ring"', listed)
        roster = make_federation(tmp_path, 5, plan, addresses=reached)
        with running(tmp_path, 5, hosts=made.names) as parties:
            parties.start(0)
            parties.until_step(0, 0)
            assert not can_call(made.names[0], made.address(1)) and made.counts["refused"] > 0
            assert can_call(made.names[1], made.address(0))
            parties.start(1, 2, 3, 4)
            parties.wait()
    check_twin(tmp_path, roster)
