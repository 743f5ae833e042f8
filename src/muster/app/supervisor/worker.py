"""A registry endpoint, a manager or an agent as a process of its own, born in the nursery.

It lives until the leash is let go of: the bootstrap node holds the other end, so nothing outlives it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import os
import pathlib
import signal
import ssl
import time
from collections.abc import Callable
from typing import Any, TextIO, cast

import msgspec

from muster.app import identities, log_files
from muster.bus import api
from muster.bus.brokers import config
from muster.bus.client import client
from muster.bus.http import health as http_health
from muster.core import errors, health
from muster.core.net import tls as tls_
from muster.core.settings import domain, loader
from muster.core.telemetry import log, metrics
from muster.manage import protocol
from muster.manage.adapters import base
from muster.manage.agent import agent
from muster.manage.direct import links
from muster.manage.manager import manager
from muster.manage.registry import endpoint
from muster.store import api as store_api
from muster.store import database
from muster.trust import certificates, credentials, jwt, keyring, nkeys
from muster.trust.permissions import roles

ROLE_CACHE_S = 5.0
END_S = 5.0
MAY_CHANGE = (roles.Role.OPERATOR, roles.Role.BOOTSTRAP)
MAY_NOT_ASK = (roles.Role.AGENT, roles.Role.LINK)
AGENTS_MAY = (
    "exec",  # a command that a receiver accepted
    protocol.SECRET,
)  # for their own resources, which the registry sees to
ONLY = {protocol.RENEW: roles.Role.MANAGER, protocol.HELLO: roles.Role.AGENT}


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told to be."""

    kind: str  # registry, manager, agent
    name: str
    servers: tuple[str, ...]
    creds: str
    ca: str | None = None
    keys: str = ""
    store_url: str = ""
    store_password: str = ""  # a reference, never the secret itself
    sync: str = "full"
    folder: str = ""
    zone: str = "default"
    beat_s: float = 5.0
    manager_ttl_s: float = 15.0
    replicas: int = 1
    host: str = "127.0.0.1"
    direct_port: int | None = None  # of a manager that takes direct connections
    cert: str = ""
    cert_key: str = ""
    known_as: str = ""  # to the bootstrap node
    log_file: str = ""
    log_bytes_max: int = 1 << 20
    log_age_s: float = 30 * 86400.0
    log_level: str = "info"
    health: domain.HealthSettings = msgspec.field(default_factory=domain.HealthSettings)
    pages: str = ""  # the folder in which it tells where its pages are


async def connect(task: WorkerConfig, measure: metrics.Metrics) -> api.Bus:
    creds = await asyncio.to_thread(credentials.Credentials.load, pathlib.Path(task.creds))
    tls = await asyncio.to_thread(ssl.create_default_context, cafile=task.ca) if task.ca else None
    return await client.connect(task.servers, creds=creds, tls=tls, measure=measure)


async def run(task: WorkerConfig, stop: asyncio.Event, ready: Callable[[], None]) -> None:
    measure = metrics.Metrics(process=True)
    conditions: dict[str, Callable[[], http_health.HealthReport]] = {"bus": _starting, task.kind: _starting}
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(
            http_health.serve_process(
                task.health,
                process=task.known_as or task.name,
                conditions=lambda: {name: told() for name, told in conditions.items()},
                metrics=measure,
                folder=pathlib.Path(task.pages) if task.pages else None,
            )
        )
        bus = await stack.enter_async_context(await connect(task, measure))
        conditions["bus"] = lambda: http_health.bus_health(bus)
        match task.kind:
            case "registry":
                password = None
                if task.store_password:
                    password = await asyncio.to_thread(loader.read_secret, task.store_password, os.environ)
                store = await stack.enter_async_context(
                    await database.open(
                        task.store_url,
                        settings=msgspec.convert({"sync": task.sync}, store_api.StoreOptions),
                        password=password,
                    )
                )
                part: Any = endpoint.RegistryEndpoint(
                    bus,
                    store,
                    manager_ttl_s=task.manager_ttl_s,
                    authorize=RequestAuthorizer(pathlib.Path(task.keys)),
                    replicas=task.replicas,
                    open_key=lambda: keyring.Keyring.open(pathlib.Path(task.keys)).key_of_secrets(),
                )
            case "manager":
                road: Any = bus
                if task.direct_port is not None:
                    tls = None
                    if task.cert:
                        tls = await asyncio.to_thread(tls_.for_server, task.cert, task.cert_key)
                        keeping = asyncio.create_task(
                            certificates.keep_current(tls_.RenewableTls(tls, task.cert, task.cert_key))
                        )
                        stack.callback(keeping.cancel)
                    check = DirectLinkAuthenticator(pathlib.Path(task.keys))
                    door = links.DirectEndpoint(bus, check, host=task.host, port=task.direct_port, tls=tls)
                    road = (await stack.enter_async_context(door)).road
                part = manager.Manager(road)
            case "agent":
                part = agent.Agent(
                    bus,
                    pathlib.Path(task.folder),
                    zone=task.zone,
                    beat_s=task.beat_s,
                    machine=machine_id(),
                    broker_access=lambda: asyncio.to_thread(broker_access, pathlib.Path(task.keys)),
                )
            case _:
                raise errors.InvalidInput(f"no process of kind {task.kind!r}")
        await stack.enter_async_context(part)
        conditions[task.kind] = http_health.HealthReport
        ready()
        await stop.wait()


def _starting() -> http_health.HealthReport:
    return http_health.HealthReport(health.HealthState.STARTING)


def broker_access(keys: pathlib.Path) -> base.BrokerAccess:
    """For brokers that an agent on the domain's own machine makes. Blocks."""
    trust = keyring.Keyring.open(keys)
    documents = trust.broker()
    named = {jwt.read(document).name: key for key, document in documents.accounts.items()}
    return base.BrokerAccess(
        trust=config.OperatorTrust(
            operator_jwt=documents.operator_jwt,
            system_account=documents.system_account,
            accounts=documents.accounts,
            resolver=config.AccountResolver.MEMORY,
        ),
        account=named[trust.domain],
        link_credentials=identities.credentials_file(trust, identities.LINK, roles.Role.LINK),
    )


class DirectLinkAuthenticator:
    """Whether an agent that dials a manager is who it says: what a broker would ask."""

    def __init__(self, keys: pathlib.Path) -> None:
        self._keys = keys

    async def __call__(self, document: str, nonce: str, signature: bytes) -> str:
        return await asyncio.to_thread(self._check, document, nonce, signature)

    def _check(self, document: str, nonce: str, signature: bytes) -> str:
        trust = keyring.Keyring.open(self._keys)
        claims = trust.check(document)
        try:
            signed = base64.b64decode(signature, validate=True)
        except ValueError as error:
            raise errors.Unauthorized(f"{claims.name!r} did not sign") from error
        nkeys.verify(claims.sub, nonce.encode(), signed)
        if trust.show(claims.name).role != roles.Role.AGENT:
            raise errors.Forbidden(f"{claims.name!r} is no agent")
        return claims.name


class RequestAuthorizer:
    """Who may ask what: the role in the keyring decides; the broker saw to the name."""

    def __init__(self, keys: pathlib.Path) -> None:
        self._keys = keys
        self._known: dict[str, tuple[float, str]] = {}

    async def __call__(self, sender: str, verb: str, changes: bool) -> bool:
        """Whether it may only for what it hosts."""
        at, role = self._known.get(sender, (0.0, ""))
        if time.monotonic() - at > ROLE_CACHE_S:
            try:
                role = await asyncio.to_thread(lambda: keyring.Keyring.open(self._keys).show(sender).role)
            except errors.NotFound as error:
                raise errors.Forbidden(f"{sender!r} is not known in this domain") from error
            self._known[sender] = (time.monotonic(), role)
        if verb in ONLY:
            if role != ONLY[verb]:
                raise errors.Forbidden(f"{sender} has the role {role}; only the role {ONLY[verb]} may {verb}")
            return True
        if role == roles.Role.AGENT and verb in AGENTS_MAY:
            return True
        if changes and role not in MAY_CHANGE:
            raise errors.Forbidden(f"{sender} has the role {role}; only an operator may {verb}")
        if role in MAY_NOT_ASK:
            raise errors.Forbidden(f"{sender} has the role {role}, which may not ask the registry")
        return False


def machine_id() -> str:
    """Differs on a machine that was set up anew."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError):
            return pathlib.Path(path).read_text().strip()[:64]
    return ""


async def run_worker(task: WorkerConfig, leash: int, ready: Callable[[], None]) -> None:
    """Be what the task says until a signal asks for the end, or nobody holds the other end of ``leash``."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def let_go() -> None:
        loop.remove_reader(leash)
        stop.set()

    loop.add_reader(leash, let_go)
    stream = cast(
        TextIO, log_files.RotatingFile(pathlib.Path(task.log_file), task.log_bytes_max, task.log_age_s)
    )
    log.configure(stream, level=task.log_level, form="json")
    relax_gc()
    working = asyncio.create_task(run(task, stop, ready))
    asked = asyncio.create_task(stop.wait())
    await asyncio.wait((working, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    # One that is still trying to reach a broker does not hear that it should end.
    await asyncio.wait((working,), timeout=END_S)
    if working.done():
        working.result()


def relax_gc() -> None:
    """Have Python look through everything for cycles very seldom.

    A manager holds a million objects that stay; to look through all of them takes a third of a second, in
    which it answers nobody.  What it lets go of is nearly all freed by counting, and young cycles are found
    as ever.
    """
    gc.freeze()
    gc.set_threshold(20_000, 50, 1_000)
