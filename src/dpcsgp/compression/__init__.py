"""Compressors that turn vectors into real bytes, and the frames in which the bytes travel."""

from dpcsgp.compression.base import Compressor, Moments
from dpcsgp.compression.parsing import parse_compressor
from dpcsgp.compression.quantize import Dither, Sign
from dpcsgp.compression.rotate import RotatedQuantizer
from dpcsgp.compression.sparsify import Identity, LargestEntries, RandomSubset

__all__ = [
    "Compressor",
    "Dither",
    "Identity",
    "LargestEntries",
    "Moments",
    "RandomSubset",
    "RotatedQuantizer",
    "Sign",
    "parse_compressor",
]
