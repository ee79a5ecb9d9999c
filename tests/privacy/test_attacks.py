"""Attacks that once saw in a release whether a row was there: none may prove more than eps.

Each has a short version, in which the former leak already proves an eps above the claim, and a long
one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attacks import (
    CLAIM,
    Attack,
    Rows,
    absolute,
    linear_model,
    lower_bound,
    nearer,
    rows_at_a_kink,
    trained_gradient,
)
from scipy.stats import ks_2samp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import GaussianMechanism, clipping_engine
from dpcsgp.privacy.passes import SUM_SLACK
from dpcsgp.randomness import PrivateRandomness, PublicRandomness
from dpcsgp.tasks import Augmentation


def short_and_long(short: int, long: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("runs", [short, pytest.param(long, marks=pytest.mark.stress)])


# Kinks: the last bit of an output decides an example's whole gradient.


@pytest.mark.slow
@pytest.mark.parametrize("ulps", [0, 1])
@short_and_long(12, 200)
def test_a_row_at_a_kink_is_not_found_in_a_trained_model(
    tmp_path: Path, runs: int, ulps: int
) -> None:
    """One row more once changed the kernel, and 50 equal rows turned around together."""
    module, rows = linear_model(), rows_at_a_kink(50, ulps)
    attack = Attack(module, absolute, rows)
    sums = [attack.expected_sum(complete) for complete in (True, False)]

    def guesses(count: int) -> int:
        fewer = (rows[0][:count], rows[1][:count])
        return sum(
            nearer(trained_gradient(tmp_path / f"{count}-{run}", module, absolute, fewer), *sums)
            for run in range(runs)
        )

    assert lower_bound(guesses(50), guesses(49), runs) <= CLAIM


@pytest.mark.parametrize("ulps", [-1, 0, 1])
@short_and_long(40, 1000)
def test_a_row_at_a_kink_is_not_found_at_equal_public_constants(runs: int, ulps: int) -> None:
    assert Attack(linear_model(), absolute, rows_at_a_kink(50, ulps)).bound(runs) <= CLAIM


@pytest.mark.parametrize("ulps", [-1, 0, 1])
@short_and_long(200, 3000)
def test_a_row_at_a_kink_is_not_found_in_poisson_batches(runs: int, ulps: int) -> None:
    """All 50 rows are drawn in a third of the steps; those once stood out."""
    assert (
        Attack(linear_model(), absolute, rows_at_a_kink(50, ulps), rate=0.98).bound(runs) <= CLAIM
    )


def readme_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))


def row_at_a_relu(module: nn.Sequential, seed: int) -> Tensor:
    """Return a large row for which one hidden unit is zero but for rounding."""
    layer = module[0]
    assert isinstance(layer, nn.Linear)
    row = 1e3 * torch.randn(30, generator=torch.Generator().manual_seed(seed))
    weight, bias = layer.weight.detach()[seed % 16], layer.bias.detach()[seed % 16]
    for _ in range(3):
        row = row - (row @ weight + bias) * weight / (weight @ weight)
    return row


@short_and_long(300, 5000)
def test_equal_rows_at_a_relu_move_a_sum_by_one_clip_norm(runs: int) -> None:
    """The README's model, 4 rows against 3, 2 against 1: kernels round otherwise for so few."""
    module, clip = readme_model(), 0.1
    engine, flat_D = (
        clipping_engine(module, per_example),
        ParameterLayout.of(module).flatten(module),
    )

    def total(row: Tensor, count: int) -> Tensor:
        inputs, labels = row.expand(1, count, -1).clone(), torch.zeros(1, count, dtype=torch.int64)
        return engine.clipped_sum(
            flat_D[None], inputs, labels, torch.ones(1, count, dtype=torch.bool), clip
        )[0]

    rows = [row_at_a_relu(module, seed) for seed in range(runs)]
    changes = [
        float((total(row, count) - total(row, count - 1)).norm())
        for row in rows
        for count in (4, 2)
    ]
    assert max(changes) <= clip * (1 + SUM_SLACK)


def per_example(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs, labels, reduction="none")


@pytest.mark.parametrize("ulps", [-1, 0])
def test_the_release_of_a_node_has_the_same_bits_whatever_its_neighbour_draws(ulps: int) -> None:
    """Nodes of one process share a pass: the rows of one once changed the kernel for the other."""
    module, (inputs, targets) = linear_model(), rows_at_a_kink(50, ulps)
    engine, model_ND = (
        clipping_engine(module, absolute),
        ParameterLayout.of(module).flatten(module).expand(2, -1),
    )
    mechanism = GaussianMechanism(1.0, (0.0, 0.0), (40, 50), (40, 50))
    random = PrivateRandomness.seeded(0, [0, 1])

    def release_of_first(drawn: int) -> Tensor:
        def clipped_sum(indices_NE: Tensor, present_NE: Tensor) -> Tensor:
            present_NE[1] &= torch.arange(present_NE.shape[1]) < drawn
            places_NE, present_NE = (part[:, : max(40, drawn)] for part in (indices_NE, present_NE))
            return engine.clipped_sum(
                model_ND, inputs[places_NE], targets[places_NE], present_NE, 1.0
            )

        return mechanism.release(clipped_sum, 0, random, [True, True])[0]

    expected_D = release_of_first(50)
    assert all(torch.equal(release_of_first(drawn), expected_D) for drawn in (49, 41, 3, 1, 0))


# Random views: which view an example gets must not follow from anything public.


def image_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def random_images(count: int) -> Rows:
    random = torch.Generator().manual_seed(5)
    return torch.randn(count, 1, 28, 28, generator=random), torch.randint(
        0, 10, (count,), generator=random
    )


def chosen_images(count: int) -> Rows:
    """Return one image again and again, mirrored where a public stream of this name says so."""
    words = PublicRandomness(0, [0]).row_bytes("augmentation", 0, 0, 6 * count).view(np.uint16)
    mirrored = torch.from_numpy(words.astype(np.int64)).view(count, 3)[:, 2] % 2 == 1
    image = torch.randn(1, 28, 28, generator=torch.Generator().manual_seed(5))
    images = torch.where(mirrored[:, None, None, None], image.flip(-1), image)
    return images, torch.zeros(count, dtype=torch.int64)


VIEWED = [("crop-flip", random_images), ("flip", chosen_images)]


@pytest.mark.parametrize("total", [50, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("spec", "images"), VIEWED, ids=["random", "chosen"])
@short_and_long(200, 300)
def test_taking_out_the_first_image_is_not_found(
    runs: int, spec: str, images: Callable[[int], Rows], total: int
) -> None:
    """Views by row number once gave every later image another view, as it was renumbered."""
    rate = 1.0 if total == 50 else 1 / 3
    attack = Attack(image_model(), per_example, images(total), rate, augment=Augmentation(spec, 1))
    assert attack.bound(runs, draws=20) <= CLAIM


def views_of_all(images: Tensor, key: int) -> Tensor:
    """Return the mean view of a full batch under one private key, in random order."""
    random, total = PrivateRandomness.seeded(key, [0]), len(images)
    indices_1E, present_1E = GaussianMechanism(1.0, (0.0,), (total,), (total,)).draw(
        0, random, [True]
    )
    views = Augmentation("crop-flip", 1)(images[indices_1E], random, 0)
    return views[present_1E].mean(dim=0).flatten()


def test_the_law_of_a_release_does_not_depend_on_the_order_of_the_rows() -> None:
    """Two samples of keys, one with the data turned around: their means of views follow one law."""
    images, _ = random_images(20)
    directions = torch.randn(4, 784, generator=torch.Generator().manual_seed(9))
    ours, theirs = (
        torch.stack([directions @ views_of_all(data, key) for key in keys])
        for data, keys in ((images, range(400)), (images.flip(0), range(400, 800)))
    )
    for one, other in zip(ours.T, theirs.T, strict=True):
        test: Any = ks_2samp(one.numpy(), other.numpy())
        assert test.pvalue > 1e-4


@pytest.mark.parametrize("images", [random_images, chosen_images], ids=["random", "chosen"])
def test_a_hole_in_the_places_changes_a_sum_by_one_clip_norm(images: Callable[[int], Rows]) -> None:
    """The proof's coupling: without its first row a batch has a hole, others keep their views."""
    rows, module = images(50), image_model()
    engine, flat_1D = (
        clipping_engine(module, per_example),
        ParameterLayout.of(module).flatten(module)[None],
    )
    mechanism = GaussianMechanism(1.0, (0.0,), (50,), (50,), fixed_places=True)
    for key in range(20):
        random = PrivateRandomness.seeded(key, [0])
        indices_1E, present_1E = mechanism.draw(0, random, [True])
        views = Augmentation("crop-flip", 1)(rows[0][indices_1E], random, 0)
        whole_D, hole_D = (
            engine.clipped_sum(
                flat_1D, views.clone(), rows[1][indices_1E], present, 1.0, mechanism.shapes[0]
            )[0]
            for present in (present_1E, present_1E & (indices_1E != 0))
        )
        assert 0.9 < float((whole_D - hole_D).norm()) <= 1 + SUM_SLACK
