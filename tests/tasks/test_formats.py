"""Published file formats are read exactly; damaged or hostile files are refused, never executed."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpcsgp.tasks.downloads import formats
from dpcsgp.tasks.downloads.formats import (
    IDX_NAMES,
    Arrays,
    FormatError,
    Parts,
    decode_cifar_binary,
    decode_cifar_png,
    decode_cifar_python,
    decode_idx,
    decode_mnist_pickle,
    digest,
    gunzip,
    read_idx,
    read_tar,
    read_zip,
)

BATCHES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]


def idx_file(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def draw(seed: int, *shape: int, high: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, shape, dtype=np.uint8)


def tar_file(members: dict[str, bytes]) -> bytes:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(f"cifar-10/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return body.getvalue()


def zip_file(members: dict[str, bytes]) -> bytes:
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"package/{name}", content)
    return body.getvalue()


@pytest.fixture
def tiny_cifar() -> Arrays:
    """Twenty training images in five batches of four, and four test images."""
    return Parts(
        draw(0, 20, 3, 32, 32), draw(1, 20, high=10), draw(2, 4, 3, 32, 32), draw(3, 4, high=10)
    )


def batches_of(arrays: Arrays) -> list[tuple[np.ndarray, np.ndarray]]:
    images = np.concatenate([arrays.train_images, arrays.test_images])
    labels = np.concatenate([arrays.train_labels, arrays.test_labels])
    return [(images[4 * k : 4 * k + 4], labels[4 * k : 4 * k + 4]) for k in range(6)]


def python2_pickle(images: np.ndarray, labels: np.ndarray) -> bytes:
    """Write batch_label, labels, data and filenames in the opcodes of Python 2's protocol 2."""
    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    head = b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03"
    head += b"U\x06labelsq\x04]q\x05("
    pixels = b"eU\x04dataq\x06T" + struct.pack("<I", images.size) + images.tobytes()
    return head + numbers + pixels + b"q\x07U\tfilenamesq\x08]q\x09(U\x05a.pngq\x0aK\x07eu."


def assert_same(found: Arrays, expected: Arrays) -> None:
    for part, known in zip(found, expected, strict=True):
        np.testing.assert_array_equal(part, known)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_idx_roundtrip(compress: Any) -> None:
    array = draw(0, 3, 5, 4)
    np.testing.assert_array_equal(read_idx(compress(idx_file(array))), array)


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-1], lambda b: b + b"x", lambda b: b[:6], lambda b: b"", lambda b: b"<html>"],
)
def test_damaged_idx_is_refused(damage: Any) -> None:
    with pytest.raises(FormatError, match="idx file"):
        read_idx(damage(idx_file(draw(0, 3, 5, 4))))


def test_digest_is_that_of_the_idx_file() -> None:
    array = draw(0, 3, 5, 4)
    expected = hashlib.sha256(idx_file(array)).hexdigest()
    assert digest(array) == digest(array[:, None]) == digest(np.asfortranarray(array)) == expected
    assert digest(array.reshape(3, 4, 5)) != expected


def test_four_idx_files_with_and_without_gz() -> None:
    arrays = Parts(
        draw(0, 6, 1, 28, 28), draw(1, 6, high=10), draw(2, 2, 1, 28, 28), draw(3, 2, high=10)
    )
    bodies = [idx_file(part[:, 0] if part.ndim == 4 else part) for part in arrays]
    assert_same(decode_idx(dict(zip(IDX_NAMES, bodies, strict=True))), arrays)
    assert_same(
        decode_idx({n + ".gz": gzip.compress(b) for n, b in zip(IDX_NAMES, bodies, strict=True)}),
        arrays,
    )


def test_mnist_pickle_is_read_from_its_constants() -> None:
    parts = [
        (draw(k, size, 784), draw(9 + k, size, high=10)) for k, size in enumerate((150, 130, 140))
    ]
    body = pickle.dumps([(x.astype("<f4") / 256, y.astype("<i8")) for x, y in parts], protocol=4)
    arrays = decode_mnist_pickle({"mnist.pkl.gz": gzip.compress(body)})
    np.testing.assert_array_equal(
        arrays.train_images.reshape(-1, 784), np.concatenate([parts[0][0], parts[1][0]])
    )
    np.testing.assert_array_equal(arrays.train_labels, np.concatenate([parts[0][1], parts[1][1]]))
    np.testing.assert_array_equal(arrays.test_labels, parts[2][1])


def test_cifar_in_three_formats(tiny_cifar: Arrays) -> None:
    batches = dict(zip(BATCHES, batches_of(tiny_cifar), strict=True))
    binary = {
        f"{n}.bin": np.column_stack([y, x.reshape(4, -1)]).tobytes()
        for n, (x, y) in batches.items()
    }
    assert_same(decode_cifar_binary({"cifar-10-binary.tar.gz": tar_file(binary)}), tiny_cifar)
    pickled = {name: python2_pickle(images, labels) for name, (images, labels) in batches.items()}
    assert_same(decode_cifar_python({"cifar-10-python.tar.gz": tar_file(pickled)}), tiny_cifar)
    files = {
        "train_lables.json": json.dumps(tiny_cifar.train_labels.tolist()).encode(),
        "test_lables.json": json.dumps(tiny_cifar.test_labels.tolist()).encode(),
    }
    for name, (images, _) in batches.items():
        png = io.BytesIO()
        Image.fromarray(images.reshape(4, 3, 1024).transpose(0, 2, 1).copy()).save(png, "PNG")
        files[f"{name}.png"] = png.getvalue()
    assert_same(decode_cifar_png(files), tiny_cifar)


def test_python2_pickle_of_this_file_is_a_real_pickle(tiny_cifar: Arrays) -> None:
    body = python2_pickle(tiny_cifar.test_images, tiny_cifar.test_labels)
    content = pickle.loads(body, encoding="bytes")  # noqa: S301 (our own bytes)
    assert content[b"labels"] == tiny_cifar.test_labels.tolist()
    assert content[b"data"] == tiny_cifar.test_images.tobytes()


class Hostile:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_hostile_pickle_is_never_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    body = pickle.dumps(Hostile(mark))
    with pytest.raises(ValueError, match="six arrays"):
        decode_mnist_pickle({"mnist.pkl.gz": gzip.compress(body)})
    decode_cifar_python({"cifar-10-python.tar.gz": tar_file(dict.fromkeys(BATCHES, body))})
    assert not mark.exists()
    pickle.loads(body)  # noqa: S301 (shows that the trap works)
    assert mark.exists()


@pytest.mark.parametrize(("pack", "read"), [(tar_file, read_tar), (zip_file, read_zip)])
def test_archives_give_the_wanted_members_and_name_the_missing(pack: Any, read: Any) -> None:
    body = pack({"a.bin": b"1", "c.bin": b"3"})
    assert read(body, ["a.bin"]) == {"a.bin": b"1"}
    with pytest.raises(FormatError, match=r"no b\.bin"):
        read(body, ["a.bin", "b.bin"])


def test_packed_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LARGEST_FILE", 1000)
    fits, bomb = bytes(1000), bytes(1001)
    assert gunzip(gzip.compress(fits)) == fits
    for read in (
        lambda: gunzip(gzip.compress(bomb)),
        lambda: read_tar(tar_file({"a": bomb}), ["a"]),
        lambda: read_zip(zip_file({"a": bomb}), ["a"]),
    ):
        with pytest.raises(FormatError, match="more than 1000 bytes"):
            read()
