"""The networks that can be named in a config.

None of them mixes examples or works in place, so all can be private.

Legend: E examples, C channels, H rows and W columns of an input.
References: "cnn" follows Papernot et al. (2021), arXiv 2007.14191; "resnet18" follows He et al.
(2016), arXiv 1512.03385 with the stem for small images, GroupNorm (Wu, He 2018, arXiv 1803.08494)
where BatchNorm would mix examples, and the last scale of every block at zero (Goyal et al. 2017,
arXiv 1706.02677).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, final

from torch import Tensor, nn

from dpcsgp.errors import ConfigError

MODEL_CHOICES: Final = "'mlp:128' (any widths, 'mlp:128,64'), 'logistic', 'cnn', 'resnet18'"
_GROUPS: Final = 16  # per GroupNorm, as in De et al. (2022), arXiv 2204.13650
_SMALLEST_SIDE: Final = 16  # the cnn's windows do not fit a smaller image

Shape = Sequence[int]


def build_model(spec: str, input_shape: Shape, num_outputs: int) -> nn.Module:
    """Return a new network for inputs (E, *input_shape) with outputs (E, num_outputs).

    "logistic" and "mlp:..." are `nn.Sequential` of Flatten, Linear and ReLU only, which the
    clipping engine knows how to do fast. "logistic" starts at zero, the others at PyTorch's random
    initial weights.

    Args:
        spec: As in `task.model`: "mlp:128" (any widths, "mlp:128,64"), "logistic", "cnn" or
            "resnet18".
        input_shape: Shape of one example; (C, H, W) for "cnn" and "resnet18".
        num_outputs: One per class; for numbers one for each.

    Raises:
        ConfigError: No such model, or one that does not fit the inputs.
    """
    kind, _, widths = check_model(spec).partition(":")
    if num_outputs < 1:
        raise ConfigError(f"num_outputs = {num_outputs}: expected at least 1")
    if kind == "mlp":
        return _mlp([math.prod(input_shape), *map(int, widths.split(",")), num_outputs])
    return _PLAIN[kind](input_shape, num_outputs)


def check_model(spec: str) -> str:
    """Return `spec` if it names a model, else raise `ConfigError`."""
    kind, colon, widths = spec.partition(":")
    if kind == "mlp":
        if not all(width.strip().isdecimal() and int(width) > 0 for width in widths.split(",")):
            raise ConfigError(
                f"task.model = {spec!r}: expected hidden widths above 0; try 'mlp:128' or "
                "'mlp:128,64'"
            )
    elif kind not in _PLAIN:
        near = difflib.get_close_matches(kind, ("mlp", *_PLAIN), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "no such model;"
        raise ConfigError(f"task.model = {spec!r}: {hint} choose from {MODEL_CHOICES}")
    elif colon:
        raise ConfigError(f"task.model = {spec!r}: {kind!r} takes no widths; write {kind!r}")
    return spec


def _mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _logistic(input_shape: Shape, num_classes: int) -> nn.Sequential:
    linear = nn.Linear(math.prod(input_shape), num_classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def _cnn(input_shape: Shape, num_classes: int) -> nn.Sequential:
    """Two convolutions and two linear layers with tanh.

    26,010 parameters for MNIST, 37,274 for CIFAR-10.
    """
    channels, height, width = _image_shape("cnn", input_shape)
    if min(height, width) < _SMALLEST_SIDE:
        raise ConfigError(
            f"task.model = 'cnn': inputs of {height} x {width} are too small (at least "
            f"{_SMALLEST_SIDE}); try 'mlp:128'"
        )
    # Sides: the first convolution halves, its pooling takes one off; the second convolution leaves
    # (side // 2 - 3) // 2, its pooling takes one off.
    rows, columns = ((side // 2 - 5) // 2 for side in (height, width))
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, stride=1)),
        *(nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1)),
        *(nn.Flatten(), nn.Linear(32 * rows * columns, 32), nn.Tanh(), nn.Linear(32, num_classes)),
    )


def _resnet18(input_shape: Shape, num_classes: int) -> nn.Sequential:
    """Stem of 3 x 3 without pooling, four stages of two blocks.

    11,173,962 parameters for CIFAR-10.
    """
    channels, _, _ = _image_shape("resnet18", input_shape)
    # Channels in, channels out and stride of each stage; its first block changes size and channels.
    stages = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [
        block
        for fan_in, fan_out, stride in stages
        for block in (ResidualBlock(fan_in, fan_out, stride), ResidualBlock(fan_out, fan_out, 1))
    ]
    stem = (_conv3(channels, 64, 1), nn.GroupNorm(_GROUPS, 64), nn.ReLU())
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes)
    )


@final
class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut: relu(f(x) + shortcut(x))."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *(_conv3(fan_in, fan_out, stride), nn.GroupNorm(_GROUPS, fan_out), nn.ReLU()),
            *(_conv3(fan_out, fan_out, 1), nn.GroupNorm(_GROUPS, fan_out)),
        )
        same = fan_in == fan_out and stride == 1
        projection = nn.Conv2d(fan_in, fan_out, 1, stride=stride, bias=False)
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(projection, nn.GroupNorm(_GROUPS, fan_out))
        )
        self.relu = nn.ReLU()
        # A block starts as its shortcut: examples then agree far more on where to go, which is what
        # survives the noise.
        nn.init.zeros_(self.residual[-1].weight)  # pyright: ignore[reportArgumentType]

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (E, C, H, W) to (E, C', H / stride, W / stride)."""
        return self.relu(self.residual(inputs) + self.shortcut(inputs))


def _conv3(fan_in: int, fan_out: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)


def _image_shape(model: str, input_shape: Shape) -> tuple[int, int, int]:
    if len(input_shape) != 3:
        raise ConfigError(
            f"task.model = {model!r}: expected inputs (C, H, W), got {tuple(input_shape)}; try "
            "'mlp:128'"
        )
    channels, height, width = input_shape
    return channels, height, width


_PLAIN: Final[dict[str, Callable[[Shape, int], nn.Module]]] = {
    "logistic": _logistic,
    "cnn": _cnn,
    "resnet18": _resnet18,
}
