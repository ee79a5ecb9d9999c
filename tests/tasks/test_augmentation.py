"""Random views: right images, drawn in private, and exact gradients through the training loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dpcsgp import training
from dpcsgp.config import Config, change_config, load_config
from dpcsgp.errors import ConfigError
from dpcsgp.network import Simulator
from dpcsgp.parameters import ParameterLayout
from dpcsgp.privacy import GaussianMechanism
from dpcsgp.randomness import PrivateRandomness
from dpcsgp.runs.build import build_run
from dpcsgp.runs.design import design_run
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runs.user_data import UserData
from dpcsgp.tasks import Augmentation
from dpcsgp.tasks.supervised import LOSSES

# no zeros: they are margins
IMAGES = torch.arange(2 * 7 * 2 * 8 * 16, dtype=torch.float32).add(1).view(2, 7, 2, 8, 16)
SECRETS = PrivateRandomness.seeded(0, [4, 9])


def test_flips_are_mirror_images_and_both_occur() -> None:
    views = Augmentation("flip", 8)(IMAGES, SECRETS, 5)
    assert views.shape == (2, 7, 8, 2, 8, 16)
    same = (views == IMAGES[:, :, None]).flatten(3).all(-1)
    mirrored = (views == IMAGES[:, :, None].flip(-1)).flatten(3).all(-1)
    assert bool((same ^ mirrored).all()) and bool(same.any()) and bool(mirrored.any())


def test_crops_are_shifts_by_up_to_an_eighth_of_each_side() -> None:
    views = Augmentation("crop", 64)(IMAGES, SECRETS, 5).flatten(0, 1)
    shifts = set()
    for image, found in zip(IMAGES.flatten(0, 1), views, strict=True):
        padded = nn.functional.pad(image, (2, 2, 1, 1))
        windows = {
            (down, right): padded[:, down : down + 8, right : right + 16]
            for down in range(3)
            for right in range(5)
        }
        for view in found:
            fitting = [shift for shift, window in windows.items() if torch.equal(window, view)]
            assert len(fitting) == 1
            shifts.add(fitting[0])
    assert len(shifts) == 15


def test_views_follow_the_secret_key_the_node_and_the_step() -> None:
    """Nobody who knows the public seed can tell which view an example got."""
    augment = Augmentation("crop-flip", 3)
    same_twice = torch.stack([IMAGES[0], IMAGES[0]])
    whole = augment(same_twice, SECRETS, 5)
    assert torch.equal(augment(same_twice, SECRETS, 5), whole)
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(augment(same_twice, SECRETS, 6), whole)
    assert not torch.equal(augment(same_twice, PrivateRandomness.seeded(1, [4, 9]), 5), whole)
    fresh = [augment(same_twice, PrivateRandomness.fresh([4, 9]), 5) for _ in range(2)]
    assert not torch.equal(*fresh)


def test_views_share_no_words_with_what_draws_or_is_added() -> None:
    class Diary(PrivateRandomness):
        def row_bytes(self, purpose: str, step: int, row: int, num_bytes: int) -> np.ndarray:
            asked.append(purpose)
            return super().row_bytes(purpose, step, row, num_bytes)

    asked: list[str] = []
    Augmentation("crop-flip", 3)(IMAGES, Diary([4, 9], SECRETS._keys, reproducible=True), 5)
    views = set(asked)
    asked.clear()
    mechanism = GaussianMechanism(1.0, (1.0,), (5,), (50,))
    mechanism.release(
        lambda i, p: torch.ones(1, 3), 5, Diary([4], SECRETS._keys[:1], reproducible=True), [True]
    )
    assert views and asked and not views & set(asked)


def test_more_places_do_not_change_the_views_of_the_first() -> None:
    augment = Augmentation("crop-flip", 2)
    assert torch.equal(augment(IMAGES[:, :3], SECRETS, 5), augment(IMAGES, SECRETS, 5)[:, :3])


def test_one_view_has_no_axis() -> None:
    assert Augmentation("crop", 1)(IMAGES, SECRETS, 0).shape == IMAGES.shape


def small_images(config: Config, tmp_path: Path) -> training.Run:
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(1)
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 6 * 6, 4))
    data = [
        (
            torch.randn(size, 1, 8, 8, generator=random),
            torch.randint(0, 4, (size,), generator=random),
        )
        for size in (5, 8)
    ]
    own = UserData.collect(data, (0, 1), None, *LOSSES["cross_entropy"])
    design = design_run(config, own.facts, module=module)
    return build_run(design, own, Simulator(design.topology), ResultsFolder(tmp_path, "views"))


@pytest.mark.parametrize("views", [1, 4])
def test_gradients_are_averaged_over_views_and_then_clipped(tmp_path: Path, views: int) -> None:
    settings = {
        "task.name": "own",
        "task.augmentation": "crop-flip",
        "task.augmentation_multiplicity": views,
        "graph.num_nodes": 2,
        "privacy.expected_batch_size": [5, 8],
        "privacy.noise": "none",
        "privacy.clip_norm": 0.7,
        "privacy.seed": 3,
    }
    run = small_images(change_config(load_config(), settings), tmp_path)
    model_ND = run.anchor_D.expand(2, -1).clone()
    ours_ND = run.gradients(model_ND, step=3)
    indices_NE, _ = run.gradients.mechanism.draw(3, run.gradients.random, [True, True])
    assert run.gradients.augment is not None
    module, layout = run.task.module, ParameterLayout.of(run.task.module)

    def example_loss(values: dict[str, Tensor], images: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(module, values, (images,))
        return nn.functional.cross_entropy(
            outputs, target.expand(len(images)), reduction="none"
        ).mean()

    for node, size in enumerate((5, 8)):
        inputs, targets = run.task.examples(indices_NE)
        images = run.gradients.augment(inputs, run.gradients.random, 3)[node, :size].view(
            size, views, 1, 8, 8
        )
        values = {name: value[0] for name, value in layout.views(run.anchor_D[None]).items()}
        parts = vmap(grad(example_loss), in_dims=(None, 0, 0))(values, images, targets[node, :size])
        gradients_ED = torch.cat([parts[name].flatten(1) for name in layout.names], dim=1)
        factors_E = (0.7 / gradients_ED.norm(dim=1)).clamp_max(1.0)
        assert bool((factors_E < 1).any())
        torch.testing.assert_close(
            ours_ND[node], factors_E @ gradients_ED / size, rtol=1e-4, atol=1e-6
        )


def test_augmentation_needs_images(tmp_path: Path) -> None:
    config = change_config(
        load_config(), {"task.name": "own", "task.augmentation": "flip", "graph.num_nodes": 1}
    )
    own = UserData.collect(
        [(torch.zeros(4, 3), torch.zeros(4).long())], (0,), None, *LOSSES["cross_entropy"]
    )
    with pytest.raises(ConfigError, match=r"expected images \(C, H, W\)"):
        design_run(config, own.facts, module=nn.Linear(3, 2))
