"""How a component reaches its domain: the addresses of the brokers, and the credentials of its identity.

A component has either the keys of the domain, as on the machine that runs it, or a file with the credentials
of one identity, as on a machine that has nothing else of it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from muster import connection
from muster.app import identities
from muster.bus import api
from muster.bus.client import client
from muster.bus.locator import client as locator_client
from muster.core import errors
from muster.core.telemetry import metrics
from muster.trust import credentials, keyring
from muster.trust.permissions import own_names, roles


@dataclass(frozen=True, slots=True)
class DomainAddress:
    """Where the brokers of a domain are. ``run`` differs after a restart of the domain."""

    servers: tuple[str, ...]
    ca: str = ""
    locator: str = ""
    run: tuple[int, float] | None = None


class DomainAccess:
    """``locate`` is asked for each connection. ``keys``: the domain's; without them, ``creds`` is the file
    with the credentials of the only identity. Without both, the brokers know no identities. ``connected`` is
    called with each connection of a component."""

    def __init__(
        self,
        locate: Callable[[], Awaitable[DomainAddress]],
        *,
        keys: keyring.Keyring | None = None,
        creds: Path | None = None,
        measure: metrics.Metrics,
        connect_timeout_s: float = client.CONNECT_TIMEOUT_S,
        connected: Callable[[api.Bus], None] = lambda _: None,
    ) -> None:
        self.locate = locate
        self._keys = keys
        self._creds = creds
        self._measure = measure
        self._connect_timeout_s = connect_timeout_s
        self._connected = connected

    @property
    def keys(self) -> keyring.Keyring:
        if self._keys is None:
            raise errors.NotFound(
                "this process has credentials, but no keys of the domain",
                hint="name their folder with --set trust.keys_dir=FOLDER",
            )
        return self._keys

    @property
    def has_keys(self) -> bool:
        return self._keys is not None

    @property
    def has_credentials(self) -> bool:
        return self._creds is not None

    async def connect(self, identity: str, role: roles.Role) -> api.Bus:
        """A connection of a component. With keys, credentials are issued if it has none; otherwise it has the
        name in the credentials."""
        if self._creds is not None:
            bus = await self._connect(functools.partial(credentials.Credentials.load, self._creds))
        elif self._keys is None:
            bus = await self._connect(None, identity=identity)
        else:
            own_names.check(identity, role)
            creds = await asyncio.to_thread(identities.credentials, self._keys, identity, role)
            bus = await self._connect(lambda: creds)
        self._connected(bus)
        return bus

    async def connect_login(self, name: str, role: roles.Role) -> api.Bus:
        """A connection of a gateway for a client that logged in."""
        creds = await asyncio.to_thread(identities.login_credentials, self.keys, name, role)
        return await self._connect(lambda: creds)

    async def credentials_file(self, identity: str, role: roles.Role) -> Path | None:
        """The file with the credentials of `connect`, for a program that connects by itself."""
        if self._creds is not None or self._keys is None:
            return self._creds
        return await asyncio.to_thread(identities.credentials_file, self._keys, identity, role)

    async def _connect(
        self,
        creds: Callable[[], credentials.Credentials] | None,
        *,
        identity: str | None = None,
    ) -> api.Bus:
        where = await self.locate()
        servers, tls = where.servers, None
        if where.ca:
            tls = await asyncio.to_thread(connection.trusting, where.ca)
        if where.locator:
            servers = (*await locator_client.locate(where.locator, tls=tls), *servers)
        return await client.connect(
            servers,
            identity=identity,
            creds=creds,
            tls=tls,
            connect_timeout_s=self._connect_timeout_s,
            measure=self._measure,
            in_order=bool(where.locator),
        )
