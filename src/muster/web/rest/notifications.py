"""REST: selective notification: queries of receivers, explanations and sending."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec
from fastapi import Path, Query
from pydantic import Field

from muster.notify import client, operations, protocol, queries, rows
from muster.web import actions, request_state
from muster.web.auth import sessions
from muster.web.data import event_log
from muster.web.data import rows as web_rows
from muster.web.rest import base, route
from muster.web.rest.base import StrictBody

router = route.RouteTable("notification")

PARTICIPANT = "web"
Value = str | bool | int | float | list[str] | None


class EventBody(StrictBody):
    type: str = Field(min_length=1, max_length=128)
    content: dict[str, Value] = Field(default_factory=dict)


class MatchBody(StrictBody):
    address: str = Field("TRUE", max_length=65536, description="A predicate over the receivers' states.")
    event: EventBody | None = Field(None, description="Only receivers that would accept this event.")
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
    """``sender``: PROCESS/NAME, or the name."""
    content = {
        name: tuple(value) if isinstance(value, list) else value for name, value in event.content.items()
    }
    _, slash, name = sender.partition("/")
    return protocol.SendEvent(
        id=secrets.token_hex(12),
        sender=(name if slash else sender) or PARTICIPANT,
        type=event.type,
        content=content,
        address=address,
    )


def _sender(call: request_state.RestCall, stated: str) -> str:
    return stated or f"{call.person.name}/{PARTICIPANT}"


@router.of("GET /receivers", operations.RECEIVERS.help)
async def receivers(
    call: request_state.Call,
    where: base.Where = "",
    prefix: Annotated[str, Query(max_length=300, description="PREFIX of the names, or *PART.")] = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> route.RowPage[rows.ReceiverRow]:
    result = await call.source.feed.query(
        ("receivers", where, prefix, cursor, limit),
        "notify",
        2.0,
        lambda bus: queries.list_receivers(bus, where=where, prefix=prefix, after=cursor, limit=limit),
    )
    return route.RowPage(result.receivers, result.next, result.count)


router.operation("GET /models", operations.MODELS, as_="models", key=("of", "name"))


@router.of("POST /notify/who", "Find the receivers an event would reach, and near misses")
async def who(call: request_state.Call, body: MatchBody) -> rows.ReceiverMatches:
    sender = _sender(call, body.sender)
    event = send_of(body.event, address=body.address, sender=sender) if body.event else None
    result = await call.source.feed.query(
        ("who", call.person.name, body),
        "notify",
        1.0,
        lambda bus: queries.match_receivers(bus, body.address, event=event, sender=sender, limit=body.limit),
    )
    return msgspec.structs.replace(result, near=result.near[: body.limit])


@router.of("POST /notify/explain", "Explain why an event would or would not reach a receiver")
async def explain(call: request_state.Call, body: ExplainBody) -> rows.DeliveryExplanation:
    sender = _sender(call, body.sender)
    event = send_of(body.event, address=body.address, sender=sender)
    return await call.source.feed.query(
        ("explain", call.person.name, body),
        "notify",
        1.0,
        lambda bus: queries.explain(bus, event, sender=sender, receiver=body.receiver),
    )


router.operation("POST /notify/check", operations.CHECK, body=PolicyBody)


@router.of("GET /notify/events", "The latest events, newest first, with the number of their receivers")
async def events(
    call: request_state.Call, limit: base.Limit = base.LIMIT, cursor: base.Cursor = ""
) -> route.RowPage[event_log.EventRow]:
    actions.require_role(call.person, sessions.WebRole.OPERATOR, "read events")
    listed = [event_log.row(decided) for decided in await call.source.events.events(call.person)]
    rows_, next_ = base.behind(listed, cursor, limit, lambda row: row.id)
    return route.RowPage(rows_, next_, len(listed))


@router.of("GET /notify/events/{id}", "What became of an event: its receivers, and the operations for it")
async def event(
    call: request_state.Call, id: Annotated[str, Path(min_length=1, max_length=256)]
) -> event_log.EventTrace:
    actions.require_role(call.person, sessions.WebRole.OPERATOR, "read events")
    return await call.source.events.trace(call.person, id)


@router.of("GET /alerts/loop", "What followed from an alert: events and operations, oldest first")
async def loop(
    call: request_state.Call,
    rule: Annotated[str, Query(min_length=1, max_length=256)],
    about: Annotated[str, Query(min_length=1, max_length=300)],
) -> event_log.LoopTrace:
    actions.require_role(call.person, sessions.WebRole.OPERATOR, "read events")
    return await call.source.events.trace_loop(call.person, rule, about)


@router.of("POST /notify/events", "Send an event", status=202)
async def send(call: request_state.Call, body: SendBody) -> web_rows.SentEvent:
    made = send_of(body.event, address=body.address, sender=body.sender)

    async def act(bus: Any) -> str:
        async with client.NotifyClient(bus) as mine:
            return await mine.send(
                body.sender,
                made.type,
                protocol.from_wire(made.content),
                to=body.address,
                durable=body.durable,
                timeout_s=10.0,
            )

    sent = await call.run(
        "notify", f"{made.type} to {body.address}", act, touches="notify", service_audits=False
    )
    return web_rows.SentEvent(id=sent, sender=f"{call.person.name}/{body.sender}")
