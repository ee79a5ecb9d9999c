"""The paper's figures and ours, as grids of runs; `dpcsgp reproduce NAME` makes each again."""

from collections.abc import Callable
from pathlib import Path

from dpcsgp.reproduction.block import block
from dpcsgp.reproduction.cancelling import cancelling
from dpcsgp.reproduction.cnn import cnn
from dpcsgp.reproduction.experiment import Experiment
from dpcsgp.reproduction.features import features
from dpcsgp.reproduction.frontier import frontier
from dpcsgp.reproduction.paper_figures import fig1, fig2, fig3, fig4
from dpcsgp.reproduction.privacy_rule import privacy
from dpcsgp.reproduction.rotation import rotation
from dpcsgp.reproduction.scaling import scaling
from dpcsgp.reproduction.skew import skew
from dpcsgp.reproduction.stability import stability

EXPERIMENTS: dict[str, Callable[[Experiment], list[Path]]] = {
    "fig1": fig1,
    "fig2": fig2,
    "fig3": fig3,
    "fig4": fig4,
    "privacy": privacy,
    "stability": stability,
    "frontier": frontier,
    "skew": skew,
    "scaling": scaling,
    "block": block,
    "rotation": rotation,
    "features": features,
    "cancelling": cancelling,
    "cnn": cnn,
}

__all__ = ["EXPERIMENTS", "Experiment"]
