"""Frames between real processes over torch.distributed: gloo on CPUs, NCCL on GPUs. The only importer of torch.distributed.

Each process hosts some nodes. A frame travels once from its sender to every other process that hosts one of its
receivers, point to point; all sends and receives of a round are under way at once. There is no collective operation.

Legend: N hosted nodes, S senders heard, B bytes of a frame, D columns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dpcsgp.errors import ConfigError, DpcsgpError
from dpcsgp.graphs import Topology
from dpcsgp.network.health import Health
from dpcsgp.network.mixing import Mixer
from dpcsgp.network.traffic import Traffic


class SilentPeerError(DpcsgpError):
    """A peer went silent: the message names the node."""


@dataclass(frozen=True)
class Place:
    """Where this process stands among all, as torchrun tells it through the environment."""

    rank: int
    world_size: int
    host: str
    port: int
    hosts_store: bool

    @classmethod
    def from_environment(cls) -> Place | None:
        """Return this process's place, or None if it was not started by torchrun or `dpcsgp launch`."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        rank = int(os.environ["RANK"])
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
        return cls(
            rank,
            int(os.environ["WORLD_SIZE"]),
            os.environ.get("MASTER_ADDR", "127.0.0.1"),
            int(os.environ.get("MASTER_PORT", "29500")),
            hosts_store=rank == 0 and not agent,
        )

    def open_store(self, timeout: float, hosting: bool = False) -> dist.Store:
        """Connect to the run's key-value store (`hosting`: this process serves it)."""
        store = dist.TCPStore(
            self.host, self.port, is_master=hosting, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
        return dist.PrefixStore("dpcsgp", store)


def serve_store(port: int = 0) -> dist.TCPStore:
    """Serve a store from this process (the launcher's), on a free port if none is given."""
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def spread(num_nodes: int, world_size: int) -> list[tuple[int, ...]]:
    """Return the nodes of each rank: consecutive, as even as possible.

    >>> spread(5, 2)
    [(0, 1, 2), (3, 4)]
    """
    if not 1 <= world_size <= num_nodes:
        raise ConfigError(
            f"world size {world_size}: the graph has {num_nodes} nodes; start between 1 and {num_nodes} processes"
        )
    return [tuple(int(node) for node in part) for part in np.array_split(np.arange(num_nodes), world_size)]


class TorchDistributed:
    """A network whose other nodes live in other processes."""

    def __init__(
        self,
        topology: Topology,
        place: Place,
        store: dist.Store,
        health: Health,
        timeout: float,
        key: bytes | None = None,
        backend: str = "gloo",
    ) -> None:
        self.topology, self.key, self.timeout = topology, key, timeout
        self._health = health
        self._store = store
        self._place = place
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        hosting = spread(topology.num_nodes, place.world_size)
        rank_of = {node: rank for rank, nodes in enumerate(hosting) for node in nodes}
        self._mixer = Mixer(topology, hosting[place.rank])
        self.traffic = Traffic.of(topology, self._mixer.nodes)
        self._sends = [
            (row, rank)
            for row, node in enumerate(self.nodes)
            for rank in sorted({rank_of[receiver] for receiver in topology.receivers_from(node)} - {place.rank})
        ]
        self._receives = [
            (row, rank_of[sender]) for row, sender in enumerate(self.senders) if rank_of[sender] != place.rank
        ]
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout),
        )

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes hosted by this process."""
        return self._mixer.nodes

    @property
    def senders(self) -> tuple[int, ...]:
        """Nodes whose messages are heard here, the hosted ones included, ascending."""
        return self._mixer.senders

    @property
    def own_rows(self) -> tuple[int, ...]:
        """Rows of the hosted nodes among the senders."""
        return self._mixer.own_rows

    def exchange(self, frames_NB: Tensor) -> Tensor:
        """Send each hosted node's frame to its receivers; return the frames of `senders`."""
        frames_NB = frames_NB.contiguous().to(self._device)
        received_SB = torch.empty(len(self.senders), frames_NB.shape[1], dtype=torch.uint8, device=self._device)
        received_SB[list(self.own_rows)] = frames_NB
        # Both sides list the frames of one pair of ranks by ascending sender; the tag says it again.
        receives = [
            dist.P2POp(dist.irecv, received_SB[row], rank, tag=self.senders[row]) for row, rank in self._receives
        ]
        sends = [dist.P2POp(dist.isend, frames_NB[row], rank, tag=self.nodes[row]) for row, rank in self._sends]
        peers = [rank for _, rank in (*self._receives, *self._sends)]
        self._complete([*receives, *sends], peers)
        self.traffic.count(frames_NB.shape[1])
        return received_SB.cpu()

    def mix(self, values_SD: Tensor, onto_ND: Tensor | None = None) -> Tensor:
        """Add `sum_j weights[i, j] values_j` to `onto_ND` (zeros if not given), sender after sender."""
        return self._mixer.mix(values_SD, onto_ND)

    def agree(self, name: str, value: Any) -> list[Any]:
        """Publish a small JSON value and wait for everybody's, by rank."""
        self._store.set(f"agree/{name}/{self._place.rank}", json.dumps(value))
        values = []
        for rank in range(self._place.world_size):
            try:
                values.append(json.loads(self._store.get(f"agree/{name}/{rank}")))
            except RuntimeError:
                raise self._silent(rank) from None
        return values

    def close(self) -> None:
        """Leave the group."""
        self._health.stop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _complete(self, operations: Sequence[dist.P2POp], peers: Sequence[int]) -> None:
        peer = peers[0] if peers else self._place.rank
        try:
            works = dist.batch_isend_irecv(list(operations)) if operations else []
            for work, peer in zip(works, peers, strict=True):
                work.wait(timedelta(seconds=self.timeout * 0.75))  # the rest of the time is for finding out who it was
        except RuntimeError as error:
            raise self._silent(peer) from error

    def _silent(self, peer: int) -> SilentPeerError:
        cause = self._health.diagnose(peer)
        self._health.last_word(cause)
        return SilentPeerError(f"{cause}: no message within {self.timeout:g} s. Restart it and continue with --resume")
