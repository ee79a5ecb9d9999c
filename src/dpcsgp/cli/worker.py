"""One process of a distributed run, started by `dpcsgp launch` or torchrun; hosts its share of the nodes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dpcsgp import training
from dpcsgp.assembly import Blueprint, Data, assemble, build_topology, design, load_data
from dpcsgp.cli.session import StopSignal, load_snapshot, open_config
from dpcsgp.compression import frames
from dpcsgp.config import Config
from dpcsgp.errors import ConfigError
from dpcsgp.merging import merge_parts, write_part
from dpcsgp.network.handshake import shake_hands
from dpcsgp.network.health import Health, Store, read
from dpcsgp.network.torch_distributed import Place, TorchDistributed, spread
from dpcsgp.results import ResultsFolder

# Settings that may differ between the machines of one run without changing what is computed.
OWN_SETTINGS = ("network.key_file", "run.device", "privacy.seed")


def worker_session(
    place: Place,
    config_file: Path | None,
    settings: Sequence[str],
    out: Path | None,
    resume: bool,
    allow_divergence: bool,
) -> dict[str, Any]:
    """Train this process's nodes; rank 0 returns the summary of the whole run, the others their own part of it."""
    if out is None:
        raise ConfigError("--out FOLDER is needed when several processes write one results folder")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", place.world_size))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    config = open_config(config_file, settings, out, resume)
    timeout = config.network.timeout_seconds
    topology = build_topology(config)
    hosting = spread(topology.num_nodes, place.world_size)
    data = load_data(config)
    blueprint = design(config, data.facts, allow_divergence or resume)
    store = place.open_store(timeout, hosting=place.hosts_store)
    key = frames.load_key(Path(config.network.key_file)) if config.network.key_file else None
    shake_hands(store, place.rank, place.world_size, handshake_facts(blueprint, data, key, resume), timeout)
    folder = _shared_folder(store, place, out, config, resume)
    health = Health(lambda: place.open_store(timeout), place.rank, hosting, timeout)
    network = TorchDistributed(
        topology, place, store, health, timeout, key, "nccl" if config.run.device.startswith("cuda") else "gloo"
    )
    try:
        run = assemble(blueprint, data, network, folder.path, folder.run_id, place.rank, place.world_size)
        snapshot = load_snapshot(run) if resume else None
        with StopSignal(Console(quiet=place.rank != 0)) as stop:
            agreed = AgreedStop(store, stop, topology.num_nodes)
            progress = training.train(run, _publish(store, place, run), agreed.is_set, snapshot)
        return _finish(folder, blueprint, run, progress, place)
    finally:
        network.close()


def handshake_facts(blueprint: Blueprint, data: Data, key: bytes | None, resume: bool) -> dict[str, object]:
    """Return what must be equal in all processes, key by key, so that a difference can be named."""
    settings = {
        f"{section}.{name}": value
        for section, values in blueprint.config.model_dump().items()
        for name, value in values.items()
    }
    key_check = hashlib.blake2b(b"dpcsgp handshake", key=key, digest_size=8).hexdigest() if key else "none"
    return {
        **{name: value for name, value in settings.items() if name not in OWN_SETTINGS},
        "graph": blueprint.topology.fingerprint,
        "initial model": hashlib.blake2b(blueprint.anchor_D.numpy().tobytes(), digest_size=8).hexdigest(),
        "input shape": list(data.facts.input_shape),
        "examples per node": list(data.facts.num_examples),
        "key in network.key_file": key_check,
        "resume": resume,
    }


class AgreedStop:
    """Makes all processes stop at the same step: the first to be asked announces one that nobody can have passed.

    Through the messages it waits for, a process is never more than `num_nodes` rounds ahead of any other.
    """

    def __init__(self, store: Store, stop: StopSignal, num_nodes: int) -> None:
        self._store, self._stop, self._margin = store, stop, num_nodes + 1
        self._announced = False

    def is_set(self, step: int) -> bool:
        """Say whether the run ends before this step."""
        if self._stop.is_set(step) and not self._announced and read(self._store, "stop at") is None:
            self._store.set("stop at", str(step + self._margin))
            self._announced = True
        agreed = read(self._store, "stop at")
        return agreed is not None and step >= int(agreed)


def _shared_folder(store: Any, place: Place, out: Path, config: Config, resume: bool) -> ResultsFolder:
    """Rank 0 creates or reopens the results folder; the others learn its run id (and make their own copy if needed)."""
    if place.rank == 0:
        folder = ResultsFolder.reopen(out)[0] if resume else ResultsFolder.create(out, config)
        store.set("run id", folder.run_id)
        return folder
    return ResultsFolder.join(out, config, store.get("run id").decode())


def _publish(store: Any, place: Place, run: training.Run) -> training.Watcher:
    """Tell the launcher where this process stands."""

    def watch(progress: training.Progress) -> None:
        row = run.recorder.rows[-1]
        facts = {
            "step": progress.state.step,
            "polished": progress.rounds_polished,
            "accuracy": row.get("accuracy_nodes"),
            "epsilon": max(run.epsilon_spent()),
            "bytes_per_edge": run.network.traffic.bytes_per_edge,
        }
        store.set(f"progress/{place.rank}", json.dumps(facts))

    return watch


def _finish(
    folder: ResultsFolder, blueprint: Blueprint, run: training.Run, progress: training.Progress, place: Place
) -> dict[str, Any]:
    """Gather the rows of all processes; rank 0 writes the merged results, the others wait until it has."""
    part = write_part(folder, blueprint, run, progress, place.rank, place.world_size)
    parts = run.network.agree("results", part)
    summary = merge_parts(folder, run, progress, parts) if place.rank == 0 else part["summary"]
    run.network.agree("merged", True)
    return summary
