"""What every request handler is handed: the one `State` of the process, and who is asking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from muster.core import errors
from muster.core.net import hosts
from muster.trust import keyring
from muster.web import actions, settings
from muster.web.auth import logins, sessions
from muster.web.data import read_model

COOKIE = "muster-session"
FORM_HEADER = "X-CSRF-Token"
SAFE = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True, slots=True)
class WebState:
    settings: settings.WebSettings
    source: read_model.ReadModel
    desk: actions.ActionRunner
    logins: logins.LoginService
    trust: keyring.Keyring


def state_of(request: Request) -> WebState:
    found = request.app.state.muster
    assert isinstance(found, WebState)
    return found


def address_of(request: Request) -> str:
    """The client's: by the configured header of a proxy, or else the peer of the connection."""
    peer = request.client.host if request.client else "-"
    header = state_of(request).settings.forwarded_header
    return hosts.forwarded_for(peer, request.headers.get(header, "")) if header else peer


async def cookie_session(request: Request) -> sessions.LoginSession:
    """Whose browser this is."""
    actions.address.set(address_of(request))
    text = request.cookies.get(COOKIE)
    if not text:
        raise errors.Unauthorized("nobody is logged in", hint="log in, or send a bearer token")
    return await state_of(request).logins.recognise(text, sessions.TokenKind.COOKIE)


async def session_of(request: Request) -> sessions.LoginSession:
    """Who asks over REST: by a bearer token, or by the cookie and the token of a form together."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme:
        actions.address.set(address_of(request))
        if scheme.lower() != "bearer":
            raise errors.Unauthorized(f"no logins by {scheme[:20]!r}: send a bearer token")
        return await state_of(request).logins.recognise(token.strip(), sessions.TokenKind.TOKEN)
    session = await cookie_session(request)
    if request.method not in SAFE:
        check_csrf_token(request, session, request.headers.get(FORM_HEADER, ""))
    return session


def check_csrf_token(request: Request, session: sessions.LoginSession, token: str) -> None:
    """A cookie comes along with whatever page asks; only our own pages know this."""
    import hmac

    wanted = state_of(request).logins.form_token(session)
    if not hmac.compare_digest(token.encode(), wanted.encode()):
        raise errors.Forbidden(
            "the request does not come from one of our pages", hint="load the page again, and try again"
        )


Known = Annotated[WebState, Depends(state_of)]
Person = Annotated[sessions.LoginSession, Depends(session_of)]
