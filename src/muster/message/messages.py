"""The five JMS message types, their headers and their encoding.

On the bus, the payload is the body as a client without JMS expects it: the text, the bytes, a JSON object for
a map, a JSON list for a stream. Everything else is in one header, `HEADER`: a `MessageMeta` in JSON or, for a
message from an AMQP client, its AMQP sections. A message without this header came from a plain client: its
text (or bytes) is the body, and its headers are properties.

The payload of a message from an AMQP client whose body has no such form is its AMQP sections, and its type is
`AMQP_SECTIONS`. In queues, that is the case for every body except one section of text or data.

The dispatcher and the selectors read the `MessageMeta` only, never the body.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final, Protocol, TypeAlias

import msgspec

from muster.message import destinations, errors, values

HEADER: Final = "Muster-Message"
FOREIGN: Final = "~"  # first character of a header that contains AMQP sections instead of JSON
DEFAULT_PRIORITY: Final = 4
JSON: Final = "application/json"
AMQP_SECTIONS: Final = (
    "x"  # the type of a message whose payload is AMQP sections, which its readers translate
)
DEAD_REASON: Final = "JMS_MUSTER_DEAD_REASON"  # properties of dead letters
DEAD_FROM: Final = "JMS_MUSTER_DEAD_FROM"
EXPIRED: Final = "expired"  # the reason of an expired message
MAY_BE_LARGE: Final = '"large":'  # part of the header of a message with a large body, rarely of others


_Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class LargeBody(msgspec.Struct, frozen=True, array_like=True):
    """A payload that is stored in chunks, separately from its message (`client.bodies`)."""

    id: str
    size: int
    chunks: list[Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]]
    partition: int = 0  # whose log contains the chunks

    def __post_init__(self) -> None:
        if len(set(self.chunks)) < len(self.chunks):  # a short header would result in a very large body
            raise ValueError("a large body refers to a chunk twice")


class MessageMeta(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):
    """Everything except the body. ``t``: t(ext) b(ytes) m(ap) s(tream) o(bject), n(one), `AMQP_SECTIONS`."""

    kind: str = msgspec.field(default="b", name="t")
    message_id: str | None = msgspec.field(default=None, name="id")
    timestamp_ms: _Int64 = msgspec.field(default=0, name="at")
    destination: str | None = msgspec.field(default=None, name="to")
    correlation_id: str | None = msgspec.field(default=None, name="corr")
    reply_to: str | None = msgspec.field(default=None, name="reply")
    type: str | None = None
    expiration_ms: _Int64 = msgspec.field(default=0, name="exp")
    delivery_time_ms: _Int64 = msgspec.field(default=0, name="due")
    priority: _Int64 = msgspec.field(default=DEFAULT_PRIORITY, name="pri")
    persistent: bool = msgspec.field(default=False, name="keep")
    properties: dict[str, str | _Int64 | float | bool | None] = msgspec.field(
        default_factory=dict, name="props"
    )
    kinds: dict[str, str] = msgspec.field(default_factory=dict)  # types of properties, unless inferred
    body: str | dict[str, str] | None = None  # types of the values of a map or stream
    null: bool = False  # the body is null, not empty
    content_type: str | None = msgspec.field(default=None, name="ct")
    origin: str | None = msgspec.field(default=None, name="by")  # client id or connection
    sequence: int = msgspec.field(default=0, name="seq")  # number in the log, if it was captured
    large: LargeBody | None = None  # where the payload is, if it is not with the message
    amqp: str | None = None  # AMQP sections as they were sent (`amqp_format.message_codec`)

    @property
    def group(self) -> str | None:
        group = self.properties.get("JMSXGroupID")
        return group if isinstance(group, str) else None

    def lookup(self) -> Callable[[str], object]:
        """A function that returns the values a selector may use: properties and some headers."""

        def get(name: str) -> object:
            if name.startswith("JMS") and name in _HEADERS:
                return _HEADERS[name](self)
            value = self.properties.get(name)
            if value.__class__ is str and self.kinds.get(name) in ("f", "d"):
                try:
                    return float(value)
                except ValueError:
                    return None
            return value

        return get


_HEADERS: Final[dict[str, Callable[[MessageMeta], object]]] = {
    "JMSDeliveryMode": lambda meta: "PERSISTENT" if meta.persistent else "NON_PERSISTENT",
    "JMSPriority": lambda meta: meta.priority,
    "JMSMessageID": lambda meta: meta.message_id,
    "JMSTimestamp": lambda meta: meta.timestamp_ms,
    "JMSCorrelationID": lambda meta: meta.correlation_id,
    "JMSType": lambda meta: meta.type,
}


def now_ms() -> int:
    """The wall clock of delivery and expiry."""
    return time.time_ns() // 1_000_000


encode_meta: Final = msgspec.json.Encoder().encode
_decoder: Final = msgspec.json.Decoder(MessageMeta)


def decode_meta(raw: bytes | str) -> MessageMeta:
    """Decode the header. Raises `FormatError` if it is malformed, since any client may have written it."""
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.FormatError(f"the header {HEADER} is malformed: {error}") from error


class Settlement(Protocol):
    """How a listener ends a message: once; a second call has no effect. From any thread."""

    def ack(self) -> None: ...
    def nack(self, reason: str = "") -> None: ...
    def retry(self, after_s: float = 0.0) -> None: ...


class JmsMessage:
    """A message without a body, and the base of all message types.

    The sender sets ``correlation_id``, ``reply_to``, ``type`` and `properties`; sending sets the other
    headers. The body and the properties of a received message are read-only (`NotWriteable`) until
    `clear_body` and `clear_properties` are called.
    """

    kind = "n"
    # Defaults are class attributes: most messages do not set these fields.
    message_id: str | None = None
    timestamp_ms = 0
    destination: destinations.Destination | None = None
    correlation_id: str | None = None
    reply_to: destinations.Destination | None = None
    type: str | None = None
    expiration_ms = 0
    delivery_time_ms = 0
    priority = DEFAULT_PRIORITY
    persistent = True
    redelivered = False
    delivery_count = 0
    origin: str | None = None
    amqp: str | None = None
    unloaded: MessageMeta | None = None  # the header, if the body is stored separately and was not read
    frozen = False  # the body is read-only
    properties: values.Properties
    _acknowledge: Callable[[], Any] | None = None
    _settlement: Settlement | None = None  # while a listener has it

    def __init__(self, *, properties: Mapping[str, values.Value] | None = None) -> None:
        self.properties = values.Properties(properties)

    def __getattr__(self, name: str) -> Any:
        if name != "properties":
            raise AttributeError(f"a {type(self).__name__} has no {name}")
        self.properties = values.Properties.received({})  # received without properties
        return self.properties

    async def acknowledge(self) -> None:
        """In CLIENT mode: acknowledge this message and all that the session received before it."""
        if self._acknowledge is not None:
            await self._acknowledge()

    def ack(self) -> None:
        """In a listener: remove the message now, whatever happens afterwards."""
        self._listener().ack()

    def nack(self, reason: str = "") -> None:
        """In a listener: the message can never be processed. It becomes a dead letter with this reason."""
        self._listener().nack(reason)

    def retry(self, after_s: float = 0.0) -> None:
        """In a listener: the message cannot be processed now. It is delivered again after this delay, which
        counts as a failed delivery.
        """
        self._listener().retry(after_s)

    def _listener(self) -> Settlement:
        if self._settlement is None:
            raise errors.IllegalState("ack, nack and retry are for the messages of a listener")
        return self._settlement

    def body(self) -> Any:
        """The body, as the type of the message says: text, bytes, a mapping, a list or a JSON value."""
        return None

    def clear_body(self) -> None:
        """Empty the body and make it writeable."""
        self.frozen = False

    def clear_properties(self) -> None:
        """Remove all properties and make them writeable."""
        self.properties = values.Properties()

    def _check_writeable(self) -> None:
        if self.frozen:
            raise errors.NotWriteable("a received message is read-only: clear_body first")

    def _write(self, meta: MessageMeta) -> bytes:
        return b""

    def read_body(self, meta: MessageMeta, data: bytes) -> None:
        """Decode the body of a received message."""

    def meta(self) -> tuple[MessageMeta, bytes]:
        """The complete message in its encoded form: header and payload."""
        properties, kinds = plain_values(self.properties.typed.items())
        meta = MessageMeta(
            kind=self.kind,
            message_id=self.message_id,
            timestamp_ms=self.timestamp_ms,
            destination=str(self.destination) if self.destination else None,
            correlation_id=self.correlation_id,
            reply_to=str(self.reply_to) if self.reply_to else None,
            type=self.type,
            expiration_ms=self.expiration_ms,
            delivery_time_ms=self.delivery_time_ms,
            priority=self.priority,
            persistent=self.persistent,
            properties=properties,
            kinds=kinds,
            origin=self.origin,
            amqp=self.amqp,
        )
        return meta, self._write(meta)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.message_id} {self.body()!r:.60}>"


class TextMessage(JmsMessage):
    kind = "t"
    _text: str | None = None

    def __init__(self, text: str | None = None, **headers: Any) -> None:
        super().__init__(**headers)
        self._text = text

    @property
    def text(self) -> str | None:
        return self._text

    @text.setter
    def text(self, text: str | None) -> None:
        self._check_writeable()
        self._text = text

    def body(self) -> str | None:
        return self._text

    def clear_body(self) -> None:
        super().clear_body()
        self._text = None

    def _write(self, meta: MessageMeta) -> bytes:
        meta.null = self._text is None
        return (self._text or "").encode()

    def read_body(self, meta: MessageMeta, data: bytes) -> None:
        self._text = None if meta.null else data.decode()


class BytesMessage(JmsMessage):
    kind = "b"
    _data = b""

    def __init__(self, data: bytes = b"", **headers: Any) -> None:
        super().__init__(**headers)
        self._data = data

    @property
    def data(self) -> bytes:
        return self._data

    @data.setter
    def data(self, data: bytes) -> None:
        self._check_writeable()
        self._data = data

    def body(self) -> bytes:
        return self._data

    def clear_body(self) -> None:
        super().clear_body()
        self._data = b""

    def _write(self, meta: MessageMeta) -> bytes:
        return self._data

    def read_body(self, meta: MessageMeta, data: bytes) -> None:
        self._data = data


class MapMessage(JmsMessage):
    kind = "m"

    def __init__(self, items: Mapping[str, values.Value] | None = None, **headers: Any) -> None:
        super().__init__(**headers)
        self.items = values.Values(items)

    def body(self) -> dict[str, values.Value]:
        return dict(self.items)

    def clear_body(self) -> None:
        super().clear_body()
        self.items = values.Values()

    def _write(self, meta: MessageMeta) -> bytes:
        plain, kinds = plain_values(self.items.typed.items())
        meta.body = kinds or None
        return msgspec.json.encode(plain)

    def read_body(self, meta: MessageMeta, data: bytes) -> None:
        kinds = meta.body if isinstance(meta.body, dict) else {}
        items = _json(data, dict[str, Any])
        self.items = values.Values.received(
            {name: typed_value(value, kinds.get(name)) for name, value in items.items()}
        )


class StreamMessage(JmsMessage):
    """Written value by value; readable after `reset` or when received."""

    kind = "s"

    def __init__(self, items: Iterable[values.Value] = (), **headers: Any) -> None:
        super().__init__(**headers)
        self.items = [values.typed(item) for item in items]
        self._next = 0

    def write(self, value: values.Value, kind: values.JavaType | None = None) -> None:
        self._check_writeable()
        self.items.append(values.typed(value, kind))

    def read(self, kind: values.JavaType) -> values.Value:
        """The next value. A failed read does not advance the position."""
        if not self.frozen:
            raise errors.NotReadable("a stream message can be read after reset()")
        if self._next >= len(self.items):
            raise errors.FormatError("the stream message has no more values")
        value = values.read(self.items[self._next], kind)
        self._next += 1
        return value

    def reset(self) -> None:
        """End writing and start reading from the first value."""
        self._next = 0
        self.frozen = True

    def body(self) -> list[values.Value]:
        return [value for _, value in self.items]

    def clear_body(self) -> None:
        super().clear_body()
        self.items, self._next = [], 0

    def _write(self, meta: MessageMeta) -> bytes:
        meta.body = "".join(kind for kind, _ in self.items) or None
        return msgspec.json.encode([_plain_value(item) for item in self.items])

    def read_body(self, meta: MessageMeta, data: bytes) -> None:
        kinds = meta.body if isinstance(meta.body, str) else ""
        items = _json(data, list[Any])
        self.items = [
            typed_value(value, kinds[at] if at < len(kinds) else None) for at, value in enumerate(items)
        ]
        self._next = 0


class ObjectMessage(JmsMessage):
    """Any JSON value. An object that was serialized in another language remains ``serialized`` bytes."""

    kind = "o"
    _value: Any = None
    serialized: bytes | None = None
    content_type = JSON

    def __init__(self, value: Any = None, **headers: Any) -> None:
        super().__init__(**headers)
        self._value = value

    @property
    def value(self) -> Any:
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._check_writeable()
        self._value = value

    def body(self) -> Any:
        return self._value if self.serialized is None else self.serialized

    def clear_body(self) -> None:
        super().clear_body()
        self._value, self.serialized, self.content_type = None, None, JSON

    def _write(self, meta: MessageMeta) -> bytes:
        meta.content_type = self.content_type
        if self.serialized is not None:
            return self.serialized
        try:
            return msgspec.json.encode(self._value)
        except TypeError as error:
            raise errors.FormatError(f"an object message contains JSON values only: {error}") from error

    def read_body(self, meta: MessageMeta, data: bytes) -> None:
        self.content_type = meta.content_type or JSON
        if self.content_type == JSON:
            self._value = _json(data, Any)
        else:
            self.serialized = data


TYPES: Final[dict[str, type[JmsMessage]]] = {
    kind.kind: kind
    for kind in (JmsMessage, TextMessage, BytesMessage, MapMessage, StreamMessage, ObjectMessage)
}


# -- values in JSON ----------------------------------------------------------------------------------------


def _plain_value(item: values.TypedValue) -> Any:
    value = item.value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return values.read(item, values.JavaType.STRING)
    return value


def plain_values(items: Iterable[tuple[str, values.TypedValue]]) -> tuple[dict[str, Any], dict[str, str]]:
    plain: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for name, item in items:
        value = plain[name] = _plain_value(item)
        if item.kind is not values.infer_type(value):
            kinds[name] = item.kind.value
    return plain, kinds


def typed_value(value: Any, kind: str | None) -> values.TypedValue:
    if kind is None:
        return values.TypedValue(values.infer_type(value), value)
    java_type = values.JavaType(kind)
    if java_type is values.JavaType.BYTES and isinstance(value, str):
        value = base64.b64decode(value)
    elif java_type in (values.JavaType.FLOAT, values.JavaType.DOUBLE):
        value = float(value)
    return values.TypedValue(java_type, value)


def _json(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.FormatError(f"the body is not JSON of the expected type: {error}") from error
