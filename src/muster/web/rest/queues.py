"""REST: queues, durable subscriptions and dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import Field
from starlette.responses import Response

from muster.core import errors
from muster.message import destinations, listings, protocol
from muster.web import request_state
from muster.web.auth import sessions
from muster.web.data import dispatcher_calls
from muster.web.data import rows as rows_
from muster.web.rest import base, lists
from muster.web.rest.resources import StrictBody

router = base.router("messages")

Queue = Annotated[str, Path(min_length=1, max_length=256)]
Selector = Annotated[str, Query(max_length=4096, description="A JMS selector; empty: all.")]


class MoveBody(StrictBody):
    to: str | None = Field(None, max_length=300, description="`queue:NAME`; null: the original destinations.")
    selector: str | None = Field(None, max_length=4096)
    limit: int = Field(100, ge=1, le=1000)


def _subscription(row: listings.SubscriptionRow) -> tuple[str, str, str]:
    return row.client_id or "", row.subscription, row.identity


@lists.listing(
    router,
    "/queues",
    "List queues with their depth and consumers",
    listings.QueueRow,
    lambda row: (row.queue,),
)
async def queues(web: request_state.WebState, person: sessions.LoginSession) -> Sequence[listings.QueueRow]:
    return await web.source.queues(person)


@lists.listing(
    router, "/subscriptions", "List durable subscriptions", listings.SubscriptionRow, _subscription
)
async def subscriptions(
    web: request_state.WebState, _: sessions.LoginSession
) -> Sequence[listings.SubscriptionRow]:
    return await web.source.subscriptions()


@router.get(
    "/queues/{name:path}/messages",
    summary="Browse the messages of a queue without removing them",
    **base.answers(base.items(base.kind(rows_.BrowsedMessage))),
)
async def browse(
    web: request_state.Web,
    person: request_state.Person,
    name: Queue,
    selector: Selector = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    rows, next_ = await web.source.browse(
        person, name, selector=selector, after=base.number(cursor), limit=limit
    )
    return base.page(rows, next_)


@router.delete(
    "/queues/{name:path}/messages",
    summary="Discard the messages of a queue",
    **base.answers(base.kind(rows_.QueuePurged)),
)
async def purge(
    web: request_state.Web, person: request_state.Person, name: Queue, selector: Selector = ""
) -> Response:
    done = await web.actions.run(
        person,
        "purge",
        f"queue:{name}",
        _act_of(protocol.PurgeQueue(name, selector or None)),
        touches="message",
    )
    return base.reply(rows_.QueuePurged(queue=name, purged=done.count))


@router.post(
    "/queues/{name:path}/moves",
    summary="Move the messages of a queue to another destination",
    **base.answers(base.kind(rows_.QueueMoved)),
)
async def move(web: request_state.Web, person: request_state.Person, name: Queue, body: MoveBody) -> Response:
    request = protocol.MoveMessages(name, body.to, body.selector, body.limit)
    done = await web.actions.run(person, "move", f"queue:{name}", _act_of(request), touches="message")
    return base.reply(rows_.QueueMoved(queue=name, moved=done.count))


@router.get(
    "/dead-letters",
    summary="List undeliverable messages and the reasons",
    **base.answers(base.items(base.kind(rows_.BrowsedMessage))),
)
async def dead_letters(
    web: request_state.Web,
    person: request_state.Person,
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    rows, next_ = await web.source.browse(
        person, destinations.DEAD_LETTERS, selector=None, after=base.number(cursor), limit=limit
    )
    return base.page(rows, next_)


@router.get(
    "/scheduled-messages",
    summary="List messages with a delivery time in the future, in order of that time",
    **base.answers(base.items(base.kind(listings.ScheduledRow))),
)
async def scheduled(
    web: request_state.Web,
    person: request_state.Person,
    destination: Annotated[
        str, Query(max_length=300, description="`queue:NAME` or a topic. Empty: all.")
    ] = "",
    limit: base.Limit = base.LIMIT,
    cursor: base.Cursor = "",
) -> Response:
    rows = await web.source.scheduled(person, destination or None)
    return base.paginate(rows, cursor, limit, lambda row: (row.delivery_time_ms, row.number))


@router.delete(
    "/scheduled-messages/{number}",
    summary="Cancel a message before its delivery time",
    **base.answers(base.kind(rows_.ScheduledCancelled)),
)
async def cancel_scheduled(
    web: request_state.Web, person: request_state.Person, number: Annotated[int, Path(ge=1)]
) -> Response:
    done = await web.actions.run(
        person,
        "cancel",
        f"scheduled:{number}",
        _act_of(protocol.CancelScheduled(number)),
        touches="message",
    )
    if not done.count:
        raise errors.NotFound(f"there is no scheduled message {number}: it was delivered or cancelled")
    return base.reply(rows_.ScheduledCancelled(number=number))


def _act_of(request: protocol.DispatcherRequest) -> Any:
    async def act(bus: Any) -> protocol.DispatcherReply:
        return await dispatcher_calls.call(bus, protocol.request_subject, request, timeout_s=30.0)

    return act
