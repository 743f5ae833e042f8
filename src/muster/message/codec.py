"""From what is on the bus to JMS messages: a header and a payload, of any client, become a `JmsMessage`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.core import errors
from muster.message import destinations, messages, values
from muster.message import errors as message_errors


def message_from_meta(
    meta: messages.MessageMeta, data: bytes, destination: destinations.Destination | None = None
) -> messages.JmsMessage:
    """Build a message from its header and payload. Raises a `MusterError` if they are inconsistent."""
    try:
        return _rebuild(meta, data, destination)
    except (ValueError, TypeError, OverflowError) as error:
        raise message_errors.FormatError(
            f"the header {messages.HEADER} does not match the body: {error}"
        ) from error


def unreadable(meta: messages.MessageMeta) -> messages.MessageMeta:
    """A header for a message that `message_from_meta` rejects, so that it can still be inspected: its body is
    bytes.
    """
    return messages.MessageMeta(
        message_id=meta.message_id,
        timestamp_ms=meta.timestamp_ms,
        persistent=meta.persistent,
        properties=meta.properties,
    )


def _rebuild(
    meta: messages.MessageMeta, data: bytes, destination: destinations.Destination | None
) -> messages.JmsMessage:
    message = _read_body(meta, data)
    message.frozen = True
    message.message_id = meta.message_id
    message.timestamp_ms = meta.timestamp_ms
    message.persistent = meta.persistent
    message.origin = meta.origin
    if meta.destination is not None:
        destination = destinations.Destination.parse(meta.destination)
    message.destination = destination
    if meta.priority != messages.DEFAULT_PRIORITY:
        message.priority = meta.priority
    if meta.correlation_id is not None:
        message.correlation_id = meta.correlation_id
    if meta.reply_to is not None:
        message.reply_to = destinations.Destination.parse(meta.reply_to)
    if meta.type is not None:
        message.type = meta.type
    if meta.expiration_ms:
        message.expiration_ms = meta.expiration_ms
    if meta.delivery_time_ms:
        message.delivery_time_ms = meta.delivery_time_ms
    if meta.amqp is not None:
        message.amqp = meta.amqp
    if meta.properties:
        kinds = meta.kinds
        typed = {
            name: messages.typed_value(value, kinds.get(name)) for name, value in meta.properties.items()
        }
        translated = vars(message).get("properties")  # those that describe a translated body
        message.properties = values.Properties.received(
            typed if translated is None else typed | translated.typed
        )
    return message


def _read_body(meta: messages.MessageMeta, data: bytes) -> messages.JmsMessage:
    if meta.large is not None and not data:
        unloaded = messages.JmsMessage.__new__(messages.JmsMessage)
        unloaded.unloaded = meta
        return unloaded
    if meta.kind == messages.AMQP_SECTIONS:
        from muster.message.amqp_format import message_codec  # imports this module

        message = message_codec.translate(meta.amqp or messages.AMQP_SECTIONS, data)
        message.properties.frozen = True
        return message
    kind = messages.TYPES.get(meta.kind)
    if kind is None:
        raise message_errors.FormatError(f"unknown message type {meta.kind!r}")
    message = kind.__new__(kind)
    message.read_body(meta, data)
    return message


def from_plain(data: bytes, headers: Mapping[str, str]) -> messages.MessageMeta:
    """The header of a message that was published by a client without JMS."""
    try:
        data.decode()
        kind = "t"
    except UnicodeDecodeError:
        kind = "b"
    properties: dict[str, Any] = {}
    for name, value in headers.items():
        try:
            values.Properties().check_name(name)
        except errors.InvalidInput:
            continue
        properties[name] = value
    return messages.MessageMeta(kind=kind, properties=properties)


def meta_of(data: bytes, headers: Mapping[str, str]) -> messages.MessageMeta:
    """The header of any message on the bus."""
    raw = headers.get(messages.HEADER)
    return from_plain(data, headers) if raw is None else decode_meta_header(data, raw)


def decode_meta_header(data: bytes, raw: str) -> messages.MessageMeta:
    """Decode the content of the header `HEADER`."""
    if raw.startswith(messages.FOREIGN):
        from muster.message.amqp_format import message_codec  # imports this module

        return message_codec.decode_foreign_meta(raw, data, messages.now_ms())
    return messages.decode_meta(raw)
