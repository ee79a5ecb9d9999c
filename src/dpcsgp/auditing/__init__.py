"""Attack our own messages and draw our own mechanism: does it do what the accountant assumes?"""

from dpcsgp.auditing.audit import TRIALS, Audit, audit
from dpcsgp.auditing.draws import DRAWS, FEWEST_DRAWS
from dpcsgp.auditing.faults import FAULTS, Fault
from dpcsgp.auditing.laws import Check, MechanismAudit

__all__ = [
    "DRAWS",
    "FAULTS",
    "FEWEST_DRAWS",
    "TRIALS",
    "Audit",
    "Check",
    "Fault",
    "MechanismAudit",
    "audit",
]
