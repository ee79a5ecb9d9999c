"""One task for classification and for users' models: the same examples, the same evaluation."""

from __future__ import annotations

import torch
from torch import nn

from dpcsgp.parameters import ParameterLayout
from dpcsgp.tasks import Supervised, build_model
from dpcsgp.tasks.supervised import EVALUATION_BATCH, accuracy


def test_split_gives_every_node_its_own_examples() -> None:
    inputs, labels = torch.arange(8.0)[:, None], torch.arange(8) % 2
    parts = [torch.tensor([6, 1]), torch.tensor([3, 0, 5])]
    task = Supervised.split(nn.Linear(1, 2), inputs, labels, parts, (inputs, labels))
    assert task.num_examples == task.held_examples == (2, 3)
    found, targets = task.examples(torch.tensor([[1, 0], [2, 0]]))
    assert found.squeeze(-1).tolist() == [[1, 6], [5, 3]]
    assert targets.tolist() == [[1, 0], [1, 1]]


def test_accuracy_is_the_share_of_right_answers_over_all_batches() -> None:
    torch.manual_seed(0)
    module = build_model("logistic", (4,), 3)
    inputs, labels = torch.randn(EVALUATION_BATCH + 501, 4), torch.randint(3, (2501,))
    task = Supervised(module, inputs[:6], labels[:6], (6,), (inputs, labels))
    models_KD = torch.randn(2, ParameterLayout.of(module).flatten(module).numel())
    expected = []
    for model_D in models_KD:
        weight, bias = model_D[:12].view(3, 4), model_D[12:]
        right = (inputs @ weight.T + bias).argmax(1) == labels
        expected.append(int(right.sum()) / len(labels))
    assert task.evaluate(models_KD)["accuracy"].tolist() == torch.tensor(expected).tolist()
    assert module.training


def test_accuracy_takes_probabilities_as_targets() -> None:
    outputs = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    assert accuracy(outputs, torch.tensor([[0.2, 0.8], [0.4, 0.6], [0.0, 1.0]])) == 2 / 3
