"""The web as a part of a domain: a process of its own (`muster.app.supervisor.server_process`).

Starting a domain is not slowed: what the web needs is imported by its own process only.
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import socket
import ssl
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from muster.app import home, identities
from muster.app.components import component
from muster.app.components import context as context_
from muster.app.supervisor import server_process
from muster.bus import api
from muster.bus.client import client
from muster.core import errors, health
from muster.core.net import hosts
from muster.core.settings import domain as settings_domain
from muster.trust import keyring
from muster.trust.permissions import roles
from muster.web import settings as settings_

NEEDS = ("fastapi", "uvicorn", "pyarrow")
HINT = "pip install 'muster-fabric[web]'"
ADMINISTRATOR = identities.ADMINISTRATOR


class WebProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a web process is told to be."""

    settings: settings_.WebSettings
    listener: int  # an open socket
    domain: str
    root: str  # the domain's folder
    keys: str
    history: str
    health: settings_domain.HealthSettings
    log_level: str = "info"


def missing_packages() -> list[str]:
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


def listen(wanted: settings_.WebSettings) -> socket.socket:
    """The wanted port; on loopback a free one if another process has it."""
    return server_process.listen(
        wanted.host,
        wanted.port,
        hint="choose another web.port or web.host",
        or_any_port=hosts.is_loopback(wanted.host),
    )


def url_of(wanted: settings_.WebSettings, listener: socket.socket) -> str:
    return server_process.url("https" if wanted.cert else "http", wanted.host, listener)


def history_of(whole: Any, folder: home.DomainFolder) -> Path:
    return Path(whole.pipeline.history_dir or folder.root / "history")


def set_password(
    trust: keyring.Keyring, name: str = ADMINISTRATOR, *, role: str = "admin", password: str = ""
) -> str:
    """Let ``name`` log in; the password, which is made up if none is given. Blocks."""
    chosen = password or secrets.token_urlsafe(12)
    known = {"viewer": roles.Role.VIEWER, "operator": roles.Role.OPERATOR, "admin": roles.Role.OPERATOR}
    if role not in known:
        raise errors.InvalidInput(f"no role {role[:40]!r}: one of {', '.join(known)}")
    trust.passwords().set(name, known[role], chosen, administers=role == "admin")
    return chosen


class DomainAddress:
    """How the web reaches the domain of a folder: wherever it is now."""

    def __init__(self, folder: home.DomainFolder, trust: keyring.Keyring) -> None:
        self._folder = folder
        self._trust = trust

    async def connect(self, identity: str, role: roles.Role) -> api.Bus:
        running = await self._running()
        creds = await asyncio.to_thread(identities.credentials, self._trust, identity, role)
        tls = None
        if running.ca:
            tls = await asyncio.to_thread(ssl.create_default_context, cafile=running.ca)
        return await client.connect(running.servers, creds=creds, tls=tls)

    async def place(self) -> Hashable:
        running = await asyncio.to_thread(self._folder.running)
        return None if running is None else (running.pid, running.started_at_s)

    async def _running(self) -> home.RunningDomain:
        running = await asyncio.to_thread(self._folder.running)
        if running is None:
            raise errors.NotConnected("it is not running")
        return running


class WebComponent:
    name = "web"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._wanted: settings_.WebSettings = whole.web
        self._listener: socket.socket | None = None
        self._process = server_process.ServerProcess("web", "muster.app.supervisor.web_process")
        self._missing = ""

    @property
    def url(self) -> str | None:
        return None if self._listener is None else url_of(self._wanted, self._listener)

    async def start(self, context: context_.ComponentContext) -> None:
        lacking = await asyncio.to_thread(missing_packages)
        if lacking:
            self._missing = f"{', '.join(lacking)} not installed: {HINT}"
            context.log.warning("web-missing", reason=self._missing)
            return
        self._listener = listen(self._wanted)
        task = WebProcessConfig(
            settings=self._wanted,
            listener=self._listener.fileno(),
            domain=self._whole.domain.name,
            root=str(context.folder.root),
            keys=str(self._whole.keys_folder),
            history=str(history_of(self._whole, context.folder)),
            health=msgspec.structs.replace(self._whole.health, port=0),
            log_level=self._whole.log.level,
        )
        self._process.start(context, self._listener, msgspec.json.encode(task))

    async def stop(self) -> None:
        await self._process.stop()
        if self._listener is not None:
            self._listener.close()

    def health(self) -> component.ComponentHealth:
        if self._listener is None:
            return component.ComponentHealth(health.HealthState.DOWN, self._missing)
        facts = {"web": {"url": self.url}}
        if self._process.is_running:
            return component.ComponentHealth(facts=facts)
        return component.ComponentHealth(health.HealthState.LATE, self._process.reason, facts)


def check() -> None:
    """Complain now about what is not installed."""
    lacking = missing_packages()
    if lacking:
        raise errors.MissingDependency(f"the web needs {', '.join(lacking)}, not installed", hint=HINT)
