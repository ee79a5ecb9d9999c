"""Whole parties in processes of their own: folders, consent, data, `run_party`; to be killed."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from drawn_streams import note_draws
from hosts import enter
from parties import QUICK, free_address

from dpcsgp.config import Config, change_config
from dpcsgp.federation import party_run
from dpcsgp.federation import transport_messages as messages
from dpcsgp.federation.cards import Promise
from dpcsgp.federation.consent import approve
from dpcsgp.federation.founding import Plan, found
from dpcsgp.federation.lagged_network import LaggedPartyNetwork
from dpcsgp.federation.party_data import NO_EXAMPLES, OwnExamples
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.party_network import PartyNetwork
from dpcsgp.federation.party_request import PartyRequest, as_leaver
from dpcsgp.federation.party_run import prepare_party, results_folder, run_party
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.run_place import finished_summary
from dpcsgp.federation.run_pointers import latest_place
from dpcsgp.federation.transport_grpc import GrpcLine
from dpcsgp.privacy import PrivateGradients, read_ledgers, releases_by_node
from dpcsgp.runs.folder import ResultsFolder
from dpcsgp.runtime.requests import BuiltinRequest
from dpcsgp.runtime.session import Hooks, run_simulated

FORKS = multiprocessing.get_context("forkserver")
# Modules of the package: the fork server does not know this folder.
FORKS.set_forkserver_preload(["dpcsgp.federation.party_run", "sklearn.datasets"])
SEED = 5
DIGITS = """
[task]
name = "digits"
model = "logistic"

[algorithm]
steps = 12
polish_rounds = 2
average_last = 3

[run]
checkpoint_every = 4

[graph]
name = "directed_ring"
"""


def make_federation(
    root: Path,
    num_parties: int,
    plan: str = DIGITS,
    examples: int = 0,
    addresses: Sequence[str | None] = (),
) -> Roster:
    """Make parties, on loopback unless told, a roster `federation.toml`, and all consents."""
    addresses = addresses or [free_address() for _ in range(num_parties)]
    folders = make_folders(root, addresses, examples or 1500 // num_parties)
    (root / "plan.toml").write_text(plan, encoding="utf-8")
    cards = [folder.card for folder in folders]
    roster = found(Plan.load(root / "plan.toml"), cards).roster
    (root / "federation.toml").write_text(roster.text(), encoding="utf-8")
    for folder in folders:
        approve(folder, roster)
    return roster


def make_folders(root: Path, addresses: Sequence[str | None], examples: int) -> list[PartyFolder]:
    """Make the parties' own folders, or open those that are there."""
    promise = Promise(examples, 4.0, 1e-4)
    return [
        PartyFolder.open(root / f"lab-{node}")
        if (root / f"lab-{node}").exists()
        else PartyFolder.create(root / f"lab-{node}", f"lab-{node}", address, promise)
        for node, address in enumerate(addresses)
    ]


def request_of(
    root: Path, node: int, examples: OwnExamples = NO_EXAMPLES, seed: int | None = SEED
) -> PartyRequest:
    party = PartyFolder.open(root / f"lab-{node}")
    return PartyRequest(party, Roster.load(root / "federation.toml"), examples, seed=seed)


def releases_in(folder: Path) -> int:
    """Count a party's releases by its ledger: its status may be a second old, or of another start.

    After six more than in a backup the others surely hold frames that the backup does not know.
    """
    files = folder.glob("runs/*/ledger/node-*.jsonl")
    return sum(file.read_text().count('"kind":"release"') for file in files)


def results_of(root: Path, node: int) -> Path:
    return latest_place(PartyFolder.open(root / f"lab-{node}"))


def unblock_signals() -> None:
    """Let signals reach this process: a fork server that `launch` has started holds them back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


def take_part(
    root: str,
    node: int,
    seed: int | None,
    pause: float,
    host: str | None,
    quick: bool,
    slow: float = 0.0,
) -> None:
    """Be one party until the end; the exit code is that of the command.

    Every gradient takes `slow` seconds more; if negative, exponential times of that mean.
    """
    unblock_signals()
    if host is not None:
        enter(host)  # before any thread is started
    torch.set_num_threads(1)
    if quick:
        quicken()
    slow_down(slow, node)
    tap_lines(Path(root) / f"tap-{node}")
    note_draws(Path(root) / f"drawn-{node}")
    request = request_of(Path(root), node, seed=seed)
    request = as_leaver(request)
    prepared, results = prepare_party(request), results_folder(request)
    if finished_summary(results, request.roster) is None:
        slowly = Hooks(on_start=lambda folder: lambda row: time.sleep(pause))
        os._exit(run_party(prepared, results, slowly).progress.ending.exit_code)


def tap_lines(path: Path) -> None:
    """Note every piece of a frame that is handed to TLS: its round, start, digest and a sample."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    send, under_way = GrpcLine.send, {}

    async def noted(self: GrpcLine, message: bytes, seconds: float) -> None:
        kind, piece = message[:1], memoryview(message)[1:]
        if kind == b"f":
            head, piece = messages.parsed_frame(message)
            under_way[self] = (head.round, 0)
        if kind in (b"f", b"p"):
            round_, start = under_way[self]
            under_way[self] = (round_, start + len(piece))
            sample = piece[len(piece) // 2 :][:24].hex()
            line = [round_, start, hashlib.blake2b(piece).hexdigest(), sample]
            os.write(file, json.dumps(line).encode() + b"\n")
        await send(self, message, seconds)

    GrpcLine.send = noted


def slow_down(seconds: float, node: int) -> None:
    """Let every gradient sleep first: so long, or exponentially so long on average."""
    released, chance = PrivateGradients._released, random.Random(node)

    def slowly(self: PrivateGradients, *words: Any) -> torch.Tensor:
        time.sleep(seconds if seconds >= 0 else chance.expovariate(-1 / seconds))
        return released(self, *words)

    PrivateGradients._released = slowly  # type: ignore[method-assign]


def quicken() -> None:
    """Give lines short limits, so that tests need not wait."""

    class Quick(PartyNetwork):
        def __init__(self, *words: Any, **more: Any) -> None:
            super().__init__(*words, timing=QUICK, **more)

    class QuickLagged(LaggedPartyNetwork):
        def __init__(self, *words: Any, **more: Any) -> None:
            super().__init__(*words, timing=QUICK, **more)

    party_run.PartyNetwork = Quick  # type: ignore[misc]
    party_run.LaggedPartyNetwork = QuickLagged  # type: ignore[misc]


@dataclass
class Running:
    """Processes of the parties of one federation."""

    root: Path
    num_parties: int
    seed: int | None = SEED
    pause: float = 0.0
    hosts: Sequence[str] = ()  # network namespaces, one per party
    quick: bool = True  # short limits of lines
    slow: dict[int, float] = field(default_factory=dict)
    processes: dict[int, Any] = field(default_factory=dict)

    def start(self, *nodes: int) -> None:
        for node in nodes or range(self.num_parties):
            host = self.hosts[node] if self.hosts else None
            words = (str(self.root), node, self.seed, self.pause, host, self.quick)
            words = (*words, self.slow.get(node, 0.0))
            self.processes[node] = FORKS.Process(target=take_part, args=words)
            self.processes[node].start()

    def kill(self, node: int) -> bool:
        """Kill -9; say whether it was still running."""
        running = self.processes[node].exitcode is None
        self.processes[node].kill()
        self.processes[node].join()
        return running

    def kill_at_random(
        self, kills: int, chance: random.Random, pauses: tuple[float, float] = (0.3, 1.2)
    ) -> int:
        """Kill and start again until there were so many kills or nobody is left."""
        done = 0
        while done < kills:
            time.sleep(chance.uniform(*pauses))
            left = [node for node, each in self.processes.items() if each.exitcode is None]
            if not left:
                break
            node = chance.choice(left)
            if self.kill(node):
                done += 1
                self.start(node)
        return done

    def wait(self, seconds: float = 90.0, codes: Sequence[int] = (0,)) -> None:
        deadline = time.monotonic() + seconds
        for node, process in self.processes.items():
            process.join(max(deadline - time.monotonic(), 0.01))
            assert process.exitcode in codes, (node, process.exitcode, self.status(node))

    def status(self, node: int) -> dict[str, Any]:
        """Return what a party has told last; nothing before its first start."""
        found = list((self.root / f"lab-{node}").glob("runs/*/status.json"))
        return json.loads(found[0].read_bytes()) if found else {}

    def processor_seconds(self, node: int) -> float:
        """Return the processor time that a party has used since its start (Linux)."""
        words = Path(f"/proc/{self.processes[node].pid}/stat").read_text().rpartition(")")[2]
        return sum(map(int, words.split()[11:13])) / os.sysconf("SC_CLK_TCK")

    def releases(self, node: int) -> int:
        return releases_in(self.root / f"lab-{node}")

    def until_released(self, node: int, count: int, seconds: float = 60.0) -> None:
        """Wait until a party has made so many releases."""
        deadline = time.monotonic() + seconds
        while self.releases(node) < count:
            assert time.monotonic() < deadline, self.status(node)
            time.sleep(0.05)

    def until_step(self, node: int, step: int, seconds: float = 60.0) -> None:
        """Wait until a party says that it has made so many steps."""
        deadline = time.monotonic() + seconds
        while self.status(node).get("step", -1) < step:
            assert time.monotonic() < deadline, self.status(node)
            time.sleep(0.1)


@contextmanager
def running(root: Path, num_parties: int, **options: Any) -> Iterator[Running]:
    """Run parties inside of a block; none outlives it."""
    parties = Running(root, num_parties, **options)
    try:
        yield parties
    finally:
        for process in parties.processes.values():
            process.kill()
            process.join()


@dataclass(frozen=True)
class Twin:
    """What `dpcsgp run` makes of the same settings and seeds."""

    models_ND: torch.Tensor
    releases: dict[int, list[tuple[Any, int]]]
    summary: dict[str, Any]


def simulate(root: Path, config: Config) -> Twin:
    """Do what `dpcsgp run` does with the same settings."""
    if config.graph.edges_file:
        edges = Roster.load(root / "federation.toml").edges
        lines = [f"{sender} {receiver}" for sender, receiver in edges]
        (root / "listed.txt").write_text("\n".join(lines), encoding="utf-8")
        config = change_config(config, {"graph.edges_file": str(root / "listed.txt")})
    settings = ResultsFolder.create(root / "settings", config).path / "config.toml"
    outcome = run_simulated(BuiltinRequest(settings, out=root / "simulated"))
    models_ND = load_file(outcome.folder / "model.safetensors")["node_models"]
    releases = releases_by_node(read_ledgers(outcome.folder / "ledger"))
    return Twin(models_ND, releases, outcome.summary)


def check_twin(root: Path, roster: Roster) -> None:
    """Compare models, ledgers and bytes of all parties with the simulator's."""
    twin = simulate(root, change_config(roster.config, {"privacy.seed": SEED}))
    for node in range(len(roster.parties)):
        folder = results_of(root, node)
        tensors = load_file(folder / "model.safetensors")
        assert tensors["nodes"].tolist() == [node]
        assert torch.equal(tensors["node_models"][0], twin.models_ND[node]), node
        mine = releases_by_node(read_ledgers(folder / "ledger"))
        assert mine == {node: twin.releases[node]}
        summary = json.loads((folder / "summary.json").read_bytes())
        assert summary["bytes_per_edge"] == twin.summary["bytes_per_edge"]
        assert summary["stopped_because"] == "completed" and summary["handed_over"]
