"""What is public about a task before anybody opens its data.

Shapes, classes, and declared numbers of examples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from dpcsgp.config import Config
from dpcsgp.errors import ConfigError
from dpcsgp.records.metrics import write_json
from dpcsgp.tasks import parse_features
from dpcsgp.tasks.downloads.catalogue import PUBLISHED

# training images of `digits`, inside scikit-learn: no catalogue
DIGITS_SHAPE: Final = (1500, 1, 8, 8)
DIGITS_CLASSES: Final = 10


@dataclass(frozen=True)
class Facts:
    """What is public about the data: shapes, and each node's declared number of examples.

    The number of classes is 0 for a user's own module. `details` are further facts by name that all
    processes must share, such as the order of labels. `unit` is "person" where a person's rows
    count as one; numbers of examples are then numbers of persons.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    num_examples: tuple[int, ...]
    details: tuple[tuple[str, str], ...] = ()
    unit: Literal["example", "person"] = "example"


def refuse_own(config: Config) -> None:
    """Refuse settings whose model and data only a script knows."""
    if config.task.name == "own":
        raise ConfigError(
            'task.name = "own": model and data of this run live in a Python script; run that '
            "script "
            "(dpcsgp.train(..., resume=True) continues a run; dpcsgp.plan(model, num_examples=...) "
            "and `dpcsgp plan --model module:function --num-examples 60,80` plan one), or choose "
            "one of mnist, fashion_mnist, cifar10, digits"
        )


def declared_facts(config: Config, num_examples: int | None = None) -> Facts:
    """Return shapes and sizes from the catalogue.

    `num_examples` per node replaces an even share of the published ones.

    Only the catalogue is read, never a data file. Sizes are those of an even split: a skewed
    partition's are not known without labels.

    >>> declared_facts(Config()).num_examples[:2]
    (6000, 6000)
    """
    refuse_own(config)
    name = config.task.name
    if name == "digits":
        (total, *image), classes = DIGITS_SHAPE, DIGITS_CLASSES
    else:
        published = PUBLISHED[name]
        (total, *image), classes = published.shapes.train_images, published.num_classes
    num_nodes = config.num_nodes
    if num_examples is not None and num_examples < 1:
        raise ConfigError(f"--num-examples {num_examples}: expected at least 1 example per node")
    if num_examples is None and total < num_nodes:
        raise ConfigError(
            f"graph.num_nodes = {num_nodes}: {name} has {total} examples; use at most {total} nodes"
        )
    extra = 0 if num_examples is not None else total % num_nodes
    share = num_examples if num_examples is not None else total // num_nodes
    sizes = tuple(share + (node < extra) for node in range(num_nodes))
    channels, height, width = image
    shape = parse_features(config.task.features).output_shape((channels, height, width))
    assert math.prod(shape) > 0
    return Facts(tuple(shape), classes, sizes)


@dataclass(frozen=True)
class OwnFacts:
    """What a results folder tells about a model and data that only a script knows: public facts."""

    num_coordinates: int
    num_examples: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path) -> OwnFacts:
        """Read `facts.json` of a folder.

        Raises:
            ConfigError: if there is none.
        """
        try:
            values = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
            return cls(int(values["num_coordinates"]), tuple(map(int, values["num_examples"])))
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f'task.name = "own": {folder / "facts.json"} is missing, which runs of '
                "dpcsgp.train leave beside config.toml; name the results folder of such a run, or "
                "plan anew with dpcsgp.plan(model, num_examples=[...])"
            ) from None


def write_own_facts(folder: Path, num_coordinates: int, num_examples: Sequence[int]) -> None:
    """Keep the public facts of an own run, for commands that have only its folder."""
    facts = {"num_coordinates": num_coordinates, "num_examples": list(num_examples)}
    write_json(folder / "facts.json", facts)
