"""Converts AMQP messages to JMS messages and back, with the mapping of Qpid JMS.

Annotations contain the message type and the kinds of destinations; without them, the body and the link
decide. AMQP types correspond to Java types, so properties keep their types in both directions.

Everything that an AMQP client sent besides the body is preserved, so that another AMQP client receives
exactly the same. These sections are transferred unchanged in base64: in ``amqp`` of a `messages.MessageMeta`
or, if no other component needs to read the message (`locate_body`), in place of one (`foreign_header`).
"""

from __future__ import annotations

import base64
import binascii
import uuid
from typing import Any, Final

from muster.message import destinations, errors, messages, values
from muster.message.amqp_format import amqp_types

_DESTINATION: Final = "x-opt-jms-dest"
_REPLY: Final = "x-opt-jms-reply-to"
_TYPE: Final = "x-opt-jms-msg-type"
_DUE: Final = "x-opt-delivery-time"
_JAVA: Final = "application/x-java-serialized-object"
_KINDS: Final = (
    destinations.DestinationKind.QUEUE,
    destinations.DestinationKind.TOPIC,
    destinations.DestinationKind.TEMPORARY_QUEUE,
    destinations.DestinationKind.TEMPORARY_TOPIC,
)
_TYPES: Final = ("n", "o", "m", "b", "s", "t")
_HEADER: Final = b"\x00\x53\x70"


def address(text: str, capabilities: frozenset[str] = frozenset()) -> destinations.Destination:
    """The destination of a terminus. Without an indication of its kind it is a queue."""
    for kind in reversed(_KINDS):
        if kind.value in capabilities:
            return destinations.Destination(kind, text)
    head, mark, name = text.partition("://")
    if mark and head in ("queue", "topic"):
        return destinations.Destination(destinations.DestinationKind(head), name)
    if text.startswith(("queue:", "topic:", "temporary-queue:", "temporary-topic:")):
        return destinations.Destination.parse(text)
    return destinations.queue(text)


def _annotated(text: str, kind: int | None) -> destinations.Destination:
    if kind is None:
        return address(text)
    return destinations.Destination(_KINDS[kind if 0 <= kind < len(_KINDS) else 0], text)


# -- fast path ---------------------------------------------------------------------------------------------

_durable: dict[bytes, bool] = {}  # by header section: few differ


class FastPath:
    """Parses simple messages of a link, most of which begin with the same bytes."""

    __slots__ = ("_lead",)

    def __init__(self) -> None:
        self._lead = b""

    def __call__(self, data: bytes) -> tuple[int, int, str] | None:
        """See `locate_body`."""
        lead = self._lead
        if lead and data.startswith(lead):
            return locate_body(data, len(lead))
        location = locate_body(data)
        if location is not None:
            self._lead = data[: _before_properties(data)]
        return location


def _before_properties(data: bytes) -> int:
    for code, at, _, _ in amqp_types.split(data):
        if code >= amqp_types.PROPERTIES:
            return at
    return 0


def locate_body(data: bytes, at: int = 0) -> tuple[int, int, str] | None:
    """The start of the body's section, the start of the body, and its type (``b`` data, ``t`` text).

    None if the message is durable, delayed or has another structure: it must then be decoded completely.
    ``at``: the section to start from.
    """
    start, size = 0, len(data)
    try:
        while data[at] == 0 and data[at + 1] == 0x53:
            code, kind = data[at + 2], data[at + 3]
            if kind in (0xA0, 0xA1):
                start = at + 5
                end = start + data[at + 4]
            elif kind in (0xB0, 0xB1):
                start = at + 8
                end = start + int.from_bytes(data[at + 4 : start], "big")
            elif kind in (0xC0, 0xC1):
                end = at + 5 + data[at + 4]
            elif kind in (0xD0, 0xD1):
                end = at + 8 + int.from_bytes(data[at + 4 : at + 8], "big")
            elif kind == 0x45:
                end = at + 4
            else:
                return None
            if code == amqp_types.DATA:
                return (at, start, "b") if kind in (0xA0, 0xB0) and end == size else None
            if code == amqp_types.VALUE:
                return (at, start, "t") if kind in (0xA1, 0xB1) and end == size else None
            if code == amqp_types.HEADER:
                header = data[at:end]
                durable = _durable.get(header)
                if durable is None:
                    durable = _is_durable(header)
                if durable:
                    return None
            elif code == amqp_types.ANNOTATIONS:
                if _DUE.encode() in data[at:end]:
                    return None
            elif not amqp_types.HEADER < code <= amqp_types.APPLICATION:
                return None
            at = end
    except IndexError:
        return None
    return None


def _is_durable(header: bytes) -> bool:
    try:
        fields = amqp_types.fields(header, 3)
    except amqp_types.MALFORMED:
        return True  # complete decoding will report the error
    durable = bool(fields and fields[0].value)
    if len(_durable) > 4096:
        _durable.clear()
    _durable[header] = durable
    return durable


def foreign_header(data: bytes, at: int, kind: str, origin: str) -> str:
    """The header of a message whose body section begins at ``at``; ``origin`` is from `origin_token`."""
    return f"{messages.FOREIGN}{kind}{origin}.{binascii.b2a_base64(data[:at], newline=False).decode()}"


def origin_token(origin: str) -> str:
    return base64.b64encode(origin.encode()).decode()


def origin_of(raw: str) -> str:
    return base64.b64decode(raw[2 : raw.index(".")]).decode()


def unwrap(raw: str, data: bytes) -> bytes:
    """The AMQP message of a foreign header and a body."""
    head = binascii.a2b_base64(raw[raw.index(".") + 1 :])
    if len(data) < 256:
        return head + _body_section(raw[1], data)
    return b"".join((head, b"\x00\x53\x75\xb0" if raw[1] == "b" else b"\x00\x53\x77\xb1", _size(data), data))


def _body_section(kind: str, data: bytes) -> bytes:
    small = len(data) < 256
    if kind == "b":
        return (b"\x00\x53\x75\xa0%c" % len(data) if small else b"\x00\x53\x75\xb0" + _size(data)) + data
    return (b"\x00\x53\x77\xa1%c" % len(data) if small else b"\x00\x53\x77\xb1" + _size(data)) + data


def _size(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big")


def decode_foreign_meta(raw: str, data: bytes, now_ms: int) -> messages.MessageMeta:
    """Decode a foreign header completely."""
    try:
        meta, _, _ = decode(unwrap(raw, data), None, now_ms)
        meta.origin = origin_of(raw)
    except amqp_types.MALFORMED as error:
        raise errors.FormatError(f"the header {messages.HEADER} is malformed: {error}") from error
    return meta


# -- decoding ----------------------------------------------------------------------------------------------


def decode(
    data: bytes, destination: destinations.Destination | None, now_ms: int
) -> tuple[messages.MessageMeta, bytes, destinations.Destination | None]:
    """The meta, the body and the destination of an AMQP message: ``destination``, or the message's own
    address.
    """
    try:
        return _decode(data, destination, now_ms)
    except amqp_types.MALFORMED as error:
        raise errors.FormatError(f"not an AMQP message: {error}") from error


def _decode(
    data: bytes, destination: destinations.Destination | None, now_ms: int
) -> tuple[messages.MessageMeta, bytes, destinations.Destination | None]:
    header: list[Any] = []
    annotations: dict[str, Any] = {}
    properties: list[Any] = []
    application: dict[str, Any] = {}
    bodies: list[tuple[int, Any]] = []
    body_at = len(data)
    for code, at, value, _ in amqp_types.split(data):
        match code:
            case amqp_types.HEADER:
                header = amqp_types.fields(data, value)
            case amqp_types.ANNOTATIONS:
                annotations = amqp_types.entries(data, value)
            case amqp_types.PROPERTIES:
                properties = amqp_types.fields(data, value)
            case amqp_types.APPLICATION:
                application = amqp_types.entries(data, value)
            case amqp_types.DATA | amqp_types.SEQUENCE | amqp_types.VALUE:
                body_at = min(body_at, at)
                bodies.append((code, amqp_types.read(data, value)[0]))
            case amqp_types.DELIVERY_ANNOTATIONS | amqp_types.FOOTER:
                pass
            case _:
                raise ValueError(f"unknown section {code:#x}")
    property_fields = _Fields(properties)
    to = property_fields.text(2)
    if destination is None and to is not None:
        destination = _annotated(to, _int(annotations.get(_DESTINATION)))
    message = _message(bodies, _int(annotations.get(_TYPE)), property_fields.text(6) or "")
    message.destination = destination
    head = _Fields(header)
    message.message_id = _identifier(property_fields.at(0))
    message.correlation_id = _identifier(property_fields.at(5))
    message.type = property_fields.text(3)
    message.persistent = bool(head.plain(0))
    priority = head.plain(1)
    message.priority = 4 if priority is None else min(int(priority), 9)
    message.timestamp_ms = int(property_fields.plain(9) or 0)
    message.expiration_ms = int(property_fields.plain(8) or 0)
    if not message.expiration_ms and (ttl_ms := head.plain(2)):
        message.expiration_ms = now_ms + int(ttl_ms)
    message.delivery_time_ms = _int(annotations.get(_DUE)) or 0
    if (reply_to := property_fields.text(4)) is not None:
        message.reply_to = _annotated(reply_to, _int(annotations.get(_REPLY)))
    typed = message.properties.typed = {name: _typed(value) for name, value in application.items()}
    if (group := property_fields.text(10)) is not None:
        typed["JMSXGroupID"] = values.TypedValue(values.JavaType.STRING, group)
        typed["JMSXGroupSeq"] = values.TypedValue(
            values.JavaType.INT, _int32(int(property_fields.plain(11) or 0))
        )
    if isinstance(user := property_fields.plain(1), bytes):
        typed["JMSXUserID"] = values.TypedValue(values.JavaType.STRING, user.decode("utf-8", "replace"))
    meta, body = message.meta()
    if len(bodies) == 1 and data[body_at + 3] in (0xA0, 0xA1, 0xB0, 0xB1) and meta.kind in "tbo":
        kind = "b" if bodies[0][0] == amqp_types.DATA else "t"
        meta.amqp = kind + base64.b64encode(data[:body_at]).decode()
    return meta, body, destination


class _Fields:
    """The fields of a section; trailing fields may be missing."""

    __slots__ = ("_fields",)

    def __init__(self, fields: list[Any]) -> None:
        self._fields = fields

    def at(self, place: int) -> Any:
        return self._fields[place] if place < len(self._fields) else None

    def plain(self, place: int) -> Any:
        field = self.at(place)
        return field.value if isinstance(field, values.TypedValue) else None

    def text(self, place: int) -> str | None:
        value = self.plain(place)
        return value if isinstance(value, str) else None


def _int(item: Any) -> int | None:
    return item.value if isinstance(item, values.TypedValue) and type(item.value) is int else None


def _int32(value: int) -> int:
    """Group sequence numbers are unsigned in AMQP and signed in JMS."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _typed(value: Any) -> values.TypedValue:
    if isinstance(value, values.TypedValue):
        return value
    if isinstance(value, uuid.UUID):
        return values.TypedValue(values.JavaType.STRING, str(value))
    raise errors.FormatError(f"an AMQP {type(value).__name__} is not a valid value in a message")


def _message(bodies: list[tuple[int, Any]], type_code: int | None, content_type: str) -> messages.JmsMessage:
    kind = bodies[0][0] if bodies else None
    body: Any
    if kind == amqp_types.DATA:
        body = values.TypedValue(values.JavaType.BYTES, b"".join(section.value for _, section in bodies))
    elif kind == amqp_types.SEQUENCE:
        body = [item for _, section in bodies for item in section]
    else:
        body = bodies[0][1] if bodies else None
    plain = body.value if isinstance(body, values.TypedValue) else body
    type_ = (
        _TYPES[type_code]
        if type_code is not None and 0 <= type_code < len(_TYPES)
        else _guess(plain, content_type)
    )
    match type_:
        case "t":
            text = plain.decode("utf-8", "replace") if isinstance(plain, bytes) else plain
            return messages.TextMessage(None if text is None else str(text))
        case "b":
            return messages.BytesMessage(plain if isinstance(plain, bytes) else b"")
        case "m":
            map_message = messages.MapMessage()
            if isinstance(body, dict):
                map_message.items.typed = {name: _typed(value) for name, value in body.items()}
            return map_message
        case "s":
            stream = messages.StreamMessage()
            stream.items = [_typed(value) for value in body] if isinstance(body, list) else []
            return stream
        case "o":
            made = messages.ObjectMessage()
            if isinstance(plain, bytes):
                made.serialized = plain
                made.content_type = content_type or _JAVA
            else:
                made.value = _json(body)
            return made
        case _:
            return messages.JmsMessage()


def _guess(plain: Any, content_type: str) -> str:
    match plain:
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


def _json(value: Any) -> Any:
    match value:
        case dict():
            return {name: _json(item) for name, item in value.items()}
        case list():
            return [_json(item) for item in value]
        case None:
            return None
        case _:
            plain = _typed(value).value
            return plain.hex() if isinstance(plain, bytes) else plain


def _identifier(value: Any) -> str | None:
    """A message or correlation id that is not a string, in the notation of JMS."""
    if isinstance(value, uuid.UUID):
        return f"ID:AMQP_UUID:{value}"
    match value.value if isinstance(value, values.TypedValue) else None:
        case None:
            return None
        case str() as text:
            return text
        case bytes() as data:
            return f"ID:AMQP_BINARY:{data.hex().upper()}"
        case number:
            return f"ID:AMQP_ULONG:{number}"


# -- encoding ----------------------------------------------------------------------------------------------

_headers: dict[tuple[bool, int, int], bytes] = {}


def _header(persistent: bool, priority: int, deliveries: int, ttl_ms: int = 0) -> bytes:
    key = (persistent, priority, deliveries)
    section = _headers.get(key) if not ttl_ms else None
    if section is None:
        fields = [
            b"\x41" if persistent else b"\x42",
            bytes((0x50, priority)),
            amqp_types.uint(ttl_ms) if ttl_ms else b"\x40",
            b"\x41" if not deliveries else b"\x42",
            amqp_types.uint(deliveries),
        ]
        section = amqp_types.section(amqp_types.HEADER, amqp_types.sequence(fields))
        if not ttl_ms and len(_headers) < 4096:
            _headers[key] = section
    return section


def encode(meta: messages.MessageMeta, data: bytes, deliveries: int, now_ms: int) -> bytes:
    """``deliveries``: the number of previous deliveries. Raises `FormatError` if AMQP cannot represent the
    message.
    """
    try:
        return _encode(meta, data, deliveries, now_ms)
    except amqp_types.MALFORMED as error:
        raise errors.FormatError(f"the message cannot be encoded as AMQP: {error}") from error


def _encode(meta: messages.MessageMeta, data: bytes, deliveries: int, now_ms: int) -> bytes:
    left_ms = min(max(meta.expiration_ms - now_ms, 1), 0xFFFFFFFF) if meta.expiration_ms else 0
    header = _header(meta.persistent, min(max(meta.priority, 0), 9), deliveries, left_ms)
    if meta.amqp:
        sections = base64.b64decode(meta.amqp[1:])
        rest = sections[amqp_types.skip(sections, 0) :] if sections[:3] == _HEADER else sections
        return header + rest + _body_section(meta.amqp[0], data)
    return header + _sections(messages.message_from_meta(meta, data))


def redelivered(data: bytes) -> bytes:
    """An AMQP message with its delivery count increased by one."""
    persistent, priority, count, at = False, 4, 0, 0
    if data[:3] == _HEADER:
        head = _Fields(amqp_types.fields(data, 3))
        persistent, count = bool(head.plain(0)), int(head.plain(4) or 0)
        priority = 4 if head.plain(1) is None else min(int(head.plain(1)), 9)
        at = amqp_types.skip(data, 0)
    return _header(persistent, priority, count + 1) + data[at:]


def _sections(message: messages.JmsMessage) -> bytes:
    # A byte, not an int: the Java client casts it.
    annotations = {_TYPE: bytes((0x51, _TYPES.index(message.kind)))}
    fields = [b"\x40"] * 12
    if message.message_id is not None:
        fields[0] = _from_identifier(message.message_id)
    if message.destination is not None:
        fields[2] = amqp_types.text(message.destination.name)
        annotations[_DESTINATION] = bytes((0x51, _KINDS.index(message.destination.kind)))
    if message.type is not None:
        fields[3] = amqp_types.text(message.type)
    if message.reply_to is not None:
        fields[4] = amqp_types.text(message.reply_to.name)
        annotations[_REPLY] = bytes((0x51, _KINDS.index(message.reply_to.kind)))
    if message.correlation_id is not None:
        fields[5] = _from_identifier(message.correlation_id)
    if isinstance(message, messages.ObjectMessage) and message.serialized is not None:
        fields[6] = amqp_types.text(message.content_type, symbol=True)
    if message.expiration_ms:
        fields[8] = amqp_types.timestamp(message.expiration_ms)
    if message.timestamp_ms:
        fields[9] = amqp_types.timestamp(message.timestamp_ms)
    if message.delivery_time_ms:
        annotations[_DUE] = b"\x81" + message.delivery_time_ms.to_bytes(8, "big")
    properties: dict[str, bytes] = {}
    for name, item in message.properties.typed.items():
        match name:
            case "JMSXGroupID":
                fields[10] = amqp_types.text(str(item.value))
            case "JMSXGroupSeq":
                fields[11] = amqp_types.uint(int(item.value or 0) & 0xFFFFFFFF)
            case "JMSXUserID":
                fields[1] = amqp_types.binary(str(item.value).encode())
            case _:
                properties[name] = amqp_types.primitive(item)
    made = amqp_types.section(amqp_types.ANNOTATIONS, amqp_types.mapping(annotations, symbols=True))
    made += amqp_types.section(amqp_types.PROPERTIES, amqp_types.sequence(fields))
    if properties:
        made += amqp_types.section(amqp_types.APPLICATION, amqp_types.mapping(properties))
    return made + _body(message)


def _body(message: messages.JmsMessage) -> bytes:
    match message:
        case messages.TextMessage(text=None):
            return amqp_types.section(amqp_types.VALUE, b"\x40")
        case messages.TextMessage():
            return _body_section("t", (message.text or "").encode())
        case messages.BytesMessage():
            return _body_section("b", message.data)
        case messages.MapMessage():
            return amqp_types.section(amqp_types.VALUE, amqp_types.encode_value(message.items.typed))
        case messages.StreamMessage():
            return amqp_types.section(amqp_types.SEQUENCE, amqp_types.encode_value(message.items))
        case messages.ObjectMessage() if message.serialized is not None:
            return _body_section("b", message.serialized)
        case messages.ObjectMessage():
            return amqp_types.section(amqp_types.VALUE, amqp_types.encode_value(message.value))
        case _:
            return b""


def _from_identifier(text: str) -> bytes:
    try:
        if text.startswith("ID:AMQP_UUID:"):
            return b"\x98" + uuid.UUID(text.removeprefix("ID:AMQP_UUID:")).bytes
        if text.startswith("ID:AMQP_BINARY:"):
            return amqp_types.binary(bytes.fromhex(text.removeprefix("ID:AMQP_BINARY:")))
        if text.startswith("ID:AMQP_ULONG:"):
            return amqp_types.ulong(int(text.removeprefix("ID:AMQP_ULONG:")))
    except (ValueError, OverflowError):
        pass
    return amqp_types.text(text)
