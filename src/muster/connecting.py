"""`muster.connect`: the front door of the bus, for programs that use Muster."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Iterable
from pathlib import Path

from muster.bus import client
from muster.core import errors
from muster.trust import credentials

DEFAULT_SERVER = "nats://127.0.0.1:4222"


async def connect(
    servers: str | Iterable[str] = DEFAULT_SERVER,
    *,
    identity: str | None = None,
    creds: str | Path | credentials.Credentials | None = None,
    tls: ssl.SSLContext | None = None,
) -> client.Client:
    """A connection to the bus: ``async with await muster.connect("nats://…") as bus: …``.

    ``servers``: addresses of brokers (``nats://``, ``tls://``, ``ws://``, ``wss://``); one that answers is
    taken, and the others are turned to when it fails.  ``creds``: credentials, or their file, which is read
    again for each new connection.  ``identity``: the name to go by; otherwise the one in the credentials.
    ``tls``: whom to believe, where the system's certificate authorities are not meant.
    """
    addresses = [servers] if isinstance(servers, str) else list(servers)
    given = functools.partial(_read, Path(creds)) if isinstance(creds, str | Path) else creds
    return await client.connect(addresses, identity=identity, creds=given, tls=tls)


def _read(path: Path) -> credentials.Credentials:
    try:
        return credentials.Credentials.parse(path.read_text("utf-8"))
    except OSError as error:
        raise errors.NotFound(f"cannot read the credentials {str(path)!r}: {error.strerror}") from error
