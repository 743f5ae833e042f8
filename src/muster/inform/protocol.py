"""Subjects and messages of the information service, version 1.

    muster.inform.from.<identity>.read.<node|any>.<verb>     read request of a client
    muster.inform.from.<identity>.write.<node|any>.<verb>    write request of a client
    muster.inform.from.<identity>.read.direct                asks for a node that accepts direct connections
    muster.inform.all.context.<bucket>.<kind>                to the holders of the contexts of a bucket
    muster.inform.all.nodes.<kind>                           to all information nodes
    muster.inform.to.<node>.<kind>                           from node to node
    muster.inform.log.page.<node>                            the log: pages of the records of a node
    muster.inform.log.context.<bucket>.<key>                 the log: a record of 0.1.0, which is only read

Contexts share `BUCKETS` topics: a million subscriptions would cost a broker 760 MB.  A node ignores messages
about contexts that it does not hold.

Every record of the log is complete: the value and the holders of the replicas.  The first of ``holders`` is
the primary.  So the last record of a key that counts (`muster.inform.node.log.page_order`) is the complete
state of a context, and a change of the primary is a record like any other.
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
PING = "ping"  # a message from node to node whose reply shows that the node works

KEY_BYTES_MAX = 512
VALUE_BYTES_MAX = 1 << 20
ATTRIBUTES_BYTES_MAX = 16 << 10
REPLY_BYTES_MAX = 1 << 20  # total size of the values in a reply; a single value may be as large
PAGE_NODES = 2_000
SILENT_MAX = 1_000  # names of silent nodes in one message
SILENT_SHOWN = 5
DEMAND_MAX = 100  # origins of requests that are listed for a replica

#: Operations of clients; a viewer may use those in `READS`.
READS = ("get", "find", "changes", "history", "where", "nodes")

Attribute = str | int | float | bool | list[str]
Attributes = dict[str, Attribute]
T = TypeVar("T")


class InformMessage(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages. New fields are added at the end, with a default."""


class ContextRecord(InformMessage, frozen=True, gc=False):
    """An entry of a context's log. ``value`` is None if the context was deleted or has expired."""

    key: str
    holders: tuple[str, ...]  # nodes with a permanent replica, the primary first
    stamp: int  # of the value, by the hybrid logical clock of the primary
    stamped_by: str
    value: bytes | None = None
    attributes: bytes = b""  # MessagePack of `Attributes`; empty: none
    version: int = 0  # the position of the record that wrote the value; 0: of this record
    expires_at_ns: int = 0  # by the clock of the log; 0: never. Without a value: the end of the tombstone
    writer: str = ""
    request: str = ""  # id of the write, to detect repeated attempts
    reason: str = "put"  # or delete, expire, place (new holders, or written again), forget (its tombstone has
    # ended), refuse (the request was rejected, and no attempt of it is to be stored any more)
    acknowledge: bool = False  # holders send `ReplicaApplied` to the primary


class FenceCandidate(InformMessage, frozen=True):
    """A live node, as the node that fences another one sees it."""

    node: str
    load: float
    proximity_ms: float
    zone: str


class ContextLogPage(InformMessage, frozen=True):
    """What a node appends at one time. ``basis``: the sequence up to which it had applied the log before;
    a record does not count if another one of its key came in between.

    ``fence``, in a page on the subject of another node: the live nodes. From here on, that node is the
    primary of no context.
    """

    basis: int
    records: list[ContextRecord] = []
    lease_s: float = 0.0  # the node may answer reads from memory for so long
    fence: list[FenceCandidate] = []
    process: str = ""  # of the node, and the number of the page there: no two pages are equal
    number: int = 0
    is_warning: bool = False  # of another node: this one does not reply, and is fenced unless it appends


class Context(InformMessage, frozen=True):
    """The result of a read: a context, its version, and the age of the replica."""

    key: str
    value: bytes
    attributes: Attributes
    version: int
    stamp_time: int
    stamped_by: str
    age_s: float  # time since the value was known to be the newest
    source: str  # the node that replied, "log", or the name of a mount
    replica_kind: str  # primary, permanent, temporary, log, mounted
    writer: str = ""
    expires_at_ns: int = 0  # by the clock of the log; 0: never
    lease_left_s: float = 0.0  # when the node replied

    @property
    def text(self) -> str:
        """The value as text."""
        return self.value.decode()

    @property
    def stamp(self) -> str:
        """When the primary wrote it, by its hybrid logical clock; sorts by time. Empty in a mount."""
        return str(clock.HybridTimestamp(self.stamp_time, self.stamped_by)) if self.stamped_by else ""


class ContextChange(InformMessage, frozen=True):
    """A change of a context. ``value`` is None for a deletion or expiry."""

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
    lease_s: float = 0.0  # 0: no expiry
    expected_version: int | None = None  # 0: the context must not exist
    ack: Literal["logged", "replicated"] = "logged"
    request: str = ""
    repeat: bool = False  # the write was sent before and may have been stored


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
    replicas: int  # permanent replicas that have confirmed it
    status: str = "normal"  # "updated" until all permanent replicas have it


class GetContext(InformMessage, frozen=True):
    """``max_staleness_s`` is the freshness of a read: None for any age; a maximum age; or 0 for a
    linearizable read, which the log confirms after the request arrived.
    """

    key: str
    max_staleness_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    origin: str = ""  # the requesting node, if a node sends it


class FindContexts(InformMessage, frozen=True):
    predicate: str
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100
    after: str = ""  # only greater keys
    without: tuple[str, ...] = ()  # nodes and mounts that did not reply before: do not wait for them
    reader: str = ""  # identity of the client, in a request between nodes
    bytes_max: int = REPLY_BYTES_MAX  # total size of the values in the reply of one node


class FindResult(InformMessage, frozen=True):
    """Contexts in key order."""

    contexts: list[Context]
    silent: list[str] = []  # nodes without a reply (`SILENT_MAX`): their contexts are missing
    more: bool = False  # there may be more: continue after ``reached``
    failed: dict[str, str] = {}  # mounts that could not be searched, and why
    reached: str = ""  # if there is more: all keys up to this one have been searched
    cut: list[str] = []  # mounts with more entries than a search reads
    silent_more: int = 0  # further nodes without a reply

    @property
    def silent_text(self) -> str:
        """The nodes without a reply, for a message to a user; empty if all replied."""
        return _silent_text(self.silent, self.silent_more)


class PartialFindResult(InformMessage, frozen=True):
    """The matches among the primaries of one node (or in a mount), as many as one reply holds."""

    node: str
    contexts: list[Context]
    more: bool = False
    reached: str = ""  # if there is more: all keys up to this one have been searched
    cut: bool = False  # a mount has more entries than a search reads
    moved: list[str] = []  # matching keys whose primary this node was until recently


class WaitForChanges(InformMessage, frozen=True):
    """A request for the changes after ``after_version``; the node waits up to ``wait_s`` for one.

    ``prefix``: of all contexts whose keys begin with ``key``; an ``after_version`` of -1 asks where to begin.
    """

    key: str
    after_version: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)] = 0
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    prefix: bool = False


class ContextHistory(InformMessage, frozen=True):
    changes: list[ContextChange]
    complete: bool = True  # False: the log no longer has some of the requested changes
    more: bool = False  # continue after the last of these
    position: int = 0  # of a prefix: continue after this version


class NodeLoad(InformMessage, frozen=True):
    """The two load factors of the paper: topics (here: permanent replicas) and client messages per second."""

    contexts: int = 0
    messages_per_s: float = 0.0
    ratio: float = 0.0  # 1: full by the settings of the node


class ServerInformation(InformMessage, frozen=True):
    node: str
    load: NodeLoad
    zone: str = "default"
    temporary: int = 0
    memory_bytes: int = 0


class NodeInfo(InformMessage, frozen=True):
    """A node as seen by the node that replies."""

    node: str
    load: NodeLoad
    proximity_ms: float
    heard_s_ago: float
    zone: str = "default"
    temporary: int = 0
    memory_bytes: int = 0


class ReplicaInfo(InformMessage, frozen=True):
    node: str
    replica_kind: str
    version: int
    age_s: float
    demand: dict[str, int]  # requests in this interval by node of origin: the `DEMAND_MAX` largest
    demand_others: int = 0  # requests from all other nodes


class ReplicaList(InformMessage, frozen=True):
    """The replicas of a context, the primary first. Replicas on silent nodes are missing."""

    replicas: list[ReplicaInfo]
    next: str | None = None  # continue after it; None at the end
    silent: list[str] = []  # nodes without a reply (`SILENT_MAX`)
    silent_more: int = 0  # further nodes without a reply

    @property
    def silent_text(self) -> str:
        """The nodes without a reply, for a message to a user; empty if all replied."""
        return _silent_text(self.silent, self.silent_more)


class Nodes(InformMessage, frozen=True):
    after: str = ""  # only nodes with greater names


class Where(InformMessage, frozen=True):
    key: str
    after: str = ""  # ``next`` of the previous page


class Page(InformMessage, Generic[T], frozen=True):
    """A page of a list."""

    items: list[T]
    next: str | None = None  # continue after it; None at the end
    source: str = ""  # the node that replied, if the next page must come from it


class UpdateContext(InformMessage, frozen=True):
    """From the initiator to the primary. ``holders`` is set for a new context."""

    write: PutContext | DeleteContext
    writer: str
    holders: tuple[str, ...] = ()


class ContextQuery(InformMessage, frozen=True):
    """A context by key, in a request between nodes."""

    key: str


class ReplicaApplied(InformMessage, frozen=True):
    """From a holder to the primary: it has the record with this stamp."""

    node: str
    key: str
    stamp: int


class Reply(InformMessage, Generic[T], frozen=True):
    """A result or an error."""

    result: T | None = None
    fault: error_replies.ErrorReply | None = None
    node: str = ""  # the node that replied


def _silent_text(silent: list[str], silent_more: int) -> str:
    shown = ", ".join(silent[:SILENT_SHOWN])
    further = len(silent[SILENT_SHOWN:]) + silent_more
    return f"{shown} and {further:,} more" if further else shown


_encoder = msgspec.msgpack.Encoder()
_decode_attributes = msgspec.msgpack.Decoder(Attributes).decode


_decoders: dict[Any, Callable[[bytes], Any]] = {}  # cached for each type
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
        raise errors.InvalidInput(f"cannot be encoded as MessagePack: {error}") from error


def decode(data: bytes, kind: type[T]) -> T:
    try:
        message: T = _decoder(kind)(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise errors.InvalidInput(f"invalid {kind.__name__}: {error}") from error
    return message


def attributes_of(data: bytes) -> Attributes:
    return _decode_attributes(data) if data else {}


def reply_bytes(value: bytes | None, attributes: bytes) -> int:
    """Estimate the size of a context or a change in a reply."""
    return len(value or b"") + len(attributes) + 256


def fit_to_reply(contexts: list[Context]) -> list[Context]:
    """Return the first contexts, as many as one reply holds."""
    size = 0
    for number, context in enumerate(contexts):
        size += reply_bytes(context.value, encode(context.attributes))
        if number and size > REPLY_BYTES_MAX:
            return contexts[:number]
    return contexts


# Subjects.


def check_key(key: str) -> str:
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise errors.InvalidInput(f"{key[:80]!r} cannot be a key: it contains a lone surrogate") from error
    if not 0 < size <= KEY_BYTES_MAX or "\0" in key:
        raise errors.InvalidInput(
            f"invalid key of {size} bytes ({key[:40]!r}…): use 1 to {KEY_BYTES_MAX} bytes, without zero bytes"
        )
    return key


def token(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=20).hexdigest()


def bucket(key: str) -> int:
    return int(token(key)[:8], 16) % BUCKETS


_PAGES = subjects.log_subject(PART, "page", "")
LOG_SUBJECTS = f"{_PAGES}*"
FORMER_SUBJECTS = subjects.log_subject(
    PART, "context", ""
)  # until 0.1.0: a record each, by the hash of its key


def page_subject(node: str) -> str:
    return f"{_PAGES}{node}"


def former_subject(key: str) -> str:
    return f"{FORMER_SUBJECTS}{bucket(key)}.{token(key)}"


def node_of(subject: str) -> str | None:
    """The node whose pages have this subject; None for a former record."""
    return subject.removeprefix(_PAGES) if subject.startswith(_PAGES) else None


@functools.lru_cache(2 * BUCKETS)
def topic(of_bucket: int, kind: str) -> str:
    return subjects.to_all(PART, "context", str(of_bucket), kind)


def to_all(kind: str) -> str:
    return subjects.to_all(PART, "nodes", kind)


@functools.lru_cache(1024)
def to_node(node: str, kind: str) -> str:
    return subjects.to_identity(PART, node, kind)


@functools.lru_cache(1024)
def request_subject(identity: str, verb: str, node: str = ANY) -> str:
    return subjects.from_identity(PART, identity, "read" if verb in READS else "write", node, verb)


# Replies.


class PrimaryMoved(errors.Conflict):
    """This node is no longer the primary of the context: look up the primary and retry."""

    code = "moved"


def result_of(data: bytes, kind: type[T]) -> T:
    """Return the result in a `Reply`, or raise its error."""
    read = _reply_decoders.get(kind)
    if read is None:
        read = _reply_decoders[kind] = msgspec.msgpack.Decoder(Reply[kind]).decode  # type: ignore[valid-type]
    try:
        reply: Reply[T] = read(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise errors.InvalidInput(f"invalid reply: {error}") from error
    if reply.fault is not None:
        raise error_replies.from_error_reply(reply.fault)
    return cast("T", reply.result)


def responder_of(data: bytes) -> str:
    """Return the name of the node that sent a `Reply`."""
    return decode(data, Reply[Any]).node


def reply(result: object, node: str) -> bytes:
    return encode(Reply(result, None, node))


class InformCodec:
    """The encoding of a node's replies, for `muster.bus.rpc`."""

    def __init__(self, node: str) -> None:
        self._node = node

    def result(self, value: object) -> bytes:
        return reply(value, self._node)

    def error(self, error: errors.MusterError) -> bytes:
        return encode(Reply(fault=error_replies.to_error_reply(error), node=self._node))
