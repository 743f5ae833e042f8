"""`muster.connect`: the front door of the bus."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

from muster.bus import client, credentials

DEFAULT_SERVER = "nats://127.0.0.1:4222"


async def connect(
    servers: str | Iterable[str] = DEFAULT_SERVER,
    *,
    identity: str | None = None,
    creds: credentials.Source | None = None,
    tls: ssl.SSLContext | None = None,
) -> client.Client:
    """A connection to the bus: ``async with await muster.connect("nats://…") as bus: …``.

    ``servers``: addresses of brokers (``nats://``, ``tls://``, ``ws://``, ``wss://``); one that answers is
    taken, and the others are turned to when it fails.  ``creds``: a credentials file, or what it holds.
    ``identity``: the name to go by; otherwise the one in the credentials.  ``tls``: whom to believe, where
    the system's certificate authorities are not meant.
    """
    addresses = [servers] if isinstance(servers, str) else list(servers)
    return await client.connect(addresses, identity=identity, creds=creds, tls=tls)
