"""What is learned: data sets, how they are split, models, public features, augmentation, and users'
own data."""

from dpcsgp.tasks.augmentation import Augmentation, check_augmentation
from dpcsgp.tasks.base import LossPerExample, MovableTask, Task
from dpcsgp.tasks.classification import Classification
from dpcsgp.tasks.downloads.datasets import load_dataset
from dpcsgp.tasks.features import compute_features, parse_features
from dpcsgp.tasks.models import build_model
from dpcsgp.tasks.partition import partition
from dpcsgp.tasks.supervised import Supervised

__all__ = [
    "Augmentation",
    "Classification",
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
