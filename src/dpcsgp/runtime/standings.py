"""Where the processes of a run stand: each tells the store, and whoever shows it reads them all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from dpcsgp.config import Config
from dpcsgp.network.agreed import is_count
from dpcsgp.network.board import Board
from dpcsgp.runs.wording import Standing, first_metric, other_metrics
from dpcsgp.training import Progress, Run

PAUSE_SECONDS: Final = 0.5


@final
class Publisher:
    """Tells the store where this process stands, at most twice a second."""

    def __init__(self, board: Board, run: Run) -> None:
        self._board, self._run = board, run
        self._next = 0.0

    def __call__(self, progress: Progress) -> bool:
        """Publish after a step, unless it is too soon; say whether it was done."""
        schedule, polished = self._run.schedule, progress.rounds_polished
        # The last standing is always told: it is what the last line shows.
        last = progress.state.step == schedule.steps and polished == schedule.polish_rounds
        if time.monotonic() < self._next and not last:
            return False
        self._next = time.monotonic() + PAUSE_SECONDS
        metric, values = first_metric(self._run.recorder.rows[-1])
        row = self._run.recorder.rows[-1]
        facts = {
            "step": progress.state.step,
            "polished": polished,
            "metric": metric,
            "values": values,
            "others": {name: row[f"{name}_nodes"] for name in other_metrics(row)},
            "scored_at": row["step"],
            "epsilon": max(self._run.gradients.epsilon_spent()),
            "bytes_per_edge": self._run.network.traffic.bytes_per_edge,
        }
        self._board.put(f"progress/{self._board.rank}", facts)
        return True


def standing_of_all(board: Board, world_size: int, config: Config) -> Standing | None:
    """Return where the slowest process stands; None before all have told something valid."""
    notes = [board.peek(f"progress/{rank}", rank, _fault) for rank in range(world_size)]
    facts: list[dict[str, Any]] = [note.value for note in notes if note]
    if len(facts) < world_size:
        return None
    # The score is over all nodes, everything else is the slowest process's.
    slowest = min(facts, key=lambda fact: fact["step"] + fact["polished"])
    values = [value for fact in facts for value in fact["values"]]
    return Standing(
        step=slowest["step"],
        steps=config.algorithm.steps,
        polished=slowest["polished"],
        polish_rounds=config.algorithm.polish_rounds,
        metric=slowest["metric"] if values else "",
        score=sum(values) / len(values) if values else 0.0,
        scored_at=min(fact["scored_at"] for fact in facts),
        others=_means([fact["others"] for fact in facts]),
        epsilon=max(fact["epsilon"] for fact in facts),
        bytes_per_edge=slowest["bytes_per_edge"],
    )


def _means(parts: Sequence[Mapping[str, list[float]]]) -> tuple[tuple[str, float], ...]:
    """Return the mean over all nodes of every metric that all processes have."""
    found: list[tuple[str, float]] = []
    for name in parts[0]:
        values = [value for part in parts for value in part.get(name, [])]
        if values:
            found.append((name, sum(values) / len(values)))
    return tuple(found)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(number, float | int) for number in value)


def _fault(value: Any) -> str | None:
    """Say what was expected in the place of a process's progress."""
    right = (
        isinstance(value, dict)
        and is_count(value.get("step"))
        and is_count(value.get("polished"))
        and is_count(value.get("scored_at"))
        and isinstance(value.get("metric"), str)
        and _is_numbers(value.get("values"))
        and isinstance(value.get("others"), dict)
        and all(_is_numbers(values) for values in value["others"].values())
        and isinstance(value.get("epsilon"), float | int)
        and isinstance(value.get("bytes_per_edge"), float | int)
    )
    return None if right else "step, polished, metrics, values, scored_at, epsilon, bytes per edge"
