"""Shared noise cancels as integers, hides as its law says, and no stream meets two sums."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant
from pairs import joined, law_of
from torch import Tensor

from dpcsgp.config import load_config
from dpcsgp.errors import ConfigError, PrivateStepError, WireError
from dpcsgp.privacy import GaussianMechanism, composed_epsilon, effective_noise_multipliers
from dpcsgp.privacy.accounting import epsilon_against
from dpcsgp.privacy.ledger import Ledger, LedgerHeader
from dpcsgp.privacy.noise import SENSITIVITY_SLACK
from dpcsgp.privacy.pair_noise import PairNoise, participation
from dpcsgp.privacy.shared_noise import SharedNoise, calibrate_shared_noise
from dpcsgp.randomness import PairStreams, PrivateRandomness
from dpcsgp.runtime import process_agreement

DIM = 300


def counts_of_all(parts: list[PairNoise], step: int, dim: int = DIM) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for part in parts:
        found |= dict(zip(part.nodes, part.counts(step, dim), strict=True))
    return found


@pytest.mark.parametrize("hosting", [[[0, 1, 2, 3]], [[0, 2], [1], [3]]])
def test_shared_noise_cancels_exactly_over_all_nodes_and_over_no_subset(
    hosting: list[list[int]],
) -> None:
    parts = joined(law_of(4), hosting)
    for step in range(3):
        counts = counts_of_all(parts, step)
        assert not np.sum(list(counts.values()), axis=0).any()
        for size in (1, 2, 3):
            for subset in itertools.combinations(range(4), size):
                left = np.sum([counts[node] for node in subset], axis=0)
                # what pairs with outsiders share is still there: size (4 - size) streams
                wanted = parts[0].scale(DIM) * math.sqrt(size * (4 - size))
                assert np.std(left) == pytest.approx(wanted, rel=0.25)


def mechanism_of(part: PairNoise, sizes: list[int]) -> GaussianMechanism:
    law = part.law
    noise = tuple(law.event(node).noise_multiplier for node in part.nodes)
    return GaussianMechanism(
        law.clip_norm, noise, tuple(sizes), (1000,) * len(sizes), shared=law, pairs=part
    )


def test_releases_add_up_to_sums_and_own_noise_bit_for_bit() -> None:
    """Unequal batches and weights; as integers on the common grid, nothing else is left."""
    sizes, weights = [10, 40, 25, 7], [0.5, 1.5, 1.25, 0.75]
    factors = [weight / size for weight, size in zip(weights, sizes, strict=True)]
    law = law_of(4, own=[0.02, 0.03, 0.04, 0.05], shared=0.07, factors=factors)
    random = PrivateRandomness.fresh(range(4))
    part = joined(law, [range(4)], randoms=[random])[0]
    mechanism = mechanism_of(part, sizes)
    sums_ND = torch.randn(4, DIM, dtype=torch.float64)
    grid = law.grid(DIM)
    with_pairs, alone = torch.zeros(4, DIM), torch.zeros(4, DIM)
    counts_ND = part.counts(2, DIM)
    for row, target in itertools.product(range(4), (with_pairs, alone)):
        exact_D = sums_ND[row].clone()
        used = counts_ND[row] if target is with_pairs else np.zeros_like(counts_ND[row])
        mechanism._add_own_and_shared_(exact_D, used, 2, random, row)
        whole_D = exact_D / grid
        assert torch.equal(whole_D, whole_D.round())
        target[row] = 0
        target.data = target.double().data
        target[row] = whole_D
    assert torch.equal(with_pairs.sum(0), alone.sum(0))
    assert not torch.equal(with_pairs[:3].sum(0), alone[:3].sum(0))


def released(mechanism: GaussianMechanism, step: int, random: PrivateRandomness) -> Tensor:
    num_nodes = len(mechanism.num_examples)
    return mechanism.release(
        lambda indices, present: torch.zeros(num_nodes, DIM), step, random, [True] * num_nodes
    )


def test_releases_have_the_covariance_of_the_law() -> None:
    law = law_of(5, own=[0.3, 0.4, 0.5, 0.6, 0.7], shared=0.8, factors=[1, 0.5, 0.25, 1, 2])
    random = PrivateRandomness.fresh(range(5))
    part = joined(law, [range(5)], randoms=[random], steps=200)[0]
    mechanism = mechanism_of(part, [1, 2, 4, 1, 1])
    values = torch.cat([released(mechanism, step, random) for step in range(200)], 1).double()
    found = (values @ values.T / values.shape[1]).numpy()
    laplacian = 5 * np.eye(5) - 1
    wanted = np.diag(np.square(law.own)) + law.shared**2 * laplacian
    wanted *= (1 + SENSITIVITY_SLACK) ** 2
    error = 5 * math.sqrt(2 / values.shape[1])
    spread = np.sqrt(np.outer(np.diag(wanted), np.diag(wanted)))
    assert (np.abs(found - wanted) < error * spread).all()


def test_the_sum_of_all_releases_has_the_own_noises_alone_and_every_sum_its_factor() -> None:
    law = law_of(4, own=[0.3, 0.4, 0.5, 0.6], shared=3.0, factors=[0.5, 0.25, 1.0, 2.0])
    random = PrivateRandomness.fresh(range(4))
    part = joined(law, [range(4)], randoms=[random], steps=100)[0]
    mechanism = mechanism_of(part, [2, 4, 1, 1])
    sums_ND = torch.tensor([8.0, -40.0, 3.0, 5.0])[:, None].expand(4, DIM)
    found = [
        mechanism.release(lambda indices, present: sums_ND, step, random, [True] * 4)
        for step in range(100)
    ]
    total = torch.cat(found, 1).double().sum(0)
    wanted = math.sqrt(sum(own**2 for own in law.own)) * (1 + SENSITIVITY_SLACK)
    assert float(total.std()) == pytest.approx(wanted, rel=5 / math.sqrt(2 * total.numel()))
    # each node's sum counts with its own public factor
    error = 5 * wanted / math.sqrt(total.numel())
    assert float(total.mean()) == pytest.approx(4.0 - 10.0 + 3.0 + 10.0, abs=error)
    means = torch.cat(found, 1).double().mean(1).tolist()
    for mean, centre in zip(means, [4.0, -10.0, 3.0, 10.0], strict=True):
        assert mean == pytest.approx(centre, abs=25 / math.sqrt(total.numel()))


def test_an_event_states_the_law_and_its_eps_is_that_of_an_independent_accountant() -> None:
    law = law_of(6, own=0.9, shared=0.7, max_colluders=2)
    event = law.event(0)
    for colluders in range(6):
        wanted = effective_noise_multipliers(law.own, law.shared, law.sensitivities, colluders)[0]
        assert event.by_colluders[colluders] == pytest.approx(wanted, rel=1e-12)
    assert event.noise_multiplier == event.by_colluders[2]
    assert event.by_colluders[-1] == pytest.approx(0.9)
    accountant = pld_privacy_accountant.PLDAccountant()
    gaussian = dp_event.GaussianDpEvent(event.noise_multiplier)
    accountant.compose(dp_event.PoissonSampledDpEvent(0.5, gaussian), 30)
    assert composed_epsilon([(event, 30)], 1e-5) == pytest.approx(
        accountant.get_epsilon(1e-5), rel=2e-3
    )
    found = [epsilon_against([(event, 30)], 1e-5, colluders) for colluders in (0, 2, 5, "all")]
    assert found[0] < found[1] < found[2] == found[3]
    assert found[1] == composed_epsilon([(event, 30)], 1e-5)


def test_keys_are_new_at_every_start_whatever_a_partner_says_again() -> None:
    law, old = law_of(2), PrivateRandomness.fresh([1])
    first = joined(law, [[0], [1]], randoms=[PrivateRandomness.fresh([0]), old])
    # Node 1 says exactly what it said before (a backup, or on purpose); node 0 started anew.
    again = joined(law, [[0], [1]], randoms=[PrivateRandomness.fresh([0]), old])
    same = PrivateRandomness.fresh([0])
    # As long as "a run": its letters count, and not its length alone.
    other_run = joined(law, [[0], [1]], randoms=[same, old], run_id="b run")
    same_run = joined(law, [[0], [1]], randoms=[same, old])
    drawn = [parts[0].counts(0, DIM) for parts in (first, again, other_run, same_run)]
    for left, right in itertools.combinations(drawn, 2):
        assert abs(np.corrcoef(left[0], right[0])[0, 1]) < 0.3


def test_seeded_runs_repeat() -> None:
    def seeded(run_id: str) -> np.ndarray:
        randoms = [PrivateRandomness.seeded(7, [0, 1, 2])]
        return joined(law_of(3), [[0, 1, 2]], randoms=randoms, run_id=run_id)[0].counts(1, DIM)

    assert np.array_equal(seeded("a run"), seeded("another run"))


def test_a_step_is_served_once_and_never_backwards() -> None:
    part = joined(law_of(3), [[0, 1, 2]])[0]
    part.counts(2, DIM)
    for step in (2, 1, 0):
        with pytest.raises(PrivateStepError, match="never meets two sums"):
            part.counts(step, DIM)
    fresh = PairNoise(law_of(2), [0, 1], PrivateRandomness.fresh([0, 1]), "run", [(1.0, 1e-4)] * 2)
    with pytest.raises(PrivateStepError, match="nobody joined"):
        fresh.counts(0, DIM)


def test_every_pair_has_streams_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at every stream that is drawn: no two of (pair, step, purpose) give the same bytes."""
    drawn: dict[bytes, tuple[Any, ...]] = {}
    honest = PairStreams.bytes

    def watched(
        self: PairStreams, first: int, second: int, purpose: str, step: int, num_bytes: int
    ) -> np.ndarray:
        out = honest(self, first, second, purpose, step, num_bytes)
        name = (first, second, purpose, step)
        assert drawn.setdefault(out[:32].tobytes(), name) == name
        return out

    monkeypatch.setattr(PairStreams, "bytes", watched)
    part = joined(law_of(5), [range(5)])[0]
    for step in range(4):
        part.counts(step, DIM)
    assert len(drawn) == 10 * 4 * 2


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("gives no secret", {"0": [["00" * 32, "11" * 32], [[], 0]]}),
        ("no valid key", {"0": [["zz", "11" * 32], [[], 0]]}),
        ("no valid key", {"0": [7, [[], 0]]}),
        ("told their keys", {}),
        ("told their keys", []),
        ("told their keys", {"1": [["22" * 32, "11" * 32], [[], 0]]}),
        ("told their keys", {"7": [["22" * 32, "11" * 32], [[], 0]]}),
    ],
)
def test_a_hostile_hello_is_refused_by_name(what: str, said: Any) -> None:
    def tamper(name: str, rank: int, value: Any) -> Any:
        return said if name.endswith("keys") and rank == 0 else value

    with pytest.raises(WireError, match=what):
        joined(law_of(2), [[0], [1]], tamper=tamper)


@pytest.mark.parametrize(
    "said",
    [
        5,
        [[], -1],
        [[], "2"],
        [[], True],
        [[], 10**9],
        [[[["poisson", 0.5, 1.0, None, []], float("inf")]], 0],
        [[[["poisson", 0.5, 1.0, None, []], -5]], 0],
        [[[["poisson", 0.5, 1.0, None, []], 1]] * 101, 0],
        [[[["poisson", 2.0, 1.0, None, []], 3]], 0],
        [[[["poisson", 0.5, 1.0, 1, [3.0, 2.0]], 3]], 0],
        [[[["poisson", 0.5, 1.0, 1, [1.0, 2.0]], 3]], 0],
        [[[["poisson", 0.5, 1.0, "1", [1.0]], 3]], 0],
    ],
)
def test_releases_that_make_no_sense_are_refused_by_name(said: Any) -> None:
    def tamper(name: str, rank: int, value: Any) -> Any:
        return {"0": [value["0"][0], said]} if name.endswith("keys") and rank == 0 else value

    with pytest.raises(WireError, match="node 0 told releases that make no sense"):
        joined(law_of(2), [[0], [1]], tamper=tamper)


def test_keys_that_were_exchanged_on_the_way_are_noticed() -> None:
    def tamper(name: str, rank: int, value: Any) -> Any:
        if name.endswith("keys") and rank == 0:
            value["0"][0][1] = "ab" * 32  # all hear another nonce of node 0
        return value

    # Node 0 takes its own key from memory, never from the network.
    with pytest.raises(WireError, match="0 and 1 have different keys"):
        joined(law_of(2), [[0], [1]], tamper=tamper)


def test_a_process_that_hides_its_keys_from_the_comparison_is_noticed() -> None:
    def tamper(name: str, rank: int, value: Any) -> Any:
        return {} if name.endswith("check") and rank == 0 else value

    with pytest.raises(WireError, match="did not say which keys"):
        joined(law_of(2), [[0], [1]], tamper=tamper)


def test_keys_serve_one_start_only() -> None:
    part = joined(law_of(2), [[0, 1]])[0]
    with pytest.raises(PrivateStepError, match="joined twice"):
        part.join(0, 5, {}, lambda name, value: [value])


def test_nodes_that_stop_leave_the_others_with_dearer_releases_within_their_budgets() -> None:
    law = law_of(4, own=1.2, shared=1.0, max_colluders=1)
    delta = 1e-4
    alone = composed_epsilon([(law.event(0), 6)], delta)
    promises = [(alone * 1.0001, delta), (9.0, delta), (9.0, delta), (7.0, delta)]
    counts = participation(law, promises, [[]] * 4, steps=100)
    assert counts[0] == 6 and 6 < counts[3] < counts[1] == counts[2] < 100
    # add up what each really releases, stretch by stretch
    for node in range(4):
        ends, releases = sorted(set(counts)), []
        for low, high in itertools.pairwise([0, *ends]):
            if counts[node] >= high:
                active = tuple(count >= high for count in counts)
                releases.append((law.event(node, active), high - low))
        spent = composed_epsilon(releases, delta)
        assert spent <= promises[node][0]
    # with one pair less a release hides less
    assert law.event(1, (False, True, True, True)).noise_multiplier < law.event(1).noise_multiplier


def test_what_was_spent_before_counts() -> None:
    law = law_of(3, own=1.2, shared=1.0)
    before = [(law.event(0), 10)]
    budget = composed_epsilon([(law.event(0), 25)], 1e-4) * 1.0001
    counts = participation(law, [(budget, 1e-4)] * 3, [before, [], []], steps=100)
    assert counts[0] == 15 and counts[1] == counts[2] < 25


def test_a_node_without_data_has_no_pairs() -> None:
    law = law_of(3, factors=[1.0, 0.0, 1.0])
    part = joined(law, [range(3)])[0]
    counts_ND = part.counts(0, DIM)
    assert not counts_ND[1].any() and not (counts_ND[0] + counts_ND[2]).any()


@pytest.mark.parametrize("seed", range(30))
def test_calibration_hides_everybody_as_promised_and_costs_least_on_its_levels(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = int(random.integers(3, 12))
    needed = random.uniform(0.5, 4.0, size) if seed % 3 else np.full(size, 2.0)
    sensitivities = random.uniform(0.1, 1.0, size) if seed % 2 else np.full(size, 0.3)
    idle = random.random(size) < 0.1 * (seed % 2)
    needed[idle] = sensitivities[idle] = 0
    colluders = int(random.integers(0, size - 2))
    own, shared = calibrate_shared_noise(
        needed.tolist(), sensitivities.tolist(), colluders, price=0.01
    )
    found = effective_noise_multipliers(own, shared, sensitivities.tolist(), colluders)
    for node in np.flatnonzero(~idle):
        assert found[node] >= needed[node] * (1 - 1e-12)
        # nobody keeps more noise than it would need alone
        assert own[node] <= needed[node] * sensitivities[node] * (1 + 1e-12)


def test_equal_nodes_gain_what_the_law_promises() -> None:
    """Ten nodes without colluders: the average's noise falls to about a third, at a small price."""
    own, shared = calibrate_shared_noise([2.0] * 10, [0.5] * 10, 0, price=1e-4)
    assert own[0] / 1.0 == pytest.approx(1 / math.sqrt(10), rel=0.1) and shared > 0.5
    own, shared = calibrate_shared_noise([2.0] * 10, [0.5] * 10, 0, price=1.0)
    assert own[0] > 0.8


def test_the_lattice_is_fine_enough_and_the_grid_common() -> None:
    law = law_of(4, own=[0.02, 0.03, 0.04, 0.05], shared=0.07, factors=[0.1, 0.2, 0.05, 0.1])
    for dim in (1, 1000, 10**7):
        grid, lattice = law.grid(dim), law.lattice(dim)
        assert math.log2(grid).is_integer() and math.log2(lattice).is_integer()
        assert math.sqrt(dim) * grid <= 2**-12 * 0.05  # half a grid slack of the least sensitive
        assert lattice >= grid
        width = 1 / math.sqrt(1 / law.shared**2 + 4 / min(law.own) ** 2)
        assert 4 * lattice <= width
    tiny = SharedNoise((1e-9, 1.0), 0.5, (1.0, 1.0), 1.0, (0.5, 0.5), "poisson", 0)
    with pytest.raises(ConfigError, match="too small for the grid"):
        tiny.lattice(1000)


def test_a_torn_line_of_shared_noise_counts_as_the_own_noise_alone(tmp_path: Path) -> None:
    """Nobody knows whether a partner had stopped: never dearer than without all partners."""
    law, path = law_of(4, own=0.9, shared=0.7, max_colluders=1), tmp_path / "node-0000.jsonl"
    with Ledger.create(path, LedgerHeader("run", 0, delta=1e-4, event=law.event(0))) as ledger:
        ledger.record(0, 0, law.event(0))
        ledger.record(1, 0, law.event(0, (True, True, False, False)))
    path.write_bytes(path.read_bytes()[:-60])
    with Ledger.open(path) as repaired:
        torn = [event for event, _ in repaired.releases() if event.max_colluders is None]
        assert repaired.count == 2 and [event.noise_multiplier for event in torn] == [
            pytest.approx(0.9)
        ]


def test_shared_noise_between_machines_needs_a_key_and_enough_colluders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOCAL_WORLD_SIZE", process_agreement.PARENT):
        monkeypatch.delenv(name, raising=False)
    config = load_config(None, ["privacy.max_colluders=3"])
    with pytest.raises(ConfigError, match=r"need network\.key_file"):
        process_agreement.refuse_unauthenticated_pairs(config, 10)
    with pytest.raises(ConfigError, match="one process hosts 5"):
        process_agreement.refuse_few_colluders(config, 2)
    process_agreement.refuse_few_colluders(config, 10)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "10")
    process_agreement.refuse_unauthenticated_pairs(config, 10)
