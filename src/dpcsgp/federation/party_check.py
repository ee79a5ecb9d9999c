"""Is this party ready? One finding per question, each with a remedy; nothing is sent or spent.

A peer answers while its `party run` is up; that waits for everybody and spends nothing before.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from dpcsgp.errors import ConfigError, DpcsgpError, WireError
from dpcsgp.federation.agreement import Agreement, examine, refuse_unsupported
from dpcsgp.federation.consent import check_own_card, require_consent
from dpcsgp.federation.party_data import load_own_data
from dpcsgp.federation.party_request import PartyRequest
from dpcsgp.federation.party_run import own_end
from dpcsgp.federation.party_status import read_status
from dpcsgp.federation.peers import Neighbours, Peer
from dpcsgp.federation.run_place import STATUS, latest_place
from dpcsgp.federation.succession import peers_of
from dpcsgp.federation.transport import check_peer

_SECONDS: Final = 5.0
_STATE_TENSORS: Final = 8  # at most so many vectors as long as the model are in a checkpoint


@final
@dataclass(frozen=True)
class Finding:
    """The answer to one question: passed, failed (with a remedy), or not asked (None)."""

    subject: str
    passed: bool | None
    detail: str

    @property
    def word(self) -> str:
        """PASS, FAIL, or a dash where there was nothing to ask."""
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
    yield _data(request, agreement)
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


def _data(request: PartyRequest, agreement: Agreement) -> Finding:
    """Hold the data against the roster, if they were named."""
    roster, shape = request.roster, request.roster.data
    if roster.config.task.name == "own" and request.examples.is_empty:
        wanted = f"inputs {list(shape.input_shape)}, {shape.num_classes} classes"
        return Finding("data", None, f"give --data FILE to have them checked: {wanted}")
    return _found(
        "data",
        lambda: load_own_data(roster, request.node, request.examples, agreement.design),
        f"inputs {list(shape.input_shape)}, as many examples as declared or fewer",
    )


def _disk(request: PartyRequest, agreement: Agreement) -> Finding:
    """Compare free space with journal, checkpoints and kept releases at their largest."""
    design, place = agreement.design, request.out or request.party.path
    messages = (1 + len(request.roster.topology.senders_to(request.node))) * (
        agreement.bytes_per_edge
    )
    kept = 2 * design.config.run.checkpoint_every + 3 * _STATE_TENSORS
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
        return bool(read_status(latest_place(request.party, request.roster) / STATUS)["running"])
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
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            f"another party, or an interceptor, answers at {peer.address}: its certificate is not "
            f"that of {peer.name} in the roster; compare addresses and fingerprints"
        )
    if "handshake" in text.lower() or "ssl" in text.lower() or "socket closed" in text.lower():
        return (
            f"{text}: no TLS handshake; does a proxy stand in between, or does {peer.name} have "
            "another roster, on which this party's certificate is not?"
        )
    return text
