"""Files that come from other people: read with bounds, taken apart field by field, written alike.

Nothing in such a file is trusted: size, types and ranges are checked before anything is built, and
every refusal names the file and the field. The text form is TOML; what is signed and what
fingerprints are made of is `canonical`, so that spaces, comments and the order of keys do not
count.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dpcsgp.errors import ConfigError

LARGEST_FILE: Final = 2 * 1024 * 1024  # bytes; a roster of 256 parties has about 0.4 MB
_LONGEST_LINE: Final = 20_000
_MOST_DOTS: Final = 40  # of a line
_MOST_SHOWN: Final = 60  # characters of a wrong value that an error repeats


def read_text(path: Path, what: str, largest: int = LARGEST_FILE) -> str:
    """Return the text of a regular file of at most `largest` bytes; `what` names it in errors."""
    # A pipe or a device would be read for ever.
    if not path.is_file():
        raise ConfigError(f"{what} {path}: there is no such file; check the path")
    try:
        with path.open("rb") as file:
            body = file.read(largest + 1)
        text = body.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path} is no text: ask for it again, as a TOML file") from None
    if len(body) > largest:
        raise ConfigError(
            f"{what} {path} has more than {largest:,} bytes: that is no file of ours; "
            "ask for it again"
        )
    return text


def parse_table(text: str, where: str) -> dict[str, Any]:
    """Return the values of a TOML text; `where` names it in errors."""
    # The parser's time grows with the square of the parts of a dotted key: 1 MB of "a.a.a..." takes
    # hours. Keys do not span lines, so bounded lines bound them.
    for line in text.split("\n"):
        too_long = len(line) > _LONGEST_LINE
        if too_long or (line.count(".") > _MOST_DOTS and not line.startswith("#")):
            raise ConfigError(
                f"{where} is damaged: it has the line {_shown(line)}; ask for it again"
            )
    try:
        return tomllib.loads(text)
    # Deep nesting exhausts the stack, a number of thousands of digits is a ValueError.
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where} is damaged ({str(error)[:_MOST_SHOWN]}); ask for it again"
        ) from None


def canonical(content: Mapping[str, Any]) -> bytes:
    """Return the one spelling of plain values that is signed or digested.

    >>> canonical({"b": 1.0, "a": "x"})
    b'{"a":"x","b":1.0}'
    """
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def toml_value(value: Any) -> str:
    """Return a text, number, flag, date or list of them as TOML.

    >>> toml_value(["a", 1e-5])
    '["a", 1e-05]'
    """
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    # JSON's spelling is TOML's too, but for surrogate pairs and the delete character.
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """Return one line `key = value` per value."""
    return [f"{key} = {toml_value(value)}" for key, value in values.items()]


class Fields:
    """The fields of a table from elsewhere: taken one by one with their types, none left over.

    Args:
        values: what stands where the table should be.
        where: names the table in errors.
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: expected a table, got {_shown(values)}")
        self._left, self._where = dict(values), where

    def has(self, key: str) -> bool:
        """Say whether a field is there and was not taken yet."""
        return key in self._left

    def take(self, key: str) -> Any:
        """Take a value of any type."""
        if key not in self._left:
            raise ConfigError(
                f"{self._where}: {key} is missing; the file is damaged or was made by another "
                "version of dpcsgp: ask for it again"
            )
        return self._left.pop(key)

    def table(self, key: str) -> Fields:
        """Take a table inside this one."""
        return Fields(self.take(key), f"{self._where}, {key}")

    def text(self, key: str, pattern: str, expected: str) -> str:
        """Take a text that matches a pattern from end to end; `expected` says it in words."""
        value = self.take(key)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise self.wrong(key, value, expected)
        return value

    def whole(self, key: str, least: int, most: int) -> int:
        """Take a whole number within bounds."""
        value = self.take(key)
        # bool is a subclass of int: `true` would pass for 1.
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, value, f"a whole number from {least} to {most}")
        return value

    def positive(self, key: str, below: float = math.inf) -> float:
        """Take a finite number above 0 and below a bound."""
        value = self.take(key)
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared before it is converted: a whole number may be too large for a float.
        if not numeric or not 0 < value < min(below, 1e300):
            limit = "" if math.isinf(below) else f" and below {below:g}"
            raise self.wrong(key, value, f"a number above 0{limit}")
        return float(value)

    def flag(self, key: str) -> bool:
        """Take true or false."""
        value = self.take(key)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def day(self, key: str) -> datetime.date:
        """Take a date without a time."""
        value = self.take(key)
        if not isinstance(value, datetime.date) or isinstance(value, datetime.datetime):
            raise self.wrong(key, value, "a date such as 2030-12-31")
        return value

    def listed(self, key: str, most: int) -> list[Any]:
        """Take a list with at least one and at most so many entries."""
        value = self.take(key)
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            raise self.wrong(key, value, f"a list of 1 to {most} entries")
        return value

    def format(self, known: int) -> None:
        """Take the format version, and refuse one that this release does not read."""
        version = self.whole("format", 1, 2**31)
        if version != known:
            raise ConfigError(
                f"{self._where}: format = {version}, this release reads format {known}; use the "
                "same release of dpcsgp everywhere"
            )

    def end(self) -> None:
        """Refuse fields that nobody took."""
        if self._left:
            raise ConfigError(
                f"{self._where}: unknown field {_shown(next(iter(self._left)))}; the file was "
                "changed by hand or made by another version of dpcsgp: ask for it again"
            )

    def wrong(self, key: str, value: Any, expected: str) -> ConfigError:
        """Return the error for a wrong value."""
        return ConfigError(f"{self._where}: {key} = {_shown(value)}: expected {expected}")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits has no decimal text
        text = "a number of thousands of digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
