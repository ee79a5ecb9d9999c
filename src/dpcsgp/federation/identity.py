"""Keys, certificates and signatures: how a party proves that it is itself.

A party has one P-256 key, for TLS and for signatures, with a certificate that it signed itself, and
one X25519 key, from which pairs of parties derive shared noise. No authority vouches for anybody:
the roster pins every certificate, and the roster's end date is the only one that counts.

Ed25519 is not used for TLS, because gRPC does not take such certificates.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dpcsgp.errors import ConfigError
from dpcsgp.federation.files import canonical

# A name is also the name in the certificate, so it has the form of one label of a host name.
NAME_PATTERN: Final = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
NAME_EXPECTED: Final = "1 to 63 lower-case letters, digits and hyphens, a letter first"
# Every certificate is also made out to this name. A caller asks for it, because the name that it
# asks for goes over the line in clear; who answers is decided by the pinned certificate alone.
ANY_PARTY: Final = "party.invalid"
# RFC 5280, section 4.1.2.5: the date of a certificate that does not expire by itself.
_NEVER: Final = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
_SLOW_CLOCKS: Final = datetime.timedelta(days=1)


def check_name(name: str) -> str:
    """Return a party's name, or refuse it."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"NAME = {name[:80]!r}: expected {NAME_EXPECTED}")
    return name


def new_certificate(key: ec.EllipticCurvePrivateKey, name: str) -> x509.Certificate:
    """Return the self-signed certificate of a party."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLOW_CLOCKS)
        .not_valid_after(_NEVER)
        # It is its own root, so it must be allowed to sign; and nothing below itself.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        .add_extension(x509.SubjectAlternativeName(_names(name)), critical=False)
        .sign(key, hashes.SHA256())
    )


def _names(name: str) -> list[x509.GeneralName]:
    return [x509.DNSName(name), x509.DNSName(ANY_PARTY)]


def _key_usage() -> x509.KeyUsage:
    """Allow TLS signatures and the signature under the own certificate, nothing else."""
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, crl_sign=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def read_certificate(pem: str, name: str, where: str) -> x509.Certificate:
    """Return the certificate of the party `name`, or refuse it.

    Raises:
        ConfigError: it is damaged, of another kind than `new_certificate` makes, or somebody
            else's; `where` names the card.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode())
        problem = _fault_of(certificate, pem, name)
    # Whatever a hostile certificate makes the library say.
    except Exception as error:
        problem = f"cannot be read ({str(error)[:80]})"
        certificate = None
    if certificate is None or problem:
        raise ConfigError(
            f"{where}: certificate {problem}; ask {name} for the card that `dpcsgp party new` wrote"
        )
    return certificate


def _fault_of(certificate: x509.Certificate, pem: str, name: str) -> str | None:
    """Say what is wrong with a certificate; None: nothing."""
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        return "has no P-256 key"
    try:
        certificate.verify_directly_issued_by(certificate)
    except (InvalidSignature, ValueError, TypeError):
        return "is not signed by its own key"
    extensions = certificate.extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if list(names) != _names(name):
        return f"is not made out to {name}"
    if not extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
        return "lacks the CA flag, which TLS needs to take it as its own root"
    # Peers compare the text: there must be one spelling.
    if certificate_text(certificate) != pem:
        return "has text around it"
    return None


def certificate_text(certificate: x509.Certificate) -> str:
    """Return a certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def public_key_of(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """Return the P-256 key of a checked certificate."""
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


def sign(key: ec.EllipticCurvePrivateKey, purpose: str, content: Mapping[str, Any]) -> str:
    """Return a signature (hexadecimal) under plain values, for one purpose."""
    return key.sign(_signed(purpose, content), ec.ECDSA(hashes.SHA256())).hex()


def is_signed(
    certificate: x509.Certificate, purpose: str, content: Mapping[str, Any], signature: str
) -> bool:
    """Say whether the owner of a certificate signed these values for this purpose."""
    try:
        public_key_of(certificate).verify(
            bytes.fromhex(signature), _signed(purpose, content), ec.ECDSA(hashes.SHA256())
        )
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed(purpose: str, content: Mapping[str, Any]) -> bytes:
    # The purpose comes first, so that a signed card never passes for a consent.
    return f"dpcsgp {purpose}\n".encode() + canonical(content)


def check_noise_key(key: str, where: str) -> None:
    """Refuse an X25519 key whose shared secrets everybody would know."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(key)))
    except ValueError:
        raise ConfigError(
            f"{where}: noise_key = {key[:16]}...: not a key that shared noise can be derived from; "
            "ask for the card again"
        ) from None


def noise_key_text(key: X25519PrivateKey) -> str:
    """Return the public half of a key for shared noise, hexadecimal."""
    return key.public_key().public_bytes_raw().hex()


def write_secret(path: Path, key: ec.EllipticCurvePrivateKey | X25519PrivateKey) -> None:
    """Write a private key that only its owner can read; an existing file is never overwritten."""
    body = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    # Created with its final mode: there is no moment in which others could open it.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def read_secret(path: Path) -> bytes:
    """Return the text of a private key, and refuse a file that others may read."""
    try:
        mode = path.stat().st_mode
        body = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"private key {path} cannot be read: {error.strerror}; restore the party's folder "
            "from a backup, or make a new party with `dpcsgp party new`"
        ) from None
    if os.name == "posix" and mode & 0o077:
        raise ConfigError(
            f"private key {path} can be read by others (mode {mode & 0o777:04o}); chmod 600 it, "
            "and make a new party if anybody else may have copied it"
        )
    return body


def read_private_key(body: bytes, path: Path) -> ec.EllipticCurvePrivateKey | X25519PrivateKey:
    """Return the key in a text that `read_secret` returned."""
    try:
        key = serialization.load_pem_private_key(body, password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey | X25519PrivateKey):
        raise ConfigError(f"private key {path} is damaged; restore it from a backup")
    return key
