"""From TOML and `section.key=value` to checked settings, and back.

Errors name the field, the value and the remedy.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from dpcsgp.algorithms.methods import Method, find_method
from dpcsgp.config.sections import AlgorithmConfig, Section
from dpcsgp.config.settings import Config
from dpcsgp.errors import ConfigError

# What Adam starts with where nothing is said: its steps have a length of their own.
_ADAM_DEFAULTS: Final = {"learning_rate": 0.03, "momentum": 0.0}


def load_config(path: Path | None = None, settings: Sequence[str] = ()) -> Config:
    """Read a TOML file (None: the defaults) and apply `section.key=value` settings.

    >>> load_config(None, ["graph.num_nodes=4", "privacy.epsilon=2"]).privacy.epsilon
    2.0
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"config file {path} does not exist; `dpcsgp run` without a file uses the defaults"
            ) from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"config file {path} cannot be read: {error}") from None
    for setting in settings:
        _apply(values, setting)
    return make_config(values)


def change_config(config: Config, settings: Sequence[str] | Mapping[str, Any]) -> Config:
    """Return the config with settings changed: `["section.key=value"]` or `{"section.key": value}`.

    >>> change_config(Config(), {"privacy.epsilon": 2}).privacy.epsilon
    2.0
    """
    values = config.model_dump(exclude_unset=True)
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            _put(
                values,
                name,
                list(value) if isinstance(value, tuple) else value,
                f"settings[{name!r}]",
            )
    else:
        for setting in settings:
            _apply(values, setting)
    return make_config(values)


def make_config(values: Mapping[str, Any]) -> Config:
    """Validate plain values; errors name the field, the value and the remedy."""
    # Unknown keys first: pydantic would refuse them too, but without naming the nearest one.
    _refuse_unknown_keys(values)
    algorithm: Mapping[str, Any] = values.get("algorithm", {})
    # Defaults that depend on the method are filled in before validation.
    method = _method_of(algorithm)
    if method.compresses and not method.error_feedback:  # messages are exact unless asked
        values = {**values, "compression": {"spec": "none", **values.get("compression", {})}}
    if method.only_at_end:  # nothing is sent before the polish rounds
        steps = algorithm.get("steps", AlgorithmConfig().steps)
        values = {
            **values,
            "algorithm": {
                **algorithm,
                "gossip_every": steps + 1 if isinstance(steps, int) else steps,
            },
        }
    if algorithm.get("optimizer") == "adam":
        table = {**_ADAM_DEFAULTS, **values.get("algorithm", {})}
        values = {**values, "algorithm": table}
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def _method_of(algorithm: Mapping[str, Any]) -> Method:
    """Return the method that a table names.

    For a wrong name, which validation refuses, it is the default one.
    """
    default = AlgorithmConfig().name
    try:
        return find_method(algorithm.get("name", default))
    except ConfigError:
        return find_method(default)


def to_toml(config: Config) -> str:
    """Write all settings as TOML, defaults included."""
    lines: list[str] = []
    for section, values in config.model_dump(exclude_none=True).items():
        lines += [
            f"[{section}]",
            *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
            "",
        ]
    return "\n".join(lines)


def _apply(values: dict[str, Any], setting: str) -> None:
    name, separator, text = setting.partition("=")
    if not separator:
        raise ConfigError(
            f"--set {setting}: expected section.key=value, for example --set privacy.epsilon=1"
        )
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string: --set task.name=digits
    _put(values, name, value, f"--set {setting}")


def _put(values: dict[str, Any], name: str, value: Any, given: str) -> None:
    section, dot, key = name.strip().partition(".")
    if not (dot and section and key):
        raise ConfigError(
            f"{given}: expected section.key=value, for example --set privacy.epsilon=1"
        )
    # A file may hold `section = 3` in the place of a table.
    table = values.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section} = {table!r}: expected a table [{section}]")
    table[key] = value


# words of other programs for settings of this one
_OTHER_WORDS: Final = {
    "max_physical_batch_size": "run.max_rows_per_pass",
    "max_grad_norm": "privacy.clip_norm",
    "target_epsilon": "privacy.epsilon",
    "target_delta": "privacy.delta",
}


def _refuse_unknown_keys(values: Mapping[str, Any]) -> None:
    sections = Config.model_fields
    for section, table in values.items():
        if section not in sections:
            raise ConfigError(f"unknown section [{section}]{_nearest(section, list(sections))}")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{section} = {table!r}: expected a table [{section}]")
        annotation = sections[section].annotation
        assert isinstance(annotation, type) and issubclass(annotation, Section)
        for key in table:
            if key not in annotation.model_fields:
                if key in _OTHER_WORDS:
                    raise ConfigError(
                        f"unknown key {section}.{key}: did you mean {_OTHER_WORDS[key]}?"
                    )
                raise ConfigError(
                    f"unknown key {section}.{key}{_nearest(key, list(annotation.model_fields))}"
                )


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    listed = ", ".join(known)
    return f": did you mean {close[0]!r}? Known: {listed}" if close else f". Known: {listed}"


def _explain(error: ValidationError) -> str:
    """Turn pydantic's list into one line per field; alternatives of one field are joined."""
    reasons: dict[str, list[str]] = {}
    for detail in error.errors():
        # The location goes on after section and key for unions and lists: cut off there.
        path = [str(part) for part in detail["loc"][:2]]
        if not path:
            return detail["msg"].removeprefix("Value error, ")
        reason = detail["msg"].removeprefix("Input ").removeprefix("Value error, ")
        reasons.setdefault(f"{'.'.join(path)} = {detail['input']!r}", []).append(reason)
    return "\n".join(
        f"{field}: {' or '.join(dict.fromkeys(texts))}" for field, texts in reasons.items()
    )
