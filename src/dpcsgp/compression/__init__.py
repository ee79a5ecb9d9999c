"""Compressors that turn vectors into real bytes, and the frames in which the bytes travel."""

from dpcsgp.compression.base import Compressor, Moments
from dpcsgp.compression.parsing import parse_compressor
from dpcsgp.compression.quantize import Sign, StochasticQuantizer
from dpcsgp.compression.rotate import RotatedQuantizer
from dpcsgp.compression.sparsify import Identity, RandK, TopK

__all__ = [
    "Compressor",
    "StochasticQuantizer",
    "Identity",
    "TopK",
    "Moments",
    "RandK",
    "RotatedQuantizer",
    "Sign",
    "parse_compressor",
]
