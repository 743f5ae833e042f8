"""Public-key encryption of secrets, for storage and transport.

The public key seals a box, and only the private key opens it. Each box has its own key (X25519 with that of
the receiver, HKDF-SHA256, ChaCha20-Poly1305) and a context, which is needed to open it: a box that replaced
another one cannot be opened.

    version 1 | public half of the box's own key (32 bytes) | sealed text and its tag
"""

from __future__ import annotations

import base64
import binascii
import pathlib

from cryptography import exceptions
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import x25519
from cryptography.hazmat.primitives.ciphers import aead
from cryptography.hazmat.primitives.kdf import hkdf

from muster.core import errors
from muster.trust import private_files

_VERSION = b"\x01"
_KEY_BYTES = 32
_PURPOSE = b"muster sealed box 1"
_NONCE = bytes(12)  # a box's key seals once


class SealedBoxKey:
    """Opens boxes sealed for it. Its `repr` shows only the public key."""

    def __init__(self, private: x25519.X25519PrivateKey) -> None:
        self._private = private
        self._public = private.public_key().public_bytes_raw()
        self.public = base64.b64encode(self._public).decode()

    @classmethod
    def create(cls) -> SealedBoxKey:
        return cls(x25519.X25519PrivateKey.generate())

    @classmethod
    def kept_in(cls, path: pathlib.Path) -> SealedBoxKey:
        """The key in this file, which is created if it does not exist. The caller holds the folder's lock."""
        if not path.exists():
            private_files.replace_file(path, base64.b64encode(cls.create()._private.private_bytes_raw()))
        text = private_files.read_text(path, "the key of secrets")
        return cls(x25519.X25519PrivateKey.from_private_bytes(_key(text)))

    def open(self, box: str, about: str) -> bytes:
        raw = _decoded(box)
        head = len(_VERSION) + _KEY_BYTES
        if not raw.startswith(_VERSION) or len(raw) <= head:
            raise errors.InvalidInput("not a sealed box")
        own = raw[len(_VERSION) : head]
        try:
            shared = self._private.exchange(x25519.X25519PublicKey.from_public_bytes(own))
            return _cipher(shared, own, self._public).decrypt(_NONCE, raw[head:], about.encode())
        except (exceptions.InvalidTag, ValueError) as error:
            raise errors.InvalidInput(
                f"the box does not open: it was sealed for another key, or is not about {about!r}"
            ) from error

    def __repr__(self) -> str:
        return f"Key({self.public})"


def seal(public: str, data: bytes, about: str) -> str:
    """Seal a box, as text, for the key with this public half."""
    receiver, own = _key(public), x25519.X25519PrivateKey.generate()
    own_public = own.public_key().public_bytes_raw()
    try:
        shared = own.exchange(x25519.X25519PublicKey.from_public_bytes(receiver))
    except ValueError as error:
        raise errors.InvalidInput(f"not a public key for a sealed box: {error}") from error
    sealed = _cipher(shared, own_public, receiver).encrypt(_NONCE, data, about.encode())
    return base64.b64encode(_VERSION + own_public + sealed).decode()


def _cipher(shared: bytes, own: bytes, receiver: bytes) -> aead.ChaCha20Poly1305:
    derived = hkdf.HKDF(hashes.SHA256(), _KEY_BYTES, salt=None, info=_PURPOSE + own + receiver)
    return aead.ChaCha20Poly1305(derived.derive(shared))


def _key(text: str) -> bytes:
    raw = _decoded(text)
    if len(raw) != _KEY_BYTES:
        raise errors.InvalidInput(f"a key of {len(raw)} bytes: it has {_KEY_BYTES}")
    return raw


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise errors.InvalidInput("not base64") from error
