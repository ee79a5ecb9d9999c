"""Is the memory that `dpcsgp plan` names what a run takes? Predicted beside measured.

Every case trains two steps on random data in a process of its own, whose growth over a tiny run
before it is measured. Prints a table for docs/performance.md.

    python docs/make_plan_memory.py
    python docs/make_plan_memory.py cnn,4,3000,256
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Final

# model, nodes, examples of a node, expected batch size
CASES: Final = (
    "mlp:128,10,6000,500",
    "mlp:128,10,6000,2048",
    "cnn,4,3000,256",
    "cnn,4,3000,2048",
    "resnet18,1,400,16",
    "resnet18,1,400,64",
)
# models of one's own, through `dpcsgp.plan` and `dpcsgp.train`, whose checks at the start count too
OWN_CASES: Final = (
    "own mlp,4,3000,64",
    "own mlp,4,3000,1500",
    "own cnn,4,2000,64",
    "own cnn,4,2000,1000",
    "own lstm,4,2000,32",
    "own lstm,4,2000,500",
)


def measure(case: str) -> dict[str, float]:
    """Train in this process; return how far it grew, and what was predicted, in bytes."""
    from dpcsgp.benchmarking.peak import peak_bytes
    from dpcsgp.planning.timing import gradient_bytes, state_bytes, time_parts

    name, nodes, examples, batch = case.split(",")
    if name.startswith("own "):
        return measure_own(name.removeprefix("own "), int(nodes), int(examples), int(batch))
    task = "cifar10" if name == "resnet18" else "mnist"
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "tiny", "digits", "logistic", 2, 20, 10)
        before = _size_now()
        design = train(Path(folder) / "run", task, name, int(nodes), int(examples), int(batch))
        grown = peak_bytes() - before
    predicted = state_bytes(design) + gradient_bytes(design, time_parts(design))
    return {"measured": grown, "predicted": predicted}


def measure_own(name: str, nodes: int, examples: int, batch: int) -> dict[str, float]:
    """Do the same for a model of one's own."""
    import torch
    from torch import nn

    import dpcsgp
    from dpcsgp.benchmarking.peak import peak_bytes

    class LastState(nn.Module):
        """Classifies a sequence by the last output of an LSTM."""

        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(16, 64, batch_first=True), nn.Linear(64, 10)

        def forward(self, x):  # noqa: ANN001, ANN202
            """Return logits."""
            return self.head(self.lstm(x)[0][:, -1])

    shape = {"mlp": (784,), "cnn": (1, 28, 28), "lstm": (40, 16)}[name]
    module = {
        "mlp": lambda: nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)),
        "cnn": lambda: nn.Sequential(
            *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * 8 * 8, 10)),
        ),
        "lstm": LastState,
    }[name]
    settings = {
        "algorithm.steps": 2,
        "algorithm.polish_rounds": 1,
        "privacy.expected_batch_size": batch,
        "run.evaluate_every": 0,
    }
    test = torch.rand(32, *shape), torch.arange(32) % 10
    data = [(torch.rand(examples, *shape), torch.arange(examples) % 10) for _ in range(nodes)]
    with tempfile.TemporaryDirectory() as folder:
        few = [(torch.rand(20, 8), torch.arange(20) % 2)] * 2
        tiny = {**settings, "privacy.expected_batch_size": 10}
        dpcsgp.train(
            nn.Linear(8, 2), few, epsilon=4.0, delta=1e-3, settings=tiny, out=f"{folder}/tiny"
        )
        before = _size_now()
        dpcsgp.train(
            module, data, test_data=test, epsilon=4.0, delta=1e-4, settings=settings,
            out=f"{folder}/run",
        )  # fmt: skip
        grown = peak_bytes() - before
    found = dpcsgp.plan(
        module, [examples] * nodes, test_data=test, epsilon=4.0, delta=1e-4, settings=settings
    )
    return {"measured": grown, "predicted": found.memory_bytes or 0}


def train(out: Path, task: str, model: str, nodes: int, examples: int, batch: int):  # noqa: ANN201
    """Train two steps on random pictures, and return the design of the run."""
    import torch

    from dpcsgp import training
    from dpcsgp.config import make_config
    from dpcsgp.network import Simulator
    from dpcsgp.runs.build import build_run
    from dpcsgp.runs.data import BuiltinData
    from dpcsgp.runs.design import design_run
    from dpcsgp.runs.facts import Facts, declared_facts
    from dpcsgp.runs.folder import ResultsFolder

    config = make_config(
        {
            "task": {"name": task, "model": model},
            "graph": {"num_nodes": nodes},
            "algorithm": {"steps": 2, "polish_rounds": 1},
            "privacy": {"epsilon": 4.0, "expected_batch_size": batch},
            "run": {"evaluate_every": 0},
        }
    )
    shape, total = declared_facts(config).input_shape, nodes * examples
    facts = Facts(shape, 10, (examples,) * nodes)
    parts = list(torch.arange(total).split(examples))
    test = (torch.rand(32, *shape), torch.arange(32) % 10)
    data = BuiltinData(torch.rand(total, *shape), torch.arange(total) % 10, parts, test, facts)
    design = design_run(config, facts)
    folder = ResultsFolder.create(out, config)
    training.train(build_run(design, data, Simulator(design.topology), folder))
    return design


def in_own_process(case: str) -> dict[str, float]:
    """Measure a case in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--here", case], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def _size_now() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def main() -> None:
    """Print the table, or one measurement."""
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["--here"]:
        print(json.dumps(measure(sys.argv[2])))
        return
    print("| model | nodes | examples of a node | batch | measured | predicted |")
    print("|---|---|---|---|---|---|")
    for case in sys.argv[1:] or (*CASES, *OWN_CASES):
        found = {name: f"{size / 1e6:,.0f} MB" for name, size in in_own_process(case).items()}
        print(f"| {' | '.join((*case.split(','), *found.values()))} |", flush=True)


if __name__ == "__main__":
    main()
