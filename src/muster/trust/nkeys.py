"""Nkeys: ed25519 keys in a text form that shows their kind.

A public key is 56 characters and starts with its kind (``O`` operator, ``A`` account, ``U`` user, ``N``
server, ``C`` cluster); a seed starts with ``S`` and the kind.  Inside is base32 of a prefix, 32 bytes of key
and a CRC-16 that catches typing errors before any cryptography does.

Decoding accepts one spelling only (upper case, no padding, no stray bits), so that two different strings
never name one key: revocation lists compare text.
"""

from __future__ import annotations

import base64
import binascii
import enum

from cryptography import exceptions
from cryptography.hazmat.primitives.asymmetric import ed25519

from muster.core import errors

_SEED = 18 << 3
_KEY_BYTES = 32
_CRC_BYTES = 2


class KeyKind(enum.Enum):
    """The value is the prefix byte: five bits that become the first letter."""

    OPERATOR = 14 << 3
    ACCOUNT = 0
    USER = 20 << 3
    SERVER = 13 << 3
    CLUSTER = 2 << 3

    @property
    def letter(self) -> str:
        return "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"[self.value >> 3]


class KeyPair:
    """A key that can sign. Its `repr` shows only the public half."""

    __slots__ = ("_private", "kind", "public")

    def __init__(self, kind: KeyKind, private: ed25519.Ed25519PrivateKey) -> None:
        self._private = private
        self.kind = kind
        self.public = _encode(bytes([kind.value]) + private.public_key().public_bytes_raw())

    @classmethod
    def create(cls, kind: KeyKind) -> KeyPair:
        return cls(kind, ed25519.Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: str) -> KeyPair:
        raw = _decode(seed, 2, "seed")
        # The kind's five bits straddle the first two bytes: 5 bits "S", then 5 bits of kind.
        kind = _kind((raw[0] & 7) << 5 | raw[1] >> 3)
        if raw[0] & 0xF8 != _SEED or raw[1] & 7 or kind is None:
            raise errors.InvalidInput(f"not a seed: expected S followed by one of {_letters()}")
        return cls(kind, ed25519.Ed25519PrivateKey.from_private_bytes(raw[2:]))

    @property
    def seed(self) -> str:
        prefix = bytes([_SEED | self.kind.value >> 5, (self.kind.value & 31) << 3])
        return _encode(prefix + self._private.private_bytes_raw())

    def sign(self, data: bytes) -> bytes:
        return self._private.sign(data)

    def __repr__(self) -> str:
        return f"KeyPair({self.public})"


def kind_of(public: str) -> KeyKind:
    """The kind of a public key; `errors.InvalidInput` if it is not one."""
    return _public(public)[0]


def require_kind(public: str, *kinds: KeyKind) -> str:
    """``public`` itself if it is a public key of one of these kinds."""
    if kind_of(public) not in kinds:
        expected = " or ".join(kind.name.lower() for kind in kinds)
        raise errors.InvalidInput(f"{public} is not the public key of an {expected}")
    return public


def verify(public: str, data: bytes, signature: bytes) -> None:
    """Return if ``public`` signed ``data``; `errors.Unauthorized` otherwise."""
    _, raw = _public(public)
    try:
        ed25519.Ed25519PublicKey.from_public_bytes(raw).verify(signature, data)
    except exceptions.InvalidSignature:
        raise errors.Unauthorized(f"the signature is not {public}'s") from None


def _public(text: str) -> tuple[KeyKind, bytes]:
    raw = _decode(text, 1, "public key")
    kind = _kind(raw[0])
    if kind is None:
        raise errors.InvalidInput(f"not a public key: expected it to start with one of {_letters()}")
    return kind, raw[1:]


def _kind(prefix: int) -> KeyKind | None:
    return next((kind for kind in KeyKind if kind.value == prefix), None)


def _letters() -> str:
    return " ".join(kind.letter for kind in KeyKind)


def _encode(body: bytes) -> str:
    return base64.b32encode(body + _crc(body)).decode().rstrip("=")


def _decode(text: str, prefix_bytes: int, what: str) -> bytes:
    """Prefix and key. The error message never contains the text: it may be a seed."""
    size = prefix_bytes + _KEY_BYTES + _CRC_BYTES
    length = (size * 8 + 4) // 5
    if len(text) != length:
        raise errors.InvalidInput(f"not a {what}: expected {length} characters, found {len(text)}")
    try:
        raw = base64.b32decode(text + "=" * (-length % 8))
    except (binascii.Error, ValueError):
        raise errors.InvalidInput(f"not a {what}: only A-Z and 2-7 are allowed") from None
    body, crc = raw[:-_CRC_BYTES], raw[-_CRC_BYTES:]
    if crc != _crc(body) or _encode(body) != text:
        raise errors.InvalidInput(f"not a {what}: wrong checksum; was a character mistyped?")
    return body


def _crc(data: bytes) -> bytes:
    return binascii.crc_hqx(data, 0).to_bytes(_CRC_BYTES, "little")
