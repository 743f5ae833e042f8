"""`muster.connect`: the front door of the bus, for programs that use Muster."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Iterable
from pathlib import Path

from muster.bus import client
from muster.bus import locator as locators
from muster.core import errors, metrics
from muster.trust import credentials

DEFAULT_SERVER = "nats://127.0.0.1:4222"


async def connect(
    servers: str | Iterable[str] | None = None,
    *,
    locator: str | Iterable[str] | None = None,
    identity: str | None = None,
    creds: str | Path | credentials.Credentials | None = None,
    tls: ssl.SSLContext | None = None,
    proxy: str | None = None,
    measure: metrics.Metrics | None = None,
    echo: bool = True,
) -> client.Client:
    """A connection to the bus: ``async with await muster.connect("nats://…") as bus: …``.

    ``servers``: addresses of brokers (``nats://``, ``tls://``, ``ws://``, ``wss://``); one that answers is
    taken, and the others are turned to when it fails.  ``locator``: addresses of locators (``http://``,
    ``https://``), the first of which to answer says which brokers are best for us; if none does, ``servers``
    are what is left.  With neither, the broker at nats://127.0.0.1:4222 is meant.  ``creds``: credentials,
    or their file, which is read again for each new connection.  ``identity``: the name to go by; otherwise
    the one in the credentials.
    ``tls``: whom to believe, where the system's certificate authorities are not meant.  ``proxy``: an HTTP
    proxy (``http://HOST:PORT``) by way of which brokers are reached.  ``measure``: where it counts what it
    drops, refuses and renews.  ``echo``: whether its subscriptions hear what it publishes itself.
    """
    addresses = [servers] if isinstance(servers, str) else list(servers or ())
    if locator is not None:
        try:
            addresses = [*await locators.locate(locator, tls=tls), *addresses]
        except errors.Unavailable:
            if not addresses:
                raise
    given = functools.partial(_read, Path(creds)) if isinstance(creds, str | Path) else creds
    return await client.connect(
        addresses or [DEFAULT_SERVER],
        identity=identity,
        creds=given,
        tls=tls,
        measure=measure,
        in_order=locator is not None,
        proxy=proxy,
        echo=echo,
    )


def _read(path: Path) -> credentials.Credentials:
    try:
        return credentials.Credentials.parse(path.read_text("utf-8"))
    except OSError as error:
        raise errors.NotFound(f"cannot read the credentials {str(path)!r}: {error.strerror}") from error
