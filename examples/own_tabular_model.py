"""Your own model on a table: five clinics learn to tell malignant from benign tumours.

    python examples/own_tabular_model.py [--out FOLDER]

The data are scikit-learn's breast-cancer set; no clinic sees another's rows. Takes a few seconds.
"""

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import dpcsgp

parser = argparse.ArgumentParser()
parser.add_argument("--out", default=None, help="results folder; default: a new one under runs/")
out = parser.parse_args().out

table, labels = (torch.as_tensor(part) for part in load_breast_cancer(return_X_y=True))
# for real data: use published means and deviations, these ones see the examples
table = (table.log1p() - table.log1p().mean(0)) / table.log1p().std(0)
order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
# clinics of unequal size, and a public test set
*clinics, test = order.split([60, 80, 90, 100, 120, 119])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))
result = dpcsgp.train(
    model,
    node_data=[(table[rows], labels[rows]) for rows in clinics],
    test_data=(table[test], labels[test]),
    epsilon=2.0,
    delta=1e-3,
    settings={"algorithm.learning_rate": 1.0},
    out=out,
)
summary = result.summary
print(f"accuracy {summary['accuracy_node_mean']:.3f}", end=", ")
print(f"average model {summary['accuracy_average_model']:.3f}")
print(f"verified eps {result.epsilon:.3f} at delta {summary['delta']:g}", end=", ")
print(f"{summary['bytes_per_edge']:,} bytes per edge")
print(f"results: {result.folder}")
