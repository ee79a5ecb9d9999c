"""Read compressors from their short spelling, as in `compression.spec`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TypeVar

from dpcsgp.compression.base import Compressor
from dpcsgp.compression.quantize import Sign, StochasticQuantizer
from dpcsgp.compression.rotate import RotatedQuantizer
from dpcsgp.compression.sparsify import Identity, RandK, TopK
from dpcsgp.errors import ConfigError

# name -> (form, example)
_FORMS = {
    "none": ("none", "none"),
    "rand": ("rand:FRACTION", "rand:0.5"),
    "gsgd": ("gsgd:BITS or gsgd:BITS/BUCKET", "gsgd:4/64"),
    "top": ("top:FRACTION", "top:0.01"),
    "sign": ("sign or sign:BUCKET", "sign:512"),
    "rot": ("rot:BITS", "rot:1"),
}

_Number = TypeVar("_Number", int, float)


def parse_compressor(spec: str) -> Compressor:
    """Return the compressor that `spec` names.

    Args:
        spec: "none" (float32), "rand:a" (a share `a` of the coordinates, random), "top:a" (the
            largest), "gsgd:b" (b bits per coordinate and one norm), "gsgd:b/m" (one norm per bucket
            of m coordinates), "sign" (1 bit and one scale), "sign:m" (one scale per bucket) or
            "rot:b" (rotated, b bits).

    Returns:
        A compressor; its `spec` is the canonical spelling.

    Raises:
        ConfigError: the spelling, a fraction or a number of bits is wrong.

    >>> parse_compressor("gsgd:8/512").num_bytes(1000)
    1008
    >>> parse_compressor("gsdg:8")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    dpcsgp.errors.ConfigError: compression.spec = 'gsdg:8': unknown compressor 'gsdg'; ...
    """
    name, colon, argument = spec.strip().partition(":")
    if name not in _FORMS:
        raise ConfigError(
            f"compression.spec = {spec!r}: unknown compressor {name!r}; {_suggestion(name)}"
        )
    # Names that may stand alone, then names with an argument.
    if name in ("none", "sign") and not colon:
        return Identity() if name == "none" else Sign()
    if name == "sign":
        return Sign(_number(int, argument, spec, name))
    if name == "gsgd":
        bits, slash, bucket = argument.partition("/")
        return StochasticQuantizer(
            _number(int, bits, spec, name), _number(int, bucket, spec, name) if slash else None
        )
    if name == "rot":
        return RotatedQuantizer(_number(int, argument, spec, name))
    if name == "none":
        raise _malformed(spec, name)
    return (RandK if name == "rand" else TopK)(_number(float, argument, spec, name))


def _number(kind: Callable[[str], _Number], text: str, spec: str, name: str) -> _Number:
    try:
        return kind(text)
    except ValueError:
        raise _malformed(spec, name) from None


def _malformed(spec: str, name: str) -> ConfigError:
    form, example = _FORMS[name]
    return ConfigError(f"compression.spec = {spec!r}: expected {form}; try {example!r}")


def _suggestion(name: str) -> str:
    nearest = difflib.get_close_matches(name.lower(), _FORMS, n=1)
    if nearest:
        return f"did you mean {_FORMS[nearest[0]][1]!r}?"
    return "known: " + ", ".join(example for _, example in _FORMS.values())
