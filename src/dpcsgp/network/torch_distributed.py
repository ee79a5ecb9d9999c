"""Frames between real processes over torch.distributed: gloo on CPUs, NCCL on GPUs.

Each process hosts some nodes. A frame travels once from its sender to every other process that
hosts one of its receivers, point to point; all sends and receives of a round are under way at once.
There is no collective operation. This is the only importer of torch.distributed.

Legend: N hosted nodes, S senders heard, B bytes of a frame, D columns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.sparse.csgraph import shortest_path
from torch import Tensor

from dpcsgp.errors import ConfigError
from dpcsgp.graphs import Topology
from dpcsgp.network.agreed import fault_of
from dpcsgp.network.board import Board, StoreValueError
from dpcsgp.network.health import Health, SilentPeerError
from dpcsgp.network.mixing import Mixer
from dpcsgp.network.traffic import Traffic

START = "DPCSGP_START"  # in the environment of the launcher's workers
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProcessEnvironment:
    """Rank, world size and store of this process, as torchrun puts them in the environment.

    Attributes:
        rank: from 0 to world_size - 1.
        world_size: number of processes.
        host: machine that serves the store (MASTER_ADDR).
        port: its port (MASTER_PORT).
        hosts_store: this process serves the store.
        attempt: restarts by torchrun; each has its own keys in the store.
        start: nonce of the launcher for this start, known to its workers only.
    """

    rank: int
    world_size: int
    host: str
    port: int
    hosts_store: bool = False
    attempt: int = 0
    start: str = ""

    @classmethod
    def from_environment(cls) -> ProcessEnvironment | None:
        """Read the environment; None if neither torchrun nor `dpcsgp launch` started this."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"RANK = {rank}, WORLD_SIZE = {world_size}: ranks run from 0 to {world_size - 1}"
            )
        # torchrun's agent may serve the store itself.
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
        return cls(
            rank,
            world_size,
            os.environ.get("MASTER_ADDR", "127.0.0.1"),
            int(os.environ.get("MASTER_PORT", "29500")),
            hosts_store=rank == 0 and not agent,
            attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            start=os.environ.get(START, ""),
        )

    def open_store(self, timeout: float, hosting: bool = False) -> dist.Store:
        """Connect to the run's key-value store within `timeout` seconds.

        With `hosting` this process serves it.

        Raises:
            SilentPeerError: nobody serves the store in time.
        """
        limit = timedelta(seconds=timeout)
        try:
            if not hosting:
                # Torch's own attempts take up to twice the limit.
                _await_port(self.host, self.port, timeout)
            store = dist.TCPStore(
                self.host, self.port, is_master=hosting, wait_for_workers=False, timeout=limit
            )
        except (RuntimeError, OSError) as error:
            raise SilentPeerError(
                f"rank {self.rank} cannot reach the store of the run at {self.host}:{self.port} "
                f"within {timeout:g} s; "
                "start rank 0 first, and check MASTER_ADDR, MASTER_PORT and the firewall"
            ) from error
        _LOG.info("rank %d: connected to the store at %s:%d", self.rank, self.host, self.port)
        return dist.PrefixStore(f"dpcsgp/{self.attempt}", store)


def _await_port(host: str, port: int, seconds: float) -> None:
    """Wait until a server listens; OSError if none does in time."""
    deadline = time.monotonic() + seconds
    while True:
        left = max(deadline - time.monotonic(), 0.01)
        try:
            socket.create_connection((host, port), timeout=min(left, 5.0)).close()
            return
        except OSError:
            if time.monotonic() + 0.1 > deadline:
                raise
        time.sleep(0.1)


def serve_store() -> dist.TCPStore:
    """Serve a store from this process, the launcher's, on a free port of this machine only."""
    # The store's own listener would be open to every interface.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def nodes_of_ranks(num_nodes: int, world_size: int) -> list[tuple[int, ...]]:
    """Return the nodes of each rank: consecutive, in parts whose sizes differ by at most one.

    >>> nodes_of_ranks(5, 2)
    [(0, 1, 2), (3, 4)]
    """
    if not 1 <= world_size <= num_nodes:
        raise ConfigError(
            f"world size {world_size}: the graph has {num_nodes} nodes; start between 1 and "
            f"{num_nodes} processes"
        )
    return [
        tuple(int(node) for node in part)
        for part in np.array_split(np.arange(num_nodes), world_size)
    ]


def largest_lead(topology: Topology) -> int:
    """Return how many rounds one node can be ahead of another: 1 + the diameter of the graph.

    Node j finishes round t only with the round-t messages of its senders, so after h more rounds it
    has waited for every node that is h hops away.

    >>> from dpcsgp.graphs import directed_ring
    >>> largest_lead(directed_ring(5))
    5
    """
    links_NN = (topology.weights > 0).astype(float, order="C")
    return 1 + int(shortest_path(links_NN, unweighted=True).max())


class TorchDistributed(Mixer):
    """A network whose other nodes are hosted by other processes.

    Args:
        topology: the graph, the same on all ranks.
        environment: rank and world size of this process.
        store: key-value store of the run.
        health: heartbeats, and a limit on every wait.
        key: key of this start for tags on frames; None: checksums.
        backend: "gloo" (CPU) or "nccl" (GPU).
    """

    def __init__(
        self,
        topology: Topology,
        environment: ProcessEnvironment,
        store: dist.Store,
        health: Health,
        key: bytes | None = None,
        backend: str = "gloo",
    ) -> None:
        hosting = nodes_of_ranks(topology.num_nodes, environment.world_size)
        super().__init__(topology, hosting[environment.rank])
        self.topology, self.key = topology, key
        self._environment, self._store, self._health = environment, store, health
        self._board = Board(store, environment.rank, health.seal)
        self._device = _device(backend)
        rank_of = {node: rank for rank, nodes in enumerate(hosting) for node in nodes}
        self.traffic = Traffic.of(topology, self.nodes)
        # (row of the frame, rank): one send per process that hosts receivers, however many.
        self._sends = [
            (row, rank)
            for row, node in enumerate(self.nodes)
            for rank in sorted(
                {rank_of[receiver] for receiver in topology.receivers_from(node)}
                - {environment.rank}
            )
        ]
        self._receives = [
            (row, rank_of[sender])
            for row, sender in enumerate(self.senders)
            if rank_of[sender] != environment.rank
        ]
        self._join_group(backend)

    @property
    def bytes_to_processes(self) -> int:
        """Frame bytes that left this process since the start of the run."""
        # Edges within a process cost nothing, and several receivers in one process cost one frame.
        return len(self._sends) * self.traffic.bytes_per_edge

    def exchange(self, frames_NB: Tensor) -> Tensor:
        """Send each hosted node's frame to its receivers.

        Args:
            frames_NB: uint8 (N, B), one frame per hosted node.

        Returns:
            uint8 (S, B): the frames of `senders`, on the CPU.

        Raises:
            SilentPeerError: a peer went silent or failed; names it.
        """
        frames_NB = frames_NB.contiguous().to(self._device)
        received_SB = torch.zeros(
            len(self.senders), frames_NB.shape[1], dtype=torch.uint8, device=self._device
        )
        received_SB[list(self.own_rows)] = frames_NB
        # Both sides list the frames of a pair of ranks by ascending sender, as NCCL needs; gloo
        # also matches them by tag.
        receives = [
            dist.P2POp(dist.irecv, received_SB[row], rank, tag=self.senders[row])
            for row, rank in self._receives
        ]
        sends = [
            dist.P2POp(dist.isend, frames_NB[row], rank, tag=self.nodes[row])
            for row, rank in self._sends
        ]
        self._complete([*receives, *sends], [rank for _, rank in (*self._receives, *self._sends)])
        self.traffic.count(frames_NB.shape[1])
        return received_SB.cpu()

    def gather_values(self, name: str, value: Any, seconds: float | None = None) -> list[Any]:
        """All-gather a small JSON value through the store, by rank; at most `seconds`."""
        own = self._environment.rank
        with self._health.limit(seconds) as deadline:
            try:
                self._board.put(f"agree/{name}/{own}", value)
                values = [
                    value if rank == own else self._await(name, value, rank, deadline)
                    for rank in range(self._environment.world_size)
                ]
                return json.loads(json.dumps(values))  # the own value as the others see it
            except RuntimeError as error:
                raise self._health.diagnose(max(self._health.waiting_for, 0)) from error

    def _await(self, name: str, mine: Any, rank: int, deadline: float) -> Any:
        """Return the value of one rank, once it is there and valid."""
        # Polling: a blocking read of the store might never come back.
        key, pause, self._health.waiting_for = f"agree/{name}/{rank}", 0.001, rank
        while True:
            late = time.monotonic() > deadline
            # With a key, a stranger's value may still be replaced by the valid one.
            patient = self._health.seal.key is not None and not late
            with contextlib.suppress(StoreValueError) if patient else contextlib.nullcontext():
                if note := self._board.look(key, rank, fault_of(name, mine, rank)):
                    return note.value
            self._health.raise_if_failed()
            if late:
                raise self._health.diagnose(rank)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _complete(self, operations: Sequence[dist.P2POp], peers: Sequence[int]) -> None:
        """Start all sends and receives, then wait for each; `peers` are the ranks of them."""
        self._health.raise_if_failed()
        if not operations:
            return
        with self._health.limit() as deadline:
            # Starting to send to a dead peer fails at once, before the loop.
            peer = self._health.waiting_for = peers[0]
            try:
                works = dist.batch_isend_irecv(list(operations))
                for work, peer in zip(works, peers, strict=False):  # NCCL returns one work for all
                    self._health.waiting_for = peer
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError as error:
                raise self._health.diagnose(peer) from error

    def _join_group(self, backend: str) -> None:
        """Connect to the ranks at the other ends of this rank's edges; all meet in the store."""
        # Without this gloo connects every rank to every other one, whatever the graph.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        with self._health.limit() as deadline:
            try:
                dist.init_process_group(
                    backend,
                    store=dist.PrefixStore("group", self._store),
                    rank=self._environment.rank,
                    world_size=self._environment.world_size,
                    timeout=timedelta(seconds=0.6 * self._health.timeout),
                )
                self._knock(deadline)
            except RuntimeError as error:
                self._health.raise_if_failed()
                raise SilentPeerError(
                    f"rank {self._environment.rank} cannot connect to the other processes: "
                    f"{str(error).splitlines()[0]}; set GLOO_SOCKET_IFNAME to the network "
                    "interface that reaches the other machines"
                ) from error
        rank, world_size = self._environment.rank, self._environment.world_size
        _LOG.info("rank %d of %d: connected over %s", rank, world_size, backend)

    def _knock(self, deadline: float) -> None:
        """Exchange a byte along every edge: connect now, and fail here if that is impossible."""
        byte_1 = torch.zeros(1, dtype=torch.uint8, device=self._device)
        heard_S1 = byte_1.repeat(len(self._receives), 1)
        operations = [
            dist.P2POp(dist.irecv, heard_S1[place], rank, tag=self.senders[row])
            for place, (row, rank) in enumerate(self._receives)
        ]
        operations += [
            dist.P2POp(dist.isend, byte_1, rank, tag=self.nodes[row]) for row, rank in self._sends
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))


def leave_group() -> None:
    """Close this process's connections; peers that wait for it notice at once."""
    if dist.is_initialized():
        dist.destroy_process_group()
        _LOG.info("left the process group")


def _device(backend: str) -> torch.device:
    if backend != "nccl":
        return torch.device("cpu")
    # As many processes per machine as GPUs, or several on one.
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cuda")
