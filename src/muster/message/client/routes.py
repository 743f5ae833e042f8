"""Which partition receives a request, and how the replies of several become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from muster.message import destinations, partitions, protocol

Routed = list[tuple[int, protocol.DispatcherRequest]]


def route(
    request: protocol.DispatcherRequest, count: int, consumers: Mapping[int, int] | None = None
) -> Routed:
    """The requests to send, by partition. ``consumers``: the partitions of a connection's consumers."""
    if count == 1:
        return [(partitions.HOME, request)]
    of_consumer = consumers or {}
    match request:
        case protocol.BrowseQueue() | protocol.PurgeQueue() | protocol.MoveMessages():
            return [(partitions.of_queue(request.queue, count), request)]
        case protocol.AttachConsumer() | protocol.DeleteTemporary() | protocol.CheckTemporary():
            return [(_of_text(request.destination, count), request)]
        case protocol.DetachConsumer() | protocol.GrantCredit():
            return [(of_consumer.get(request.consumer, partitions.HOME), request)]
        case protocol.StopDelivery() | protocol.Ping() if request.consumers:
            return [(of_consumer.get(request.consumers[0], partitions.HOME), request)]
        case protocol.ReleaseMessages():
            return [
                (partition, msgspec.structs.replace(request, deliveries=deliveries))
                for partition, deliveries in split_keys(request.deliveries, count).items()
            ]
        case protocol.StoreChunk() | protocol.ReadChunk() | protocol.ReleaseBody():
            return [(request.partition, request)]
        case protocol.ListScheduled() if request.destination is not None:
            return [(_of_text(request.destination, count), request)]
        case protocol.CancelScheduled() if request.number:
            return [(request.number % count, request)]
        case protocol.ListQueues() | protocol.ListScheduled() | protocol.CancelScheduled():
            return [(partition, request) for partition in range(count)]
    return [(partitions.HOME, request)]


def _of_text(destination: str, count: int) -> int:
    return partitions.of_destination(destinations.Destination.parse(destination), count)


def split_keys(by_key: Mapping[str, list[int]], count: int) -> dict[int, dict[str, list[int]]]:
    """Messages by backlog, by partition."""
    parts: dict[int, dict[str, list[int]]] = {}
    for key, numbers in by_key.items():
        parts.setdefault(partitions.of_key(key, count), {})[key] = numbers
    return parts


def split_sends(sends: Sequence[protocol.SendMessage], count: int) -> dict[int, list[protocol.SendMessage]]:
    parts: dict[int, list[protocol.SendMessage]] = {}
    for send in sends:
        parts.setdefault(_of_text(send.destination, count), []).append(send)
    return parts


def merge(
    request: protocol.DispatcherRequest, replies: Sequence[protocol.DispatcherReply]
) -> protocol.DispatcherReply:
    """The replies of several partitions as one."""
    if len(replies) == 1:
        return replies[0]
    merged = protocol.DispatcherReply(
        count=sum(reply.count for reply in replies),
        queues=sorted((row for reply in replies for row in reply.queues), key=lambda row: row.queue),
        partitions=len(replies),
    )
    if isinstance(request, protocol.ListScheduled):
        rows = sorted(
            (row for reply in replies for row in reply.scheduled),
            key=lambda row: (row.delivery_time_ms, row.number),
        )
        merged.scheduled = rows[: request.limit]
    return merged
