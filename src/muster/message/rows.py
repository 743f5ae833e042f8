"""Messages as users see them, on the command line, in the REST API and on the dashboard."""

from __future__ import annotations

from typing import Any

import msgspec

from muster.message import messages


class MessageRow(msgspec.Struct, frozen=True, kw_only=True):
    """A message. ``type``: that of JMS. Bytes are shown in base64."""

    id: str | None
    type: str
    destination: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    priority: int
    persistent: bool
    redelivered: bool
    timestamp_ms: int
    expiration_ms: int
    properties: dict[str, Any] = {}
    body: Any = None


class DeadLetterRow(MessageRow, frozen=True, kw_only=True):
    """A message that could not be delivered, with the reason and its former destination."""

    reason: str | None = None
    origin: str | None = msgspec.field(default=None, name="from")


def fields(message: messages.JmsMessage) -> dict[str, Any]:
    """The fields of a `MessageRow`."""
    return {
        "id": message.message_id,
        "type": type(message).__name__,
        "destination": str(message.destination) if message.destination else None,
        "correlation_id": message.correlation_id,
        "reply_to": str(message.reply_to) if message.reply_to else None,
        "priority": message.priority,
        "persistent": message.persistent,
        "redelivered": message.redelivered,
        "timestamp_ms": message.timestamp_ms,
        "expiration_ms": message.expiration_ms,
        "properties": dict(message.properties),
        "body": message.body(),
    }


def message_row(message: messages.JmsMessage) -> MessageRow:
    return MessageRow(**fields(message))


def dead_letter(row: MessageRow) -> DeadLetterRow:
    return DeadLetterRow(
        **msgspec.structs.asdict(row),
        reason=row.properties.get(messages.DEAD_REASON),
        origin=row.properties.get(messages.DEAD_FROM),
    )
