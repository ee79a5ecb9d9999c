"""What the noise will do to the model, in one line, from public facts alone."""

from __future__ import annotations

import math
from typing import Final

from dpcsgp.runs.default_settings import averaged_noise, is_open, trained_coordinates
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.telling import tell

_SMALL_NOISE: Final = 0.1  # of the path: below, noise hardly matters
_LARGE_NOISE: Final = 0.5


def noise_share(design: RunDesign) -> float:
    """Return rho of `runs.default_settings`: how far noise moves the model, over the path."""
    config = design.config
    noise = averaged_noise(config, design.facts.num_examples, design.mechanism)
    dim, steps = trained_coordinates(design.module), config.algorithm.steps
    return math.sqrt(dim / steps) * noise / config.privacy.clip_norm


def noise_verdict(share: float) -> str:
    """Say what noise of this share of the path will do."""
    words = f"noise moves the model {share:.2g} times as far as gradients can"
    if share <= _SMALL_NOISE:
        return f"small noise: {words}"
    if share <= _LARGE_NOISE:
        return f"noticeable noise: {words}"
    return (
        f"noise dominates: {words}; expect little. More examples, a larger eps or a smaller "
        "model would help"
    )


def warn_about_hopeless_noise(design: RunDesign) -> None:
    """Warn where the verdict is that noise dominates."""
    if (share := noise_share(design)) > _LARGE_NOISE:
        tell(f"{noise_verdict(share)} (`dpcsgp.plan` says so before data are opened)")


def warn_about_usual_budget(design: RunDesign) -> None:
    """Say which eps is used where nobody gave one."""
    config = design.config
    private = any(design.mechanism.noise_multipliers)
    if private and is_open(config, "privacy.epsilon"):
        tell(
            f"epsilon: not given, so {config.privacy.epsilon} is used for every node; give "
            "train(..., epsilon=...), the most that anybody may learn about one example"
        )
