"""Image data sets: fetched once, verified by checksum, kept in one cache file each.

`digits` comes with scikit-learn and needs no network. The others (`catalogue.PUBLISHED`) are looked
for in the cache, among files placed by hand, on web mirrors and in packages, in this order;
whatever the source, the content must have the known checksum. The cache folder is $DPCSGP_CACHE,
else $XDG_CACHE_HOME/dpcsgp, else ~/.cache/dpcsgp.

Legend: E examples, C channels, H rows and W columns of an image.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import Tensor

from dpcsgp.errors import ConfigError, DataError
from dpcsgp.records.files import write_atomically
from dpcsgp.tasks.downloads.catalogue import PUBLISHED, Decoder, Published
from dpcsgp.tasks.downloads.formats import Arrays, Parts, digest
from dpcsgp.tasks.downloads.sources import Folder, Progress, Source, no_progress

DATASET_NAMES: Final = (*PUBLISHED, "digits")
_DIGITS_SIZES: Final = (1500, 297)
_DIGITS_TITLE: Final = "handwritten digits, 8 x 8 grey, inside scikit-learn"


@final
@dataclass(frozen=True)
class ImageData:
    """A data set in memory; `fingerprint` identifies its content."""

    name: str
    train_inputs: Tensor  # uint8 (E, C, H, W)
    train_labels: Tensor  # int64 (E,)
    test_inputs: Tensor
    test_labels: Tensor
    num_classes: int
    fingerprint: str


@final
@dataclass(frozen=True)
class DatasetStatus:
    """One line of `dpcsgp data list`; `state` is "ready", "not fetched" or "damaged"."""

    name: str
    title: str
    state: str
    num_train: int
    num_test: int
    path: Path | None
    num_bytes: int


def cache_folder() -> Path:
    """Return the folder for fetched data and computed features (it need not exist yet)."""
    if own := os.environ.get("DPCSGP_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "dpcsgp"


def load_dataset(
    name: str, cache_dir: Path | None = None, progress: Progress | None = None
) -> ImageData:
    """Return a data set, fetching it first if the cache has no undamaged copy.

    Args:
        name: "mnist", "fashion_mnist", "cifar10" or "digits".
        cache_dir: Where it is kept; None: the usual cache folder.
        progress: Told what is being downloaded, in bytes.

    Raises:
        ConfigError: No such data set.
        DataError: No source delivered it; the message lists what was tried and what to do.
    """
    if name == "digits":
        arrays = _digits()
        return _image_data(name, arrays, Parts(*map(digest, arrays)), num_classes=10)
    published = _find(name)
    arrays = _read_cache(_cache_file(name, cache_dir), published)
    if arrays is None:
        path = fetch_published(published, cache_dir or cache_folder(), progress or no_progress)
        arrays = _read_cache(path, published)
    if arrays is None:
        raise DataError(
            f"{_cache_file(name, cache_dir)} was just written and cannot be read back: is the "
            "disk full?"
        )
    return _image_data(name, arrays, published.checksums, published.num_classes)


def fetch_dataset(
    name: str, cache_dir: Path | None = None, progress: Progress | None = None, force: bool = False
) -> Path | None:
    """Bring a data set into the cache unless an undamaged copy is there.

    Returns:
        Its file; None for "digits", which need none.
    """
    if name == "digits":
        return None
    return fetch_published(_find(name), cache_dir or cache_folder(), progress or no_progress, force)


def dataset_status(cache_dir: Path | None = None) -> list[DatasetStatus]:
    """Return the state of every data set; cached files are read and verified."""
    digits = DatasetStatus("digits", _DIGITS_TITLE, "ready", *_DIGITS_SIZES, path=None, num_bytes=0)
    return [*(_status(published, cache_dir) for published in PUBLISHED.values()), digits]


def fetch_published(
    published: Published, cache_dir: Path, progress: Progress, force: bool = False
) -> Path:
    """Try every source until one delivers content with the known checksums, and cache it."""
    path = _cache_file(published.name, cache_dir)
    by_hand = cache_dir / "datasets" / published.name
    try:
        by_hand.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot make the cache folder {by_hand}: {error}; "
            "set DPCSGP_CACHE to a folder of yours"
        ) from None
    local = [(Folder(by_hand, names), decoder) for names, decoder in published.by_hand]
    with _only_one_process(path.with_suffix(".lock")):
        # Perhaps another process was faster.
        if not force and _read_cache(path, published) is not None:
            return path
        reasons = [f"  - the cached file {path}: damaged"] if path.exists() else []
        for source, decoder in (*local, *published.sources):
            try:
                arrays = _obtain(source, decoder, published, progress)
            except Exception as error:  # whatever is wrong with one source, the next one may work
                reasons.append(f"  - {source.label}: {str(error) or type(error).__name__}")
                continue
            write_atomically(path, save(arrays._asdict()))
            return path
    raise DataError(_nothing_worked(published, by_hand, reasons))


def _obtain(source: Source, decoder: Decoder, published: Published, progress: Progress) -> Arrays:
    files = source.files(progress)
    progress(f"verifying {published.name} from {source.label}", 0, None)
    arrays = Parts(*(np.ascontiguousarray(array) for array in decoder(files)))
    if wrong := _wrong_parts(arrays, published):
        raise DataError(f"wrong checksum of {', '.join(wrong)}")
    return arrays


def _wrong_parts(arrays: Arrays, published: Published) -> list[str]:
    checks = zip(arrays._fields, arrays, published.shapes, published.checksums, strict=True)
    return [
        field
        for field, array, shape, known in checks
        if array.shape != shape or digest(array) != known
    ]


def _read_cache(path: Path, published: Published) -> Arrays | None:
    """Return the arrays of a cache file, or None if it is missing or damaged."""
    try:
        tensors = load_file(path)
        arrays = Parts(**tensors)
    except (OSError, SafetensorError, TypeError):
        return None
    return None if _wrong_parts(arrays, published) else arrays


def _cache_file(name: str, cache_dir: Path | None) -> Path:
    return (cache_dir or cache_folder()) / "datasets" / f"{name}.safetensors"


def _find(name: str) -> Published:
    if name not in PUBLISHED:
        near = difflib.get_close_matches(name, DATASET_NAMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of these"
        raise ConfigError(
            f"task.name = {name!r}: no such data set; {hint} ({', '.join(DATASET_NAMES)})"
        )
    return PUBLISHED[name]


def _nothing_worked(published: Published, by_hand: Path, reasons: list[str]) -> str:
    groups = " or ".join(", ".join(names) for names, _ in published.by_hand)
    return "\n".join(
        [
            f"The data set {published.name!r} could not be fetched. Tried:",
            *reasons,
            f"By hand: put the original files into {by_hand}",
            f"  ({groups}; gzipped or not) and run `dpcsgp data fetch {published.name}` again.",
            "Without any download: --set task.name=digits",
        ]
    )


@contextmanager
def _only_one_process(path: Path) -> Iterator[None]:
    """Hold a lock file, so that processes started together download once.

    The system releases the lock if we die.
    """
    try:
        import fcntl
    except ImportError:  # Windows: every process downloads, and the last rename wins
        yield
        return
    with open(path, "wb") as file:
        with suppress(OSError):  # a file system without locks: as above
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _image_data(name: str, arrays: Arrays, checksums: Parts[str], num_classes: int) -> ImageData:
    return ImageData(
        name=name,
        train_inputs=torch.from_numpy(arrays.train_images),
        train_labels=torch.from_numpy(arrays.train_labels.astype(np.int64)),
        test_inputs=torch.from_numpy(arrays.test_images),
        test_labels=torch.from_numpy(arrays.test_labels.astype(np.int64)),
        num_classes=num_classes,
        fingerprint=hashlib.sha256("".join(checksums).encode()).hexdigest(),
    )


def _digits() -> Arrays:
    """Return scikit-learn's 1,797 digits: of each class, every sixth image is for testing (297)."""
    from sklearn.datasets import load_digits

    pixels, labels = (np.asarray(part) for part in load_digits(return_X_y=True))
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)  # 0..16 -> 0..255
    labels = labels.astype(np.uint8)
    rank_in_class = (labels[:, None] == np.arange(10)).cumsum(0)[np.arange(len(labels)), labels] - 1
    is_test = rank_in_class % 6 == 4
    return Parts(images[~is_test], labels[~is_test], images[is_test], labels[is_test])


def _status(published: Published, cache_dir: Path | None) -> DatasetStatus:
    path = _cache_file(published.name, cache_dir)
    state, num_bytes = "not fetched", 0
    if path.is_file():
        state = "damaged" if _read_cache(path, published) is None else "ready"
        num_bytes = path.stat().st_size
    num_train, num_test = published.shapes.train_labels[0], published.shapes.test_labels[0]
    return DatasetStatus(
        published.name, published.title, state, num_train, num_test, path, num_bytes
    )
