"""Privacy of whole persons: four clinics, patients with one to twelve visits each.

    python examples/patients_with_visits.py [--out FOLDER]

The table is made here. Every visit is a row; what is promised to a patient covers all visits
together: they are drawn together, and their gradients are clipped as one. Takes a few seconds.
"""

import argparse

import numpy as np
import torch
from torch import nn

import dpcsgp

parser = argparse.ArgumentParser()
parser.add_argument("--out", default=None, help="results folder; default: a new one under runs/")
out = parser.parse_args().out


def clinic(patients: int, seed: int) -> dict[str, np.ndarray]:
    """Make a table with a row per visit: six blood values, whose they are, and the outcome."""
    chance = np.random.default_rng(seed)
    visits = chance.integers(1, 13, patients)
    patient = np.repeat(np.arange(patients), visits)
    blood = chance.normal(size=(patients, 6))[patient] + 0.5 * chance.normal(size=(len(patient), 6))
    risk = blood @ np.array([1.5, -1.0, 0.5, 0.0, 0.0, 0.0])
    outcome = (risk + 0.5 * chance.normal(size=len(patient)) > 0).astype(np.int64)
    return {"blood": blood.astype(np.float32), "patient": patient, "labels": outcome}


class Risk(nn.Module):
    """Two layers on blood values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, blood: torch.Tensor) -> torch.Tensor:
        """Return scores of the two outcomes."""
        return self.layers(blood)


torch.manual_seed(0)
result = dpcsgp.train(
    Risk(),
    node_data=[clinic(patients, seed) for seed, patients in enumerate((120, 150, 180, 200))],
    test_data=clinic(100, 99),
    epsilon=2.0,
    delta=1e-3,
    unit="patient",  # a column of the tables; the model does not see it
    settings={
        "privacy.max_rows_per_unit": 8,  # public; of more visits eight are drawn anew in every step
        "algorithm.learning_rate": 1.0,
    },
    out=out,
)
summary = result.summary
print(f"accuracy {summary['accuracy_node_mean']:.3f}", end=", ")
print(f"verified eps {result.epsilon:.3f} at delta {summary['delta']:g}")
print(f"neighbouring data sets: {summary['neighbouring_relation']}")
print(f"results: {result.folder}")
