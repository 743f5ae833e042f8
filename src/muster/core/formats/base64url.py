"""Base64 for URLs, without padding, in its one true spelling."""

from __future__ import annotations

import base64
import binascii

from muster.core import errors


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def decode(text: str) -> bytes:
    """Strict: with extra characters or bits a signature would have several encodings."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise errors.InvalidInput(f"not base64: {error}") from None
    if encode(data) != text:
        raise errors.InvalidInput("base64 that has more than one spelling")
    return data
