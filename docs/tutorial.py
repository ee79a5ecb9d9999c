# %% [markdown]
# # Private training without a server, step by step
#
# Four parties learn to read digits. Nobody shows its images to anybody. This file is a notebook
# kept as text: open it in an editor that knows `# %%` cells, or run it with `python
# docs/tutorial.py`. It takes less than a minute and needs no download.

# %%
from pathlib import Path
from tempfile import mkdtemp

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import dpcsgp
from dpcsgp.compression import parse_compressor
from dpcsgp.graphs import best_mixing_rate, from_edges, mixing_radius, stability_report
from dpcsgp.privacy import calibrate_noise, composed_epsilon, epsilon

Path("runs").mkdir(exist_ok=True)
folder = Path(mkdtemp(prefix="tutorial-", dir="runs"))

# %% [markdown]
# ## 1. A graph
#
# Links are one-way. Node 0 has three receivers, the others have one or two. Each column of the
# weights says how a node splits what it has.

# %%
edges = [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3), (3, 0)]
graph = from_edges(4, edges)
print(graph)
print(graph.weights.round(2))

# %% [markdown]
# Push-sum weights correct for nodes that get more than others. They settle after a few rounds.

# %%
y = np.ones(4)
for _ in range(30):
    y = graph.weights @ y
print("push-sum weights:", [round(value, 3) for value in y.tolist()], "sum", round(float(y.sum()), 6))

# %% [markdown]
# ## 2. Ask the doctor
#
# Will compressed gossip be stable here? A radius below 1 means that disagreement shrinks.

# %%
dim = 64 * 32 + 32 + 32 * 10 + 10
for spec in ("none", "rot:1", "rand:0.5", "rand:0.1", "gsgd:4/64"):
    compressor = parse_compressor(spec)
    rate = best_mixing_rate(graph, compressor, dim)
    print(
        f"{spec:10s} {compressor.num_bytes(dim):6d} bytes, radius at rate 1: "
        f"{mixing_radius(graph, compressor, 1.0, dim):.3f},"
        f" at the advised rate {rate:.2f}: {mixing_radius(graph, compressor, rate, dim):.3f}"
    )
print(stability_report(graph, parse_compressor("rand:0.1"), dim, mixing_rate=1.0).explanation)

# %% [markdown]
# ## 3. How much noise?
#
# The accountant answers before anything is spent. 375 examples per node, a third of them expected
# in a batch, 30 steps.

# %%
noise = calibrate_noise(epsilon=4.0, delta=1e-4, sampling_rate=1 / 3, steps=30)
print(f"noise multiplier {noise:.3f}")
for steps in (10, 30, 60):
    spent = epsilon(noise_multiplier=noise, sampling_rate=1 / 3, steps=steps, delta=1e-4)
    print(f"after {steps} steps eps is {spent:.3f}")

# %% [markdown]
# ## 4. Train
#
# One data set per node, public test data, a budget. The graph goes in as a file with one "sender
# receiver" per line.

# %%
pixels, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
pixels = pixels.float() / 8 - 1
nodes = [(pixels[node:1500:4], labels[node:1500:4]) for node in range(4)]
test = (pixels[1500:], labels[1500:])

edges_file = folder / "edges.txt"
edges_file.write_text("\n".join(f"{sender} {receiver}" for sender, receiver in edges))
settings = {"graph.name": "edges", "graph.edges_file": str(edges_file), "algorithm.learning_rate": 2.0}

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(name: str, **changes: object) -> dpcsgp.Result:
    """Train from the same start, with some settings changed."""
    changed = {**settings, **{key.replace("__", "."): value for key, value in changes.items()}}
    return dpcsgp.train(
        model, nodes, test_data=test, epsilon=4.0, delta=1e-4, settings=changed, out=folder / name, verbose=False
    )


results = {
    "rot:1": train("rot1"),
    "exact": train("exact", compression__spec="none"),
    "alone": train("alone", algorithm__name="local", algorithm__polish_rounds=0),
}

# %% [markdown]
# ## 5. Read the outcome
#
# Accuracy of the nodes' own models, verified eps, and bytes that really travelled over one link.

# %%
for name, result in results.items():
    summary = result.summary
    print(
        f"{name:6s} accuracy {summary['accuracy_node_mean']:.3f} (worst node "
        f"{summary['accuracy_node_min']:.3f}), "
        f"eps {result.epsilon:.3f}, {summary['bytes_per_edge']:,} bytes per edge"
    )

# %% [markdown]
# All three runs used the same images. What do they reveal together? The ledgers know.

# %%
together = [release for result in results.values() for release in result.releases()[0]]
print(f"node 0, three runs: eps {composed_epsilon(together, 1e-4):.3f}")

# %% [markdown]
# ## 6. A picture

# %%
figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
for name, result in results.items():
    rows = result.history
    axes.plot(
        [max(row["epsilon_nodes"]) for row in rows], [row["accuracy_node_mean"] for row in rows], "o-", label=name
    )
axes.set(xlabel="eps spent", ylabel="accuracy, mean over nodes")
axes.legend()
figure.savefig(folder / "tutorial.png", dpi=120)
print("picture:", folder / "tutorial.png")

# %% [markdown]
# ## 7. Use the model
#
# The parameters are in the results folder. An instance of the model gives them their shape.

# %%
trained = dpcsgp.load_model(results["rot:1"].folder, model)
guessed = trained(test[0][:10]).argmax(1)
print("guessed", guessed.tolist())
print("true   ", test[1][:10].tolist())
