"""A party's keys stay its own, its certificate works in real TLS, and a changed card is noticed."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st
from made_parties import PROMISE

from dpcsgp.errors import ConfigError
from dpcsgp.federation import identity
from dpcsgp.federation.cards import Card, Promise, check_address, signed_card
from dpcsgp.federation.party_folder import PartyFolder


@pytest.fixture(scope="module")
def party(tmp_path_factory: pytest.TempPathFactory) -> PartyFolder:
    folder = tmp_path_factory.mktemp("identity") / "lab"
    return PartyFolder.create(folder, "lab", "lab.example:7400", PROMISE)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_are_for_the_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        party = PartyFolder.create(tmp_path / "lab", "lab", None)
    finally:
        os.umask(old)
    assert mode(party.path) == mode(party.consents) == 0o700
    assert mode(party.path / "key.pem") == mode(party.path / "noise-key.pem") == 0o600


def test_keys_are_never_overwritten(party: PartyFolder) -> None:
    before = party.key_pem()
    with pytest.raises(ConfigError, match="never overwritten"):
        PartyFolder.create(party.path, "lab", None)
    assert party.key_pem() == before


def test_a_failed_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dpcsgp.federation.party_folder.write_atomically", full_disk)
    with pytest.raises(OSError, match="space"):
        PartyFolder.create(tmp_path / "lab", "lab", None)
    assert not list(tmp_path.iterdir())


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    party = PartyFolder.create(tmp_path / "lab", "lab", None)
    (party.path / "key.pem").chmod(0o640)
    with pytest.raises(ConfigError, match=r"0640.*chmod 600"):
        PartyFolder.open(party.path)


def test_a_folder_reads_back_what_was_made(party: PartyFolder) -> None:
    again = PartyFolder.open(party.path)
    assert again == party
    assert again.card.promise == PROMISE
    assert again.noise_key().public_key().public_bytes_raw().hex() == party.card.noise_key


def test_keys_of_another_party_are_refused(tmp_path: Path, party: PartyFolder) -> None:
    other = PartyFolder.create(tmp_path / "other", "other", None)
    for name in ("key.pem", "noise-key.pem"):
        own = (other.path / name).read_bytes()
        (other.path / name).write_bytes((party.path / name).read_bytes())
        with pytest.raises(ConfigError, match="do not belong together"):
            PartyFolder.open(other.path)
        (other.path / name).write_bytes(own)
    (other.path / "key.pem").write_text("nonsense")
    with pytest.raises(ConfigError, match="damaged"):
        PartyFolder.open(other.path)


def tls(party: PartyFolder, peer: Card, server: bool) -> ssl.SSLContext:
    """A side of TLS 1.3 whose only root is the peer's own certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=peer.certificate_pem)
    pem = party.path / "certificate-of-test.pem"
    pem.write_text(party.certificate_pem)
    context.load_cert_chain(pem, party.path / "key.pem")
    return context


def meet(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> bytes:
    """Let two sides meet over a real connection; return the certificate that the client saw."""
    here, there = socket.socketpair()

    def answer() -> None:
        try:
            with server.wrap_socket(here, server_side=True) as wrapped:
                wrapped.sendall(b"x")
        except OSError:
            here.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with client.wrap_socket(there, server_hostname=name) as wrapped:
            assert wrapped.recv(1) == b"x"
            return wrapped.getpeercert(binary_form=True) or b""
    finally:
        thread.join()


def test_certificates_pin_each_other_in_real_tls(tmp_path: Path) -> None:
    a, b, impostor = (
        PartyFolder.create(tmp_path / folder, name, None)
        for folder, name in (("a", "lab-a"), ("b", "lab-b"), ("fake", "lab-a"))
    )
    server, client = tls(a, b.card, server=True), tls(b, a.card, server=False)
    seen = x509.load_der_x509_certificate(meet(server, client, "lab-a"))
    assert identity.certificate_text(seen) == a.certificate_pem
    with pytest.raises(ssl.SSLError):
        meet(tls(impostor, b.card, server=True), client, "lab-a")
    with pytest.raises(ssl.SSLError):
        meet(server, client, "lab-b")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("epsilon = 2.0", "epsilon = 20.0"),
        ("num_examples = 90", "num_examples = 91"),
        ("delta = 0.001", "delta = 0.002"),
        ('address = "lab.example:7400"', 'address = "evil.example:7400"'),
        ('address = "lab.example:7400"', "outbound_only = true"),
        ('noise_key = "', 'noise_key = "' + "11" * 32 + '" #'),
    ],
)
def test_a_changed_field_breaks_the_signature(party: PartyFolder, old: str, new: str) -> None:
    text = party.card.text()
    assert old in text
    with pytest.raises(ConfigError, match="signature does not fit"):
        Card.parse(text.replace(old, new), "card")


def test_a_signature_holds_for_one_purpose(party: PartyFolder) -> None:
    content = party.card.content()
    assert identity.is_signed(party.card.certificate, "card", content, party.card.signature)
    assert not identity.is_signed(party.card.certificate, "consent", content, party.card.signature)


def test_spaces_comments_and_order_do_not_count(party: PartyFolder) -> None:
    first, *rest = party.card.text().replace("epsilon = 2.0", "epsilon=2 # two").splitlines()[2:]
    assert Card.parse("\n".join([*rest, first]), "card") == party.card


def test_a_promise_can_be_changed_by_its_owner(tmp_path: Path) -> None:
    party = PartyFolder.create(tmp_path / "lab", "lab", None)
    with pytest.raises(ConfigError, match="dpcsgp party card"):
        _ = party.card.promised
    party.promise(Promise(10, 1.0, 1e-4))
    assert PartyFolder.open(party.path).card.promised == Promise(10, 1.0, 1e-4)


def certificate(key: ec.EllipticCurvePrivateKey, name: str, signer: object = None) -> str:
    made = identity.new_certificate(key, name)
    if signer is None:
        return identity.certificate_text(made)
    builder = x509.CertificateBuilder(
        made.issuer, made.subject, made.public_key(), made.serial_number,
        datetime.datetime(2020, 1, 1), datetime.datetime(2021, 1, 1), list(made.extensions),
    )  # fmt: skip
    return identity.certificate_text(builder.sign(signer, hashes.SHA256()))  # type: ignore[arg-type]


def test_certificates_of_others_and_of_other_kinds_are_refused(party: PartyFolder) -> None:
    key, other = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    big = ec.generate_private_key(ec.SECP384R1())
    cases = {
        "not made out to lab": certificate(key, "bank"),
        "not signed by its own key": certificate(key, "lab", other),
        "no P-256 key": certificate(big, "lab"),
        "has text around it": "\n" + certificate(key, "lab"),
        "cannot be read": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    }
    for problem, pem in cases.items():
        with pytest.raises(ConfigError, match=problem):
            signed_card(key, "lab", pem, None, party.card.noise_key, None)


def test_a_noise_key_of_low_order_is_refused(party: PartyFolder) -> None:
    with pytest.raises(ConfigError, match="shared noise"):
        signed_card(party.key(), "lab", party.certificate_pem, None, "00" * 32, None)


@pytest.mark.parametrize(
    "name", ["Lab", "1lab", "lab.a", "-lab", "lab-", "", "l" * 64, "la b", "é"]
)
def test_names_are_labels_of_host_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="lower-case letters"):
        PartyFolder.create(tmp_path / "x", name, None)


@pytest.mark.parametrize(
    "address",
    ["host", "host:0", "host:65536", ":7400", "ho st:1", "0.0.0.0:7400", "[::]:7400", "1.2.3:4",
     "[host]:1", "a/b:1", "host:07400", "::1:7400", "host:7400\n"],
)  # fmt: skip
def test_wrong_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="--address"):
        check_address(address)


@pytest.mark.parametrize(
    "address", ["host:1", "10.0.0.1:7400", "[2001:db8::1]:7400", "a-b.c:65535"]
)
def test_right_addresses_are_taken(address: str) -> None:
    assert check_address(address.upper()) == address


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_card_is_an_error_or_the_same_card(
    party: PartyFolder, data: st.DataObject
) -> None:
    text = party.card.text()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    damaged = text[:start] + data.draw(st.text(max_size=20)) + text[end:]
    try:
        card = Card.parse(damaged, "card")
    except ConfigError:
        return
    assert card.content() == party.card.content()
