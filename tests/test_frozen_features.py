"""Models of which a head is trained: features once per example, and the run stays what it was."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from dpcsgp.config import Config, change_config
from dpcsgp.runs import frozen_features
from dpcsgp.runs.facts import Facts
from dpcsgp.runs.frozen_features import featured, with_frozen_features
from dpcsgp.runs.frozen_split import NoSplit
from dpcsgp.tasks import Supervised
from dpcsgp.tasks.lazy_task import LazySupervised
from dpcsgp.tasks.supervised import cross_entropy_per_example


class Record(dict[str, Any]):
    """What a model of transformers returns: a dict with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Model(nn.Module):
    """A frozen body and a trained head, used in the way that a test is about."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.body, self.head, self.how = nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 2), how
        self.drop = nn.Dropout(0.5)
        self.gain: Any = 1.0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, rows: Tensor) -> Any:
        features = torch.tanh(self.body(rows))
        match self.how:
            case "Dropout":
                features = self.drop(features)
            case "functional Dropout":
                features = dropout(features, 0.5, self.training)
            case "twice":
                self.head(features)
            case "keyword":
                return self.head(input=features)
            case "trained before":
                features = features * self.head.bias.sum()
            case "trained before, detached":
                features = features * self.head.bias.detach().sum()
            case "after":
                return self.head(features).tanh()
            case "after, in place":
                return self.head(features).mul_(2.0)
            case "Dropout after":
                return self.drop(self.head(features))
            case "whole batch":
                return self.head(features.flatten())
            case "words":
                return self.head.weight[0, (rows > 0).long()]
            case "buffer":
                self.count += 1
            case "record":
                return Record(logits=self.head(features))
            case "more in a record":
                return Record(logits=self.head(features), features=features)
        return self.head(features)


class Whispering(nn.Module):
    """Something that the head is told past its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8).requires_grad_(False), Told(8, 2)

    def forward(self, rows: Tensor) -> Tensor:
        self.head.told = rows[:, :1]
        return self.head(self.body(rows))


class Told(nn.Linear):
    """A head that knows more than it is given."""

    told = torch.zeros(1, 1)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.told


class Averaged(nn.Linear):
    """A head that takes the mean over the last axis."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.mean(dim=-1))


class AsLong(nn.Module):
    """Features as many times as there are rows, or with the rows on the second axis."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.head, self.how = nn.Linear(6, 8).requires_grad_(False), Averaged(8, 2), how

    def forward(self, rows: Tensor) -> Tensor:
        features = self.body(rows)[..., None].expand(-1, -1, len(rows))
        if self.how == "first":
            self.head.forward = lambda input: nn.Linear.forward(self.head, input[0])
            features = self.body(rows)[None]
        return self.head(features)


class InPlace(nn.Linear):
    """A head that writes into what it is given."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.relu_())


def frozen(*layers: nn.Module) -> nn.Sequential:
    """Freeze the first of a sequence of layers."""
    layers[0].requires_grad_(False)
    return nn.Sequential(*layers)


def tied() -> nn.Module:
    model = frozen(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False))
    model[0].weight = model[2].weight
    return model


def hooked() -> nn.Module:
    """A sequence whose output is changed by a hook of its own."""
    model = frozen(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))

    def changed(layer: nn.Module, args: Any, output: Any) -> Any:
        return output * 1.0

    model.register_forward_hook(changed)
    return model


def task_of(module: nn.Module, **others: Any) -> Supervised:
    torch.manual_seed(1)
    rows = torch.randn(90, 6)
    labels = (rows[:, 0] > 0).long()
    return Supervised(module, rows[:60], labels[:60], (40, 20), (rows[60:], labels[60:]), **others)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Dropout": (lambda: Model("Dropout"), "draws random numbers"),
    "functional Dropout": (lambda: Model("functional Dropout"), "draws random numbers"),
    "Dropout after": (lambda: Model("Dropout after"), "draws random numbers"),
    "twice": (lambda: Model("twice"), "not called exactly once"),
    "keyword": (lambda: Model("keyword"), "more than one tensor"),
    "trained before": (lambda: Model("trained before"), "depends on what is trained"),
    "detached": (lambda: Model("trained before, detached"), "on what is trained"),
    "after": (lambda: Model("after"), "not what the model returns"),
    "in place after": (lambda: Model("after, in place"), "not what the model returns"),
    "whole batch": (lambda: Model("whole batch"), "do not run alone"),
    "not called": (lambda: Model("words"), "not called exactly once"),
    "buffer": (lambda: Model("buffer"), "changes its buffers"),
    "told": (Whispering, "more than what it is given"),
    "in place": (lambda: frozen(nn.Linear(6, 8), InPlace(8, 2)), "in place"),
    "as long": (lambda: AsLong("rows"), "depends on the batch"),
    "another first axis": (lambda: AsLong("first"), "one row of numbers per example"),
    "hook": (hooked, "nothing is frozen outside"),
    "tied": (tied, "nothing is frozen outside"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_cut_are_run_as_a_whole(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    build_model, reason = REFUSED[name]
    task = task_of(build_model())
    with pytest.raises(NoSplit, match=reason):
        featured(task, (40, 20))
    with caplog.at_level(logging.INFO):
        assert with_frozen_features(task, Config(), Facts((6,), 2, (40, 20))) is task
    assert "at every step" in caplog.text


CUT: dict[str, Callable[[], nn.Module]] = {
    "plain": Model,
    "Dropout in eval": lambda: Model("Dropout").eval(),
    "end of a sequence": lambda: frozen(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)
    ),
    "in another": lambda: nn.Sequential(nn.Tanh(), Model()),
    "softmax last": lambda: frozen(nn.Linear(6, 8), nn.Linear(8, 2), nn.LogSoftmax(dim=1)),
}


@pytest.mark.parametrize("name", CUT)
def test_head_and_features_are_the_whole_model(name: str) -> None:
    torch.manual_seed(0)
    module = CUT[name]()
    task = task_of(module)
    cut = featured(task, (40, 20))
    assert [id(p) for p in cut.module.parameters() if p.requires_grad] == [
        id(p) for p in module.parameters() if p.requires_grad
    ]
    assert cut.inputs.shape == (60, 8) and cut.test is not None
    modes = [layer.training for layer in module.modules()]
    expected, found = module.eval()(task.inputs), cut.module.eval()(cut.inputs)
    torch.testing.assert_close(found, expected)
    assert any(modes) != name.endswith("eval")
    # evaluation, with the module as it is and with another one
    flat_D = torch.cat([p.detach().flatten() for p in cut.module.parameters() if p.requires_grad])
    models_KD = torch.stack([flat_D, -flat_D])
    assert torch.equal(cut.evaluate(models_KD)["accuracy"], task.evaluate(models_KD)["accuracy"])


def test_what_the_callers_functions_are_given_stays_the_same() -> None:
    def own(outputs: Any, targets: Tensor) -> Tensor:
        return cross_entropy(outputs.logits, targets, reduction="none")

    torch.manual_seed(0)
    module = Model("record")
    for loss in (own, cross_entropy_per_example):
        cut = featured(task_of(module, loss=loss), (40, 20))
        assert isinstance(cut.module(cut.inputs), Record) == (loss is own)
        assert cut.evaluate(torch.zeros(1, 18))["accuracy"].numel() == 1
    # more than logits: only functions of this package, which look at these alone
    module = Model("more in a record")
    assert featured(task_of(module), (40, 20)).inputs.shape == (60, 8)
    with pytest.raises(NoSplit, match="more than the model's logits"):
        featured(task_of(module, loss=own), (40, 20))


def test_data_and_sizes_that_allow_no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    task, facts = task_of(Model()), Facts((6,), 2, (40, 20))
    assert with_frozen_features(task, Config(), facts) is not task
    lazy = LazySupervised(task, (None, None))
    assert with_frozen_features(lazy, Config(), facts) is lazy
    moving = change_config(Config(), {"task.augmentation": "flip"})
    assert with_frozen_features(task, moving, facts) is task
    # by declared numbers and the test data alone: 8 features for 6 inputs
    monkeypatch.setattr(frozen_features, "MOST_BYTES", 4 * 8 * 90)
    assert with_frozen_features(task, Config(), facts) is not task
    assert with_frozen_features(task, Config(), Facts((6,), 2, (41, 20))) is task
    with pytest.raises(NoSplit, match="32 bytes, the row 24"):  # rows of persons are not counted
        featured(task, None)
    small = task_of(frozen(nn.Linear(6, 5), nn.Linear(5, 2)))
    assert featured(small, None).inputs.shape == (60, 5)
    assert with_frozen_features(small, Config(), Facts((6,), 2, (10**9, 20))) is not small


def test_tables_are_looked_up_at_every_step() -> None:
    """What is found takes more memory than the words, and hardly any time."""
    module = frozen(nn.Embedding(5, 8), nn.Flatten(), nn.Linear(24, 2))
    words = torch.randint(5, (60, 3))
    with pytest.raises(NoSplit, match="nothing is frozen outside"):
        featured(Supervised(module, words, words[:, 0] % 2, (40, 20), None), (40, 20))
    module.insert(1, nn.Linear(8, 4).requires_grad_(False))
    module[3] = nn.Linear(12, 2)
    cut = featured(Supervised(module, words, words[:, 0] % 2, (40, 20), None), (40, 20))
    assert cut.inputs.shape == (60, 12)


def test_nodes_without_data_and_small_passes() -> None:
    task = task_of(Model())
    empty = replace(task, inputs=task.inputs[:40], targets=task.targets[:40], held=(40, 0))
    whole = featured(task, (40, 20), 3)
    assert torch.equal(featured(empty, (40, 20), 3).inputs, whole.inputs[:40])
    nothing = replace(empty, inputs=task.inputs[:0], targets=task.targets[:0], held=(0, 0))
    assert featured(nothing, (40, 20)).inputs.shape == (0, 8)


def test_an_ordinary_model_is_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_features, "featured", None)
    task = task_of(nn.Sequential(nn.Linear(6, 2)))
    assert with_frozen_features(task, Config(), Facts((6,), 2, (40, 20))) is task


@pytest.mark.slow
def test_models_of_transformers() -> None:
    """BERT with a trained classifier is cut there, with Dropout off; adapters inside are not."""
    transformers = pytest.importorskip("transformers")
    settings = {
        "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 8, "num_labels": 2,
    }  # fmt: skip
    module = transformers.BertForSequenceClassification(transformers.BertConfig(**settings))
    module.bert.requires_grad_(False)
    words = torch.randint(50, (90, 8))
    task = Supervised(
        module, words[:60], words[:60, 0] % 2, (40, 20), (words[60:], words[60:, 0] % 2)
    )
    with pytest.raises(NoSplit, match="draws random numbers"):
        featured(task, (40, 20))
    module.eval()
    cut = featured(task, (40, 20))
    assert cut.inputs.shape == (60, 16)
    torch.testing.assert_close(cut.module(cut.inputs), module(words[:60]).logits)
    module.bert.encoder.requires_grad_(True)
    with pytest.raises(NoSplit):
        featured(task, (40, 20))
