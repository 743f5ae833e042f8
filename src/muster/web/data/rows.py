"""What services answer, as JSON can say it. Pure."""

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
    """Bytes as JSON can say them: text where it is text."""
    try:
        return {"value": value.decode()}
    except UnicodeDecodeError:
        return {"value_base64": base64.b64encode(value).decode()}


def context_row(one: inform_protocol.Context) -> dict[str, Any]:
    return {
        "key": one.key,
        **decode_value(one.value),
        "attributes": dict(one.attributes),
        "version": one.version,
        "stamp": one.stamp,
        "writer": one.writer,
        "source": one.source,
        "copy": one.copy,
        "age_s": round(one.age_s, 6),
        "expires_at_ms": one.expires_at_ns // 1_000_000 or None,
    }


def entry_row(one: service_entries.ServiceEntry) -> dict[str, Any]:
    row = msgspec.structs.asdict(one)
    row.pop("description")
    return {
        **row,
        **{f"description{k.removeprefix('value')}": v for k, v in decode_value(one.description).items()},
    }


def message_row(one: message_protocol.MessageDelivery, queue: str) -> dict[str, Any]:
    meta, place = jms.decode_meta(one.meta), destinations.queue(queue)
    try:
        found = jms.message_from_meta(meta, one.data, place)
    except errors.MusterError:  # a message that no reader understands must not hide those beside it
        found = jms.message_from_meta(jms.unreadable(meta), one.data, place)
    body = found.body()
    return {
        "sequence": one.sequence,
        "id": found.message_id,
        "type": type(found).__name__,
        "priority": found.priority,
        "timestamp_ms": found.timestamp_ms,
        "expiration_ms": found.expiration_ms,
        "redelivered": found.redelivered,
        "properties": {name: to_json(value) for name, value in found.properties.items()},
        "body": to_json(body),
    }


def to_json(value: Any) -> Any:
    """As JSON can say it."""
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case datetime.datetime():
            return value.isoformat(timespec="milliseconds")
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(name): to_json(one) for name, one in value.items()}
        case list() | tuple():
            return [to_json(one) for one in value]
        case None | str() | bool() | int():
            return value
    return str(value)
