"""Run a model and its loss before any budget is spent, and refuse what could not be private.

Probes use public examples where there are some (test data), else random ones of the right shapes; never private data.
They compare what will be released with what is promised: `check_sums` asks the clipping engine itself whether the
clipped sum of a batch is the sum of its examples' clipped gradients.

Legend: P probe examples, D coordinates.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from dpcsgp.errors import ModelError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping import Loss, clipping_engine
from dpcsgp.privacy.layerwise import check_losses
from dpcsgp.privacy.models import label
from dpcsgp.randomness import torch_seed

Pair = tuple[Tensor, Tensor]

_NUM_EXAMPLES: Final = 11  # an unlikely length for any other axis
_TOLERANCE: Final = 1e-4
_SUM_TOLERANCE: Final = 1e-3
_NO_CLIPPING: Final = 2.0**60


def check_examples_independent(module: nn.Module, example_input: Tensor, public: Tensor | None = None) -> None:
    """Refuse a model whose output for one example depends on the others, or that keeps something of what it sees.

    `example_input` is one example without batch axis; only its shape and dtype are used, and rows of `public` instead of
    random ones if given. The probe runs in training mode: one example among different companions, in several places of
    the batch, must give the same output. Warns about layers whose output is changed in place by the code around them.
    """
    probe = copy.deepcopy(module).train()
    start = _tensors_of(probe)
    first, second = (_probe_batch(example_input, purpose, public) for purpose in ("first", "second"))
    originals = first.clone()
    _warn_about_in_place(probe, first.clone())
    settled = _attributes(probe)  # a cache that depends on shapes alone is full by now
    outputs = _trace(probe, first)
    if not torch.equal(first, originals):
        raise ModelError(
            "the model changes its input in place, and with it the data; write `x = x + 1` instead of `x += 1`"
        )
    for place in (0, _NUM_EXAMPLES // 2, _NUM_EXAMPLES - 1):
        companions = second.clone()
        companions[place] = first[place]
        for (name, one), (_, other) in zip(outputs, _trace(probe, companions), strict=False):
            if not _close(one[place], other[place]):
                raise ModelError(
                    f"model layer {label(name, probe.get_submodule(name))}: its output for one example depends on the other "
                    "examples of the batch, so no example has a gradient of its own; use a layer that treats examples one by "
                    "one (recurrent layers: batch_first=True)"
                )
    _refuse_memory(probe, start, settled)


def _refuse_memory(probe: nn.Module, start: Mapping[str, bytes], settled: Mapping[tuple[str, str], bytes]) -> None:
    """Refuse a model in which the forward passes left something: it would carry private data past the noise."""
    for name, now in _tensors_of(probe).items():
        if start[name] != now:
            kind = "parameter" if name in dict(probe.named_parameters()) else "buffer"
            raise ModelError(
                f"model {kind} '{name}' changes in the forward pass, so it would carry private data past the noise; "
                "use a layer without running statistics"
            )
    for (name, key), now in _attributes(probe).items():
        if settled.get((name, key)) != now:
            raise ModelError(
                f"model layer {label(name, probe.get_submodule(name))}: its attribute '{key}' changes in the forward pass, so it "
                "would carry private data past the noise; return what you need instead of storing it"
            )


def _tensors_of(module: nn.Module) -> dict[str, bytes]:
    return {name: _digest(value) for name, value in (*module.named_parameters(), *module.named_buffers())}


def _attributes(module: nn.Module) -> dict[tuple[str, str], bytes]:
    """Return a digest of everything that the layers hold beside torch's own book-keeping."""
    usual = vars(nn.Module()).keys()
    return {
        (name, key): _digest(value)
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if key not in usual
    }


def _digest(value: Any) -> bytes:
    """Return a digest that changes with the value; of objects that cannot be read, with their identity."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        content = b"".join(_digest(key) + _digest(part) for key, part in value.items())
    elif isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        content = b"".join(_digest(part) for part in value)
    elif value is None or isinstance(value, str | bytes | bool | int | float | complex):
        content = repr(value).encode()
    else:
        content = str(id(value)).encode()
    return hashlib.blake2b(content, digest_size=16).digest()


def _close(one: Tensor, other: Tensor) -> bool:
    if not one.numel():
        return True
    largest = float(one.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True)


def _probe_batch(example: Tensor, purpose: str, public: Tensor | None = None) -> Tensor:
    """Return P rows of `public`, or random ones like `example`; whole numbers are 0 or 1, valid in any vocabulary."""
    shape = (_NUM_EXAMPLES, *example.shape)
    with torch_seed(0, f"model probe {purpose}"):
        if public is not None:
            return public[torch.randint(len(public), (_NUM_EXAMPLES,))].clone()
        if example.is_floating_point() or example.is_complex():
            return torch.randn(shape, dtype=example.dtype).to(example.device)
        return torch.randint(0, 2, shape).to(example.device, example.dtype)


def _trace(module: nn.Module, batch: Tensor) -> list[tuple[str, Tensor]]:
    """Return every layer's output, in the order in which layers finish."""
    rows: list[tuple[str, Tensor]] = []

    def keep(name: str, layer: nn.Module, output: Any) -> None:
        rows.extend((name, part.detach().clone()) for part in _batched(output))

    _watch_outputs(module, batch, list(module.named_modules()), keep)
    return rows


def _watch_outputs(
    module: nn.Module,
    batch: Tensor,
    layers: Sequence[tuple[str, nn.Module]],
    see: Callable[[str, nn.Module, Any], None],
) -> None:
    """Run the module once and show the output of each of these layers as it comes."""

    def hook(name: str) -> Callable[..., None]:
        return lambda layer, args, output: see(name, layer, output)

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers]
    try:
        with torch_seed(0, "model probe masks"), torch.no_grad():
            module(batch)
    finally:
        for handle in handles:
            handle.remove()


def _warn_about_in_place(module: nn.Module, batch: Tensor) -> None:
    """Warn about outputs of layers that later code writes into, such as `relu_(layer(x))`."""
    seen: list[tuple[str, nn.Module, Tensor, int]] = []

    def keep(name: str, layer: nn.Module, output: Any) -> None:
        if not getattr(layer, "inplace", False):  # `check_model` warns about these
            seen.extend((name, layer, part, part._version) for part in _batched(output))

    layers = [(name, layer) for name, layer in module.named_modules() if not list(layer.children())]
    _watch_outputs(module, batch, layers, keep)
    if any(getattr(layer, "inplace", False) for _, layer in layers):
        return
    changed = dict.fromkeys(label(name, layer) for name, layer, part, version in seen if part._version != version)
    if changed:
        warnings.warn(
            f"the outputs of {', '.join(changed)} are changed in place in the forward pass: gradients stay exact, but "
            "writing `x = relu(x)` instead of `relu_(x)` is safer and costs only memory",
            UserWarning,
            stacklevel=3,
        )


def _batched(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output whose first axis is the batch."""
    if isinstance(output, Tensor):
        if output.dim() and len(output) == _NUM_EXAMPLES:
            yield output
    elif isinstance(output, list | tuple):
        yield from (tensor for part in output for tensor in _batched(part))
    elif isinstance(output, dict):
        yield from (tensor for part in output.values() for tensor in _batched(part))


def check_gradients_reach(module: nn.Module, loss: Loss, example: Pair, public: Pair | None = None) -> None:
    """Refuse a model with trainable parameters that the loss does not depend on: they would only collect noise.

    A loss that does not give one value per example, or mixes them, is refused too. `example` is one (input, target) pair
    without batch axis; only shapes and dtypes are used, and rows of `public` instead of random ones if given.
    """
    probe = copy.deepcopy(module).train()
    inputs, targets = _probe_pair(example, "input", public)
    named = [(name, parameter) for name, parameter in probe.named_parameters() if parameter.requires_grad]
    with torch_seed(0, "model probe masks"), torch.enable_grad():
        losses = loss(probe(inputs), targets)
    if not isinstance(losses, Tensor):
        raise ModelError(f"loss: expected a tensor with one value per example, got {type(losses).__name__}")
    check_losses(losses, _NUM_EXAMPLES)
    total = losses.sum()
    if not total.requires_grad:
        raise ModelError("the loss does not depend on the model's parameters; check the forward pass for detach()")
    gradients = torch.autograd.grad(total, [parameter for _, parameter in named], allow_unused=True)
    missing = [name for (name, _), gradient in zip(named, gradients, strict=True) if gradient is None]
    if missing:
        raise ModelError(
            f"model parameters {', '.join(repr(name) for name in missing)} get no gradient from the loss: they would "
            "only collect noise; use them in the forward pass or freeze them with requires_grad_(False)"
        )
    check_sums(probe, loss, inputs, targets)


def _probe_pair(example: Pair, purpose: str, public: Pair | None) -> Pair:
    """Return inputs and targets of the same rows."""
    inputs, targets = (
        _probe_batch(part, purpose, None if public is None else public[kind]) for kind, part in enumerate(example)
    )
    if public is None and not targets.is_floating_point():
        targets[:2] = torch.tensor([0, 1], dtype=targets.dtype).view(
            2, *[1] * (targets.dim() - 1)
        )  # both kinds, always
    return inputs, targets


def check_sums(module: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> None:
    """Refuse model and loss unless the engine's clipped sum of a batch is the sum over its examples, one by one.

    That is what bounds an example's influence, whatever layers, hooks, losses and batch sizes do.
    """
    module = _without_chance(module, inputs)
    models_1D = ParameterLayout.of(module).flatten(module)[None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is slow; the run says it once
        engine = clipping_engine(module, loss)

        def clipped_sum(rows: slice, clip: float) -> Tensor:
            present = torch.ones(1, len(inputs[rows]), dtype=torch.bool, device=inputs.device)
            return engine.clipped_sum(models_1D, inputs[rows][None].clone(), targets[rows][None], present, clip)[0]

        whole_D, short_D, clip, longest = torch.zeros_like(models_1D[0]), torch.zeros_like(models_1D[0]), 0.0, 0.0
        for row in range(len(inputs)):
            gradient_D = clipped_sum(slice(row, row + 1), _NO_CLIPPING)
            length = float(gradient_D.double().norm())
            clip, longest = clip or length / 2, max(longest, length)
            whole_D += gradient_D
            short_D += gradient_D * min(1.0, clip / max(length, 1e-30)) if clip else 0.0
        differences = [(clipped_sum(slice(None), _NO_CLIPPING) - whole_D, longest)]
        if clip:
            differences.append((clipped_sum(slice(None), clip) - short_D, clip))
    for difference_D, size in differences:
        if not float(difference_D.double().norm()) <= _SUM_TOLERANCE * len(inputs) * size + 1e-30:
            raise ModelError(
                "loss or model: the gradient of a batch is not the sum of the gradients of its examples. Something depends on the "
                "other examples or on how many there are (a mean over the batch, a recurrent layer without batch_first=True), "
                "so no example has a gradient of its own; divide by public constants and treat examples one by one"
            )


def _without_chance(module: nn.Module, inputs: Tensor) -> nn.Module:
    """Return a copy in train() mode if that repeats itself on the same inputs, else in eval() mode (Dropout and the like)."""
    copied = copy.deepcopy(module).train()
    traces: list[list[Tensor]] = []
    for purpose in ("one", "other"):
        with torch_seed(0, f"model probe chance {purpose}"), torch.no_grad():
            traces.append([part.detach() for part in _batched(copied(inputs))])
    repeats = all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(*traces, strict=True))
    return copied if repeats else copied.eval()
