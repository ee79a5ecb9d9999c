"""Stop in the middle, go on later: the ledger goes on too, so the budget holds for both parts.

    python examples/continue_from_checkpoint.py --out runs/continued

Here `should_stop` ends the first part; Ctrl-C, a crash or a power cut leave a folder that is
continued the same way.
"""

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import dpcsgp


def show(result: dpcsgp.Result) -> None:
    """Print why a part ended, what was spent until then, and what was reached."""
    ending, accuracy = result.summary["stopped_because"], result.summary["accuracy_node_mean"]
    print(f"{ending}: eps {result.epsilon:.3f}, accuracy {accuracy:.3f}")


parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True, help="results folder")
out = parser.parse_args().out

table, labels = (torch.as_tensor(part) for part in load_breast_cancer(return_X_y=True))
table = (table.log1p() - table.log1p().mean(0)) / table.log1p().std(0)
torch.manual_seed(0)
arguments = {
    "model": nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2)),
    "node_data": [(table[node:450:4], labels[node:450:4]) for node in range(4)],
    "test_data": (table[450:], labels[450:]),
    "epsilon": 2.0,
    "delta": 1e-3,
    "settings": {"algorithm.learning_rate": 1.0, "algorithm.steps": 20},
    "out": out,
}

show(dpcsgp.train(**arguments, should_stop=lambda step: step == 8))
second = dpcsgp.train(**arguments, resume=True)
show(second)
print(f"releases per node: {second.summary['releases']}")
model = dpcsgp.load_model(out, arguments["model"])
correct = model(table[450:].float()).argmax(1) == labels[450:]
print(f"accuracy of the stored model: {float(correct.float().mean()):.3f}")
