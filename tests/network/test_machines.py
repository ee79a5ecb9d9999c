"""Several machines: the documented torchrun line, and three hosts with addresses of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from ports import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "task.name=digits",
    "task.model=mlp:16",
    "graph.name=directed_ring",
    "graph.num_nodes=3",
    "algorithm.steps=6",
    "privacy.noise=paper",
    "privacy.expected_batch_size=32",
    "privacy.seed=1",
]


def words(out: Path) -> list[str]:
    values = [word for value in SETTINGS for word in ("--set", value)]
    return ["-m", "dpcsgp", "run", *values, "--out", str(out)]


def test_two_torchrun_agents_end_like_the_simulator(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, *words(tmp_path / "sim")], check=True, capture_output=True, timeout=240
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
    ]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    agents = [
        subprocess.Popen(
            [*torchrun, "--node-rank", str(rank), *words(tmp_path / "real")],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert "step 6/6" in outputs[0] and "verified eps" in outputs[0]
    assert "step" not in outputs[1]  # one progress line for the whole run
    sim, real = (load_file(tmp_path / name / "model.safetensors") for name in ("sim", "real"))
    assert all(torch.equal(sim[name], real[name]) for name in sim)
    assert (tmp_path / "real" / "report.html").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are a feature of Linux")
def test_three_hosts_report_the_bytes_that_the_system_counts(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "three_hosts.py"),
            "--json",
            "--out",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode == 3:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(rows) == 3
    for row in rows:
        assert row["reported"] > 10_000_000  # large messages: start-up and heartbeats hardly count
        assert abs(row["counted"] / row["modelled"] - 1) < 0.05, row
    summaries = [
        json.loads((tmp_path / f"host-{host}" / "summary.json").read_text()) for host in range(3)
    ]
    assert summaries[0]["accuracy_node_min"] > 0.8
    assert summaries[0]["private"] is True
    for host in range(3):  # no shared disk: every host has its own ledger and its own model
        ledgers = (tmp_path / f"host-{host}" / "ledger").glob("*.jsonl")
        assert [path.name for path in ledgers] == [f"node-{host:04d}.jsonl"]
        assert (
            load_file(tmp_path / f"host-{host}" / "model.safetensors")["node_models"].shape[0] == 1
        )
