"""How a component reaches its domain: the addresses of the brokers, and the credentials of its identity.

A component has either the keys of the domain, as on the machine that runs it, or a file with the credentials
of one identity, as on a machine that has nothing else of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from muster import connection
from muster.app import identities
from muster.app.machines import membership
from muster.bus import api
from muster.bus.client import client
from muster.bus.locator import client as locator_client
from muster.core import errors, subjects
from muster.core.telemetry import metrics
from muster.manage import client as client_
from muster.manage import protocol
from muster.trust import credentials, keyring, machine_keys, nkeys, private_files
from muster.trust.permissions import own_names, roles

LOGIN = "login"  # the request of a gateway for a document
LOGINS = "logins"  # the folder for them


class LoginDocument(msgspec.Struct, frozen=True):
    jwt: str


@dataclass(frozen=True, slots=True)
class DomainAddress:
    """Where the brokers of a domain are. ``run`` differs after a restart of the domain. ``in_order``: the
    first is that of this machine."""

    servers: tuple[str, ...]
    ca: str = ""
    locator: str = ""
    proxy: str = ""
    run: tuple[int, float] | None = None
    in_order: bool = False


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
        if self.keys.signs:
            creds = await asyncio.to_thread(identities.login_credentials, self.keys, name, role)
        else:
            creds = await self._ask_for_login(name, role)
        return await self._connect(lambda: creds)

    async def _ask_for_login(self, name: str, role: roles.Role) -> credentials.Credentials:
        """On a machine that joined: the machine that signs gives a document to a key that was made here."""
        folder = self.keys.folder / LOGINS
        path = folder / f"{subjects.token(name)}.{role}.creds"
        kept = await asyncio.to_thread(self._valid, path)
        if kept is not None:
            return kept
        machines = await asyncio.to_thread(membership.load, self.keys.folder.parent)
        assert machines is not None
        own = await asyncio.to_thread(
            identities.credentials, self.keys, identities.SELF, roles.Role.BOOTSTRAP
        )
        async with await self._connect(lambda: own) as bus:
            subject = subjects.from_identity(protocol.PART, bus.identity, "domain", LOGIN)

            async def ask(key: nkeys.KeyPair) -> credentials.Credentials:
                arguments = {"machine": machines.own, "identity": name, "role": role}
                arguments["public_key"] = key.public
                arguments["proof"] = machine_keys.signed(own.seed, LOGIN, *arguments.values())
                answer = await client_.call(bus, subject, arguments)
                return credentials.Credentials(msgspec.convert(answer, LoginDocument).jwt, key.seed)

            seed = folder / f"{subjects.token(name)}.seed"
            try:
                made = await ask(await asyncio.to_thread(_key, seed))
            except errors.Refused:  # it was revoked with a former identity of this name
                made = await ask(await asyncio.to_thread(_key, seed, anew=True))
        await asyncio.to_thread(private_files.replace_file, path, made.render().encode())
        return made

    def _valid(self, path: Path) -> credentials.Credentials | None:
        """The credentials in a file, if brokers accept them."""
        with contextlib.suppress(errors.MusterError):
            kept = credentials.Credentials.load(path)
            self.keys.check(kept.user_jwt)
            return kept
        return None

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
            in_order=where.in_order or bool(where.locator),
            proxy=where.proxy or None,
        )


def _key(path: Path, *, anew: bool = False) -> nkeys.KeyPair:
    """A key that processes of this machine share. Blocks."""
    private_files.make_folder(path.parent)
    with private_files.locked(path.parent):
        if path.exists() and not anew:
            return nkeys.KeyPair.from_seed(private_files.read_text(path, "the key of a login"))
        key = nkeys.KeyPair.create(nkeys.KeyKind.USER)
        private_files.replace_file(path, key.seed.encode())
        return key
