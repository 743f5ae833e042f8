"""The wire of the information service: its subjects and messages, version 1.

    muster.inform.from.<identity>.read.<node|any>.<verb>     a client asks, and changes nothing
    muster.inform.from.<identity>.write.<node|any>.<verb>    a client changes something
    muster.inform.all.context.<bucket>.<kind>                to the holders of the contexts of a bucket
    muster.inform.all.nodes.<kind>                           to all information nodes
    muster.inform.to.<node>.<kind>                           from node to node
    muster.inform.log.context.<bucket>.<token>               the log: one subject for each context

The topic of a context is one of `BUCKETS`: a million raw subscriptions would cost a broker 760 MB, and who
holds nothing of that name keeps silent.  A context's log has its key's hash as subject, so that keys may be
any text; the key itself stands in the record, and a record under another key's hash is refused.

Every record of the log is whole: the value, and where its copies live.  The first of ``holders`` is the
primary.  So the last record of a subject is all there is to know of a context, whoever appends needs only
the sequence of that last record, and changing the primary is an append like any other: the deposed one's
next append fails.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

import msgspec

from muster.bus.rpc import error_replies
from muster.core import clock, errors, subjects

PART = "inform"
STREAM = "contexts"
BUCKETS = 1024
ANY = "any"

KEY_BYTES_MAX = 512
VALUE_BYTES_MAX = 1 << 20
ATTRIBUTES_BYTES_MAX = 16 << 10
ANSWER_BYTES_MAX = 1 << 20  # of values in one answer; one alone may be as large
PAGE_NODES = 2_000
SILENT_MAX = 1_000  # names of silent nodes in one message
SILENT_SHOWN = 5
DEMAND_MAX = 100  # origins of requests that are named for one copy

#: What clients ask; the first group may be asked by a viewer.
READS = ("get", "find", "changes", "history", "where", "nodes")
WRITES = ("put", "delete")

Attribute = str | int | float | bool | list[str]
Attributes = dict[str, Attribute]
T = TypeVar("T")


class InformMessage(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages here. Fields are only ever added at the end, with a default."""


class ContextRecord(InformMessage, frozen=True, gc=False):
    """One entry of a context's log. ``value`` is None where the context was deleted or has expired."""

    key: str
    holders: tuple[str, ...]  # of the permanent copies; the primary first
    stamp: int  # of the value, by the primary's hybrid logical clock…
    stamped_by: str
    value: bytes | None = None
    attributes: bytes = b""  # MessagePack of `Attributes`; empty: none
    version: int = 0  # the sequence of the record that wrote the value; 0: this one's own
    expires_at_ns: int = 0  # 0: never
    writer: str = ""
    request: str = ""  # of the write: a repeat is recognised by it
    reason: str = "put"  # or delete, expire, place (holders only), refuse (nothing was there: uses up an id)
    acknowledge: bool = False  # holders tell the primary when they have it


class Context(InformMessage, frozen=True):
    """What a reader gets: a context, its version, and how old this copy's knowledge may be."""

    key: str
    value: bytes
    attributes: Attributes
    version: int
    stamp_time: int
    stamped_by: str
    age_s: float  # it was the newest at least until so long ago
    source: str  # the node that answered, or "log", or the mount that it is from
    copy: str  # primary, permanent, temporary, log, mounted
    writer: str = ""
    expires_at_ns: int = 0

    @property
    def stamp(self) -> str:
        """When its primary wrote it, by its hybrid logical clock: sorts as time does. Empty in a mount."""
        return str(clock.HybridTimestamp(self.stamp_time, self.stamped_by)) if self.stamped_by else ""


class ContextChange(InformMessage, frozen=True):
    """One step of a context's history. ``value`` is None for a deletion or expiry."""

    key: str
    version: int
    stamp: str
    value: bytes | None
    attributes: Attributes
    writer: str
    reason: str


class PutContext(InformMessage, frozen=True, tag="put"):
    key: str  # empty: the system assigns one
    value: bytes
    attributes: Attributes = {}
    lease_s: float = 0.0  # 0: stays until it is deleted
    expected_version: int | None = None  # 0: it must not be there yet
    ack: Literal["logged", "replicated"] = "logged"
    request: str = ""
    repeat: bool = False  # it was sent before, and may have been stored


class DeleteContext(InformMessage, frozen=True, tag="delete"):
    key: str
    expected_version: int | None = None
    request: str = ""
    repeat: bool = False


class WriteResult(InformMessage, frozen=True):
    key: str
    version: int
    stamp: str
    primary: str
    copies: int  # permanent copies that are known to have it
    status: str = "normal"  # "updated" until the permanent copies have it


class GetContext(InformMessage, frozen=True):
    """``max_staleness_s`` names the freshness of a read: None for any age; a maximum age; or 0 for a
    linearizable read, which the log confirms after the request came."""

    key: str
    max_staleness_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    origin: str = ""  # the node that asks, where one does


class FindContexts(InformMessage, frozen=True):
    predicate: str
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100
    after: str = ""  # only keys behind this one
    without: tuple[str, ...] = ()  # nodes and mounts that did not answer before: they are not waited for
    reader: str = ""  # who asks, in a question of one node to others
    bytes_max: int = ANSWER_BYTES_MAX  # of values in the answer of one node; set by the node that asks


class FindResult(InformMessage, frozen=True):
    """In the order of their keys."""

    contexts: list[Context]
    silent: list[str] = []  # nodes that did not answer (`SILENT_MAX`): their primaries are not in the result
    more: bool = False  # there may be further ones: ask again after ``reached``
    failed: dict[str, str] = {}  # mounts that could not be searched, and why
    reached: str = ""  # where there is more: all up to this key has been searched
    cut: list[str] = []  # mounts that have more entries than are searched
    silent_more: int = 0  # further silent nodes, beyond those that are named

    @property
    def silent_text(self) -> str:
        """The silent nodes for a message to a user; empty if all answered."""
        shown = ", ".join(self.silent[:SILENT_SHOWN])
        further = len(self.silent[SILENT_SHOWN:]) + self.silent_more
        return f"{shown} and {further:,} more" if further else shown


class PartialFindResult(InformMessage, frozen=True):
    """What one node found among its primaries (or a mount has), as far as one answer holds it."""

    node: str
    contexts: list[Context]
    more: bool = False
    reached: str = ""  # where there is more: all up to this key has been searched
    cut: bool = False  # a mount has more entries than are searched
    moved: list[str] = []  # keys that would have been found while we were their primary, a moment ago


class WaitForChanges(InformMessage, frozen=True):
    """What happened to a context after ``after_version``, waiting up to ``wait_s`` for it."""

    key: str
    after_version: int = 0
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0


class ContextHistory(InformMessage, frozen=True):
    changes: list[ContextChange]
    complete: bool = True  # False: older ones than the log keeps were asked for, and are gone
    more: bool = False  # there are further ones: ask again after the last of these


class NodeLoad(InformMessage, frozen=True):
    """The paper's two factors: topics held (ours: permanent copies), and messages of users in a second."""

    contexts: int = 0
    messages_per_s: float = 0.0
    ratio: float = 0.0  # of what the node's settings call full


class ServerInformation(InformMessage, frozen=True):
    node: str
    load: NodeLoad
    zone: str = "default"
    temporary: int = 0
    memory_bytes: int = 0


class NodeInfo(InformMessage, frozen=True):
    """A node as the answering one sees it."""

    node: str
    load: NodeLoad
    proximity_ms: float
    heard_s_ago: float
    zone: str = "default"
    temporary: int = 0
    memory_bytes: int = 0


class ReplicaInfo(InformMessage, frozen=True):
    node: str
    copy: str
    version: int
    age_s: float
    demand: dict[str, int]  # requests in this interval by the node they came from: the `DEMAND_MAX` largest
    demand_others: int = 0  # requests from all further nodes


class Nodes(InformMessage, frozen=True):
    after: str = ""  # only nodes behind this one


class Where(InformMessage, frozen=True):
    key: str
    after: str = ""  # the ``next`` of the page before


class Page(InformMessage, Generic[T], frozen=True):
    """A part of a list."""

    items: list[T]
    next: str | None = None  # what to go on after; None at the end
    source: str = ""  # the node that answered, where the rest must come from the same one


class UpdateContext(InformMessage, frozen=True):
    """From the initiator to the primary. ``holders`` is set for a context that is new."""

    write: PutContext | DeleteContext
    writer: str
    holders: tuple[str, ...] = ()


class ContextQuery(InformMessage, frozen=True):
    """A context by its key, in a question of one node to others; ``silent`` is a primary thought dead."""

    key: str
    silent: str = ""


class ReplicaApplied(InformMessage, frozen=True):
    """From a holder to the primary: the record with this stamp is here."""

    node: str
    key: str
    stamp: int


class Reply(InformMessage, Generic[T], frozen=True):
    """A result, or what went wrong."""

    result: T | None = None
    fault: error_replies.ErrorReply | None = None


_encoder = msgspec.msgpack.Encoder()
_decode_record = msgspec.msgpack.Decoder(ContextRecord).decode
_decode_attributes = msgspec.msgpack.Decoder(Attributes).decode


_decoders: dict[Any, Callable[[bytes], Any]] = {}  # made once for each kind
_reply_decoders: dict[Any, Callable[[bytes], Any]] = {}


def _decoder(kind: Any) -> Callable[[bytes], Any]:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind).decode
    return decoder


def encode(message: object) -> bytes:
    try:
        return _encoder.encode(message)
    except (UnicodeEncodeError, TypeError, OverflowError) as error:
        raise errors.InvalidInput(f"this cannot travel: {error}") from error


def decode(data: bytes, kind: type[T]) -> T:
    try:
        message: T = _decoder(kind)(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise errors.InvalidInput(f"this is no {kind.__name__}: {error}") from error
    return message


def decode_record(data: bytes) -> ContextRecord:
    try:
        return _decode_record(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise errors.InvalidInput(f"this is no record of a context: {error}") from error


def attributes_of(data: bytes) -> Attributes:
    return _decode_attributes(data) if data else {}


def answer_bytes(value: bytes | None, attributes: bytes) -> int:
    """Roughly what a context or a change takes of an answer."""
    return len(value or b"") + len(attributes) + 256


def fit_to_reply(contexts: list[Context]) -> list[Context]:
    """The first of them, as many as one answer holds."""
    size = 0
    for number, context in enumerate(contexts):
        size += answer_bytes(context.value, encode(context.attributes))
        if number and size > ANSWER_BYTES_MAX:
            return contexts[:number]
    return contexts


# Subjects.


def check_key(key: str) -> str:
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise errors.InvalidInput(f"{key[:80]!r} cannot be a key: it holds half a character") from error
    if not 0 < size <= KEY_BYTES_MAX or "\0" in key:
        raise errors.InvalidInput(
            f"a key of {size} bytes, beginning {key[:40]!r}: use 1 to {KEY_BYTES_MAX} bytes, none zero"
        )
    return key


def token(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=20).hexdigest()


def bucket(key: str) -> int:
    return int(token(key)[:8], 16) % BUCKETS


_LOG = subjects.log_subject(PART, "context")
LOG_SUBJECTS = f"{_LOG}.*.*"


def log_subject(key: str) -> str:
    name = token(key)
    return f"{_LOG}.{int(name[:8], 16) % BUCKETS}.{name}"


@functools.lru_cache(2 * BUCKETS)
def topic(of_bucket: int, kind: str) -> str:
    return subjects.to_all(PART, "context", str(of_bucket), kind)


def to_all(kind: str) -> str:
    return subjects.to_all(PART, "nodes", kind)


@functools.lru_cache(1024)
def to_node(node: str, kind: str) -> str:
    return subjects.to_identity(PART, node, kind)


@functools.lru_cache(1024)
def asked(identity: str, verb: str, node: str = ANY) -> str:
    return subjects.from_identity(PART, identity, "read" if verb in READS else "write", node, verb)


# Replies.


class PrimaryMoved(errors.Conflict):
    """This node is no longer the context's primary: find out who is, and ask again."""

    code = "moved"


def result_of(data: bytes, kind: type[T]) -> T:
    """The result in a `Reply`, or the error it tells."""
    read = _reply_decoders.get(kind)
    if read is None:
        read = _reply_decoders[kind] = msgspec.msgpack.Decoder(Reply[kind]).decode  # type: ignore[valid-type]
    try:
        reply: Reply[T] = read(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise errors.InvalidInput(f"this is no reply: {error}") from error
    if reply.fault is not None:
        raise error_replies.from_error_reply(reply.fault)
    return cast("T", reply.result)


def reply(result: object) -> bytes:
    return encode(Reply(result))


def refusal(error: errors.MusterError) -> bytes:
    return encode(Reply(fault=error_replies.to_error_reply(error)))


class InformCodec:
    """The form of replies, for `muster.bus.rpc`."""

    def result(self, value: object) -> bytes:
        return reply(value)

    def error(self, error: errors.MusterError) -> bytes:
        return refusal(error)
