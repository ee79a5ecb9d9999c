"""Metrics that know which way is better, and errors that name the metric they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from dpcsgp.errors import ConfigError
from dpcsgp.records.metrics import Direction, usual_direction


@final
@dataclass(frozen=True)
class DirectedMetric:
    """A metric with its direction: "higher" or "lower" values are better."""

    function: Any  # (outputs, targets) of the whole test set -> one number
    direction: Direction

    def __call__(self, outputs: Any, targets: Tensor) -> Any:
        """Return what the function says."""
        return self.function(outputs, targets)


def directions_of(metrics: Mapping[str, Any]) -> dict[str, Direction]:
    """Return which way is better: as told, otherwise as the name suggests."""
    return {
        name: metric.direction if isinstance(metric, DirectedMetric) else usual_direction(name)
        for name, metric in metrics.items()
    }


def measured(metrics: Mapping[str, Any], outputs: Any, targets: Tensor) -> dict[str, float]:
    """Return the value of every metric.

    What a metric of the caller's own raises passes with a note that names the metric.
    """
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        try:
            value = metric(outputs, targets)
        except Exception as error:
            error.add_note(f"in metrics[{name!r}], measured on the public test data")
            raise
        values[name] = _number(name, value)
    return values


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(
            f"metrics[{name!r}]: expected one number for the whole test set, got {shape}"
        ) from None
