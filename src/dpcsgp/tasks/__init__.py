"""What is learned: data sets, partitions, models, public features, augmentation, users' data."""

from dpcsgp.tasks.augmentation import Augmentation, check_augmentation
from dpcsgp.tasks.base import LossPerExample, MovableTask, Task
from dpcsgp.tasks.downloads.datasets import load_dataset
from dpcsgp.tasks.features import compute_features, parse_features
from dpcsgp.tasks.models import build_model
from dpcsgp.tasks.partition import partition
from dpcsgp.tasks.supervised import Supervised

__all__ = [
    "Augmentation",
    "LossPerExample",
    "MovableTask",
    "Supervised",
    "Task",
    "build_model",
    "check_augmentation",
    "compute_features",
    "load_dataset",
    "parse_features",
    "partition",
]
