"""Before the first release: does a row contribute the same bits whatever its place and its companions are?

The bound on an example's influence rests on it, and it depends on the kernels that this machine picks for this model, so
it is checked at every start, with the real engine, in the real shapes, on public or random rows. Kernels are chosen by
shape and not by values, so a few generic rows show every difference; some vector routines take another branch for a
whole register, so companions with extreme values are tried as well. Where bits differ, fewer rows are passed at a time,
down to one; where even that does not repeat itself, the run is refused.

Legend: K public rows, N hosted nodes, P places of a pass, D coordinates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from dpcsgp.errors import ModelError
from dpcsgp.privacy.clipping import CheckedEngine
from dpcsgp.privacy.mechanism import GaussianMechanism
from dpcsgp.privacy.passes import PassShape
from dpcsgp.randomness import torch_seed

Rows = tuple[Tensor, Tensor]

_EXTREMES: Final = (1e30, float("inf"), float("nan"), -1e30, 1e-40)
_CLIP: Final = 1.0
_NEARBY: Final = 0.02


def engine_with_equal_rows(
    engine: CheckedEngine, model_D: Tensor, public: Rows, mechanism: GaussianMechanism
) -> CheckedEngine:
    """Return the engine, or a slower one, whose rows do not depend on each other in any shape of the mechanism's.

    Args:
        engine: the engine that the run would use.
        model_D: a public model, such as the initial one.
        public: inputs (K, ...) and targets (K, ...) of some public or random examples.
        mechanism: says how many nodes pass together, and in which shapes.

    Raises:
        ModelError: where even one row at a time does not repeat itself bit for bit.
    """
    # Not the model itself: layers that start at zero would hide every difference behind them.
    with torch_seed(0, "row checks"):
        model_D = model_D + _NEARBY * torch.randn(model_D.shape, dtype=model_D.dtype)
    model_D = model_D.to(public[0].device)
    quiet = engine.without_chance(public[0])
    difference: str | None = None
    while quiet is not None:
        difference = _first_difference(quiet, model_D, public, mechanism)
        if difference is None:
            return engine
        slower, quiet = engine.slower(), quiet.slower()
        engine = slower if slower is not None else engine
    raise ModelError(
        f"model: {difference} does not repeat itself bit for bit, even one example at a time; the bound on an example's "
        "influence needs that. Use deterministic layers (torch.use_deterministic_algorithms), or another device"
    )


def _first_difference(engine: CheckedEngine, model_D: Tensor, public: Rows, mechanism: GaussianMechanism) -> str | None:
    for shape, rows in mechanism.rows_of_same_shape().items():
        for name in _differences(engine, model_D.expand(len(rows), -1).contiguous(), public, shape):
            return name
    return None


def _differences(engine: CheckedEngine, models_ND: Tensor, public: Rows, shape: PassShape) -> Iterator[str]:
    """Yield the names of what differs for one row between places and companions."""
    num_nodes, places = engine.checked_places(models_ND, public[0], shape)
    models_ND, present_NP = models_ND[:num_nodes], torch.ones(num_nodes, places, dtype=torch.bool)
    present_NP = present_NP.to(public[0].device)
    row, *others = zip(*public, strict=True)
    others = others or [row]
    expected: list[tuple[str, Tensor]] = []
    # The same row in every place: all rows of all layers must agree.
    for name, rows in engine.rows(models_ND, *_spread(row, num_nodes, places), present_NP, _CLIP, shape):
        bits = _bits(rows)
        expected.append((name, bits[:1]))
        if not torch.equal(bits, bits[:1].expand_as(bits)):
            yield name
    # The row in a few places, among others, among extreme ones, and alone.
    at = sorted({0, places // 2, places - 1})
    for companions, alone in _companions(row, others, num_nodes, places):
        inputs, targets = companions
        present_NP = torch.full_like(present_NP, not alone)
        for part, value in ((inputs, row[0]), (targets, row[1])):
            part[:, at] = value
        present_NP[:, at] = True
        try:
            found = engine.rows(models_ND, inputs, targets, present_NP, _CLIP, shape)
        except Exception:  # an extreme row that model or loss refuse would be left out of the pass
            continue
        for (name, first), (_, rows) in zip(expected, found, strict=True):
            for bits in _at_places(_bits(rows), num_nodes, places, at):
                if not torch.equal(bits, first.expand_as(bits)):
                    yield name


def _spread(row: Rows, num_nodes: int, places: int) -> Rows:
    inputs, targets = (part.expand(num_nodes, places, *part.shape).clone() for part in row)
    return inputs, targets


def _companions(row: Rows, others: list[Rows], num_nodes: int, places: int) -> Iterator[tuple[Rows, bool]]:
    """Yield batches of companions, and whether they are absent."""
    filled = [others[place % len(others)] for place in range(places)]
    inputs, targets = (
        torch.stack(part).expand(num_nodes, places, *part[0].shape) for part in zip(*filled, strict=True)
    )
    yield (inputs.clone(), targets.clone()), False
    yield (inputs.clone(), targets.clone()), True
    if inputs.is_floating_point():
        values = torch.tensor([_EXTREMES[place % len(_EXTREMES)] for place in range(places)]).to(inputs)
        yield (inputs * 0 + values.view(1, places, *[1] * (inputs.dim() - 2)), targets.clone()), False


def _at_places(bits: Tensor, num_nodes: int, places: int, at: list[int]) -> Iterator[Tensor]:
    """Yield the rows (its views) of every node's chosen places, out of all nodes' rows one after the other."""
    by_node = bits.unflatten(0, (num_nodes, -1))
    views = max(1, by_node.shape[1] // places)
    for place in at:
        yield by_node[:, place * views : (place + 1) * views].flatten(0, 1)


def _bits(rows: Tensor) -> Tensor:
    """Return the bit patterns: NaN equals itself, and zero is not minus zero."""
    return rows.contiguous().view({4: torch.int32, 8: torch.int64, 2: torch.int16}[rows.element_size()])
