"""Sum per-example clipped gradients of all hosted nodes without storing per-example gradients.

Clipping is what makes an example's influence bounded: g_e is scaled by min(1, clip_norm / |g_e|)
before it is summed, so adding or removing one example moves the sum by at most `clip_norm`. An
example whose squared gradient norm is not finite counts as zero, silently and without a branch on
the data: to stop or to warn would reveal it. So does an example on which model or loss raise an
error.

The examples are computed in passes of a public shape (see `passes`): blank rows fill the places
that no example takes.

Legend: N hosted nodes, E places for examples, P places of a pass, M augmented views of an example,
D coordinates. Reference: Abadi et al., "Deep learning with differential privacy" (2016)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, final

import torch
from torch import Tensor, nn

from dpcsgp.errors import ConfigError, ModelError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping.layerwise import NORM, LayerwiseEngine, Loss
from dpcsgp.privacy.clipping.linear_stack import LinearStackEngine, is_linear_stack
from dpcsgp.privacy.model_checks import check_model
from dpcsgp.privacy.passes import PassShape

__all__ = ["ClippingEngine", "Loss", "clipping_engine"]

# below, roundings of the smallest float32 numbers would no longer be negligible
SMALLEST_CLIP: Final = 2.0**-30
LARGEST_CLIP: Final = 2.0**60  # above, float32 sums of many examples might overflow
_DEFAULT_SHAPE: Final = PassShape()


class PassEngine(Protocol):
    """Sums the clipped gradients of one pass."""

    def prepare(self, parameters_ND: Tensor, inputs: Tensor) -> None:
        """Find out, on public zeros of the inputs' shape, how to treat the model; warn of what will
        be slow."""
        ...

    def pass_sum(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NP: Tensor,
        clip_norm: float,
        shape: PassShape,
        see: Callable[[str, Tensor], None] | None = None,
    ) -> Tensor:
        """Return the clipped sum of one pass; with `see`, only show it what each row contributes
        (for checks)."""
        ...

    def slower(self) -> PassEngine | None:
        """Return an engine that passes fewer rows at a time; None where there are no fewer."""
        ...

    def without_chance(self, public: Tensor) -> PassEngine:
        """Return an engine for the model without random layers, if it has any."""
        ...

    def checked_places(
        self, parameters_ND: Tensor, inputs: Tensor, shape: PassShape
    ) -> tuple[int, int]:
        """Return how many nodes and places a check has to fill."""
        ...


class ClippingEngine(Protocol):
    """Sums per-example clipped gradients of one model and loss."""

    def clipped_sum(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NE: Tensor,
        clip_norm: float,
        shape: PassShape = _DEFAULT_SHAPE,
    ) -> Tensor:
        """Return sum_e g_e min(1, clip_norm / |g_e|) over the present examples of every node: (N,
        D).

        g_e is the gradient of loss(module(x_e), y_e) at the node's parameters, in the order of
        `ParameterLayout`. `inputs` is (N, E, *input shape), or (N, E, M, *input shape) with M > 1
        augmented views, over which the loss of an example is averaged before clipping; `targets` is
        (N, E, ...). Places with `present_NE` false are blank: whatever they hold is set to zero, in
        place, and contributes exactly zero. What one example contributes is the same bits whatever
        the others are. The sum is in double precision if it took several passes."""
        ...


def clipping_engine(module: nn.Module, loss: Loss, views: int = 1) -> CheckedEngine:
    """Choose how to clip for a model: all nodes at once for stacks of linear layers, layer by layer
    otherwise.

    `loss(outputs, targets)` returns one value per example, as with `reduction="none"`. The module
    itself is not changed and its parameter values are not used, except frozen ones; its mode
    (`train()` or `eval()`) is. Raises ModelError for models that cannot be trained privately."""
    check_model(module)
    if views < 1:
        raise ConfigError(f"task.augmentation_multiplicity = {views}: expected at least 1")
    layout = ParameterLayout.of(module)
    if is_linear_stack(module) and views == 1:
        assert isinstance(module, nn.Sequential)
        return CheckedEngine(LinearStackEngine(module, loss), layout, views)
    return CheckedEngine(LayerwiseEngine(module, loss, views), layout, views)


@final
class CheckedEngine:
    """Refuses arguments whose shapes do not fit, cuts the examples into passes, and lets no example
    stop a pass."""

    def __init__(self, engine: PassEngine, layout: ParameterLayout, views: int) -> None:
        self.engine = engine
        self._layout = layout
        self._views = views
        # kernels share out their work by it: all passes, checks too, have the same
        self._threads = torch.get_num_threads()

    def slower(self) -> CheckedEngine | None:
        """Return an engine that passes fewer rows at a time; None where there are no fewer."""
        slower = self.engine.slower()
        return CheckedEngine(slower, self._layout, self._views) if slower is not None else None

    def clipped_sum(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NE: Tensor,
        clip_norm: float,
        shape: PassShape = _DEFAULT_SHAPE,
    ) -> Tensor:
        """Check shapes and clip norm, then sum pass after pass."""
        self._check(parameters_ND, inputs, targets, present_NE, clip_norm)
        if not present_NE.numel():
            return torch.zeros_like(parameters_ND)
        total_ND = parameters_ND  # replaced by the first pass
        with _settled(inputs.device, self._threads):
            self.engine.prepare(parameters_ND, inputs)
            for number, start in enumerate(range(0, present_NE.shape[1], shape.places)):
                examples, labels, present_NP = (
                    _places(part, start, shape.places) for part in (inputs, targets, present_NE)
                )
                # Nodes pass together as often as is planned, and alone where they have drawn more.
                everybody = slice(None)
                groups = [everybody] if number < shape.passes else _nodes_with_examples(present_NP)
                for nodes in groups:
                    arguments = (
                        part[nodes] for part in (parameters_ND, examples, labels, present_NP)
                    )
                    sum_ND = self._pass_sum(*arguments, clip_norm, shape)  # pyright: ignore[reportCallIssue]
                    if number == 0:
                        total_ND = sum_ND
                    else:
                        total_ND = total_ND.double()
                        total_ND[nodes] += sum_ND
        return total_ND

    def without_chance(self, public: Tensor) -> CheckedEngine:
        """Return an engine for the model without random layers, if it has any (in eval() mode
        then)."""
        return CheckedEngine(self.engine.without_chance(public), self._layout, self._views)

    def checked_places(
        self, parameters_ND: Tensor, inputs: Tensor, shape: PassShape
    ) -> tuple[int, int]:
        """Return how many nodes and places a check has to fill, for rows (K, ...) of inputs like
        these."""
        return self.engine.checked_places(parameters_ND, inputs, shape)

    def rows(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NP: Tensor,
        clip_norm: float,
        shape: PassShape,
    ) -> list[tuple[str, Tensor]]:
        """Return, by name, what the rows of one pass contribute (for checks on public rows): rows
        on the first axis.

        All nodes' rows come one after the other, M of them for an example with M views.
        """
        if self._views > 1:
            inputs = inputs[:, :, None].expand(-1, -1, self._views, *inputs.shape[2:]).clone()
        seen: list[tuple[str, Tensor]] = []
        self._check(parameters_ND, inputs, targets, present_NP, clip_norm)
        _blank(present_NP, inputs, targets)
        with _settled(inputs.device, self._threads):
            self.engine.prepare(parameters_ND, inputs)
            self.engine.pass_sum(
                parameters_ND, inputs, targets, present_NP, clip_norm, shape,
                lambda name, rows: seen.append((name, rows.clone())),
            )  # fmt: skip
        return _joined(seen)

    def _pass_sum(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NP: Tensor,
        clip_norm: float,
        shape: PassShape,
    ) -> Tensor:
        """Sum one pass. Examples on which model or loss raise count as zero: nobody may learn that
        there was one."""
        try:
            return self._run(parameters_ND, inputs, targets, present_NP, clip_norm, shape)
        except Exception:
            absent_NP = torch.zeros_like(present_NP)
        # What fails on blank rows, too, fails in public and is raised here.
        self._run(
            parameters_ND,
            torch.zeros_like(inputs),
            torch.zeros_like(targets),
            absent_NP,
            clip_norm,
            shape,
        )
        places = range(present_NP.numel())
        return self._sum_of_what_runs(
            parameters_ND, inputs, targets, present_NP, clip_norm, shape, places
        )

    def _sum_of_what_runs(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NP: Tensor,
        clip_norm: float,
        shape: PassShape,
        places: range,
    ) -> Tensor:
        """Sum what does not raise, by halves of the places (of all nodes together).

        The others keep their places in passes of the same shape, and so their bits; where is cut
        does not depend on them."""
        total_ND = torch.zeros_like(parameters_ND, dtype=torch.float64)
        middle = len(places) // 2
        for half in (places[:middle], places[middle:]):
            half_NP = torch.zeros_like(present_NP)
            half_NP.view(-1)[half.start : half.stop] = present_NP.reshape(-1)[
                half.start : half.stop
            ]
            if not bool(half_NP.any()):
                continue
            try:
                total_ND += self._run(
                    parameters_ND, inputs.clone(), targets.clone(), half_NP, clip_norm, shape
                )
            except Exception:
                if len(half) > 1:
                    total_ND += self._sum_of_what_runs(
                        parameters_ND, inputs, targets, present_NP, clip_norm, shape, half
                    )
        return total_ND

    def _run(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NP: Tensor,
        clip_norm: float,
        shape: PassShape,
    ) -> Tensor:
        _blank(present_NP, inputs, targets)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning about an example would reveal it
            return self.engine.pass_sum(
                parameters_ND, inputs, targets, present_NP, clip_norm, shape
            )

    def _check(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NE: Tensor,
        clip_norm: float,
    ) -> None:
        places = tuple(present_NE.shape)
        if not SMALLEST_CLIP <= clip_norm <= LARGEST_CLIP:
            raise ConfigError(
                f"privacy.clip_norm = {clip_norm}: expected a number from {SMALLEST_CLIP:.1g} to "
                f"{LARGEST_CLIP:.1g}"
            )
        if parameters_ND.shape != (places[0], self._layout.dim):
            raise ModelError(
                f"parameters: expected shape {(places[0], self._layout.dim)} for this model and "
                f"{places[0]} nodes, "
                f"got {tuple(parameters_ND.shape)}"
            )
        lead = places if self._views == 1 else (*places, self._views)
        if inputs.shape[: len(lead)] != lead or targets.shape[:2] != places:
            raise ModelError(
                f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}: expected "
                f"leading axes {lead} and "
                f"{places} (nodes, examples{', views' if self._views > 1 else ''})"
            )


def _joined(seen: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Join what the chunks of a pass showed: every chunk shows the same things in the same order,
    its norm last."""
    period = next(index for index, (name, _) in enumerate(seen) if name == NORM) + 1
    if period == len(seen):
        return seen
    return [
        (seen[first][0], torch.cat([rows for _, rows in seen[first::period]]))
        for first in range(period)
    ]


def _places(part: Tensor, start: int, places: int) -> Tensor:
    """Return the places of one pass; blank ones are added where the examples end before it."""
    found = part[:, start : start + places]
    if found.shape[1] == places:
        return found.contiguous()
    return torch.cat(
        [found, found.new_zeros(len(found), places - found.shape[1], *found.shape[2:])], dim=1
    )


def _nodes_with_examples(present_NP: Tensor) -> list[slice]:
    return [slice(node, node + 1) for node in present_NP.any(dim=1).nonzero().flatten().tolist()]


def _blank(present_NP: Tensor, *parts: Tensor) -> None:
    """Set absent rows to zero, in place: what they hold belongs to nobody in this pass."""
    absent = None
    for part in parts:
        if part.device.type == "cpu":
            absent = (~present_NP).flatten().nonzero().flatten() if absent is None else absent
            part.flatten(0, 1).index_fill_(0, absent, 0)  # touches only these rows
        else:
            part.masked_fill_(~present_NP.view(*present_NP.shape, *[1] * (part.dim() - 2)), 0)


@contextmanager
def _settled(device: torch.device, threads: int) -> Iterator[None]:
    """Keep float32, its smallest numbers and the number of threads, whatever the caller has set.

    Half precision, TF32 or flushed denormals would break the bound; another number of threads is
    not what was checked."""
    kind = device.type if device.type in ("cpu", "cuda") else "cpu"
    flushed, before = float(torch.tensor(2.0**-140) * 1.0) == 0.0, torch.get_num_threads()
    with (
        torch.autocast(kind, enabled=False),
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
    ):
        matmul, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
        if flushed:
            torch.set_flush_denormal(False)
        if before != threads:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = matmul
            if flushed:
                torch.set_flush_denormal(True)
            if before != threads:
                torch.set_num_threads(before)
