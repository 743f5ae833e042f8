"""Translates the body of an AMQP message for readers of JMS messages.

AMQP has more types than JMS. A body of JMS types becomes the message type that JMS has for it. Every other
body becomes an object message of JSON values: described values are objects with ``descriptor`` and ``value``;
binary values are in hexadecimal; uuids, symbols, characters and decimals are strings; timestamps are
milliseconds; keys of maps are strings. A body without such a form becomes a bytes message of its encoded
sections, and the property `ENCODED` of the message is true.
"""

from __future__ import annotations

import decimal
import math
import uuid
from typing import Any, Final

import msgspec

from muster.message import errors, messages, values
from muster.message.amqp_format import amqp_types

ENCODED: Final = "JMS_MUSTER_AMQP_SECTIONS"
TYPES: Final = ("n", "o", "m", "b", "s", "t")  # by the annotation of the message type
_JAVA: Final = "application/x-java-serialized-object"
_LONG_MAX: Final = (1 << 63) - 1


def translate(sections: bytes, type_code: int | None, content_type: str) -> messages.JmsMessage:
    """The message of these body sections. ``type_code``: the message type, by its annotation."""
    try:
        bodies = [
            (code, amqp_types.read(sections, value)[0])
            for code, _, value, _ in amqp_types.split(sections)
            if code != amqp_types.FOOTER
        ]
        return _message(bodies, type_code, content_type)
    except (*amqp_types.MALFORMED, errors.FormatError):
        message = messages.BytesMessage(sections)
        message.properties.set(ENCODED, True)
        return message


def message_type(type_code: int | None, body: Any, content_type: str) -> str:
    """The type of a message with this body: as the annotation states, or as Qpid JMS guesses."""
    if type_code is not None and 0 <= type_code < len(TYPES):
        return TYPES[type_code]
    match body:
        case bytes():
            return "t" if content_type.startswith("text/") else "b"
        case str() | None:
            return "t"
        case dict():
            return "m"
        case list():
            return "s"
        case _:
            return "o"


def _message(bodies: list[tuple[int, Any]], type_code: int | None, content_type: str) -> messages.JmsMessage:
    section = bodies[0][0] if bodies else None
    body: Any
    if section == amqp_types.DATA:
        body = values.TypedValue(values.JavaType.BYTES, b"".join(part.value for _, part in bodies))
    elif section == amqp_types.SEQUENCE:
        body = [item for _, part in bodies for item in part]
    else:
        body = bodies[0][1] if bodies else None
    plain = body.value if isinstance(body, values.TypedValue) else body
    if section is None and type_code is None:
        return messages.JmsMessage()
    match message_type(type_code, plain, content_type), plain:
        case "t", None:
            return messages.TextMessage()
        case "t", str() | bytes():
            return messages.TextMessage(plain if isinstance(plain, str) else plain.decode())
        case "b", bytes() | None:
            return messages.BytesMessage(plain or b"")
        case "m", dict() | None:
            if all(map(_is_simple, (plain or {}).items())):
                map_message = messages.MapMessage()
                typed_items = {name: typed(value) for name, value in (plain or {}).items()}
                map_message.items = values.Values.received(typed_items)
                return map_message
        case "s", list() | None:
            if all(_is_simple(("", item)) for item in plain or ()):
                stream = messages.StreamMessage()
                stream.items = [typed(value) for value in plain or ()]
                return stream
        case "o", bytes():
            made = messages.ObjectMessage()
            made.serialized = plain
            made.content_type = content_type or _JAVA
            return made
        case "n", None:
            return messages.JmsMessage()
    return messages.ObjectMessage(_json(body))


def _is_simple(entry: tuple[Any, Any]) -> bool:
    name, value = entry
    return isinstance(name, str) and isinstance(value, values.TypedValue | uuid.UUID | decimal.Decimal)


def typed(value: Any) -> values.TypedValue:
    """The closest value of a JMS type. Raises `FormatError` if there is none."""
    if isinstance(value, values.TypedValue):
        if value.kind is values.JavaType.LONG and int(value.value or 0) > _LONG_MAX:
            return values.TypedValue(values.JavaType.DOUBLE, float(value.value or 0))
        return value
    if isinstance(value, uuid.UUID):
        return values.TypedValue(values.JavaType.STRING, str(value))
    if isinstance(value, decimal.Decimal):
        return values.TypedValue(values.JavaType.DOUBLE, float(value))
    raise errors.FormatError(f"JMS has no type for an AMQP {type(value).__name__}")


def properties(application: dict[str, Any]) -> dict[str, values.TypedValue]:
    """Application properties that have a JMS type; others are for AMQP readers only."""
    typed_properties = {}
    for name, value in application.items():
        try:
            item = typed(value)
        except errors.FormatError:
            continue
        if item.kind is values.JavaType.CHAR:
            item = values.TypedValue(values.JavaType.STRING, item.value)
        if item.kind is not values.JavaType.BYTES:
            typed_properties[name] = item
    return typed_properties


def _json(value: Any) -> Any:
    match value:
        case values.TypedValue(value=plain):
            if isinstance(plain, bytes):
                return plain.hex()
            if isinstance(plain, float) and not math.isfinite(plain):
                return values.read(value, values.JavaType.STRING)
            return plain
        case dict():
            items = {_key(name): _json(item) for name, item in value.items()}
            if len(items) != len(value):
                raise errors.FormatError("keys of different types are equal as strings")
            return items
        case amqp_types.UnhashableMap():
            raise errors.FormatError("a key of a map is a list or map")
        case list():
            return [_json(item) for item in value]
        case amqp_types.DescribedValue():
            descriptor = value.descriptor
            named = descriptor if isinstance(descriptor, str | int) else _json(descriptor)
            return {"descriptor": named, "value": _json(value.value)}
        case None:
            return None
        case _:
            return str(value)


def _key(name: Any) -> str:
    if isinstance(name, str):
        return name
    plain = _json(name)
    if plain is None or isinstance(plain, bool | int | float):
        return msgspec.json.encode(plain).decode()
    return str(plain)
