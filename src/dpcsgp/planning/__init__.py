"""Know before you spend: is a setting healthy, what will a run cost, which setting to choose."""

from dpcsgp.planning.diagnosis import Diagnosis, SweepRow, diagnose, radius_curves, sweep
from dpcsgp.planning.outlook import Outlook
from dpcsgp.planning.search import Limits, Plan, Row, search, search_features
from dpcsgp.runs.facts import declared_facts

__all__ = [
    "Diagnosis",
    "Limits",
    "Outlook",
    "Plan",
    "Row",
    "SweepRow",
    "declared_facts",
    "diagnose",
    "radius_curves",
    "search",
    "search_features",
    "sweep",
]
