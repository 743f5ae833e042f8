"""Text that a browser keeps for the web process, signed so that only this process can make it. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)
MAX_BYTES = 3072


def seal(value: msgspec.Struct, key: bytes, purpose: str) -> str:
    """The value as JSON and its HMAC; text of one purpose is not valid for another."""
    body = encode(msgspec.json.encode(value))
    return f"{body}.{encode(mac(body, key, purpose))}"


def unseal(text: str, key: bytes, purpose: str, kind: type[T]) -> T | None:
    """The value of `seal`; None if the text is damaged or was not signed with this key and purpose."""
    body, _, signature = text.partition(".")
    try:
        if len(text) > MAX_BYTES or not hmac.compare_digest(_decode(signature), mac(body, key, purpose)):
            return None
        return msgspec.json.decode(_decode(body), type=kind)
    except (ValueError, binascii.Error, msgspec.MsgspecError, RecursionError):
        return None


def mac(body: str, key: bytes, purpose: str) -> bytes:
    return hmac.digest(key, f"{purpose}:{body}".encode(), hashlib.sha256)


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
