"""Models that people bring: recurrent, pretrained in part, compiled, with adapters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dpcsgp
from dpcsgp.errors import ModelError, PrivateStepError
from dpcsgp.modes import evaluation_mode, training_copy, uncompiled
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import clipping_engine
from dpcsgp.privacy.clipping.layerwise import LayerwiseEngine
from dpcsgp.privacy.model_checks import check_model
from dpcsgp.runs.script_words import script_words
from dpcsgp.runtime.process import _told

FAST = {
    "algorithm.steps": 4,
    "algorithm.learning_rate": 0.5,
    "algorithm.polish_rounds": 1,
    "run.evaluate_every": 1,
    "privacy.expected_batch_size": 12,
}


def fit(module: nn.Module, shape: tuple[int, ...], out: Path) -> dpcsgp.Result:
    """Train on two small nodes, with evaluations between the steps."""
    random = torch.Generator().manual_seed(0)
    parts = [
        (torch.randn(size, *shape, generator=random), torch.arange(size) % 2)
        for size in (40, 30, 20)
    ]
    return dpcsgp.train(
        module, parts[:2], test_data=parts[2], epsilon=8.0, delta=1e-3, settings=FAST, out=out
    )


class LastStep(nn.Module):
    """A recurrent layer and a readout of its last step."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(layer.hidden_size, 2)

    def forward(self, series: Tensor) -> Tensor:
        return self.out(self.layer(input=series)[0][:, -1])


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_recurrent_models_train(kind: Callable[..., nn.RNNBase], tmp_path: Path) -> None:
    module = LastStep(kind(3, 4, batch_first=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no closed form")
        result = fit(module, (5, 3), tmp_path / "run")
    moved = [
        not torch.equal(one, other)
        for one, other in zip(module.parameters(), result.model.parameters(), strict=True)
    ]
    assert all(moved)


class Packed(nn.Module):
    """Packs its sequences by their lengths, which are private."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 2, batch_first=True)

    def forward(self, series: Tensor) -> Tensor:
        lengths = torch.full((len(series),), series.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(series, lengths, batch_first=True)
        return self.layer(packed)[1][0]


def test_packed_sequences_are_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="padded sequences of one public length"):
        fit(Packed(), (5, 3), tmp_path / "run")


def pretrained() -> Any:
    """Return a backbone with frozen batch normalisation, and a head to be trained."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU())
    backbone(torch.randn(50, 3))  # public data: statistics
    return nn.Sequential(backbone.requires_grad_(False), nn.Linear(6, 2))


def test_frozen_batch_normalisation_in_eval_mode_is_kept_as_it_is(tmp_path: Path) -> None:
    module = pretrained()
    module[0].eval()
    before = copy.deepcopy(module.state_dict())
    result = fit(module, (3,), tmp_path / "run")
    after = result.model.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value) == name.startswith("0.")


@pytest.mark.parametrize("state", ["training", "trainable", "without statistics"])
def test_batch_normalisation_in_any_other_state_is_refused(state: str) -> None:
    module = pretrained()
    layer = module[0][1]
    if state != "training":
        module[0].eval()
    if state == "trainable":
        layer.requires_grad_(True)
    if state == "without statistics":
        layer.running_mean = layer.running_var = None
    with pytest.raises(ModelError, match=r"requires_grad_\(False\)\.eval\(\)"):
        check_model(module)


def test_batch_normalisation_that_is_put_into_training_mode_later_stops_the_engine() -> None:
    module = pretrained()
    module[0].eval()
    engine = clipping_engine(module, lambda out, targets: out.square().sum(1))
    flat_1D = ParameterLayout.of(module).flatten(module)[None]
    arguments = (
        flat_1D, torch.randn(1, 4, 3), torch.zeros(1, 4), torch.ones(1, 4, dtype=torch.bool), 1.0,
    )  # fmt: skip
    engine.clipped_sum(*arguments)
    module.train()
    with pytest.raises(ModelError, match=r"train\(\) mode"):
        engine.clipped_sum(*arguments)


def test_modes_are_kept_layer_by_layer() -> None:
    module = pretrained()
    module[0].eval()
    modes = [layer.training for layer in module.modules()]
    with evaluation_mode(module):
        assert not any(layer.training for layer in module.modules())
    assert [layer.training for layer in module.modules()] == modes
    copied = training_copy(module)
    assert copied.training and copied[0][2].training and not copied[0][1].training  # pyright: ignore


@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole", "part", "in place"])
def test_compiled_models_are_trained_without_compiling(way: str, tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    module: Any = copy.deepcopy(plain)
    if way == "whole":
        module = torch.compile(module)
    elif way == "part":
        module[0] = torch.compile(module[0])
    else:
        module.compile()
    with pytest.warns(UserWarning, match=r"torch\.compile") as caught:
        result = fit(module, (3,), tmp_path / "run")
    assert sum("torch.compile" in str(each.message) for each in caught) == 1
    assert list(result.model.state_dict()) == list(plain.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = dpcsgp.load_model(tmp_path / "run", module)
        assert type(uncompiled(module)) is nn.Sequential
    assert torch.equal(loaded.state_dict()["0.weight"], result.model.state_dict()["0.weight"])


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of small rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(3, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.head = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(inputs) + self.up(self.down(inputs))))


def test_messages_hold_adapters_only_and_frozen_weights_get_no_gradient(tmp_path: Path) -> None:
    module = Adapted()
    trained = ["down.weight", "up.weight", "head.weight", "head.bias"]
    assert list(ParameterLayout.of(module).names) == trained
    result = fit(module, (3,), tmp_path / "run")
    assert load_file(tmp_path / "run" / "model.safetensors")["node_models"].shape == (2, 32)
    everything = copy.deepcopy(module)
    everything.frozen.requires_grad_(True)
    whole = fit(everything, (3,), tmp_path / "whole")
    assert whole.summary["bytes_per_edge"] > result.summary["bytes_per_edge"]
    assert torch.equal(result.model.state_dict()["frozen.weight"], module.frozen.weight)


def test_no_gradient_is_computed_below_a_trained_head() -> None:
    """The backward pass ends at the head: it does not enter the frozen part."""
    module = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), Untouched(), nn.Linear(4, 2))
    engine = clipping_engine(module, lambda out, targets: out.square().sum(1))
    flat_1D = ParameterLayout.of(module).flatten(module)[None]
    present = torch.ones(1, 4, dtype=torch.bool)
    total = engine.clipped_sum(flat_1D, torch.randn(1, 4, 3), torch.zeros(1, 4), present, 1.0)
    assert total.shape == (1, 10)


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a gradient was computed where nothing is trained")


class Untouched(nn.Module):
    """Passes rows on, and fails if a gradient comes back."""

    def forward(self, rows: Tensor) -> Tensor:
        return _NoWayBack.apply(rows)  # pyright: ignore[reportReturnType]


def wordwise(outputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


class MaskedWords(nn.Module):
    """Words and positions, looked up once for all rows, Dropout, and a mask that is branched on."""

    def __init__(self, dropped: str = "sum") -> None:
        super().__init__()
        self.dropped, self.words, self.places = dropped, nn.Embedding(9, 4), nn.Embedding(8, 4)
        self.drop, self.out = nn.Dropout(0.3), nn.Linear(4, 2)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        places = self.places(torch.arange(words.shape[1]))
        if self.dropped == "places":
            places = self.drop(places)
        elif self.dropped == "mixed" and self.training:
            places = places + places.flip(0)  # once repeated, of another row
        hidden = torch.tanh(self.words(words) + places)
        if self.dropped != "places":
            hidden = self.drop(hidden)
        if not bool(mask.all()):  # torch.func cannot batch this
            hidden = hidden * mask[..., None]
        return self.out(hidden.mean(dim=1))


class OneTensor(nn.Module):
    """Words and mask of a row in one tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, both: Tensor) -> Tensor:
        outputs = self.inner(both[:, 0], both[:, 1])
        return outputs if isinstance(outputs, Tensor) else outputs.logits


def masked_rows(count: int, words: int = 9) -> Tensor:
    random = torch.Generator().manual_seed(0)
    rows = torch.stack([torch.randint(1, words, (count, 6), generator=random)] * 2, dim=1)
    rows[:, 1] = (torch.arange(6) < 4).long()
    return rows


def masked_sum(module: nn.Module, words: int = 9) -> Tensor:
    """Return a clipped sum by the engine, in the module's own mode."""
    engine, layout = clipping_engine(module, wordwise), ParameterLayout.of(module)
    rows, present = masked_rows(5, words)[None], torch.ones(1, 5, dtype=torch.bool)
    targets = torch.zeros(1, 5, dtype=torch.int64)
    return engine.clipped_sum(layout.flatten(module)[None], rows, targets, present, 1.0)


@pytest.mark.parametrize("dropped", ["sum", "places"])
@pytest.mark.filterwarnings("ignore:Dropout layers", "error:no closed form")
def test_positions_looked_up_once_have_a_closed_form_under_dropout(dropped: str) -> None:
    module = OneTensor(MaskedWords(dropped))
    modes = [layer.training for layer in module.modules()]
    assert masked_sum(module).isfinite().all()
    assert [layer.training for layer in module.modules()] == modes


@pytest.mark.filterwarnings("ignore:Dropout layers", "ignore:no closed form")
def test_copies_that_reach_other_rows_only_in_training_are_not_repeated() -> None:
    # explicit gradients then, which the branch on the mask does not allow
    with pytest.raises(ModelError, match=r"places\.weight.*position_ids expanded.*dropout to 0"):
        masked_sum(OneTensor(MaskedWords("mixed")))
    assert masked_sum(OneTensor(MaskedWords("mixed")).eval()).isfinite().all()


class LargeWords(MaskedWords):
    """Its mask hides all words but large ones: nothing is to be seen on zeros and ones."""

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        places = self.places(torch.arange(words.shape[1]))
        hidden = (self.words(words) + places) * (words > 1)[..., None]
        return self.out(hidden.mean(dim=1))


def test_copies_that_no_public_row_shows_are_not_repeated() -> None:
    module = OneTensor(LargeWords()).eval()
    with pytest.warns(UserWarning, match=r"no closed form.*places\.weight"):
        masked_sum(module)


@pytest.mark.filterwarnings("ignore:Dropout layers")
def test_how_lookups_are_found_leaves_the_generators_alone() -> None:
    module = OneTensor(MaskedWords())
    engine = LayerwiseEngine(module, wordwise)
    before = torch.get_rng_state()
    engine.prepare(ParameterLayout.of(module).flatten(module)[None], masked_rows(5)[None])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("tested", [True, False])
@pytest.mark.filterwarnings("ignore:Dropout layers", "error:no closed form")
def test_a_masked_model_with_dropout_trains_on_dict_columns(tmp_path: Path, tested: bool) -> None:
    rows = masked_rows(90)
    parts = [
        ({"words": part[:, 0], "mask": part[:, 1]}, part[:, 0, 0] % 2) for part in rows.split(30)
    ]
    result = dpcsgp.train(
        MaskedWords,
        parts[:2],
        test_data=parts[2] if tested else None,
        epsilon=8.0,
        delta=1e-3,
        settings={**FAST, "algorithm.steps": 2},
        out=tmp_path / "run",
    )
    assert result.summary["steps"] == 2


@pytest.mark.filterwarnings("ignore:Dropout layers", "ignore:no closed form")
def test_what_cannot_be_computed_in_training_is_refused_before_there_is_a_folder(
    tmp_path: Path,
) -> None:
    rows = masked_rows(60)
    parts = [
        ({"words": part[:, 0], "mask": part[:, 1]}, part[:, 0, 0] % 2) for part in rows.split(30)
    ]
    with pytest.raises(ModelError, match=r"torch\.func cannot batch them"):
        dpcsgp.train(
            lambda: MaskedWords("mixed"), parts, epsilon=8.0, delta=1e-3, out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_a_script_reads_the_cause_of_a_failed_step_and_other_processes_do_not() -> None:
    failed = PrivateStepError("the private gradients of step 0 could not be computed")
    with (
        pytest.raises(PrivateStepError, match=r"IndexError: Target 777$") as caught,
        script_words(),
    ):
        raise failed from IndexError("Target 777")
    assert isinstance(caught.value.__cause__, IndexError)
    assert "777" not in _told(failed)


def small_transformer(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    few: dict[str, Any] = {"vocab_size": 50, "pad_token_id": 0}
    if name == "Bert":
        few |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        few |= {"intermediate_size": 32, "max_position_embeddings": 16}
    elif name == "DistilBert":
        few |= {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
        few |= {"max_position_embeddings": 16}
    else:
        few |= {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
        few |= {"bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{name}Config")(**few)
    return getattr(transformers, f"{name}ForSequenceClassification")(config).train()


class ByName(nn.Module):
    """Gives words and mask to a model by their names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        return self.inner(input_ids=words, attention_mask=mask).logits


@pytest.mark.parametrize("name", ["Bert", "DistilBert", "GPT2"])
@pytest.mark.filterwarnings("ignore:Dropout layers", "error:no closed form")
def test_stock_transformers_with_a_mask_and_their_own_dropout_have_closed_forms(name: str) -> None:
    assert masked_sum(OneTensor(ByName(small_transformer(name))), words=50).isfinite().all()


class TokenRows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows as tokenizers give them."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words, mask = self.rows[index]
        return {"input_ids": words, "attention_mask": mask, "labels": words[0] % 2}


def logits_loss(outputs: Any, targets: Tensor) -> Tensor:
    return wordwise(outputs.logits, targets)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "columns", "tested", "loss"),
    [
        ("Bert", True, True, "cross_entropy"),
        ("Bert", False, False, "cross_entropy"),
        ("Bert", True, True, logits_loss),
        ("DistilBert", True, False, "cross_entropy"),
        ("GPT2", False, True, "cross_entropy"),
    ],
)
@pytest.mark.filterwarnings("ignore:Dropout layers", "error:no closed form")
def test_stock_transformers_train_as_they_come(
    name: str, columns: bool, tested: bool, loss: Any, tmp_path: Path
) -> None:
    parts: list[Any] = [TokenRows(part) for part in masked_rows(60, 50).split(20)]
    if columns:
        keys = ("input_ids", "attention_mask", "labels")
        parts = [{key: torch.stack([row[key] for row in part]) for key in keys} for part in parts]
    fast = {**FAST, "algorithm.steps": 1}
    result = dpcsgp.train(
        small_transformer(name),
        parts[:2],
        test_data=parts[2] if tested else None,
        epsilon=8.0,
        delta=1e-3,
        loss=loss,
        settings=fast,
        out=tmp_path / "run",
    )
    assert result.summary["steps"] == 1
