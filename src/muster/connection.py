"""`muster.connect`: the entry point of the bus for programs that use Muster."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Iterable
from pathlib import Path

from muster.bus.client import client
from muster.bus.locator import client as locator_client
from muster.core import errors
from muster.core.telemetry import metrics
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
) -> client.NatsBus:
    """A connection to the bus: ``async with await muster.connect("nats://…") as bus: …``.

    ``servers``: URLs of brokers (``nats://``, ``tls://``, ``ws://``, ``wss://``); one of them is used, and
    the others when it fails. ``locator``: URLs of locators (``http://``, ``https://``); the first one that
    responds names the best brokers for this client, and if none responds, ``servers`` are used. Without both,
    the domain is found in the same way as on the command line: by ``MUSTER_PROFILE``, ``MUSTER_HOME``, the
    current profile, or the home in the current folder or the user's folder, with its credentials. If there is
    none of these, the broker at nats://127.0.0.1:4222 is used. ``creds``: credentials, or their file, which
    is read again for each new connection. ``identity``: the name of the client; by default the name in the
    credentials. ``tls``: the trusted certificate authorities, if they are not those of the system. ``proxy``:
    an HTTP proxy (``http://HOST:PORT``) for connections to brokers. ``measure``: the metrics that count
    dropped and refused messages and renewed subscriptions. ``echo``: whether subscriptions of this client
    receive its own messages.
    """
    addresses = [servers] if isinstance(servers, str) else list(servers or ())
    if not addresses and locator is None:
        from muster.client import location

        profile = await asyncio.to_thread(location.find)
        if profile is not None:
            addresses, locator, creds = list(profile.servers), profile.locator, creds or profile.creds
            tls = tls or (trusting(profile.ca) if profile.ca else None)
    if locator is not None:
        try:
            addresses = [*await locator_client.locate(locator, tls=tls), *addresses]
        except errors.Unavailable:
            if not addresses:
                raise
    source = functools.partial(_read, Path(creds)) if isinstance(creds, str | Path) else creds
    return await client.connect(
        addresses or [DEFAULT_SERVER],
        identity=identity,
        creds=source,
        tls=tls,
        measure=measure,
        in_order=locator is not None,
        proxy=proxy,
        echo=echo,
    )


def trusting(ca: str | Path) -> ssl.SSLContext:
    """TLS with the certificate authority in this file."""
    try:
        return ssl.create_default_context(cafile=str(ca))
    except ssl.SSLError as error:
        raise errors.InvalidInput(f"{ca}: not a certificate in PEM format") from error
    except OSError as error:
        raise errors.NotFound(
            f"cannot read the certificate authority {str(ca)!r}: {error.strerror}"
        ) from error


def _read(path: Path) -> credentials.Credentials:
    try:
        return credentials.Credentials.parse(path.read_text("utf-8"))
    except OSError as error:
        raise errors.NotFound(f"cannot read the credentials {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise errors.InvalidInput(f"{path}: not a credentials file: it is not UTF-8 text") from error
    except errors.InvalidInput as error:
        raise errors.InvalidInput(f"{path}: {error.message}", hint=error.hint) from error
