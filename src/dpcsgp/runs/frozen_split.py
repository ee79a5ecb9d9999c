"""Where a model can be cut: a frozen part that makes features of an example, and a trained head.

The cut is found by running copies of the model on public or random rows. The head is the smallest
part that holds all that is trained, or the end of an `nn.Sequential`. It must be all that the rest
of the model is: called once, with one tensor that no trained parameter and no chance has touched,
and what it returns is what the model returns. Whatever does not fit is no error: the model is then
run as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from dpcsgp.modes import evaluation_mode
from dpcsgp.privacy.memory_probes import same_bits
from dpcsgp.randomness import generators_kept, generators_moved, seed_generators
from dpcsgp.tasks.supervised import logits_of

_SIZES: Final = (5, 3)  # of the batches that are tried
_MOVED: Final = 0.5  # what is trained is somewhere else in the second trial


class NoSplit(Exception):
    """Why a model is not cut; public facts alone."""


@final
@dataclass(frozen=True)
class Split:
    """A model in two parts.

    Attributes:
        head: the trained part, in the model's own memory; it takes features.
        entry: name of the layer of the model that is given the features.
        shape: of the features of one example.
        dtype: of the features.
    """

    head: nn.Module
    entry: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of the features of one example."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class _Cut(NamedTuple):
    """A layer that is given the features, and one whose output is the model's."""

    entry: str
    exit: str

    def head(self, module: nn.Module) -> nn.Module:
        """Return what lies between, as a module of its own with the same layers."""
        last = module.get_submodule(self.exit)
        if self.entry == self.exit:
            # A linear layer as a sequence of one: all nodes then share a product.
            return nn.Sequential(last) if type(last) is nn.Linear else last
        assert isinstance(last, nn.Sequential)
        first = list(last._modules).index(self.entry.rpartition(".")[2])
        tail = last[first:]
        tail.training = last.training
        return tail


class _Record(nn.Module):
    """A head whose logits are handed over in a record, as the whole model's are."""

    def __init__(self, head: nn.Module, kind: type) -> None:
        super().__init__()
        self.head, self._kind = head, kind
        self.training = head.training

    def forward(self, features: Tensor) -> Any:
        return self._kind(logits=self.head(features))


class _Seen(NamedTuple):
    """What one run showed: the features, the generator before the head, all that came out."""

    features: Tensor
    state: Tensor
    outputs: Any

    @property
    def logits(self) -> Tensor:
        return logits_of(self.outputs)


def find_split(module: nn.Module, public: Tensor, own_functions: bool) -> Split:
    """Return where to cut a model.

    Args:
        module: the model; only copies of it are run.
        public: inputs (K, ...) of public or random examples.
        own_functions: whether loss or metrics of the caller's own look at all that it returns.

    Raises:
        NoSplit: why it is not cut.
    """
    reason = None
    for cut in _cuts(module):
        try:
            return _tried(module, cut, public, own_functions)
        except NoSplit as found:
            reason = reason or found
        except Exception as error:
            reason = reason or NoSplit(f"its parts do not run alone ({type(error).__name__})")
    raise reason or NoSplit("nothing is frozen outside of the layer that holds what is trained")


def _cuts(module: nn.Module) -> Iterator[_Cut]:
    """Yield the ways to cut off frozen parameters, the smallest head first."""
    chain = [("", module)]
    while (child := _child_with_all(*chain[-1], _trained(module))) is not None:
        chain.append(child)
    for name, layer in reversed(chain):
        if type(layer) is nn.Sequential and _is_plain(layer):
            first = next((key for key, child in layer.named_children() if _trained(child)), None)
            if first is not None and first != next(iter(layer._modules)):
                cut = _Cut(_joined(name, first), name)
                if _leaves_frozen(module, cut):
                    yield cut
        if name and _leaves_frozen(module, cut := _Cut(name, name)):
            yield cut


def _trained(module: nn.Module) -> list[int]:
    return [id(parameter) for parameter in module.parameters() if parameter.requires_grad]


def _child_with_all(
    name: str, layer: nn.Module, trained: list[int]
) -> tuple[str, nn.Module] | None:
    """Return the child that holds all that is trained, if there is one."""
    for key, child in layer.named_children():
        if _trained(child) == trained:
            return _joined(name, key), child
    return None


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _is_plain(layer: nn.Module) -> bool:
    """Tell whether a sequence only calls its layers one after the other."""
    hooks = layer._forward_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return not any(hooks) and not {"forward", "_call_impl"} & vars(layer).keys()


def _leaves_frozen(module: nn.Module, cut: _Cut) -> bool:
    """Tell whether something frozen lies outside of the head, and nothing that is trained.

    Tables alone do not count: to look a word up takes less than to keep what was found.
    """
    head = cut.head(module)
    inside = {id(parameter) for parameter in head.parameters()}
    frozen = (
        parameter
        for layer in module.modules()
        if type(layer) is not nn.Embedding
        for parameter in layer.parameters(recurse=False)
    )
    # The same objects in the same order: vectors, messages and files stay what they are.
    same = _trained(head) == _trained(module)
    return same and any(id(parameter) not in inside for parameter in frozen)


def _tried(module: nn.Module, cut: _Cut, public: Tensor, own_functions: bool) -> Split:
    """Run the whole and its parts on public rows, and compare."""
    rows = public[torch.arange(_SIZES[0], device=public.device) % len(public)]
    first = _seen(copy.deepcopy(module), cut, rows)
    fewer = _seen(copy.deepcopy(module), cut, rows[: _SIZES[1]])
    if first.features.shape[1:] != fewer.features.shape[1:]:
        raise NoSplit(f"the shape of what '{cut.entry}' is given depends on the batch")
    # Trained parameters elsewhere, other random numbers: the features stay.
    moved, random = copy.deepcopy(module), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.requires_grad:
                move = torch.randn(parameter.shape, generator=random, dtype=parameter.dtype)
                parameter.add_(_MOVED * move.to(parameter.device))
    elsewhere = _seen(copy.deepcopy(moved), cut, rows, seed=1)
    if not same_bits(first.features, elsewhere.features):
        raise NoSplit(f"what '{cut.entry}' is given depends on chance or on what is trained")
    _compare_alone(module, cut, first)
    _compare_alone(moved, cut, elsewhere)  # a head that starts at zero hides what it depends on
    with evaluation_mode(module):
        evaluated = _seen(copy.deepcopy(module), cut, rows)
        _compare_alone(module, cut, evaluated)
    head = cut.head(module)
    if not isinstance(first.outputs, Tensor) and own_functions:
        head = _in_record(head, first.outputs)
    return Split(head, cut.entry, tuple(first.features.shape[1:]), first.features.dtype)


def _in_record(head: nn.Module, outputs: Any) -> nn.Module:
    """Return a head that hands over what the model does, if that is logits alone."""
    if not isinstance(outputs, dict) or list(outputs) != ["logits"]:
        raise NoSplit("loss or metrics of your own may look at more than the model's logits")
    return _Record(head, type(outputs))


def _compare_alone(module: nn.Module, cut: _Cut, seen: _Seen) -> None:
    """Refuse a head that does something else alone, or writes into what it is given."""
    head = cut.head(copy.deepcopy(module))
    features = seen.features.clone()
    with generators_kept(), torch.enable_grad():
        torch.set_rng_state(seen.state)
        logits = head(features)
    if not isinstance(logits, Tensor) or not same_bits(logits.detach(), seen.logits.detach()):
        raise NoSplit(f"'{cut.exit}' depends on more than what it is given")
    if not same_bits(features, seen.features):
        raise NoSplit(f"'{cut.entry}' changes what it is given in place")


def _seen(module: nn.Module, cut: _Cut, rows: Tensor, seed: int = 0) -> _Seen:
    """Run a copy of a model once; refuse what does not pass through the head alone."""
    entries: list[tuple[tuple[Any, ...], dict[str, Any], Tensor]] = []
    exits: list[tuple[Any, Tensor, int]] = []
    drawn: list[bool] = []

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = torch.get_rng_state()
        drawn.append(generators_moved(seed))  # it seeds them again
        kept = tuple(part.clone() if isinstance(part, Tensor) else part for part in args)
        entries.append((kept, kwargs, state))

    def leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seed_generators(seed)
        exits.append((output, torch.get_rng_state(), getattr(output, "_version", 0)))

    buffers = [buffer.clone() for buffer in module.buffers()]
    # First before the entry and last behind the exit: hooks of these layers belong to the head.
    entry, last = module.get_submodule(cut.entry), module.get_submodule(cut.exit)
    entry.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    last.register_forward_hook(leave)
    with generators_kept(), torch.enable_grad():
        seed_generators(seed)
        outputs = module(rows.clone())
        drawn.append(generators_moved(seed))
    if len(entries) != 1 or len(exits) != 1:
        raise NoSplit(f"'{cut.entry}' is not called exactly once")
    args, kwargs, state = entries[0]
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        raise NoSplit(f"'{cut.entry}' is given more than one tensor")
    features, (output, _, version) = args[0], exits[0]
    if not features.is_floating_point() or not features.dim() or len(features) != len(rows):
        raise NoSplit(f"'{cut.entry}' is not given one row of numbers per example")
    if features.requires_grad:
        raise NoSplit(f"what '{cut.entry}' is given depends on what is trained")
    if any(drawn):
        raise NoSplit(f"the frozen part around '{cut.entry}' draws random numbers (Dropout?)")
    if logits_of(outputs) is not output or output._version != version:
        raise NoSplit(f"what '{cut.exit}' returns is not what the model returns")
    if not all(map(same_bits, buffers, module.buffers())):
        raise NoSplit("it changes its buffers")
    return _Seen(features, state, outputs)
