"""The experiment of an audit: victims with or without a canary, and a tape of all their messages.

Each trial is a group of nodes that hear nobody else: a victim that may hold the canary, and a
listener without data; where pairs share noise, the victim, partners without the canary, and the
nodes that collude with the observer (see `colluders`). All trials run side by side through the
real training loop, mechanism, algorithm, compressor and frames. The model is linear with loss equal
to its output, so that an example's gradient is the example itself: the canary is ten clip norms
long (it is clipped to one), all other examples are zero. No data set and no model could be told
apart more easily.

Legend: N nodes (G per trial), T trials, E places for examples, D coordinates, B bytes of a frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from dpcsgp import graphs
from dpcsgp.algorithms import Algorithm
from dpcsgp.algorithms.optimizers import Momentum
from dpcsgp.auditing.canaries import CanaryPersons, CanaryTask, canary_axis, output_as_loss
from dpcsgp.auditing.colluders import group_size, trial_mechanism
from dpcsgp.compression import parse_compressor
from dpcsgp.config import Config, per_node
from dpcsgp.errors import ConfigError
from dpcsgp.graphs import best_mixing_rate
from dpcsgp.network import Traffic
from dpcsgp.privacy import (
    Budget,
    GaussianMechanism,
    PrivateGradients,
    ReleaseEvent,
    clipping_engine,
)
from dpcsgp.privacy.shared_noise import SharedNoise, calibrate_shared_noise
from dpcsgp.randomness import PrivateRandomness, PublicRandomness
from dpcsgp.records.metrics import Recorder
from dpcsgp.runs.calibration import build_mechanism
from dpcsgp.runs.design import build_algorithm
from dpcsgp.tasks import load_dataset
from dpcsgp.tasks.downloads.catalogue import PUBLISHED
from dpcsgp.training import Run, Schedule, train

DIM: Final = 16
MOST_STEPS: Final = 40
CANARY_NORMS: Final = 10.0  # length of the canary's gradient in clip norms
_MOST_EXAMPLES: Final = 512
_PRICE: Final = 0.01  # of rough messages, for the trial's own calibration


@final
@dataclass(frozen=True)
class Setting:
    """What is attacked: the claim of one node, and the parts that make its messages."""

    config: Config
    event: ReleaseEvent
    steps: int
    delta: float
    mechanism: GaussianMechanism  # of one victim
    algorithm: Algorithm[Any]
    dim: int
    stated_batch: tuple[int, int]  # expected batch size and number of examples of the run itself
    rows_per_unit: int = 1  # rows of a person, if persons are the unit of privacy

    @classmethod
    def of(cls, config: Config, sizes: Sequence[int] | None = None) -> Setting:
        """Take the first node's promise; long runs are audited over their first steps.

        `sizes` are the declared examples of all nodes where no catalogue has them; the first node
        with examples is then the one.
        """
        if not config.method.sends:
            raise ConfigError(
                f"algorithm.name = '{config.algorithm.name}': sends no messages, so there is no "
                "stream to attack; audit dp-csgp, which uses the same mechanism"
            )
        if config.privacy.noise == "none":
            raise ConfigError(
                "privacy.noise = 'none': nothing is promised, so there is nothing to audit"
            )
        # one victim with the noise and the rate of the first node, but fewer examples
        if sizes is None:
            sizes = [declared_examples(config)] * config.graph.num_nodes
        node = next(node for node, size in enumerate(sizes) if size)
        whole = build_mechanism(config, sizes)
        stated = (whole.expected_batch_sizes[node], sizes[node])
        batch, total = _smaller(*stated)
        mechanism = replace(
            whole,
            noise_multipliers=(whole.noise_multipliers[node],),
            expected_batch_sizes=(batch,),
            num_examples=(total,),
        )
        mechanism = _share(config, mechanism)
        dim = max(DIM, config.num_blocks)
        steps = min(config.algorithm.steps, MOST_STEPS)
        delta = per_node(config.privacy.delta, config.graph.num_nodes)[node]
        algorithm = _algorithm(config, dim)
        rows = max(1, config.privacy.max_rows_per_unit)
        event = mechanism.event(0)
        return cls(config, event, steps, delta, mechanism, algorithm, dim, stated, rows)

    @property
    def group(self) -> int:
        """Nodes of a trial; the first is the victim."""
        return group_size(self.mechanism.shared)

    @property
    def direction_D(self) -> Tensor:
        """Unit vector of the canary's gradient."""
        return canary_axis(self.dim)

    def private_streams(self, nodes: Sequence[int], shift: int) -> PrivateRandomness:
        """Return fresh private streams, or repeatable ones (`shift` apart) with `privacy.seed`."""
        seed = self.config.privacy.seed
        if seed is None:
            return PrivateRandomness.fresh(nodes)
        return PrivateRandomness.seeded((seed + shift) % 2**63, nodes)


def _share(config: Config, victim: GaussianMechanism) -> GaussianMechanism:
    """Give the victim the law of its trial, if pairs share noise: the same promise, fewer nodes."""
    colluders = config.privacy.max_colluders
    if colluders == "all":
        return victim
    size, batch = colluders + 2, victim.expected_batch_sizes[0]
    sensitivities = [victim.clip_norm / batch] * size
    needed = [victim.noise_multipliers[0]] * size
    own, shared = calibrate_shared_noise(needed, sensitivities, colluders, _PRICE)
    law = SharedNoise(
        own=own,
        shared=shared,
        factors=(1.0 / batch,) * size,
        clip_norm=victim.clip_norm,
        sampling_rates=(batch / victim.num_examples[0],) * size,
        sampling=victim.sampling,
        max_colluders=colluders,
    )
    return replace(victim, noise_multipliers=(law.event(0).noise_multiplier,), shared=law)


def declared_examples(config: Config) -> int:
    """Return how many examples a node declares under an even split."""
    name = config.task.name
    total = (
        PUBLISHED[name].shapes.train_labels[0]
        if name in PUBLISHED
        else len(load_dataset(name).train_labels)
    )
    return total // config.graph.num_nodes


def _smaller(batch: int, total: int) -> tuple[int, int]:
    """Return a batch size and fewer examples at the same rate, if there are such."""
    rate = Fraction(batch, total)
    near = rate.limit_denominator(_MOST_EXAMPLES)
    chosen = near if abs(near - rate) <= rate / 100 else rate
    return chosen.numerator, chosen.denominator


def _algorithm(config: Config, dim: int) -> Algorithm[Any]:
    compressor = parse_compressor(config.compression.spec)
    rate = config.algorithm.mixing_rate
    # In step: when messages come makes no difference to what they reveal.
    in_step = {"max_lag": 0, "late_gradients": "wait"}
    config = config.model_copy(update={"network": config.network.model_copy(update=in_step)})
    if not config.method.error_feedback:
        return build_algorithm(config, compressor, None)
    colluders = config.privacy.max_colluders
    group = graphs.complete(2 if colluders == "all" else colluders + 2)
    return build_algorithm(
        config, compressor, best_mixing_rate(group, compressor, dim) if rate == "auto" else rate
    )


@dataclass
class Groups:
    """A network of groups: a node hears all nodes of its group; everything sent is taped."""

    nodes: tuple[int, ...]
    size: int = 2
    tape: list[Tensor] = field(default_factory=list)
    key: bytes | None = None

    def __post_init__(self) -> None:
        self.traffic = Traffic((1,) * len(self.nodes), bytes_sent=[0] * len(self.nodes))

    @property
    def senders(self) -> tuple[int, ...]:
        """All nodes are heard here."""
        return self.nodes

    @property
    def own_rows(self) -> Sequence[int]:
        """All senders are hosted here."""
        return range(len(self.nodes))

    def exchange(self, frames_NB: Tensor) -> Tensor:
        """Tape the frames, then deliver them."""
        self.tape.append(frames_NB.clone())
        return frames_NB

    def mix(self, values_SD: Tensor, onto_ND: Tensor | None = None) -> Tensor:
        """Add the average of a group to all of its nodes."""
        groups_TGD = values_SD.reshape(-1, self.size, values_SD.shape[1]).to(torch.float64)
        mean_ND = groups_TGD.mean(1).repeat_interleave(self.size, 0)
        return mean_ND if onto_ND is None else onto_ND.add_(mean_ND)

    def gather_values(self, name: str, value: Any) -> list[Any]:
        """Return the only process's value."""
        return [value]


@final
class CountedReleases:
    """A release log in memory: an audit releases nothing about anybody."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, ReleaseEvent]] = Counter()

    def record(self, step: int, attempt: int, events_by_node: Mapping[int, ReleaseEvent]) -> None:
        """Count one release per node."""
        self.counts.update(events_by_node.items())

    def releases(self, node: int) -> list[tuple[ReleaseEvent, int]]:
        """Return each kind of release of a node with its count."""
        return [(event, count) for (owner, event), count in self.counts.items() if owner == node]

    def has(self, node: int, step: int, attempt: int) -> bool:
        """An audit keeps no releases, so nobody asks."""
        return False

    def heads(self) -> dict[str, list[Any]]:
        """Return nothing: there are no files to be compared with a checkpoint."""
        return {}

    def check_against(self, heads: Mapping[str, Any]) -> None:
        """An audit starts anew and never resumes."""

    def close(self) -> None:
        """There is nothing to close."""


def build_run(
    setting: Setting,
    inside: Tensor,
    private: PrivateRandomness,
    public: PublicRandomness,
    fault: str | None = None,
) -> Run:
    """Return a run with one group per entry of `inside` (bool: this victim holds the canary).

    `fault` is one of `PAIR_FAULTS`; other faults are planted afterwards.
    """
    nodes = tuple(range(setting.group * len(inside)))
    length = CANARY_NORMS * setting.mechanism.clip_norm
    # Under "replace one" the neighbour holds the opposite canary, under "add or remove" none.
    other = -1.0 if setting.event.sampling == "uniform" else 0.0
    canary_ND = torch.zeros(len(nodes), setting.dim)
    canary_ND[:: setting.group] = (
        length * setting.direction_D * torch.where(inside, 1.0, other)[:, None]
    )
    mechanism = _of_all(setting.mechanism, len(inside), private, fault)
    module = nn.Sequential(nn.Linear(setting.dim, 1, bias=False))
    task = CanaryTask(module, canary_ND, mechanism.num_examples)
    rows = setting.rows_per_unit
    source = task if rows == 1 else CanaryPersons(task, rows)
    gradients = PrivateGradients(
        source=source,
        engine=clipping_engine(module, output_as_loss, rows_per_unit=rows),
        mechanism=mechanism,
        budget=Budget.unlimited(nodes),
        ledger=CountedReleases(),
        random=private,
        nodes=nodes,
    )
    algorithm, settings = setting.algorithm, setting.config.algorithm
    return Run(
        task=task,
        gradients=gradients.checked(torch.zeros(setting.dim)),
        algorithm=algorithm,
        polish=algorithm,
        network=Groups(nodes, setting.group),
        public=public,
        recorder=Recorder(None),
        schedule=Schedule(
            setting.steps,
            settings.gossip_every,
            settings.polish_rounds,
            evaluate_every=0,
        ),
        anchor_D=torch.zeros(setting.dim),
        # Adam and weight decay are post-processing of the same releases: the attack reads SGD's.
        optimizer=Momentum(settings.momentum),
    )


def _of_all(
    victim: GaussianMechanism, trials: int, private: PrivateRandomness, fault: str | None
) -> GaussianMechanism:
    """Return the mechanism of all nodes of all trials."""
    if victim.shared is not None:
        return trial_mechanism(victim, private, fault)
    # victims and listeners take turns; a listener has no examples and adds no noise
    return replace(
        victim,
        noise_multipliers=(victim.noise_multipliers[0], 0.0) * trials,
        expected_batch_sizes=(victim.expected_batch_sizes[0], 1) * trials,
        num_examples=(victim.num_examples[0], 0) * trials,
    )


def messages(run: Run) -> list[Tensor]:
    """Train, and return every frame that left a node, round by round (N, B)."""
    train(run)
    assert isinstance(run.network, Groups)
    return run.network.tape
