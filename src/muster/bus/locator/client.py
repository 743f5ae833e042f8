"""The client of the locator: `locate` returns the brokers that a client should use, best first."""

from __future__ import annotations

import ssl
import urllib.parse
from collections.abc import Iterable

from muster.bus.http import client as http_client
from muster.core import errors


async def locate(
    locators: str | Iterable[str],
    *,
    client: str | None = None,
    protocol: str = "nats",
    count: int = 3,
    timeout_s: float = 2.0,
    tls: ssl.SSLContext | None = None,
) -> list[str]:
    """Request broker URLs from the locators in turn until one of them responds.

    ``client`` is the address to rank for; without it, the locator uses the address of this connection.
    """
    query = {"protocol": protocol, "count": str(count), **({"client": client} if client else {})}
    failures: list[str] = []
    for url in [locators] if isinstance(locators, str) else locators:
        try:
            response = await http_client.get(
                f"{url.rstrip('/')}/locate?{urllib.parse.urlencode(query)}", timeout_s=timeout_s, tls=tls
            )
            if response.status == 200:
                return [str(broker["url"]) for broker in response.json()["brokers"]]
            failures.append(f"{url}: {response.body.decode('utf-8', 'replace').strip()[:200]}")
        except (KeyError, TypeError):
            failures.append(f"{url}: not the response of a locator")
        except errors.MusterError as error:
            failures.append(error.message)
    raise errors.Unavailable(
        f"no locator named a broker: {'; '.join(failures) or 'no locator is configured'}",
        hint="check that a locator runs at that URL, or name brokers",
    )
