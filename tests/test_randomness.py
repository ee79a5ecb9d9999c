"""Streams depend on (key, purpose, step, node) and on nothing else; public and private keys never
meet."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpcsgp.errors import ConfigError
from dpcsgp.randomness import PrivateRandomness, PublicRandomness, numpy_generator, torch_secrets


def test_a_row_depends_on_its_node_alone() -> None:
    together = PublicRandomness(5, [0, 1, 2, 3]).bytes("mask", 9, 64)
    alone = PublicRandomness(5, [2]).bytes("mask", 9, 64)
    assert (together[2] == alone[0]).all()
    assert (PublicRandomness(5, [7, 2]).row_bytes("mask", 9, 1, 64) == alone[0]).all()


def test_a_longer_draw_starts_with_the_shorter_one() -> None:
    random = PublicRandomness(5, [0])
    assert (random.bytes("mask", 1, 1000)[0, :17] == random.bytes("mask", 1, 17)[0]).all()


@pytest.mark.parametrize(
    ("seed", "purpose", "step", "node"),
    [(6, "mask", 9, 2), (5, "dither", 9, 2), (5, "mask", 10, 2), (5, "mask", 9, 3)],
)
def test_every_coordinate_of_the_address_matters(
    seed: int, purpose: str, step: int, node: int
) -> None:
    reference = PublicRandomness(5, [2]).bytes("mask", 9, 64)[0]
    assert (PublicRandomness(seed, [node]).bytes(purpose, step, 64)[0] != reference).any()


def test_seeds_that_agree_in_their_low_32_bits_differ() -> None:
    low, high = PublicRandomness(1, [0]), PublicRandomness(1 + 2**32, [0])
    assert (low.bytes("mask", 0, 32) != high.bytes("mask", 0, 32)).any()


def test_fresh_keys_differ_and_seeded_keys_repeat() -> None:
    assert (
        PrivateRandomness.fresh([0]).row_bytes("noise", 0, 0, 32)
        != PrivateRandomness.fresh([0]).row_bytes("noise", 0, 0, 32)
    ).any()
    seeded = [PrivateRandomness.seeded(3, [0, 1]) for _ in range(2)]
    assert (seeded[0].row_bytes("noise", 4, 1, 32) == seeded[1].row_bytes("noise", 4, 1, 32)).all()
    assert (seeded[0].row_bytes("noise", 4, 0, 32) != seeded[0].row_bytes("noise", 4, 1, 32)).any()
    assert not PrivateRandomness.fresh([0]).reproducible and seeded[0].reproducible


def test_private_and_public_streams_of_one_seed_are_unrelated() -> None:
    public, private = PublicRandomness(3, [0]), PrivateRandomness.seeded(3, [0])
    assert (public.row_bytes("noise", 0, 0, 64) != private.row_bytes("noise", 0, 0, 64)).any()


def test_keys_do_not_show_in_a_repr() -> None:
    random = PrivateRandomness.fresh([0])
    assert all(
        key.hex() not in repr(random) and repr(key) not in repr(random) for key in random._keys
    )


def test_bytes_are_uniform() -> None:
    counts = np.bincount(PublicRandomness(0, [0]).bytes("mask", 0, 1 << 20)[0], minlength=256)
    chi_square = float(((counts - 4096) ** 2 / 4096).sum())
    assert 150 < chi_square < 380  # 255 degrees of freedom: mean 255, standard deviation 22.6


def test_bad_seeds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.seed = -1"):
        PublicRandomness(-1, [0])


def test_set_up_generators_differ_by_purpose() -> None:
    assert numpy_generator(0, "graph").integers(1 << 60) != numpy_generator(
        0, "partition"
    ).integers(1 << 60)


def test_torch_draws_from_a_private_stream_inside_and_goes_on_as_before_outside() -> None:
    random = PrivateRandomness.seeded(3, [0, 1])
    torch.manual_seed(5)
    untouched = torch.rand(3)
    torch.manual_seed(5)
    drawn = []
    for step in (0, 0, 1):
        with torch_secrets(random, step):
            drawn.append(torch.rand(2000))
    assert torch.equal(torch.rand(3), untouched)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert abs(float(torch.cat(drawn).mean()) - 0.5) < 0.03


def test_the_whole_state_of_torchs_generator_is_replaced() -> None:
    """A seed alone has 32 bits on the processor, few enough to be tried out."""
    with torch_secrets(PrivateRandomness.fresh([0]), 0):
        first = torch.get_rng_state()
        torch.manual_seed(torch.initial_seed())
        assert not torch.equal(first[24:5000], torch.get_rng_state()[24:5000])


@pytest.mark.parametrize(
    ("seed", "purpose", "step", "node"),
    [(6, "noise", 9, 2), (5, "order", 9, 2), (5, "noise", 10, 2), (5, "noise", 9, 3)],
)
def test_every_coordinate_of_a_private_address_matters(
    seed: int, purpose: str, step: int, node: int
) -> None:
    reference = PrivateRandomness.seeded(5, [2]).row_bytes("noise", 9, 0, 64)
    assert (
        PrivateRandomness.seeded(seed, [node]).row_bytes(purpose, step, 0, 64) != reference
    ).any()


def test_fresh_keys_are_the_nodes_own_and_random_in_every_byte() -> None:
    # one node number: only the keys can tell the streams apart
    random = PrivateRandomness.fresh([0] * 1000)
    assert len({random.row_bytes("noise", 0, row, 16).tobytes() for row in range(1000)}) == 1000
    keys = np.array([list(key) for key in random._keys])
    assert keys.shape == (1000, 32)
    assert all(len(set(keys[:, place].tolist())) > 200 for place in range(32))


def test_no_block_of_a_stream_belongs_to_another_step_or_node() -> None:
    random = PrivateRandomness.seeded(0, [0, 1, 2])
    blocks = [
        random.row_bytes("noise", step, row, 16 * 100)[start : start + 16].tobytes()
        for step in range(5)
        for row in range(3)
        for start in range(0, 1600, 16)
    ]
    assert len(set(blocks)) == len(blocks)


def test_torchs_numbers_follow_the_secret_key() -> None:
    drawn = []
    for random in (
        *(PrivateRandomness.fresh([0]) for _ in range(3)),
        PrivateRandomness.seeded(0, [0]),
    ):
        torch.manual_seed(0)  # whatever is public
        with torch_secrets(random, 0):
            drawn.append(torch.rand(100))
    for place, one in enumerate(drawn):
        assert all(int((one == other).sum()) < 3 for other in drawn[:place])
