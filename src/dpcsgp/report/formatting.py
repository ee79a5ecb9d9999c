"""How numbers are spelled on the page; what is missing is a dash, no eps is rounded down."""

from __future__ import annotations

import math
from typing import Any

DASH = "–"
GAP = "\N{NO-BREAK SPACE}"  # between a number and its unit


def as_number(value: Any) -> float:
    """Return the number that a JSON value stands for, "inf" and "nan" included; else nan."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def significant(value: float, digits: int = 3) -> str:
    """Spell a number with so many significant digits, without an exponent if possible."""
    if math.isnan(value):
        return DASH
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value and abs(value) < 10.0**-digits:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 10.0 ** (digits - 1) else f"{value:.{digits}g}"


def epsilon(value: float) -> str:
    """Spell eps with three significant digits, rounded up: it must not look better than it is."""
    if not math.isfinite(value) or value <= 0:
        return significant(value)
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    steps = value / unit
    return significant(math.ceil(steps - 1e-9 * steps) * unit)


def score(metric: str, value: float) -> str:
    """Spell a metric: accuracies as a percentage, everything else with four digits."""
    if metric == "accuracy" and math.isfinite(value):
        return f"{100 * value:.1f}{GAP}%"
    return significant(value, 4)


def megabytes(num_bytes: float) -> str:
    """Spell bytes as megabytes (1 MB = 1,000,000 bytes)."""
    text = significant(num_bytes / 1e6)
    return text if text == DASH else f"{text}{GAP}MB"


def duration(seconds: float) -> str:
    """Spell seconds the way a person would say them."""
    if not math.isfinite(seconds):
        return DASH
    if seconds < 60:
        return f"{significant(seconds, 2)}{GAP}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def plain_text(value: Any) -> str:
    """Spell any value of a summary or a setting; a list of equal entries shrinks to one."""
    if value is None or value == "":
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        same = value and all(item == value[0] for item in value)
        return (
            f"{plain_text(value[0])} at every node" if same else ", ".join(map(plain_text, value))
        )
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
