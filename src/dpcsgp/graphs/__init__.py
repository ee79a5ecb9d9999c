"""Directed communication graphs: building them, and knowing before a run whether compressed gossip
is healthy on them."""

from dpcsgp.graphs.analysis import (
    Condition,
    GraphConstants,
    TheoremReport,
    graph_constants,
    theorem_report,
)
from dpcsgp.graphs.builders import (
    complete,
    directed_exponential,
    directed_ring,
    from_edges,
    from_edges_file,
    from_networkx,
    metropolis_weights,
    random_digraph,
    star,
    torus,
    undirected_ring,
)
from dpcsgp.graphs.mixing_rate import (
    StabilityReport,
    best_mixing_rate,
    cautious_mixing_rate,
    classify,
    require_stable,
    rounds_to_halve,
    stability_report,
)
from dpcsgp.graphs.stability import (
    LARGEST_SPREAD,
    block_disagreement,
    block_radius,
    block_spread,
    mixing_radius,
    second_eigenvalue,
    steady_state_disagreement,
)
from dpcsgp.graphs.topology import Topology

__all__ = [
    "Condition",
    "GraphConstants",
    "StabilityReport",
    "TheoremReport",
    "Topology",
    "best_mixing_rate",
    "LARGEST_SPREAD",
    "block_disagreement",
    "block_radius",
    "block_spread",
    "cautious_mixing_rate",
    "classify",
    "complete",
    "directed_exponential",
    "directed_ring",
    "from_edges",
    "from_edges_file",
    "from_networkx",
    "graph_constants",
    "metropolis_weights",
    "mixing_radius",
    "random_digraph",
    "require_stable",
    "rounds_to_halve",
    "second_eigenvalue",
    "stability_report",
    "star",
    "steady_state_disagreement",
    "theorem_report",
    "torus",
    "undirected_ring",
]
