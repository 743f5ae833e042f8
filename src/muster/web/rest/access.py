"""REST: logins and tokens."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import Path, Request
from pydantic import Field

from muster.core import errors, messages
from muster.trust.permissions import roles
from muster.web import actions, request_state
from muster.web.auth import logins as logins_
from muster.web.auth import scopes, sessions, tokens
from muster.web.data import rows
from muster.web.rest import route
from muster.web.rest.base import StrictBody

router = route.RouteTable("access")

TokenId = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$", description="Id of a token.")]
LoginName = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


class TokenBody(StrictBody):
    """``name`` and ``password`` authenticate the owner; a page of the dashboard sends its cookie instead."""

    name: str = Field("", max_length=128)
    password: str = Field("", max_length=1024)
    role: sessions.WebRole | None = Field(None, description="At most, and without it, the owner's role.")
    scopes: list[str] = Field([], max_length=20, description="Tags of operations, or TAG:read. Empty: all.")
    description: str = Field("", max_length=200)
    lifetime_s: float | None = Field(None, ge=60, le=366 * 86400)


class LoginBody(StrictBody):
    password: str = Field(min_length=8, max_length=1024)
    role: sessions.WebRole = sessions.WebRole.VIEWER


@router.of("POST /tokens", "Create an API token", status=201, openapi_extra={"security": []})
async def create_token(request: Request, web: request_state.Web, body: TokenBody) -> rows.IssuedToken:
    """Authenticate with a name and a password in the body. A token cannot create tokens."""
    actions.address.set(request_state.address_of(request))
    if body.name:
        owner = await web.logins.check_password(body.name, body.password, request_state.address_of(request))
    else:
        owner = await request_state.session_of(request)
    return await issue_token(web, owner, body)


async def issue_token(
    web: request_state.WebState, owner: sessions.LoginSession, body: TokenBody
) -> rows.IssuedToken:
    if owner.kind is sessions.TokenKind.TOKEN:
        raise errors.Forbidden(
            "a token cannot create tokens", hint="send the name and the password of a login"
        )

    async def create() -> rows.IssuedToken:
        text, record = await web.logins.create_token(
            owner,
            role=body.role,
            scopes_=body.scopes,
            description=body.description,
            lifetime_s=body.lifetime_s,
        )
        await web.actions.record(
            owner.name, "create-token", record.id, "", messages.DecisionOutcome.DONE, kind=owner.kind
        )
        return rows.IssuedToken(token=text, **msgspec.structs.asdict(record.row))

    return await web.actions.finish(create())


@router.of("GET /tokens", "List your API tokens; for an admin, those of all logins", key=("created_at", "id"))
async def list_tokens(call: request_state.Call) -> list[tokens.TokenRow]:
    owner = None if call.person.role is sessions.WebRole.ADMIN else call.person.name
    return [record.row for record in await asyncio.to_thread(call.web.logins.tokens.list, owner)]


@router.of("DELETE /tokens/current", "Revoke the token of this request")
async def end_token(call: request_state.Call) -> None:
    if call.person.kind is sessions.TokenKind.TOKEN:
        await revoke_token(call, call.person.id)
    else:
        await call.web.logins.end(call.person)


@router.of("DELETE /tokens/{id}", "Revoke an API token: your own, or as an admin any")
async def revoke_token(call: request_state.Call, id: TokenId) -> None:
    """A token revokes itself, and those with at most its own role unless its scopes permit only reading."""
    if id != call.person.id and scopes.is_read_only("access", call.person):
        raise errors.Forbidden(
            f"this token is limited to {', '.join(call.person.scopes)}",
            hint="create a token with the scope access",
        )

    async def revoke() -> None:
        owner = None if call.person.role is sessions.WebRole.ADMIN else call.person.name
        limited = call.person.kind is sessions.TokenKind.TOKEN and id != call.person.id
        await asyncio.to_thread(
            call.web.logins.tokens.revoke, id, owner=owner, role_max=call.person.role if limited else None
        )
        await call.web.actions.record(
            call.person.name, "revoke-token", id, "", messages.DecisionOutcome.DONE, kind=call.person.kind
        )

    await call.web.actions.finish(revoke())


@router.of("GET /me", "The authenticated user")
async def me(call: request_state.Call) -> rows.CurrentUser:
    return rows.CurrentUser(
        name=call.person.name,
        role=call.person.role.value,
        kind=call.person.kind.value,
        until=call.person.until,
        scopes=list(call.person.scopes),
    )


@router.of("GET /logins", "List logins and their roles", key=("name",))
async def logins(call: request_state.Call) -> list[logins_.LoginRow]:
    actions.require_role(call.person, sessions.WebRole.ADMIN, "list logins")
    return await asyncio.to_thread(logins_.login_rows, call.web.trust.passwords())


@router.of("PUT /logins/{name}", "Create or change a login")
async def set_login(call: request_state.Call, name: LoginName, body: LoginBody) -> None:
    async def act(_: Any) -> None:
        viewer = body.role is sessions.WebRole.VIEWER
        await asyncio.to_thread(
            call.web.trust.passwords().set,
            name,
            roles.Role.VIEWER if viewer else roles.Role.OPERATOR,
            body.password,
            administers=body.role is sessions.WebRole.ADMIN,
        )

    await call.run("set-login", name, act, needs=sessions.WebRole.ADMIN, service_audits=False)


@router.of("DELETE /logins/{name}", "Revoke a login")
async def remove_login(call: request_state.Call, name: LoginName) -> None:
    async def act(_: Any) -> None:
        await asyncio.to_thread(call.web.trust.passwords().remove, name)

    await call.run("remove-login", name, act, needs=sessions.WebRole.ADMIN, service_audits=False)
