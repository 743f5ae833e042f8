"""REST: logins and tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import Path, Request
from pydantic import Field
from starlette.responses import Response

from muster.core import errors, messages
from muster.trust.permissions import roles
from muster.web import actions, request_state
from muster.web.auth import scopes, sessions, tokens
from muster.web.data import rows
from muster.web.rest import base, lists
from muster.web.rest.resources import StrictBody

router = base.router("access")

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


@router.post(
    "/tokens",
    summary="Create an API token",
    openapi_extra={"security": []},
    **base.answers(base.kind(rows.IssuedToken), status=201),
)
async def create_token(request: Request, web: request_state.Web, body: TokenBody) -> Response:
    """Authenticate with a name and a password in the body. A token cannot create tokens."""
    actions.address.set(request_state.address_of(request))
    if body.name:
        owner = await web.logins.check_password(body.name, body.password, request_state.address_of(request))
    else:
        owner = await request_state.session_of(request)
    return base.reply(await issue_token(web, owner, body), status=201)


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


@lists.listing(
    router,
    "/tokens",
    "List your API tokens; for an admin, those of all logins",
    tokens.TokenRow,
    lambda row: (row.created_at, row.id),
)
async def list_tokens(
    web: request_state.WebState, person: sessions.LoginSession
) -> Sequence[tokens.TokenRow]:
    return [record.row for record in await tokens_of(web, person)]


async def tokens_of(web: request_state.WebState, person: sessions.LoginSession) -> list[tokens.TokenRecord]:
    owner = None if person.role is sessions.WebRole.ADMIN else person.name
    return await asyncio.to_thread(web.logins.tokens.list, owner)


@router.delete(
    "/tokens/current", summary="Revoke the token of this request", **base.answers(None, status=204)
)
async def end_token(web: request_state.Web, person: request_state.Person) -> Response:
    if person.kind is sessions.TokenKind.TOKEN:
        return await revoke_token(web, person, person.id)
    await web.logins.end(person)
    return Response(status_code=204)


@router.delete(
    "/tokens/{id}",
    summary="Revoke an API token: your own, or as an admin any",
    **base.answers(None, status=204),
)
async def revoke_token(web: request_state.Web, person: request_state.Person, id: TokenId) -> Response:
    """A token revokes itself, and those with at most its own role unless its scopes permit only reading."""
    if id != person.id and scopes.is_read_only("access", person):
        raise errors.Forbidden(
            f"this token is limited to {', '.join(person.scopes)}",
            hint="create a token with the scope access",
        )

    async def revoke() -> None:
        owner = None if person.role is sessions.WebRole.ADMIN else person.name
        limited = person.kind is sessions.TokenKind.TOKEN and id != person.id
        await asyncio.to_thread(
            web.logins.tokens.revoke, id, owner=owner, role_max=person.role if limited else None
        )
        await web.actions.record(
            person.name, "revoke-token", id, "", messages.DecisionOutcome.DONE, kind=person.kind
        )

    await web.actions.finish(revoke())
    return Response(status_code=204)


@router.get(
    "/me",
    summary="The authenticated user",
    **base.answers(base.kind(rows.CurrentUser)),
)
async def me(web: request_state.Web, person: request_state.Person) -> Response:
    return base.reply(
        rows.CurrentUser(
            name=person.name,
            role=person.role.value,
            kind=person.kind.value,
            until=person.until,
            scopes=list(person.scopes),
        )
    )


@lists.listing(router, "/logins", "List logins and their roles", rows.LoginRow, lambda row: (row.name,))
async def logins(web: request_state.WebState, person: sessions.LoginSession) -> Sequence[rows.LoginRow]:
    actions.require_role(person, sessions.WebRole.ADMIN, "list logins")
    return await asyncio.to_thread(listed, web)


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
