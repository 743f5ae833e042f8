"""Sessions of browsers as signed text: name, role and expiry. Pure.

The cookie is a small JSON document and its HMAC, with a key that only the domain's web processes have.
Sessions survive a restart, and no list of them is stored; only a list of those that ended before their
expiry.  ``born`` is the time when the password was set: a new password ends all sessions of the old one.

A session of an identity provider has ``groups`` instead: its role is derived from them with the current
settings.  `muster.web.auth.tokens` stores the tokens of programs.
"""

from __future__ import annotations

import enum

import msgspec

from muster.core import errors
from muster.trust.permissions import roles
from muster.web.auth import signed_text


class WebRole(enum.StrEnum):
    """The roles of people; each includes the permissions of the one before."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def covers(self, needed: WebRole) -> bool:
        return self.rank >= needed.rank

    @property
    def rank(self) -> int:
        return list(WebRole).index(self)


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
    groups: tuple[str, ...] | None = None  # of the identity provider; None: a login with a password
    scopes: tuple[str, ...] = ()  # of a token; empty: no limit


def role_of(role: roles.Role, *, administers: bool) -> WebRole:
    """The web role of a login, from its role on the bus."""
    if role is roles.Role.OPERATOR:
        return WebRole.ADMIN if administers else WebRole.OPERATOR
    if role is roles.Role.VIEWER:
        return WebRole.VIEWER
    raise errors.Forbidden(
        f"logins with the role {role} cannot use the dashboard", hint="use the role viewer, operator or admin"
    )


def bus_role(role: WebRole) -> roles.Role:
    return roles.Role.VIEWER if role is WebRole.VIEWER else roles.Role.OPERATOR


def seal(session: LoginSession, key: bytes) -> str:
    return signed_text.seal(session, key, "session")


def unseal(text: str, key: bytes, *, now_s: float) -> LoginSession:
    """Verify signed text. Raises `errors.Unauthorized` if it is damaged or expired."""
    session = signed_text.unseal(text, key, "session", LoginSession)
    if session is None:
        raise errors.Unauthorized("this session is not valid", hint="log in again")
    if session.until <= now_s:
        raise errors.Unauthorized("this session has expired", hint="log in again")
    return session


def form_token(session: LoginSession, key: bytes) -> str:
    """The CSRF token of the forms of this session."""
    return signed_text.encode(signed_text.mac(session.id, key, "form"))
