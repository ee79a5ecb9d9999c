"""Squared norms of rows in double precision, of which ghost norms are made.

In float32 a number below 2.6e-23 squares to zero, and a gradient made of such backprops and large
activations would pass for short whatever its length. A double holds the square of every float32
number, and a sum of them to 2^-50.

Legend: B rows, L numbers in a row.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dpcsgp.kernels.numba_loops import compiled

# numbers turned into doubles at a time where no compiled loop reads them in place
_PIECE: Final = 2**19
_SMALLEST_NORMAL: Final = 2.0**-1022


@compiled("void(float32[:,::1], float64[::1])", any_order=True)
def _squares_of_rows(rows_BL: np.ndarray, squares_B: np.ndarray) -> None:
    for i in range(rows_BL.shape[0]):
        total = 0.0
        for j in range(rows_BL.shape[1]):
            x = np.float64(rows_BL[i, j])
            total += x * x
        squares_B[i] = total


@compiled("void(float32[:,::1], float64[::1])")
def _blank_rows(rows_BL: np.ndarray, squares_B: np.ndarray) -> None:
    for i in range(rows_BL.shape[0]):
        if not np.isfinite(squares_B[i]):
            rows_BL[i] = 0.0


def blank_infinite_rows_(rows_BL: Tensor, squares_B: Tensor) -> None:
    """Set rows whose squared norm is not finite (they hold NaN or infinity) to zero, in place."""
    if rows_BL.device.type == "cpu" and rows_BL.dtype is torch.float32 and rows_BL.is_contiguous():
        _blank_rows(rows_BL.numpy(), squares_B.numpy())
    else:
        rows_BL.masked_fill_(~squares_B.isfinite()[:, None], 0.0)


def squared_norms(rows: Tensor) -> Tensor:
    """Return |row|^2 along the last axis in double precision; finite exactly where the row is."""
    length = rows.shape[-1]
    flat = rows.detach().reshape(math.prod(rows.shape[:-1]), length)
    if rows.device.type == "cpu" and rows.dtype is torch.float32:
        squares = torch.empty(len(flat), dtype=torch.float64)
        _squares_of_rows(flat.contiguous().numpy(), squares.numpy())
        return squares.view(rows.shape[:-1])
    step = max(1, _PIECE // max(length, 1))
    parts = [
        flat[start : start + step].double().square().sum(dim=1)
        for start in range(0, len(flat), step)
    ]
    squares = torch.cat(parts) if parts else flat.new_zeros(0, dtype=torch.float64)
    # Doubles, too, may square to zero: what all coordinates together could have lost is added.
    lost = length * _SMALLEST_NORMAL if rows.dtype is torch.float64 else 0.0
    return (squares + lost).view(rows.shape[:-1])
