"""Everything that touches private data: sampling, clipping, noise, and the account of it."""

from dpcsgp.privacy.accounting import (
    calibrate_noise,
    composed_epsilon,
    epsilon,
    epsilon_against,
    paper_noise_multiplier,
    releases_within,
)
from dpcsgp.privacy.budget import Budget
from dpcsgp.privacy.cancelling import effective_noise_multipliers
from dpcsgp.privacy.clipping.engine import ClippingEngine, clipping_engine
from dpcsgp.privacy.events import (
    NeighbouringRelation,
    ReleaseEvent,
    ReleaseLog,
    neighbouring_relation,
)
from dpcsgp.privacy.ledger import (
    Ledger,
    LedgerBook,
    LedgerHead,
    check_heads,
    ledger_heads,
    read_ledgers,
    releases_by_node,
)
from dpcsgp.privacy.mechanism import GaussianMechanism
from dpcsgp.privacy.private_gradients import PrivateGradients

__all__ = [
    "Budget",
    "ClippingEngine",
    "GaussianMechanism",
    "Ledger",
    "LedgerBook",
    "LedgerHead",
    "NeighbouringRelation",
    "PrivateGradients",
    "ReleaseEvent",
    "ReleaseLog",
    "calibrate_noise",
    "check_heads",
    "clipping_engine",
    "composed_epsilon",
    "effective_noise_multipliers",
    "epsilon",
    "epsilon_against",
    "ledger_heads",
    "neighbouring_relation",
    "paper_noise_multiplier",
    "read_ledgers",
    "releases_by_node",
    "releases_within",
]
