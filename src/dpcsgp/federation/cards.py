"""The public card of a party: its name, certificate, address, key for shared noise and promise.

A card is signed with the party's own key. Whoever changes one field of it, the promise for example,
makes a card that nobody takes.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from dpcsgp.errors import ConfigError
from dpcsgp.federation.files import Fields, parse_table, read_text, toml_lines
from dpcsgp.federation.identity import (
    NAME_EXPECTED,
    NAME_PATTERN,
    check_noise_key,
    is_signed,
    read_certificate,
    sign,
)

FORMAT: Final = 1
LARGEST_CARD: Final = 16 * 1024  # bytes
PROMISED: Final = ("num_examples", "epsilon", "delta")
MOST_EXAMPLES: Final = 10**12
_PEM: Final = r"-----BEGIN CERTIFICATE-----\n[A-Za-z0-9+/=\n]{1,6000}-----END CERTIFICATE-----\n"
_HOST: Final = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\]")


@final
@dataclass(frozen=True)
class Promise:
    """What a party promises its examples: (epsilon, delta)-DP, with so many declared examples."""

    num_examples: int
    epsilon: float
    delta: float

    @classmethod
    def take(cls, fields: Fields) -> Promise:
        """Take the three fields of a promise."""
        return cls(
            fields.whole("num_examples", 1, MOST_EXAMPLES),
            fields.positive("epsilon"),
            fields.positive("delta", below=1.0),
        )


@final
@dataclass(frozen=True)
class Card:
    """The public card of a party; one that exists was checked, signature included.

    Attributes:
        name: of the party; also the name in its certificate.
        certificate_pem: self-signed, P-256.
        address: "host:port" at which others can call it; None: it can only call out.
        noise_key: public X25519 key, hexadecimal.
        promise: None as long as the party has not stated it.
        signature: by the certificate's key over all other fields, hexadecimal.
    """

    name: str
    certificate_pem: str
    address: str | None
    noise_key: str
    promise: Promise | None
    signature: str

    def __post_init__(self) -> None:
        where = f"card of {self.name}"
        certificate = read_certificate(self.certificate_pem, self.name, where)
        check_noise_key(self.noise_key, where)
        if not is_signed(certificate, "card", self.content(), self.signature):
            raise ConfigError(
                f"{where}: the signature does not fit: a field was changed after {self.name} "
                f"signed it; ask {self.name} for the card again (own cards are changed with "
                "`dpcsgp party card`)"
            )

    @cached_property
    def certificate(self) -> x509.Certificate:
        """The certificate, parsed."""
        return read_certificate(self.certificate_pem, self.name, f"card of {self.name}")

    @property
    def promised(self) -> Promise:
        """The promise; refused where there is none."""
        if self.promise is None:
            raise ConfigError(
                f"card of {self.name}: states no num_examples, epsilon and delta; {self.name} adds "
                "them with `dpcsgp party card --num-examples N --epsilon E --delta D`"
            )
        return self.promise

    @property
    def valid(self) -> tuple[datetime.date, datetime.date]:
        """First and last day of the certificate."""
        certificate = self.certificate
        return certificate.not_valid_before_utc.date(), certificate.not_valid_after_utc.date()

    def content(self) -> dict[str, Any]:
        """Return all fields but the signature, as plain values."""
        return _content(self.name, self.certificate_pem, self.address, self.noise_key, self.promise)

    def lines(self) -> list[str]:
        """Return the fields as lines of TOML."""
        fields = self.content()
        pem = fields.pop("certificate")
        return [
            *toml_lines(fields),
            f'certificate = """\n{pem}"""',
            f'signature = "{self.signature}"',
        ]

    def text(self) -> str:
        """Return the card file."""
        heading = (
            f"# Public card of {self.name}, for a federation of dpcsgp. Give it to the others.\n"
            "# It is signed: `dpcsgp party card` changes it, an editor makes it worthless.\n"
        )
        return heading + "\n".join(self.lines()) + "\n"

    @classmethod
    def take(cls, fields: Fields) -> Card:
        """Build a checked card from the fields of a table, and refuse what is left over."""
        fields.format(FORMAT)
        card = cls(
            name=fields.text("name", NAME_PATTERN, NAME_EXPECTED),
            certificate_pem=fields.text("certificate", _PEM, "one certificate as PEM text"),
            address=_take_address(fields),
            noise_key=fields.text("noise_key", "[0-9a-f]{64}", "64 hexadecimal digits"),
            promise=Promise.take(fields) if any(map(fields.has, PROMISED)) else None,
            signature=fields.text("signature", "([0-9a-f]{2}){8,80}", "hexadecimal digits"),
        )
        fields.end()
        return card

    @classmethod
    def parse(cls, text: str, where: str) -> Card:
        """Read a card from text; `where` names it in errors."""
        return cls.take(Fields(parse_table(text, where), where))

    @classmethod
    def load(cls, path: Path) -> Card:
        """Read and check a card file."""
        return cls.parse(read_text(path, "card", LARGEST_CARD), f"card {path}")


def signed_card(
    key: ec.EllipticCurvePrivateKey,
    name: str,
    certificate_pem: str,
    address: str | None,
    noise_key: str,
    promise: Promise | None,
) -> Card:
    """Return a card that its party signs now."""
    fields = (name, certificate_pem, address, noise_key, promise)
    return Card(*fields, signature=sign(key, "card", _content(*fields)))


def _content(
    name: str, certificate_pem: str, address: str | None, noise_key: str, promise: Promise | None
) -> dict[str, Any]:
    """Return what a party signs."""
    reach = {"outbound_only": True} if address is None else {"address": address}
    return {
        "format": FORMAT,
        "name": name,
        **reach,
        "noise_key": noise_key,
        **(vars(promise) if promise else {}),
        "certificate": certificate_pem,
    }


def _take_address(fields: Fields) -> str | None:
    if not fields.has("outbound_only"):
        value = fields.take("address")
        if not isinstance(value, str) or fault_of_address(value):
            raise fields.wrong("address", value, "HOST:PORT, or outbound_only = true")
        return value
    if fields.flag("outbound_only") is not True or fields.has("address"):
        raise fields.wrong("outbound_only", False, "true and no address, or an address alone")
    return None


def check_address(address: str) -> str:
    """Return an address in its one spelling, or refuse it.

    >>> check_address("Node-A.example:7400")
    'node-a.example:7400'
    """
    address = address.lower()
    if problem := fault_of_address(address):
        raise ConfigError(
            f"--address {address[:80]}: {problem}; expected HOST:PORT such as "
            "node.example.org:7400 or [2001:db8::1]:7400"
        )
    return address


def fault_of_address(address: str) -> str | None:
    """Say what is wrong with an address at which others shall call; None: nothing."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return "the port is missing"
    if not _HOST.fullmatch(host):
        return "the host is neither a name nor an IP address"
    if not re.fullmatch("[1-9][0-9]{0,4}", port) or int(port) > 65535:
        return "the port is not a number from 1 to 65535"
    try:
        number = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        # Brackets hold numbers only, and a name of digits and dots is a broken number.
        broken = host.startswith("[") or re.fullmatch("[0-9.]+", host)
        return "the host is no valid IP address" if broken else None
    return "nobody can be called at this address" if number.is_unspecified else None
