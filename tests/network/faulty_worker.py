"""One process of a run that may tamper with what it sends.

Run by test_failures.py: `faulty_worker.py FAULT OUT SETTING...`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import torch

from dpcsgp.network.torch_distributed import ProcessEnvironment
from dpcsgp.runtime.process import run_process_or_end
from dpcsgp.runtime.requests import BuiltinRequest
from dpcsgp.training import TrainingNetwork

FAULTY_ROUND = 5


class Tampering:
    """A network around another one that spoils what its nodes send in one round."""

    def __init__(self, network: TrainingNetwork, fault: str) -> None:
        self._network, self._fault = network, fault
        self._round, self._last = 0, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def exchange(self, frames_NB: torch.Tensor) -> torch.Tensor:
        sent = frames_NB.clone()
        if self._round == FAULTY_ROUND:
            sent = self._spoil(sent)
        self._last, self._round = frames_NB.clone(), self._round + 1
        received = self._network.exchange(sent)
        received[list(self._network.own_rows)] = frames_NB  # only what travels is spoilt
        return received

    def _spoil(self, frames_NB: torch.Tensor) -> torch.Tensor:
        if self._fault == "corrupt":
            frames_NB[:, frames_NB.shape[1] // 2] ^= 4
        if self._fault == "truncate":
            frames_NB[:, -8:] = (
                0  # what a receiver finds in its buffer after a message that was too short
            )
        if self._fault == "replay":
            assert self._last is not None
            return self._last
        return frames_NB


def main(fault: str, out: str, *settings: str) -> None:
    place = ProcessEnvironment.from_environment()
    assert place is not None
    request = BuiltinRequest(settings=settings, out=Path(out))
    run_process_or_end(request, place, wrap=lambda network: cast(Any, Tampering(network, fault)))


if __name__ == "__main__":
    main(*sys.argv[1:])
