"""Clipped sums in passes: every example counts, chunks are alike, no outer setting reaches in."""

from __future__ import annotations

import warnings

import pytest
import torch
from reference_clipping import clip_and_sum, layerwise, per_example_gradients
from test_clipping import MODELS, Explicit, entropy, network, stack
from torch import Tensor, nn

from dpcsgp.errors import ConfigError, ModelError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping.engine import clipping_engine
from dpcsgp.privacy.clipping.ghost_norms import may_sum_positions
from dpcsgp.privacy.passes import PassShape


@pytest.mark.parametrize("module", [stack(), network(), Explicit()], ids=list(MODELS))
@pytest.mark.parametrize(
    "shape", [PassShape(16, 1), PassShape(16, 3), PassShape(48, 4), PassShape(96, 7)], ids=str
)
def test_chunks_and_passes_add_up(module: nn.Module, shape: PassShape) -> None:
    """Whatever the shape of the passes, all present examples are summed.

    Several passes in double precision.
    """
    torch.manual_seed(0)
    models_ND = 0.4 * torch.randn(2, ParameterLayout.of(module).dim)
    inputs, targets = torch.randn(2, 600, 1, 3, 4), torch.randint(4, (2, 600))
    present = torch.rand(2, 600) < 0.8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        total = clipping_engine(module, entropy).clipped_sum(
            models_ND, inputs.clone(), targets.clone(), present, 0.3, shape
        )
    assert shape.places >= 600 or total.dtype is torch.float64
    for node in range(2):
        gradients = per_example_gradients(
            module,
            entropy,
            models_ND[node],
            inputs[node][present[node], None],
            targets[node][present[node]],
        )
        torch.testing.assert_close(
            total[node].double(), clip_and_sum(gradients.double(), 0.3), rtol=1e-3, atol=1e-4
        )


def test_a_clip_norm_below_float32s_reach_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 1))
    engine, models = clipping_engine(module, lambda out, t: out.sum(1)), torch.zeros(1, 3)
    arguments = models, torch.ones(1, 1, 2), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    engine.clipped_sum(*arguments, 2.0**-30)
    for clip in (2.0**-31, 1e-30, 0.0, float("nan")):
        with pytest.raises(ConfigError, match=r"privacy\.clip_norm"):
            engine.clipped_sum(*arguments, clip)


class Watcher(nn.Module):
    """A linear layer that notes how many rows it gets at a time, and where in memory they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(3, 2), list[tuple[int, int]]()

    def forward(self, rows: Tensor) -> Tensor:
        self.seen.append((len(rows), rows.data_ptr() % 64))
        return self.linear(rows)


@pytest.mark.parametrize("most_rows", [1, 16, 64])
def test_every_chunk_has_the_same_rows_and_lies_in_memory_alike(most_rows: int) -> None:
    """Kernels are chosen by shape and round by alignment: neither may follow the drawn size."""
    # public: as few blanks as possible in chunks of about 64 rows
    expected = {PassShape(64): 64, PassShape(48, 3): 72, PassShape(80): 80, PassShape(16): 32}
    for shape, rows in expected.items():
        module = Watcher()
        engine = layerwise(module, lambda out, t: out.sum(1), most_rows=most_rows)
        for size in (1, 5, 63, 64, 65, 100):
            present = torch.ones(1, size, dtype=torch.bool)
            engine.clipped_sum(
                torch.ones(1, 8), torch.randn(1, size, 3), torch.zeros(1, size), present, 1.0, shape
            )
        # these are the public zeros of the plan
        chunks = [seen for seen in module.seen if seen[0] not in (2, 3)]
        assert set(chunks) == {(rows if most_rows == 64 else most_rows, 0)}


def test_chunks_never_hold_so_few_rows_that_formed_gradients_become_ghost_sums() -> None:
    assert not may_sum_positions(32, 2)


class Overwrites(nn.Module):
    """Writes over what its layer got, once the layer has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(1) * 2.0
        outputs = self.linear(rows)
        rows.zero_()
        return outputs


def test_a_layers_input_that_is_overwritten_is_refused_or_exact() -> None:
    """Recorded inputs are read after the forward pass: zeros would pass for short gradients."""
    torch.manual_seed(0)
    module = Overwrites()
    models, inputs, targets = (
        torch.randn(1, 52),
        9 * torch.randn(1, 5, 1, 3, 4),
        torch.randint(4, (1, 5)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = clipping_engine(module, entropy)
        with pytest.raises(ModelError, match=r"linear\.weight"):
            engine.clipped_sum(models, inputs, targets, torch.ones(1, 5, dtype=torch.bool), 1.0)


@pytest.mark.parametrize(
    "module", [nn.Sequential(nn.Linear(1, 3)), Watcher()], ids=["stack", "layerwise"]
)
def test_flushed_denormals_of_the_caller_change_nothing(module: nn.Module) -> None:
    """Other threads do not flush: norms and sums would differ between them."""
    width = 1 if isinstance(module, nn.Sequential) else 3
    engine, dim = (
        clipping_engine(module, lambda out, t: 1e-25 * out.sum(1)),
        ParameterLayout.of(module).dim,
    )
    sums = []
    for flushed in (False, True):
        torch.set_flush_denormal(flushed)
        try:
            present = torch.ones(1, 7, dtype=torch.bool)
            sums.append(
                engine.clipped_sum(
                    torch.ones(1, dim),
                    torch.full((1, 7, width), 1e-18),
                    torch.zeros(1, 7),
                    present,
                    1.0,
                )
            )
        finally:
            torch.set_flush_denormal(False)
    assert torch.equal(*sums) and bool(sums[0].any())
