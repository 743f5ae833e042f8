"""Selective notification: who would be reached, why or why not, and sending."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from fastapi import Query
from pydantic import Field
from starlette.responses import Response

from muster.notify import client, protocol
from muster.web import request_state
from muster.web.rest import base
from muster.web.rest.resources import StrictBody

router = base.router("notification")

PARTICIPANT = "web"
Value = str | bool | int | float | list[str] | None


class EventBody(StrictBody):
    type: str = Field(min_length=1, max_length=128)
    content: dict[str, Value] = Field(default_factory=dict)


class MatchBody(StrictBody):
    address: str = Field("TRUE", max_length=65536, description="A predicate over the receivers' states.")
    event: EventBody | None = Field(None, description="Only those who would accept this.")
    sender: str = Field("", max_length=300, description="PROCESS/NAME; empty: yourself.")
    limit: int = Field(base.LIMIT, ge=1, le=base.LIMIT_MAX)


class ExplainBody(StrictBody):
    address: str = Field("TRUE", max_length=65536)
    event: EventBody
    receiver: str = Field(min_length=1, max_length=300, description="PROCESS/NAME.")
    sender: str = Field("", max_length=300)


class SendBody(StrictBody):
    address: str = Field("TRUE", max_length=65536)
    event: EventBody
    sender: str = Field(PARTICIPANT, pattern=r"^[A-Za-z0-9_-]{1,128}$")
    durable: bool = False


class PolicyBody(StrictBody):
    policy: str = Field(min_length=1, max_length=65536)


def send_of(event: EventBody, *, address: str, sender: str) -> protocol.SendEvent:
    content = {
        name: tuple(value) if isinstance(value, list) else value for name, value in event.content.items()
    }
    return protocol.SendEvent(
        id=secrets.token_hex(12), sender=sender, type=event.type, content=content, address=address
    )


@router.get("/receivers", summary="Receivers, with their states and policies", **base.answers(base.items()))
async def receivers(
    known: request_state.Known,
    person: request_state.Person,
    where: base.Where = "",
    prefix: Annotated[str, Query(max_length=300, description="Only names that begin so.")] = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    found = await known.source.receivers(where, prefix=prefix, after=cursor, limit=limit)
    return base.page(found["items"], found["next"], total=found["count"])


@router.get("/models", summary="Models of receivers and events", **base.answers(base.items()))
async def models(
    known: request_state.Known,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    return base.paginate(await known.source.models(), cursor, limit, lambda row: (row["of"], row["name"]))


@router.post(
    "/notify/who",
    summary="Who would be reached, how many, and near misses",
    **base.answers(base.row(count="integer", receivers="array", near="array")),
)
async def who(known: request_state.Known, person: request_state.Person, asked: MatchBody) -> Response:
    sender = asked.sender or f"{person.name}/{PARTICIPANT}"
    event = (
        send_of(asked.event, address=asked.address, sender=sender.partition("/")[2] or PARTICIPANT)
        if asked.event
        else None
    )
    return base.reply(await known.source.who(asked.address, event=event, sender=sender, limit=asked.limit))


@router.post(
    "/notify/explain",
    summary="Why an event would reach a receiver, or which side keeps it away",
    **base.answers({"type": "object"}),
)
async def explain(known: request_state.Known, person: request_state.Person, asked: ExplainBody) -> Response:
    sender = asked.sender or f"{person.name}/{PARTICIPANT}"
    event = send_of(asked.event, address=asked.address, sender=sender.partition("/")[2] or PARTICIPANT)
    return base.reply(await known.source.explain(event, sender=sender, receiver=asked.receiver))


@router.post(
    "/notify/check", summary="Type a policy, and say what it costs", **base.answers({"type": "object"})
)
async def check(known: request_state.Known, person: request_state.Person, asked: PolicyBody) -> Response:
    return base.reply(await known.source.check_policy(asked.policy))


@router.post("/notify/events", summary="Send an event", **base.answers({"type": "object"}, status=202))
async def send(known: request_state.Known, person: request_state.Person, wanted: SendBody) -> Response:
    made = send_of(wanted.event, address=wanted.address, sender=wanted.sender)

    async def act(bus: Any) -> str:
        async with client.NotifyClient(bus) as mine:
            return await mine.send(
                wanted.sender,
                made.type,
                protocol.from_wire(made.content),
                to=wanted.address,
                durable=wanted.durable,
                timeout_s=10.0,
            )

    sent = await known.desk.do(
        person, "notify", f"{made.type} to {wanted.address}", act, touches="notify", service_audits=False
    )
    return base.reply({"id": sent, "sender": f"{person.name}/{wanted.sender}"}, status=202)
