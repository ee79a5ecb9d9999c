"""A party's own folder: private keys that never leave it, the public card, and its consents.

    key.pem           TLS key, mode 0600
    noise-key.pem     key for shared noise, mode 0600
    NAME.card.toml    the public card
    consents/         one signed file per roster that the party approved

The folder appears at once and complete, with mode 0700: after a crash it is there or it is not.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dpcsgp.errors import ConfigError
from dpcsgp.federation.cards import Card, Promise, signed_card
from dpcsgp.federation.identity import (
    certificate_text,
    check_name,
    new_certificate,
    noise_key_text,
    public_key_of,
    read_private_key,
    read_secret,
    write_secret,
)
from dpcsgp.records.files import write_atomically

KEY: Final = "key.pem"
NOISE_KEY: Final = "noise-key.pem"
CARD: Final = ".card.toml"
CONSENTS: Final = "consents"


@final
@dataclass(frozen=True)
class PartyFolder:
    """The folder of one party: its card, and private keys that are read only when they are used."""

    path: Path
    card: Card

    @property
    def name(self) -> str:
        """Name of the party."""
        return self.card.name

    @property
    def certificate_pem(self) -> str:
        """The party's own certificate."""
        return self.card.certificate_pem

    @property
    def consents(self) -> Path:
        """Folder of the consents."""
        return self.path / CONSENTS

    def key_pem(self) -> bytes:
        """Return the private TLS key as PEM."""
        return read_secret(self.path / KEY)

    def key(self) -> ec.EllipticCurvePrivateKey:
        """Return the private TLS key."""
        key = read_private_key(self.key_pem(), self.path / KEY)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"private key {self.path / KEY} is no P-256 key; restore the backup")
        return key

    def noise_key(self) -> X25519PrivateKey:
        """Return the private key for shared noise."""
        path = self.path / NOISE_KEY
        key = read_private_key(read_secret(path), path)
        if not isinstance(key, X25519PrivateKey):
            raise ConfigError(f"private key {path} is no X25519 key; restore the backup")
        return key

    @property
    def card_file(self) -> Path:
        """Where the card is."""
        return self.path / f"{self.name}{CARD}"

    @classmethod
    def create(
        cls, path: Path, name: str, address: str | None, promise: Promise | None = None
    ) -> PartyFolder:
        """Make keys, certificate and card of a new party.

        Args:
            path: the new folder; it must not exist, or be empty.
            name: of the party.
            address: checked "host:port", or None for a party that only calls out.
            promise: may be stated later.

        Raises:
            ConfigError: the folder has something in it: keys are never overwritten.
        """
        check_name(name)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(
                f"--folder {path}: something is there already, and keys are never overwritten; "
                "choose another folder or name"
            )
        # Complete beside its place first, then renamed: no half folder is ever seen.
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        draft.mkdir(mode=0o700)
        try:
            card = _fill(draft, name, address, promise)
            draft.rename(path)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return cls(path, card)

    @classmethod
    def open(cls, path: Path) -> PartyFolder:
        """Read a party's folder; its card, keys and their modes are checked.

        Raises:
            ConfigError: something is missing, damaged, or does not belong together.
        """
        cards = sorted(path.glob(f"*{CARD}"))
        if len(cards) != 1:
            found = ", ".join(card.name for card in cards) or "none"
            raise ConfigError(
                f"--folder {path}: expected the folder that `dpcsgp party new` made, with one card "
                f"NAME{CARD} in it; found {found} (keep the cards of others elsewhere)"
            )
        folder = cls(path, Card.load(cards[0]))
        # Key and card must be one party's: a card copied over another would be found at connecting.
        if folder.key().public_key() != public_key_of(folder.card.certificate):
            raise ConfigError(f"{cards[0]} and {path / KEY} do not belong together; restore both")
        if noise_key_text(folder.noise_key()) != folder.card.noise_key:
            raise ConfigError(
                f"{cards[0]} and {path / NOISE_KEY} do not belong together; restore both"
            )
        return folder

    def promise(self, promise: Promise) -> PartyFolder:
        """State another promise: the card is signed and written anew."""
        card = self.card
        new = signed_card(
            self.key(), card.name, card.certificate_pem, card.address, card.noise_key, promise
        )
        write_atomically(self.card_file, new.text().encode())
        return PartyFolder(self.path, new)


def _fill(folder: Path, name: str, address: str | None, promise: Promise | None) -> Card:
    """Write keys and card of a new party into an empty folder."""
    key, noise_key = ec.generate_private_key(ec.SECP256R1()), X25519PrivateKey.generate()
    certificate = certificate_text(new_certificate(key, name))
    card = signed_card(key, name, certificate, address, noise_key_text(noise_key), promise)
    write_secret(folder / KEY, key)
    write_secret(folder / NOISE_KEY, noise_key)
    (folder / CONSENTS).mkdir(mode=0o700)
    write_atomically(folder / f"{name}{CARD}", card.text().encode())
    return card


def find_folder(given: Path | None) -> Path:
    """Return the party's folder: the given one, this one, or the only one below this one."""
    if given is not None:
        return given
    if Path(KEY).is_file():
        return Path()
    found = sorted(key.parent for key in Path().glob(f"*/{KEY}"))
    if len(found) != 1:
        names = ", ".join(str(folder) for folder in found) or "none"
        raise ConfigError(
            f"--folder is not given, and of folders with a party's keys there are here: {names}; "
            "give --folder DIR"
        )
    return found[0]
