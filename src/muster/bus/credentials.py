"""Who a connection is: a signed token and the seed of the key that proves it is ours.

A credentials file holds both, each between a line of dashes (the form brokers' tools share).  The broker
sends a nonce; we sign it with Ed25519.  The seed is text: base 32 of two bytes of kind, 32 of key, two of
checksum (CRC-16/XMODEM).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ed25519

from muster.core import errors

_BLOCK = re.compile(r"-{3,}BEGIN ([A-Z ]+)-{3,}\s*([A-Za-z0-9_\-.=]+)\s*-{3,}END \1-{3,}")


@dataclass(frozen=True, slots=True)
class Credentials:
    """``token`` is the user's JWT; ``seed`` the secret of the key it names."""

    token: str
    seed: str = field(repr=False)

    @property
    def identity(self) -> str | None:
        """The name the issuer gave. Not verified here: the broker does that."""
        try:
            claims = self.token.split(".")[1]
            name = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4))).get("name")
        except (IndexError, ValueError, AttributeError):
            return None
        return name if isinstance(name, str) else None

    def sign(self, nonce: bytes) -> bytes:
        return ed25519.Ed25519PrivateKey.from_private_bytes(_raw_seed(self.seed)).sign(nonce)


Source = Credentials | Callable[[], Credentials] | str | Path
"""Given as they are, or as something to ask before each attempt to connect: a function, or a file's path."""


def load(source: Source) -> Credentials:
    if isinstance(source, Credentials):
        return source
    if callable(source):
        return source()
    try:
        text = Path(source).read_text("utf-8")
    except OSError as error:
        raise errors.NotFound(f"cannot read the credentials {str(source)!r}: {error.strerror}") from error
    return parse(text)


def parse(text: str) -> Credentials:
    blocks = {match[1]: match[2] for match in _BLOCK.finditer(text)}
    token = blocks.get("NATS USER JWT")
    seed = blocks.get("USER NKEY SEED")
    if token is None or seed is None:
        raise errors.InvalidInput(
            "these are not credentials: expected a block NATS USER JWT and a block USER NKEY SEED"
        )
    _raw_seed(seed)
    return Credentials(token, seed)


def _raw_seed(seed: str) -> bytes:
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except binascii.Error as error:
        raise errors.InvalidInput("the seed of a key is not base 32") from error
    body, checksum = raw[:-2], raw[-2:]
    if len(body) != 34 or binascii.crc_hqx(body, 0).to_bytes(2, "little") != checksum:
        raise errors.InvalidInput("the seed of a key is damaged: its checksum does not match")
    return body[2:]
