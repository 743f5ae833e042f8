"""Requests to the message dispatchers, and the messages that they return."""

from __future__ import annotations

from collections.abc import Callable

from muster.bus import api
from muster.bus.rpc import client, origin
from muster.core import errors
from muster.message import codec, destinations, listings, messages, protocol
from muster.message import rows as message_rows
from muster.message.client import routes
from muster.trust.permissions import queue_rights, roles
from muster.web.auth import sessions
from muster.web.data import bus_feed, rows


async def call(
    bus: api.Bus,
    subject: Callable[[str, int], str],
    request: protocol.DispatcherRequest,
    *,
    timeout_s: float = bus_feed.READ_S,
) -> protocol.DispatcherReply:
    """Send a request to the partitions that it concerns. ``subject``: of an identity and a partition."""
    counted = await _call_partition(
        bus,
        protocol.read_subject(bus.identity),
        protocol.CountPartitions(),
        timeout_s=timeout_s,
    )
    return routes.merge(
        request,
        [
            await _call_partition(bus, subject(bus.identity, partition), part, timeout_s=timeout_s)
            for partition, part in routes.route(request, counted.partitions)
        ],
    )


async def _call_partition(
    bus: api.Bus, subject: str, request: protocol.DispatcherRequest, *, timeout_s: float
) -> protocol.DispatcherReply:
    try:
        reply = await client.exchange_once(
            bus, subject, protocol.encode(request), timeout_s=timeout_s, headers=origin.headers()
        )
    except errors.TimedOut:
        raise
    except errors.Unavailable as error:
        raise errors.Unavailable(
            "no message dispatcher runs", hint="enable [message] in the domain's settings"
        ) from error
    origin.answered()
    return protocol.read_reply(reply.data)


def may_browse(person: sessions.LoginSession, queue: str) -> bool:
    """What the dispatcher would decide about the person: the web process itself may browse every queue."""
    role = roles.Role.OPERATOR if person.role.covers(sessions.WebRole.OPERATOR) else roles.Role.VIEWER
    return queue_rights.allows(queue_rights.of_role(role), queue, queue_rights.QueueRight.BROWSE)


def visible_scheduled(
    person: sessions.LoginSession, scheduled: list[listings.ScheduledRow]
) -> list[listings.ScheduledRow]:
    return [row for row in scheduled if may_browse(person, row.destination.removeprefix("queue:"))]


def check_browse(person: sessions.LoginSession, queue: str) -> None:
    if not may_browse(person, queue):
        raise errors.Forbidden(
            f"{person.name} has the role {person.role.value}, which may not browse the queue {queue[:100]!r}"
        )


def browsed(delivery: protocol.MessageDelivery, queue: str) -> rows.BrowsedMessage:
    meta, place = messages.decode_meta(delivery.meta), destinations.queue(queue)
    try:
        message = codec.message_from_meta(meta, delivery.data, place)
    except errors.MusterError:  # an unreadable message must not hide the others
        message = codec.message_from_meta(codec.unreadable(meta), delivery.data, place)
    return rows.BrowsedMessage(sequence=delivery.sequence, **message_rows.fields(message))
