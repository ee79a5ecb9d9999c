"""One measurement in a process of its own, whose peak memory it is; prints one line of JSON.

python -m dpcsgp.benchmarking scale 100 5 full
python -m dpcsgp.benchmarking memory resnet18 ours
python -m dpcsgp.benchmarking opacus resnet18 ghost
"""

from __future__ import annotations

import json
import sys

from dpcsgp.benchmarking.peak import measure_gradient_memory
from dpcsgp.benchmarking.peers import serve
from dpcsgp.benchmarking.scale import run_size
from dpcsgp.runtime.memory import keep_freed_memory


def main(kind: str, *arguments: str) -> None:
    """Measure and print; memory is handled as by the command line, for peers as usual."""
    if kind == "opacus":
        serve(*arguments)
        return
    keep_freed_memory()
    if kind == "scale":
        num_nodes, steps, size = arguments
        found = run_size(int(num_nodes), int(steps), quick=size == "quick")
    else:
        found = measure_gradient_memory(*arguments)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
