"""One process of a run that logs every frame before sending; for `test_kill_processes.py`.

Arguments: results folder, file of the wiretap, "new" or "resume", then settings.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from dpcsgp.compression import frames
from dpcsgp.network.torch_distributed import ProcessEnvironment
from dpcsgp.randomness import PairStreams
from dpcsgp.runtime.process import run_process_or_end
from dpcsgp.runtime.requests import BuiltinRequest
from dpcsgp.training import TrainingNetwork


class Wiretap:
    """A network around another one that flushes a line before the frame leaves the process."""

    def __init__(self, network: TrainingNetwork, path: Path) -> None:
        self._network = network
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open until the kill

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def exchange(self, frames_NB: Tensor) -> Tensor:
        for frame_B in frames_NB.numpy():
            fields = frames._HEADER.unpack_from(frame_B.data)
            digest = hashlib.blake2b(frame_B.tobytes(), digest_size=8).hexdigest()
            self._file.write(f"{fields[5]} {fields[4]} {digest}\n".encode())
        time.sleep(0.01)  # so that a run lasts long enough to be hit
        return self._network.exchange(frames_NB)


def watch_pair_streams(path: Path) -> None:
    """Write the beginning of every stream that a pair draws to a file, before it is used."""
    file, honest = open(path, "ab", buffering=0), PairStreams.bytes  # noqa: SIM115

    def watched(self: PairStreams, *arguments: Any) -> Any:
        stream = honest(self, *arguments)
        file.write(f"{stream[:16].tobytes().hex()} {arguments}\n".encode())
        return stream

    PairStreams.bytes = watched  # type: ignore[method-assign]


def main(out: str, tap: str, mode: str, *settings: str) -> None:
    watch_pair_streams(Path(f"{tap}.streams"))
    place = ProcessEnvironment.from_environment()
    assert place is not None
    given = () if mode == "resume" else settings
    request = BuiltinRequest(settings=given, out=Path(out), resume=mode == "resume")
    run_process_or_end(request, place, wrap=lambda network: cast(Any, Wiretap(network, Path(tap))))


if __name__ == "__main__":
    main(*sys.argv[1:])
