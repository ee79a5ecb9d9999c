"""Sum per-example clipped gradients of all hosted nodes by ghost clipping.

Ghost clipping takes the norms of per-example gradients without forming the gradients (see
`ghost_norms`). Clipping is what makes an example's influence bounded: g_e is scaled by min(1,
clip_norm / |g_e|) before it is summed, so adding or removing one example moves the sum by at most
`clip_norm`. An example whose squared gradient norm is not finite counts as zero, silently and
without a branch on the data: to stop or to warn would reveal it. So does an example on which model
or loss raise an error.

The examples are computed in passes of a public shape (see `passes`): blank rows fill the places
that no example takes. An example may be a unit of several rows, whose gradients are added up before
clipping.

Legend: N hosted nodes, E places for examples, P places of a pass, M augmented views of an example
or rows of a unit, D coordinates, K public rows of a check. Reference: Abadi et al., "Deep learning
with differential privacy" (2016).
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Final, Protocol, final

import torch
from torch import Tensor, nn

from dpcsgp.errors import ConfigError, ModelError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping.arithmetic import fixed_arithmetic
from dpcsgp.privacy.clipping.contract import NORM, Fetch, Fetched, Loss, Pass, PassEngine
from dpcsgp.privacy.clipping.layerwise import LayerwiseEngine
from dpcsgp.privacy.clipping.linear_stack import LinearStackEngine, is_linear_stack
from dpcsgp.privacy.model_checks import check_model
from dpcsgp.privacy.passes import PassShape

__all__ = ["CheckedEngine", "ClippingEngine", "Loss", "clipping_engine"]

# below, roundings of the smallest float32 numbers would no longer be negligible
SMALLEST_CLIP: Final = 2.0**-30
LARGEST_CLIP: Final = 2.0**60  # above, float32 sums of many examples might overflow
_DEFAULT_SHAPE: Final = PassShape()


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
        filled_NEM: Tensor | None = None,
    ) -> Tensor:
        """Return sum_e g_e min(1, clip_norm / |g_e|) over the present examples of every node.

        g_e is the gradient of loss(module(x_e), y_e) at the node's parameters, in the order of
        `ParameterLayout`. What one example contributes is the same bits whatever the others are.

        Args:
            parameters_ND: the flat parameters of each node's model.
            inputs: (N, E, *input shape), or (N, E, M, *input shape) with M > 1 augmented views,
                over which the loss of an example is averaged before clipping.
            targets: (N, E, ...), or (N, E, M, ...) for units of up to M > 1 rows.
            present_NE: which places are taken. The others are blank: whatever they hold may be set
                to zero, in place, and contributes exactly zero.
            clip_norm: largest Euclidean norm that an example's gradient keeps.
            shape: the public shape of the passes.
            filled_NEM: which rows of a unit there are, for units of several rows: g_e is then the
                sum of their gradients. The others hold copies of rows of the same unit.

        Returns:
            (N, D), in double precision if it took several passes, if an example raised, or if there
            were more chunks than float32 may sum.
        """
        ...


def clipping_engine(
    module: nn.Module, loss: Loss, views: int = 1, rows_per_unit: int = 1
) -> CheckedEngine:
    """Choose how to clip for a model.

    All nodes at once for stacks of linear layers without views, layer by layer otherwise. The
    module itself is not changed and its parameter values are not used, except frozen ones; its mode
    (`train()` or `eval()`) is.

    Args:
        module: the model; one output per example.
        loss: `loss(outputs, targets)` returns one value per example, as with `reduction="none"`.
        views: augmented views of an example, over which its loss is averaged.
        rows_per_unit: largest number of rows whose losses are added up and clipped as one.

    Raises:
        ModelError: for models that cannot be trained privately.
        ConfigError: for fewer than one view or row, or for views of units of several rows.
    """
    check_model(module)
    if views < 1:
        raise ConfigError(f"task.augmentation_multiplicity = {views}: expected at least 1")
    if rows_per_unit < 1 or (rows_per_unit > 1 and views > 1):
        raise ConfigError(
            f"privacy.max_rows_per_unit = {rows_per_unit} with task.augmentation_multiplicity = "
            f"{views}: units of several rows have one view of each row"
        )
    layout, unit = ParameterLayout.of(module), rows_per_unit > 1
    if is_linear_stack(module) and views == rows_per_unit == 1:
        assert isinstance(module, nn.Sequential)
        return CheckedEngine(LinearStackEngine(module, loss), layout, views)
    count = max(views, rows_per_unit)
    return CheckedEngine(LayerwiseEngine(module, loss, count, unit=unit), layout, count, unit)


@final
class CheckedEngine:
    """Refuses shapes that do not fit, cuts examples into passes, lets no example stop a pass."""

    def __init__(
        self, engine: PassEngine, layout: ParameterLayout, views: int, unit: bool = False
    ) -> None:
        self.engine = engine
        self._layout = layout
        self._views = views
        self._unit = unit  # the M rows are a unit's, with targets of their own
        # kernels share out their work by it: all passes, checks too, have the same
        self._threads = torch.get_num_threads()

    def slower(self) -> CheckedEngine | None:
        """Return an engine that passes fewer rows at a time; None where there are no fewer."""
        slower = self.engine.slower()
        return None if slower is None else self._with(slower)

    def deterministic(self, public: Tensor) -> CheckedEngine:
        """Return an engine for the model without random layers, if it has any (in eval() mode)."""
        return self._with(self.engine.deterministic(self._single_rows(public)))

    def with_most_rows(self, most_rows: int) -> CheckedEngine:
        """Return an engine that passes at most so many rows (not units) at a time."""
        return self._with(self.engine.with_most_rows(most_rows))

    def row_bytes(self, parameters_1D: Tensor, public: Tensor) -> int:
        """Return roughly what one more row in a pass costs, from shapes and public rows alone."""
        return self.engine.row_bytes(parameters_1D, self._single_rows(public))

    def _with(self, engine: PassEngine) -> CheckedEngine:
        return CheckedEngine(engine, self._layout, self._views, self._unit)

    def _single_rows(self, public: Tensor) -> Tensor:
        return public.flatten(0, 1) if self._unit else public

    def checked_places(
        self, parameters_ND: Tensor, inputs: Tensor, shape: PassShape
    ) -> tuple[int, int]:
        """Return how many nodes and places a check has to fill with rows (K, ...) like these."""
        return self.engine.checked_places(parameters_ND, inputs, shape)

    def clipped_sum(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NE: Tensor,
        clip_norm: float,
        shape: PassShape = _DEFAULT_SHAPE,
        filled_NEM: Tensor | None = None,
    ) -> Tensor:
        """Check shapes and clip norm, then sum pass after pass (see `ClippingEngine`)."""
        whole = Pass(parameters_ND, inputs, targets, present_NE, clip_norm, shape, filled_NEM)
        self._check(whole)

        def fetch(places: slice) -> Fetched:
            filled = None if filled_NEM is None else filled_NEM[:, places]
            return Fetched(inputs[:, places], targets[:, places], present_NE[:, places], filled)

        return self.sum_passes(parameters_ND, present_NE.shape[1], fetch, clip_norm, shape)

    def sum_passes(
        self,
        parameters_ND: Tensor,
        num_places: int,
        fetch: Fetch,
        clip_norm: float,
        shape: PassShape,
    ) -> Tensor:
        """Do the same with examples that are fetched pass by pass: no more are held at a time."""
        total_ND = torch.zeros_like(parameters_ND)  # replaced by the first pass
        if not len(parameters_ND):
            return total_ND
        for number, start in enumerate(range(0, num_places, shape.places)):
            found = fetch(slice(start, start + shape.places))
            parameters_ND = parameters_ND.to(found.inputs.device)
            batch = Pass(parameters_ND, *found[:3], clip_norm, shape, found.filled_NEM).padded()
            del found
            self._check(batch)
            # Nodes pass together as often as is planned, and alone where they drew more.
            everybody = slice(None)
            planned = number < shape.passes
            groups = [everybody] if planned else _nodes_with_examples(batch.present_NP)
            with fixed_arithmetic(batch.inputs.device, self._threads):
                self.engine.prepare(parameters_ND, batch.inputs)
                for nodes in groups:
                    sum_ND = self._pass_sum(batch.of_nodes(nodes))
                    if number == 0:
                        total_ND = sum_ND
                    else:
                        # so that the rounding of one pass is all that a neighbour can change
                        total_ND = total_ND.double()
                        total_ND[nodes] += sum_ND
        return total_ND

    def rows(
        self,
        parameters_ND: Tensor,
        inputs: Tensor,
        targets: Tensor,
        present_NP: Tensor,
        clip_norm: float,
        shape: PassShape,
    ) -> list[tuple[str, Tensor]]:
        """Return by name what the rows of one pass contribute, for checks on public rows.

        Rows are on the first axis: all nodes' rows one after the other, M of them for an example
        with M views, or for a unit. Some rows of a unit are missing: which, follows from their
        values, so that a unit that is moved stays the same.
        """
        filled_NPM = None
        if self._unit:
            filled_NPM = (
                inputs.flatten(3).double().sum(dim=3) > 0 if inputs.dim() > 3 else inputs > 0
            )
            filled_NPM[:, :, 0] = True
        elif self._views > 1:
            inputs = inputs[:, :, None].expand(-1, -1, self._views, *inputs.shape[2:]).clone()
        batch = Pass(parameters_ND, inputs, targets, present_NP, clip_norm, shape, filled_NPM)
        seen: list[tuple[str, Tensor]] = []
        self._check(batch)
        batch.blank_()
        with fixed_arithmetic(inputs.device, self._threads):
            self.engine.prepare(parameters_ND, inputs)
            self.engine.pass_sum(batch, lambda name, rows: seen.append((name, rows.clone())))
        return _joined(seen)

    def _pass_sum(self, batch: Pass) -> Tensor:
        """Sum one pass; examples on which model or loss raise count as zero."""
        with suppress(Exception):  # nobody may learn that an example raised
            return self._run(batch)
        # What fails on blank rows, too, fails in public and is raised here.
        self._run(batch.of_blanks())
        return self._sum_of_what_runs(batch, range(batch.present_NP.numel()))

    def _sum_of_what_runs(self, batch: Pass, places: range) -> Tensor:
        """Sum what does not raise, by halves of the places (of all nodes together).

        The others keep their places in passes of the same shape, and so their bits; where is cut
        does not depend on them.
        """
        total_ND = torch.zeros_like(batch.parameters_ND, dtype=torch.float64)
        middle = len(places) // 2
        for half in (places[:middle], places[middle:]):
            some = batch.with_only(half)
            if not bool(some.present_NP.any()):
                continue
            try:
                total_ND += self._run(some)
            except Exception:
                if len(half) > 1:
                    total_ND += self._sum_of_what_runs(batch, half)
        return total_ND

    def _run(self, batch: Pass) -> Tensor:
        batch.blank_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning about an example would reveal it
            return self.engine.pass_sum(batch)

    def _check(self, batch: Pass) -> None:
        places = tuple(batch.present_NP.shape)
        if not SMALLEST_CLIP <= batch.clip_norm <= LARGEST_CLIP:
            raise ConfigError(
                f"privacy.clip_norm = {batch.clip_norm}: expected a number from "
                f"{SMALLEST_CLIP:.1g} to {LARGEST_CLIP:.1g}"
            )
        if batch.parameters_ND.shape != (places[0], self._layout.dim):
            raise ModelError(
                f"parameters: expected shape {(places[0], self._layout.dim)} for this model and "
                f"{places[0]} nodes, got {tuple(batch.parameters_ND.shape)}"
            )
        lead = places if self._views == 1 else (*places, self._views)
        targets = lead if self._unit else places
        if (
            batch.inputs.shape[: len(lead)] != lead
            or batch.targets.shape[: len(targets)] != targets
        ):
            raise ModelError(
                f"inputs {tuple(batch.inputs.shape)} and targets {tuple(batch.targets.shape)}: "
                f"expected leading axes {lead} and {targets} (nodes, examples"
                f"{', rows' if self._unit else ', views' if self._views > 1 else ''})"
            )
        filled = None if batch.filled_NPM is None else tuple(batch.filled_NPM.shape)
        if filled != (lead if self._unit else None):
            raise ModelError(
                f"filled rows {filled}: expected {lead if self._unit else None} for "
                f"{self._views} rows per unit"
            )


def _joined(seen: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Join what the chunks of a pass showed: the same things in the same order, the norm last."""
    period = next(index for index, (name, _) in enumerate(seen) if name == NORM) + 1
    if period == len(seen):
        return seen
    return [
        (seen[first][0], torch.cat([rows for _, rows in seen[first::period]]))
        for first in range(period)
    ]


def _nodes_with_examples(present_NP: Tensor) -> list[slice]:
    return [slice(node, node + 1) for node in present_NP.any(dim=1).nonzero().flatten().tolist()]
