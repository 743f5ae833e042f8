"""Scopes of an API token: the parts of the REST API that it may use. Pure.

A scope is the tag of a group of operations in the OpenAPI document, such as ``alerts``, or the tag and
``:read``.  With ``:read`` the token has the role viewer in that part, otherwise its own role.  A token
without scopes may use every part.
"""

from __future__ import annotations

from collections.abc import Iterable

from muster.core import errors
from muster.web.auth import sessions

AREAS = (
    "access",
    "activity",
    "alerts",
    "contexts",
    "management",
    "messages",
    "notification",
    "reports",
    "watches",
)
READ = ":read"


def check(scopes: Iterable[str]) -> tuple[str, ...]:
    """The scopes, sorted. `errors.InvalidInput` names the first that does not exist."""
    checked = set()
    for scope in scopes:
        area = scope.removesuffix(READ)
        if area not in AREAS:
            raise errors.InvalidInput(
                f"unknown scope {scope[:60]!r}",
                hint=f"use one of {', '.join(AREAS)}, each with or without {READ}",
            )
        checked.add(scope)
    return tuple(sorted(checked))


def role_in(area: str, session: sessions.LoginSession) -> sessions.WebRole:
    """The session's role in a part of the API. `errors.Forbidden` if its scopes exclude the part."""
    if not session.scopes or area in session.scopes:
        return session.role
    if area + READ in session.scopes:
        return sessions.WebRole.VIEWER
    raise errors.Forbidden(
        f"this token is limited to {', '.join(session.scopes)}", hint=f"create a token with the scope {area}"
    )


def is_read_only(area: str, session: sessions.LoginSession) -> bool:
    """Whether a token may only read in a part of the API that its scopes include."""
    return bool(session.scopes) and area not in session.scopes
