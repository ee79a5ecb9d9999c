"""The table of training methods: a name, how the method is built, and what others must know of it.

A new method is one file with a function `build`, and one row of `METHODS`. A method of your own
needs no row: `algorithm.name = "my_method:LAZY"` takes the `Method` named LAZY from the module
my_method. All other code asks for traits, never for names:

| method | private | sends | undirected | compresses | error_feedback | also |
|---|---|---|---|---|---|---|
| `dp-csgp` | yes | yes | | yes | yes | `lags` |
| `dp-block` | yes | yes | | yes | | `blocks` |
| `local-then-average` | yes | yes | | yes | yes | `only_at_end` |
| `dp2sgd` | yes | yes | yes | | | |
| `dp-sgp` | yes | yes | | | | |
| `sgp` | | yes | | | | |
| `d-psgd` | | yes | yes | | | |
| `choco-sgd` | | yes | yes | yes | yes | |
| `dp-sgd` | yes | | | | | `one_place` |
| `local` | yes | | | | | |

This module needs no torch: a builder imports its file when it is called.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, final

from dpcsgp.errors import ConfigError

if TYPE_CHECKING:
    from dpcsgp.algorithms.base import Algorithm, Schedule
    from dpcsgp.compression import Compressor


@final
@dataclass(frozen=True)
class MethodSettings:
    """The settings that a method may use; it takes what it needs."""

    compressor: Compressor  # of `compression.spec`
    learning_rate: Schedule
    mixing_rate: float = 1.0  # checked for stability; 1 for methods without error feedback
    max_lag: int = 0  # rounds that a node may be ahead of those it hears
    skips: bool = False  # whether frames may come without a new gradient
    num_blocks: int = 1  # 1 for methods without blocks
    block_order: Literal["round-robin", "random"] = "round-robin"


Build = Callable[[MethodSettings], "Algorithm[Any]"]


@final
@dataclass(frozen=True)
class Method:
    """How a method is built, and its traits."""

    build: Build
    private: bool = True
    """May run with noise. The non-private methods have a twin under another name."""
    sends: bool = True
    """Messages leave the nodes; without them there is nothing to diverge and nothing to attack."""
    undirected: bool = False
    """Needs doubly stochastic weights: the undirected version of the graph, Metropolis weights."""
    compresses: bool = False
    """`compression.spec` makes its messages; all others send float32."""
    error_feedback: bool = False
    """Compresses differences from a public copy (`algorithms.error_feedback`): it has a mixing
    rate, and the laws of `graphs.mixing_radius` hold."""
    blocks: bool = False
    """Exchanges one of `algorithm.num_blocks` blocks a round: the laws of `graphs.block_radius`
    hold. They hold with one block for methods that compress without error feedback."""
    one_place: bool = False
    """All data in one place: one node, whatever `graph.num_nodes` says."""
    only_at_end: bool = False
    """Nothing is sent before the polish rounds."""
    lags: bool = False
    """Has a rule for messages that come late: `network.max_lag` may be above 0."""

    def __post_init__(self) -> None:
        if self.error_feedback and not self.compresses:
            raise ConfigError("Method(error_feedback=True): it compresses; give compresses=True")


def built_by(module: str) -> Build:
    """Return a builder that calls the `build` of `dpcsgp.algorithms.<module>`.

    The module is imported when the builder is called.
    """

    def build(settings: MethodSettings) -> Algorithm[Any]:
        return importlib.import_module(f"dpcsgp.algorithms.{module}").build(settings)

    return build


METHODS: Final[dict[str, Method]] = {
    "dp-csgp": Method(built_by("dp_csgp"), compresses=True, error_feedback=True, lags=True),
    "dp-block": Method(built_by("dp_block"), compresses=True, blocks=True),
    "local-then-average": Method(
        built_by("dp_csgp"), compresses=True, error_feedback=True, only_at_end=True
    ),
    "dp2sgd": Method(built_by("d_psgd"), undirected=True),
    "dp-sgp": Method(built_by("sgp")),
    "sgp": Method(built_by("sgp"), private=False),
    "d-psgd": Method(built_by("d_psgd"), private=False, undirected=True),
    "choco-sgd": Method(
        built_by("choco_sgd"), private=False, undirected=True, compresses=True, error_feedback=True
    ),
    "dp-sgd": Method(built_by("local"), sends=False, one_place=True),
    "local": Method(built_by("local"), sends=False),
}


def find_method(name: object) -> Method:
    """Return the method of `algorithm.name`.

    A name that is neither in the table nor `module:attribute` is refused.

    >>> find_method("choco-sgd").undirected
    True
    """
    # A row of the table, or a method of the user's own.
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    if isinstance(name, str) and ":" in name:
        return _imported(name)
    # Neither: list what there is, the nearest name last.
    *most, last = (f"'{known}'" for known in METHODS)
    close = difflib.get_close_matches(str(name), METHODS, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise ConfigError(
        f"should be {', '.join(most)} or {last}, or 'module:attribute' for a method of your own"
        f"{hint}"
    )


def _imported(name: str) -> Method:
    """Return the `Method` that a module on the Python path holds."""
    module_name, _, attribute = name.partition(":")
    # A wrong form is told apart from a module that is missing.
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ConfigError("should be 'module:attribute', such as 'my_method:LAZY'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"module {module_name} cannot be imported ({error}); put its folder on PYTHONPATH"
        ) from None
    method = getattr(module, attribute, None)
    if not isinstance(method, Method):
        raise ConfigError(
            f"module {module_name} has no dpcsgp.algorithms.Method named {attribute}; "
            f"write {attribute} = Method(build=...) in it"
        )
    return method
