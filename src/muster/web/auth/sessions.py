"""Sessions as signed text: name, role and expiry. Pure.

A session (in a cookie) and a bearer token have the same format: a small JSON document and its HMAC, with a
key that only the domain's web processes have.  They survive a restart, and no list of sessions is stored;
only a list of those that ended before their expiry.  ``born`` is the time when the password was set: a new
password ends all sessions of the old one.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import hmac

import msgspec

from muster.core import errors
from muster.trust.permissions import roles

MAX_BYTES = 2048


class WebRole(enum.StrEnum):
    """The roles of people; each includes the permissions of the one before."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def covers(self, needed: WebRole) -> bool:
        order = list(WebRole)
        return order.index(self) >= order.index(needed)


class TokenKind(enum.StrEnum):
    COOKIE = "cookie"
    TOKEN = "token"


class LoginSession(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    role: WebRole
    kind: TokenKind
    born: int  # when the password was set, in seconds
    until: int  # in seconds


def role_of(role: roles.Role, *, administers: bool) -> WebRole:
    """The web role of a login, from its role on the bus."""
    if role is roles.Role.OPERATOR:
        return WebRole.ADMIN if administers else WebRole.OPERATOR
    if role is roles.Role.VIEWER:
        return WebRole.VIEWER
    raise errors.Forbidden(
        f"logins with the role {role} cannot use the dashboard", hint="use the role viewer, operator or admin"
    )


def seal(session: LoginSession, key: bytes) -> str:
    body = _text(msgspec.json.encode(session))
    return f"{body}.{_text(_mac(body, key))}"


def unseal(text: str, key: bytes, *, kind: TokenKind, now_s: float) -> LoginSession:
    """Verify signed text. Raises `errors.Unauthorized` if it is damaged, of another kind or expired."""
    body, _, mac = text.partition(".")
    try:
        if len(text) > MAX_BYTES or not hmac.compare_digest(_bytes(mac), _mac(body, key)):
            raise ValueError
        session = msgspec.json.decode(_bytes(body), type=LoginSession)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise errors.Unauthorized("this session is not valid", hint="log in again") from None
    if session.kind is not kind:
        raise errors.Unauthorized("a cookie cannot be used as a token, nor a token as a cookie")
    if session.until <= now_s:
        raise errors.Unauthorized("this session has expired", hint="log in again")
    return session


def form_token(session: LoginSession, key: bytes) -> str:
    """The CSRF token of the forms of this session."""
    return _text(hmac.digest(key, b"form:" + session.id.encode(), hashlib.sha256))


def _mac(body: str, key: bytes) -> bytes:
    return hmac.digest(key, b"session:" + body.encode(), hashlib.sha256)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
