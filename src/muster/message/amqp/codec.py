"""AMQP messages into ours and back, as Qpid JMS maps them.

The message class and the kinds of destinations stand in annotations; where a client does not say them, the
body and the link decide.  AMQP types and Java types are the same here, so properties keep theirs both ways.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Final

import proton

from muster.message import destinations, faults, messages, values

_DESTINATION: Final = "x-opt-jms-dest"
_REPLY: Final = "x-opt-jms-reply-to"
_TYPE: Final = "x-opt-jms-msg-type"
_DUE: Final = "x-opt-delivery-time"
_JAVA: Final = "application/x-java-serialized-object"

_KINDS: Final = (
    destinations.Kind.QUEUE,
    destinations.Kind.TOPIC,
    destinations.Kind.TEMPORARY_QUEUE,
    destinations.Kind.TEMPORARY_TOPIC,
)
_TYPES: Final = ("n", "o", "m", "b", "s", "t")

_TO_KIND: Final[dict[type, values.Kind]] = {
    bool: values.Kind.BOOLEAN,
    proton.byte: values.Kind.BYTE,
    proton.ubyte: values.Kind.SHORT,
    proton.short: values.Kind.SHORT,
    proton.ushort: values.Kind.INT,
    proton.int32: values.Kind.INT,
    proton.uint: values.Kind.LONG,
    proton.ulong: values.Kind.LONG,
    proton.timestamp: values.Kind.LONG,
    int: values.Kind.LONG,
    proton.float32: values.Kind.FLOAT,
    float: values.Kind.DOUBLE,
    str: values.Kind.STRING,
    proton.symbol: values.Kind.STRING,
    proton.char: values.Kind.CHAR,
    bytes: values.Kind.BYTES,
    memoryview: values.Kind.BYTES,
}
_FROM_KIND: Final[dict[values.Kind, Callable[[Any], Any]]] = {
    values.Kind.BYTE: proton.byte,
    values.Kind.SHORT: proton.short,
    values.Kind.INT: proton.int32,
    values.Kind.FLOAT: proton.float32,
    values.Kind.CHAR: proton.char,
}
_PLAIN: Final[dict[values.Kind, Callable[[Any], values.Value]]] = {
    values.Kind.BOOLEAN: bool,
    values.Kind.FLOAT: float,
    values.Kind.DOUBLE: float,
    values.Kind.STRING: str,
    values.Kind.CHAR: str,
    values.Kind.BYTES: bytes,
}


def typed(value: Any) -> values.Typed:
    """A value of AMQP with its Java type."""
    if value is None:
        return values.Typed(values.Kind.STRING, None)
    if isinstance(value, uuid.UUID):
        return values.Typed(values.Kind.STRING, str(value))
    kind = _TO_KIND.get(type(value))
    if kind is None:
        raise faults.FormatError(f"an AMQP {type(value).__name__} cannot be a value of a message")
    return values.Typed(kind, _PLAIN.get(kind, int)(value))


def untyped(item: values.Typed) -> Any:
    convert = _FROM_KIND.get(item.kind)
    return item.value if convert is None or item.value is None else convert(item.value)


def _identifier(value: Any) -> str | None:
    """Message and correlation ids as JMS writes those that are no strings."""
    match value:
        case None | str():
            return value
        case uuid.UUID():
            return f"ID:AMQP_UUID:{value}"
        case bytes() | memoryview():
            return f"ID:AMQP_BINARY:{bytes(value).hex().upper()}"
        case _:
            return f"ID:AMQP_ULONG:{int(value)}"


def _from_identifier(text: str | None) -> Any:
    if text is None:
        return None
    try:
        if text.startswith("ID:AMQP_UUID:"):
            return uuid.UUID(text.removeprefix("ID:AMQP_UUID:"))
        if text.startswith("ID:AMQP_BINARY:"):
            return bytes.fromhex(text.removeprefix("ID:AMQP_BINARY:"))
        if text.startswith("ID:AMQP_ULONG:"):
            return proton.ulong(int(text.removeprefix("ID:AMQP_ULONG:")))
    except ValueError:
        return text
    return text


def address(text: str, capabilities: frozenset[str] = frozenset()) -> destinations.Destination:
    """A terminus as a destination. Without a word about its kind it is a queue."""
    for kind in reversed(_KINDS):
        if kind.value in capabilities:
            return destinations.Destination(kind, text)
    head, mark, name = text.partition("://")
    if mark and head in ("queue", "topic"):
        return destinations.Destination(destinations.Kind(head), name)
    if text.startswith(("queue:", "topic:", "temporary-queue:", "temporary-topic:")):
        return destinations.Destination.parse(text)
    return destinations.queue(text)


def _annotated(text: str, kind: Any) -> destinations.Destination:
    if kind is None:
        return address(text)
    return destinations.Destination(_KINDS[int(kind) if 0 <= int(kind) < len(_KINDS) else 0], text)


def decode(
    data: bytes, destination: destinations.Destination | None, now_ms: int
) -> tuple[messages.Message, destinations.Destination]:
    """The message, and where it goes: ``destination`` of its link, or what it says itself."""
    given = proton.Message()
    try:
        given.decode(data)
    except (proton.ProtonException, UnicodeDecodeError) as error:
        raise faults.FormatError(f"no AMQP message: {error}") from error
    annotations = {str(name): value for name, value in (given.annotations or {}).items()}
    if destination is None:
        if not given.address:
            raise faults.InvalidDestination("the message says no address, and its link has none")
        destination = _annotated(given.address, annotations.get(_DESTINATION))
    message = _body(given, annotations)
    message.destination = destination
    message.message_id = _identifier(given.id)
    message.correlation_id = _identifier(given.correlation_id)
    message.type = given.subject
    message.persistent = bool(given.durable)
    message.priority = min(int(given.priority), 9)
    message.timestamp_ms = round(given.creation_time * 1000)
    message.expiration_ms = round(given.expiry_time * 1000)
    if not message.expiration_ms and given.ttl:
        message.expiration_ms = now_ms + round(given.ttl * 1000)
    if due := annotations.get(_DUE):
        message.delivery_time_ms = int(due)
    if given.reply_to:
        message.reply_to = _annotated(given.reply_to, annotations.get(_REPLY))
    message.properties.typed = {str(name): typed(value) for name, value in (given.properties or {}).items()}
    if given.group_id:
        message.properties.typed["JMSXGroupID"] = values.Typed(values.Kind.STRING, given.group_id)
        message.properties.typed["JMSXGroupSeq"] = values.Typed(values.Kind.INT, int(given.group_sequence))
    if given.user_id:
        name = bytes(given.user_id).decode("utf-8", "replace")
        message.properties.typed["JMSXUserID"] = values.Typed(values.Kind.STRING, name)
    return message, destination


def _body(given: proton.Message, annotations: dict[str, Any]) -> messages.Message:
    body = given.body
    said = annotations.get(_TYPE)
    kind = _TYPES[int(said)] if said is not None and 0 <= int(said) < len(_TYPES) else _guess(given)
    match kind:
        case "t":
            if isinstance(body, bytes | memoryview):
                return messages.TextMessage(bytes(body).decode("utf-8", "replace"))
            return messages.TextMessage(None if body is None else str(body))
        case "b":
            return messages.BytesMessage(bytes(body) if body is not None else b"")
        case "m":
            found = messages.MapMessage()
            found.items.typed = {str(name): typed(value) for name, value in (body or {}).items()}
            return found
        case "s":
            stream = messages.StreamMessage()
            stream.items = [typed(value) for value in (body or [])]
            return stream
        case "o":
            if isinstance(body, bytes | memoryview):
                made = messages.ObjectMessage()
                made.serialized = bytes(body)
                made.content_type = str(given.content_type or "") or _JAVA
                return made
            return messages.ObjectMessage(_json(body))
        case _:
            return messages.Message()


def _guess(given: proton.Message) -> str:
    match given.body:
        case bytes() | memoryview():
            return "t" if str(given.content_type or "").startswith("text/") else "b"
        case str() | None:
            return "t"
        case dict():
            return "m"
        case list():
            return "s"
        case _:
            return "o"


def _json(value: Any) -> Any:
    match value:
        case dict():
            return {str(name): _json(one) for name, one in value.items()}
        case list() | tuple():
            return [_json(one) for one in value]
        case None:
            return None
        case _:
            found = typed(value).value
            return found.hex() if isinstance(found, bytes) else found


def encode(message: messages.Message, deliveries: int) -> bytes:
    """``deliveries``: how often it was delivered before."""
    made = proton.Message()
    made.id = _from_identifier(message.message_id)
    made.correlation_id = _from_identifier(message.correlation_id)
    made.durable = message.persistent
    made.priority = message.priority
    made.delivery_count = deliveries
    if message.type is not None:
        made.subject = message.type
    if message.timestamp_ms:
        made.creation_time = message.timestamp_ms / 1000
    if message.expiration_ms:
        made.expiry_time = message.expiration_ms / 1000
    # A byte, not an int: the Java client casts.
    annotations: dict[Any, Any] = {proton.symbol(_TYPE): proton.byte(_TYPES.index(message.kind))}
    if message.destination is not None:
        made.address = message.destination.name
        annotations[proton.symbol(_DESTINATION)] = proton.byte(_KINDS.index(message.destination.kind))
    if message.reply_to is not None:
        made.reply_to = message.reply_to.name
        annotations[proton.symbol(_REPLY)] = proton.byte(_KINDS.index(message.reply_to.kind))
    if message.delivery_time_ms:
        annotations[proton.symbol(_DUE)] = message.delivery_time_ms
    made.annotations = annotations
    properties = {}
    for name, item in message.properties.typed.items():
        match name:
            case "JMSXGroupID":
                made.group_id = str(item.value)
            case "JMSXGroupSeq":
                made.group_sequence = int(item.value or 0)
            case "JMSXUserID":
                made.user_id = str(item.value).encode()
            case _:
                properties[name] = untyped(item)
    made.properties = properties or None
    match message:
        case messages.TextMessage():
            made.body = message.text
        case messages.BytesMessage():
            made.inferred, made.body = True, message.data
        case messages.MapMessage():
            made.body = {name: untyped(item) for name, item in message.items.typed.items()}
        case messages.StreamMessage():
            made.inferred, made.body = True, [untyped(item) for item in message.items]
        case messages.ObjectMessage():
            if message.serialized is not None:
                made.inferred, made.body = True, message.serialized
                made.content_type = proton.symbol(message.content_type)
            else:
                made.body = message.value
    encoded: bytes = made.encode()
    return encoded
