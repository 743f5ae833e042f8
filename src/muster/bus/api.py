"""The interface of the bus.

It has two implementations: the connection to brokers (`muster.bus.client.client`) and the in-memory
simulation (`muster.bus.memory`). One contract suite tests both. Services use these protocols only.

Durable means: when a call of `Stream` or `KeyValue` that writes returns, the data is synced to disk or stored
on a quorum of brokers. A plain `publish` has no such guarantee. A write that ends in `errors.TimedOut` may or
may not have been stored; with a ``message_id`` it can be repeated safely.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import msgspec

from muster.core.telemetry import trace

Headers = Mapping[str, str]

DEFAULT_TIMEOUT_S = 5.0
PAYLOAD_BYTES_MAX = (1 << 20) + (1 << 16)  # of a message, unless the brokers are configured otherwise
DURABLE_TIMEOUT_S = 15.0  # a write waits for the election of a stream's leader, which takes 4 to 9 s


class OverflowPolicy(enum.Enum):
    """What happens when the reader of a subscription is too slow. Every drop is counted."""

    DROP_OLDEST = "drop-oldest"  # the newest matter most: states, reports
    DROP_NEWEST = "drop-newest"  # the oldest matter most: work that has begun
    CLOSE = "close"  # gaps are not acceptable: end the subscription with `errors.Overloaded`


@dataclass(frozen=True, slots=True)
class SubscriptionStatistics:
    delivered: int
    dropped: int
    pending: int
    failed: int  # times the handler raised
    # times the broker had lost it although the connection was alive, and it was subscribed again
    renewed: int


class Message(Protocol):
    @property
    def subject(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> Headers: ...
    @property
    def reply(self) -> str | None: ...
    @property
    def size(self) -> int:
        """Bytes of the data and of the headers."""
        ...

    def header(self, name: str) -> str | None:
        """One header, at a lower cost than `headers`."""
        ...

    @property
    def trace(self) -> trace.TraceContext | None:
        """The trace of the message. A handler runs in it; code that iterates reads it here."""
        ...

    async def respond(self, data: bytes, *, headers: Headers | None = None) -> None:
        """Reply in the requester's reply space (`subjects.reply_prefix`); `errors.InvalidInput` for other
        subjects.

        The requester chooses ``reply``: were any subject allowed, it could make a service publish, with the
        service's own permissions, where the requester may not.
        """
        ...

    def respond_now(self, data: bytes) -> bool:
        """Reply from a plain function, if that is possible without waiting. False: use `respond`."""
        ...


Handler = Callable[[Message], Awaitable[None] | None]
BulkHandler = Callable[[Sequence[bytes], Sequence[bytes]], None]  # subjects and data of some messages


class Subscription(Protocol):
    """Iterate it, or give `Bus.subscribe` a handler; not both.

    A plain function as handler is called while the connection reads (fast; it must not block). The result of
    a coroutine function is awaited, one message after the other.
    """

    @property
    def subject(self) -> str: ...
    def __aiter__(self) -> AsyncIterator[Message]: ...
    async def next(self, *, timeout_s: float | None = None) -> Message:
        """`errors.TimedOut` when ``timeout_s`` passed, `errors.NotConnected` when it has ended."""
        ...

    async def close(self) -> None: ...
    def statistics(self) -> SubscriptionStatistics: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message in a stream."""

    subject: str
    data: bytes
    headers: Headers
    sequence: int
    stored_at_ns: int
    is_copy: bool = False  # the broker sent a message of a stream to a subject of this one


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message to be stored in a stream."""

    subject: str
    data: bytes
    headers: Headers = field(default_factory=dict)
    message_id: str | None = None
    """Inside the duplicate window a repeat is stored once."""
    expected_last_sequence: int | None = None
    """`errors.Conflict` unless the stream's last sequence is this one."""
    expected_last_subject_sequence: int | None = None
    """`errors.Conflict` unless this is the sequence of the subject's last message (0: there is none)."""
    ttl_s: float | None = None
    """The message expires after this time; in seconds, at least 1."""


class Duplicate(int):
    """The sequence of a message that was stored before under the same ``message_id``, whatever it holds."""

    __slots__ = ()


class FullPolicy(enum.Enum):
    """What a stream does when its budget is used up. Both raise an alert and increment a counter."""

    REFUSE = "refuse"  # publishing raises `errors.LimitExceeded`; no acknowledged message is deleted
    DROP_OLDEST = "drop-oldest"


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Every stream has a budget: there is no unbounded one."""

    name: str
    subjects: tuple[str, ...]
    max_bytes: int = 1 << 30
    max_age_s: float = 7 * 86400.0  # 0: no limit by age
    max_messages_per_subject: int = 0  # 0: no limit
    on_full: FullPolicy = FullPolicy.DROP_OLDEST
    replicas: int = 1
    duplicate_window_s: float = 120.0
    allow_delete: bool = True


@dataclass(frozen=True, slots=True)
class StreamState:
    first_sequence: int  # of the first retained message, or last_sequence + 1
    last_sequence: int
    messages: int
    bytes: int
    consumers: int
    now_ns: int  # the time of the broker that replied
    created_ns: int  # another stream of the same name has another one
    restored: str = ""  # which restore of a backup created the stream; empty: none did
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class StreamBudget:
    """The used part of the budget of a stream (or of a key/value bucket, which is a stream)."""

    stream: str
    used_bytes: int
    limit_bytes: int
    messages: int
    on_full: FullPolicy
    max_age_s: float = 0.0
    replicas: int = 1
    behind: tuple[str, ...] = ()  # brokers whose replica is not current, or that do not reply

    @property
    def used_ratio(self) -> float:
        return self.used_bytes / self.limit_bytes if self.limit_bytes > 0 else 0.0


class OrderedConsumer(Protocol):
    """Messages of a stream in order, without end; see `Stream.follow`."""

    def __aiter__(self) -> AsyncIterator[StoredMessage]: ...
    async def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...


class Stream(Protocol):
    @property
    def name(self) -> str: ...

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Headers | None = None,
        message_id: str | None = None,
        expected_last_sequence: int | None = None,
        expected_last_subject_sequence: int | None = None,
        ttl_s: float | None = None,
        timeout_s: float = DURABLE_TIMEOUT_S,
    ) -> int:
        """The sequence under which it is stored. `errors.Conflict` where an expectation does not hold.

        Concurrent publishes of one connection share a sync (group commit) and are stored in the order of
        the calls.  With ``message_id``, a repeat inside the duplicate window is stored once and returns the
        first one's sequence as a `Duplicate`.  A stream of one replica compares expectations first: with one
        that no longer holds, a repeat is an `errors.Conflict`.
        """
        ...

    async def publish_batch(
        self, messages: Sequence[OutgoingMessage], *, timeout_s: float = DURABLE_TIMEOUT_S
    ) -> int:
        """All or none, at consecutive sequences; the last one's is returned. At most 1,000."""
        ...

    async def get(self, sequence: int) -> StoredMessage: ...
    async def last_for(self, subject: str) -> StoredMessage | None: ...

    def read(
        self, first: int, last: int | None = None, *, subject: str | None = None, gaps: bool = False
    ) -> AsyncIterator[StoredMessage]:
        """Read from ``first`` to ``last`` inclusive (None: to the current end).

        Raises `errors.Dropped` if a part of the range has been dropped: a result is never silently
        incomplete. With ``gaps``, or for one ``subject``, deleted messages in the middle are skipped, and
        only messages that retention removed from the start of the range are an error.
        """
        ...

    def follow(self, first: int, *, subject: str | None = None, gaps: bool = False) -> OrderedConsumer:
        """Read from ``first`` on, and then each new message when it is stored, across reconnections.

        The broker stores no position: the consumer tracks it. Gaps are treated as in `read`: with ``gaps`` or
        a ``subject``, `errors.Dropped` is raised once for messages that retention removed before they were
        read, and a new iteration continues with the remaining ones.
        """
        ...

    async def delete(self, sequence: int) -> None: ...
    async def purge(self, *, subject: str | None = None, before: int | None = None) -> int:
        """Remove all messages, those of ``subject``, or those below sequence ``before``; return their
        number."""
        ...

    async def state(self) -> StreamState: ...


@dataclass(frozen=True, slots=True)
class KeyValueSettings:
    bucket: str
    history: int = 1
    max_bytes: int = 64 << 20
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class KeyValueEntry:
    """``value`` is None where the key was deleted or expired (only watchers see that)."""

    key: str
    value: bytes | None
    revision: int
    created_at_ns: int
    expired: bool = False  # its time to live is over


class KeyWatch(Protocol):
    """First every current entry, then None once, then changes as they come, each key's in order.

    A change may be passed over only if a later one of the same key is delivered.  Deletions come also during
    the first part, of keys that it has shown; and after an absence of any length, where the revision is only
    a lower bound of the deletion's and ``created_at_ns`` is 0 if no marker of it is left.
    """

    def __aiter__(self) -> AsyncIterator[KeyValueEntry | None]: ...
    async def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...


class KeyValue(Protocol):
    """Keys are arbitrary strings; in ``pattern``, ``*`` is one dot-separated part and ``>`` is the rest.

    A full bucket refuses new values (`errors.LimitExceeded`) and drops nothing.
    """

    @property
    def bucket(self) -> str: ...
    async def get(self, key: str) -> KeyValueEntry | None: ...
    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        """Store a new key, and return the revision; `errors.AlreadyExists` if the key exists."""
        ...

    async def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int: ...
    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        """Compare-and-set: `errors.Conflict` unless ``revision`` is still the key's."""
        ...

    async def delete(self, key: str, *, revision: int | None = None) -> None: ...
    async def keys(self, pattern: str = ">") -> list[str]: ...
    async def watch(self, pattern: str = ">") -> KeyWatch: ...


class ConnectionState(enum.Enum):
    CONNECTED = "connected"
    RECONNECTING = "reconnecting"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ConnectionId:
    """A connection as identified by the brokers. It changes when a client moves to another broker."""

    broker: str  # the broker's own id, which is new each time it starts
    number: int
    broker_name: str = field(default="", compare=False)  # the same each time it starts


@dataclass(frozen=True, slots=True)
class BusStatistics:
    reconnects: int
    violations: int  # publishes and subscriptions that the broker rejected for lack of permission
    dropped: int  # over all subscriptions there were
    renewed: int
    refused_full: int  # durable publishes refused because a stream's budget was used up


REPEAT_S_MAX = 4.0


class Repetition(msgspec.Struct, frozen=True):
    """When a request without a reply is sent again: after ``after_s``, then at intervals that double up to
    `REPEAT_S_MAX`, and after each reconnection. The first reply counts, whichever attempt it belongs to.

    A request or its reply is lost with a broker that fails, and a frozen process does not reply at all. Only
    for requests that have no effect, or whose server recognises a repetition.
    """

    after_s: float
    subject: str = ""  # of the repetitions; empty: the same
    data: bytes | None = None  # of the repetitions; None: the same


class Bus(Protocol):
    """A connection to the bus under one identity."""

    @property
    def identity(self) -> str: ...
    @property
    def login(self) -> Hashable:
        """Equal for connections that log in to the same brokers with the same credentials."""
        ...

    @property
    def state(self) -> ConnectionState: ...
    @property
    def broker(self) -> str | None:
        """The name of the broker it is connected to now."""
        ...

    @property
    def connection(self) -> ConnectionId | None:
        """None while it is not connected."""
        ...

    async def is_closed(self, connection: ConnectionId) -> bool:
        """Whether the brokers confirm that it is closed. False if it is open, or if they do not know."""
        ...

    def on_state(self, listener: Callable[[ConnectionState], None]) -> Callable[[], None]:
        """Call ``listener`` at each change of `state`; the returned function removes it."""
        ...

    def on_little(self, act: Callable[[], None]) -> None:
        """Call ``act`` after a small block of messages has been delivered, so that the caller can flush its
        output at once instead of waiting for the end of the event loop iteration."""
        ...

    def statistics(self) -> BusStatistics: ...

    async def publish(
        self, subject: str, data: bytes, *, headers: Headers | None = None, reply: str | None = None
    ) -> None:
        """Send to the current subscribers. Like all messages, it carries the current trace."""
        ...

    def publish_now(self, messages: Sequence[tuple[str, bytes, Headers]]) -> bool:
        """Several (subject, data, headers) in order and in one write, from a plain function. False: sending
        would block, so nothing was sent; use `publish`."""
        ...

    async def subscribe(
        self,
        subject: str,
        *,
        group: str | None = None,
        handler: Handler | None = None,
        bulk: BulkHandler | None = None,
        max_pending: int = 65_536,
        max_pending_bytes: int = 64 << 20,
        overflow: OverflowPolicy = OverflowPolicy.DROP_OLDEST,
    ) -> Subscription:
        """When this returns, the broker has the subscription. Each message goes to one member of a ``group``.
        A ``bulk`` handler is a plain function for floods of small messages without headers or replies."""
        ...

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Headers | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        repeat: Repetition | None = None,
    ) -> Message:
        """`errors.Unavailable` at once if there is no subscriber, `errors.TimedOut` if no reply arrives.

        With ``repeat`` it is sent again meanwhile, and only the first attempt fails without a subscriber.
        """
        ...

    async def gather(
        self,
        subject: str,
        data: bytes,
        *,
        enough: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        headers: Headers | None = None,
    ) -> list[Message]:
        """Send a request to all subscribers and return the replies that arrive until there are ``enough`` or
        the time has passed; empty if there is no subscriber."""
        ...

    async def stream(self, settings: StreamSettings) -> Stream:
        """The stream, created or brought to these settings.

        An existing stream keeps its budget (bytes, age, policy when full) and its replicas: only one of its
        users knows the resources of the domain, and sets them with `limit`.
        """
        ...

    async def open_stream(self, name: str) -> Stream:
        """An existing one; `errors.NotFound` otherwise."""
        ...

    async def streams(self) -> list[str]: ...
    async def delete_stream(self, name: str) -> None: ...
    async def key_value(self, settings: KeyValueSettings) -> KeyValue: ...
    async def budgets(self) -> list[StreamBudget]:
        """Used and allowed bytes of every stream of the domain, fullest first."""
        ...

    async def limit(
        self, stream: str, *, max_bytes: int, max_age_s: float, on_full: FullPolicy, replicas: int
    ) -> None:
        """Change the budget of an existing stream (or a bucket: ``KV_`` and its name)."""
        ...

    async def flush(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None: ...
    async def close(self) -> None:
        """Drain: received messages are delivered and published messages are sent; then disconnect."""
        ...

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...
