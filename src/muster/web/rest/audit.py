"""The audit; who may log in; tokens."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Path, Query, Request
from pydantic import Field
from starlette.responses import Response

from muster.core import messages
from muster.trust.permissions import roles
from muster.web import actions, request_state
from muster.web.auth import sessions
from muster.web.data import bus_feed
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


@router.get(
    "/audit",
    summary="Who decided or did what, newest first",
    **base.answers(base.items(base.kind(messages.Decision))),
)
async def audit(
    known: request_state.Known,
    person: request_state.Person,
    who: Annotated[str, Query(max_length=256)] = "",
    what: Annotated[str, Query(max_length=256)] = "",
    target: Annotated[str, Query(max_length=256, description="Only those whose target holds this.")] = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    found = select(known, who=who, what=what, target=target)
    rows, next_ = base.behind(found, cursor, limit, bus_feed.decision_key)
    return base.page(rows, next_, total=len(found))


def select(
    known: request_state.WebState, *, who: str = "", what: str = "", target: str = ""
) -> list[messages.Decision]:
    if not known.source.decisions:
        known.source.must_hear()
    return [
        one
        for one in reversed(known.source.decisions)
        if (not who or one.who == who or one.on_behalf_of == who)
        and (not what or one.what == what)
        and target in one.target
    ]


@router.post(
    "/tokens",
    summary="A bearer token for a name and a password",
    openapi_extra={"security": []},
    **base.answers(base.row(token="string", name="string", role="string", until="integer"), status=201),
)
async def token(request: Request, known: request_state.Known, given: CredentialsBody) -> Response:
    actions.address.set(request_state.address_of(request))
    made, session = await known.logins.begin(
        given.name,
        given.password,
        request_state.address_of(request),
        sessions.TokenKind.TOKEN,
        lifetime_s=given.lifetime_s,
    )
    await known.desk.record(
        session.name, "token", session.name, "", messages.DecisionOutcome.DONE, kind=sessions.TokenKind.TOKEN
    )
    told = {"token": made, "name": session.name, "role": session.role, "until": session.until}
    return base.reply(told, status=201)


@router.delete("/tokens/current", summary="End the token of this request", **base.answers(None, status=204))
async def end_token(known: request_state.Known, person: request_state.Person) -> Response:
    await known.logins.end(person)
    return Response(status_code=204)


@router.get(
    "/me",
    summary="Who asks",
    **base.answers(base.row(name="string", role="string", kind="string", until="integer")),
)
async def me(known: request_state.Known, person: request_state.Person) -> Response:
    return base.reply({"name": person.name, "role": person.role, "kind": person.kind, "until": person.until})


@router.get("/logins", summary="Who may log in, and as what", **base.answers(base.items()))
async def logins(
    known: request_state.Known,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    actions.require_role(person, sessions.WebRole.ADMIN, "see who may log in")
    return base.paginate(await asyncio.to_thread(listed, known), cursor, limit, lambda row: (row["name"],))


def listed(known: request_state.WebState) -> list[dict[str, Any]]:
    passwords = known.trust.passwords()
    found = [passwords.get(name) for name in passwords.names()]
    return [
        {
            "name": one.name,
            "role": "admin" if one.administers else one.role.value,
            "created_at": one.created_at,
            "expires_at": one.expires_at or None,
        }
        for one in found
    ]


@router.put("/logins/{name}", summary="Let somebody log in, or change how", **base.answers(None, status=204))
async def set_login(
    known: request_state.Known, person: request_state.Person, name: LoginName, wanted: LoginBody
) -> Response:
    async def act(_: Any) -> None:
        viewer = wanted.role is sessions.WebRole.VIEWER
        await asyncio.to_thread(
            known.trust.passwords().set,
            name,
            roles.Role.VIEWER if viewer else roles.Role.OPERATOR,
            wanted.password,
            administers=wanted.role is sessions.WebRole.ADMIN,
        )

    await known.desk.do(person, "set-login", name, act, needs=sessions.WebRole.ADMIN, service_audits=False)
    return Response(status_code=204)


@router.delete("/logins/{name}", summary="Let somebody log in no more", **base.answers(None, status=204))
async def remove_login(known: request_state.Known, person: request_state.Person, name: LoginName) -> Response:
    async def act(_: Any) -> None:
        await asyncio.to_thread(known.trust.passwords().remove, name)

    await known.desk.do(person, "remove-login", name, act, needs=sessions.WebRole.ADMIN, service_audits=False)
    return Response(status_code=204)
