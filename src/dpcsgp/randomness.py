"""The only place for random streams that enter training.

Two kinds of randomness never touch each other:

* public streams (masks, dither, rotations, initial model, partition) follow from a seed that every
  node knows;
* private streams (batch sampling, noise) follow from a secret key per node: fresh entropy of the
  operating system by default, a seed only for experiments, which are then stamped as not private;
  noise that two nodes share follows from a secret key of that pair.

Both are AES-256 in counter mode: a byte depends on (key, purpose, step, node) alone, so resuming
needs no generator state, and any receiver can rebuild the public stream of any sender. AES-CTR is a
cryptographic generator and, with the processor's AES instructions, also a fast one.

Legend: N rows, one per node in `nodes`.
"""

from __future__ import annotations

import hashlib
import os
import random as python_random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpcsgp.errors import ConfigError

_MAX_NODE: Final = 2**32
_MAX_STEP: Final = 2**48
# the stream is what these encrypt to, piece by piece in the cache
_ZEROS: Final = memoryview(bytes(2**16))


def _derive_key(secret: bytes, domain: bytes, purpose: str) -> bytes:
    """Return the 32-byte AES key of one purpose; `domain` keeps public and private keys apart."""
    return hashlib.blake2b(purpose.encode(), key=secret, digest_size=32, person=domain).digest()


def _keystream(key: bytes, step: int, node: int, num_bytes: int) -> np.ndarray:
    """Return `num_bytes` of an AES-256-CTR stream.

    It starts at the counter block (node, step, 0).
    """
    if not 0 <= step < _MAX_STEP or not 0 <= node < _MAX_NODE:
        raise ConfigError(
            f"step={step}, node={node}: expected 0 <= step < 2**48 and 0 <= node < 2**32"
        )
    first_block = node.to_bytes(4, "big") + step.to_bytes(6, "big") + bytes(6)
    encryptor = Cipher(algorithms.AES(key), modes.CTR(first_block)).encryptor()
    out = np.empty(num_bytes + 15, dtype=np.uint8)  # update_into asks for room of one block more
    for start in range(0, num_bytes, len(_ZEROS)):
        encryptor.update_into(_ZEROS[: num_bytes - start], out[start:].data)
    return out[:num_bytes]


class PublicRandomness:
    """Streams that every node can rebuild from the public seed; row k belongs to node `nodes[k]`.

    >>> random = PublicRandomness(seed=7, nodes=[0, 1])
    >>> sent = random.bytes("mask", step=3, num_bytes=4)[1]
    >>> bool((sent == random.of([1]).bytes("mask", step=3, num_bytes=4)[0]).all())
    True
    """

    def __init__(self, seed: int, nodes: Sequence[int]) -> None:
        if not 0 <= seed < 2**63:
            raise ConfigError(f"run.seed = {seed}: expected an integer from 0 to 2**63 - 1")
        self.seed: Final = seed
        self.nodes: Final = tuple(int(node) for node in nodes)

    def of(self, nodes: Sequence[int]) -> PublicRandomness:
        """Return the streams of other nodes under the same seed.

        A receiver rebuilds its senders' streams this way.
        """
        return self if tuple(nodes) == self.nodes else PublicRandomness(self.seed, nodes)

    def bytes(self, purpose: str, step: int, num_bytes: int) -> np.ndarray:
        """Return uint8 (N, num_bytes): one independent stream per node."""
        key = self._key(purpose)
        return np.stack([_keystream(key, step, node, num_bytes) for node in self.nodes])

    def row_bytes(self, purpose: str, step: int, row: int, num_bytes: int) -> np.ndarray:
        """Return uint8 (num_bytes,): the stream of node `nodes[row]` alone.

        Kernels that work row by row use it.
        """
        return _keystream(self._key(purpose), step, self.nodes[row], num_bytes)

    def common_bytes(self, purpose: str, step: int, num_bytes: int) -> np.ndarray:
        """Return uint8 (num_bytes,): a stream that all nodes share."""
        return _keystream(self._key(purpose + "/common"), step, 0, num_bytes)

    def _key(self, purpose: str) -> bytes:
        return _derive_key(self.seed.to_bytes(8, "big"), b"dpcsgp public", purpose)


class PrivateRandomness:
    """Secret streams, one key per node; row k belongs to node `nodes[k]`.

    Make one per start with `fresh` (never stored, so a replayed step meets new noise), or with
    `seeded` for experiments that must be repeatable; a run with seeded noise is not private,
    because whoever knows the seed can subtract it.
    """

    def __init__(self, nodes: Sequence[int], keys: Sequence[bytes], reproducible: bool) -> None:
        self.nodes: Final = tuple(int(node) for node in nodes)
        self.reproducible: Final = reproducible
        self._keys: Final = tuple(keys)

    @classmethod
    def fresh(cls, nodes: Sequence[int]) -> PrivateRandomness:
        """Draw a new secret key per node from the operating system."""
        return cls(nodes, [os.urandom(32) for _ in nodes], reproducible=False)

    @classmethod
    def seeded(cls, seed: int, nodes: Sequence[int]) -> PrivateRandomness:
        """Derive the keys from a seed: repeatable, therefore not private."""
        secret = seed.to_bytes(8, "big")
        keys = [_derive_key(secret, b"dpcsgp private", f"node {node}") for node in nodes]
        return cls(nodes, keys, reproducible=True)

    def rows(self, rows: Sequence[int], nodes: Sequence[int]) -> PrivateRandomness:
        """Return the secret keys of some rows, under other node numbers."""
        keys = [self._keys[row] for row in rows]
        return PrivateRandomness(nodes, keys, self.reproducible)

    def row_bytes(self, purpose: str, step: int, row: int, num_bytes: int) -> np.ndarray:
        """Return uint8 (num_bytes,): the secret stream of node `nodes[row]`."""
        key = _derive_key(self._keys[row], b"dpcsgp private", purpose)
        return _keystream(key, step, self.nodes[row], num_bytes)

    def __repr__(self) -> str:  # keys must never reach a log or a traceback
        return f"PrivateRandomness(nodes={self.nodes}, reproducible={self.reproducible})"


class PairStreams:
    """Secret streams that exactly two nodes know; both draw the same bytes.

    Args:
        keys: (smaller node, larger node) -> 32 secret bytes that only these two have.
    """

    def __init__(self, keys: Mapping[tuple[int, int], bytes]) -> None:
        self._keys: Final = dict(keys)

    def bytes(self, first: int, second: int, purpose: str, step: int, num_bytes: int) -> np.ndarray:
        """Return uint8 (num_bytes,): the stream of a pair, in whichever order it is named."""
        secret = self._keys[min(first, second), max(first, second)]
        return _keystream(_derive_key(secret, b"dpcsgp pairs", purpose), step, 0, num_bytes)

    def fingerprints(self) -> dict[tuple[int, int], str]:
        """Return a short public digest of every key, so that both ends can compare."""
        return {
            pair: _derive_key(secret, b"dpcsgp pairs", "fingerprint").hex()[:16]
            for pair, secret in self._keys.items()
        }

    def __repr__(self) -> str:  # keys must never reach a log or a traceback
        return f"PairStreams({sorted(self._keys)})"


@contextmanager
def torch_secrets(random: PrivateRandomness, step: int) -> Iterator[None]:
    """Draw torch's own random numbers (masks of Dropout, say) from a private stream inside.

    The generators are restored afterwards.

    A mask belongs to a place in the batch, and taking one example out moves all others: masks that
    somebody could foretell would change everybody's gradient. Torch keeps 32 bits of a seed on the
    processor, so the whole state is replaced.
    """
    words = random.row_bytes("torch", step, 0, 4 * 624 + 8)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(int(words[-8:].view(np.uint64)[0] >> 1))
        state = torch.get_rng_state()
        table = state.numpy()[24 : 24 + 8 * 624].view(np.uint64)  # after seed, position and flags
        table[:] = words[:-8].view(np.uint32)
        torch.set_rng_state(state)
        yield


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators of torch, numpy and `random` afterwards.

    Code of datasets draws from them.
    """
    states = torch.get_rng_state(), np.random.get_state(), python_random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        python_random.setstate(states[2])


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, numpy and `random`; use it inside `generators_kept`.

    Every row that is read gets a seed of its own, so what one row draws depends on no other.
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    python_random.seed(seed)


def generators_moved(seed: int) -> bool:
    """Tell whether somebody drew from the global generators since they were seeded."""
    found = torch.get_rng_state(), np.random.get_state(), python_random.getstate()  # noqa: NPY002
    seed_generators(seed)
    fresh = torch.get_rng_state(), np.random.get_state(), python_random.getstate()  # noqa: NPY002
    same_numpy = all(np.array_equal(a, b) for a, b in zip(found[1], fresh[1], strict=True))
    return not (torch.equal(found[0], fresh[0]) and same_numpy and found[2] == fresh[2])


def numpy_generator(seed: int, purpose: str) -> np.random.Generator:
    """Return a numpy generator for public set-up work: graphs, partitions, synthetic inputs."""
    digest = hashlib.blake2b(
        f"{seed}:{purpose}".encode(), digest_size=16, person=b"dpcsgp setup"
    ).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "big")))


@contextmanager
def torch_seed(seed: int, purpose: str) -> Iterator[None]:
    """Seed torch's global generator for public set-up work, and restore it afterwards.

    Such work is drawing a module's initial weights.
    """
    digest = hashlib.blake2b(
        f"{seed}:{purpose}".encode(), digest_size=4, person=b"dpcsgp setup"
    ).digest()
    with torch.random.fork_rng(devices=[]):
        # torch keeps 32 bits of a seed: give it 32 good ones
        torch.manual_seed(int.from_bytes(digest, "big"))
        yield
