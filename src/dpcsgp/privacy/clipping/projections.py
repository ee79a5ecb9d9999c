"""Linear maps inside larger layers: which parameters they use, and how their calls are recorded.

Recurrent layers and attention are made of linear maps over time or tokens. While examples pass,
such a layer computes the same function by a forward of this package that records each map.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor, nn


class Projection(NamedTuple):
    """A linear map by some rows of a weight of its layer, and the same rows of a bias.

    `first` is the first of these rows; the map's outputs say how many there are. `is_sum`: outputs
    are added to those of the map before, so that both have one loss gradient in memory.
    """

    weight: str
    bias: str | None
    first: int = 0
    is_sum: bool = False


class Record(Protocol):
    """Keeps the inputs of a linear map and where its outputs lie in the graph."""

    def __call__(
        self, layer: nn.Module, activations: Tensor, output: Tensor, projection: Projection
    ) -> None:
        """Keep one call; the first axis of activations and outputs is the examples."""
        ...
