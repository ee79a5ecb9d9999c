"""What processes of a run must agree on, and settings that several processes refuse."""

from __future__ import annotations

import hashlib
import os
from typing import Final

from dpcsgp.config import Config
from dpcsgp.errors import (
    ConfigError,
)
from dpcsgp.network.torch_distributed import (
    nodes_of_ranks,
)
from dpcsgp.runs.design import RunDesign, build_topology
from dpcsgp.runtime.workers import PARENT

# Settings that processes need not agree on: secrets, paths, devices.
MACHINE_SETTINGS: Final = (
    "network.key_file",
    "graph.edges_file",
    "run.device",
    "run.max_rows_per_pass",
    "run.memory_limit_gb",
    "run.trackers",
    "privacy.seed",
)


def refuse_lag(config: Config) -> None:
    """Refuse lag for processes of one run: they exchange all together, by collective calls."""
    if config.network.max_lag:
        raise ConfigError(
            f"network.max_lag = {config.network.max_lag}: processes of `launch` and torchrun go in "
            "step; set network.max_lag = 0, play lag in one process with `dpcsgp run`, or run "
            "parties with `dpcsgp party run`"
        )


def refuse_unauthenticated_pairs(config: Config, world_size: int) -> None:
    """Refuse shared noise between machines without a key file.

    Whoever could write other public keys to the store would know the noise of every pair.
    """
    # Without a launcher's word every process counts as a machine of its own.
    unsaid = world_size if PARENT in os.environ else 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", unsaid))
    if config.privacy.max_colluders != "all" and local < world_size:
        raise ConfigError(
            f"privacy.max_colluders = {config.privacy.max_colluders}: processes on several "
            "machines need network.key_file, which authenticates the keys of shared noise; make "
            'one and copy it to every machine, or set privacy.max_colluders = "all"'
        )


def refuse_few_colluders(config: Config, world_size: int) -> None:
    """Refuse a promise that one other process could break: colluders are counted in nodes."""
    colluders = config.privacy.max_colluders
    if colluders == "all" or PARENT in os.environ:  # workers of one launcher are one party
        return
    most = max(map(len, nodes_of_ranks(build_topology(config).num_nodes, world_size)))
    if 0 < colluders < most:
        raise ConfigError(
            f"privacy.max_colluders = {colluders}: counts nodes, and one process hosts {most} of "
            f"them, so a single other party could break the promise; choose at least {most}, "
            'one process per node, or privacy.max_colluders = "all"'
        )


def handshake_facts(design: RunDesign, key: bytes | None, resume: bool) -> dict[str, object]:
    """Return what must be equal in all processes, key by key, so that a difference can be named."""
    settings = design.config.flat()
    # Digests in the place of what is secret or large.
    digest = hashlib.blake2b(b"dpcsgp handshake", key=key, digest_size=8) if key else None
    builtin = bool(design.facts.num_classes)
    hint = "" if builtin else " (build it after the same torch.manual_seed)"
    initial = hashlib.blake2b(design.anchor_D.numpy().tobytes(), digest_size=8)
    return {
        **{name: value for name, value in settings.items() if name not in MACHINE_SETTINGS},
        "graph": design.topology.fingerprint,
        "mixing rate": f"{design.mixing_rate or 0:.9g}",
        f"initial model{hint}": initial.hexdigest(),
        "input shape": list(design.facts.input_shape),
        "examples per node": list(design.facts.num_examples),
        **dict(design.facts.details),
        "key in network.key_file": digest.hexdigest() if digest else "none",
        "--resume": resume,
    }
