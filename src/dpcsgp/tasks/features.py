"""Public features: maps of one image at a time that look at no other data, so they cost no privacy.

A private linear model on good features beats a private network on pixels, because noise is added to every coordinate:
the fewer the model needs, the better. Two things help a clipped gradient, and all maps here do both: features have no
large common part (it would use up the clip norm and tell nothing), and every image has the same norm.

Legend: E examples, C channels, H rows and W columns of an image, K channels of the features.
References: Dalal, Triggs (2005), histograms of oriented gradients; Tramer, Boneh (2021), arXiv 2011.11660, on why
hand-made features serve private learning.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.functional import pad

from dpcsgp.errors import ConfigError, DataError
from dpcsgp.files import write_atomically
from dpcsgp.tasks.datasets import ImageData, cache_folder
from dpcsgp.tasks.scattering import Scatter
from dpcsgp.tasks.sources import Progress, no_progress

FEATURE_CHOICES: Final = "'none', 'standardize', 'dct:8', 'hog:8', 'scatter'"
_CHUNK: Final = 250  # images at a time: intermediate results then stay in the processor's cache
_VERSION: Final = 1  # part of every cached file's name: raise it when a map changes
_FLOOR: Final = 0.01  # smallest standard deviation or norm to divide by; a blank image stays at zero
