"""Converts AMQP messages to stored messages and back, with the mapping of Qpid JMS.

Annotations contain the message type and the kinds of destinations; without them, the body and the link
decide. AMQP types correspond to Java types, so properties keep their types in both directions.

An AMQP message is stored as it was sent, and another AMQP client receives exactly the same sections; only its
header changes, and delivery annotations end here. Headers and properties are also in the `MessageMeta`, for
selectors and for readers of other protocols, who get a translation of the body (`bodies`).
"""

from __future__ import annotations

import base64
import binascii
import uuid
from typing import Any, Final

import msgspec

from muster.message import codec, destinations, errors, messages, values
from muster.message.amqp_format import amqp_types, fast_path, repeated_sections, sections
from muster.message.amqp_format import bodies as bodies_

_JAVA: Final = "application/x-java-serialized-object"
# Forms of a stored message: the first character of `messages.MessageMeta.amqp`. Sections follow in base64.
DATA: Final = "b"  # the sections before the body; the payload is the content of the one data section
TEXT: Final = "t"  # the sections before the body; the payload is the text of the one value section
SECTIONS: Final = "x"  # the sections before the body; the payload is the other sections, as they were sent
WHOLE: Final = "w"  # all sections; the payload is a translation for clients without AMQP
_DOUBLED_BYTES_MAX: Final = (
    700 << 10
)  # of a translation and all sections, which have to fit into a bus message
_HEADER: Final = b"\x00\x53\x70"


def address(text: str, capabilities: frozenset[str] = frozenset()) -> destinations.Destination:
    """The destination of a terminus. Without an indication of its kind it is a queue."""
    for kind in reversed(sections.KINDS):
        if kind.value in capabilities:
            return destinations.Destination(kind, text)
    head, mark, name = text.partition("://")
    if mark and head in ("queue", "topic"):
        return destinations.Destination(destinations.DestinationKind(head), name)
    if text.startswith(("queue:", "topic:", "temporary-queue:", "temporary-topic:")):
        return destinations.Destination.parse(text)
    if text.startswith(destinations.TEMPORARY_TOPIC):
        return destinations.Destination(destinations.DestinationKind.TEMPORARY_TOPIC, text)
    return destinations.queue(text)


def _annotated(text: str, kind: int | None) -> destinations.Destination | None:
    """The destination of an address in a message; None if the address is not one of ours."""
    try:
        if kind is None:
            return address(text)
        return destinations.Destination(sections.KINDS[kind if 0 <= kind < len(sections.KINDS) else 0], text)
    except errors.InvalidDestination:
        return None


# -- decoding ----------------------------------------------------------------------------------------------


def decode_foreign_meta(raw: str, data: bytes, now_ms: int) -> messages.MessageMeta:
    """Decode a foreign header (`fast_path`) completely."""
    try:
        meta, _, _ = decode(fast_path.unwrap(raw, data), None, now_ms)
        meta.origin = fast_path.origin_of(raw)
    except amqp_types.MALFORMED as error:
        raise errors.FormatError(f"the header {messages.HEADER} is malformed: {error}") from error
    return meta


def decode(
    data: bytes, destination: destinations.Destination | None, now_ms: int
) -> tuple[messages.MessageMeta, bytes, destinations.Destination | None]:
    """The meta, the payload and the destination of an AMQP message: ``destination``, or the message's own
    address. Raises `FormatError` if it is not an AMQP message.
    """
    try:
        return _decode(data, destination, now_ms)
    except amqp_types.MALFORMED as error:
        raise errors.FormatError(f"not an AMQP message: {error}") from error


def _decode(
    data: bytes, destination: destinations.Destination | None, now_ms: int
) -> tuple[messages.MessageMeta, bytes, destinations.Destination | None]:
    located = amqp_types.split(data)
    body_at = next((at for code, at, _, _ in located if code >= amqp_types.DATA), len(data))
    head = b"".join(
        data[at:end]
        for code, at, _, end in located
        if code < amqp_types.DATA and code != amqp_types.DELIVERY_ANNOTATIONS
    )
    bodies = [
        (code, data[value], amqp_types.read(data, value)[0])
        for code, _, value, _ in located
        if code >= amqp_types.DATA
    ]
    for code, _, body in bodies:
        _check_section(code, body)
    meta, to, hints = _describe(data, located, destination, now_ms)
    if len(bodies) == 1 and (simple := _simple_payload(*bodies[0], *hints)) is not None:
        meta.kind, form, payload = simple
        meta.content_type = hints[1] or _JAVA if meta.kind == "o" else None
        meta.amqp = form + _base64(head)
        return meta, payload, to
    payload = data[body_at:]
    if to is not None and not to.is_queue and payload:
        translated = bodies_.translate(payload, *hints)
        if bodies_.ENCODED not in translated.properties:
            described, plain = translated.meta()
            if len(plain) + len(data) * 4 // 3 <= _DOUBLED_BYTES_MAX:
                meta.kind, meta.body, meta.null = described.kind, described.body, described.null
                meta.content_type = described.content_type
                meta.amqp = WHOLE + _base64(head + payload)
                return meta, plain, to
    meta.kind = messages.AMQP_SECTIONS
    meta.amqp = SECTIONS + _base64(head)
    return meta, payload, to


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _check_section(code: int, body: Any) -> None:
    if code == amqp_types.DATA and not isinstance(_plain(body), bytes):
        raise ValueError("a data section contains something else than binary data")
    if code == amqp_types.SEQUENCE and not isinstance(body, list):
        raise ValueError("a sequence section contains something else than a list")


def _plain(item: Any) -> Any:
    return item.value if isinstance(item, values.TypedValue) else item


def _simple_payload(
    code: int, value_type: int, body: Any, type_code: int | None, content_type: str
) -> tuple[str, str, bytes] | None:
    """Message type, form and payload of a message whose body is one section of data or text; None if its type
    requires another body.
    """
    plain = _plain(body)
    message_type = bodies_.message_type(type_code, plain, content_type)
    if code == amqp_types.DATA and message_type in "tbo":
        return (message_type if _is_readable(message_type, plain, content_type) else "b"), DATA, plain
    if code == amqp_types.VALUE and value_type in (0xA1, 0xB1) and message_type == "t":
        return message_type, TEXT, str(plain).encode()
    return None


def _is_readable(message_type: str, data: bytes, content_type: str) -> bool:
    try:
        if message_type == "t":
            data.decode()
        elif message_type == "o" and content_type == messages.JSON:
            msgspec.json.decode(data)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return False
    return True


def translate(amqp: str, data: bytes) -> messages.JmsMessage:
    """The message, without headers, of a payload of AMQP sections."""
    try:
        head = base64.b64decode(amqp[1:])
        _, _, hints = _describe(head, amqp_types.split(head), None, 0)
    except amqp_types.MALFORMED as error:
        raise errors.FormatError(f"not an AMQP message: {error}") from error
    return bodies_.translate(data, *hints)


def _describe(
    data: bytes,
    located: list[tuple[int, int, int, int]],
    destination: destinations.Destination | None,
    now_ms: int,
) -> tuple[messages.MessageMeta, destinations.Destination | None, tuple[int | None, str]]:
    """The headers and properties in the sections before the body; the destination; and what these sections
    state about the body: the annotation of the message type and the content type. ``located``: see
    `amqp_types.split`.
    """
    header, annotations = repeated_sections.NO_HEADER, repeated_sections.NO_ANNOTATIONS
    fields: list[Any] = []
    application: dict[str, Any] = {}
    for code, _, value, end in located:
        if code == amqp_types.HEADER:
            header = repeated_sections.header_fields(data[value:end])
        elif code == amqp_types.ANNOTATIONS:
            annotations = repeated_sections.jms_annotations(data[value:end])
        elif code == amqp_types.PROPERTIES:
            fields = amqp_types.plain_fields(data, value)
        elif code == amqp_types.APPLICATION:
            application = amqp_types.entries(data, value)
    id, user, to, type_, reply_to, correlation, content_type, _, expiry, created, group, group_sequence = (
        fields + _NO_FIELDS[len(fields) :]
    )[:12]
    if destination is None and isinstance(to, str):
        destination = _annotated(to, annotations.destination)
    meta = messages.MessageMeta(
        message_id=_identifier(id),
        timestamp_ms=_number(created),
        destination=str(destination) if destination else None,
        correlation_id=_identifier(correlation),
        type=type_ if isinstance(type_, str) else None,
        expiration_ms=_number(expiry),
        delivery_time_ms=annotations.delivery_time_ms or 0,
        priority=4 if header.priority is None else min(int(header.priority), 9),
        persistent=header.persistent,
    )
    if not meta.expiration_ms and header.ttl_ms:
        meta.expiration_ms = now_ms + int(header.ttl_ms)
    if isinstance(reply_to, str) and (reply := _annotated(reply_to, annotations.reply_to)) is not None:
        meta.reply_to = str(reply)
    typed = bodies_.properties(application) if application else {}
    if isinstance(group, str):
        typed["JMSXGroupID"] = values.TypedValue(values.JavaType.STRING, group)
        typed["JMSXGroupSeq"] = values.TypedValue(values.JavaType.INT, _int32(_number(group_sequence)))
    if isinstance(user, bytes):
        typed["JMSXUserID"] = values.TypedValue(values.JavaType.STRING, user.decode("utf-8", "replace"))
    if typed:
        meta.properties, meta.kinds = messages.plain_values(typed.items())
    return meta, destination, (annotations.type, content_type if isinstance(content_type, str) else "")


_NO_FIELDS: Final[list[Any]] = [None] * 12


def _number(field: Any) -> int:
    return 0 if isinstance(field, uuid.UUID) else int(field or 0)


def _int32(value: int) -> int:
    """Group sequence numbers are unsigned in AMQP and signed in JMS."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _identifier(value: Any) -> str | None:
    """A message or correlation id that is not a string, in the notation of JMS."""
    match value:
        case str() | None:
            return value
        case uuid.UUID():
            return f"ID:AMQP_UUID:{value}"
        case bytes():
            return f"ID:AMQP_BINARY:{value.hex().upper()}"
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


def _ubyte(priority: Any) -> int:
    """A priority, which may have been sent as a number of another type."""
    return min(max(int(priority), 0), 255)


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
    priority = min(max(meta.priority, 0), 9)
    if not meta.amqp:
        header = _header(meta.persistent, priority, deliveries, left_ms)
        return header + _sections(codec.message_from_meta(meta, data))
    form, stored = meta.amqp[0], base64.b64decode(meta.amqp[1:])
    if stored[:3] == _HEADER:
        end = amqp_types.skip(stored, 3)
        sent = repeated_sections.header_fields(stored[3:end])
        priority = priority if sent.priority is None else _ubyte(sent.priority)
        left_ms = left_ms if sent.ttl_ms else 0
        stored = stored[end:]
    else:
        left_ms = 0  # the sender set the time of expiry only
    header = _header(meta.persistent, priority, deliveries, left_ms)
    if form == WHOLE:
        return header + stored
    return header + stored + (data if form == SECTIONS else fast_path.body_section(form, data))


class LargeMessage(bytes):
    """The beginning of an encoded message; the rest of it is the chunks of its body. It is empty if the body
    has to be translated for AMQP.
    """

    meta: messages.MessageMeta
    deliveries: int

    @classmethod
    def of(cls, beginning: bytes, meta: messages.MessageMeta, deliveries: int) -> LargeMessage:
        made = cls(beginning)
        made.meta, made.deliveries = meta, deliveries
        return made


def encode_large(meta: messages.MessageMeta, deliveries: int, now_ms: int) -> LargeMessage:
    """The beginning of a message with a large body."""
    assert meta.large is not None
    if meta.amqp and meta.amqp[0] == SECTIONS:
        return LargeMessage.of(encode(meta, b"", deliveries, now_ms), meta, deliveries)
    section = {"b": amqp_types.DATA, "t": amqp_types.VALUE, "o": amqp_types.DATA}.get(meta.kind)
    if section is None or meta.amqp or (meta.kind == "o" and meta.content_type in (None, messages.JSON)):
        return LargeMessage.of(b"", meta, deliveries)
    without_body = encode(msgspec.structs.replace(meta, large=None), b"", deliveries, now_ms)
    *_, (_, at, _, _) = amqp_types.split(without_body)
    size = meta.large.size.to_bytes(4, "big")
    beginning = without_body[:at] + bytes((0, 0x53, section, 0xB1 if meta.kind == "t" else 0xB0)) + size
    return LargeMessage.of(beginning, meta, deliveries)


def decode_large(
    data: bytes, destination: destinations.Destination | None, now_ms: int
) -> tuple[messages.MessageMeta, int, destinations.Destination | None]:
    """The meta of a message of which ``data`` is the beginning, the start of its body sections there, and its
    destination. Raises `FormatError` if the sections before the body are not complete.
    """
    try:
        head, at = b"", 0
        while (code := _section_code(data, at)) < amqp_types.DATA:
            end = amqp_types.skip(data, at)
            if end > len(data):
                raise ValueError("the sections before the body are too large")
            if code != amqp_types.DELIVERY_ANNOTATIONS:
                head += data[at:end]
            at = end
        meta, destination, _ = _describe(head, amqp_types.split(head), destination, now_ms)
    except amqp_types.MALFORMED as error:
        raise errors.FormatError(f"not an AMQP message: {error}") from error
    meta.kind = messages.AMQP_SECTIONS
    meta.amqp = SECTIONS + _base64(head)
    return meta, at, destination


def _section_code(data: bytes, at: int) -> int:
    if data[at] == 0 and data[at + 1] == 0x53:
        return data[at + 2]
    if data[at] == 0 and data[at + 1] == 0x80:
        return int.from_bytes(data[at + 2 : at + 10], "big")
    raise ValueError("a section has no numeric descriptor")


def redelivered(data: bytes) -> bytes:
    """An AMQP message with its delivery count increased by one."""
    persistent, priority, ttl_ms, count, at = False, 4, 0, 0, 0
    if data[:3] == _HEADER:
        fields = amqp_types.plain_fields(data, 3)
        durable, level, ttl, _, deliveries = (fields + _NO_FIELDS)[:5]
        persistent, ttl_ms, count = bool(durable), _number(ttl), _number(deliveries)
        priority = 4 if level is None else _ubyte(level)
        at = amqp_types.skip(data, 0)
    changed = _header(persistent, priority, count + 1, ttl_ms) + data[at:]
    if isinstance(data, LargeMessage):
        return LargeMessage.of(changed if data else b"", data.meta, data.deliveries + 1)
    return changed


def _sections(message: messages.JmsMessage) -> bytes:
    # A byte, not an int: the Java client casts it.
    annotations = {repeated_sections.TYPE: bytes((0x51, bodies_.TYPES.index(message.kind)))}
    fields = [b"\x40"] * 12
    if message.message_id is not None:
        fields[0] = _from_identifier(message.message_id)
    if message.destination is not None:
        fields[2] = amqp_types.text(message.destination.name)
        annotations[sections.DESTINATION] = bytes((0x51, sections.KINDS.index(message.destination.kind)))
    if message.type is not None:
        fields[3] = amqp_types.text(message.type)
    if message.reply_to is not None:
        fields[4] = amqp_types.text(message.reply_to.name)
        annotations[repeated_sections.REPLY] = bytes((0x51, sections.KINDS.index(message.reply_to.kind)))
    if message.correlation_id is not None:
        fields[5] = _from_identifier(message.correlation_id)
    if isinstance(message, messages.ObjectMessage) and message.serialized is not None:
        fields[6] = amqp_types.text(message.content_type, symbol=True)
    if message.expiration_ms:
        fields[8] = amqp_types.timestamp(message.expiration_ms)
    if message.timestamp_ms:
        fields[9] = amqp_types.timestamp(message.timestamp_ms)
    if message.delivery_time_ms:
        annotations[repeated_sections.DUE] = b"\x81" + message.delivery_time_ms.to_bytes(
            8, "big", signed=True
        )
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
            return fast_path.body_section("t", (message.text or "").encode())
        case messages.BytesMessage():
            return fast_path.body_section("b", message.data)
        case messages.MapMessage():
            return amqp_types.section(amqp_types.VALUE, amqp_types.encode_value(message.items.typed))
        case messages.StreamMessage():
            return amqp_types.section(amqp_types.SEQUENCE, amqp_types.encode_value(message.items))
        case messages.ObjectMessage() if message.serialized is not None:
            return fast_path.body_section("b", message.serialized)
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
