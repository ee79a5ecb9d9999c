"""What is learned: data sets, how they are split, models, public features."""

from dpcsgp.tasks.base import LossPerExample, Task
from dpcsgp.tasks.classification import Classification
from dpcsgp.tasks.datasets import load_dataset
from dpcsgp.tasks.features import compute_features, parse_features
from dpcsgp.tasks.models import build_model
from dpcsgp.tasks.partition import partition

__all__ = [
    "Classification",
    "LossPerExample",
    "Task",
    "build_model",
    "compute_features",
    "load_dataset",
    "parse_features",
    "partition",
]
