"""Attacks on the message stream that bound eps from below: does the mechanism keep what the accountant promises?"""

from dpcsgp.auditing.audit import TRIALS, Audit, audit
from dpcsgp.auditing.faults import Fault

__all__ = ["TRIALS", "Audit", "Fault", "audit"]
