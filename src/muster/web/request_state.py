"""Dependencies of the request handlers: the `WebState` of the process and the login session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request
from starlette.requests import cookie_parser

from muster.bus.rpc import operations
from muster.core import errors
from muster.core.net import hosts
from muster.core.telemetry import trace
from muster.trust import keyring
from muster.web import actions, settings
from muster.web.auth import logins, scopes, sessions
from muster.web.data import read_model

T = TypeVar("T")
API = "/api/v1"
COOKIE = "muster-session"
FORM_HEADER = "X-CSRF-Token"
SAFE = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True, slots=True)
class WebState:
    settings: settings.WebSettings
    source: read_model.ReadModel
    actions: actions.ActionRunner
    logins: logins.LoginService
    trust: keyring.Keyring


def state_of(request: Request) -> WebState:
    state = request.app.state.muster
    assert isinstance(state, WebState)
    return state


def address_of(request: Request) -> str:
    """The client's address: from the configured header of a proxy, else the peer of the connection."""
    peer = request.client.host if request.client else "-"
    header = state_of(request).settings.forwarded_header
    return hosts.forwarded_for(peer, request.headers.get(header, "")) if header else peer


def _describe(request: Request) -> None:
    """What operations of this request have in the activity log, and the trace that they belong to."""
    actions.address.set(address_of(request))
    trace.current.set(trace.extract(request.headers))


async def cookie_session(request: Request) -> sessions.LoginSession:
    """The session of a browser, from its cookie."""
    _describe(request)
    text = request.cookies.get(COOKIE)
    if not text:
        raise errors.Unauthorized("authentication is required", hint="log in, or send a bearer token")
    return await state_of(request).logins.recognise_cookie(text)


async def is_known(web: WebState, headers: Mapping[str, str]) -> bool:
    """Whether the headers have a valid token or session."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    try:
        if scheme:
            await web.logins.recognise_token(token.strip())
        else:
            await web.logins.recognise_cookie(cookie_parser(headers.get("cookie", "")).get(COOKIE, ""))
    except errors.MusterError:
        return False
    return True


async def session_of(request: Request) -> sessions.LoginSession:
    """The session of a REST request: from an API token, or from the cookie with a CSRF token.

    A token has the role that its scopes permit in this part of the API.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme:
        _describe(request)
        if scheme.lower() != "bearer":
            raise errors.Unauthorized(f"the scheme {scheme[:20]!r} is not supported: send a bearer token")
        session = await state_of(request).logins.recognise_token(token.strip())
        return msgspec.structs.replace(session, role=scopes.role_in(_area(request), session))
    session = await cookie_session(request)
    if request.method not in SAFE:
        check_csrf_token(request, session, request.headers.get(FORM_HEADER, ""))
    return session


def _area(request: Request) -> str:
    return str(request.scope["route"].tags[0])


def check_csrf_token(request: Request, session: sessions.LoginSession, token: str) -> None:
    """Browsers send the cookie with requests of any page; only the dashboard's pages have this token."""
    import hmac

    expected = state_of(request).logins.form_token(session)
    if not hmac.compare_digest(token.encode(), expected.encode()):
        raise errors.Forbidden(
            "the request does not come from a page of the dashboard", hint="reload the page and try again"
        )


Web = Annotated[WebState, Depends(state_of)]
Person = Annotated[sessions.LoginSession, Depends(session_of)]


@dataclass(frozen=True, slots=True)
class RestCall:
    """A request of a person."""

    web: WebState
    person: sessions.LoginSession

    @property
    def source(self) -> read_model.ReadModel:
        return self.web.source

    async def run(self, what: str, target: str, act: actions.Act[T], **options: Any) -> T:
        """Run and record an operation: see `ActionRunner.run`."""
        return await self.web.actions.run(self.person, what, target, act, **options)

    async def operate(
        self,
        declared: operations.ServiceOperation,
        request: dict[str, Any],
        *,
        needs: sessions.WebRole = sessions.WebRole.OPERATOR,
    ) -> Any:
        """Run an operation of a service's table."""
        return await self.run(
            declared.action,
            declared.target.format(**request),
            lambda bus: declared.call(bus, request),
            touches=declared.data,
            needs=needs,
            service_audits=declared.records,
        )


def _call(request: Request, web: Web, person: Person) -> RestCall:
    if request.query_params:  # a misspelt filter would select everything
        described = request.app.openapi()["paths"][API + request.scope["route"].path_format]
        parameters = described[request.method.lower()].get("parameters", ())
        known = [parameter["name"] for parameter in parameters if parameter["in"] == "query"]
        for name in request.query_params:
            if name not in known:
                hint = f"the parameters are {', '.join(known)}" if known else "there are none"
                raise errors.InvalidInput(f"unknown parameter {name[:60]!r}", hint=hint)
    return RestCall(web, person)


Call = Annotated[RestCall, Depends(_call)]
