"""One validated model of all settings, and its way to and from TOML.

Keys explain themselves; `--set section.key=value` uses the same names. Per-node values are a number
or a list with one number per node.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from dpcsgp.algorithms.methods import Method, find_method
from dpcsgp.errors import ConfigError


def _method_name(name: Any) -> Any:
    find_method(name)
    return name


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# a row of `algorithms.methods`, or "module:attribute"
MethodName = Annotated[str, BeforeValidator(_method_name)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Delta = Annotated[float, Field(gt=0, lt=1)]


# Settings that version 0.1.0 did not have.
_LATER_KEYS: Final = (
    "algorithm.learning_rate_schedule",
    "algorithm.warmup_steps",
    "algorithm.optimizer",
    "algorithm.adam_betas",
    "algorithm.adam_epsilon",
    "algorithm.weight_decay",
    "privacy.max_colluders",
    "privacy.max_rows_per_unit",
    "run.max_rows_per_pass",
    "run.memory_limit_gb",
    "task.class_weights",
)
# Settings that change nothing of what is trained: a resumed run may have others.
_LOCAL_KEYS: Final = {"run": ("trackers",)}
# What Adam starts with where nothing is said: its steps have a length of their own.
_ADAM_DEFAULTS: Final = {"learning_rate": 0.03, "momentum": 0.0}


class Section(BaseModel):
    """A table of the TOML file: unknown keys are refused, values cannot be changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class TaskConfig(Section):
    """What is learned, and who has which data."""

    # "own" is written by `dpcsgp.train`: model and data are the caller's.
    name: Literal["mnist", "fashion_mnist", "cifar10", "digits", "own"] = "mnist"
    # Read by `tasks.build_model` and `tasks.features`, which list what they know.
    model: str = "mlp:128"
    features: str = "standardize"
    augmentation: Literal["none", "crop", "flip", "crop-flip"] = "none"
    # Random views of an example, over which its gradient is averaged.
    augmentation_multiplicity: Count = 1
    partition: str = "iid"
    # Factors of the loss, one per class (empty: all count alike).
    class_weights: list[Positive] = []


class GraphConfig(Section):
    """Who sends to whom."""

    name: Literal[
        "directed_exponential",
        "directed_ring",
        "undirected_ring",
        "complete",
        "torus",
        "star",
        "random_digraph",
        "edges",
    ] = "directed_exponential"
    num_nodes: Count = 10
    edge_probability: Annotated[float, Field(ge=0, le=1)] = 0.3
    seed: Annotated[int, Field(ge=0)] = 0
    edges_file: str = ""


class AlgorithmConfig(Section):
    """How the nodes learn together."""

    name: MethodName = "dp-csgp"
    learning_rate: Positive = 6.0
    learning_rate_decay: Annotated[float, Field(ge=0, le=1)] = 0.2
    learning_rate_schedule: Literal["linear", "cosine", "constant"] = "linear"
    # Steps over which the rate rises at the start.
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    # Made of private gradients by each node for itself; Adam starts with another rate (below).
    optimizer: Literal["sgd", "adam"] = "sgd"
    adam_betas: Annotated[
        list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)
    ] = [0.9, 0.999]
    adam_epsilon: Positive = 1e-8
    # Decoupled: a step of rate r takes away r times this share of the model.
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    # gamma; "auto" takes the rate with the smallest disagreement on this graph.
    mixing_rate: Literal["auto"] | Annotated[float, Field(gt=0, le=1)] = "auto"
    steps: Count = 30
    gossip_every: Count = 1
    num_blocks: Count = 10
    block_order: Literal["round-robin", "random"] = "round-robin"
    # Exchanges without gradients after the last step: they bring the nodes together.
    polish_rounds: Annotated[int, Field(ge=0)] = 3
    polish_compression: str = ""
    # Steps whose models are averaged before polishing (0: none).
    average_last: Annotated[int, Field(ge=0)] = 0
    # "equal" as in the paper; "examples": by declared sizes.
    node_weights: Literal["equal", "examples"] = "equal"


class CompressionConfig(Section):
    """How messages shrink."""

    # Read by `compression.parse_compressor`.
    spec: str = "rot:1"


class PrivacyConfig(Section):
    """What each node promises its examples."""

    epsilon: Positive | list[Positive] = 0.5
    delta: Delta | list[Delta] = 1e-4
    clip_norm: Positive = 1.0
    expected_batch_size: Literal["auto"] | Count | list[Count] = "auto"
    sampling: Literal["poisson", "uniform"] = "poisson"
    noise: Literal["calibrated", "paper", "none"] = "calibrated"
    c2: Positive = 1.0
    # Releases that a resumed run may repeat; the noise is calibrated for them as well.
    replay_reserve: Annotated[int, Field(ge=0)] = 0
    # Most rows of a person (`dpcsgp.train(..., unit=...)`) that count in one step; 0: the unit of
    # privacy is a single example.
    max_rows_per_unit: Annotated[int, Field(ge=0)] = 0
    # How many other nodes may tell all they know; fewer than all: pairs of nodes share noise that
    # cancels in the average (docs/cancelling-noise.md).
    max_colluders: Literal["all"] | Annotated[int, Field(ge=0)] = "all"
    # For experiments only: whoever knows the seed can subtract the noise.
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class NetworkConfig(Section):
    """How real processes talk."""

    timeout_seconds: Positive = 60.0
    key_file: str = ""


class RunConfig(Section):
    """How a run is watched and kept."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    evaluate_every: Annotated[int, Field(ge=0)] = 5
    # Only the first so many public test examples (0: all).
    test_examples: Annotated[int, Field(ge=0)] = 0
    checkpoint_every: Annotated[int, Field(ge=0)] = 10
    device: str = "cpu"
    # Rows of one forward and backward pass; "auto": what `memory_limit_gb` allows. Neither changes
    # what is released, but for rounding.
    max_rows_per_pass: Literal["auto"] | Count = "auto"
    # For what passes keep between forward and backward, roughly; other memory comes on top.
    memory_limit_gb: Positive = 1.0
    # Where evaluations are shown besides the results folder: public values only.
    trackers: Annotated[
        list[Literal["tensorboard", "mlflow", "wandb"]], BeforeValidator(_listed)
    ] = []


class Config(Section):
    """All settings of a run; the defaults are the demo."""

    task: TaskConfig = TaskConfig()
    graph: GraphConfig = GraphConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    compression: CompressionConfig = CompressionConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    network: NetworkConfig = NetworkConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _check_combinations(self) -> Config:
        # Each section was checked by itself; here come the conditions between sections.
        for key in ("epsilon", "delta", "expected_batch_size"):
            value = getattr(self.privacy, key)
            if isinstance(value, list) and len(value) != self.graph.num_nodes:
                raise ValueError(
                    f"privacy.{key} has {len(value)} values: give one number, or one per node "
                    f"(graph.num_nodes = {self.graph.num_nodes})"
                )
        if self.graph.name == "edges" and not self.graph.edges_file:
            raise ValueError(
                'graph.edges_file is empty: graph.name = "edges" needs a file with one "sender '
                'receiver" per line'
            )
        if self.task.augmentation == "none" and self.task.augmentation_multiplicity > 1:
            raise ValueError(
                f"task.augmentation_multiplicity = {self.task.augmentation_multiplicity}: "
                "without augmentation all views "
                'are the same; set task.augmentation = "crop-flip", or leave the multiplicity at 1'
            )
        if self.method.only_at_end and not self.algorithm.polish_rounds:
            raise ValueError(
                f'algorithm.polish_rounds = 0: algorithm.name = "{self.algorithm.name}" sends its '
                "messages in the polish rounds; "
                'give it 2 or more, or choose algorithm.name = "local"'
            )
        if self.algorithm.average_last > self.algorithm.steps:
            raise ValueError(
                f"algorithm.average_last = {self.algorithm.average_last}: there are only "
                f"{self.algorithm.steps} steps; "
                "choose at most that many"
            )
        if not self.method.private and self.privacy.noise != "none":
            raise ValueError(
                f'algorithm.name = "{self.algorithm.name}" is the non-private method: set '
                'privacy.noise = "none", '
                "or choose its private twin (dp-sgp, dp2sgd, dp-csgp)"
            )
        if self.privacy.max_rows_per_unit and self.task.augmentation != "none":
            raise ValueError(
                f'task.augmentation = "{self.task.augmentation}" with privacy.max_rows_per_unit = '
                f"{self.privacy.max_rows_per_unit}: rows of a person have no augmented views; set "
                'task.augmentation = "none", or make views in your dataset'
            )
        return self

    @model_validator(mode="after")
    def _check_optimizer(self) -> Config:
        settings, colluders = self.algorithm, self.privacy.max_colluders
        if settings.warmup_steps >= settings.steps:
            raise ValueError(
                f"algorithm.warmup_steps = {settings.warmup_steps}: there are only "
                f"{settings.steps} steps; choose fewer"
            )
        if settings.learning_rate * settings.weight_decay >= 1:
            raise ValueError(
                f"algorithm.weight_decay = {settings.weight_decay:g}: one step of learning rate "
                f"{settings.learning_rate:g} would take the whole model away; choose far less than "
                f"{1 / settings.learning_rate:.2g}"
            )
        if settings.optimizer == "adam" and settings.momentum:
            raise ValueError(
                f'algorithm.momentum = {settings.momentum:g}: algorithm.optimizer = "adam" has its '
                "own; leave momentum out, and set the first of algorithm.adam_betas"
            )
        if settings.optimizer == "adam" and colluders != "all":
            raise ValueError(
                f'privacy.max_colluders = {colluders}: with algorithm.optimizer = "adam" every '
                "node scales its noise by itself, so shared noise would not cancel; choose "
                'algorithm.optimizer = "sgd", or privacy.max_colluders = "all"'
            )
        return self

    @model_validator(mode="after")
    def _check_colluders(self) -> Config:
        colluders, name = self.privacy.max_colluders, self.algorithm.name
        if colluders == "all":
            return self
        where = f"privacy.max_colluders = {colluders}"
        if self.privacy.noise != "calibrated":
            raise ValueError(
                f'{where}: shared noise is calibrated; set privacy.noise = "calibrated", or '
                'privacy.max_colluders = "all"'
            )
        if self.method.one_place or not self.method.sends:
            raise ValueError(
                f'{where}: algorithm.name = "{name}" averages nothing, so shared noise would not '
                'cancel; set privacy.max_colluders = "all", or choose a method that exchanges'
            )
        from dpcsgp.privacy.cancelling import noise_groups  # most settings need no privacy room

        smallest = min(map(len, noise_groups(self.graph.num_nodes)))
        if colluders > smallest - 2:
            raise ValueError(
                f"{where}: of {smallest} nodes that share noise no honest pair would be left; "
                + (f"choose at most {smallest - 2}, or " if smallest > 1 else "choose ")
                + 'privacy.max_colluders = "all" (independent noise, no trust)'
            )
        return self

    @property
    def method(self) -> Method:
        """The row of the table of methods that `algorithm.name` names."""
        return find_method(self.algorithm.name)

    @property
    def num_nodes(self) -> int:
        """Nodes of the run: one, where all data are in one place."""
        return 1 if self.method.one_place else self.graph.num_nodes

    @property
    def num_blocks(self) -> int:
        """Blocks of coordinates that take turns: one, where a round exchanges all of them."""
        return self.algorithm.num_blocks if self.method.blocks else 1

    def flat(self) -> dict[str, Any]:
        """Return all settings as `section.key` -> value."""
        sections = self.model_dump().items()
        return {
            f"{section}.{key}": value for section, table in sections for key, value in table.items()
        }

    def fingerprint(self) -> str:
        """Return a short digest of all settings that a resumed run must share."""
        # Keys that came later count only where they are set: older folders can still be resumed.
        unset: dict[str, set[str]] = {section: set(keys) for section, keys in _LOCAL_KEYS.items()}
        for name in _LATER_KEYS:
            section, _, key = name.partition(".")
            table = getattr(self, section)
            if getattr(table, key) == type(table).model_fields[key].default:
                unset.setdefault(section, set()).add(key)
        text = self.model_dump_json(exclude=unset)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def per_node(value: Any, num_nodes: int) -> tuple[Any, ...]:
    """Spread a number over all nodes; a list stays as it is."""
    return tuple(value) if isinstance(value, list) else (value,) * num_nodes


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
