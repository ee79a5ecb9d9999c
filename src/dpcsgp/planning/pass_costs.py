"""What a pass of private gradients takes, in seconds and bytes, from two passes of a few rows.

A pass costs `fixed + per_row * rows` of both. Two small passes of random rows tell the two numbers
for any model; how many rows run at a time is then a public fact of the design (`rows_at_once`), so
that nothing of full size is ever run for a plan. Bytes are those of all
tensors that a pass holds at its fullest moment; scratch inside of kernels is not seen.

Legend: N nodes, P places of a pass.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpcsgp.privacy.clipping.engine import CheckedEngine, Loss
from dpcsgp.privacy.model_probes import most_rows_summed, row_probe
from dpcsgp.privacy.passes import PassShape
from dpcsgp.runs.design import RunDesign

_FEW: Final = 4  # rows of the smaller pass
_MORE: Final = 8
_MOST: Final = 256
_SLOW: Final = 1.0  # seconds of a pass that is not repeated
_LONG_ENOUGH: Final = 0.1  # seconds; passes that are quicker are tried with more rows
# share of the workspace that oneDNN asks for, for a plain LSTM or GRU, and that it writes to
_WRITTEN: Final = 0.4
_RNN: Final = torch.ops.aten.mkldnn_rnn_layer.default


@final
@dataclass(frozen=True)
class PassCosts:
    """Seconds and bytes of one node's pass: `fixed + per_row * rows`."""

    seconds_fixed: float
    seconds_per_row: float
    bytes_fixed: float
    bytes_per_row: float

    def seconds(self, rows: int) -> float:
        """Predict the time of a pass."""
        return self.seconds_fixed + self.seconds_per_row * rows

    def bytes(self, rows: int) -> float:
        """Predict what a pass holds at its peak, beside parameters and inputs."""
        return self.bytes_fixed + self.bytes_per_row * rows


def measure_passes(
    engine: CheckedEngine, module: nn.Module, inputs: Tensor, targets: Tensor, views: int = 1
) -> PassCosts:
    """Run two small passes of one node.

    Args:
        engine: an engine that has not passed anything yet.
        module: its model, with parameters of any values.
        inputs: a few public or random rows (J, ...); they are repeated as needed.
        targets: their targets.
        views: augmented views of an example.
    """
    flat_1D = torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])

    def one_pass(rows: int) -> Callable[[], Tensor]:
        return _pass(engine, flat_1D[None].float(), inputs, targets, rows, views)

    # Memory and time from the same two passes: large models are slow.
    small, _ = _watched(one_pass(_FEW))
    large, more = _watched(one_pass(_MORE))
    bytes_per_row = max(large - small, 0) / (_MORE - _FEW)
    bytes_fixed = max(large - bytes_per_row * _MORE, 0.0)
    rows = _MORE
    if more < _SLOW:  # without the watch, and with more rows until the clock sees them
        few, more = _seconds(one_pass(_FEW)), _seconds(one_pass(rows))
        while more < _LONG_ENOUGH and 4 * rows <= _MOST:
            rows *= 4
            more = _seconds(one_pass(rows))
        per_row = max((more - few) / (rows - _FEW), more / rows / 2)
    else:
        per_row = more / rows
    seconds_fixed = max(more - per_row * rows, 0.0)
    return PassCosts(seconds_fixed, per_row, bytes_fixed, bytes_per_row)


def rows_at_once(design: RunDesign, engine: CheckedEngine, inputs: Tensor) -> tuple[int, bool]:
    """Return how many rows run together in the largest pass, and whether nodes pass together."""
    model_ND = design.anchor_D.expand(design.topology.num_nodes, -1)
    most, together = 1, False
    for shape, nodes in design.mechanism.rows_of_same_shape().items():
        nodes_at_once, places = engine.checked_places(model_ND[nodes], inputs, shape)
        most, together = max(most, nodes_at_once * places), together or places == shape.places
    return most, together


def places_of_step(design: RunDesign) -> int:
    """Return how many places all nodes' batches of one step take, blank ones included."""
    shapes = design.mechanism.rows_of_same_shape()
    return sum(len(nodes) * shape.places * shape.passes for shape, nodes in shapes.items())


def places_of_pass(design: RunDesign) -> int:
    """Return how many places all nodes have in one pass: examples are fetched pass by pass."""
    shapes = design.mechanism.rows_of_same_shape()
    return sum(len(nodes) * shape.places for shape, nodes in shapes.items())


def probe_bytes(
    design: RunDesign, inputs: Tensor, targets: Tensor, loss: Loss, costs: PassCosts
) -> float:
    """Predict what the checks of a model and loss of one's own hold at their fullest moment.

    They compare rows, and clipped sums, of batches up to the sizes of the run (`model_probes`).
    """
    per_unit = max(design.config.privacy.max_rows_per_unit, 1)
    sizes = {per_unit * size for size in design.mechanism.expected_batch_sizes}
    batches = sorted(sizes, reverse=True)
    peaks = [costs.bytes(most_rows_summed(design.module, inputs[:2], batches))]
    for compared in (None, loss):
        compare, most = row_probe(design.module, compared, (inputs, targets), batches)
        small, _ = _watched(lambda compare=compare: compare(_MORE))
        large, _ = _watched(lambda compare=compare: compare(2 * _MORE))
        per_row = max(large - small, 0) / _MORE
        peaks.append(large + per_row * (most - 2 * _MORE))
    return max(peaks)


def _pass(
    engine: CheckedEngine,
    model_1D: Tensor,
    inputs: Tensor,
    targets: Tensor,
    rows: int,
    views: int,
) -> Callable[[], Tensor]:
    index = torch.arange(rows) % len(inputs)
    chosen = inputs[index][None]
    if views > 1:
        chosen = chosen[:, :, None].expand(-1, -1, views, *chosen.shape[2:])
    present, shape = torch.ones(1, rows, dtype=torch.bool), PassShape(rows=rows)
    return lambda: engine.clipped_sum(
        model_1D, chosen.contiguous(), targets[index][None], present, 1.0, shape
    )


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _watched(action: Callable[[], object]) -> tuple[int, float]:
    """Return the most bytes of tensors that were held at a time, and the seconds it took."""
    with _HeldBytes() as watched:
        seconds = _seconds(action)
    return watched.peak, seconds


class _HeldBytes(TorchDispatchMode):
    """Counts the memory behind every tensor that is made while it is on, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for part in results if isinstance(results, tuple | list) else (results,):
            if isinstance(part, Tensor):
                reserved = func is _RNN and part.dtype is torch.uint8
                self._see(part.untyped_storage(), _WRITTEN if reserved else 1.0)
        return results

    def _see(self, storage: torch.UntypedStorage, share: float) -> None:
        name, size = id(storage), int(share * storage.nbytes())
        if name in self._seen:
            return

        def let_go(_: object) -> None:
            self.held -= size
            del self._seen[name]

        self._seen[name] = weakref.ref(storage, let_go)
        self.held += size
        self.peak = max(self.peak, self.held)
