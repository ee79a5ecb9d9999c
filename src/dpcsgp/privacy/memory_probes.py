"""Refuse models and losses that remember what they saw: it would carry private data past the noise.

The law: two copies see different data in the same shapes; they must hold the same afterwards, and
compute what a fresh copy computes. Caches by shape and counters of calls obey it; running means
and hoards do not, nor do schedules by calls: the number of calls of a step follows the number of
examples drawn, which is secret. What copies have in common (closures, globals, attributes of
classes) is watched in place: there only whole numbers that advance evenly count as counters.

Legend: P probe examples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpcsgp.errors import ModelError
from dpcsgp.modes import training_copy
from dpcsgp.privacy.contents import Tokens, own, shared
from dpcsgp.privacy.model_checks import label
from dpcsgp.randomness import torch_seed

Pair = tuple[Tensor, Tensor]
Loss = Callable[[Any, Tensor], Tensor]
_State = Mapping[tuple[str, str], Tokens]
_Change = tuple[_State, _State]  # before and after

_PAST_THE_NOISE = "so it would carry private data past the noise"
_REPEATS = 2.0**-16  # where even fresh copies differ in bits (devices that add in any order)


class _Learner(NamedTuple):
    """A copy of the model and, unless the model alone is probed, of the loss."""

    module: nn.Module
    loss: Loss | None

    def copy(self) -> _Learner:
        return _Learner(training_copy(self.module), _copied(self.loss))

    def run(self, batch: Pair) -> list[tuple[str, Tensor]]:
        """Do what a training step does with a batch; return outputs, losses and gradients."""
        inputs, targets = (part.clone() for part in batch)
        with torch_seed(0, "model probe masks"), torch.set_grad_enabled(self.loss is not None):
            outputs = self.module(inputs)
            results = [("model", part) for part in tensors(outputs)]
            if self.loss is not None:
                losses = self.loss(outputs, targets)
                trained = [value for value in self.module.parameters() if value.requires_grad]
                gradients = torch.autograd.grad(losses.sum(), trained, allow_unused=True)
                results.append(("loss", losses))
                results += [("model or loss", part) for part in gradients if part is not None]
        return [(name, part.detach().clone()) for name, part in results]


def _copied(loss: Loss | None) -> Loss | None:
    """Return a deep copy; what cannot be copied stays one and is watched in place."""
    try:
        return copy.deepcopy(loss)
    except Exception:
        return loss


def tensors(outputs: Any) -> list[Tensor]:
    """Return all tensors of a nested output."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    return (
        [part for value in outputs for part in tensors(value)]
        if isinstance(outputs, list | tuple)
        else []
    )


def check_memory(
    module: nn.Module, loss: Loss | None, settle: Pair, batches: Sequence[Pair], hostile: Pair
) -> None:
    """Refuse a model or loss in which data leave a trace.

    What is kept may be as little as one bit of a batch, which two batches share by chance: give
    several, of several sizes.

    Args:
        module: the model.
        loss: the loss; None to probe the model alone.
        settle: a batch on which results are compared after others were seen.
        batches: what copies see, in the shapes of `settle`. A model must bear the first.
        hostile: infinite, huge and missing values: what is kept only of such rows is found there.

    Raises:
        ModelError: with the layer or variable that changed.
    """
    start = _Learner(module, loss).copy()
    first, *others = batches
    _compare(start, settle, first, [batch for batch in others if _runs(start, batch)])
    if _runs(start, hostile):
        _compare(start, settle, first, [hostile])


def _runs(start: _Learner, batch: Pair) -> bool:
    try:
        _after(start, batch)
    except Exception:
        return False
    return True


def _after(start: _Learner, batch: Pair) -> _Learner:
    """Return a copy that has seen this batch, and the batch without its first example."""
    learner = start.copy()
    learner.run(batch)
    learner.run((batch[0][1:], batch[1][1:]))
    return learner


def _compare(start: _Learner, settle: Pair, first: Pair, others: Sequence[Pair]) -> None:
    """Let copies see different data; compare what they hold, then what they compute."""
    _after(start, settle)  # a cache by shape that all copies share is full by now
    fresh = start.copy().run(settle)
    # Copies that saw different data must hold the same, and compute what a fresh copy computes.
    reference, change = _watched(start, first)
    for other in others:
        learner, other_change = _watched(start, other)
        _refuse_state(start, reference, learner)
        _refuse_shared_state([change, other_change])
        _refuse_other_results(start, settle, other, fresh, learner)
    _refuse_other_results(start, settle, first, fresh, reference)


def _watched(start: _Learner, batch: Pair) -> tuple[_Learner, _Change]:
    """Return a copy that has seen a batch, and what all copies share before and after that."""
    before = _shared(start)
    return _after(start, batch), (before, _shared(start))


def _refuse_other_results(
    start: _Learner,
    settle: Pair,
    seen: Pair,
    fresh: Sequence[tuple[str, Tensor]],
    learner: _Learner,
) -> None:
    """Refuse where a copy that has seen a batch computes something else than a fresh one."""
    for (name, here), (_, there) in zip(fresh, learner.run(settle), strict=True):
        if not same_bits(here, there) and not _is_chance(start, seen, settle, here, there):
            raise ModelError(
                f"{name}: the same batch gives other values after other batches came before it, "
                f"so something of those is kept (a sum, a schedule by calls), {_PAST_THE_NOISE}; "
                "compute from the batch at hand and public constants alone"
            )


def _shared(learner: _Learner) -> _State:
    found = {("model", key): value for key, value in shared(learner.module).items()}
    if learner.loss is not None:
        found |= {("loss", key): value for key, value in shared(learner.loss).items()}
        if copy_is_original(learner.loss):
            found |= {
                ("loss", f"attribute '{key}'"): value
                for (_, key), value in own(learner.loss).items()
            }
    return found


def copy_is_original(loss: Loss) -> bool:
    """Tell whether copying gives the loss itself, as with functions."""
    return _copied(loss) is loss


def _refuse_state(start: _Learner, one: _Learner, other: _Learner) -> None:
    """Refuse where the contents of two copies differ, or a parameter is not what it was."""
    before, here, there = (own(learner.module) for learner in (start, one, other))
    # Parameters are compared with the start too: both copies may have moved them alike.
    for name, key in {**here, **there}:
        moved = not name and key.startswith("parameter ") and here[name, key] != before[name, key]
        if moved or here.get((name, key)) != there.get((name, key)):
            raise ModelError(_model_words(one.module, name, key))
    if one.loss is None or one.loss is other.loss:
        return
    here, there = own(one.loss), own(other.loss)
    for name, key in {**here, **there}:
        if here.get((name, key)) != there.get((name, key)):
            what = f"its attribute '{key}'" if key else "something it holds"
            raise ModelError(
                f"loss: {f'layer {name}: ' if name else ''}{what} changes with the data it sees, "
                f"{_PAST_THE_NOISE}; compute it from the batch at hand and public constants alone"
            )


def _model_words(module: nn.Module, name: str, key: str) -> str:
    kind, _, tensor = key.partition(" ")
    if tensor and not name:
        owner = tensor.rpartition(".")[0]
        return (
            f"model {kind} '{tensor}' of layer {label(owner, module.get_submodule(owner))} "
            f"changes in the forward pass, {_PAST_THE_NOISE}; use a layer without running "
            "statistics"
        )
    return (
        f"model layer {label(name, module.get_submodule(name))}: its attribute '{key}' changes "
        f"with the data in the forward pass, {_PAST_THE_NOISE}; return what you need instead of "
        "storing it"
    )


def _refuse_shared_state(changes: Sequence[_Change]) -> None:
    """Refuse what changed outside of the copies, counters apart."""
    for place in {key: None for change in changes for state in change for key in state}:
        if not _counts_evenly([(before.get(place), after.get(place)) for before, after in changes]):
            what = place[1].partition("#")[0] or "something it refers to"
            raise ModelError(
                f"{place[0]}: {what} changes when a batch is computed, {_PAST_THE_NOISE}; "
                "compute from the batch at hand and public constants alone"
            )


def _counts_evenly(changes: Sequence[tuple[Tokens | None, Tokens | None]]) -> bool:
    """Tell whether contents stay, or only whole numbers advance, by the same amount every time."""
    advances = []
    for before, after in changes:
        if before is None or after is None or len(before) != len(after):
            return False
        advances.append([_advance(*pair) for pair in zip(before, after, strict=True)])
    return None not in advances[0] and all(other == advances[0] for other in advances)


def _advance(before: object, after: object) -> int | None:
    """Return by how much a token grew: zero where it stayed, None where it is no counter."""
    if before == after:
        return 0
    return after - before if isinstance(before, int) and isinstance(after, int) else None


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors hold the same values exactly; missing values equal each other."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    missing = one.isnan()
    return torch.equal(missing, other.isnan()) and torch.equal(one[~missing], other[~missing])


def _is_chance(start: _Learner, seen: Pair, last: Pair, one: Tensor, other: Tensor) -> bool:
    """Tell whether a small difference comes from the device: there even equal copies differ."""
    results = [_after(start, seen).run(last) for _ in range(2)]
    repeats = all(same_bits(here, there) for (_, here), (_, there) in zip(*results, strict=True))
    return not repeats and torch.allclose(
        one, other, rtol=0, atol=_REPEATS * float(one.abs().max()), equal_nan=True
    )
