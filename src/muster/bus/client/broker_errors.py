"""Maps errors of brokers and of the system to Muster errors."""

from __future__ import annotations

import asyncio
import re
import ssl

from muster.core import errors

VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "(.*?)"', re.IGNORECASE)

#: What a reader or a handler may raise: a cancellation is that of something that it waited for.
READER_ERRORS = (Exception, asyncio.CancelledError)

_HARMLESS = ("maximum subscriptions", "invalid subject", "invalid publish subject")
_UNAUTHORIZED = ("authorization", "authentication", "revoked", "expired")


class BrokerError(Exception):
    """An error line of a broker that ends the connection, or a reply that is not a broker's."""


def is_harmless(text: str) -> bool:
    """Whether the connection stays open after this error line of the broker."""
    text = text.lower()
    return any(words in text for words in _HARMLESS)


def is_credential_error(error: BaseException) -> bool:
    """Not an authentication timeout: one of the two was too busy for the handshake."""
    text = str(error).lower() if isinstance(error, BrokerError) else ""
    return any(word in text for word in _UNAUTHORIZED) and "timeout" not in text


def connection_error(error: Exception, server: str = "") -> errors.MusterError:
    """Map an error of a broker or of the system to a Muster error."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, errors.MusterError):
        return error
    if is_credential_error(error):
        return errors.Unauthorized(
            f"the broker refuses these credentials: {text}",
            hint="check that they are this domain's, have not expired and were not revoked",
        )
    where = re.sub(r"//[^@/]*@", "//", server) or "any known address"  # never show a password
    if isinstance(error, ssl.SSLError):
        return errors.Unavailable(
            f"no secure connection to {where}: {text}",
            hint="check the certificate authority and the host's name in the broker's certificate",
        )
    if isinstance(error, ImportError):
        return errors.MissingDependency(f"{text}", hint="pip install 'muster-fabric[websocket]'")
    return errors.NotConnected(f"no broker responds at {where}: {text}")
