"""REST: queues, durable subscriptions and dead letters."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import Field

from muster.core import errors
from muster.message import destinations, listings, messages, protocol
from muster.message.client import api
from muster.web import request_state
from muster.web.data import dispatcher_calls, rows
from muster.web.rest import base, route
from muster.web.rest.base import StrictBody

router = route.RouteTable("messages")

Queue = Annotated[str, Path(min_length=1, max_length=256)]
Selector = Annotated[str, Query(max_length=4096, description="A JMS selector; empty: all.")]


class MoveBody(StrictBody):
    to: str | None = Field(None, max_length=300, description="`queue:NAME`; null: the original destinations.")
    selector: str | None = Field(None, max_length=4096)
    limit: int = Field(100, ge=1, le=1000)


@router.of("GET /queues", "List queues with their depth and consumers", key=("queue",))
async def queues(call: request_state.Call) -> list[listings.QueueRow]:
    return await call.source.queues(call.person)


def _subscription(row: listings.SubscriptionRow) -> tuple[str, str, str]:
    return row.client_id or "", row.subscription, row.identity


@router.of("GET /subscriptions", "List durable subscriptions", key=_subscription)
async def subscriptions(call: request_state.Call) -> list[listings.SubscriptionRow]:
    return (await call.source.dispatcher("subscriptions", protocol.ListSubscriptions())).subscriptions


@router.of("GET /queues/{name:path}/messages", "Browse the messages of a queue without removing them")
async def browse(
    call: request_state.Call,
    name: Queue,
    selector: Selector = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> route.RowPage[rows.BrowsedMessage]:
    return route.RowPage(
        *await call.source.browse(
            call.person, name, selector=selector, after=base.number(cursor), limit=limit
        )
    )


class MessageBody(StrictBody):
    text: str = Field(max_length=1 << 20)
    properties: dict[str, str | bool | int | float] = Field(default_factory=dict, max_length=100)
    priority: int = Field(4, ge=0, le=9)


@router.of("POST /queues/{name:path}/messages", "Send a text message to a queue", status=201)
async def send(call: request_state.Call, name: Queue, body: MessageBody) -> rows.QueueSent:
    async def act(bus: Any) -> rows.QueueSent:
        made = messages.TextMessage(body.text, properties=body.properties)
        async with api.Connection(bus) as connection:
            to = destinations.queue(name)
            await connection.session().producer(to, priority=body.priority).send(made)
        return rows.QueueSent(queue=name, id=str(made.message_id))

    return await call.run("send", f"queue:{name}", act, touches="message", service_audits=False)


@router.of("DELETE /queues/{name:path}/messages", "Discard the messages of a queue")
async def purge(call: request_state.Call, name: Queue, selector: Selector = "") -> rows.QueuePurged:
    request = protocol.PurgeQueue(name, selector or None)
    return rows.QueuePurged(queue=name, purged=await _run(call, "purge", f"queue:{name}", request))


@router.of("POST /queues/{name:path}/moves", "Move the messages of a queue to another destination")
async def move(call: request_state.Call, name: Queue, body: MoveBody) -> rows.QueueMoved:
    request = protocol.MoveMessages(name, body.to, body.selector, body.limit)
    return rows.QueueMoved(queue=name, moved=await _run(call, "move", f"queue:{name}", request))


@router.of("GET /dead-letters", "List undeliverable messages and the reasons")
async def dead_letters(
    call: request_state.Call, limit: base.Limit = base.LIMIT, cursor: base.Cursor = ""
) -> route.RowPage[rows.BrowsedMessage]:
    return await browse(call, destinations.DEAD_LETTERS, "", limit, cursor)


@router.of(
    "GET /scheduled-messages",
    "List messages with a delivery time in the future, in order of that time",
    key=("delivery_time_ms", "number"),
)
async def scheduled(
    call: request_state.Call,
    destination: Annotated[
        str, Query(max_length=300, description="`queue:NAME` or a topic. Empty: all.")
    ] = "",
) -> list[listings.ScheduledRow]:
    return await call.source.scheduled(call.person, destination or None)


@router.of("DELETE /scheduled-messages/{number}", "Cancel a message before its delivery time")
async def cancel_scheduled(
    call: request_state.Call, number: Annotated[int, Path(ge=1, le=(1 << 63) - 1)]
) -> rows.ScheduledCancelled:
    if not await _run(call, "cancel", f"scheduled:{number}", protocol.CancelScheduled(number)):
        raise errors.NotFound(f"there is no scheduled message {number}: it was delivered or cancelled")
    return rows.ScheduledCancelled(number=number)


async def _run(call: request_state.Call, what: str, target: str, request: protocol.DispatcherRequest) -> int:
    """The number of messages that the request concerned."""

    async def act(bus: Any) -> int:
        reply = await dispatcher_calls.call(bus, protocol.request_subject, request, timeout_s=30.0)
        return reply.count

    return await call.run(what, target, act, touches="message")
