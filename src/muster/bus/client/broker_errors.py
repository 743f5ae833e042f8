"""Maps errors of brokers, the system and nats-py to Muster errors."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Iterator

import nats.errors

from muster.core import errors

VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "(.*?)"', re.IGNORECASE)

_HARMLESS = ("maximum subscriptions", "invalid subject", "invalid publish subject")
_UNAUTHORIZED = ("authorization", "authentication", "revoked", "expired")


def is_harmless(text: str) -> bool:
    """Whether the connection stays open after this error line of the broker."""
    text = text.lower()
    return any(words in text for words in _HARMLESS)


def is_credential_error(text: str) -> bool:
    """Not an authentication timeout: one of the two was too busy for the handshake."""
    text = text.lower()
    return any(word in text for word in _UNAUTHORIZED) and "timeout" not in text


def connection_error(error: Exception, server: str = "") -> errors.MusterError:
    """Map an error of the library or the system to a Muster error."""
    text = str(error).removeprefix("nats: ").strip().strip("'") or type(error).__name__
    if isinstance(error, errors.MusterError):
        return error
    if isinstance(error, nats.errors.AuthorizationError) or is_credential_error(text):
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
    if isinstance(error, nats.errors.Error) and "url" in text:
        return errors.InvalidInput(f"not the URL of a broker: {where} ({text})")
    return errors.NotConnected(f"no broker responds at {where}: {text}")


@contextlib.contextmanager
def failed_attempt() -> Iterator[None]:
    """Any error of an attempt to connect as one of those after which nats-py tries again: others (of a
    WebSocket handshake, or a reply that is not a broker's) would end its attempts for good.
    """
    try:
        yield
    except (OSError, nats.errors.Error, asyncio.CancelledError, ImportError):
        raise
    except Exception as error:
        raise ConnectionError(f"not a reply of a broker: {error}") from error
