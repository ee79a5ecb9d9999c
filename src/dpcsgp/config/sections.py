"""The sections of the settings, one class per table of the TOML file, each checked by itself.

Conditions between sections are those of `settings.Config`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from dpcsgp.algorithms.lag_settings import MOST_LAG
from dpcsgp.algorithms.methods import find_method


def _method_name(name: Any) -> Any:
    find_method(name)
    return name


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _between(low: float, high: float) -> AfterValidator:
    def check(value: float) -> float:
        if not low <= value <= high:  # nor nan
            raise ValueError(f"expected a number from {low:g} to {high:g}")
        return value

    return AfterValidator(check)


# a row of `algorithms.methods`, or "module:attribute"
MethodName = Annotated[str, BeforeValidator(_method_name)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# States are float32: what multiplies or divides them must not become 0 or infinite there.
Factor = Annotated[float, Field(gt=0), _between(1e-30, 1e30)]
ClipNorm = Annotated[float, Field(gt=0), _between(1e-9, 1e18)]  # what the clipping engines take
# More time, memory and steps than anybody has; larger ones would overflow further down.
Seconds = Annotated[float, Field(gt=0), _between(0, 1e9)]
NotNegative = Annotated[float, Field(ge=0), _between(0, 1e9)]
Gigabytes = Annotated[float, Field(gt=0), _between(1e-6, 1e9)]
Count = Annotated[int, Field(ge=1), _between(1, 10**9)]
Number = Annotated[int, Field(ge=0), _between(0, 10**9)]
Delta = Annotated[float, Field(gt=0, lt=1)]


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
    class_weights: list[Factor] = []


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
    num_nodes: Annotated[int, Field(ge=1), _between(1, 10**5)] = 10
    edge_probability: Annotated[float, Field(ge=0, le=1)] = 0.3
    seed: Annotated[int, Field(ge=0)] = 0
    edges_file: str = ""


class AlgorithmConfig(Section):
    """How the nodes learn together."""

    name: MethodName = "dp-csgp"
    learning_rate: Factor = 6.0
    learning_rate_decay: Annotated[float, Field(ge=0, le=1)] = 0.2
    learning_rate_schedule: Literal["linear", "cosine", "constant"] = "linear"
    # Steps over which the rate rises at the start.
    warmup_steps: Number = 0
    # Made of private gradients by each node for itself; Adam starts with another rate (below).
    optimizer: Literal["sgd", "adam"] = "sgd"
    adam_betas: Annotated[
        list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)
    ] = [0.9, 0.999]
    adam_epsilon: Factor = 1e-8
    # Decoupled: a step of rate r takes away r times this share of the model.
    weight_decay: Annotated[float, Field(ge=0), _between(0, 1e30)] = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    # gamma; "auto" takes the rate with the smallest disagreement on this graph.
    mixing_rate: Literal["auto"] | Annotated[float, Field(gt=0, le=1)] = "auto"
    steps: Count = 30
    gossip_every: Annotated[int, Field(ge=1)] = 1
    num_blocks: Count = 10
    block_order: Literal["round-robin", "random"] = "round-robin"
    # Exchanges without gradients after the last step: they bring the nodes together.
    polish_rounds: Number = 3
    polish_compression: str = ""
    # Steps whose models are averaged before polishing (0: none).
    average_last: Number = 0
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
    clip_norm: ClipNorm = 1.0
    expected_batch_size: Literal["auto"] | Count | list[Count] = "auto"
    sampling: Literal["poisson", "uniform"] = "poisson"
    noise: Literal["calibrated", "paper", "none"] = "calibrated"
    c2: Factor = 1.0
    # Releases that a resumed run may repeat; the noise is calibrated for them as well.
    replay_reserve: Number = 0
    # Most rows of a person (`dpcsgp.train(..., unit=...)`) that count in one step; 0: the unit of
    # privacy is a single example.
    max_rows_per_unit: Number = 0
    # How many other nodes may tell all they know; fewer than all: pairs of nodes share noise that
    # cancels in the average (docs/cancelling-noise.md).
    max_colluders: Literal["all"] | Annotated[int, Field(ge=0)] = "all"
    # For experiments only: whoever knows the seed can subtract the noise.
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class NetworkConfig(Section):
    """How real processes talk."""

    timeout_seconds: Seconds = 60.0
    key_file: str = ""
    # How many rounds a node may be ahead of those it hears; 0: in step, as in the paper.
    max_lag: Annotated[int, Field(ge=0, le=MOST_LAG)] = 0
    # "skip": who would hold up the others gossips without a new gradient, and adds it later.
    late_gradients: Literal["wait", "skip"] = "wait"
    # Seconds without a sign of life after which a party gives up on another.
    patience: Literal["forever"] | Seconds = "forever"


class SimulationConfig(Section):
    """How `dpcsgp run` plays slow nodes and bad lines, in virtual time; nothing sleeps."""

    # Mean seconds of a gradient; 0: no clock is played.
    step_seconds: NotNegative = 0.0
    jitter: Literal["none", "exponential"] = "none"
    slow_nodes: list[Annotated[int, Field(ge=0)]] = []
    slow_factor: Annotated[float, Field(ge=1), _between(1, 1e9)] = 10.0
    message_seconds: NotNegative = 0.0
    # Chance that a message is lost and has to be sent again, after so many seconds.
    loss: Annotated[float, Field(ge=0, lt=1)] = 0.0
    resend_seconds: NotNegative = 1.0
    # Chance per message that its sender is cut off for so many seconds.
    outage: Annotated[float, Field(ge=0, lt=1)] = 0.0
    outage_seconds: NotNegative = 60.0


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
    memory_limit_gb: Gigabytes = 1.0
    # Where evaluations are shown besides the results folder: public values only.
    trackers: Annotated[
        list[Literal["tensorboard", "mlflow", "wandb"]], BeforeValidator(_listed)
    ] = []
