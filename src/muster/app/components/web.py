"""The web server as a component of a domain: a separate process (`muster.app.supervisor.module_process`).

Only that process imports the packages of the web server, so the domain starts without delay.
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import socket
import ssl
from collections.abc import Hashable, Sequence
from typing import Any

import msgspec

from muster.app import home, identities
from muster.app.components import component
from muster.app.components import context as context_
from muster.app.supervisor import module_process, server_process
from muster.bus import api
from muster.bus.client import client
from muster.core import errors, health
from muster.core.net import hosts
from muster.core.settings import domain as settings_domain
from muster.trust import keyring
from muster.trust.permissions import roles
from muster.web import settings as settings_
from muster.web.auth import sessions, tokens

NEEDS = ("fastapi", "uvicorn", "pyarrow", "jwt")
HINT = "pip install 'muster-fabric[web]'"
ADMINISTRATOR = identities.ADMINISTRATOR


class WebProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a web process."""

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


def listen(web_settings: settings_.WebSettings) -> socket.socket:
    """A socket on the configured port; on loopback a free port if another process uses it."""
    return server_process.listen(
        web_settings.host,
        web_settings.port,
        hint="choose another web.port or web.host",
        or_any_port=hosts.is_loopback(web_settings.host),
    )


def url_of(web_settings: settings_.WebSettings, listener: socket.socket) -> str:
    return server_process.url("https" if web_settings.cert else "http", web_settings.host, listener)


def history_of(all_settings: Any, folder: home.DomainFolder) -> str:
    return str(all_settings.pipeline.history_root(folder.root))


def set_password(
    trust: keyring.Keyring, name: str = ADMINISTRATOR, *, role: str = "admin", password: str = ""
) -> str:
    """Set the password of ``name``; returns it, generated if none is given. Blocks."""
    chosen = password or secrets.token_urlsafe(12)
    known = {"viewer": roles.Role.VIEWER, "operator": roles.Role.OPERATOR, "admin": roles.Role.OPERATOR}
    if role not in known:
        raise errors.InvalidInput(f"unknown role {role[:40]!r}: use one of {', '.join(known)}")
    trust.passwords().set(name, known[role], chosen, administers=role == "admin")
    return chosen


def open_tokens(folder: home.DomainFolder) -> tokens.TokenStore:
    return tokens.TokenStore(folder.root / "web" / "tokens")


def token_owner(trust: keyring.Keyring, name: str) -> sessions.LoginSession:
    """A login as the owner of a token. `errors.NotFound` if there is none. Blocks."""
    login = trust.passwords().current(name)
    return sessions.LoginSession(
        id="",
        name=name,
        role=sessions.role_of(login.role, administers=login.administers),
        kind=sessions.TokenKind.TOKEN,
        born=login.created_at,
        until=0,
    )


class DomainAddress:
    """Connects the web server to the domain of a folder, at its current address."""

    def __init__(self, folder: home.DomainFolder, trust: keyring.Keyring) -> None:
        self._folder = folder
        self._trust = trust

    async def connect(self, identity: str, role: roles.Role) -> api.Bus:
        running = await self._running()
        creds = await asyncio.to_thread(identities.login_credentials, self._trust, identity, role)
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
            raise errors.NotConnected("the domain is not running")
        return running


class WebComponent:
    name = "web"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, all_settings: Any) -> None:
        self._all_settings = all_settings
        self._settings: settings_.WebSettings = all_settings.web
        self._listener: socket.socket | None = None
        self._process = module_process.ModuleProcess("web", "muster.app.supervisor.web_process", log_share=8)
        self._missing = ""

    @property
    def url(self) -> str | None:
        return None if self._listener is None else url_of(self._settings, self._listener)

    async def start(self, context: context_.ComponentContext) -> None:
        lacking = await asyncio.to_thread(missing_packages)
        if lacking:
            self._missing = f"{', '.join(lacking)} not installed: {HINT}"
            context.log.warning("web-missing", reason=self._missing)
            return
        self._listener = listen(self._settings)
        task = WebProcessConfig(
            settings=self._settings,
            listener=self._listener.fileno(),
            domain=self._all_settings.domain.name,
            root=str(context.folder.root),
            keys=str(self._all_settings.keys_folder),
            history=history_of(self._all_settings, context.folder),
            health=msgspec.structs.replace(self._all_settings.health, port=0),
            log_level=self._all_settings.log.level,
        )
        self._process.start(context, config=msgspec.json.encode(task), pass_fds=(self._listener.fileno(),))

    async def stop(self) -> None:
        await self._process.stop()
        if self._listener is not None:
            self._listener.close()

    def health(self) -> component.ComponentHealth:
        if self._listener is None:
            return component.ComponentHealth(health.HealthState.DOWN, self._missing)
        facts = {"web": {"url": self.url}}
        report = self._process.health()
        if report.state in (health.HealthState.UP, health.HealthState.STARTING):  # connections wait for it
            return component.ComponentHealth(facts=facts)
        looping = self._process.is_crash_looping
        state = health.HealthState.FAILED if looping else health.HealthState.LATE
        return component.ComponentHealth(state, report.reason, facts)


def check() -> None:
    """Raise an error if a required package is not installed."""
    lacking = missing_packages()
    if lacking:
        raise errors.MissingDependency(
            f"the web server needs {', '.join(lacking)}, which is not installed", hint=HINT
        )
