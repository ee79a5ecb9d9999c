"""Read a results folder: the history as a table (with pandas if there), summary, ledger.

python examples/read_results.py FOLDER
"""

import json
import sys
from pathlib import Path

from dpcsgp.privacy import read_ledgers, releases_by_node

folder = Path(sys.argv[1])
summary = json.loads((folder / "summary.json").read_text())
rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
columns = [
    "step",
    "bytes_per_edge",
    *(key for key in rows[-1] if key.endswith(("_node_mean", "_average_model"))),
]

try:
    import pandas
except ImportError:
    for row in rows:
        print("  ".join(f"{name} {row.get(name)}" for name in columns))
else:
    table = pandas.DataFrame(rows)
    table["epsilon"] = table["epsilon_nodes"].map(max)
    print(table[[*columns, "epsilon"]].to_string(index=False))

print(
    f"verified eps {summary['epsilon']:.4f}, private: {summary['private']}, stopped because: "
    f"{summary['stopped_because']}"
)
for node, releases in releases_by_node(read_ledgers(folder)).items():
    for event, count in releases:
        print(
            f"node {node}: {count} releases, noise multiplier {event.noise_multiplier:.3f}, rate "
            f"{event.sampling_rate:.3f}"
        )
