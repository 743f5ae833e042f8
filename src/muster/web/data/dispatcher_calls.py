"""Requests to the message dispatchers, and the messages that they return."""

from __future__ import annotations

from collections.abc import Callable

from muster.bus import api
from muster.bus.rpc import error_replies, origin
from muster.core import errors
from muster.message import codec, destinations, messages, protocol
from muster.message import rows as message_rows
from muster.message.client import routes
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
        reply = await bus.request(
            subject, protocol.encode(request), timeout_s=timeout_s, headers=origin.headers()
        )
    except errors.TimedOut:
        raise
    except errors.Unavailable as error:
        raise errors.Unavailable(
            "no message dispatcher runs", hint="enable [message] in the domain's settings"
        ) from error
    origin.answered()
    answer = protocol.decode_reply(reply.data)
    if answer.error is not None:
        raise error_replies.from_error_reply(answer.error)
    return answer


def browsed(delivery: protocol.MessageDelivery, queue: str) -> rows.BrowsedMessage:
    meta, place = messages.decode_meta(delivery.meta), destinations.queue(queue)
    try:
        message = codec.message_from_meta(meta, delivery.data, place)
    except errors.MusterError:  # an unreadable message must not hide the others
        message = codec.message_from_meta(codec.unreadable(meta), delivery.data, place)
    return rows.BrowsedMessage(sequence=delivery.sequence, **message_rows.fields(message))
