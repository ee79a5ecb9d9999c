"""Specifications are read as written, and mistakes are answered with the remedy."""

from __future__ import annotations

import pytest

from dpcsgp.compression import (
    Identity,
    RandK,
    RotatedQuantizer,
    Sign,
    StochasticQuantizer,
    TopK,
    parse_compressor,
)
from dpcsgp.errors import ConfigError


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("none", Identity()),
        ("rand:.50", RandK(0.5)),
        ("rand:1", RandK(1.0)),
        ("top:1e-2", TopK(0.01)),
        ("gsgd:8", StochasticQuantizer(8)),
        (" gsgd:4/512 ", StochasticQuantizer(4, 512)),
        ("sign", Sign()),
        ("sign:512", Sign(512)),
        ("rot:3", RotatedQuantizer(3)),
    ],
)
def test_specs_are_read(spec: str, expected: object) -> None:
    assert parse_compressor(spec) == expected


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("gsgd:1", "bits must be from 2 to 16; try 'gsgd:4/64'"),
        ("gsgd:17", "bits must be from 2 to 16"),
        ("gsgd:8/0", "bucket needs at least 1"),
        ("gsgd:8/", "expected gsgd:BITS or gsgd:BITS/BUCKET"),
        ("gsgd", "expected gsgd:BITS"),
        ("gsgd:eight", "expected gsgd:BITS"),
        ("rand:0", "above 0 and at most 1; try 'rand:0.5'"),
        ("rand:1.5", "above 0 and at most 1"),
        ("rand:nan", "above 0 and at most 1"),
        ("rand:-0.5", "above 0 and at most 1"),
        ("rand", "expected rand:FRACTION; try 'rand:0.5'"),
        ("top:0", "try 'top:0.01'"),
        ("sign:0", "bucket needs at least 1"),
        ("sign:", "expected sign or sign:BUCKET"),
        ("none:1", "expected none"),
        ("rot:0", "bits must be from 1 to 4; try 'rot:1'"),
        ("rot:5", "bits must be from 1 to 4"),
        ("rnd:0.5", "did you mean 'rand:0.5'"),
        ("SIGN:512", "did you mean 'sign:512'"),
        ("zip", "known: none, rand:0.5"),
        ("", "known: none"),
    ],
)
def test_mistakes_name_field_value_and_remedy(spec: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_compressor(spec)
    assert str(caught.value).startswith("compression.spec = '")
    assert remedy in str(caught.value)
