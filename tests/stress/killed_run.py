"""Train in this process and write down every frame before it is delivered; started, and killed, by
`test_kill.py`.

Arguments: results folder, file of the wiretap, "new" or "resume", then settings. The operating
system has the wiretap's line before the exchange returns, so a killed process cannot have delivered
more than it shows."""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from dpcsgp import training
from dpcsgp.compression import frames
from dpcsgp.config import load_config
from dpcsgp.graphs import Topology
from dpcsgp.network import Simulator
from dpcsgp.runs.build import build_run
from dpcsgp.runs.data import load_builtin_data
from dpcsgp.runs.design import design_run
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.summary import write_results
from dpcsgp.runtime.session import newest_checkpoint


class Wiretap(Simulator):
    """A network that appends kind, round, node and digest of every frame to a file before the
    frame arrives anywhere."""

    def __init__(self, topology: Topology, path: Path) -> None:
        super().__init__(topology)
        self.carries_gradient = False
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open until the kill

    def exchange(self, frames_NB: Tensor) -> Tensor:
        kind = "gradient" if self.carries_gradient else "polish"
        for frame_B in frames_NB.numpy():
            fields = frames._HEADER.unpack_from(frame_B.data)
            digest = hashlib.blake2b(frame_B.tobytes(), digest_size=8).hexdigest()
            self._file.write(f"{kind} {fields[5]} {fields[4]} {digest}\n".encode())
        self.carries_gradient = False
        return super().exchange(frames_NB)


class Noting:
    """An algorithm that tells the wiretap that the next frame carries a new private gradient."""

    def __init__(self, algorithm: Any, tap: Wiretap) -> None:
        self._algorithm, self._tap = algorithm, tap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def descend(self, state: Any, grad_ND: Tensor) -> Any:
        self._tap.carries_gradient = True
        return self._algorithm.descend(state, grad_ND)


def main() -> None:
    out, tap, mode, *settings = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], *sys.argv[4:]
    if mode == "resume":
        folder, config = ResultsFolder.reopen(out)
    else:
        config = load_config(None, settings)
        folder = ResultsFolder.create(out, config)
    data = load_builtin_data(config)
    design = design_run(config, data.facts)
    network = Wiretap(design.topology, tap)
    run = build_run(design, data, network, folder)
    run = replace(run, algorithm=cast(Any, Noting(run.algorithm, network)))
    checkpoint = newest_checkpoint(run) if mode == "resume" else None
    print("ready", flush=True)
    progress = training.train(run, watch=lambda _: time.sleep(0.01), resume_from=checkpoint)
    write_results(folder, design, run, progress)
    run.gradients.forget_all()


if __name__ == "__main__":
    main()
