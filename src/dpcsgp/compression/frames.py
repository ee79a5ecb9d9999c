"""Message frames: what travels along an edge, in the simulator too.

| magic | version | flags | number of weights | sender | step | payload length | weights | payload | tag |
|-------|---------|-------|-------------------|--------|------|----------------|---------|---------|-----|
| 4     | 1       | 1     | 2                 | 4      | 8    | 4              | 8 each  | B       | 16  |

Numbers are little-endian, weights float64. The tag is BLAKE2b over everything before it: a
checksum, or a keyed tag when a key is given, so that nobody without the key can alter or forge a
frame. A frame with one weight adds 48 bytes.

A tag binds a frame to its sender and step, not to a run: give each run under one key file its own
`run_key`, so that a frame recorded in one run is refused in the next.

Legend: N hosted nodes, S senders heard, K push-sum weights per frame, B payload bytes, F frame
bytes. Reference: RFC 7693 (BLAKE2)."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpcsgp.errors import ConfigError, WireError

_HEADER = struct.Struct("<4sBBHIQI")
_MAGIC = b"dpcs"
_VERSION = 2
_KEYED = 1  # flag: the tag is keyed
_TAG_BYTES = 16
_MIN_KEY, _MAX_KEY = 16, 64


def frame_bytes(payload_bytes: int, num_weights: int = 1) -> int:
    """Return the size of a frame: 40 + 8 weights + payload.

    >>> frame_bytes(1000)
    1048
    """
    return _HEADER.size + 8 * num_weights + payload_bytes + _TAG_BYTES


def join(
    senders: Sequence[int], step: int, y_NK: Tensor, payload_NB: Tensor, key: bytes | None = None
) -> Tensor:
    """Return uint8 (N, F): one frame per hosted node with its push-sum weights and its encoded
    vector."""
    _check_key(key)
    shapes_fit = y_NK.ndim == payload_NB.ndim == 2 and y_NK.shape[0] == payload_NB.shape[0] == len(
        senders
    )
    if not shapes_fit or payload_NB.dtype != torch.uint8:
        raise ConfigError(
            f"frames.join: {len(senders)} senders, weights {tuple(y_NK.shape)}, payload "
            f"{payload_NB.dtype} "
            f"{tuple(payload_NB.shape)}: expected (N, K) and uint8 (N, B) with one row per sender"
        )
    num_weights, payload_bytes = y_NK.shape[1], payload_NB.shape[1]
    if num_weights >= 2**16 or payload_bytes >= 2**32:
        raise ConfigError(
            f"frames.join: {num_weights} weights, {payload_bytes} bytes: at most 65535 and 4 GiB "
            "fit"
        )
    start, stop = _HEADER.size + 8 * num_weights, _HEADER.size + 8 * num_weights + payload_bytes
    frames_NF = np.empty((len(senders), stop + _TAG_BYTES), dtype=np.uint8)
    frames_NF[:, _HEADER.size : start] = np.ascontiguousarray(y_NK.cpu().numpy(), dtype="<f8").view(
        np.uint8
    )
    frames_NF[:, start:stop] = payload_NB.cpu().numpy()
    flags = 0 if key is None else _KEYED
    for sender, frame_F in zip(senders, frames_NF, strict=True):
        _HEADER.pack_into(
            frame_F.data, 0, _MAGIC, _VERSION, flags, num_weights, sender, step, payload_bytes
        )
        frame_F[stop:] = np.frombuffer(_tag(frame_F[:stop], key), dtype=np.uint8)
    return torch.from_numpy(frames_NF)


def split(
    frames_SF: Tensor,
    senders: Sequence[int],
    step: int,
    payload_bytes: int,
    num_weights: int = 1,
    key: bytes | None = None,
) -> tuple[Tensor, Tensor]:
    """Check every frame and return (weights float64 (S, K), payload uint8 (S, B), a view into the
    frames).

    Raises WireError, with sender and step, for anything but the frame that `senders` had to send at
    `step`."""
    _check_key(key)
    frames = frames_SF.cpu().contiguous().numpy()
    if frames.ndim != 2 or frames.shape[0] != len(senders) or frames.dtype != np.uint8:
        raise WireError(
            f"frames from senders {tuple(senders)} at step {step}: got {frames_SF.dtype} "
            f"{tuple(frames_SF.shape)}, "
            f"expected uint8 rows, one per sender"
        )
    start = _HEADER.size + 8 * num_weights
    y_SK = np.empty((len(senders), num_weights), dtype=np.float64)
    for sender, frame_F, y_K in zip(senders, frames, y_SK, strict=True):
        fault = _fault(frame_F, sender, step, payload_bytes, num_weights, key)
        if fault is None:
            y_K[:] = np.frombuffer(frame_F[_HEADER.size : start].tobytes(), dtype="<f8")
            if not (np.isfinite(y_K).all() and (y_K > 0).all()):
                fault = f"push-sum weights {y_K.tolist()} must be finite and positive"
        if fault is not None:
            raise WireError(f"frame from sender {sender} at step {step}: {fault}")
    return torch.from_numpy(y_SK), torch.from_numpy(frames[:, start : start + payload_bytes])


def _fault(
    frame_F: np.ndarray,
    sender: int,
    step: int,
    payload_bytes: int,
    num_weights: int,
    key: bytes | None,
) -> str | None:
    """Say what is wrong with one frame, or None."""
    if frame_F.size < _HEADER.size + _TAG_BYTES:
        return f"truncated: {frame_F.size} bytes are shorter than any frame"
    magic, version, flags, weights, from_sender, from_step, length = _HEADER.unpack_from(
        frame_F.data
    )
    if magic != _MAGIC:
        return (
            f"wrong magic {magic!r}, expected {_MAGIC!r}: damaged, or not a message of this program"
        )
    if version != _VERSION:
        return f"wire version {version}, expected {_VERSION}: install the same dpcsgp release on every machine"
    if flags != (0 if key is None else _KEYED):
        return _flags_fault(flags)
    if frame_F.size != frame_bytes(payload_bytes, num_weights):
        expected = frame_bytes(payload_bytes, num_weights)
        return f"{'truncated' if frame_F.size < expected else 'too long'}: {frame_F.size} bytes, expected {expected}"
    if not hmac.compare_digest(_tag(frame_F[:-_TAG_BYTES], key), frame_F[-_TAG_BYTES:].tobytes()):
        return (
            "checksum does not match: damaged on the way"
            if key is None
            else (
                "keyed tag does not match: altered, forged, or sent under another network.key_file"
            )
        )
    if from_sender != sender:
        return f"carries sender {from_sender}"
    if from_step != step:
        return f"carries step {from_step}: {'replayed or late' if from_step < step else 'ahead of this node'}"
    if (length, weights) != (payload_bytes, num_weights):
        return f"declares {length} payload bytes and {weights} weights, expected {payload_bytes} and {num_weights}"
    return None


def _flags_fault(flags: int) -> str:
    if flags == _KEYED:
        return "tagged with a key, but no network.key_file is set here"
    if flags == 0:
        return "not tagged with a key, but network.key_file is set here: the sender needs the same key file"
    return f"unknown flags {flags}: damaged, or of another release"


def _tag(content_F: np.ndarray, key: bytes | None) -> bytes:
    return hashlib.blake2b(
        content_F.data, digest_size=_TAG_BYTES, key=key or b"", person=b"dpcsgp frame"
    ).digest()


def load_key(path: str | Path) -> bytes:
    """Read a key file (any bytes, at least 16) and return the 32-byte key derived from it."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"network.key_file = '{path}': cannot be read ({error.strerror}); "
            "make one with `openssl rand -out FILE 32` and copy it to every machine"
        ) from error
    if len(content) < _MIN_KEY:
        raise ConfigError(
            f"network.key_file = '{path}': holds {len(content)} bytes, at least {_MIN_KEY} are "
            "needed; "
            "make one with `openssl rand -out FILE 32`"
        )
    return hashlib.blake2b(content, digest_size=32, person=b"dpcsgp key file").digest()


def run_key(key: bytes, run: bytes) -> bytes:
    """Derive the key of one run from a shared key and public bytes that no other run has."""
    _check_key(key)
    return hashlib.blake2b(run, digest_size=32, key=key, person=b"dpcsgp run key").digest()


def _check_key(key: bytes | None) -> None:
    if key is not None and not _MIN_KEY <= len(key) <= _MAX_KEY:
        raise ConfigError(
            f"key of {len(key)} bytes: expected {_MIN_KEY} to {_MAX_KEY}; use "
            "load_key(network.key_file)"
        )
