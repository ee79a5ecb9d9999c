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
scores = [key for key in rows[-1] if key.endswith(("_node_mean", "_average_model"))]
columns = ["step", "bytes_per_edge", *scores]

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
    f"verified eps {summary['epsilon']:.4f}, private: {summary['private']}, "
    f"stopped because: {summary['stopped_because']}"
)
# what each node released, as its ledger says
for node, releases in releases_by_node(read_ledgers(folder)).items():
    for event, count in releases:
        noise, rate = event.noise_multiplier, event.sampling_rate
        print(f"node {node}: {count} releases, noise multiplier {noise:.3f}, rate {rate:.3f}")
