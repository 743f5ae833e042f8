"""Converts replies of services to JSON values. Pure."""

from __future__ import annotations

import base64
import datetime
import math
from typing import Any

import msgspec

from muster.core import errors
from muster.inform import protocol as inform_protocol
from muster.inform import service_entries
from muster.message import destinations
from muster.message import messages as jms
from muster.message import protocol as message_protocol


def decode_value(value: bytes) -> dict[str, str]:
    """Bytes as JSON: text if valid UTF-8, else base64."""
    try:
        return {"value": value.decode()}
    except UnicodeDecodeError:
        return {"value_base64": base64.b64encode(value).decode()}


def context_row(context: inform_protocol.Context) -> dict[str, Any]:
    return {
        "key": context.key,
        **decode_value(context.value),
        "attributes": dict(context.attributes),
        "version": context.version,
        "stamp": context.stamp,
        "writer": context.writer,
        "source": context.source,
        "replica_kind": context.replica_kind,
        "age_s": round(context.age_s, 6),
        "expires_at_ms": context.expires_at_ns // 1_000_000 or None,
    }


def entry_row(entry: service_entries.ServiceEntry) -> dict[str, Any]:
    row = msgspec.structs.asdict(entry)
    row.pop("description")
    return {
        **row,
        **{f"description{k.removeprefix('value')}": v for k, v in decode_value(entry.description).items()},
    }


def message_row(delivery: message_protocol.MessageDelivery, queue: str) -> dict[str, Any]:
    meta, place = jms.decode_meta(delivery.meta), destinations.queue(queue)
    try:
        message = jms.message_from_meta(meta, delivery.data, place)
    except errors.MusterError:  # an unreadable message must not hide the others
        message = jms.message_from_meta(jms.unreadable(meta), delivery.data, place)
    body = message.body()
    return {
        "sequence": delivery.sequence,
        "id": message.message_id,
        "type": type(message).__name__,
        "priority": message.priority,
        "timestamp_ms": message.timestamp_ms,
        "expiration_ms": message.expiration_ms,
        "redelivered": message.redelivered,
        "properties": {name: to_json(value) for name, value in message.properties.items()},
        "body": to_json(body),
    }


def to_json(value: Any) -> Any:
    """Convert a value to JSON types."""
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case datetime.datetime():
            return value.isoformat(timespec="milliseconds")
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(name): to_json(item) for name, item in value.items()}
        case list() | tuple():
            return [to_json(item) for item in value]
        case None | str() | bool() | int():
            return value
    return str(value)
