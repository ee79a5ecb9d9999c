"""Every layer's ghost norm equals per-example gradients from `torch.func`, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from composed_layers import COMPOSED, Mixed, Recurrent
from reference_clipping import clip_and_sum, layerwise, per_example_gradients, squared
from torch import Tensor, nn

from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy.clipping import ghost_norms
from dpcsgp.privacy.clipping.layer_rules import COMPOSITES, FOREIGN_RULES, RULES
from dpcsgp.privacy.clipping.squares import squared_norms

Case = tuple[Callable[[], nn.Module], tuple[int, ...]]


def check(
    module: nn.Module,
    shape: tuple[int, ...],
    views: int = 1,
    num_examples: int = 5,
    integers: int = 0,
) -> None:
    """Compare the engine with the reference on one node, in float64."""
    module = module.double()
    generator = torch.Generator().manual_seed(1)
    size = (num_examples, views, *shape)
    drawn = torch.randn(size, generator=generator, dtype=torch.float64)
    inputs = torch.randint(0, integers, size, generator=generator) if integers else drawn
    targets = torch.randn(num_examples, 1, generator=generator, dtype=torch.float64)
    layout = ParameterLayout.of(module)
    flat_D = torch.randn(layout.dim, generator=generator, dtype=torch.float64) * 0.5
    given = inputs if views > 1 else inputs[:, 0]
    gradients = per_example_gradients(module, squared, flat_D, inputs, targets)
    present = torch.ones(1, num_examples, dtype=torch.bool)
    middle = float(gradients.norm(dim=1).median())
    for most_rows in (64, 2, 1):  # few rows allow the ghost form where many do not
        engine = layerwise(module, squared, views, most_rows)
        for clip in (0.1 * middle, middle, 1e9):  # all clipped, some clipped, none clipped
            ours = engine.clipped_sum(flat_D[None], given[None], targets[None], present, clip)[0]
            expected = clip_and_sum(gradients, clip)
            torch.testing.assert_close(
                ours, expected, rtol=2e-6, atol=2e-7 * float(expected.norm())
            )


class Twice(nn.Module):
    """Calls one layer twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


LAYERS: dict[str, Case] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)),
        (6,),
    ),
    "linear on short sequences": (lambda: nn.Linear(6, 4), (3, 6)),
    "linear on long sequences": (lambda: nn.Linear(3, 2), (40, 3)),
    "linear on long sequences, wide": (lambda: nn.Linear(60, 50), (7, 3, 60)),
    "linear on grids": (lambda: nn.Linear(6, 4), (2, 3, 6)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 5, 6)),
    "convolution, strided": (
        lambda: nn.Conv2d(3, 4, (3, 2), stride=2, padding=(1, 0), bias=False),
        (3, 6, 7),
    ),
    "convolution, dilated and grouped": (
        lambda: nn.Conv2d(4, 6, 3, dilation=2, padding=2, groups=2),
        (4, 6, 5),
    ),
    "convolution, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (4, 5, 5)),
    "convolution, many channels": (lambda: nn.Conv2d(24, 32, 3, padding=1), (24, 3, 3)),
    "convolution, many channels, strided": (
        lambda: nn.Conv2d(24, 32, 3, stride=2, padding=1),
        (24, 4, 4),
    ),
    "convolution, many channels, grouped": (
        lambda: nn.Conv2d(32, 48, 3, padding=1, groups=2),
        (32, 3, 4),
    ),
    "convolution, same": (lambda: nn.Conv2d(3, 4, 4, padding="same", dilation=(1, 2)), (3, 7, 8)),
    "convolution, valid": (lambda: nn.Conv2d(3, 4, 2, padding="valid"), (3, 4, 4)),
    "convolution, circular": (
        lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        (3, 4, 5),
    ),
    "convolution 1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=2, dilation=2), (3, 11)),
    "convolution 1d, same": (lambda: nn.Conv1d(4, 6, 4, padding="same", groups=2), (4, 9)),
    "convolution 1d, reflect": (
        lambda: nn.Conv1d(3, 4, 3, padding=2, padding_mode="reflect"),
        (3, 6),
    ),
    "convolution 1d, many channels": (lambda: nn.Conv1d(40, 50, 3, padding=1), (40, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (6, 3, 4)),
    "group norm on vectors": (lambda: nn.GroupNorm(2, 6), (6,)),
    "layer norm": (lambda: nn.LayerNorm([3, 4]), (5, 3, 4)),
    "layer norm without bias": (lambda: nn.LayerNorm(4, bias=False), (5, 4)),
    "rms norm": (lambda: nn.RMSNorm(4, eps=1e-3), (5, 4)),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 6)),
    "instance norm 2d": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 5)),
    "instance norm 3d": (lambda: nn.InstanceNorm3d(2, affine=True), (2, 3, 3, 2)),
    "linear used twice": (lambda: Twice(nn.Linear(6, 6)), (6,)),
    "linear used twice on sequences": (lambda: Twice(nn.Linear(5, 5)), (4, 5)),
    "convolution used twice": (lambda: Twice(nn.Conv2d(3, 3, 3, padding=1)), (3, 4, 4)),
    "large convolution used twice": (lambda: Twice(nn.Conv2d(30, 30, 3, padding=1)), (30, 2, 2)),
    "group norm used twice": (lambda: Twice(nn.GroupNorm(2, 4)), (4, 3)),
}


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_exact(name: str, views: int) -> None:
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no closed form")  # a closed form, not the fallback
        check(build(), shape, views)


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("padding", [None, 2])
def test_an_embedding_is_exact_with_repeated_words(padding: int | None, views: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(5, 3, padding_idx=padding), nn.Flatten(), nn.Linear(21, 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no closed form")
        check(module, (7,), views, integers=5)


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("name", COMPOSED)
def test_a_layer_made_of_linear_maps_is_exact(name: str, views: int) -> None:
    build, shape = COMPOSED[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no closed form")
        check(build(), shape, views)


@pytest.mark.parametrize("name", COMPOSED)
def test_a_layer_made_of_linear_maps_may_be_frozen_in_part(name: str) -> None:
    build, shape = COMPOSED[name]
    torch.manual_seed(0)
    parameters = [name for name, _ in build().named_parameters()]
    for parity in (0, 1):
        module = build()
        for number, parameter in enumerate(module.parameters()):
            parameter.requires_grad_(number % 2 == parity and len(parameters) > 1)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "no closed form")
            check(module, shape)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("views", [1, 2])
def test_recurrent_layers_work_beside_parameters_without_closed_form(
    kind: Callable[..., nn.RNNBase], views: int
) -> None:
    torch.manual_seed(0)
    module = Mixed(Recurrent(kind(3, 4, batch_first=True)))
    with pytest.warns(UserWarning, match="gain"):
        check(module, (3, 3), views, num_examples=3)


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 2])
def test_a_bag_of_words_is_exact(mode: str, padding: int | None, views: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding), nn.Linear(3, 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no closed form")
        check(module, (7,), views, integers=5)


@pytest.mark.parametrize("length", [0, 1, 4097, 3_000_000])
def test_norms_of_long_rows_are_accurate(length: int) -> None:
    rows = torch.rand(2, length, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        squared_norms(rows), rows.double().square().sum(dim=1), rtol=1e-12, atol=0.0
    )


LARGE = [name for name in LAYERS if "large" in name or "many" in name or "long" in name]


@pytest.mark.parametrize("name", [*LARGE, "bare parameter", "attention"])
def test_working_on_a_few_examples_at_a_time_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, shape = LAYERS[name] if name in LAYERS else FALLBACK[name][:2]
    torch.manual_seed(0)
    monkeypatch.setattr(ghost_norms, "SCRATCH_FLOATS", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(build(), shape)


def test_every_rule_is_tested() -> None:
    built = [build() for build, _ in (*LAYERS.values(), *COMPOSED.values())]
    tested = {type(layer) for module in built for layer in module.modules()}
    assert {*RULES, *COMPOSITES} <= tested | {nn.Embedding, nn.EmbeddingBag}
    assert {kind.__name__ for kind in tested} >= {name for _, name in FOREIGN_RULES}


class TiedLinears(nn.Module):
    """Two linear layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


class LanguageModel(nn.Module):
    """The output layer is tied to the embedding, or uses its weight past the layer."""

    def __init__(self, through_layer: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 6, bias=False) if through_layer else None
        if self.out is not None:
            self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.words(x)))
        return F.linear(hidden, self.words.weight) if self.out is None else self.out(hidden)


@pytest.mark.parametrize("views", [1, 2])
def test_tied_weights_are_clipped_by_the_norm_of_the_summed_gradient(views: int) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no closed form")
        check(TiedLinears(), (5,), views)
        check(TiedLinears(), (3, 5), views)
        check(LanguageModel(through_layer=True), (4,), views, integers=6)


@pytest.mark.parametrize("views", [1, 2])
def test_a_weight_used_past_its_layer_is_noticed(views: int) -> None:
    with pytest.warns(UserWarning, match=r"words\.weight"):
        check(LanguageModel(through_layer=False), (4,), views, integers=6)


class Positions(nn.Module):
    """Adds an embedding of positions, looked up once for all rows, to one of words."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.words = way, nn.Embedding(5, 3)
        self.places, self.out = nn.Embedding(9, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        numbers, words = torch.arange(x.shape[1]) * 2, self.words(x)
        if self.way == "plain":
            words = words + self.places(numbers)
        elif self.way == "leading axis":
            words = words + self.places(numbers[None])
        elif self.way == "twice":
            words = words * self.places(numbers[None]) + self.places(numbers % 3)
        elif self.way == "expanded":
            words = words + self.places(numbers[None]).expand(len(x), -1, -1)
        elif self.way == "beside rows":
            words = words * self.places(numbers) + self.places(x)
        elif self.way == "axis added":
            words = words + self.places(numbers)[None]
        elif self.way == "one for all":
            words = words + self.places(numbers[None])[0]
        elif self.way == "divided":
            table = self.places(numbers)
            words = words + table / len(table)
        elif self.way == "summed":
            words = words + self.places(numbers).sum(dim=0)
        return self.out(torch.tanh(words))


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("way", ["plain", "leading axis", "twice", "expanded", "beside rows"])
@pytest.mark.parametrize("length", [2, 4, 5])
def test_lookups_that_serve_all_rows_at_once_are_exact(way: str, length: int, views: int) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no closed form")
        check(Positions(way), (length,), views, integers=5)


@pytest.mark.parametrize("way", ["axis added", "one for all", "divided", "summed"])
def test_lookups_whose_copies_would_not_be_the_rows_own_fall_back(way: str) -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"places\.weight"):
        check(Positions(way), (4,), integers=5)


class SequenceFirst(nn.Module):
    """Runs its layer with the example axis second."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("length", [2, 3, 5])
def test_an_example_axis_in_another_place_is_noticed(length: int) -> None:
    with pytest.warns(UserWarning, match=r"layer\.weight"):
        check(SequenceFirst(), (length, 4), num_examples=5)


class Scaled(nn.Module):
    """A bare parameter beside a layer with a closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.gain * x)


class Attention(nn.Module):
    """Attends to added keys: uses the weights of its output layer past that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attend(x, x, x, need_weights=False)[0])


FALLBACK: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "bare parameter": (Scaled, (4,), "gain in the model itself"),
    "unknown layer": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2)),
        (4,),
        r"1 \(PReLU\)",
    ),
    "transposed convolution": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3)),
        (2, 4, 4),
        "ConvTranspose2d",
    ),
    "weight normalisation": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        (4,),
        "weight",
    ),
    "attention": (Attention, (3, 4), "attend"),
}


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("name", FALLBACK)
def test_anything_else_falls_back_and_says_so(name: str, views: int) -> None:
    build, shape, message = FALLBACK[name]
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=message):
        check(build(), shape, views)


def test_torchs_short_cut_for_attention_is_not_taken_with_private_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In eval() mode a frozen encoder would pack rows by their lengths."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the short cut was taken")

    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        monkeypatch.setattr(torch, name, fail)
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True).requires_grad_(False)
    module = nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Flatten(), nn.Linear(12, 2)).eval()
    engine, flat_D = layerwise(module, squared), ParameterLayout.of(module).flatten(module)
    present = torch.ones(1, 2, dtype=torch.bool)
    before = torch.backends.mha.get_fastpath_enabled()
    engine.clipped_sum(flat_D[None], torch.randn(1, 2, 3, 4), torch.zeros(1, 2, 1), present, 1.0)
    assert torch.backends.mha.get_fastpath_enabled() == before
    if before:
        with pytest.raises(AssertionError, match="short cut"), torch.no_grad():
            module(torch.randn(2, 3, 4))


def test_a_layer_with_another_forward_is_not_trusted() -> None:
    module = nn.Sequential(nn.Linear(4, 3))
    original = module[0].forward
    module[0].forward = lambda input: original(input).square()
    with pytest.warns(UserWarning, match=r"0\.weight"):
        check(module, (4,))


class InPlace(nn.Module):
    """Overwrites layer outputs, as many published networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(F.relu(self.one(x), inplace=True))
        out += 0.5
        return self.two(F.relu(out, inplace=True).mean(dim=(2, 3))).tanh_()


@pytest.mark.parametrize("views", [1, 2])
def test_in_place_operations_do_not_falsify_gradients(views: int) -> None:
    torch.manual_seed(0)
    check(InPlace(), (2, 4, 4), views)


def test_frozen_parameters_stay_out_of_the_vector() -> None:
    module = nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 2), nn.Linear(2, 2)
    )
    module[0].requires_grad_(False)
    module[3].weight.requires_grad_(False)
    module[4].bias.requires_grad_(False)
    assert ParameterLayout.of(module).dim == 6 + 2 + 4
    check(module, (2, 6))


class Idle(nn.Module):
    """Calls a layer whose output is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        return self.used(x)


def test_a_layer_without_influence_has_zero_gradient() -> None:
    check(Idle(), (4,))
