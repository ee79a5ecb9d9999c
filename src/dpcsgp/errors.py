"""The errors a caller may want to catch; every message says what to do.

`DpcsgpError` is the root. The command line turns it into one red line and an exit code: 2 for input
that can be mended by the user (`ConfigError`, `DataError`), 1 for everything else.
"""


class DpcsgpError(Exception):
    """Root of all errors raised on purpose by this package."""

    exit_code = 1


class ConfigError(DpcsgpError, ValueError):
    """A setting is wrong: the message names the field, the value and the remedy."""

    exit_code = 2


class TopologyError(ConfigError):
    """A communication graph cannot be used.

    It is not strongly connected, its weights do not add up, and the like.
    """


class ModelError(ConfigError):
    """A model cannot be trained privately: the message names the layer and a replacement."""


class DataError(DpcsgpError):
    """Data files are missing, damaged or of an unexpected shape."""

    exit_code = 2


class RefusedDataError(DataError):
    """A node's own examples cannot be used.

    The message is for the machine that holds them; `told` is what the others may hear.
    """

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}{reason}")
        owner = where.partition(",")[0]
        self.told = (
            f"the data of {owner} were refused; the reason is shown only on the machine that "
            "holds them"
        )


class UnstableError(ConfigError):
    """The compressor and mixing rate make gossip diverge on this graph."""


class BudgetExceededError(DpcsgpError):
    """The next release would cost more privacy than was granted."""


class LedgerError(DpcsgpError):
    """A ledger was edited, shortened or belongs to another run."""


class CheckpointError(DpcsgpError):
    """A checkpoint is damaged or belongs to another run."""


class WireError(DpcsgpError):
    """A message is damaged, forged, late or from an unexpected sender: names sender and round.

    `sender` is the node that is to blame; None: that cannot be told.
    """

    def __init__(self, text: str, sender: int | None = None) -> None:
        super().__init__(text)
        self.sender = sender


class PrivateStepError(DpcsgpError):
    """Computing on private data failed.

    The message says nothing about them; the cause stays on their machine.
    """


class WaitStoppedError(DpcsgpError):
    """A wait for other parties was ended on request; the same command goes on later."""


class DivergenceError(DpcsgpError):
    """A state or message became non-finite: names node, round and gradient step."""


class JournalError(DpcsgpError):
    """Frames on disk are damaged, contradict each other or belong to another run."""


class JournalInUseError(JournalError):
    """Another process of this party has the journal, or it cannot be locked."""


class DiskError(JournalError):
    """What must be on disk before anything is sent cannot be written: full, or read-only."""


class RestoredBackupError(JournalError):
    """Others hold frames of this party that its own journal does not know.

    Its folder is older than what it has released, so it must not release those rounds again.
    """
