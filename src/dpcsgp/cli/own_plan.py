"""`dpcsgp plan` for a model of one's own: a function on the Python path builds it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import typer

from dpcsgp.errors import ConfigError
from dpcsgp.records.metrics import strict_json

if TYPE_CHECKING:
    from dpcsgp.config import Config
    from dpcsgp.planning.own import OwnPlan


def is_own_model(name: str) -> bool:
    """Tell `module:function` from the built-in models, of which "mlp:128" has a colon."""
    return ":" in name and not name.startswith("mlp:")


def one_number(text: str | None) -> int | None:
    """Read --num-examples of a built-in data set."""
    if text is None:
        return None
    if not text.strip().isdecimal():
        raise ConfigError(
            f"--num-examples {text}: expected one number, the examples of every node; one per node "
            "goes with a model of your own (--model module:function)"
        )
    return int(text)


def refuse_limits(
    task: str | None, features: str | None, megabytes: float | None, minutes: float | None
) -> None:
    """Refuse options that choose among plans for the built-in data sets."""
    options = {
        "--task": task,
        "--features": features,
        "--max-megabytes": megabytes,
        "--max-minutes": minutes,
    }
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{name} {value}: goes with the built-in data sets; for a model of your own leave "
                "it out and set what is too dear, such as --set algorithm.steps=20"
            )


def plan_own_model(
    name: str,
    num_examples: str | None,
    config_file: Path | None,
    changes: Sequence[str],
    loss: str,
    input_shape: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Plan for the model that `module:function` builds, and print the plan."""
    from dpcsgp.planning.own import plan

    if num_examples is None:
        raise ConfigError(
            f"--model {name}: say how many examples the nodes declare: --num-examples 60,80,90"
        )
    found = plan(
        imported_model(name),
        _numbers("--num-examples", num_examples),
        loss=cast(Literal["cross_entropy", "mse"], loss),
        input_shape=None if input_shape is None else _numbers("--input-shape", input_shape),
        config=config_file,
        settings=changes,
    )
    if out is not None:
        write_settings(out, found.config(), f"{found.bytes_per_edge:,} bytes per edge")
    if as_json:
        typer.echo(strict_json(_answer(found)))
        return
    typer.echo(repr(found))
    if out is not None:
        typer.echo(f"settings: {out}    next: dpcsgp.train(..., config={str(out)!r})")


def imported_model(name: str) -> Callable[[], Any]:
    """Return the function (or module) that `module:function` names, from this folder or the path.

    Raises:
        ConfigError: if there is no such thing.
    """
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise ConfigError(
            f"--model {name}: {error}; start in the folder of {module_name}.py, or put that folder "
            "on PYTHONPATH"
        ) from None
    except AttributeError:
        raise ConfigError(
            f"--model {name}: {module_name} has nothing named {attribute!r}; name a function that "
            "builds the model, or a built-in one such as mlp:128"
        ) from None


def write_settings(path: Path, config: Config, comment: str) -> None:
    """Write settings as TOML with a first line that says what they cost."""
    from dpcsgp.config import to_toml
    from dpcsgp.records.files import write_atomically

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"# dpcsgp plan: {comment}\n{to_toml(config)}".encode())
    except OSError as error:
        raise ConfigError(
            f"--out {path} cannot be written: {error.strerror}; choose another file"
        ) from None


def _answer(found: OwnPlan) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "verdict": found.verdict,
        "settings": found.settings,
        "chosen_by_rule": list(found.chosen),
        "noise_share": found.noise_share,
        "noise_multipliers": list(found.noise_multipliers),
        "num_coordinates": found.design.dim,
        "bytes_per_edge": found.bytes_per_edge,
        "seconds": found.seconds,
        "memory_bytes": found.memory_bytes,
    }


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{option} {text}: expected whole numbers with commas, 60,80,90"
        ) from None
