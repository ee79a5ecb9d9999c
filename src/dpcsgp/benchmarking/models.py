"""Private gradients of models that people bring, against plain SGD and Opacus's best mode.

One node, batch 64 of 512 unless a row says otherwise, one thread, processor time: a whole release
(draw, clip, sum, noise) beside one gradient of plain SGD. Where only a head is trained, a release
starts from features that were computed before, as in a run; the others run the whole model. Models
of `transformers` and `peft` are measured where these are installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from dpcsgp.benchmarking import opacus_modes
from dpcsgp.benchmarking.peers import Peer
from dpcsgp.benchmarking.stopwatch import Ratio, compare, measure
from dpcsgp.benchmarking.workload import Workload
from dpcsgp.errors import DpcsgpError
from dpcsgp.privacy.events import Sampling

_LENGTH: Final = 32  # words of an example
_WORDS: Final = 500
_WIDTH: Final = 64
_ATTENTION: Final = 2.5  # at most so many times plain SGD
_ROUNDS: Final = 7
_PEERS: Final = ("hooks", "functorch", "ew", "ghost")


class Recurrent(nn.Module):
    """Words, a recurrent layer, a readout of its last step."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(_WORDS, 32), nn.Linear(_WIDTH, 10)
        self.layer = layer(32, _WIDTH, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.layer(self.words(words))[0][:, -1])


class Encoder(nn.Module):
    """Words, two encoder layers, their mean."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 128, dropout=0.0, batch_first=True)
        self.words, self.out = nn.Embedding(_WORDS, _WIDTH), nn.Linear(_WIDTH, 10)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.layers(self.words(words)).mean(dim=1))


class Logits(nn.Module):
    """A model of transformers that takes words and returns logits.

    Opacus needs positions with an example axis of their own; others do not.
    """

    def __init__(self, model: nn.Module, positions: bool) -> None:
        super().__init__()
        self.model, self.positions = model, positions

    def forward(self, words: Tensor) -> Tensor:
        if not self.positions:
            return self.model(input_ids=words).logits
        numbers = torch.arange(words.shape[1]).expand_as(words)
        return self.model(input_ids=words, position_ids=numbers).logits


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip


def _bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(_WORDS, _WIDTH), nn.Linear(_WIDTH, 10))


def _opacus_layer(name: str) -> Callable[..., nn.Module]:
    return getattr(importlib.import_module("opacus.layers"), name)


def _pretrained(kind: str, positions: bool, **settings: Any) -> Logits:
    """Return a small classifier of transformers with random weights, without Dropout."""
    library = importlib.import_module("transformers")
    config = getattr(library, f"{kind}Config")(
        vocab_size=_WORDS, num_labels=10, pad_token_id=0, bos_token_id=0, eos_token_id=0, **settings
    )
    model = getattr(library, f"{kind}ForSequenceClassification")(config)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return Logits(model, positions)


def _bert(positions: bool = False) -> Logits:
    return _pretrained(
        "Bert", positions, hidden_size=_WIDTH, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=_LENGTH,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def _distilbert() -> Logits:
    return _pretrained(
        "DistilBert", False, dim=_WIDTH, n_layers=2, n_heads=4, hidden_dim=128,
        max_position_embeddings=_LENGTH, attention_dropout=0.0,
    )  # fmt: skip


def _gpt2(positions: bool = False) -> Logits:
    return _pretrained(
        "GPT2", positions, n_embd=_WIDTH, n_layer=2, n_head=4, n_positions=_LENGTH, attn_pdrop=0.0
    )


def _lora(positions: bool = False) -> Logits:
    """BERT with adapters of rank 4 at queries and values; the head is trained too."""
    peft, wrapped = importlib.import_module("peft"), _bert(positions)
    settings = peft.LoraConfig(
        r=4, target_modules=["query", "value"], modules_to_save=["classifier"]
    )
    wrapped.model = peft.get_peft_model(wrapped.model, settings)
    return wrapped


def _frozen(positions: bool = False) -> Logits:
    """BERT of which only the head is trained."""
    wrapped = _bert(positions).requires_grad_(False)
    for name, parameter in wrapped.named_parameters():
        parameter.requires_grad_("classifier" in name)
    return wrapped


class Case(NamedTuple):
    """A model, its limit beside plain SGD, the same model as Opacus takes it, what it needs.

    And the expected batch, of how many examples, and how it is drawn: a Poisson batch of 64 has 80
    public places, a uniform one is always full.
    """

    build: Callable[[], nn.Module]
    limit: float | None = None
    peer: Callable[[], nn.Module] | None = None
    needs: tuple[str, ...] = ()
    batch: tuple[int, int] = (64, 512)
    sampling: Sampling = "poisson"


_HF: Final = ("transformers",)
CASES: Final[dict[str, Case]] = {
    "CNN, 28 x 28": Case(_cnn),
    "LSTM": Case(lambda: Recurrent(nn.LSTM), 3.0, lambda: Recurrent(_opacus_layer("DPLSTM"))),
    "LSTM, uniform sampling": Case(
        lambda: Recurrent(nn.LSTM),
        3.0,
        lambda: Recurrent(_opacus_layer("DPLSTM")),
        sampling="uniform",
    ),
    "GRU": Case(lambda: Recurrent(nn.GRU), 3.0, lambda: Recurrent(_opacus_layer("DPGRU"))),
    "TransformerEncoder": Case(Encoder, _ATTENTION),
    "EmbeddingBag": Case(_bag),
    "tiny BERT": Case(_bert, _ATTENTION, lambda: _bert(True), _HF),
    "tiny DistilBERT": Case(_distilbert, _ATTENTION, None, _HF),
    "tiny GPT-2": Case(_gpt2, _ATTENTION, lambda: _gpt2(True), _HF),
    "BERT, LoRA": Case(_lora, 1.5, lambda: _lora(True), (*_HF, "peft")),
    "BERT, LoRA, uniform sampling": Case(
        _lora, 1.5, lambda: _lora(True), (*_HF, "peft"), sampling="uniform"
    ),
    "BERT, LoRA, large batch": Case(_lora, 1.5, lambda: _lora(True), (*_HF, "peft"), (1024, 8192)),
    "BERT, frozen, head": Case(_frozen, 0.5, lambda: _frozen(True), _HF),
}


def model_workload(name: str, quick: bool = False) -> Workload:
    """Return the work of one row of the table."""
    case, image = CASES[name], name.startswith("CNN")
    batch, examples = (4, 32) if quick else case.batch
    return Workload(
        name,
        (1, 28, 28) if image else (_LENGTH,),
        num_nodes=1,
        batch_size=batch,
        examples_per_node=examples,
        words=0 if image else _WORDS,
        build=case.build,
        build_peer=case.peer,
        sampling=case.sampling,
    )


def benchmark_models(quick: bool = False) -> tuple[list[Ratio], list[str]]:
    """Compare every model that can be built here; return ratios, and notes on those left out."""
    ratios, notes = [], []
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, case in CASES.items():
            missing = [each for each in case.needs if importlib.util.find_spec(each) is None]
            if missing:
                notes.append(f"{name}: left out; install it with: pip install {' '.join(missing)}")
            elif not quick or not case.needs:
                found, left_out = _compare(name, case, quick)
                ratios += found
                notes += left_out
    return ratios, notes


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread: others that wait would count as processor time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare(name: str, case: Case, quick: bool) -> tuple[list[Ratio], list[str]]:
    """Return one row against plain SGD, and one against the fastest mode of Opacus that runs."""
    work, plain = model_workload(name, quick), "plain SGD"
    ways: dict[str, Callable[[], object]] = {plain: work.plain(), name: work.private(secure=True)}
    with ExitStack() as stack:
        if opacus_modes.is_installed() and not quick:
            # all processes start at once: importing takes longer than measuring
            peers = [stack.enter_context(Peer(f"model {name}", mode)) for mode in _PEERS]
            for peer in peers:
                try:
                    peer()
                except DpcsgpError:  # does not run with this model
                    continue
                ways[f"Opacus {peer.name}"] = peer
        times = measure(ways, 2 if quick else _ROUNDS, settle=not quick)
    drawn = "" if work.sampling == "poisson" else f", {work.sampling}"
    note = f"batch {work.batch_size} of {work.examples_per_node}{drawn}, processor time"
    ratios = [compare("models", times, name, plain, clock="cpu", limit=case.limit, note=note)]
    others = [way for way in times if way not in (name, plain)]
    if not others:
        without = opacus_modes.is_installed() and not quick
        return ratios, [f"{name}: no mode of Opacus runs it"] if without else []
    best = min(others, key=lambda way: times[way].median("cpu"))
    best_note = f"{note}; its best mode here"
    ratios.append(
        compare("models", times, name, best, clock="cpu", limit=1.0, at_least=True, note=best_note)
    )
    return ratios, []
