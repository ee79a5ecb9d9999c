"""Flat vectors and named parameters.

This is the one place that knows where a parameter lies in a model's vector.

Legend: N hosted nodes, D coordinates of a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ParameterLayout:
    """Names and shapes of a module's trainable parameters.

    They stand in the order of `module.named_parameters()`.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dim: int

    @classmethod
    def of(cls, module: nn.Module) -> ParameterLayout:
        """Read the layout of a module."""
        trained = {
            name: parameter.shape
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        dim = sum(shape.numel() for shape in trained.values())
        return cls(tuple(trained), tuple(trained.values()), dim)

    def views(self, flat_ND: Tensor) -> dict[str, Tensor]:
        """Return name -> (N, *shape) views (no copy) into the flat vectors."""
        return self._cut(flat_ND, (flat_ND.shape[0],))

    def parts(self, flat_D: Tensor) -> dict[str, Tensor]:
        """Return name -> (*shape) views (no copy) into one flat vector."""
        return self._cut(flat_D, ())

    def _cut(self, flat: Tensor, lead: tuple[int, ...]) -> dict[str, Tensor]:
        # One call cuts all of them: slices one by one cost more than a small layer computes.
        runs = flat.split_with_sizes([shape.numel() for shape in self.shapes], dim=-1)
        return {
            name: run.view(*lead, *shape)
            for name, shape, run in zip(self.names, self.shapes, runs, strict=True)
        }

    def flatten(self, module: nn.Module) -> Tensor:
        """Return a copy of the module's trainable parameters as one float32 vector (D,)."""
        parts = [p.detach().reshape(-1) for p in module.parameters() if p.requires_grad]
        return torch.cat(parts).to(torch.float32) if parts else torch.zeros(0)

    def load(self, module: nn.Module, flat_D: Tensor) -> None:
        """Copy a flat vector into the module's parameters."""
        views = self.views(flat_D[None])
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in views:
                    parameter.copy_(views[name][0])
