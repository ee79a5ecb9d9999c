"""Read the published file formats of image data sets, without ever executing what a file says.

Two sources are pickles. They are scanned with `pickletools`, which lists the instructions and runs
none of them; the long constants in that list are the arrays. What is read here is trusted only
after its checksum was compared.

Legend: E examples, C channels, H rows and W columns of an image.
Reference: the idx format of the MNIST page; the binary format of the CIFAR-10 page.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickletools
import struct
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Final, Generic, NamedTuple, TypeVar

import numpy as np

IDX_NAMES: Final = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
LARGEST_FILE: Final = 1 << 29  # bytes, packed or not; the largest file we know has 0.22 GB
_CIFAR_BATCHES: Final = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")
_CIFAR_SHAPE: Final = (3, 32, 32)
_GZIP_MAGIC: Final = b"\x1f\x8b"
_ARRAY_BYTES: Final = 1000  # a pickled constant longer than this is an array's content


class FormatError(ValueError):
    """A file is not what its name promises; the message says why."""


T = TypeVar("T")


class Parts(NamedTuple, Generic[T]):
    """One thing for each of the four arrays of a data set."""

    train_images: T
    train_labels: T
    test_images: T
    test_labels: T


Arrays = Parts[np.ndarray]
"""uint8 images (E, C, H, W) and uint8 labels (E,)."""


def digest(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's idx file; (E, 1, H, W) counts as (E, H, W), as in MNIST."""
    array = np.ascontiguousarray(array)
    sizes = [
        size
        for axis, size in enumerate(array.shape)
        if not (axis == 1 and array.ndim == 4 and size == 1)
    ]
    header = struct.pack(f">BBBB{len(sizes)}I", 0, 0, 8, len(sizes), *sizes)
    checksum = hashlib.sha256(header)
    checksum.update(array.data)
    return checksum.hexdigest()


def read_idx(body: bytes) -> np.ndarray:
    """Return the uint8 array of an idx file, gzipped or not."""
    if body[:2] == _GZIP_MAGIC:
        body = gunzip(body)
    if len(body) < 4 or body[:3] != b"\0\0\x08":
        raise FormatError("not an idx file of bytes (it must start with 00 00 08)")
    start = 4 + 4 * body[3]
    if len(body) < start:
        raise FormatError("an idx file that ends inside its header")
    shape = struct.unpack(f">{body[3]}I", body[4:start])
    if len(body) - start != int(np.prod(shape, dtype=np.int64)):
        raise FormatError(f"an idx file of shape {shape} with {len(body) - start} bytes of data")
    return np.frombuffer(body, np.uint8, offset=start).reshape(shape)


def decode_idx(files: Mapping[str, bytes]) -> Arrays:
    """Return the arrays of four idx files in the MNIST naming, gzipped or not."""
    arrays = [read_idx(files.get(name) or files[name + ".gz"]) for name in IDX_NAMES]
    return Arrays(arrays[0][:, None], arrays[1], arrays[2][:, None], arrays[3])


def decode_mnist_pickle(files: Mapping[str, bytes]) -> Arrays:
    """Return MNIST from `mnist.pkl.gz`: float32 bytes / 256, in three parts.

    The parts have 50,000, 10,000 and 10,000 examples; the first two are for training.
    """
    body = gunzip(files["mnist.pkl.gz"])
    constants = [value for value in _pickled_constants(body) if len(value) > _ARRAY_BYTES]
    if len(constants) != 6:
        raise FormatError(f"expected six arrays in mnist.pkl.gz, found {len(constants)}")
    images = [
        np.rint(np.frombuffer(c, "<f4") * 256).astype(np.uint8).reshape(-1, 1, 28, 28)
        for c in constants[::2]
    ]
    labels = [np.frombuffer(c, "<i8").astype(np.uint8) for c in constants[1::2]]
    return Arrays(np.concatenate(images[:2]), np.concatenate(labels[:2]), images[2], labels[2])


def decode_cifar_png(files: Mapping[str, bytes]) -> Arrays:
    """Return CIFAR-10 from six lossless PNGs, one image per row, and two JSON lists of labels."""
    from PIL import Image

    pixels = [
        np.asarray(Image.open(io.BytesIO(files[name + ".png"])).convert("RGB"))
        for name in _CIFAR_BATCHES
    ]
    images = [rows.transpose(0, 2, 1).reshape(-1, *_CIFAR_SHAPE) for rows in pixels]
    # The package spells its files this way.
    labels = [
        np.array(json.loads(files[name]), np.uint8)
        for name in ("train_lables.json", "test_lables.json")
    ]
    return Arrays(np.concatenate(images[:5]), labels[0], images[5], labels[1])


def decode_cifar_binary(files: Mapping[str, bytes]) -> Arrays:
    """Return CIFAR-10 from `cifar-10-binary.tar.gz`: records of one label and 3072 pixel bytes."""
    members = read_tar(files["cifar-10-binary.tar.gz"], [name + ".bin" for name in _CIFAR_BATCHES])
    record = 1 + int(np.prod(_CIFAR_SHAPE))
    batches = [
        np.frombuffer(members[name + ".bin"], np.uint8).reshape(-1, record)
        for name in _CIFAR_BATCHES
    ]
    return _join_batches([(rows[:, 1:].reshape(-1, *_CIFAR_SHAPE), rows[:, 0]) for rows in batches])


def decode_cifar_python(files: Mapping[str, bytes]) -> Arrays:
    """Return CIFAR-10 from `cifar-10-python.tar.gz`, whose pickles are scanned and not executed."""
    members = read_tar(files["cifar-10-python.tar.gz"], _CIFAR_BATCHES)
    return _join_batches([_read_cifar_pickle(members[name]) for name in _CIFAR_BATCHES])


def read_tar(body: bytes, names: Sequence[str]) -> dict[str, bytes]:
    """Return the wanted members of a tar archive by base name; nothing is written to disk."""
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        for member in archive:
            name = member.name.rsplit("/", 1)[-1]
            file = archive.extractfile(member) if name in names and member.isfile() else None
            if file is not None:
                found[name] = _bounded(file)
    return _all_of(names, found)


def read_zip(body: bytes, names: Sequence[str]) -> dict[str, bytes]:
    """Return the wanted members of a zip archive by base name; nothing is written to disk."""
    found: dict[str, bytes] = {}
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        for member in archive.namelist():
            name = member.rsplit("/", 1)[-1]
            if name in names:
                with archive.open(member) as file:
                    found[name] = _bounded(file)
    return _all_of(names, found)


def gunzip(body: bytes) -> bytes:
    """Return what a gzip file holds."""
    with gzip.open(io.BytesIO(body)) as file:
        return _bounded(file)


def _bounded(file: IO[bytes] | gzip.GzipFile) -> bytes:
    """Read a packed file, but no more of it than any data set needs: it may be a bomb."""
    content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise FormatError(f"a packed file holds more than {LARGEST_FILE} bytes")
    return content


def _all_of(names: Sequence[str], found: dict[str, bytes]) -> dict[str, bytes]:
    missing = [name for name in names if name not in found]
    if missing:
        raise FormatError(f"the archive has no {', '.join(missing)}")
    return found


def _join_batches(batches: list[tuple[np.ndarray, np.ndarray]]) -> Arrays:
    *train, (test_images, test_labels) = batches
    images = np.concatenate([images for images, _ in train])
    return Arrays(images, np.concatenate([labels for _, labels in train]), test_images, test_labels)


def _read_cifar_pickle(body: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of a pickled {"data": bytes of an array, "labels": [small ints]}."""
    pixels, labels, inside_labels = b"", [], False
    for opcode, value, _ in pickletools.genops(body):
        if isinstance(value, (str, bytes)):
            content = value.encode("latin-1") if isinstance(value, str) else value
            inside_labels = content == b"labels"
            pixels = content if len(content) > _ARRAY_BYTES and not pixels else pixels
        elif inside_labels and opcode.name == "BININT1":
            labels.append(value)
    return np.frombuffer(pixels, np.uint8).reshape(-1, *_CIFAR_SHAPE), np.array(labels, np.uint8)


def _pickled_constants(body: bytes) -> Iterator[bytes]:
    """List the string constants of a pickle, in order of appearance."""
    for _, value, _ in pickletools.genops(body):
        if isinstance(value, (str, bytes)):
            yield value.encode("latin-1") if isinstance(value, str) else value
