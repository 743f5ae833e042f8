"""REST: logins and tokens."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Path, Request
from pydantic import Field
from starlette.responses import Response

from muster.core import messages
from muster.trust.permissions import roles
from muster.web import actions, request_state
from muster.web.auth import sessions
from muster.web.data import rows
from muster.web.rest import base
from muster.web.rest.resources import StrictBody

router = base.router("access")

LoginName = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


class CredentialsBody(StrictBody):
    name: str = Field(min_length=1, max_length=128)
    password: str = Field(min_length=1, max_length=1024)
    lifetime_s: float | None = Field(None, ge=60, le=366 * 86400)


class LoginBody(StrictBody):
    password: str = Field(min_length=8, max_length=1024)
    role: sessions.WebRole = sessions.WebRole.VIEWER


@router.post(
    "/tokens",
    summary="Create a bearer token with a name and a password",
    openapi_extra={"security": []},
    **base.answers(base.kind(rows.IssuedToken), status=201),
)
async def token(request: Request, web: request_state.Web, body: CredentialsBody) -> Response:
    actions.address.set(request_state.address_of(request))
    made, session = await web.logins.begin(
        body.name,
        body.password,
        request_state.address_of(request),
        sessions.TokenKind.TOKEN,
        lifetime_s=body.lifetime_s,
    )
    await web.actions.record(
        session.name, "token", session.name, "", messages.DecisionOutcome.DONE, kind=sessions.TokenKind.TOKEN
    )
    issued = rows.IssuedToken(token=made, name=session.name, role=session.role.value, until=session.until)
    return base.reply(issued, status=201)


@router.delete(
    "/tokens/current", summary="Revoke the token of this request", **base.answers(None, status=204)
)
async def end_token(web: request_state.Web, person: request_state.Person) -> Response:
    await web.logins.end(person)
    return Response(status_code=204)


@router.get(
    "/me",
    summary="The authenticated user",
    **base.answers(base.kind(rows.CurrentUser)),
)
async def me(web: request_state.Web, person: request_state.Person) -> Response:
    return base.reply(
        rows.CurrentUser(name=person.name, role=person.role.value, kind=person.kind.value, until=person.until)
    )


@router.get(
    "/logins", summary="List logins and their roles", **base.answers(base.items(base.kind(rows.LoginRow)))
)
async def logins(
    web: request_state.Web,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    actions.require_role(person, sessions.WebRole.ADMIN, "list logins")
    return base.paginate(await asyncio.to_thread(listed, web), cursor, limit, lambda row: (row.name,))


def listed(web: request_state.WebState) -> list[rows.LoginRow]:
    passwords = web.trust.passwords()
    logins_ = [passwords.get(name) for name in passwords.names()]
    return [
        rows.LoginRow(
            name=login.name,
            role="admin" if login.administers else login.role.value,
            created_at=login.created_at,
            expires_at=login.expires_at or None,
        )
        for login in logins_
    ]


@router.put("/logins/{name}", summary="Create or change a login", **base.answers(None, status=204))
async def set_login(
    web: request_state.Web, person: request_state.Person, name: LoginName, body: LoginBody
) -> Response:
    async def act(_: Any) -> None:
        viewer = body.role is sessions.WebRole.VIEWER
        await asyncio.to_thread(
            web.trust.passwords().set,
            name,
            roles.Role.VIEWER if viewer else roles.Role.OPERATOR,
            body.password,
            administers=body.role is sessions.WebRole.ADMIN,
        )

    await web.actions.run(person, "set-login", name, act, needs=sessions.WebRole.ADMIN, service_audits=False)
    return Response(status_code=204)


@router.delete("/logins/{name}", summary="Revoke a login", **base.answers(None, status=204))
async def remove_login(web: request_state.Web, person: request_state.Person, name: LoginName) -> Response:
    async def act(_: Any) -> None:
        await asyncio.to_thread(web.trust.passwords().remove, name)

    await web.actions.run(
        person, "remove-login", name, act, needs=sessions.WebRole.ADMIN, service_audits=False
    )
    return Response(status_code=204)
