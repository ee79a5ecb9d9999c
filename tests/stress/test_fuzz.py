"""Damaged, forged and foreign input: only the documented errors come out, nothing else changes.

`make test` makes 5,000 mutations, `make stress` 110,000; the same seed gives the same mutations
everywhere."""

from __future__ import annotations

import contextlib
import gzip
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from mutations import mutations

from dpcsgp.algorithms import DPCSGP
from dpcsgp.compression import frames, parse_compressor
from dpcsgp.config import Config, load_config, to_toml
from dpcsgp.errors import CheckpointError, ConfigError, DataError, LedgerError, WireError
from dpcsgp.graphs import Topology, complete
from dpcsgp.graphs.builders import from_edges_file
from dpcsgp.network import Simulator
from dpcsgp.privacy.events import ReleaseEvent
from dpcsgp.privacy.ledger import Ledger, LedgerHeader, read_ledger
from dpcsgp.randomness import PublicRandomness
from dpcsgp.records.checkpoint import Checkpoint, CheckpointFolder
from dpcsgp.runs.build import build_run
from dpcsgp.runs.data import load_builtin_data
from dpcsgp.runs.design import design_run
from dpcsgp.runs.folder import ResultsFolder, open_config
from dpcsgp.tasks.downloads.catalogue import Published
from dpcsgp.tasks.downloads.datasets import fetch_published
from dpcsgp.tasks.downloads.formats import IDX_NAMES, Parts, decode_idx, digest
from dpcsgp.training import train

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
EVENT = ReleaseEvent("poisson", 1 / 3, 4.0)


def trials(in_ci: int) -> pytest.MarkDecorator:
    """Run a test with `in_ci` mutations under `slow`, and 22 times as many under `stress`."""
    counts = [
        pytest.param(in_ci, marks=pytest.mark.slow),
        pytest.param(22 * in_ci, marks=pytest.mark.stress),
    ]
    return pytest.mark.parametrize("count", counts)


def make_frames(key: bytes | None, round_: int = 7, payload: int = 40) -> torch.Tensor:
    values = torch.arange(2 * payload, dtype=torch.uint8).view(2, payload)
    return frames.join(
        [4, 9], round_, torch.tensor([[0.75], [1.25]], dtype=torch.float64), values, key
    )


@trials(2000)
@pytest.mark.parametrize("key", [None, KEY], ids=["unkeyed", "keyed"])
def test_no_mutated_frame_is_accepted(count: int, key: bytes | None) -> None:
    good = [bytes(row.numpy()) for row in make_frames(key)]
    foreign = [
        bytes(row.numpy())
        for row in torch.cat([make_frames(OTHER_KEY), make_frames(key, round_=6)])
    ]
    refused = 0
    for number, body in mutations([*good, *foreign], count // 2, seed=1):
        if body in good:
            continue
        sender = (4, 9)[number % 2]
        row = (
            torch.frombuffer(bytearray(body), dtype=torch.uint8)[None]
            if body
            else torch.zeros(1, 0, dtype=torch.uint8)
        )
        with pytest.raises(WireError, match=f"sender {sender} in round 7"):
            frames.split(row, [sender], 7, 40, key=key)
        refused += 1
    print(f"\n{refused} mutated frames refused, 0 accepted ({'keyed' if key else 'unkeyed'})")
    assert refused >= count // 2 - 2


@pytest.mark.slow
def test_no_frame_forged_without_the_key_is_accepted() -> None:
    """A forger alters the payload and computes a tag with whatever keys it has."""
    payload = torch.zeros(2, 40, dtype=torch.uint8)
    weights = torch.ones(2, 1, dtype=torch.float64)
    for guess in range(1000):
        key = None if guess == 0 else guess.to_bytes(32, "little")
        forged = frames.join([4, 9], 7, weights, payload, key)
        forged[:, 5] = 1  # whatever the tag is, claim that it is keyed
        with pytest.raises(WireError):
            frames.split(forged, [4, 9], 7, 40, key=KEY)


def test_a_refused_frame_changes_no_state() -> None:
    class Damaging(Simulator):
        def exchange(self, frames_NB: torch.Tensor) -> torch.Tensor:
            out = super().exchange(frames_NB).clone()
            out[1, -20] ^= 1
            return out

    algorithm = DPCSGP(parse_compressor("gsgd:4"), 1.0)
    state = algorithm.descend(algorithm.init(torch.zeros(3, 50)), torch.ones(3, 50))
    before = [value.clone() for value in state if isinstance(value, torch.Tensor)]
    with pytest.raises(WireError, match="sender 1 in round 0"):
        algorithm.gossip(state, Damaging(complete(3)), PublicRandomness(0, range(3)))
    after = [value for value in state if isinstance(value, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@trials(1000)
def test_mutated_ledgers_are_refused_or_forget_nothing(tmp_path: Path, count: int) -> None:
    bodies = []
    for run_id, releases in (("9f3c", 4), ("aaaa", 2)):
        path = tmp_path / f"{run_id}.jsonl"
        with Ledger.create(path, LedgerHeader(run_id, 0, "c", 1e-4, EVENT)) as ledger:
            for step in range(releases):
                ledger.record(step, 0, EVENT)
        bodies.append(path.read_bytes())
    path = tmp_path / "mutated.jsonl"
    refused = 0
    for _, body in mutations(bodies, count, seed=2):
        path.write_bytes(body)
        try:
            contents = read_ledger(path)
        except LedgerError:
            refused += 1
            assert path.read_bytes() == body
            continue
        assert set(contents.counts) <= {EVENT}
        assert contents.count >= body.count(b'{"kind":"release"'), body
        assert path.read_bytes() == body  # reading repairs nothing
    print(
        f"\n{count} mutated ledgers: {refused} refused, the others counted every release before "
        "the damage"
    )
    assert refused > count / 3


@trials(1000)
def test_mutated_checkpoints_are_refused_and_the_one_before_is_taken(
    tmp_path: Path, count: int
) -> None:
    folder = CheckpointFolder(tmp_path, "run")
    saved = {step: {"x_ND": torch.full((2, 8), float(step))} for step in (10, 20)}
    for step, tensors in saved.items():
        folder.save(step, tensors, {"round": step, "ledger": {"0": ["ab", step]}})
    newest = [tmp_path / f"step-000020.part-0-of-1{suffix}" for suffix in (".json", ".safetensors")]
    bodies = [path.read_bytes() for path in newest]
    taken = {10: 0, 20: 0}
    for number, body in mutations(bodies, count, seed=3):
        newest[number].write_bytes(body)
        checkpoint = folder.load_common([folder.complete_steps()])
        assert checkpoint is not None
        assert torch.equal(checkpoint.tensors["x_ND"], saved[checkpoint.step]["x_ND"])
        assert checkpoint.meta == {
            "round": checkpoint.step,
            "ledger": {"0": ["ab", checkpoint.step]},
        }
        taken[checkpoint.step] += 1
        assert newest[number].read_bytes() == body
        newest[number].write_bytes(bodies[number])
    print(
        f"\n{count} mutated checkpoints: {taken[10]} refused, {taken[20]} said the same in other "
        "spelling"
    )
    assert taken[10] > 0.9 * count
    with pytest.raises(CheckpointError, match="another run"):
        CheckpointFolder(tmp_path, "other").load(10)


@trials(400)
def test_mutated_settings_give_settings_or_one_kind_of_error(tmp_path: Path, count: int) -> None:
    path = tmp_path / "config.toml"
    refused = 0
    bodies = [
        to_toml(load_config(None, [])).encode(),
        to_toml(load_config(None, ["privacy.seed=5"])).encode(),
    ]
    for _, body in mutations(bodies, count, seed=4):
        path.write_bytes(body)
        try:
            assert isinstance(load_config(path), Config)
        except ConfigError:
            refused += 1
    print(f"\n{count} mutated config files: {refused} refused")
    assert refused > count / 3


@trials(200)
def test_mutated_edge_files_give_a_graph_or_one_kind_of_error(tmp_path: Path, count: int) -> None:
    path = tmp_path / "edges.txt"
    for _, body in mutations(
        [b"# ring\n0 1\n1 2\n2 3\n3 0\n", b"0 1\n1 0\n0 2\n2 0\n0 3\n3 0\n"], count, seed=5
    ):
        path.write_bytes(body)
        with contextlib.suppress(ConfigError):
            assert isinstance(from_edges_file(path, 4), Topology)
    print(f"\n{count} mutated edge files")


@trials(200)
def test_mutated_results_folders_are_resumed_or_refused(tmp_path: Path, count: int) -> None:
    ResultsFolder.create(tmp_path, load_config(None, []))
    path = tmp_path / "environment.json"
    for _, body in mutations([path.read_bytes()], count, seed=6):
        path.write_bytes(body)
        with contextlib.suppress(ConfigError):
            assert isinstance(ResultsFolder.reopen(tmp_path)[0].run_id, str)
    print(f"\n{count} mutated results folders")


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@trials(200)
def test_mutated_data_files_are_never_taken_for_the_data(tmp_path: Path, count: int) -> None:
    generator = np.random.default_rng(0)
    arrays = Parts(
        *(
            generator.integers(0, 255, shape, dtype=np.uint8)
            for shape in ((6, 1, 3, 3), (6,), (2, 1, 3, 3), (2,))
        )
    )
    small = Published(
        "small", "for the test", 10, Parts(*(a.shape for a in arrays)), Parts(*map(digest, arrays)),
        ((IDX_NAMES, decode_idx),), (),
    )  # fmt: skip
    by_hand, cached = tmp_path / "datasets" / "small", tmp_path / "datasets" / "small.safetensors"
    by_hand.mkdir(parents=True)
    plain = [idx(a[:, 0] if a.ndim == 4 else a) for a in arrays]
    originals = [*(gzip.compress(body) if k % 2 else body for k, body in enumerate(plain))]
    for name, body in zip(IDX_NAMES, originals, strict=True):
        (by_hand / name).write_bytes(body)
    whole = fetch_published(small, tmp_path, lambda *_: None).read_bytes()
    refused = 0
    for number, body in mutations([*originals, whole], count, seed=7):
        target = cached if number == 4 else by_hand / IDX_NAMES[number]
        if number < 4:
            cached.unlink(missing_ok=True)
        target.write_bytes(body)
        try:
            assert fetch_published(small, tmp_path, lambda *_: None).read_bytes() == whole
        except DataError:
            refused += 1
        if number < 4:
            target.write_bytes(originals[number])
    print(
        f"\n{count} mutated data files: {refused} refused, the others were replaced or said the "
        "same"
    )
    shutil.rmtree(tmp_path)


def test_settings_edited_after_the_start_are_refused(tmp_path: Path) -> None:
    """A larger eps in config.toml must not let a started run go on spending."""
    config = load_config(None, ["task.name=digits"])
    ResultsFolder.create(tmp_path, config)
    header = LedgerHeader("9f3c", 0, config.fingerprint(), 1e-4, EVENT)
    Ledger.create(tmp_path / "ledger" / "node-0000.jsonl", header).close()
    assert open_config(None, [], tmp_path, resume=True) == config
    path = tmp_path / "config.toml"
    path.write_text(path.read_text().replace("epsilon = 0.5", "epsilon = 5.0"))
    with pytest.raises(ConfigError, match="not what this run was started with"):
        open_config(None, [], tmp_path, resume=True)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    config = load_config(
        None,
        [
            "task.name=digits",
            "task.model=mlp:8",
            "graph.num_nodes=2",
            "algorithm.steps=2",
            "run.evaluate_every=0",
        ],
    )
    data = load_builtin_data(config)
    design = design_run(config, data.facts)
    run = build_run(design, data, Simulator(design.topology), ResultsFolder(tmp_path, "9f3c"))
    state = run.algorithm.init(torch.zeros(2, 7))
    tensors = {
        name: value for name, value in state._asdict().items() if isinstance(value, torch.Tensor)
    }
    meta = {
        "round": 1,
        "ledger": run.gradients.ledger.heads(),
        "seconds": 0.0,
        "traffic": run.network.traffic.as_dict(),
    }
    with pytest.raises(CheckpointError, match="another method, optimizer or model"):
        train(run, resume_from=Checkpoint(1, tensors, meta))
