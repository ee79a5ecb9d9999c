"""One step of an LSTM's gates, and the step back: what happens between two matrix products.

    forward     i, f, o = sigmoid(gates), g = tanh(gates)
                cell    = f cell' + i g
                out     = o tanh(cell)
    way back    d_out   = what comes from the next step + what comes from this output
                d_cell  = d_cell' + d_out o (1 - tanh(cell)^2)
                d_i     = d_cell g i (1 - i)          d_f = d_cell cell' f (1 - f)
                d_g     = d_cell i (1 - g^2)          d_o = d_out tanh(cell) o (1 - o)
                d_cell  = d_cell f, for the step before

Dozens of passes over small tensors in torch, one pass here. The loops have no branch and call no
function, so that the compiler turns them into vector instructions; the exponential is written out
below and within two units of rounding. All arithmetic is in the order written, whatever the
machine: an example's bits depend on its own numbers alone.

Legend: E rows, T steps, H hidden units, G = 4 H gates in torch's order i, f, g, o.
Reference: S. Hochreiter and J. Schmidhuber, Long short-term memory, Neural Computation 9(8), 1997.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dpcsgp.kernels.numba_loops import compiled, inlined

_F: Final = np.float32
_ONE: Final = _F(1.0)
_LOG2_E: Final = _F(1.44269504088896341)
# log 2 in two parts: the first has so few digits that its products with whole numbers are exact
_LN2_HIGH: Final = _F(0.693359375)
_LN2_LOW: Final = _F(-2.12194440e-4)
_LARGEST: Final = _F(87.0)  # beyond, the exponential leaves the normal numbers
_ROUNDER: Final = _F(12582912.0)  # 1.5 x 2^23: adding it rounds to a whole number in the low bits
_ROUNDER_BITS: Final = np.int32(0x4B400000)
_BIAS: Final = np.int32(127)
_SMALL: Final = _F(0.625)  # below, tanh by its series: the other form would cancel
_E2, _E3, _E4 = _F(0.5), _F(1.6666665459e-1), _F(4.1665795894e-2)
_E5, _E6, _E7 = _F(8.3334519073e-3), _F(1.3981999507e-3), _F(1.9875691500e-4)
_T1, _T2, _T3 = _F(-3.33332819422e-1), _F(1.33314422036e-1), _F(-5.37397155531e-2)
_T4, _T5 = _F(2.06390887954e-2), _F(-5.70498872745e-3)
_TWO: Final = _F(2.0)


@inlined
def _exp(x: Any) -> Any:
    """Return e^x for |x| <= 87, the ends beyond, NaN for NaN."""
    x = _LARGEST if x > _LARGEST else x
    x = -_LARGEST if x < -_LARGEST else x
    shifted = np.float32(x * _LOG2_E) + _ROUNDER
    times = shifted - _ROUNDER
    r = (x - times * _LN2_HIGH) - times * _LN2_LOW
    series = ((((_E7 * r + _E6) * r + _E5) * r + _E4) * r + _E3) * r + _E2
    value = (series * r) * r + r + _ONE
    power = np.float32(shifted).view(np.int32) - _ROUNDER_BITS + _BIAS
    return value * np.int32(power << np.int32(23)).view(np.float32)


@inlined
def _sigmoid(x: Any) -> Any:
    return _ONE / (_ONE + _exp(-x))


@inlined
def _tanh(x: Any) -> Any:
    z = x * x
    series = ((((_T5 * z + _T4) * z + _T3) * z + _T2) * z + _T1) * z
    near = x + x * series
    far = _ONE - _TWO / (_exp(_TWO * x) + _ONE)
    return near if -_SMALL < x < _SMALL else far


@compiled(
    "void(int64, float32[:,:,::1], float32[:,::1], float32[::1], float32[:,:,::1], "
    "float32[:,:,::1], float32[:,:,::1], float32[:,:,::1])"
)
def open_gates(
    step: int,
    given_ETG: Any,
    recurrent_EG: Any,
    bias_G: Any,
    gates_TEG: Any,
    cells_TEH: Any,
    bounded_TEH: Any,
    outs_TEH: Any,
) -> None:
    """Do a step forward, from what inputs, hidden states and biases give to the gates.

    Writes gates, tanh of the cells and outputs at this step, and cells one step later.
    """
    num_rows, width = outs_TEH.shape[1:]
    for e in range(num_rows):
        given, recurrent, gates = given_ETG[e, step], recurrent_EG[e], gates_TEG[step, e]
        before, cells = cells_TEH[step, e], cells_TEH[step + 1, e]
        bounded, outs = bounded_TEH[step, e], outs_TEH[step, e]
        for k in range(2 * width):
            gates[k] = _sigmoid(given[k] + recurrent[k] + bias_G[k])
        for k in range(2 * width, 3 * width):
            gates[k] = _tanh(given[k] + recurrent[k] + bias_G[k])
        for k in range(3 * width, 4 * width):
            gates[k] = _sigmoid(given[k] + recurrent[k] + bias_G[k])
        for k in range(width):
            cell = gates[width + k] * before[k] + gates[k] * gates[2 * width + k]
            cells[k] = cell
            bounded[k] = _tanh(cell)
            outs[k] = gates[3 * width + k] * bounded[k]


@compiled(
    "void(int64, float32[:,:,::1], float32[:,:,::1], float32[:,:,::1], float32[:,:,::1], "
    "float32[:,::1], float32[:,::1], float32[:,:,::1])"
)
def gates_back(
    step: int,
    gates_TEG: Any,
    cells_TEH: Any,
    bounded_TEH: Any,
    d_outs_ETH: Any,
    d_hidden_EH: Any,
    d_cell_EH: Any,
    d_gates_ETG: Any,
) -> None:
    """Do a step back: write the loss gradients at the gates, and at the cell state before."""
    num_rows, width = d_cell_EH.shape
    for e in range(num_rows):
        gates, cells, bounded = gates_TEG[step, e], cells_TEH[step, e], bounded_TEH[step, e]
        d_gates, d_outs = d_gates_ETG[e, step], d_outs_ETH[e, step]
        d_hidden, d_cells = d_hidden_EH[e], d_cell_EH[e]
        for k in range(width):
            entry, keep = gates[k], gates[width + k]
            new, shown = gates[2 * width + k], gates[3 * width + k]
            d_out = d_hidden[k] + d_outs[k]
            d_cell = d_cells[k] + d_out * (shown * (_ONE - bounded[k] * bounded[k]))
            d_gates[k] = d_cell * (new * (entry * (_ONE - entry)))
            d_gates[width + k] = d_cell * (cells[k] * (keep * (_ONE - keep)))
            d_gates[2 * width + k] = d_cell * (entry * (_ONE - new * new))
            d_gates[3 * width + k] = d_out * (bounded[k] * (shown * (_ONE - shown)))
            d_cells[k] = d_cell * keep
