"""Choose public features by name, compute them once and keep them on disk.

Legend: E examples, C channels, H rows and W columns of an image, K channels of the features.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dpcsgp.errors import ConfigError
from dpcsgp.records.files import write_atomically
from dpcsgp.tasks.downloads.datasets import ImageData, cache_folder
from dpcsgp.tasks.downloads.sources import Progress, no_progress
from dpcsgp.tasks.feature_maps import (
    FeatureMap,
    LowFrequencies,
    OrientedGradients,
    Pixels,
    Standardize,
)

FEATURE_CHOICES: Final = "'none', 'standardize', 'dct:8', 'hog:8'"
_VERSION: Final = 1  # part of every cached file's name: raise it when a map changes
_STEP: Final = 2500  # images between two reports of progress
_CHEAP: Final = (Pixels, Standardize)  # faster to compute than to read


def parse_features(spec: str) -> FeatureMap:
    """Return the map that `spec` names: "none", "standardize", "dct:k" or "hog:orientations"."""
    kind, colon, text = spec.partition(":")
    plain = {"none": Pixels, "standardize": Standardize}
    if kind in plain:
        if colon:
            raise ConfigError(f"task.features = {spec!r}: {kind!r} takes no number; write {kind!r}")
        return plain[kind]()
    if kind == "dct":
        return LowFrequencies(_number(spec, text, 1, 64, "frequencies per side", "dct:8"))
    if kind == "hog":
        return OrientedGradients(_number(spec, text, 2, 64, "orientations", "hog:8"))
    near = difflib.get_close_matches(kind, (*plain, "dct", "hog"), n=1)
    hint = f"did you mean {near[0]!r}?" if near else "no such features;"
    raise ConfigError(f"task.features = {spec!r}: {hint} choose from {FEATURE_CHOICES}")


def compute_features(
    data: ImageData,
    features: FeatureMap,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """Return float32 features of all training and all test images.

    Args:
        data: The images.
        features: The map; costly ones are computed once and kept on disk.
        cache_dir: Where they are kept; None: the usual cache folder.
        progress: Told how many images are done.

    Returns:
        Features (E, K, H', W') of the training and of the test images.
    """
    images = (data.train_inputs, data.test_inputs)
    if isinstance(features, _CHEAP):
        return features.apply(images[0]), features.apply(images[1])
    # The name says all that the features depend on: content, map and version of the map.
    spec = features.spec.replace(":", "")
    name = f"{data.name}-{spec}-v{_VERSION}-{data.fingerprint[:16]}.safetensors"
    path = (cache_dir or cache_folder()) / "features" / name
    shape = features.output_shape((images[0].shape[1], images[0].shape[2], images[0].shape[3]))
    cached = _read(path, [(len(part), *shape) for part in images])
    if cached is not None:
        return cached
    total = len(images[0]) + len(images[1])
    tell = progress or no_progress

    def report(done: int) -> None:
        tell(f"features {features.spec}", done, total)

    train = _apply(features, images[0], report)
    test = _apply(features, images[1], lambda done: report(len(train) + done))
    _write(path, train, test)
    return train, test


def _number(spec: str, text: str, low: int, high: int, meaning: str, example: str) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ConfigError(
            f"task.features = {spec!r}: expected {meaning} from {low} to {high}; try {example!r}"
        )
    return int(text)


def _apply(features: FeatureMap, images: Tensor, report: Callable[[int], None]) -> Tensor:
    parts = []
    for start in range(0, len(images), _STEP):
        report(start)
        parts.append(features.apply(images[start : start + _STEP]))
    return torch.cat(parts)


def _checksum(*tensors: Tensor) -> str:
    checksum = hashlib.sha256()
    for tensor in tensors:
        checksum.update(tensor.numpy().data)
    return checksum.hexdigest()


def _write(path: Path, train: Tensor, test: Tensor) -> None:
    """Keep features for the next run; on a full or read-only disk it computes them again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        body = save({"train": train, "test": test}, metadata={"sha256": _checksum(train, test)})
        write_atomically(path, body)


def _read(path: Path, shapes: list[tuple[int, ...]]) -> tuple[Tensor, Tensor] | None:
    """Return cached features, or None if there are none, or damaged ones."""
    try:
        with safe_open(path, framework="pt") as file:
            train, test = file.get_tensor("train"), file.get_tensor("test")
            known = (file.metadata() or {}).get("sha256")
    except (OSError, SafetensorError):
        return None
    if [tuple(train.shape), tuple(test.shape)] != shapes or known != _checksum(train, test):
        return None
    return train, test
