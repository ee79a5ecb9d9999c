"""Data sets are fetched once, verified always, and a failure says what to do."""

from __future__ import annotations

import gzip
import hashlib
import multiprocessing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpcsgp.errors import ConfigError, DataError
from dpcsgp.tasks.downloads.catalogue import Published
from dpcsgp.tasks.downloads.datasets import (
    DATASET_NAMES,
    cache_folder,
    dataset_status,
    fetch_dataset,
    fetch_published,
    load_dataset,
)
from dpcsgp.tasks.downloads.formats import IDX_NAMES, Parts, decode_idx, digest
from dpcsgp.tasks.downloads.sources import Folder, no_progress

CIFAR_BATCH_MD5 = [
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
    "803d5f7f4d78ea53de84dbe85f74fb6d",
]


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(
        size.to_bytes(4, "big") for size in array.shape
    )
    return header + array.tobytes()


def write_idx_files(folder: Path, seed: int = 0) -> Parts[np.ndarray]:
    """Write four tiny gzipped idx files and return their arrays."""
    random = np.random.default_rng(seed)
    images = [random.integers(0, 256, (size, 4, 4), dtype=np.uint8) for size in (6, 3)]
    labels = [random.integers(0, 10, size, dtype=np.uint8) for size in (6, 3)]
    parts = Parts(images[0], labels[0], images[1], labels[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(IDX_NAMES, parts, strict=True):
        (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(part)))
    return parts


@pytest.fixture
def tiny(tmp_path: Path) -> Published:
    """A published data set whose first source has wrong content and whose second is right."""
    write_idx_files(tmp_path / "wrong", seed=1)
    parts = write_idx_files(tmp_path / "right")
    return Published(
        name="tiny",
        title="tiny images",
        num_classes=10,
        shapes=Parts((6, 1, 4, 4), (6,), (3, 1, 4, 4), (3,)),
        checksums=Parts(*map(digest, parts)),
        by_hand=((IDX_NAMES, decode_idx),),
        sources=tuple(
            (Folder(tmp_path / name, IDX_NAMES), decode_idx)
            for name in ("missing", "wrong", "right")
        ),
    )


def test_sources_are_tried_until_the_checksum_is_right(tiny: Published, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = fetch_published(tiny, cache, no_progress)
    assert path == cache / "datasets" / "tiny.safetensors"
    first = path.stat().st_mtime_ns
    assert fetch_published(tiny, cache, no_progress).stat().st_mtime_ns == first  # kept
    assert fetch_published(tiny, cache, no_progress, force=True).stat().st_mtime_ns != first
    assert not list(path.parent.glob("*.tmp"))


@pytest.mark.parametrize("damage", ["flip", "shorten", "empty"])
def test_damaged_cache_is_fetched_again(tiny: Published, tmp_path: Path, damage: str) -> None:
    path = fetch_published(tiny, tmp_path / "cache", no_progress)
    good = path.read_bytes()
    flipped = good[:-1] + bytes([good[-1] ^ 1])
    path.write_bytes({"flip": flipped, "shorten": good[:-5], "empty": b""}[damage])
    assert fetch_published(tiny, tmp_path / "cache", no_progress).read_bytes() == good


def test_failure_names_sources_folder_and_way_out(tiny: Published, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    hopeless = replace(tiny, sources=tiny.sources[:2])
    with pytest.raises(DataError) as caught:
        fetch_published(hopeless, cache, no_progress)
    message = str(caught.value)
    assert f"files placed in {tmp_path / 'missing'}: no train-images-idx3-ubyte" in message
    assert (
        f"files placed in {tmp_path / 'wrong'}: wrong checksum of train_images, train_labels"
        in message
    )
    assert f"put the original files into {cache / 'datasets' / 'tiny'}" in message
    assert "t10k-labels-idx1-ubyte" in message
    assert "--set task.name=digits" in message
    write_idx_files(cache / "datasets" / "tiny")  # do what it says
    assert fetch_published(hopeless, cache, no_progress).exists()


def test_damaged_cache_without_source_is_named(tiny: Published, tmp_path: Path) -> None:
    path = fetch_published(tiny, tmp_path / "cache", no_progress)
    path.write_bytes(b"nonsense")
    with pytest.raises(DataError, match=f"the cached file {path}: damaged"):
        fetch_published(replace(tiny, sources=()), tmp_path / "cache", no_progress)


def test_cache_folder_that_cannot_be_made(tiny: Published, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="set DPCSGP_CACHE"):
        fetch_published(tiny, tmp_path / "file", no_progress)


def fetch_in_process(published: Published, cache: Path) -> str:
    messages: list[str] = []
    fetch_published(published, cache, lambda what, done, total: messages.append(what))
    return "; ".join(messages)


def test_processes_that_start_together_fetch_once(tiny: Published, tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        told = pool.starmap(fetch_in_process, [(tiny, tmp_path / "cache")] * 8)
    assert sum("verifying" in text for text in told) == 1
    assert fetch_published(tiny, tmp_path / "cache", no_progress).exists()


def test_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DPCSGP_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("DPCSGP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_folder() == tmp_path / "shared" / "dpcsgp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "dpcsgp"


def test_digits_need_no_files(tmp_path: Path) -> None:
    data = load_dataset("digits", cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    assert data.train_inputs.shape == (1500, 1, 8, 8)
    assert data.test_inputs.shape == (297, 1, 8, 8)
    assert data.train_inputs.dtype == torch.uint8
    assert data.train_labels.dtype == torch.int64
    assert data.test_labels.bincount().tolist() == [29, 30, 29, 30, 30, 30, 30, 30, 29, 30]
    assert data.train_inputs.max() == 255
    assert len(data.train_inputs.unique()) == 17
    assert fetch_dataset("digits", cache_dir=tmp_path) is None


def test_digits_split_has_no_example_twice() -> None:
    data = load_dataset("digits")
    everything = torch.cat([data.train_inputs, data.test_inputs]).flatten(1)
    assert len(everything.unique(dim=0)) == 1797  # scikit-learn's digits are all different


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fashion_mnist'"):
        load_dataset("fashion-mnist")
    with pytest.raises(ConfigError, match="mnist, fashion_mnist, cifar10, digits"):
        fetch_dataset("imagenet")


def test_status_of_an_empty_and_a_damaged_cache(tmp_path: Path) -> None:
    states = {status.name: status for status in dataset_status(tmp_path)}
    assert tuple(states) == DATASET_NAMES
    assert {name: status.state for name, status in states.items()} == {
        "mnist": "not fetched",
        "fashion_mnist": "not fetched",
        "cifar10": "not fetched",
        "digits": "ready",
    }
    data = load_dataset("digits")
    assert (states["digits"].num_train, states["digits"].num_test) == (
        len(data.train_labels),
        len(data.test_labels),
    )
    path = states["mnist"].path
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(b"nonsense")
    assert dataset_status(tmp_path)[0].state == "damaged"


@pytest.mark.mnist
def test_mnist_is_the_original() -> None:
    data = load_dataset("mnist")
    assert data.train_inputs.shape == (60000, 1, 28, 28)
    assert data.test_inputs.shape == (10000, 1, 28, 28)
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.train_labels.bincount().tolist() == counts
    original = hashlib.md5(idx_bytes(data.train_inputs[:, 0].numpy())).hexdigest()
    assert original == "6bbc9ace898e44ae57da46a324031adb"  # of the original file after gunzip


def cached(name: str) -> bool:
    return {status.name: status.state for status in dataset_status()}[name] == "ready"


@pytest.mark.slow
def test_fashion_mnist_is_the_original() -> None:
    if not cached("fashion_mnist"):
        pytest.skip("Fashion-MNIST is not in the cache: dpcsgp data fetch fashion_mnist")
    data = load_dataset("fashion_mnist")
    assert data.train_labels.bincount().tolist() == [6000] * 10
    original = hashlib.md5(idx_bytes(data.train_inputs[:, 0].numpy())).hexdigest()
    assert original == "f4a8712d7a061bf5bd6d2ca38dc4d50a"


@pytest.mark.slow
def test_cifar10_rebuilds_the_original_binary_batches() -> None:
    if not cached("cifar10"):
        pytest.skip("CIFAR-10 is not in the cache: dpcsgp data fetch cifar10")
    data = load_dataset("cifar10")
    images = torch.cat([data.train_inputs, data.test_inputs]).view(6, 10000, 3072)
    labels = torch.cat([data.train_labels, data.test_labels]).to(torch.uint8).view(6, 10000, 1)
    batches = torch.cat([labels, images], 2).numpy()
    assert [hashlib.md5(batch.tobytes()).hexdigest() for batch in batches] == CIFAR_BATCH_MD5
