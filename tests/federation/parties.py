"""Certificates and parties for tests: real keys, real TLS, loopback addresses."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

sys.path.insert(0, str(Path(__file__).parents[1]))
from dpcsgp.federation.identity import ANY_PARTY
from dpcsgp.federation.party_network import PartyNetwork
from dpcsgp.federation.peers import Peer, Self
from dpcsgp.federation.transport_ends import Timing
from dpcsgp.graphs import Topology
from ports import free_port

NAMES = ("anna", "bert", "carla", "dora", "emil")
ROSTER = bytes(range(32))
QUICK = Timing(hello=3.0, beat=0.3, silence=2.0, sync=0.02, first_pause=0.05, longest_pause=0.3)


def certificate(name: str, issuer: tuple[bytes, bytes] | None = None) -> tuple[bytes, bytes]:
    """Return key and certificate (PEM), self-signed or signed by another pair."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = signer_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    signer: Any = key
    if issuer is not None:
        signer = serialization.load_pem_private_key(issuer[0], None)
        signer_name = x509.load_pem_x509_certificate(issuer[1]).subject
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name), x509.DNSName(ANY_PARTY)]),
            critical=False,
        )
        .sign(signer, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return key_pem, built.public_bytes(serialization.Encoding.PEM)


@cache
def pair(name: str) -> tuple[bytes, bytes]:
    """Return the key and certificate of a party, the same in every test of this process."""
    return certificate(name)


def free_address() -> str:
    """Return a loopback address whose port is free now."""
    return f"127.0.0.1:{free_port()}"


def federation(
    num_parties: int, outbound_only: Sequence[int] = ()
) -> tuple[list[Self], list[Peer]]:
    """Return all parties, as themselves and as their peers see them."""
    selves, peers = [], []
    for node, name in enumerate(NAMES[:num_parties]):
        address = None if node in outbound_only else free_address()
        key, cert = pair(name)
        selves.append(Self(node, name, key, cert, address))
        peers.append(Peer(node, name, cert, address))
    return selves, peers


@contextmanager
def networks(
    topology: Topology,
    folder: Path,
    size: int = 100,
    outbound_only: Sequence[int] = (),
    **options: Any,
) -> Iterator[list[PartyNetwork]]:
    """Open one network per node of a graph; all are closed when the block ends."""
    selves, peers = federation(topology.num_nodes, outbound_only)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                closing(open_network(own, peers, topology, folder, size, **options))
            )
            for own in selves
        ]


def open_network(
    own: Self, peers: Sequence[Peer], topology: Topology, folder: Path, size: int, **options: Any
) -> PartyNetwork:
    """Open the network of one party, its journal in a folder of its name."""
    defaults = {"timing": QUICK, "steps": 10, "roster_digest": ROSTER}
    options = {**defaults, "size_of_round": lambda round_: size, **options}
    return PartyNetwork(
        own,
        peers,
        topology,
        folder=folder / own.name,
        **options,
    )
