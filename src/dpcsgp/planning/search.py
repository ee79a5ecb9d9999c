"""Try batch sizes, numbers of steps and ways of exchanging, and choose a plan.

What fits the limits is kept and ranked.

For every plan: noise multiplier from the accountant, outlook (see `outlook`), exact bytes per edge,
memory, and seconds from timed parts. Limits are checked before the accountant is asked, so that it
is asked seldom. The front holds the plans that no other beats in shortfall, bytes and seconds at
once. The choice is the quickest plan whose shortfall is within two per cent of the smallest: batch
sizes that differ only in time are common, because full composition makes noise per step and number
of steps trade evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from dpcsgp.config import Config
from dpcsgp.errors import ConfigError
from dpcsgp.planning.diagnosis import sharing_of
from dpcsgp.planning.exchanges import Tell, Way, changed, ways_of_exchanging
from dpcsgp.planning.outlook import Outlook, foresee
from dpcsgp.planning.timing import (
    StepTimes,
    gradient_bytes,
    state_bytes,
    time_parts,
)
from dpcsgp.privacy import calibrate_noise
from dpcsgp.runs.design import RunDesign
from dpcsgp.runs.facts import Facts, declared_facts

BATCH_SHARES: Final = (1 / 24, 1 / 12, 1 / 6, 1 / 3, 2 / 3, 1.0)
STEPS: Final = (15, 20, 30, 40, 50, 60, 70, 100, 150, 200, 300, 400)
AS_GOOD: Final = 1.02  # shortfalls within this factor count as equal

LOW_FREQUENCIES: Final = "dct:10"
GRADIENT_HISTOGRAMS: Final = {"features": "hog:8", "model": "logistic"}
_LARGE_PICTURE: Final = 20  # pixels on the shorter side


class NothingFitsError(ConfigError):
    """No plan is within the limits."""


@final
@dataclass(frozen=True)
class Limits:
    """What a run may cost; None = no limit.

    Megabytes (10^6 bytes) over one edge, and minutes of training in one process.
    """

    megabytes: float | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("--max-megabytes", self.megabytes), ("--max-minutes", self.minutes)):
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} {value}: expected a number of at least 0")

    def allow(self, bytes_per_edge: int, seconds: float) -> bool:
        """Tell whether a plan fits."""
        fits = self.megabytes is None or bytes_per_edge <= 1e6 * self.megabytes
        return fits and (self.minutes is None or seconds <= 60.0 * self.minutes)


@final
@dataclass(frozen=True)
class Row:
    """One plan: its settings and what it is expected to cost and bring."""

    config: Config
    batch_size: int
    mixing_rate: float | None
    bytes_per_edge: int
    memory_bytes: int
    seconds: float
    outlook: Outlook
    on_front: bool = False

    @property
    def exchange(self) -> str:
        """Return the way of exchanging in short."""
        settings, method = self.config.algorithm, self.config.method
        spec = self.config.compression.spec
        seldom = f" /{settings.gossip_every}" if 1 < settings.gossip_every <= settings.steps else ""
        if not method.sends:
            return settings.name + seldom
        if method.blocks:
            return ("" if spec == "none" else "q-") + f"block:{settings.num_blocks}" + seldom
        return ("end " if method.only_at_end else "") + spec + seldom


@final
@dataclass(frozen=True)
class Plan:
    """All plans within the limits, best first, and the one to take."""

    rows: tuple[Row, ...]
    chosen: Row
    num_tried: int


def search(config: Config, facts: Facts, limits: Limits, tell: Tell = lambda text: None) -> Plan:
    """Return every plan within the limits.

    Graph, task, model, budget and clip norm are those of `config`.
    """
    _require_numbers(config)
    sizes = batch_sizes(min(facts.num_examples))
    # Ways and parts are timed once; every plan is then put together from them.
    ways = ways_of_exchanging(config, facts, sizes[len(sizes) // 2], STEPS[0], tell)
    tell("timing private gradients on random inputs")
    times = time_parts(ways[0].design)
    # Bytes and seconds are known without the accountant: drop what is too dear first.
    affordable = [
        sketch for way in ways for size in sizes for steps in STEPS
        if limits.allow((sketch := _sketch(way, size, steps, times)).bytes_per_edge, sketch.seconds)
    ]  # fmt: skip
    if not affordable:
        raise NothingFitsError(
            f"--max-megabytes {limits.megabytes}, --max-minutes {limits.minutes}: none of"
            f" {len(ways) * len(sizes) * len(STEPS)} plans fits; allow more, or choose a smaller "
            "model or other features"
        )
    tell(
        "asking the accountant about "
        f"{len({(s.batch_size, s.config.algorithm.steps) for s in affordable})} cases"
    )
    # Noise and outlook only for what is left.
    gradients = {size: _gradient_bytes(ways[0].design, size, times) for size in sizes}
    rows = mark_front([_complete(sketch, facts, gradients) for sketch in affordable])
    return Plan(rows, choose(rows), len(ways) * len(sizes) * len(STEPS))


def search_features(
    config: Config,
    num_examples: int | None,
    limits: Limits,
    tell: Tell = lambda text: None,
    free_model: bool = False,
) -> Plan:
    """Search with the settings' own features and with others that may do better.

    The others are `LOW_FREQUENCIES`, and `GRADIENT_HISTOGRAMS` if any model will do.

    All plans are ranked together, with the same R and G. Low frequencies are the same picture in
    fewer coordinates, so that is fair; for histograms with a linear model it is a guess that was
    right on MNIST (docs/stability.md). Convolutions need whole pictures, and small pictures have no
    frequencies to spare.
    """
    choices = [config]
    small = min(declared_facts(config).input_shape[-2:]) < _LARGE_PICTURE
    if not small and config.task.model.startswith(("mlp", "logistic")):
        choices.append(changed(config, task={"features": LOW_FREQUENCIES}))
        if free_model:
            choices.append(changed(config, task=GRADIENT_HISTOGRAMS))
    plans: list[Plan] = []
    for choice in choices:
        try:
            plans.append(search(choice, declared_facts(choice, num_examples), limits, tell))
        except NothingFitsError:
            # Nothing fits with these features: others may still fit.
            if choice is choices[-1] and not plans:
                raise
    rows = mark_front([row for plan in plans for row in plan.rows])
    return Plan(rows, choose(rows), sum(plan.num_tried for plan in plans))


def batch_sizes(num_examples: int) -> list[int]:
    """Return batch sizes as shares of a node's examples."""
    return sorted({max(1, round(share * num_examples)) for share in BATCH_SHARES})


def choose(rows: Sequence[Row]) -> Row:
    """Return the quickest row among those as good as the best.

    Of equally quick ones it is the one with fewer bytes.
    """
    # Among plans that count as equally good, time decides.
    best = min(row.outlook.shortfall for row in rows)
    as_good = [row for row in rows if row.outlook.shortfall <= AS_GOOD * best]
    return min(as_good, key=lambda row: (row.seconds, row.bytes_per_edge))


def mark_front(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Sort by shortfall and mark the rows that no other beats.

    A row beats another if it is at least as good in shortfall, bytes and seconds.
    """
    ordered = sorted(rows, key=_costs)
    front: list[Row] = []
    marked = []
    # Whoever beats a row comes before it, and if it is beaten itself, by somebody on the front.
    for row in ordered:
        beaten = any(
            all(a <= b for a, b in zip(_costs(other), _costs(row), strict=True)) for other in front
        )
        if not beaten:
            front.append(row)
        marked.append(replace(row, on_front=not beaten))
    return tuple(marked)


def _costs(row: Row) -> tuple[float, int, float]:
    return row.outlook.shortfall, row.bytes_per_edge, row.seconds


@final
@dataclass(frozen=True)
class _Sketch:
    """A plan before the accountant has been asked."""

    way: Way
    config: Config
    batch_size: int
    bytes_per_edge: int
    seconds: float


def _sketch(way: Way, batch_size: int, steps: int, times: StepTimes) -> _Sketch:
    config = changed(
        way.design.config, algorithm={"steps": steps}, privacy={"expected_batch_size": batch_size}
    )
    num_bytes = replace(way.design, config=config).bytes_per_edge()
    return _Sketch(
        way, config, batch_size, num_bytes, times.seconds(config, batch_size, way.seconds)
    )


def _complete(sketch: _Sketch, facts: Facts, gradients: dict[int, int]) -> Row:
    """Ask the accountant and add the outlook and the memory.

    The node with the fewest examples needs the most noise.
    """
    privacy, settings, design = sketch.config.privacy, sketch.config.algorithm, sketch.way.design
    assert isinstance(privacy.epsilon, float)
    assert isinstance(privacy.delta, float)
    # Replayed steps are paid for in advance, as in a run.
    noise = calibrate_noise(
        epsilon=privacy.epsilon, delta=privacy.delta, sampling=privacy.sampling,
        sampling_rate=sketch.batch_size / min(facts.num_examples),
        steps=settings.steps + privacy.replay_reserve,
    )  # fmt: skip
    outlook = foresee(
        settings,
        sketch.way.gossip,
        design.dim,
        noise,
        privacy.clip_norm,
        sketch.batch_size,
        sharing_of(sketch.config, design.topology, design.mixing_rate, design.dim),
    )
    return Row(
        config=changed(sketch.config, algorithm={"learning_rate": outlook.learning_rate}),
        batch_size=sketch.batch_size,
        mixing_rate=design.mixing_rate,
        bytes_per_edge=sketch.bytes_per_edge,
        memory_bytes=state_bytes(design) + gradients[sketch.batch_size],
        seconds=sketch.seconds,
        outlook=outlook,
    )


def _gradient_bytes(design: RunDesign, batch_size: int, times: StepTimes) -> int:
    """Return the memory of data and gradients with this batch size."""
    num_nodes = design.topology.num_nodes
    mechanism = replace(design.mechanism, expected_batch_sizes=(batch_size,) * num_nodes)
    return gradient_bytes(replace(design, mechanism=mechanism), times)


def _require_numbers(config: Config) -> None:
    for key in ("epsilon", "delta"):
        if isinstance(getattr(config.privacy, key), list):
            raise ConfigError(
                f"privacy.{key} is a list: a plan is made for one number; give the smallest of them"
            )
