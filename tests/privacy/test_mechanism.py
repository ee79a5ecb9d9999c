"""The mechanism samples as stated, divides by public constants, and adds noise before release."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from dpcsgp.errors import ConfigError
from dpcsgp.privacy import GaussianMechanism
from dpcsgp.privacy.noise import SENSITIVITY_SLACK
from dpcsgp.randomness import PrivateRandomness


def mechanism(
    noise: float = 0.0, batch: int = 20, total: int = 100, sampling: str = "poisson"
) -> GaussianMechanism:
    return GaussianMechanism(1.0, (noise,), (batch,), (total,), sampling)  # pyright: ignore[reportArgumentType]


def test_poisson_batches_have_the_stated_rate_and_vary() -> None:
    random = PrivateRandomness.seeded(0, [0])
    drawn = [mechanism().draw(step, random, [True]) for step in range(2000)]
    sizes = np.array([int(present.sum()) for _, present in drawn])
    assert abs(sizes.mean() - 20) < 5 * math.sqrt(16 / 2000)
    assert abs(sizes.var() - 16) < 3
    counts = np.zeros(100)
    for indices, present in drawn:
        counts[indices[present].numpy()] += 1
    assert abs(counts / 2000 - 0.2).max() < 5 * math.sqrt(0.16 / 2000)


def test_uniform_batches_have_exactly_the_stated_size_without_repetition() -> None:
    random = PrivateRandomness.seeded(0, [0])
    for step in range(50):
        indices, present = mechanism(sampling="uniform").draw(step, random, [True])
        assert int(present.sum()) == 20
        assert len(set(indices[present].tolist())) == 20


def test_a_full_poisson_batch_takes_everything() -> None:
    indices, present = mechanism(batch=100).draw(0, PrivateRandomness.fresh([0]), [True])
    assert sorted(indices[present].tolist()) == list(range(100))


def test_the_number_of_places_is_public() -> None:
    """Nearly always one size, whatever was drawn.

    A batch that does not fit takes whole further passes.
    """
    random, widths = PrivateRandomness.seeded(0, [0]), []
    for step in range(300):
        _, present = mechanism().draw(step, random, [True])
        widths.append(present.shape[1])
        assert bool(present[0, : int(present.sum())].all())
    places = mechanism().shapes[0].places
    assert set(widths) <= {places, 2 * places} and widths.count(places) > 290
    tiny = GaussianMechanism(1.0, (0.0,), (1,), (100_000,))
    assert tiny.draw(0, random, [True])[1].shape[1] == tiny.draw(1, random, [True])[1].shape[1]


def test_drawn_examples_lie_in_uniformly_random_order() -> None:
    random, full = PrivateRandomness.seeded(0, [0]), mechanism(batch=4, total=4)
    orders = [tuple(full.draw(step, random, [True])[0][0, :4].tolist()) for step in range(4800)]
    counts = np.array([orders.count(order) for order in set(orders)])
    assert len(counts) == 24
    assert (
        (counts - 200) ** 2 / 200
    ).sum() < 60  # chi-square with 23 degrees of freedom: p about 5e-5


def test_the_divisor_is_the_expected_size_not_the_drawn_one() -> None:
    random = PrivateRandomness.seeded(1, [0])
    for step in range(5):
        drawn = int(mechanism().draw(step, random, [True])[1].sum())
        released = mechanism().release(
            lambda i, p: p.sum(1, keepdim=True).float(), step, random, [True]
        )
        assert float(released) == pytest.approx(drawn / 20)


def test_an_empty_batch_is_noise_and_is_released() -> None:
    quiet = GaussianMechanism(1.0, (2.0,), (1,), (10**6,), "poisson")
    released = quiet.release(
        lambda i, p: torch.zeros(1, 4000), 0, PrivateRandomness.fresh([0]), [True]
    )
    assert float(released.std()) == pytest.approx(2.0, rel=0.1)


def test_measured_noise_equals_the_stated_multiplier() -> None:
    nodes = GaussianMechanism(0.5, (1.0, 4.0), (10, 20), (100, 100))
    released = nodes.release(
        lambda i, p: torch.zeros(2, 40_000), 0, PrivateRandomness.fresh([0, 1]), [True, True]
    )
    assert float(released[0].std()) == pytest.approx(
        1.0 * 0.5 / 10 * (1 + SENSITIVITY_SLACK), rel=0.02
    )
    assert float(released[1].std()) == pytest.approx(
        4.0 * 0.5 / 20 * (1 + SENSITIVITY_SLACK), rel=0.02
    )
    assert abs(float(torch.corrcoef(released)[0, 1])) < 0.03


def test_inactive_nodes_release_nothing() -> None:
    nodes = GaussianMechanism(1.0, (1.0, 1.0), (10, 10), (100, 100))
    released = nodes.release(
        lambda i, p: torch.ones(2, 10), 0, PrivateRandomness.fresh([0, 1]), [True, False]
    )
    assert float(released[1].abs().max()) == 0
    assert float(released[0].abs().max()) > 0


def test_fresh_keys_never_repeat_a_noise_vector() -> None:
    release = [
        mechanism(1.0).release(
            lambda i, p: torch.zeros(1, 64), 3, PrivateRandomness.fresh([0]), [True]
        )
        for _ in range(2)
    ]
    assert not torch.equal(release[0], release[1])


def test_the_event_states_rate_and_noise() -> None:
    event = GaussianMechanism(1.0, (1.5,), (20,), (100,)).event(0)
    assert (event.sampling, event.sampling_rate, event.noise_multiplier) == ("poisson", 0.2, 1.5)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"privacy\.expected_batch_size = 200: node 0 has 100 examples"
    ):
        mechanism(batch=200)
    with pytest.raises(ConfigError, match=r"privacy\.clip_norm"):
        GaussianMechanism(0.0, (1.0,), (1,), (2,))


class Diary(PrivateRandomness):
    """A secret stream that notes what was asked for.

    `equal` makes the first keys of every order equal.
    """

    def __init__(self, nodes: list[int], equal: bool = False) -> None:
        super().__init__(nodes, PrivateRandomness.fresh(nodes)._keys, reproducible=False)
        self.asked: list[tuple[str, int, int]] = []
        self.equal = equal

    def row_bytes(self, purpose: str, step: int, row: int, num_bytes: int) -> np.ndarray:
        self.asked.append((purpose, step, row))
        stream = super().row_bytes(purpose, step, row, num_bytes)
        return stream & 0 if self.equal and purpose == "order 0" else stream


@pytest.mark.parametrize("sampling", ["poisson", "uniform"])
@pytest.mark.parametrize("fixed", [False, True])
def test_no_secret_word_serves_twice(sampling: str, fixed: bool) -> None:
    """Sampling, order and noise have streams of their own, in every step of every node."""
    nodes = GaussianMechanism(1.0, (1.0, 1.0), (10, 10), (40, 40), sampling, fixed)  # pyright: ignore[reportArgumentType]
    random = Diary([0, 1])
    for step in range(5):
        nodes.release(lambda i, p: torch.ones(2, 3), step, random, [True, True])
    assert len(random.asked) == len(set(random.asked)) == 5 * 2 * 3


@pytest.mark.parametrize("sampling", ["poisson", "uniform"])
def test_batches_of_nodes_and_steps_are_independent(sampling: str) -> None:
    """Two batches have rate^2 of the examples in common, whoever draws them and whenever."""
    total, batch, steps = 2000, 400, 20
    nodes = GaussianMechanism(1.0, (0.0,) * 2, (batch,) * 2, (total,) * 2, sampling)  # pyright: ignore[reportArgumentType]
    random, batches = PrivateRandomness.seeded(7, [0, 1]), []
    for step in range(steps):
        indices, present = nodes.draw(step, random, [True, True])
        batches.append([set(indices[row][present[row]].tolist()) for row in range(2)])
    rate, common = batch / total, []
    for before, here in itertools.pairwise(batches):
        common += [len(here[0] & here[1]), len(before[0] & here[0]), len(before[1] & here[1])]
    deviation = math.sqrt(total * rate**2 * (1 - rate**2))
    assert max(abs(count - total * rate**2) for count in common) < 6 * deviation


def test_fixed_places_are_taken_at_random() -> None:
    """Every place is taken equally often, and by every example."""
    nodes = GaussianMechanism(1.0, (0.0,), (5,), (20,), "poisson", fixed_places=True)
    random, taken, steps = PrivateRandomness.seeded(7, [0]), [], 3000
    for step in range(steps):
        indices, present = nodes.draw(step, random, [True])
        taken += [
            (place, int(indices[0, place])) for place in present[0].nonzero().flatten().tolist()
        ]
    width = nodes.shapes[0].places
    for kind, count in ((0, width), (1, 20)):
        found = np.bincount([pair[kind] for pair in taken], minlength=count)
        expected = len(taken) / count
        assert len(found) == count
        assert ((found - expected) ** 2 / expected).sum() < count + 6 * math.sqrt(2 * count)
    assert len(set(taken)) > 0.99 * width * 20


def test_equal_keys_are_drawn_again() -> None:
    """All orders are equally likely only given that no two keys are equal."""
    random, full = Diary([0], equal=True), mechanism(batch=8, total=8)
    orders = {tuple(full.draw(step, random, [True])[0][0, :8].tolist()) for step in range(20)}
    assert len(orders) > 15


def test_nodes_without_budget_draw_nothing() -> None:
    nodes = GaussianMechanism(1.0, (1.0, 1.0), (10, 10), (10, 10))
    _, present = nodes.draw(0, PrivateRandomness.fresh([0, 1]), [False, True])
    assert present.sum(dim=1).tolist() == [0, 10]
