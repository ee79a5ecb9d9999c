"""Features look at one image at a time, have the promised shape and norm, and are computed once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.fft
import torch
from torch import Tensor

from dpcsgp.errors import ConfigError
from dpcsgp.tasks.downloads.datasets import ImageData, load_dataset
from dpcsgp.tasks.feature_maps import OrientedGradients, tents
from dpcsgp.tasks.features import compute_features, parse_features

SPECS = ["none", "standardize", "dct:8", "hog:8", "hog:5"]
SHAPES = [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 19, 30)]


def draw(num: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num, *shape), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shape_is_the_announced_one(spec: str, shape: tuple[int, int, int]) -> None:
    features = parse_features(spec)
    assert features.spec == spec
    found = features.apply(draw(3, shape))
    assert found.dtype == torch.float32
    assert found.shape == (3, *features.output_shape(shape))


@pytest.mark.parametrize("spec", SPECS)
def test_an_image_is_mapped_without_regard_to_the_others(spec: str) -> None:
    features, images = parse_features(spec), draw(600, (3, 16, 16))
    together = features.apply(images)
    alone = torch.cat([features.apply(images[k : k + 1]) for k in (0, 249, 250, 599)])
    torch.testing.assert_close(alone, together[[0, 249, 250, 599]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_and_their_fractions_agree(spec: str) -> None:
    images = draw(4, (1, 28, 28))
    features = parse_features(spec)
    torch.testing.assert_close(features.apply(images), features.apply(images.float() / 255))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("value", [0, 7, 255])
def test_blank_images_stay_small_and_finite(spec: str, value: int) -> None:
    found = parse_features(spec).apply(torch.full((2, 3, 16, 16), value, dtype=torch.uint8))
    assert found.isfinite().all()
    if spec != "none":
        assert found.abs().max() < 1e-2


@pytest.mark.parametrize("spec", SPECS)
def test_no_images_give_no_features(spec: str) -> None:
    features = parse_features(spec)
    assert features.apply(draw(0, (1, 28, 28))).shape == (0, *features.output_shape((1, 28, 28)))


@pytest.mark.parametrize(
    ("spec", "norm"), [("standardize", 28.0), ("dct:8", 16.0), ("dct:10", 20.0), ("hog:8", 8.0)]
)
def test_all_images_have_the_same_norm(spec: str, norm: float) -> None:
    norms = parse_features(spec).apply(draw(20, (1, 28, 28))).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, torch.full((20,), norm), rtol=1e-4, atol=0)


@pytest.mark.parametrize("spec", ["standardize", "dct:8", "hog:8"])
def test_brightness_and_contrast_do_not_matter(spec: str) -> None:
    images, features = torch.rand(5, 1, 28, 28), parse_features(spec)
    torch.testing.assert_close(
        features.apply(images), features.apply(0.2 + 0.5 * images), rtol=1e-3, atol=1e-3
    )


def test_dct_is_the_low_block_of_the_orthonormal_transform() -> None:
    images = draw(3, (2, 28, 20))
    standard = parse_features("standardize").apply(images).numpy()
    block = np.asarray(scipy.fft.dctn(standard, axes=(2, 3), norm="ortho"))[:, :, :8, :8]
    block *= 16 * np.sqrt(2) / np.sqrt((block**2).sum((1, 2, 3), keepdims=True))
    np.testing.assert_allclose(parse_features("dct:8").apply(images).numpy(), block, atol=1e-4)


def slope(angle: float) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    return (0.5 + 0.01 * (np.cos(angle) * columns + np.sin(angle) * rows))[None, None]


@pytest.mark.parametrize("bin_number", range(8))
def test_hog_finds_the_direction_of_a_slope(bin_number: int) -> None:
    found = OrientedGradients(8).apply(slope(2 * np.pi * bin_number / 8))[0, :, 1:-1, 1:-1]
    assert (found.argmax(0) == bin_number).all()


@pytest.mark.parametrize("bin_number", range(8))
def test_hog_shares_a_slope_between_its_two_nearest_directions(bin_number: int) -> None:
    found = OrientedGradients(8).apply(slope(2 * np.pi * (bin_number + 0.5) / 8))[0, :, 1:-1, 1:-1]
    pair = [bin_number, (bin_number + 1) % 8]
    torch.testing.assert_close(found[pair[0]], found[pair[1]], rtol=1e-2, atol=1e-2)
    assert set(found.sum((1, 2)).topk(2).indices.tolist()) == set(pair)


def test_hog_is_centred_in_every_cell() -> None:
    assert OrientedGradients(8).apply(draw(5, (1, 28, 28))).mean(1).abs().max() < 1e-6


def test_hog_moves_with_the_image() -> None:
    images = torch.zeros(1, 1, 28, 28)
    images[:, :, 8:16, 8:16] = torch.rand(8, 8)
    moved = torch.roll(images, (4, 4), (2, 3))
    first, second = OrientedGradients(8).apply(images)[0], OrientedGradients(8).apply(moved)[0]
    torch.testing.assert_close(first[:, 1:5, 1:5], second[:, 2:6, 2:6])


def test_hog_of_a_colour_image_sees_edges_and_colours() -> None:
    grey = torch.rand(1, 1, 32, 32).expand(1, 3, 32, 32)
    red = grey * torch.tensor([1.0, 0.2, 0.2]).view(3, 1, 1)
    hog = OrientedGradients(8)
    shapes = [part / part.norm() for part in (hog.apply(grey)[:, :8], hog.apply(red)[:, :8])]
    torch.testing.assert_close(shapes[0], shapes[1])
    assert (hog.apply(red)[:, 8].mean() - hog.apply(red)[:, 9].mean()).abs() > 0.1
    assert (hog.apply(grey)[:, 8].mean() - hog.apply(grey)[:, 9].mean()).abs() < 1e-6


@pytest.mark.parametrize(("cells", "points"), [(7, 28), (8, 32), (4, 19), (1, 3)])
def test_tents_are_means(cells: int, points: int) -> None:
    weights = tents(cells, points)
    torch.testing.assert_close(weights.sum(1), torch.ones(cells))
    assert (weights >= 0).all()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("hogg:8", "did you mean 'hog'"),
        ("wavelet", "choose from 'none'"),
        ("dct:0", "try 'dct:8'"),
        ("dct:x", "from 1 to 64"),
        ("hog:1", "orientations from 2 to 64"),
        ("hog", "try 'hog:8'"),
        ("standardize:2", "takes no number"),
    ],
)
def test_wrong_specs_name_value_and_remedy(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"task.features = '{spec}'") as caught:
        parse_features(spec)
    assert words in str(caught.value)


def test_more_frequencies_than_pixels_are_refused() -> None:
    with pytest.raises(ConfigError, match="try 'dct:8'"):
        parse_features("dct:9").output_shape((1, 8, 8))
    with pytest.raises(ConfigError, match="try 'dct:8'"):
        parse_features("dct:9").apply(draw(1, (1, 8, 8)))


@pytest.fixture
def digits() -> ImageData:
    return load_dataset("digits")


def test_features_are_computed_once_and_kept(digits: ImageData, tmp_path: Path) -> None:
    features, told = parse_features("hog:8"), []
    first = compute_features(
        digits, features, tmp_path, lambda what, done, total: told.append((done, total))
    )
    assert told == [(0, 1797), (1500, 1797)]
    again = compute_features(
        digits, features, tmp_path, lambda what, done, total: told.append((done, total))
    )
    assert len(told) == 2
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    torch.testing.assert_close(first[1], features.apply(digits.test_inputs))
    compute_features(digits, parse_features("hog:9"), tmp_path)
    assert len(list((tmp_path / "features").iterdir())) == 2  # another spec is another file


def test_damaged_cached_features_are_computed_again(digits: ImageData, tmp_path: Path) -> None:
    features = parse_features("dct:4")
    first = compute_features(digits, features, tmp_path)
    (path,) = (tmp_path / "features").iterdir()
    good = path.read_bytes()
    for damaged in (good[:-1] + bytes([good[-1] ^ 1]), good[:100], b""):
        path.write_bytes(damaged)
        assert torch.equal(compute_features(digits, features, tmp_path)[1], first[1])
        assert path.read_bytes() == good


def test_a_cache_that_cannot_be_written_does_not_stop_the_run(
    digits: ImageData, tmp_path: Path
) -> None:
    (tmp_path / "features").write_bytes(b"in the way")
    assert compute_features(digits, parse_features("dct:4"), tmp_path)[0].shape == (1500, 1, 4, 4)


@pytest.mark.mnist
@pytest.mark.slow
def test_hog_makes_mnist_nearly_linear() -> None:
    from sklearn.linear_model import LogisticRegression

    data = load_dataset("mnist")
    train, test = compute_features(data, parse_features("hog:8"))
    model = LogisticRegression(max_iter=60, C=1.0).fit(
        train[:20000].flatten(1).numpy(), data.train_labels[:20000].numpy()
    )
    assert model.score(test.flatten(1).numpy(), data.test_labels.numpy()) > 0.975
