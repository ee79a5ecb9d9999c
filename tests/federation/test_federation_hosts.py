"""Five parties on five hosts with a bad network between them end as `dpcsgp run` does."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hosts import Hosts, Weather, hosts
from running import DIGITS, Running, check_twin, make_federation, running

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
