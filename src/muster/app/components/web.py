"""The dashboard and the REST API as a component, and their logins and tokens."""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import socket
from collections.abc import Hashable, Sequence

from muster.app import home, identities
from muster.app import settings as app_settings
from muster.app.components import component, supervised
from muster.app.components import context as context_
from muster.app.supervisor import endpoints
from muster.bus import api
from muster.core import errors
from muster.core.net import hosts
from muster.supervision import tasks
from muster.trust import keyring
from muster.trust.permissions import roles
from muster.web import settings as settings_
from muster.web.auth import sessions, tokens

NEEDS = ("fastapi", "uvicorn", "pyarrow", "jwt")
HINT = "pip install 'muster-fabric[web]'"
ADMINISTRATOR = identities.ADMINISTRATOR


def missing_packages() -> list[str]:
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


def endpoint(web_settings: settings_.WebSettings) -> endpoints.Endpoint:
    """On loopback a free port if another process uses the configured one."""
    scheme = "https" if web_settings.cert else "http"
    host = web_settings.host
    return endpoints.Endpoint(scheme, host, web_settings.port, or_any_port=hosts.is_loopback(host))


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


class WebComponent:
    """The server itself, in any process."""

    name = "web"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, all_settings: app_settings.Settings) -> None:
        self._settings = all_settings
        self._context: context_.ComponentContext
        self._listener: socket.socket | None = None

    @property
    def url(self) -> str:
        return "" if self._listener is None else endpoint(self._settings.web).url(self._listener)

    async def start(self, context: context_.ComponentContext) -> None:
        check()
        from muster.web import server

        self._context = context
        self._listener = await asyncio.to_thread(context.listen, endpoint(self._settings.web))
        serving = server.serve(
            self._settings.web,
            location=self,
            trust=context.trust,
            domain=self._settings.domain.name,
            folder=context.folder.root / "web",
            history=str(self._settings.pipeline.history_root(context.folder.root)),
            listener=self._listener,
            stop=asyncio.Event(),
            measure=context.metrics,
        )
        context.tasks.spawn("server", serving, on_failure=tasks.OnFailure.FATAL)

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def health(self) -> component.ComponentHealth:
        return component.ComponentHealth(facts={"web": {"url": self.url}})

    async def connect(self, identity: str, role: roles.Role) -> api.Bus:
        return await self._context.access.connect_login(identity, role)

    async def place(self) -> Hashable:
        try:
            return (await self._context.access.locate()).run or "elsewhere"
        except errors.NotConnected:
            return None


def supervised_web(settings: app_settings.Settings) -> supervised.SupervisedComponent:
    """With the domain: a process of its own, which alone imports the packages of the web server."""
    return supervised.SupervisedComponent(
        supervised.Supervision(
            "web",
            check=check,
            endpoint=endpoint(settings.web),
            facts=lambda url: {"web": {"url": url}},
        )
    )


def check() -> None:
    """Raise an error if a required package is not installed."""
    lacking = missing_packages()
    if lacking:
        raise errors.MissingDependency(
            f"the web server needs {', '.join(lacking)}, which is not installed", hint=HINT
        )
