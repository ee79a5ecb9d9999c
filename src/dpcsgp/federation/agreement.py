"""What a roster would mean, computed: is gossip stable, do the promises pay, what does it cost?

Everybody who looks at a roster or approves it computes this again. The maker is not trusted.
"""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn

from dpcsgp.config import Config
from dpcsgp.errors import ConfigError, UnstableError
from dpcsgp.federation.data_shape import DataShape
from dpcsgp.federation.roster import Roster
from dpcsgp.parameters import ParameterLayout
from dpcsgp.planning.diagnosis import Diagnosis, diagnose
from dpcsgp.privacy import GaussianMechanism, ReleaseEvent, composed_epsilon
from dpcsgp.privacy.accounting import epsilon_against
from dpcsgp.randomness import torch_seed
from dpcsgp.runs.calibration import build_mechanism
from dpcsgp.runs.design import ALLOW_DIVERGENCE, RunDesign, design_run
from dpcsgp.runs.facts import declared_facts
from dpcsgp.runs.user_settings import described_model
from dpcsgp.tasks import build_model

MOST_COORDINATES: Final = 5 * 10**8  # 2 GB of float32
_LONGEST_SPEC: Final = 200  # characters of task.model
OWN_MODEL: Final = "own:"  # begins the description of a model that is not the package's
MODEL_BYTES: Final = 4  # of one coordinate of a model that is handed over
_ROUNDING: Final = 1e-9  # relative


@final
@dataclass(frozen=True)
class PartyCost:
    """What one party promises and sends, and who is next to it."""

    name: str
    address: str | None
    num_examples: int
    epsilon: float
    delta: float
    epsilon_of_plan: float  # verified, for all steps of all versions; at most epsilon
    epsilon_all_collude: float  # the same if all others tell all they know
    epsilon_before: float  # of earlier versions alone
    noise_multiplier: float
    expected_batch_size: int
    heard_by: tuple[str, ...]
    hears: tuple[str, ...]
    bytes_sent: int
    bytes_received: int


@final
@dataclass(frozen=True)
class Agreement:
    """A roster and what it means.

    Attributes:
        roster: as it was read.
        design: the parts of the run, checked.
        doctor: whether gossip contracts, and why.
        costs: one entry per party, by node.
    """

    roster: Roster
    design: RunDesign
    doctor: Diagnosis
    costs: tuple[PartyCost, ...]

    @property
    def bytes_per_edge(self) -> int:
        """Bytes that all rounds of this version put on one edge."""
        return self.design.bytes_per_edge() + handed_over_bytes(self.roster, self.design)

    def answer(self) -> dict[str, Any]:
        """Return all findings under the names that `--json` prints."""
        roster, algorithm = self.roster, self.roster.config.algorithm
        return {
            "fingerprint": roster.fingerprint,
            "words": roster.words,
            "id": roster.id,
            "version": roster.version,
            "ends": roster.ends.isoformat(),
            "expired": roster.expired(),
            "task": roster.config.task.name,
            "model": roster.config.task.model,
            "coordinates": self.design.dim,
            **roster.data.content(),
            "unit": roster.facts.unit,
            "algorithm": algorithm.name,
            "compression": roster.config.compression.spec,
            "max_colluders": roster.config.privacy.max_colluders,
            "steps": algorithm.steps,
            "polish_rounds": algorithm.polish_rounds,
            "graph": roster.topology.name,
            "edges": roster.content()["edges"],
            "history": [each.content() for each in roster.history],
            "bytes_per_edge": self.bytes_per_edge,
            "healthy": self.doctor.healthy,
            "verdict": self.doctor.verdict,
            "parties": [vars(cost) for cost in self.costs],
        }


def refuse_unsupported(roster: Roster) -> None:
    """Refuse settings for which parties would have to agree on more than a roster holds.

    Raises:
        ConfigError: with the setting and a remedy.
    """
    algorithm = roster.config.algorithm
    if roster.config.method.blocks and algorithm.block_order == "random":
        raise ConfigError(
            'algorithm.block_order = "random": parties need to know the size of every message '
            'beforehand; have a roster made with algorithm.block_order = "round-robin"'
        )


def examine(roster: Roster, model: nn.Module | None = None) -> Agreement:
    """Compute what a roster means.

    Args:
        roster: the roster.
        model: at its start, where it is not one of the package's.

    Raises:
        ConfigError: it cannot be run, gossip would diverge, a promise cannot pay for the plan, or
            the initial model is not the one whose digest the roster holds.
    """
    refuse_unsupported(roster)
    if roster.config.task.name != "own" and roster.data != declared_shape(roster.config):
        raise ConfigError(
            f"data: {roster.data.content()} is not the shape of task.name = "
            f"{roster.config.task.name!r}; the roster was changed by hand: ask for it again"
        )
    # Budgets first, one by one: the refusal then names the party, not a number of a node.
    nodes = range(len(roster.parties))
    for node in nodes:
        _cost_of_plan(roster, node)
    module = initial_module(roster.config, roster.data, model)
    if model_digest(module) != roster.initial_model:
        raise ConfigError(
            f"initial_model = {roster.initial_model[:16]}...: here the settings give the model "
            f"{model_digest(module)[:16]}...; use the same releases of dpcsgp and torch as the "
            "maker of the roster, or have it made anew"
        )
    design = _design(roster, module)
    smallest = min(roster.facts.num_examples)
    doctor = diagnose(roster.config, design.dim, smallest, roster.topology)
    # What counts in the end is the noise of the design, part of which pairs may share.
    costs = tuple(
        _cost(roster, design, node, _cost_of_plan(roster, node, design.mechanism)) for node in nodes
    )
    return Agreement(roster, design, doctor, costs)


def handed_over_bytes(roster: Roster, design: RunDesign) -> int:
    """Return the size of a model that everybody hands over before the first round; 0: nobody."""
    return MODEL_BYTES * design.dim if roster.hands_over else 0


def declared_shape(config: Config) -> DataShape:
    """Return the shape of a built-in data set, features applied."""
    facts = declared_facts(config, num_examples=1)
    return DataShape(facts.input_shape, facts.num_classes)


def _design(roster: Roster, module: nn.Module) -> RunDesign:
    try:
        return design_run(
            roster.config,
            roster.facts,
            module=module,
            topology=roster.topology,
            earlier=roster.earlier,
        )
    except UnstableError as error:
        # One party alone cannot allow divergence to all.
        raise UnstableError(str(error).removesuffix(ALLOW_DIVERGENCE)) from None


def initial_module(config: Config, data: DataShape, model: nn.Module | None = None) -> nn.Module:
    """Build the model that all parties start from, under the public seed.

    Args:
        config: settings, which name the model.
        data: shape of the examples.
        model: at its start, where it is not one of the package's; a copy is returned.
    """
    spec = config.task.model
    if model is not None or spec.startswith(OWN_MODEL):
        return _own_module(spec, model)
    if len(spec) > _LONGEST_SPEC:
        raise ConfigError(
            f"task.model = {spec[:40]!r}...: expected at most {_LONGEST_SPEC} letters"
        )
    # Sizes first, without memory: a hostile roster must not fill it.
    try:
        with torch.device("meta"):
            shell = build_model(spec, data.input_shape, data.num_outputs)
        dim = ParameterLayout.of(shell).dim
    except (RuntimeError, TypeError, OverflowError):
        dim = MOST_COORDINATES + 1
    if dim > MOST_COORDINATES:
        raise ConfigError(
            f"task.model = {spec!r} for inputs {list(data.input_shape)}: more than "
            f"{MOST_COORDINATES:,} coordinates; choose a smaller model"
        )
    with torch_seed(config.run.seed, "initial model"):
        return build_model(spec, data.input_shape, data.num_outputs)


def _own_module(spec: str, model: nn.Module | None) -> nn.Module:
    """Return a copy of the parties' own model, if it is the one that the settings name."""
    if model is None:
        raise ConfigError(
            f"task.model = {spec[:80]!r}: this model lives in the parties' Python; look at the "
            "roster with dpcsgp.federation.agreement.examine(roster, model), and run it with "
            "dpcsgp.take_part(roster, party, model=...)"
        )
    if described_model(model) != spec:
        raise ConfigError(
            f"model: the roster names {spec[:80]!r}, the given one is {described_model(model)!r}; "
            "all parties need the same class, shapes and frozen values"
        )
    return copy.deepcopy(model).float()


def model_digest(module: nn.Module) -> str:
    """Return a digest of a model's trained parameters: names, shapes and values."""
    layout = ParameterLayout.of(module)
    shapes = [list(shape) for shape in layout.shapes]
    digest = hashlib.sha256(b"dpcsgp initial model\n")
    digest.update(json.dumps([list(layout.names), shapes]).encode())
    digest.update(layout.flatten(module).numpy().astype("<f4").tobytes())
    return digest.hexdigest()


def _cost_of_plan(roster: Roster, node: int, mechanism: GaussianMechanism | None = None) -> float:
    """Return the verified eps of a party's releases, or refuse a plan that breaks its promise.

    Args:
        roster: the roster.
        node: of the party.
        mechanism: of all nodes; None: this party's own noise is calibrated, and nobody else's.
    """
    config, card = roster.config, roster.parties[node]
    sizes = roster.facts.num_examples
    # Nodes without examples are not calibrated.
    alone = tuple(size if other == node else 0 for other, size in enumerate(sizes))
    try:
        event = (mechanism or build_mechanism(config, alone, roster.earlier)).event(node)
        spent = composed_epsilon(_releases(roster, node, event), card.promised.delta)
    except (ConfigError, OverflowError) as error:
        raise ConfigError(f"party {card.name}: {error}") from None
    if spent > card.promised.epsilon * (1 + _ROUNDING):
        raise ConfigError(
            f"party {card.name}: its card promises eps {card.promised.epsilon:g}, but the plan "
            f'costs {spent:.4g} with privacy.noise = "{config.privacy.noise}"; set privacy.noise = '
            '"calibrated"'
        )
    return spent


def _releases(roster: Roster, node: int, event: ReleaseEvent) -> list[tuple[ReleaseEvent, int]]:
    """Return the releases that a party's promise has to pay for, of earlier versions too."""
    before, config = roster.earlier, roster.config
    made = before.releases[node] if before.releases else ()
    return [*made, (event, config.algorithm.steps - before.steps + config.privacy.replay_reserve)]


def _cost(roster: Roster, design: RunDesign, node: int, epsilon: float) -> PartyCost:
    """Put together what one party promises and sends."""
    card, mechanism = roster.parties[node], design.mechanism
    before = roster.earlier.releases
    bytes_per_edge = design.bytes_per_edge() + handed_over_bytes(roster, design)
    receivers, senders = (
        tuple(roster.parties[other].name for other in neighbours if other != node)
        for neighbours in (
            roster.topology.receivers_from(node),
            roster.topology.senders_to(node),
        )
    )
    return PartyCost(
        name=card.name,
        address=card.address,
        **vars(card.promised),
        epsilon_of_plan=epsilon,
        epsilon_all_collude=epsilon_against(
            _releases(roster, node, mechanism.event(node)), card.promised.delta, "all"
        ),
        epsilon_before=composed_epsilon(before[node] if before else (), card.promised.delta),
        noise_multiplier=mechanism.noise_multipliers[node],
        expected_batch_size=mechanism.expected_batch_sizes[node],
        heard_by=receivers,
        hears=senders,
        bytes_sent=len(receivers) * bytes_per_edge,
        bytes_received=len(senders) * bytes_per_edge,
    )
