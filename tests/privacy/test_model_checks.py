"""Models that cannot be private are refused with a name and a remedy.

Those that can are let through.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpcsgp.errors import ModelError
from dpcsgp.privacy.model_checks import check_model
from dpcsgp.privacy.model_probes import check_examples_independent, check_gradients_reach


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def inside(layer: nn.Module) -> nn.Module:
    """Return a model that holds a layer under the name 'body.1'."""
    return nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2), layer)})


class Running(nn.Module):
    """Keeps a statistic under its usual name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm 1d": (lambda: nn.BatchNorm1d(10), r"nn\.GroupNorm\(5, 10\)"),
    "batch norm 2d": (lambda: nn.BatchNorm2d(64), r"nn\.GroupNorm\(32, 64\)"),
    "batch norm 3d": (lambda: nn.BatchNorm3d(7), r"nn\.GroupNorm\(1, 7\)"),
    "synchronised batch norm": (lambda: nn.SyncBatchNorm(96), r"nn\.GroupNorm\(32, 96\)"),
    "running instance norm": (
        lambda: nn.InstanceNorm2d(6, track_running_stats=True),
        r"nn\.InstanceNorm2d\(6",
    ),
    "running buffer": (Running, "running_mean"),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), "spectral"),
    "spectral norm, older": (lambda: nn.utils.spectral_norm(nn.Linear(3, 3)), "spectral"),
    "embedding with max_norm": (lambda: nn.Embedding(4, 3, max_norm=1.0), "max_norm"),
    "embedding with scale_grad_by_freq": (
        lambda: nn.Embedding(4, 3, scale_grad_by_freq=True),
        "scale_grad_by_freq",
    ),
    "lazy": (lambda: nn.LazyLinear(3), "run the model once"),
    "half precision": (lambda: nn.Linear(3, 3).bfloat16(), "float"),
    "complex": (lambda: nn.Linear(3, 3, dtype=torch.complex64), "complex64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_is_refused_with_its_name_and_a_remedy(name: str) -> None:
    build, remedy = REFUSED[name]
    with pytest.raises(ModelError, match=rf"'body\.1.*{remedy}"):
        check_model(inside(build()))


def test_the_proposed_group_norm_works() -> None:
    for channels in (1, 2, 7, 10, 64, 96, 100):
        with pytest.raises(ModelError) as caught:
            check_model(nn.BatchNorm2d(channels))
        replacement = eval(str(caught.value).rpartition("by ")[2], {"nn": nn})  # noqa: S307
        assert replacement(torch.randn(2, channels, 3, 3)).shape == (2, channels, 3, 3)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    for module in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(ModelError, match="no trainable parameters"):
            check_model(module)


def test_good_models_pass_without_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_model(
            nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)
            )
        )
        check_model(
            nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3), nn.InstanceNorm1d(3, affine=True))
        )


def test_in_place_layers_and_dropout_are_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"in-place layers 'body\.1' \(ReLU\)"):
        check_model(inside(nn.ReLU(inplace=True)))
    with pytest.warns(UserWarning, match=r"Dropout layers 'body\.1' \(Dropout2d\)"):
        check_model(inside(nn.Dropout2d(0.1)))


class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


class Counting(nn.Module):
    """Remembers the largest value it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.detach().max())
        return x


def test_a_layer_that_mixes_examples_is_found_and_named() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Centred()), nn.Linear(4, 2))
    with pytest.raises(ModelError, match=r"'1\.1' \(Centred\)"):
        check_examples_independent(module, torch.zeros(4))


def test_attention_over_the_batch_is_found() -> None:
    mixing, batched = (
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=first) for first in (False, True)
    )
    with pytest.raises(ModelError, match="depends on the other examples"):
        check_examples_independent(mixing, torch.zeros(3, 4))
    check_examples_independent(batched, torch.zeros(3, 4))


def test_batch_norm_is_found_by_its_behaviour_too() -> None:
    with pytest.raises(ModelError, match=r"'1' \(BatchNorm1d\)"):
        check_examples_independent(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.zeros(4)
        )


def test_a_buffer_that_changes_is_found_and_the_model_is_left_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Counting())
    with pytest.raises(ModelError, match=r"'1\.largest'"):
        check_examples_independent(module, torch.zeros(4))
    assert module[1].largest == 0
    assert not any(layer._forward_hooks for layer in module.modules())


def test_independent_models_pass_with_dropout_and_whole_numbers() -> None:
    module = nn.Sequential(
        nn.Embedding(5, 6), nn.Flatten(), nn.Dropout(0.5), nn.Linear(18, 4), nn.LayerNorm(4)
    )
    check_examples_independent(module, torch.zeros(3, dtype=torch.long))


class Forgetful(nn.Module):
    """Has a layer it never uses and one behind a detach."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.cut = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.cut(x).detach())


def test_parameters_without_gradient_are_named() -> None:
    example = (torch.zeros(4), torch.tensor(0))
    with pytest.raises(
        ModelError, match=r"'unused\.weight', 'unused\.bias', 'cut\.weight', 'cut\.bias'"
    ):
        check_gradients_reach(Forgetful(), entropy, example)
    check_gradients_reach(nn.Linear(4, 3), entropy, example)
    with pytest.raises(ModelError, match="does not depend"):
        check_gradients_reach(
            nn.Linear(4, 3), lambda outputs, targets: outputs.detach().sum(dim=1), example
        )


def test_probes_leave_torchs_generator_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    check_examples_independent(module, torch.zeros(4))
    check_gradients_reach(module, entropy, (torch.zeros(4), torch.tensor(0)))
    assert torch.equal(torch.rand(2), expected)


WEIGHTS = torch.tensor([1.0, 50.0])


def weighted_by_the_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, weight=WEIGHTS, reduction="none")
    return losses / WEIGHTS[targets].sum() * len(targets)


def scaled_by_the_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses * losses.detach() / losses.detach().mean()


def divided_by_the_number(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none") / len(targets)


@pytest.mark.parametrize(
    "loss", [weighted_by_the_batch, scaled_by_the_batch, divided_by_the_number]
)
def test_a_loss_that_mixes_examples_is_refused(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ModelError, match="depends on the other examples"):
        check_gradients_reach(
            nn.Linear(5, 2), loss, (torch.zeros(5), torch.zeros((), dtype=torch.int64))
        )


def test_losses_of_single_examples_pass() -> None:
    def fixed_weights(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, weight=WEIGHTS, reduction="none") / 100

    dropout = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    check_gradients_reach(
        dropout, fixed_weights, (torch.zeros(5), torch.zeros((), dtype=torch.int64))
    )
    check_gradients_reach(
        nn.Linear(5, 2), lambda o, t: (o - t).square().sum(1), (torch.zeros(5), torch.zeros(2))
    )


class Recurrent(nn.Module):
    """Takes the batch for the sequence: an example sees those before it, never those behind."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.recurrent, self.last = nn.LSTM(3, 4, batch_first=batch_first), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.recurrent(inputs)[0][:, -1])


class Cumulative(nn.Module):
    """Hands each example the sum of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(inputs.cumsum(0))


@pytest.mark.parametrize(
    ("module", "shape"), [(Recurrent(batch_first=False), (5, 3)), (Cumulative(), (4,))]
)
def test_a_model_that_looks_backwards_in_the_batch_is_refused(
    module: nn.Module, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ModelError, match="depends on the other"):
        check_examples_independent(module, torch.zeros(shape))


def test_a_recurrent_model_over_its_own_sequence_is_fine() -> None:
    module = Recurrent(batch_first=True)
    check_examples_independent(module, torch.zeros(5, 3))
    check_gradients_reach(module, entropy, (torch.zeros(5, 3), torch.tensor(0)))


class Shared(nn.Module):
    """Divides by the number of examples in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(inputs) / len(inputs)


def test_a_model_that_depends_on_the_size_of_the_batch_is_refused() -> None:
    with pytest.raises(ModelError, match="how many there are"):
        check_gradients_reach(Shared(), entropy, (torch.zeros(4), torch.tensor(0)))


def test_a_loss_on_named_outputs_that_divides_by_the_batch_is_refused() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 3)

        def forward(self, inputs: Tensor) -> dict[str, Tensor]:
            return {"scores": self.last(inputs)}

    example = torch.zeros(4), torch.tensor(0)
    check_gradients_reach(
        Named(), lambda outputs, targets: entropy(outputs["scores"], targets), example
    )
    with pytest.raises(ModelError, match="how many there are"):
        check_gradients_reach(
            Named(),
            lambda outputs, targets: entropy(outputs["scores"], targets) / len(targets),
            example,
        )


class Hoarder(nn.Module):
    """Keeps what it sees, outside of parameters and buffers."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.last, self.where = nn.Linear(4, 3), where
        self.seen: list[Tensor] = []
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.table: dict[int, Tensor] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        if self.where == "list":
            self.seen.append(inputs.detach())
        elif self.where == "parameter":
            self.mean.data.lerp_(inputs.detach().mean(0), 0.1)
        elif self.where == "attribute":
            self.hidden = inputs
        elif self.where == "shapes":  # a cache that depends on shapes alone carries nothing
            self.table.setdefault(len(inputs), torch.arange(len(inputs)))
        return self.last(inputs)


@pytest.mark.parametrize(
    ("where", "words"),
    [("list", "'seen'"), ("parameter", "parameter 'mean'"), ("attribute", "'hidden'")],
)
def test_a_model_that_keeps_what_it_sees_is_refused(where: str, words: str) -> None:
    with pytest.raises(ModelError, match=f"{words}.*past the noise"):
        check_examples_independent(Hoarder(where), torch.zeros(4))


def test_a_cache_by_shape_is_fine() -> None:
    check_examples_independent(Hoarder("shapes"), torch.zeros(4))


def test_public_examples_are_probed_where_random_ones_make_no_sense() -> None:
    public = torch.rand(20, 4), torch.rand(20, 1)
    module = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())

    def probability(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy(outputs, targets, reduction="none").squeeze(1)

    example = public[0][0], public[1][0]
    with pytest.raises((RuntimeError, ValueError)):
        check_gradients_reach(module, probability, example)
    check_gradients_reach(module, probability, example, public)


class AddsInPlace(nn.Module):
    """Adds to the rows it is given, which are the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs += 1
        return self.linear(inputs)


class LowPrecision(nn.Module):
    """Computes with few bits, in one of three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.last = way, nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "cast":
            bits = self.first.weight.bfloat16(), self.first.bias.bfloat16()
            return self.last(F.linear(x.bfloat16(), *bits).float())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.way != "none"):
            hidden = self.first(x)
        return self.last(hidden.float())


@pytest.mark.parametrize("way", ["autocast", "cast"])
def test_gradients_through_few_bits_are_refused_with_a_remedy(way: str) -> None:
    with pytest.raises(
        ModelError, match=r"computes in torch\.bfloat16 .*torch\.autocast"
    ) as caught:
        check_examples_independent(LowPrecision(way), torch.zeros(4))
    assert "expected torch.float32" in str(caught.value)
    model = LowPrecision("autocast")
    model.first.requires_grad_(False)  # public features: no gradient passes
    check_examples_independent(model, torch.zeros(4))
    check_examples_independent(LowPrecision("none"), torch.zeros(4))


def test_autocast_around_the_check_is_refused_too() -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ModelError, match=r"its forward pass computes in torch\.bfloat16"),
    ):
        check_examples_independent(LowPrecision("none"), torch.zeros(4))


def test_a_model_that_changes_the_data_is_refused() -> None:
    with pytest.raises(ModelError, match="changes its input in place"):
        check_examples_independent(AddsInPlace(), torch.zeros(4))
