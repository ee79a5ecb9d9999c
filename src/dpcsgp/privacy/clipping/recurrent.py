"""Recurrent layers step by step, so that their weights get ghost norms over all time steps.

A recurrent layer multiplies its inputs by one weight and its hidden state by another, at every
step: both are linear layers over time, whose per-example gradients follow from inputs, hidden
states and the loss gradients at the gates. `torch.nn` keeps the latter to itself, so the same
function is computed here, with a way back that returns them and forms no weight gradient.

What happens between the matrix products of an LSTM is done by compiled loops where these can be
had (float32 on a processor): in torch it takes more time than the products.

Legend: E rows, T steps, I inputs, H hidden units, G gates (a multiple of H).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence

from dpcsgp.errors import ModelError
from dpcsgp.kernels.lstm_gates import gates_back, open_gates
from dpcsgp.privacy.clipping.products import linear
from dpcsgp.privacy.clipping.projections import Projection, Record

State = tuple[Tensor, ...]  # (hidden,), or (hidden, cell) of an LSTM


class _Gradients(NamedTuple):
    """Loss gradients at what the inputs and what the hidden states give to the gates."""

    given_ETG: Tensor
    hidden_ETG: Tensor
    state: State


@final
@dataclass(frozen=True)
class _Cell:
    """One kind of cell: a step, and the way back over all steps.

    `step(given, hidden, state)` returns the next state and what the way back needs of this step.
    Where gates are a function of given + hidden, `joint` is true, and `hidden` holds the sum with
    both biases.
    """

    joint: bool
    step: Callable[[Tensor, Tensor, State], tuple[State, State]]
    back: Callable[[State, Tensor, Tensor, State], _Gradients]


def _lstm_step(_: Tensor, gates_EG: Tensor, state: State) -> tuple[State, State]:
    width, cell = state[1].shape[1], state[1]
    opened = torch.sigmoid(gates_EG[:, : 2 * width])
    proposed = torch.tanh(gates_EG[:, 2 * width : 3 * width])
    shown = torch.sigmoid(gates_EG[:, 3 * width :])
    kept = torch.addcmul(opened[:, width:] * cell, opened[:, :width], proposed)
    bounded = torch.tanh(kept)
    return (shown * bounded, kept), (opened, proposed, shown, cell, bounded)


def _lstm_back(saved: State, weight_GH: Tensor, d_outs_TEH: Tensor, d_last: State) -> _Gradients:
    opened, proposed, shown, before, bounded = saved
    length, num_rows, width = bounded.shape
    entry, keep = opened.split(width, dim=2)
    # what a change of the cell state does to three gates, and of the output to the fourth
    d_gates = proposed.new_empty(length, num_rows, 4, width)
    torch.mul(proposed, entry * (1 - entry), out=d_gates[:, :, 0])
    torch.mul(before, keep * (1 - keep), out=d_gates[:, :, 1])
    torch.mul(entry, 1 - proposed.square(), out=d_gates[:, :, 2])
    torch.mul(bounded, shown * (1 - shown), out=d_gates[:, :, 3])
    into_cell = shown * (1 - bounded.square())
    d_hidden, d_cell = d_last[0] + d_outs_TEH[-1], d_last[1].clone()
    for t in range(length - 1, -1, -1):
        d_cell.addcmul_(d_hidden, into_cell[t])
        d_gates[t, :, :3].mul_(d_cell[:, None])
        d_gates[t, :, 3].mul_(d_hidden)
        d_hidden = d_gates[t].view(num_rows, -1) @ weight_GH
        if t:
            d_hidden += d_outs_TEH[t - 1]
        d_cell.mul_(keep[t])
    flat_ETG = d_gates.flatten(2).transpose(0, 1)
    return _Gradients(flat_ETG, flat_ETG, (d_hidden, d_cell))


def _gru_step(given_EG: Tensor, hidden_EG: Tensor, state: State) -> tuple[State, State]:
    (before,), width = state, state[0].shape[1]
    both = torch.sigmoid(given_EG[:, : 2 * width] + hidden_EG[:, : 2 * width])
    reset, update = both[:, :width], both[:, width:]
    recalled = hidden_EG[:, 2 * width :]
    proposed = torch.tanh(torch.addcmul(given_EG[:, 2 * width :], reset, recalled))
    rest = before - proposed
    return (torch.addcmul(proposed, update, rest),), (reset, update, proposed, recalled, rest)


def _gru_back(saved: State, weight_GH: Tensor, d_outs_TEH: Tensor, d_last: State) -> _Gradients:
    reset, update, proposed, recalled, rest = saved
    length, num_rows, width = proposed.shape
    # what a change of the output does to each gate, through the hidden states and the inputs
    by_proposed = (1 - update) * (1 - proposed.square())
    d_gates_ETG = proposed.new_empty(num_rows, length, 3 * width)
    d_gates = d_gates_ETG.view(num_rows, length, 3, width).transpose(0, 1)
    torch.mul(by_proposed, recalled * reset * (1 - reset), out=d_gates[:, :, 0])
    torch.mul(rest, update * (1 - update), out=d_gates[:, :, 1])
    torch.mul(by_proposed, reset, out=d_gates[:, :, 2])
    d_states = torch.empty_like(d_outs_TEH)
    d_hidden = d_last[0] + d_outs_TEH[-1]
    for t in range(length - 1, -1, -1):
        d_states[t] = d_hidden
        d_gates[t].mul_(d_hidden[:, None])
        through = d_hidden * update[t]
        d_hidden = torch.addmm(through, d_gates[t].view(num_rows, -1), weight_GH)
        if t:
            d_hidden += d_outs_TEH[t - 1]
    d_proposed_ETH = d_states.mul_(by_proposed).transpose(0, 1)
    given_ETG = torch.cat([d_gates_ETG[:, :, : 2 * width], d_proposed_ETH], dim=2)
    return _Gradients(given_ETG, d_gates_ETG, (d_hidden,))


def _tanh_step(_: Tensor, gates_EG: Tensor, state: State) -> tuple[State, State]:
    hidden = torch.tanh(gates_EG)
    return (hidden,), (hidden,)


def _tanh_back(saved: State, weight_GH: Tensor, d_outs_TEH: Tensor, d_last: State) -> _Gradients:
    return _simple_back(1 - saved[0].square(), weight_GH, d_outs_TEH, d_last)


def _relu_step(_: Tensor, gates_EG: Tensor, state: State) -> tuple[State, State]:
    hidden = torch.relu(gates_EG)
    return (hidden,), (hidden,)


def _relu_back(saved: State, weight_GH: Tensor, d_outs_TEH: Tensor, d_last: State) -> _Gradients:
    return _simple_back((saved[0] > 0).to(d_outs_TEH), weight_GH, d_outs_TEH, d_last)


def _simple_back(
    slopes_TEH: Tensor, weight_GH: Tensor, d_outs_TEH: Tensor, d_last: State
) -> _Gradients:
    d_gates = slopes_TEH
    d_hidden = d_last[0] + d_outs_TEH[-1]
    for t in range(len(d_gates) - 1, -1, -1):
        d_hidden = d_gates[t].mul_(d_hidden) @ weight_GH
        if t:
            d_hidden += d_outs_TEH[t - 1]
    flat_ETG = d_gates.transpose(0, 1)
    return _Gradients(flat_ETG, flat_ETG, (d_hidden,))


def _run(
    cell: _Cell, given_ETG: Tensor, weight_GH: Tensor, bias_G: Tensor | None, state: State
) -> tuple[Tensor, State, list[State]]:
    """Do all steps in plain operations.

    Return the hidden states after all steps, the last state, and what the way back needs.
    """
    columns, hidden_states, saved = weight_GH.t(), [], []
    for given_EG in given_ETG.unbind(1):
        hidden_EG = state[0] @ columns
        if bias_G is not None:
            hidden_EG = hidden_EG + bias_G
        if cell.joint:
            hidden_EG = hidden_EG + given_EG
        state, kept = cell.step(given_EG, hidden_EG, state)
        hidden_states.append(state[0])
        saved.append(kept)
    return torch.stack(hidden_states, dim=1), state, saved


_CELLS: Final = {
    "LSTM": _Cell(True, _lstm_step, _lstm_back),
    "GRU": _Cell(False, _gru_step, _gru_back),
    "RNN_TANH": _Cell(True, _tanh_step, _tanh_back),
    "RNN_RELU": _Cell(True, _relu_step, _relu_back),
}
RECURRENT: Final = (nn.LSTM, nn.GRU, nn.RNN)


def _fused(cell: _Cell, given_ETG: Tensor) -> bool:
    """Tell whether compiled loops do what happens between the matrix products."""
    return (
        cell is _CELLS["LSTM"]
        and given_ETG.device.type == "cpu"
        and given_ETG.dtype == torch.float32
    )


def _fused_run(
    given_ETG: Tensor, weight_GH: Tensor, bias_G: Tensor | None, state: State
) -> tuple[Tensor, State, State]:
    """Do all steps of an LSTM; return hidden states, the last state, what the way back needs."""
    num_rows, length, width = *given_ETG.shape[:2], weight_GH.shape[1]
    recurrent_EG = given_ETG.new_empty(num_rows, 4 * width)
    gates_TEG = given_ETG.new_empty(length, num_rows, 4 * width)
    cells_TEH = given_ETG.new_empty(length + 1, num_rows, width)
    bounded_TEH, outs_TEH = (given_ETG.new_empty(length, num_rows, width) for _ in range(2))
    hidden, cells_TEH[0] = state
    columns, outs = weight_GH.t().contiguous(), outs_TEH.unbind()
    bias_G = given_ETG.new_zeros(4 * width) if bias_G is None else bias_G
    memory = _arrays(given_ETG, recurrent_EG, bias_G, gates_TEG, cells_TEH, bounded_TEH, outs_TEH)
    for t in range(length):
        torch.mm(hidden, columns, out=recurrent_EG)
        open_gates(t, *memory)
        hidden = outs[t]
    last = hidden.clone(), cells_TEH[-1].clone()
    return outs_TEH.transpose(0, 1), last, (gates_TEG, cells_TEH, bounded_TEH)


def _fused_back(saved: State, weight_GH: Tensor, d_outs_ETH: Tensor, d_last: State) -> _Gradients:
    gates_TEG, cells_TEH, bounded_TEH = saved
    d_gates_ETG = gates_TEG.new_empty(*d_outs_ETH.shape[:2], len(weight_GH))
    d_hidden, d_cell = (part.clone(memory_format=torch.contiguous_format) for part in d_last)
    memory = _arrays(gates_TEG, cells_TEH, bounded_TEH, d_outs_ETH, d_hidden, d_cell, d_gates_ETG)
    d_gates = d_gates_ETG.unbind(1)
    for t in range(len(gates_TEG) - 1, -1, -1):
        gates_back(t, *memory)
        torch.mm(d_gates[t], weight_GH, out=d_hidden)
    return _Gradients(d_gates_ETG, d_gates_ETG, (d_hidden, d_cell))


def _arrays(*tensors: Tensor) -> list[Any]:
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


class _Recurrence(torch.autograd.Function):
    """All steps of one layer in one direction; `slot` is where the hidden states' gates begin.

    `slot` stands for a zero that is added to what the hidden states give to the gates: its gradient
    is theirs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cell: _Cell,
        given_ETG: Tensor,
        slot_ETG: Tensor,
        weight_GH: Tensor,
        bias_G: Tensor | None,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.cell, ctx.fused = cell, _fused(cell, given_ETG)
        if ctx.fused:
            outs_ETH, last, kept = _fused_run(given_ETG, weight_GH, bias_G, state)
        else:
            outs_ETH, last, saved = _run(cell, given_ETG, weight_GH, bias_G, state)
            kept = tuple(torch.stack(parts) for parts in zip(*saved, strict=True))
        ctx.save_for_backward(weight_GH, *kept)
        return outs_ETH, *last

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *d_outputs: Tensor
    ) -> tuple[Any, ...]:
        weight_GH, *saved = ctx.saved_tensors
        d_outs_ETH, *d_last = d_outputs
        if ctx.fused:
            found = _fused_back(tuple(saved), weight_GH, d_outs_ETH, tuple(d_last))
        else:
            d_outs_TEH = d_outs_ETH.transpose(0, 1)
            found = ctx.cell.back(tuple(saved), weight_GH, d_outs_TEH, tuple(d_last))
        return None, found.given_ETG, found.hidden_ETG, None, None, *found.state


def has_closed_form(layer: nn.RNNBase) -> bool:
    """Tell whether a recurrent layer holds the parameters that it should, and no others."""
    names = {name for names in _names(layer) for name in names if name is not None}
    return layer.proj_size == 0 and set(layer._parameters) == names


def _names(layer: nn.RNNBase) -> list[tuple[str, str, str | None, str | None]]:
    """Return the weights and biases of each layer and direction, in the order of computation."""
    suffixes = [
        f"l{number}{direction}"
        for number in range(layer.num_layers)
        for direction in (("", "_reverse") if layer.bidirectional else ("",))
    ]
    return [
        (
            f"weight_ih_{suffix}",
            f"weight_hh_{suffix}",
            f"bias_ih_{suffix}" if layer.bias else None,
            f"bias_hh_{suffix}" if layer.bias else None,
        )
        for suffix in suffixes
    ]


def recurrent_forward(
    layer: nn.RNNBase, record: Record | None, input: Any, hx: Any = None
) -> tuple[Tensor, Any]:
    """Compute what the layer computes, and record the linear maps of all steps.

    Without `record`, in plain operations that torch.func can batch.
    """
    if isinstance(input, PackedSequence):
        raise ModelError(
            f"model: a packed sequence in {type(layer).__name__} has shapes that depend on private "
            "data; give padded sequences of one public length, and pick the last step by a mask"
        )
    if input.dim() == 2:  # one sequence without examples: as torch does it, and not recorded
        return type(layer).forward(layer, input, hx)
    outs = (input if layer.batch_first else input.transpose(0, 1)).contiguous()
    first = _initial(layer, outs, hx)
    directions = 2 if layer.bidirectional else 1
    names, lasts = _names(layer), []
    for number in range(layer.num_layers):
        if number and layer.dropout:
            outs = F.dropout(outs, layer.dropout, layer.training)
        found = []
        for direction in range(directions):
            place = number * directions + direction
            begin = tuple(part[place] for part in first)
            ran, last = _one_way(layer, record, names[place], outs, begin, direction == 1)
            found.append(ran)
            lasts.append(last)
        outs = torch.cat(found, dim=2) if directions == 2 else found[0]
    final = tuple(torch.stack(parts) for parts in zip(*lasts, strict=True))
    # as contiguous as those of torch: models call `view` on them
    outs = outs if layer.batch_first else outs.transpose(0, 1).contiguous()
    return outs, final if isinstance(layer, nn.LSTM) else final[0]


def _initial(layer: nn.RNNBase, inputs_ETI: Tensor, state: Any) -> State:
    """Return the state before the first step, zeros if not given: (layers x directions, E, H)."""
    if state is not None:
        return tuple(state) if isinstance(layer, nn.LSTM) else (state,)
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    zeros = inputs_ETI.new_zeros(count, len(inputs_ETI), layer.hidden_size)
    return (zeros, zeros) if isinstance(layer, nn.LSTM) else (zeros,)


def _one_way(
    layer: nn.RNNBase,
    record: Record | None,
    names: tuple[str, str, str | None, str | None],
    inputs_ETI: Tensor,
    state: State,
    backward: bool,
) -> tuple[Tensor, State]:
    """Run one layer in one direction over time."""
    cell = _CELLS[layer.mode]
    weight_ih, weight_hh, bias_ih, bias_hh = (
        None if name is None else getattr(layer, name) for name in names
    )
    assert weight_ih is not None and weight_hh is not None
    if backward:
        inputs_ETI = inputs_ETI.flip(1)
    # Both biases are added to the same sum; where one of them alone is trained with nothing else,
    # it needs a linear map of its own to be recorded.
    if cell.joint and bias_hh is not None and weight_ih.requires_grad:
        bias_ih, bias_hh = None, bias_ih + bias_hh
    given_ETG = linear(inputs_ETI, weight_ih, bias_ih)
    if record is None:
        outs_ETH, last, _ = _run(cell, given_ETG, weight_hh, bias_hh, state)
    else:
        slot_ETG = given_ETG.new_zeros((), requires_grad=True).expand_as(given_ETG)
        record(layer, inputs_ETI, given_ETG, Projection(names[0], names[2]))
        outs_ETH, *last = _Recurrence.apply(  # pyright: ignore[reportGeneralTypeIssues]
            cell, given_ETG, slot_ETG, weight_hh, bias_hh, *state
        )
        before_ETH = torch.cat([state[0][:, None], outs_ETH[:, :-1]], dim=1)
        record(layer, before_ETH, slot_ETG, Projection(names[1], names[3], is_sum=cell.joint))
    return (outs_ETH.flip(1) if backward else outs_ETH), tuple(last)
