"""Is this party ready? One finding per question, each with a remedy; nothing is sent or spent.

A peer answers while its `party run` is up; that waits for everybody and spends nothing before.
"""

from __future__ import annotations

import math
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from dpcsgp.errors import ConfigError, DpcsgpError, WireError
from dpcsgp.federation.agreement import Agreement, examine, refuse_unsupported
from dpcsgp.federation.consent import check_own_card, require_consent
from dpcsgp.federation.data_shape import DataShape, ends_of
from dpcsgp.federation.party_data import OwnColumns, load_named_data, load_own_data
from dpcsgp.federation.party_request import PartyRequest
from dpcsgp.federation.party_run import own_end
from dpcsgp.federation.peers import Neighbours, Peer
from dpcsgp.federation.run_pointers import latest_place
from dpcsgp.federation.status_file import STATUS, read_status
from dpcsgp.federation.succession import peers_of, steps_ahead
from dpcsgp.federation.transport import check_peer

_SECONDS: Final = 5.0
_STATE_TENSORS: Final = 8  # at most so many vectors as long as the model are in a checkpoint


@final
@dataclass(frozen=True)
class Finding:
    """The answer to one question: passed, failed (with a remedy), or not asked (None).

    `warning`: it could not be answered by a program, and people should look at it.
    """

    subject: str
    passed: bool | None
    detail: str
    warning: bool = False

    @property
    def word(self) -> str:
        """PASS, FAIL, WARN, or a dash where there was nothing to ask."""
        if self.warning:
            return "WARN"
        return {True: "PASS", False: "FAIL", None: "-"}[self.passed]


def check_party(request: PartyRequest, seconds: float = _SECONDS) -> Iterator[Finding]:
    """Answer all questions, the cheap ones first.

    Args:
        request: what the party would run.
        seconds: limit for each message to a peer.
    """
    roster = request.roster
    yield _found("card", lambda: check_own_card(request.party, roster), "as in the roster")
    yield _found("consent", lambda: require_consent(request.party, roster), "given")
    yield _found("settings", lambda: refuse_unsupported(roster), "can be run")
    try:
        agreement = examine(roster, request.model)
    except DpcsgpError as error:
        yield Finding("roster", False, str(error))
        return
    yield Finding("roster", True, f"{roster.words}; ends {roster.ends}")
    yield from _data(request, agreement)
    yield _disk(request, agreement)
    yield _listening(request)
    own = own_end(request)
    for peer in Neighbours.of(own, peers_of(roster), roster.topology).all():
        yield _peer(request, peer, seconds)


def _found(subject: str, ask: Callable[[], object], detail: str) -> Finding:
    try:
        ask()
    except DpcsgpError as error:
        return Finding(subject, False, str(error))
    return Finding(subject, True, detail)


def _data(request: PartyRequest, agreement: Agreement) -> Iterator[Finding]:
    """Hold the data against the roster, if they were named."""
    roster, design = request.roster, agreement.design
    passed = f"{roster.data}; as many {roster.facts.unit}s as declared or fewer"
    if roster.config.task.name != "own":
        yield _found(
            "data", lambda: load_own_data(roster, request.node, request.examples, design), passed
        )
        return
    if request.examples.is_empty:
        yield Finding("data", None, f"give --data FILE to have them checked: {roster.data}")
        return
    try:
        _, columns = load_named_data(roster, request.node, request.examples, design)
    except DpcsgpError as error:
        yield Finding("data", False, str(error))
        return
    yield Finding("data", True, passed)
    yield from _columns(roster.data, columns)


def _columns(shape: DataShape, found: OwnColumns) -> Iterator[Finding]:
    """Say by what the columns were compared; people look at what a program cannot."""
    target = f"; target {', '.join(found.target)}" if found.target else ""
    if shape.columns and found.inputs is not None:
        yield Finding("columns", True, f"taken by name: {ends_of(found.inputs)}{target}")
    elif shape.columns:
        detail = (
            "the data have no names of columns, so their order could not be compared with that of "
            f"the roster: {ends_of(shape.columns)}; see that it is the same, or give a table with "
            "names"
        )
        yield Finding("columns", None, detail, warning=True)
    elif shape.lacks_columns:
        names = "" if found.inputs is None else f" (here: {ends_of(found.inputs)}{target})"
        detail = (
            f"compared by number only{names}; see that all parties have the same columns in the "
            "same order, or have a roster made with data.columns"
        )
        yield Finding("columns", None, detail, warning=True)


def _disk(request: PartyRequest, agreement: Agreement) -> Finding:
    """Compare free space with journal, checkpoints and kept releases at their largest."""
    design, place = agreement.design, request.out or request.party.path
    senders = len(request.roster.topology.senders_to(request.node))
    messages = (1 + senders) * agreement.bytes_per_edge
    every, back = design.config.run.checkpoint_every, steps_ahead(request.roster, request.node)
    # With lag a state has a copy per sender, and more of them stay.
    state = _STATE_TENSORS + (senders if back else 0)
    kept = 2 * every + back + (3 + math.ceil(back / max(every, 1))) * state
    needed = messages + 4 * design.dim * kept
    free = shutil.disk_usage(_existing(place)).free
    detail = f"{free / 1e6:,.0f} MB free, at most {needed / 1e6:,.1f} MB needed"
    return Finding("disk", free > needed, detail + ("" if free > needed else "; free space"))


def _existing(path: Path) -> Path:
    path = path.resolve()
    return next(each for each in (path, *path.parents) if each.exists())


def _listening(request: PartyRequest) -> Finding:
    """See whether the address can be listened on, unless this party is doing so."""
    listen = own_end(request).listen
    if listen is None:
        return Finding("own address", None, "this party only calls out")
    if _is_running(request):
        return Finding("own address", True, f"this party runs and listens on {listen}")
    host, _, port = listen.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return Finding(
            "own address",
            False,
            f"{listen} cannot be listened on ({error.strerror or error}); give --listen HOST:PORT "
            "of this machine, or free the port",
        )
    return Finding("own address", True, f"{listen} can be listened on; whether others get through "
                   "is seen by their `party check`")  # fmt: skip


def _is_running(request: PartyRequest) -> bool:
    try:
        place = latest_place(request.party, request.roster.fingerprint)
        return bool(read_status(place / STATUS)["running"])
    except ConfigError:
        return False


def _peer(request: PartyRequest, peer: Peer, seconds: float) -> Finding:
    """Resolve, connect, then speak: the first that fails is told with its remedy."""
    if peer.address is None:
        return Finding(peer.name, None, "only calls out: it will call this party")
    host, _, port = peer.address.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        return Finding(
            peer.name,
            False,
            f"the name {host} is not known ({error.strerror}); ask {peer.name} for its address, "
            "or add the name to your DNS",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except OSError as error:
        return Finding(
            peer.name,
            False,
            f"nothing answers at {peer.address} ({error.strerror or error}); is its `party run` up,"
            " and does every firewall on the way let TCP through?",
        )
    try:
        digest = bytes.fromhex(request.roster.fingerprint)
        check_peer(own_end(request), peer, digest, seconds)
    except WireError as error:
        return Finding(peer.name, False, _explained(peer, str(error)))
    return Finding(
        peer.name, True, f"{peer.address}: TLS, identity, roster, release and clock are right"
    )


def _explained(peer: Peer, text: str) -> str:
    """Add the remedy where the words of the library have none."""
    if "handshake" in text.lower() or "ssl" in text.lower() or "socket closed" in text.lower():
        return (
            f"{text}: no TLS handshake; does a proxy stand in between, or does {peer.name} have "
            "another roster, on which this party's certificate is not?"
        )
    return text
