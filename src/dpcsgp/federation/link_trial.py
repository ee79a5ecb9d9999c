"""How soon a federation over thin links learns: small messages beside exact ones, in real time.

Ten parties, each a process of its own behind a `ThinLink`, learn MNIST with the demo's settings;
first with one message format, then with the other. Time begins with a party's first evaluation,
before the first step, and ends when the mean accuracy over all parties has reached that of the
demo. All parties share the cores of this machine, so steps take longer than on ten machines, which
is to the disadvantage of small messages.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

from dpcsgp.benchmarking import Measurements
from dpcsgp.benchmarking.stopwatch import Ratio, deciding_clock
from dpcsgp.errors import ConfigError, DpcsgpError
from dpcsgp.federation.cards import Promise
from dpcsgp.federation.demonstration import found_locally, free_addresses, start_party
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.run_pointers import latest_place
from dpcsgp.federation.thin_link import ThinLink

SPECS: Final = ("rot:1", "none")
TARGET: Final = 0.88  # the demo ends between 88 and 89 %
LIMIT: Final = 5.0
_LONGEST: Final = 1800.0
_DEMO_PROMISE: Final = Promise(6000, 0.5, 1e-4)


@final
@dataclass(frozen=True)
class LinkSettings:
    """The link, and what is learnt over it.

    Attributes:
        bits_per_second: of each party's link, in each direction.
        delay: seconds from one end of a link to the other.
        plan: settings of the run, without the message format.
        promise: of every party.
        target: mean accuracy that counts as learnt.
        num_parties: how many take part.
    """

    bits_per_second: float = 4e6
    delay: float = 0.05
    plan: tuple[tuple[str, dict[str, Any]], ...] = (
        ("task", {"name": "mnist", "model": "mlp:128"}),
        (
            "algorithm",
            {
                "steps": 30,
                "learning_rate": 6.0,
                "learning_rate_decay": 0.2,
                "momentum": 0.5,
                "polish_rounds": 3,
            },
        ),
        ("graph", {"name": "directed_exponential"}),
        ("privacy", {"expected_batch_size": 2048}),
        ("run", {"evaluate_every": 2, "checkpoint_every": 10}),
    )
    promise: Promise = _DEMO_PROMISE
    target: float = TARGET
    num_parties: int = 10

    @property
    def names(self) -> list[str]:
        """Names of the parties."""
        return [f"party-{node}" for node in range(self.num_parties)]


DEMO_LINK: Final = LinkSettings()
QUICK_LINK: Final = LinkSettings(
    plan=(
        ("task", {"name": "digits", "model": "mlp:64"}),
        ("algorithm", {"steps": 6, "learning_rate": 1.0}),
        ("graph", {"name": "directed_ring"}),
        ("run", {"evaluate_every": 1, "checkpoint_every": 10}),
    ),
    promise=Promise(500, 4.0, 1e-4),
    target=0.05,
    num_parties=3,
)


@final
@dataclass(frozen=True)
class LinkCurve:
    """Learning with one message format: mean accuracy over the parties against seconds."""

    spec: str
    seconds: tuple[float, ...]
    accuracy: tuple[float, ...]
    bytes_per_edge: int

    def reached(self, target: float) -> float | None:
        """Return the seconds until an accuracy was reached by learning; None: never."""
        # The first entry is the model before the first step.
        pairs = zip(self.seconds[1:], self.accuracy[1:], strict=True)
        return next((seconds for seconds, found in pairs if found >= target), None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def benchmark_link(quick: bool, say: Callable[[str], None]) -> Measurements:
    """Compare the time that small and exact messages take; `quick`: tiny, without a limit."""
    settings = QUICK_LINK if quick else DEMO_LINK
    with tempfile.TemporaryDirectory() as folder:
        curves = try_link(Path(folder), settings, say)
    outcome = Measurements(curves=[curve.as_dict() for curve in curves])
    small, exact = (curve.reached(settings.target) for curve in curves)
    if small is None or exact is None:
        best = [f"{curve.spec} {100 * max(curve.accuracy):.1f} %" for curve in curves]
        raise DpcsgpError(f"{100 * settings.target:g} % was not reached: {', '.join(best)}")
    outcome.ratios.append(
        Ratio.single(
            "link", f"seconds to {100 * settings.target:g} %, {SPECS[0]}", SPECS[1],
            exact / max(small, 1e-9), small, exact,
            clock="wall", limit=None if quick else LIMIT, at_least=True, note=link_title(quick)[1],
        )
    )  # fmt: skip
    if deciding_clock() == "cpu":
        outcome.notes.append(
            "the machine is busy with other work: steps take longer, which hurts small messages"
        )
    return outcome


def link_title(quick: bool) -> tuple[float, str]:
    """Return the accuracy that is to be reached, and the link in words."""
    settings = QUICK_LINK if quick else DEMO_LINK
    task = dict(settings.plan)["task"]
    link = f"{settings.bits_per_second / 1e6:g} Mbit/s, {1e3 * settings.delay:g} ms"
    return (
        settings.target,
        f"{settings.num_parties} parties, {task['name']}, {task['model']}, {link}",
    )


def try_link(root: Path, settings: LinkSettings, say: Callable[[str], None]) -> list[LinkCurve]:
    """Let a federation learn over thin links, once per message format.

    Args:
        root: a new folder; the parties' folders stay there.
        settings: the link and the run.
        say: told what happens, one sentence at a time.

    Raises:
        ConfigError: the folder has something in it.
        DpcsgpError: a party failed, or nothing was learnt in time.
    """
    if root.exists() and any(root.iterdir()):
        raise ConfigError(f"--out {root}: something is there already; choose another folder")
    curves = []
    for spec in SPECS:
        say(f"{settings.num_parties} parties learn over thin links, messages {spec}")
        curves.append(_learn(root / spec.replace(":", "-"), spec, settings))
    return curves


def _learn(root: Path, spec: str, settings: LinkSettings) -> LinkCurve:
    """Run all parties to their end behind links of their own."""
    plan = {**dict(settings.plan), "compression": {"spec": spec}}
    names, listening = settings.names, free_addresses(settings.num_parties)
    with ExitStack() as stack:
        links = [
            stack.enter_context(closing(ThinLink(each, settings.bits_per_second, settings.delay)))
            for each in listening
        ]
        addresses = [link.address for link in links]
        found_locally(root, names, plan, settings.promise, addresses)
        parties = []
        for name, own in zip(names, listening, strict=True):
            process = start_party(root, name, "--listen", own)
            stack.callback(process.wait)
            stack.callback(process.kill)
            parties.append(process)
        deadline = time.monotonic() + _LONGEST
        while any(process.poll() is None for process in parties):
            time.sleep(0.2)
            failed = [n for n, p in zip(names, parties, strict=True) if p.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline:
                raise DpcsgpError(
                    f"{', '.join(failed or names)} did not reach the end; see {root}/*.log"
                )
    return _curve(root, names, spec)


def _curve(root: Path, names: Sequence[str], spec: str) -> LinkCurve:
    """Read what all parties have measured; a row counts when the last of them has it."""
    folders = [latest_place(PartyFolder.open(root / name)) for name in names]
    tables = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in folders
    ]
    rows = list(zip(*tables, strict=True))
    begin = [row["seconds"] for row in rows[0]]
    seconds = [
        max(row["seconds"] - start for row, start in zip(each, begin, strict=True)) for each in rows
    ]
    accuracy = [statistics.fmean(row["accuracy_node_mean"] for row in each) for each in rows]
    summary = json.loads((folders[0] / "summary.json").read_bytes())
    return LinkCurve(spec, tuple(seconds), tuple(accuracy), summary["bytes_per_edge"])
