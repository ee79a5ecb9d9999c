"""Three hosts with addresses of their own train together on one machine.

They are network namespaces, joined by a virtual switch:

    sudo .venv/bin/python examples/three_hosts.py [--set KEY=VALUE]... [--out FOLDER] [--json]

Each host runs the line that a real machine would run (torchrun, one process, its own results
folder: no shared disk). At the end the bytes that the program reports are compared with what the
operating system counted on each host's network interface. Needs Linux, root and iproute2; all
traffic stays inside the namespaces, which are removed at the end.

What the counters hold beside the frames, per host and direction (MTU 1500, Ethernet header
included, no offloading):

    every segment   66 bytes of headers (Ethernet 14, IPv4 20, TCP with time stamps 32)
                    for at most 1448 bytes of data
    every frame     48 bytes of gloo's own in front of it, and a notice of 48 bytes back in a
                    segment of its own (a model: measured were 90 bytes a frame, both directions
                    together)
    acknowledgement 66 bytes for every second segment received

Start-up, heartbeats, progress and the closing results travel too; they do not grow with the
messages and are not modelled.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CANNOT = 3  # exit code: this machine does not let us make namespaces
HOSTS = 3
SETTINGS = [
    "task.name=digits",
    "task.model=mlp:2048",
    f"graph.num_nodes={HOSTS}",
    "graph.name=directed_ring",
    "algorithm.learning_rate=1",
    "algorithm.steps=20",
    "compression.spec=none",
    "privacy.expected_batch_size=64",
    "privacy.epsilon=8",
]


def ip(command: str) -> None:
    """Run `ip`; what it complains about becomes the error."""
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {command}: {done.stderr.strip()}")


@contextmanager
def hosts() -> Iterator[list[str]]:
    """Make the namespaces of three hosts and of the switch between them; yield the hosts' names."""
    prefix = f"dpcsgp-{os.getpid()}"
    names = [f"{prefix}-host{number}" for number in range(HOSTS)]
    switch = f"{prefix}-switch"
    try:
        for name in [switch, *names]:
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        ip(f"-n {switch} link add br0 type bridge")
        ip(f"-n {switch} link set br0 up")
        for number, name in enumerate(names):
            port = f"port{number}"
            # a cable from the switch to the host's only interface
            ip(f"-n {switch} link add {port} type veth peer name eth0 netns {name}")
            ip(f"-n {switch} link set {port} master br0 up")
            # One segment at a time, as on a cable: the counters would see 64 KB with one header.
            ip(f"-n {name} link set eth0 gso_max_segs 1")
            ip(f"-n {name} address add 10.77.0.{number + 1}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
        yield names
    finally:
        for name in [*names, switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start(name: str, rank: int, settings: Sequence[str], out: Path) -> subprocess.Popen[str]:
    """Start on one host what a real machine would run."""
    # sys.executable -m torch.distributed.run is torchrun
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(HOSTS)]
    torchrun += ["--nproc-per-node", "1", "--node-rank", str(rank)]
    torchrun += ["--master-addr", "10.77.0.1", "--master-port", "29500"]
    options = [word for value in settings for word in ("--set", value)]
    command = ["-m", "dpcsgp", "run", *options, "--out", str(out)]
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *torchrun, *command],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
        stdout=None if rank == 0 else subprocess.DEVNULL,
        text=True,
    )


def sent_bytes(name: str) -> int:
    """Return what the operating system counted as sent by a host."""
    path = "/sys/class/net/eth0/statistics/tx_bytes"
    command = ["ip", "netns", "exec", name, "cat", path]
    return int(subprocess.run(command, capture_output=True, text=True).stdout)


def modelled_bytes(frame_bytes: int, frames_out: int, frames_in: int) -> int:
    """Return the bytes on the interface for so many frames (see the top of this file)."""
    header, data, preamble = 66, 1448, 48
    # a frame fills segments; its receiver answers with a notice and acknowledgements
    segments = math.ceil((frame_bytes + preamble) / data)
    sent = frame_bytes + preamble + segments * header
    answers = preamble + header + math.ceil(segments / 2) * header
    return frames_out * sent + frames_in * answers


def compare(names: Sequence[str], before: Sequence[int], folder: Path) -> list[dict[str, float]]:
    """Return reported, modelled and counted bytes of every host."""
    rows = []
    for number, name in enumerate(names):
        summary = json.loads((folder / f"host-{number}" / "summary.json").read_text())
        lines = (folder / f"host-{number}" / "metrics.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        rounds, reported = last["round"], last["bytes_sent_nodes"][number]
        modelled = modelled_bytes(summary["bytes_per_edge"] // rounds, rounds, rounds)
        counted = sent_bytes(name) - before[number]
        rows.append(
            {"host": number, "reported": reported, "modelled": modelled, "counted": counted}
        )
    return rows


def train(names: Sequence[str], settings: Sequence[str], folder: Path) -> int:
    """Run all hosts to their end and return the worst exit code."""
    running = [
        start(name, rank, settings, folder / f"host-{rank}") for rank, name in enumerate(names)
    ]
    try:
        return max(process.wait(timeout=600) for process in running)
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> int:
    """Make the hosts, train, compare, and say how it went."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="three-hosts-"))
    try:
        with hosts() as names:
            before = [sent_bytes(name) for name in names]
            began = time.monotonic()
            code = train(names, [*SETTINGS, *options.settings], folder)
            if code:
                print(f"a host ended with code {code}", file=sys.stderr)
                return 1
            rows, seconds = compare(names, before, folder), time.monotonic() - began
    except OSError as error:
        print(
            f"network namespaces cannot be made here (needs Linux, root and iproute2): {error}",
            file=sys.stderr,
        )
        return CANNOT
    if options.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        share = row["counted"] / row["modelled"] - 1
        print(
            f"host {row['host']}: {row['reported']:,} bytes reported, {row['modelled']:,} with the "
            f"modelled TCP/IP overhead, {row['counted']:,} counted on the interface ({share:+.2%})"
        )
    print(f"results in {folder}/host-0 .. host-{HOSTS - 1}; {seconds:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
