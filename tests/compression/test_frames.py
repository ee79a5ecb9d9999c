"""A frame that is not exactly the expected one is refused, and the message says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcsgp.compression.frames import frame_bytes, join, load_key, run_key, split
from dpcsgp.errors import ConfigError, WireError

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def make(
    round_: int = 7, key: bytes | None = None, y: float = 1.25, num_weights: int = 1
) -> torch.Tensor:
    payload = torch.arange(60, dtype=torch.uint8).view(2, 30)
    return join([4, 9], round_, torch.full((2, num_weights), y, dtype=torch.float64), payload, key)


@settings(max_examples=100, deadline=None)
@given(
    num_rows=st.integers(1, 4),
    num_weights=st.integers(1, 5),
    payload_bytes=st.integers(0, 100),
    round_=st.integers(0, 2**48 - 1),
    key=st.sampled_from([None, KEY]),
    seed=st.integers(0, 2**31),
)
def test_round_trip(
    num_rows: int, num_weights: int, payload_bytes: int, round_: int, key: bytes | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = torch.rand(num_rows, num_weights, dtype=torch.float64, generator=generator) + 1e-300
    payload = torch.randint(
        0, 256, (num_rows, payload_bytes), dtype=torch.uint8, generator=generator
    )
    senders = list(range(100, 100 + num_rows))
    frames = join(senders, round_, y, payload, key)
    assert frames.dtype == torch.uint8
    assert tuple(frames.shape) == (num_rows, frame_bytes(payload_bytes, num_weights))
    y_back, payload_back = split(frames, senders, round_, payload_bytes, num_weights, key)
    assert torch.equal(y_back, y)
    assert torch.equal(payload_back, payload)


def test_overhead_is_48_bytes() -> None:
    assert frame_bytes(0) == 48
    assert frame_bytes(100, num_weights=3) == 164


@settings(max_examples=400, deadline=None)
@given(
    bit=st.integers(0, 8 * frame_bytes(30) - 1),
    row=st.integers(0, 1),
    key=st.sampled_from([None, KEY]),
)
def test_any_flipped_bit_is_refused(bit: int, row: int, key: bytes | None) -> None:
    frames = make(key=key)
    frames[row, bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(WireError, match=rf"sender {[4, 9][row]} in round 7"):
        split(frames, [4, 9], 7, 30, key=key)


def test_rows_do_not_depend_on_each_other() -> None:
    payload, y = (
        torch.arange(60, dtype=torch.uint8).view(2, 30),
        torch.ones(2, 1, dtype=torch.float64),
    )
    together = join([4, 9], 7, y, payload, KEY)
    assert torch.equal(join([9], 7, y[1:], payload[1:], KEY), together[1:])


@pytest.mark.parametrize(
    ("frames", "round_", "key", "fault"),
    [
        (make(round_=6), 7, None, "carries round 6: replayed or late"),
        (make(round_=8), 7, None, "carries round 8: ahead"),
        (make(key=KEY), 7, None, "no network.key_file is set here"),
        (make(), 7, KEY, "not tagged with a key"),
        (make(key=OTHER_KEY), 7, KEY, "forged, or sent under another network.key_file"),
        (make().flip(0), 7, None, "carries sender 9"),
        (make()[:, :-1], 7, None, "truncated: 77 bytes, expected 78"),
        (make()[:, :20], 7, None, "truncated: 20 bytes"),
        (torch.nn.functional.pad(make(), (0, 1)), 7, None, "too long: 79 bytes"),
        (make(num_weights=2), 7, None, "too long"),
        (make(y=0.0), 7, None, "must be finite and positive"),
        (make(y=-1.0), 7, None, "must be finite and positive"),
        (make(y=float("nan")), 7, None, "must be finite and positive"),
        (make(y=float("inf")), 7, None, "must be finite and positive"),
        (torch.zeros(2, 78, dtype=torch.uint8), 7, None, "wrong magic"),
    ],
)
def test_faults_are_named(frames: torch.Tensor, round_: int, key: bytes | None, fault: str) -> None:
    with pytest.raises(WireError, match=rf"^frame from sender 4 in round {round_}: ") as caught:
        split(frames, [4, 9], round_, 30, key=key)
    assert fault in str(caught.value)


def test_a_frame_of_another_layout_is_refused_although_its_size_fits() -> None:
    frames = join(
        [4], 7, torch.ones(1, 2, dtype=torch.float64), torch.zeros(1, 22, dtype=torch.uint8)
    )
    with pytest.raises(
        WireError, match="declares 22 payload bytes and 2 weights, expected 30 and 1"
    ):
        split(frames, [4], 7, 30)


def test_another_version_is_named() -> None:
    frames = make()
    frames[:, 4] = 1
    with pytest.raises(WireError, match="wire version 1, expected 2"):
        split(frames, [4, 9], 7, 30)


def test_wrong_number_of_frames_is_refused() -> None:
    with pytest.raises(WireError, match="in round 7"):
        split(make(), [4], 7, 30)
    with pytest.raises(ConfigError, match="one row per sender"):
        join([4], 7, torch.ones(2, 1, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.uint8))


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"x" * 16)
    key = load_key(path)
    assert len(key) == 32
    assert key == load_key(str(path))
    path.write_bytes(b"y" * 1000)
    assert load_key(path) != key
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"network\.key_file = .*holds 5 bytes, at least 16"):
        load_key(path)
    with pytest.raises(ConfigError, match=r"network\.key_file = .*absent.*cannot be read"):
        load_key(tmp_path / "absent")
    with pytest.raises(ConfigError, match="key of 3 bytes"):
        make(key=b"abc")


def test_runs_under_one_key_refuse_each_others_frames() -> None:
    frames = make(key=run_key(KEY, b"first run"))
    split(frames, [4, 9], 7, 30, key=run_key(KEY, b"first run"))
    with pytest.raises(WireError, match="keyed tag"):
        split(frames, [4, 9], 7, 30, key=run_key(KEY, b"second run"))
