"""A settings file to start from: every setting with its default and a line that says what it is."""

from __future__ import annotations

import json
from typing import Final

from dpcsgp.config import Config

EXPLAINED: Final = {
    "task.name": "mnist, fashion_mnist, cifar10 or digits (digits needs no download)",
    "task.model": "mlp:128 (any widths: mlp:128,64), logistic, cnn, resnet18",
    "task.features": "public features: none, standardize, dct:8, hog:8",
    "task.augmentation": "none, crop, flip or crop-flip",
    "task.augmentation_multiplicity": "random views of an example, averaged before clipping",
    "task.partition": "who has which examples: iid, dirichlet:0.5, shards:2",
    "task.class_weights": "factors of the loss, one per class; empty: all count alike",
    "graph.name": "directed_exponential, directed_ring, undirected_ring, complete, torus, star, "
    "random_digraph, edges",
    "graph.num_nodes": "how many parties",
    "graph.edge_probability": "of random_digraph",
    "graph.seed": "of random_digraph",
    "graph.edges_file": 'of edges: one "sender receiver" per line',
    "algorithm.name": "dp-csgp, dp-block, dp-sgp, dp2sgd, dp-sgd, local, local-then-average",
    "algorithm.learning_rate": "at the first step",
    "algorithm.learning_rate_decay": "share of it that is left at the last step",
    "algorithm.learning_rate_schedule": "linear, cosine or constant",
    "algorithm.warmup_steps": "steps over which the rate rises at the start",
    "algorithm.optimizer": "sgd, or adam (with a learning_rate of about 0.03 and momentum 0)",
    "algorithm.adam_betas": "of adam: what is kept of both moments in a step",
    "algorithm.adam_epsilon": "of adam",
    "algorithm.weight_decay": "decoupled: a step of rate r takes away r times this share",
    "algorithm.momentum": "0: none",
    "algorithm.mixing_rate": '"auto", or how far a node follows its neighbours: up to 1',
    "algorithm.steps": "gradient steps; the budget is spread over them",
    "algorithm.gossip_every": "steps between two exchanges",
    "algorithm.num_blocks": "of dp-block",
    "algorithm.block_order": "of dp-block: round-robin or random",
    "algorithm.polish_rounds": "exchanges after the last step; they cost no privacy",
    "algorithm.polish_compression": "of these exchanges; empty: as in [compression]",
    "algorithm.average_last": "steps whose models are averaged before polishing",
    "algorithm.node_weights": '"equal", or "examples" to count nodes by their declared sizes',
    "compression.spec": "rot:1 (about one bit per coordinate), rot:4, gsgd:8/64, rand:0.1, none",
    "privacy.epsilon": "what each node may spend; one number, or a list with one per node",
    "privacy.delta": "well below 1 / (examples of a node)",
    "privacy.clip_norm": "largest norm of one example's gradient",
    "privacy.expected_batch_size": '"auto" is a third of a node\'s examples',
    "privacy.sampling": "poisson or uniform",
    "privacy.noise": '"calibrated" keeps the promise; "paper" and "none" do not',
    "privacy.c2": 'of "paper"',
    "privacy.replay_reserve": "releases that a resumed run may repeat if they were not kept",
    "privacy.max_rows_per_unit": "of a person, in dpcsgp.train(unit=...); 0: examples",
    "privacy.max_colluders": '"all": no trust; a number: noise that cancels between other nodes',
    "network.timeout_seconds": "how long a silent process is waited for",
    "network.key_file": "a secret that all machines share; empty: messages are not authenticated",
    "run.seed": "public: initial model, partition, rotations",
    "run.evaluate_every": "steps between two looks at the public test data",
    "run.test_examples": "only so many of them; 0: all",
    "run.checkpoint_every": "steps; releases after the last one are kept on disk and sent again",
    "run.device": "cpu or cuda",
    "run.max_rows_per_pass": '"auto" follows from memory_limit_gb and the model\'s shapes',
    "run.memory_limit_gb": "for what forward passes keep for backward passes, roughly",
    "run.trackers": 'any of "tensorboard", "mlflow", "wandb": evaluations go there too',
}


def commented_toml(config: Config) -> str:
    """Return all settings as TOML, each with a comment.

    A seed of the noise is left out: who needs one knows that the run is not private then.
    """
    lines = ["# `dpcsgp run FILE` trains with these settings; what is left out is as here.", ""]
    for section, values in config.model_dump(exclude_none=True).items():
        about = (type(getattr(config, section)).__doc__ or "").splitlines()[0]
        lines += [f"[{section}]  # {about}"]
        for key, value in values.items():
            explained = EXPLAINED.get(f"{section}.{key}")
            lines += [f"# {explained}"] if explained else []
            lines += [f"{key} = {json.dumps(value)}"]
        lines += [""]
    return "\n".join(lines)
