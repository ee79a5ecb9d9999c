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
    """Names, shapes and offsets of a module's trainable parameters.

    They stand in the order of `module.named_parameters()`.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    dim: int

    @classmethod
    def of(cls, module: nn.Module) -> ParameterLayout:
        """Read the layout of a module."""
        names, shapes, offsets, dim = [], [], [], 0
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                names.append(name)
                shapes.append(parameter.shape)
                offsets.append(dim)
                dim += parameter.numel()
        return cls(tuple(names), tuple(shapes), tuple(offsets), dim)

    def views(self, flat_ND: Tensor) -> dict[str, Tensor]:
        """Return name -> (N, *shape) views (no copy) into the flat vectors."""
        num_nodes = flat_ND.shape[0]
        return {
            name: flat_ND[:, offset : offset + shape.numel()].view(num_nodes, *shape)
            for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True)
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
