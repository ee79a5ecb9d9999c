"""Fast products and fixed arithmetic: the numbers of plain float32, whatever the caller has set."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from composed_layers import COMPOSED
from reference_clipping import clip_and_sum, layerwise, per_example_gradients, squared
from test_clipping_layers import LAYERS
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from dpcsgp.errors import ModelError
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping import products
from dpcsgp.privacy.clipping.arithmetic import PRODUCTS, check_products, fixed_arithmetic
from dpcsgp.privacy.clipping.products import fast_products, linear, linear_layers

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(
    products._operator() is None, reason="torch has no oneDNN on this machine"
)


@pytest.fixture
def every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products go to oneDNN as well."""
    monkeypatch.setattr(products, "_WORTH_IT", 1)


def check_float32(
    module: nn.Module, shape: tuple[int, ...], reference: nn.Module | None = None
) -> None:
    """Compare the engine in float32 with the reference in float64, none clipped and all clipped."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(5, *shape, generator=generator)
    targets = torch.randn(5, 1, generator=generator)
    layout = ParameterLayout.of(module)
    flat_D = 0.5 * torch.randn(layout.dim, generator=generator)
    present = torch.ones(1, 5, dtype=torch.bool)
    sums = {}
    for most_rows in (64, 1):
        engine = layerwise(module, squared, most_rows=most_rows)
        for clip in (1e9, 1e-2):
            sums[most_rows, clip] = engine.clipped_sum(
                flat_D[None], inputs[None], targets[None], present, clip
            )[0]
    exact = per_example_gradients(
        (reference or module).double(),
        squared,
        flat_D.double(),
        inputs[:, None].double(),
        targets.double(),
    )
    for (_, clip), found in sums.items():
        expected = clip_and_sum(exact, clip)
        if clip < 1:  # ghost norms are raised by a margin, so that gradients come out shorter
            assert float(found.norm()) <= float(expected.norm()) * (1 + 1e-4)
        share = 1e-4 if clip > 1 else 0.1
        assert float((found - expected).norm()) <= share * float(expected.norm())


@needs_onednn
@pytest.mark.usefixtures("every_product")
@pytest.mark.parametrize("name", [*LAYERS, *COMPOSED])
def test_layers_are_right_in_float32(name: str) -> None:
    build, shape = LAYERS[name] if name in LAYERS else COMPOSED[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no closed form")
        check_float32(build(), shape)


SHAPES = {
    "matrix": (50, 30),
    "sequence": (5, 7, 30),
    "one row": (1, 30),
    "no leading axis": (30,),
    "no rows": (0, 30),
    "deep": (2, 3, 4, 30),
}


def both_ways(
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> list[Tensor]:
    leaves = [part.detach().requires_grad_() for part in (inputs, weight, bias) if part is not None]
    out = product(leaves[0], leaves[1], leaves[2] if bias is not None else None)
    return [out, *torch.autograd.grad(out.sin().sum(), leaves)]


@needs_onednn
@pytest.mark.usefixtures("every_product")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_a_product_is_that_of_torch_both_ways(name: str, biased: bool) -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(SHAPES[name]), torch.randn(20, 30)
    bias = torch.randn(20) if biased else None
    ours = both_ways(linear, inputs, weight, bias)
    theirs = both_ways(nn.functional.linear, inputs, weight, bias)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.usefixtures("every_product")
def test_a_product_takes_strided_operands() -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(30, 9, 5).transpose(0, 2), torch.randn(30, 40).t()
    torch.testing.assert_close(linear(inputs, weight[::2]), inputs @ weight[::2].t())


@needs_onednn
@pytest.mark.usefixtures("every_product")
def test_a_model_may_differentiate_by_its_own_inputs() -> None:
    """Second derivatives run through the product's way back."""
    torch.manual_seed(0)
    weight, inputs = torch.randn(6, 6), torch.randn(4, 6)
    found = []
    for product in (linear, nn.functional.linear):
        leaf, leaves = inputs.clone().requires_grad_(), weight.clone().requires_grad_()
        slope = torch.autograd.grad(product(leaf, leaves).sin().sum(), leaf, create_graph=True)[0]
        found.append(torch.autograd.grad(slope.square().sum(), [leaf, leaves]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 64, 80, 127, 640])
@pytest.mark.parametrize("width", [1, 31, 64, 130])
@pytest.mark.usefixtures("every_product")
def test_a_row_keeps_its_bits_beside_any_others(rows: int, width: int) -> None:
    """Shapes of registers and their rests; companions with huge, tiny and no numbers at all."""
    torch.manual_seed(0)
    weight, inputs = torch.randn(48, width), torch.randn(rows, width)
    usual = linear(inputs, weight)
    kept = torch.arange(rows) % 3 == 0
    for value in (0.0, 1e30, 1e-40, float("inf"), float("nan")):
        others = torch.where(kept[:, None], inputs, value)
        assert torch.equal(linear(others, weight)[kept], usual[kept])


def test_layers_have_their_own_forward_afterwards() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    with fast_products(linear_layers(model)):
        assert "forward" in vars(model[0])
    with pytest.raises(ZeroDivisionError), fast_products(linear_layers(model)):
        raise ZeroDivisionError
    assert not any("forward" in vars(layer) for layer in model.modules())


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_layers_that_compute_something_else_keep_what_they_compute() -> None:
    patched = nn.Linear(3, 3)
    patched.forward = lambda input: input
    model = nn.Sequential(OwnLinear(3, 3), patched, nn.Linear(3, 3))
    assert linear_layers(model) == [model[2]]


class Checkpointed(nn.Module):
    """Computes its middle once more on the way back, to save memory, or does not."""

    def __init__(self, middle: nn.Module, once_more: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), middle, nn.Linear(8, 2)
        self.once_more = once_more

    def forward(self, x: Tensor) -> Tensor:
        found: Any = self.first(x)
        if self.once_more:
            found = checkpoint(self.middle, found, use_reentrant=False)
        else:
            found = self.middle(found)
        return self.last(found if isinstance(found, Tensor) else found[0])


MIDDLES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()),
    "convolution": lambda: nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.Tanh()),
    "LSTM": lambda: nn.LSTM(8, 8, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True),
}


@pytest.mark.usefixtures("every_product")
@pytest.mark.parametrize("name", MIDDLES)
def test_checkpointed_activations_are_computed_with_the_same_parameters(name: str) -> None:
    """The parameters that a pass is computed with are not those of the module."""
    torch.manual_seed(0)
    module = Checkpointed(MIDDLES[name](), once_more=True)
    # the reference would be computed once more with the module's own
    check_float32(module, (4, 6), Checkpointed(module.middle, once_more=False))


@pytest.mark.usefixtures("every_product")
@pytest.mark.filterwarnings("ignore")
def test_torch_func_inside_of_a_model_still_works() -> None:
    torch.manual_seed(0)
    layer, rows = nn.Linear(6, 4), torch.randn(5, 6)
    with fast_products([layer]):
        found = torch.func.vmap(layer)(rows)
        slopes = torch.func.jacrev(lambda row: layer(row).sum())(rows[0])
    torch.testing.assert_close(found, layer(rows))
    torch.testing.assert_close(slopes, layer.weight.sum(dim=0))


class InPlace(nn.Module):
    """Changes what linear layers return, as AlexNet and residual blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.attend, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x).relu_()
        more = self.second(kept)
        more += kept
        more[:, 0] = 0.5
        found = self.attend(more, more, more, need_weights=False)[0]
        found *= 2.0
        return self.last(found)


@pytest.mark.usefixtures("every_product")
def test_models_may_change_in_place_what_linear_layers_return() -> None:
    torch.manual_seed(0)
    check_float32(InPlace(), (4, 6))


@pytest.mark.usefixtures("every_product")
def test_inputs_may_be_expanded() -> None:
    """All positions of an example are one number in memory."""

    class Expanded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[:, None].expand(-1, 9, -1))

    torch.manual_seed(0)
    check_float32(Expanded(), (6,))


class TakesAway(nn.Module):
    """Gives a layer another forward for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.first.forward = lambda input: 2 * input
        found = self.first(x)
        del self.first.forward
        return self.second(self.first(found))


def test_a_model_that_changes_its_layers_leaves_nothing_behind() -> None:
    model = TakesAway()
    with fast_products(linear_layers(model)):
        model(torch.ones(2, 6))
    assert not any("forward" in vars(layer) for layer in model.modules())


def frozen_biases() -> dict[str, Tensor]:
    return {
        "strided": torch.arange(40.0).view(20, 2)[:, 0],
        "expanded": torch.tensor([1.5]).expand(20),
        "one number": torch.tensor(1.5),
        "of length one": torch.tensor([1.5]),
        "float64": torch.arange(20.0, dtype=torch.float64),
    }


@pytest.mark.usefixtures("every_product")
@pytest.mark.parametrize("name", frozen_biases())
def test_what_the_operator_would_misread_is_left_to_torch(name: str) -> None:
    """oneDNN's product reads as many numbers as there are outputs, whatever the bias is."""
    torch.manual_seed(0)
    inputs, weight, bias = torch.randn(5, 30), torch.randn(20, 30), frozen_biases()[name]
    assert not products._suits(inputs, weight, bias)
    if bias.dtype is torch.float32:
        expected = inputs @ weight.t() + bias
        torch.testing.assert_close(linear(inputs, weight, bias), expected)


class Doubled(Tensor):
    """A weight that is another number than it holds, as quantised ones are."""

    @classmethod
    def __torch_function__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = super().__torch_function__(function, types, args, kwargs or {})
        return 2 * found if function is nn.functional.linear else found


@pytest.mark.usefixtures("every_product")
def test_weights_of_other_classes_multiply_as_they_do() -> None:
    weight = torch.ones(4, 6).as_subclass(Doubled)
    assert float(linear(torch.ones(2, 6), weight).sum()) == 2 * 2 * 4 * 6


@pytest.mark.usefixtures("every_product")
def test_slopes_along_a_direction_still_work_inside_of_a_model() -> None:
    torch.manual_seed(0)
    inputs, direction, weight = torch.randn(3, 6), torch.randn(3, 6), torch.randn(4, 6)
    with forward_ad.dual_level():
        found = linear(forward_ad.make_dual(inputs, direction), weight)
        slope = forward_ad.unpack_dual(found).tangent
    torch.testing.assert_close(slope, direction @ weight.t())


# ------------------------------------------------------------------------------- arithmetic


COARSE = {"bf16", "tf32"}


def on_cpus() -> list[Any]:
    """Where torch keeps how products are rounded on CPUs; nowhere before torch 2.9."""
    places = (getattr(torch.backends.mkldnn, kind, None) for kind in ("matmul", "conv", "rnn"))
    return [place for place in places if place is not None]


def precisions() -> list[str]:
    return [place.fp32_precision for place in on_cpus()]


@pytest.fixture
def settings_of_torch() -> Iterator[None]:
    """Put the precision of products back."""
    yield
    torch.set_float32_matmul_precision("highest")
    for place in (torch.backends, *on_cpus()) if on_cpus() else ():
        setattr(place, "fp32_precision", "none")  # noqa: B010 - unknown to the type checker


SETTINGS: dict[str, Callable[[], object]] = {
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "global": lambda: setattr(torch.backends, "fp32_precision", "bf16"),
    "on CPUs": lambda: setattr(on_cpus()[0], "fp32_precision", "bf16"),
}


@pytest.mark.usefixtures("settings_of_torch")
@pytest.mark.parametrize("name", SETTINGS)
def test_coarser_products_of_the_caller_do_not_reach_the_gradients(name: str) -> None:
    """Processors that multiply bfloat16 would take it: this one may not, so settings are read."""
    if not precisions():
        pytest.skip("this torch has one setting for all, and no way to read what CPUs do")
    SETTINGS[name]()
    before = precisions()
    assert COARSE & set(before)
    seen: list[list[str]] = []

    class Looks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(precisions())
            return super().forward(input)

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = layerwise(nn.Sequential(Looks(4, 2)), squared)
        flat, present = torch.randn(1, 10), torch.ones(1, 3, dtype=torch.bool)
        engine.clipped_sum(flat, torch.randn(1, 3, 4), torch.zeros(1, 3, 1), present, 1.0)
    assert seen and not any(COARSE & set(found) for found in seen)
    assert precisions() == before


def test_products_of_this_machine_are_float32() -> None:
    check_products(CPU)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_in_a_coarser_format_is_refused(name: str) -> None:
    """What a processor for bfloat16 would do if a variable of the environment told it to."""
    rounded = PRODUCTS | {
        name: lambda rows, weight: PRODUCTS[name](rows.bfloat16().float(), weight)
    }
    with pytest.raises(ModelError, match=f"products of {name} .*ONEDNN_DEFAULT_FPMATH_MODE"):
        check_products(CPU, rounded)


def test_settings_are_put_back_after_an_error() -> None:
    before = precisions(), torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), fixed_arithmetic(CPU, 1):
        raise ZeroDivisionError
    assert (precisions(), torch.get_num_threads()) == before


@pytest.mark.usefixtures("settings_of_torch")
def test_a_precision_of_all_products_is_the_callers_again() -> None:
    """What followed from the setting for all kinds goes on following from it."""
    if not precisions():
        pytest.skip("this torch has one setting for all")
    setattr(torch.backends, "fp32_precision", "bf16")  # noqa: B010 - unknown to the type checker
    with fixed_arithmetic(CPU, 1):
        assert precisions() == ["ieee"] * 3
    assert precisions() == ["bf16"] * 3
    setattr(torch.backends, "fp32_precision", "ieee")  # noqa: B010
    assert precisions() == ["ieee"] * 3


@pytest.mark.usefixtures("settings_of_torch")
def test_two_threads_share_the_settings_of_the_process() -> None:
    """The first one in changes them, the last one out puts them back."""
    torch.set_float32_matmul_precision("medium")
    before, threads = precisions(), torch.get_num_threads()
    inside, leave, seen = threading.Barrier(2), threading.Event(), list[list[str]]()

    def first() -> None:
        with fixed_arithmetic(CPU, threads):
            inside.wait()
        leave.set()

    def second() -> None:
        with fixed_arithmetic(CPU, threads):
            inside.wait()
            assert leave.wait(60)
            seen.append(precisions())

    both = [threading.Thread(target=each) for each in (first, second)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(seen) == 1 and not COARSE & set(seen[0])
    assert precisions() == before
    assert torch.get_float32_matmul_precision() == "medium"


def test_models_may_switch_cudnn_off_for_a_layer() -> None:
    with fixed_arithmetic(CPU, 1), torch.backends.cudnn.flags(enabled=False):
        assert not torch.backends.cudnn.enabled


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
def test_float32_is_tried_whatever_the_default_is() -> None:
    def coarse(rows: Tensor, weight: Tensor) -> Tensor:
        return rows if rows.dtype is not torch.float32 else rows.bfloat16().float()

    with pytest.raises(ModelError, match="products of matrices"):
        check_products(CPU, PRODUCTS | {"matrices": coarse})
    torch.set_flush_denormal(True)
    try:
        with fixed_arithmetic(CPU, 1):
            assert float(torch.tensor(2.0**-140, dtype=torch.float32) * 1.0) > 0
    finally:
        torch.set_flush_denormal(False)
    products._operator.cache_clear()
    found = products._operator()
    torch.set_default_dtype(torch.float32)
    products._operator.cache_clear()
    assert found is products._operator()


def test_threads_that_flush_the_smallest_numbers_are_refused() -> None:
    """They keep what they were born with, and would round rows by their place."""
    code = (
        "import torch; torch.set_num_threads(2); torch.set_flush_denormal(True); "
        "torch.ones(2**21).mul_(2); torch.set_flush_denormal(False); "
        "from dpcsgp.privacy.clipping.arithmetic import check_products; "
        "check_products(torch.device('cpu'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert "ModelError: torch.set_flush_denormal(True) was called before" in done.stderr
