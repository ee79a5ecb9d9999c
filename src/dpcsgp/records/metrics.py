"""What a run writes down: one JSON line per evaluation, and a summary at the end.

Only values that are public or post-processing of released messages are recorded: never a training
loss, a gradient norm, the clipped fraction, a drawn batch size or an index, because nobody
accounted for them.
"""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

from dpcsgp.errors import DataError
from dpcsgp.records.files import write_atomically

Direction = Literal["higher", "lower"]  # which values of a metric are better
_LOWER: Final = ("loss", "error")  # anywhere in a name
_LOWER_WORDS: Final = frozenset(
    ("mae", "mse", "rmse", "mape", "nll", "bce", "perplexity", "deviance", "brier", "cost")
)


def usual_direction(metric: str) -> Direction:
    """Say which way is better where nobody told: losses and errors are better small.

    >>> [usual_direction(name) for name in ("mean_squared_error", "test_MAE", "accuracy")]
    ['lower', 'lower', 'higher']
    """
    name = metric.lower()
    named = not _LOWER_WORDS.isdisjoint(name.replace("-", "_").split("_"))
    return "lower" if named or any(word in name for word in _LOWER) else "higher"


class Recorder:
    """Appends rows to `metrics.jsonl` and keeps them for whoever watches the run."""

    def __init__(self, folder: Path | None, rank: int = 0, world_size: int = 1) -> None:
        self.rows: list[dict[str, Any]] = []
        # Several processes write a file each, which are merged at the end.
        alone = world_size == 1
        name = "metrics.jsonl" if alone else f"metrics.part-{rank}-of-{world_size}.jsonl"
        self._path = folder / name if folder else None

    def keep_until(self, step: int) -> None:
        """Go on after a resume: keep the rows up to this step, drop what the lost steps wrote."""
        if self._path is None or not self._path.exists():
            return
        try:
            # Steps after the checkpoint are repeated and write their rows again.
            self.rows = [
                row for row in read_rows(self._path) if row["step"] <= step and not row.get("final")
            ]
        except (KeyError, TypeError, AttributeError):
            raise DataError(
                f"{self._path} holds a row without a step; the results folder is damaged"
            ) from None
        write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in self.rows).encode())

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        self.rows.append(dict(row))
        if self._path is not None:
            # Opened and closed for every row: a crash loses none that was written.
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(plain(row)) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read `metrics.jsonl`; a torn last line (a crash while writing) is left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            # Only the last line can be torn by a crash; any other was damaged.
            if number < len(lines):
                raise DataError(
                    f"{path}, line {number} is not JSON; the results folder is damaged"
                ) from None
    return rows


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically, in the form of `plain`."""
    write_atomically(path, (json.dumps(plain(value), indent=2) + "\n").encode())


def plain(value: Any, *, non_finite: Literal["text", "null"] = "text") -> Any:
    """Return the value with nothing that strict JSON has no word for.

    Results folders keep inf and nan as the strings "inf", "-inf" and "nan", which `float` reads
    back. `non_finite="null"` is for what commands print: a reader then finds a number or nothing.

    >>> plain({"epsilon": math.inf}), plain({"epsilon": math.inf}, non_finite="null")
    ({'epsilon': 'inf'}, {'epsilon': None})
    """
    if isinstance(value, Mapping):
        return {key: plain(item, non_finite=non_finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, non_finite=non_finite) for item in value]
    # JSON has no infinity and no nan.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value) if non_finite == "text" else None
    return value


def strict_json(answer: Mapping[str, Any]) -> str:
    """Return a command's answer as one line of strict JSON; inf and nan become null."""
    return json.dumps(plain(answer, non_finite="null"), allow_nan=False)


def environment() -> dict[str, Any]:
    """Describe the software that ran, without names of people or machines."""
    packages = [
        "dpcsgp",
        "torch",
        "numpy",
        "scipy",
        "networkx",
        "dp-accounting",
        "cryptography",
        "safetensors",
    ]
    return {
        "python": sys.version.split()[0],
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: version(name) for name in packages},
    }
