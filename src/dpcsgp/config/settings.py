"""All settings of a run in one model: the sections, and the conditions between them."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from pydantic import model_validator

from dpcsgp.algorithms.lag_settings import lag_fault
from dpcsgp.algorithms.methods import Method, find_method
from dpcsgp.config.sections import (
    AlgorithmConfig,
    CompressionConfig,
    GraphConfig,
    NetworkConfig,
    PrivacyConfig,
    RunConfig,
    Section,
    SimulationConfig,
    TaskConfig,
)

# Settings that version 0.1.0 did not have.
_LATER_KEYS: Final = (
    "algorithm.learning_rate_schedule",
    "algorithm.warmup_steps",
    "algorithm.optimizer",
    "algorithm.adam_betas",
    "algorithm.adam_epsilon",
    "algorithm.weight_decay",
    "network.late_gradients",
    "network.max_lag",
    "privacy.max_colluders",
    "privacy.max_rows_per_unit",
    "run.max_rows_per_pass",
    "run.memory_limit_gb",
    "task.class_weights",
)
# Settings that change nothing of what is trained: a resumed run may have others.
_LOCAL_KEYS: Final = {"run": ("trackers",), "network": ("patience",)}


class Config(Section):
    """All settings of a run; the defaults are the demo."""

    task: TaskConfig = TaskConfig()
    graph: GraphConfig = GraphConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    compression: CompressionConfig = CompressionConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    network: NetworkConfig = NetworkConfig()
    run: RunConfig = RunConfig()
    simulation: SimulationConfig = SimulationConfig()

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
        return self

    @model_validator(mode="after")
    def _check_method(self) -> Config:
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

    @model_validator(mode="after")
    def _check_lag(self) -> Config:
        if fault := lag_fault(self):
            raise ValueError(fault)
        if missing := [n for n in self.simulation.slow_nodes if n >= self.graph.num_nodes]:
            raise ValueError(
                f"simulation.slow_nodes = {self.simulation.slow_nodes}: there is no node "
                f"{missing[0]}, nodes are 0 to {self.graph.num_nodes - 1}"
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
        if self.simulation == SimulationConfig():
            unset["simulation"] = set(SimulationConfig.model_fields)
        excluded: dict[str, Any] = {
            section: keys == set(type(getattr(self, section)).model_fields) or keys
            for section, keys in unset.items()
        }
        text = self.model_dump_json(exclude=excluded)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def per_node(value: Any, num_nodes: int) -> tuple[Any, ...]:
    """Spread a number over all nodes; a list stays as it is."""
    return tuple(value) if isinstance(value, list) else (value,) * num_nodes
