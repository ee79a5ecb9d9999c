"""Train in this process and write down every frame before it is delivered; started, and killed, by `test_kill.py`.

Arguments: results folder, file of the wiretap, "new" or "resume", then settings. The wiretap's line (round, step) is on
its way to the operating system before the exchange returns, so a killed process cannot have sent more than it shows.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from torch import Tensor

from dpcsgp import training
from dpcsgp.assembly import assemble, design, load_data
from dpcsgp.cli.session import load_snapshot
from dpcsgp.compression import frames
from dpcsgp.config import load_config
from dpcsgp.graphs import Topology
from dpcsgp.network import Simulator
from dpcsgp.results import ResultsFolder


class Wiretap(Simulator):
    """A network that appends (round, node) of every frame to a file before the frame arrives anywhere."""

    def __init__(self, topology: Topology, path: Path) -> None:
        super().__init__(topology)
        self._file = open(path, "ab", buffering=0)

    def exchange(self, frames_NB: Tensor) -> Tensor:
        for frame_B in frames_NB.numpy():
            fields = frames._HEADER.unpack_from(frame_B.data)
            self._file.write(f"{fields[5]} {fields[4]}\n".encode())
        return super().exchange(frames_NB)


def main() -> None:
    out, tap, mode, *settings = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], *sys.argv[4:]
    if mode == "resume":
        folder, config = ResultsFolder.reopen(out)
    else:
        config = load_config(None, settings)
        folder = ResultsFolder.create(out, config)
    data = load_data(config)
    blueprint = design(config, data.facts)
    run = assemble(blueprint, data, Wiretap(blueprint.topology, tap), folder.path, folder.run_id)
    snapshot = load_snapshot(run) if mode == "resume" else None
    print("ready", flush=True)
    progress = training.train(run, watch=lambda _: time.sleep(0.01), resume_from=snapshot)
    folder.finish(blueprint, run, progress)


if __name__ == "__main__":
    main()
