"""Parties without a server: who takes part, what they agreed on, and how they speak to each other.

Each party runs its own node and speaks to its neighbours over mutual TLS. The modules log public
facts only (connected, refused, waiting for) under `dpcsgp.federation`.
"""

import logging

# Without a handler Python would print warnings to stderr, beside the errors that already go there.
logging.getLogger(__name__).addHandler(logging.NullHandler())
