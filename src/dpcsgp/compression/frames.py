"""Message frames: what travels along an edge, in the simulator too.

| field | bytes |
|---|---|
| magic "dpcs" | 4 |
| version | 1 |
| flags | 1 |
| number of weights K | 2 |
| sender | 4 |
| round | 8 |
| payload length B | 4 |
| weights | 8 K |
| payload | B |
| tag | 16 |

Numbers are little-endian, weights float64. The tag is BLAKE2b over everything before it: a
checksum, or a keyed tag when a key is given, so that nobody without the key can alter or forge a
frame. A frame with one weight adds 48 bytes.

A tag binds a frame to its sender and round, not to a run: give each run under one key file its own
`run_key`, so that a frame recorded in one run is refused in the next.

Legend: N hosted nodes, S senders heard, K push-sum weights per frame, B payload bytes, F frame
bytes. Reference: RFC 7693 (BLAKE2).
"""

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
_MIN_KEY, _MAX_KEY = 16, 64  # bytes; BLAKE2b takes keys up to 64


def frame_bytes(payload_bytes: int, num_weights: int = 1) -> int:
    """Return the size of a frame in bytes: 40 + 8 weights + payload.

    >>> frame_bytes(1000)
    1048
    """
    return _HEADER.size + 8 * num_weights + payload_bytes + _TAG_BYTES


def join(
    senders: Sequence[int], round_: int, y_NK: Tensor, payload_NB: Tensor, key: bytes | None = None
) -> Tensor:
    """Frame one message per hosted node: header, push-sum weights, encoded vector, tag.

    Args:
        senders: the hosted nodes, one per row.
        round_: number of exchanges before this one.
        y_NK: push-sum weights (N, K), sent as float64.
        payload_NB: encoded vectors, uint8 (N, B).
        key: 16 to 64 secret bytes for keyed tags; None: the tag is a checksum.

    Returns:
        uint8 (N, F), F = frame_bytes(B, K).

    Raises:
        ConfigError: shapes do not fit, something is too large for its field, or the key is short.
    """
    _check_key(key)
    num_senders = len(senders)
    shapes_fit = y_NK.ndim == payload_NB.ndim == 2 and (
        y_NK.shape[0] == payload_NB.shape[0] == num_senders
    )
    if not shapes_fit or payload_NB.dtype != torch.uint8:
        raise ConfigError(
            f"frames.join: {num_senders} senders, weights {tuple(y_NK.shape)}, "
            f"payload {payload_NB.dtype} {tuple(payload_NB.shape)}: "
            "expected (N, K) and uint8 (N, B) with one row per sender"
        )
    num_weights, payload_bytes = y_NK.shape[1], payload_NB.shape[1]
    if num_weights >= 2**16 or payload_bytes >= 2**32:
        raise ConfigError(
            f"frames.join: {num_weights} weights, {payload_bytes} bytes: "
            "at most 65535 and 4 GiB fit"
        )
    # Weights and payloads of all rows at once; header and tag differ from row to row.
    start = _HEADER.size + 8 * num_weights
    stop = start + payload_bytes
    frames_NF = np.empty((num_senders, stop + _TAG_BYTES), dtype=np.uint8)
    weights_NK = np.ascontiguousarray(y_NK.cpu().numpy(), dtype="<f8")
    frames_NF[:, _HEADER.size : start] = weights_NK.view(np.uint8)
    frames_NF[:, start:stop] = payload_NB.cpu().numpy()
    flags = 0 if key is None else _KEYED
    for sender, frame_F in zip(senders, frames_NF, strict=True):
        _HEADER.pack_into(
            frame_F.data, 0, _MAGIC, _VERSION, flags, num_weights, sender, round_, payload_bytes
        )
        frame_F[stop:] = np.frombuffer(_tag(frame_F[:stop], key), dtype=np.uint8)
    return torch.from_numpy(frames_NF)


def split(
    frames_SF: Tensor,
    senders: Sequence[int],
    round_: int,
    payload_bytes: int,
    num_weights: int = 1,
    key: bytes | None = None,
) -> tuple[Tensor, Tensor]:
    """Check every frame and take it apart.

    Args:
        frames_SF: uint8 (S, F), one row per sender.
        senders: the nodes that had to send, in the order of the rows.
        round_: the round in which they had to send.
        payload_bytes: size B of an encoded vector.
        num_weights: push-sum weights K per frame.
        key: as in `join`.

    Returns:
        Weights float64 (S, K) and payloads uint8 (S, B), the latter a view into the frames.

    Raises:
        WireError: a frame is not the one that its sender had to send; names sender and round.
    """
    _check_key(key)
    frames = frames_SF.cpu().contiguous().numpy()
    if frames.ndim != 2 or frames.shape[0] != len(senders) or frames.dtype != np.uint8:
        raise WireError(
            f"frames from senders {tuple(senders)} in round {round_}: got {frames_SF.dtype} "
            f"{tuple(frames_SF.shape)}, expected uint8 rows, one per sender"
        )
    start = _HEADER.size + 8 * num_weights
    y_SK = np.empty((len(senders), num_weights), dtype=np.float64)
    for sender, frame_F, y_K in zip(senders, frames, y_SK, strict=True):
        fault = _fault(frame_F, sender, round_, payload_bytes, num_weights, key)
        if fault is None:
            y_K[:] = np.frombuffer(frame_F[_HEADER.size : start].tobytes(), dtype="<f8")
            # A model is x / y: a weight of 0 or NaN would spread through the whole graph.
            if not (np.isfinite(y_K).all() and (y_K > 0).all()):
                fault = f"push-sum weights {y_K.tolist()} must be finite and positive"
        if fault is not None:
            raise WireError(f"frame from sender {sender} in round {round_}: {fault}", sender)
    return torch.from_numpy(y_SK), torch.from_numpy(frames[:, start : start + payload_bytes])


def _fault(
    frame_F: np.ndarray,
    sender: int,
    round_: int,
    payload_bytes: int,
    num_weights: int,
    key: bytes | None,
) -> str | None:
    """Say what is wrong with one frame, or None."""
    if frame_F.size < _HEADER.size + _TAG_BYTES:
        return f"truncated: {frame_F.size} bytes are shorter than any frame"
    header = _HEADER.unpack_from(frame_F.data)
    magic, version, flags, weights, from_sender, from_round, length = header
    # What the tag does not have to vouch for comes first: these faults have likelier causes than an
    # attack, and their texts say which.
    if magic != _MAGIC:
        return (
            f"wrong magic {magic!r}, expected {_MAGIC!r}: damaged, or not a message of this program"
        )
    if version != _VERSION:
        return (
            f"wire version {version}, expected {_VERSION}: "
            "install the same dpcsgp release on every machine"
        )
    if flags != (0 if key is None else _KEYED):
        return _flags_fault(flags)
    if frame_F.size != frame_bytes(payload_bytes, num_weights):
        expected = frame_bytes(payload_bytes, num_weights)
        how = "truncated" if frame_F.size < expected else "too long"
        return f"{how}: {frame_F.size} bytes, expected {expected}"
    # The tag before the fields that it protects, compared in constant time.
    if not hmac.compare_digest(_tag(frame_F[:-_TAG_BYTES], key), frame_F[-_TAG_BYTES:].tobytes()):
        if key is None:
            return "checksum does not match: damaged on the way"
        return "keyed tag does not match: altered, forged, or sent under another network.key_file"
    if from_sender != sender:
        return f"carries sender {from_sender}"
    if from_round != round_:
        when = "replayed or late" if from_round < round_ else "ahead of this node"
        return f"carries round {from_round}: {when}"
    if (length, weights) != (payload_bytes, num_weights):
        return (
            f"declares {length} payload bytes and {weights} weights, "
            f"expected {payload_bytes} and {num_weights}"
        )
    return None


def _flags_fault(flags: int) -> str:
    if flags == _KEYED:
        return "tagged with a key, but no network.key_file is set here"
    if flags == 0:
        return (
            "not tagged with a key, but network.key_file is set here: "
            "the sender needs the same key file"
        )
    return f"unknown flags {flags}: damaged, or of another release"


def _tag(content_F: np.ndarray, key: bytes | None) -> bytes:
    # `person` separates domains: a tag of the store or of a hello is never one of a frame.
    return hashlib.blake2b(
        content_F.data, digest_size=_TAG_BYTES, key=key or b"", person=b"dpcsgp frame"
    ).digest()


def load_key(path: str | Path) -> bytes:
    """Read a key file (any bytes, at least 16) and return the 32-byte key derived from it.

    Raises:
        ConfigError: the file cannot be read or is too short.
    """
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
            "needed; make one with `openssl rand -out FILE 32`"
        )
    return hashlib.blake2b(content, digest_size=32, person=b"dpcsgp key file").digest()


def run_key(key: bytes, run: bytes) -> bytes:
    """Derive the key of one run from a shared key and public bytes that no other run has."""
    _check_key(key)
    # A keyed hash as key derivation: the run key says nothing about the shared key.
    return hashlib.blake2b(run, digest_size=32, key=key, person=b"dpcsgp run key").digest()


def _check_key(key: bytes | None) -> None:
    if key is not None and not _MIN_KEY <= len(key) <= _MAX_KEY:
        raise ConfigError(
            f"key of {len(key)} bytes: expected {_MIN_KEY} to {_MAX_KEY}; "
            "use load_key(network.key_file)"
        )
