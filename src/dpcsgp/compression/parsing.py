"""Read compressors from their short spelling, as in `compression.spec`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Final, NamedTuple

from dpcsgp.compression.base import Compressor
from dpcsgp.compression.quantize import Sign, StochasticQuantizer
from dpcsgp.compression.rotate import RotatedQuantizer
from dpcsgp.compression.sparsify import Identity, RandK, TopK
from dpcsgp.errors import ConfigError


class _Form(NamedTuple):
    """How a compressor is spelled, and how it is made."""

    text: str
    example: str
    make: Callable[..., Compressor]
    read: Callable[[str], tuple[float, ...]] | None = None  # what follows the colon; None: nothing
    alone: bool = False  # the name without a colon is allowed: `make()`


def _whole(text: str) -> tuple[int]:
    return (int(text),)


def _fraction(text: str) -> tuple[float]:
    return (float(text),)


def _bits_and_bucket(text: str) -> tuple[int, ...]:
    bits, slash, bucket = text.partition("/")
    return (int(bits), int(bucket)) if slash else (int(bits),)


# All that is known of a name: a new compressor is one more row.
_FORMS: Final = {
    "none": _Form("none", "none", Identity, alone=True),
    "rand": _Form("rand:FRACTION", "rand:0.5", RandK, _fraction),
    "gsgd": _Form(
        "gsgd:BITS or gsgd:BITS/BUCKET", "gsgd:4/64", StochasticQuantizer, _bits_and_bucket
    ),
    "top": _Form("top:FRACTION", "top:0.01", TopK, _fraction),
    "sign": _Form("sign or sign:BUCKET", "sign:512", Sign, _whole, alone=True),
    "rot": _Form("rot:BITS", "rot:1", RotatedQuantizer, _whole),
}


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
    form = _FORMS[name]
    if form.alone and not colon:
        return form.make()
    malformed = ConfigError(
        f"compression.spec = {spec!r}: expected {form.text}; try {form.example!r}"
    )
    if form.read is None:
        raise malformed
    # Only what cannot be read is malformed; a number out of range is refused by its compressor.
    try:
        values = form.read(argument)
    except ValueError:
        raise malformed from None
    return form.make(*values)


def _suggestion(name: str) -> str:
    nearest = difflib.get_close_matches(name.lower(), _FORMS, n=1)
    if nearest:
        return f"did you mean {_FORMS[nearest[0]].example!r}?"
    return "known: " + ", ".join(form.example for form in _FORMS.values())
