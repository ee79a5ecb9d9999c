"""What one party wants to run, and what was found when that was checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from torch import nn

from dpcsgp.config import Config, change_config
from dpcsgp.federation.agreement import Agreement
from dpcsgp.federation.party_data import NO_EXAMPLES, OwnExamples
from dpcsgp.federation.party_folder import PartyFolder
from dpcsgp.federation.roster import Roster
from dpcsgp.federation.rounds import Rounds
from dpcsgp.federation.status_page import PageAddress
from dpcsgp.federation.succession import refuse_wrong_history
from dpcsgp.runs.data import RunData
from dpcsgp.runs.design import RunDesign


@final
@dataclass(frozen=True)
class PartyRequest:
    """What one party wants to run.

    Attributes:
        party: its folder.
        roster: what all agreed on.
        examples: its own examples; none for a data set that everybody has.
        out: the results folder; None: inside of the party's folder.
        listen: HOST:PORT to listen on; None: the address of its card.
        device: where gradients are computed.
        seed: of private noise, for experiments: the run is then not private.
        patience: seconds without a sign of life after which a wait fails; None: wait for ever.
        model: at its start, where it is not one of the package's.
        page: where a page about the run listens; None: there is none.
        trackers: where this party's evaluations are shown too; a roster has no say in it.
        until: the next version of the roster, if this one is to be run only until that begins.
        cut: whether nothing is waited for until then: each party goes on from where it stands.
    """

    party: PartyFolder
    roster: Roster
    examples: OwnExamples = NO_EXAMPLES
    out: Path | None = None
    listen: str | None = None
    device: str = "cpu"
    seed: int | None = None
    patience: float | None = None
    model: nn.Module | None = None
    page: PageAddress | None = None
    trackers: tuple[str, ...] = ()
    until: Roster | None = None
    cut: bool = False

    @property
    def node(self) -> int:
        """The party's node."""
        return self.roster.node_of(self.party.name)

    def config(self) -> Config:
        """Return the roster's settings with those of this machine."""
        # What a roster says about trackers is nobody else's business.
        local: dict[str, Any] = {"run.device": self.device, "run.trackers": list(self.trackers)}
        if self.seed is not None:
            local["privacy.seed"] = self.seed
        return change_config(self.roster.config, local)


@final
@dataclass(frozen=True)
class PreparedParty:
    """A request that was checked: consent, roster, data. Nothing was spent or written."""

    request: PartyRequest
    agreement: Agreement
    design: RunDesign
    data: RunData

    @property
    def rounds(self) -> Rounds:
        """The rounds of the version that is run."""
        return Rounds(self.request.roster, self.design, self.request.until)


def leaves(request: PartyRequest) -> bool:
    """Say whether this party is not in the version before which it stops."""
    names = [card.name for card in request.until.parties] if request.until is not None else []
    return request.until is not None and request.party.name not in names


def as_leaver(request: PartyRequest) -> PartyRequest:
    """Return the request of a party that leaves: the version before, until the roster begins.

    Any other request is returned as it is.
    """
    roster, name = request.roster, request.party.name
    here = [card.name for card in roster.parties]
    if name in here or not roster.history or name not in roster.history[-1].parties:
        return request
    before = refuse_wrong_history(request.party, roster, request.out, request.model)
    assert before is not None
    return replace(request, roster=before, until=roster, cut=roster.history[-1].cut)
