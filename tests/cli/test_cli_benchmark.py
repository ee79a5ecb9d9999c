"""Tables of the benchmark can be read on a terminal of 80 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dpcsgp.benchmarking.stopwatch import Ratio
from dpcsgp.cli.benchmark import _ratio_table


@pytest.mark.parametrize("width", [80, 150])
def test_no_part_of_a_ratio_is_cut_off(width: int) -> None:
    peer, note = "torch.randn, one generator for all", "median of 7 rounds, one thread"
    ratio = Ratio(
        "noise", "secure noise of a whole model", peer, 7.27, 7.2, 7.51, 0.01234, 0.09, limit=9.0,
        value_wall=7.3, value_cpu=7.2, note=note,
    )  # fmt: skip
    text = io.StringIO()
    Console(file=text, width=width).print(_ratio_table([ratio]))
    words = " ".join(text.getvalue().replace("│", " ").split())
    assert "…" not in words and max(map(len, text.getvalue().splitlines())) <= width
    for part in ("7.27", "(7.20-7.51)", "<= 9", "pass", "12.34 ms", "90.00 ms", "torch.randn"):
        assert part in words, part
