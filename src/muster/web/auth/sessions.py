"""Logins as sealed text: who, which role, until when. Pure.

A session (in a cookie) and a bearer token are the same thing: a small JSON document and its HMAC under a key
that only this domain's web processes have.  So they outlive a restart, and no list of those who are logged in
has to be kept; only of those who have logged out before their time.  ``born`` is when the password was set:
another password ends what was begun with the old one.
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
    """What a person may do here; each may all that the one before may."""

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
    """The place of a login's role of the bus here."""
    if role is roles.Role.OPERATOR:
        return WebRole.ADMIN if administers else WebRole.OPERATOR
    if role is roles.Role.VIEWER:
        return WebRole.VIEWER
    raise errors.Forbidden(
        f"logins of the role {role} have no place here", hint="viewer, operator and admin do"
    )


def seal(session: LoginSession, key: bytes) -> str:
    body = _text(msgspec.json.encode(session))
    return f"{body}.{_text(_mac(body, key))}"


def unseal(text: str, key: bytes, *, kind: TokenKind, now_s: float) -> LoginSession:
    """`errors.Unauthorized` for whatever is not whole, ours, of this kind and still valid."""
    body, _, mac = text.partition(".")
    try:
        if len(text) > MAX_BYTES or not hmac.compare_digest(_bytes(mac), _mac(body, key)):
            raise ValueError
        session = msgspec.json.decode(_bytes(body), type=LoginSession)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise errors.Unauthorized("this login is not one of ours", hint="log in again") from None
    if session.kind is not kind:
        raise errors.Unauthorized("a cookie is not a token, and a token is no cookie")
    if session.until <= now_s:
        raise errors.Unauthorized("this login has expired", hint="log in again")
    return session


def form_token(session: LoginSession, key: bytes) -> str:
    """What a form of this session's pages carries, which no other site can know."""
    return _text(hmac.digest(key, b"form:" + session.id.encode(), hashlib.sha256))


def _mac(body: str, key: bytes) -> bytes:
    return hmac.digest(key, b"session:" + body.encode(), hashlib.sha256)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
