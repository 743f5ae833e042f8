"""The protocol between JMS clients and the dispatcher, version 1.

    muster.message.from.<user>.request     a `DispatcherRequest`, answered by a `DispatcherReply`
    muster.message.from.<user>.notify      a request without a reply: credit, releases
    muster.message.from.<user>.read.log    read-only requests, which viewers may send as well
    muster.message.to.<user>.deliver.<c>   a `DeliveryBatch` for connection c
    muster.message.all.dispatcher          `DispatcherStarted`: clients attach their consumers again
    muster.message.all.slow                `SlowConsumer`: producers of the topic wait for a short time
    muster.message.log.queue.<name>        log: messages of queues
    muster.message.log.<topic's subject>   log: messages of topics that a durable subscription selects
    muster.message.log.body.<id>           log: chunks of a body that is too large for one message
    muster.message.log.shared              log: pages with messages of several destinations
    muster.message.log.sorted.<...>        log: those that were still needed at a checkpoint, by destination
    muster.message.log.delay               log: messages with a delivery time in the future
    muster.message.log.record              log: acknowledgements, subscriptions and completed work (`ledger`)
    muster.message.log.checkpoint          log: the sum of all earlier records
    muster.message.log.transfer.<p>        log: messages on their way to partition p
    muster.message.log.layout              log: the number of partitions

These are the subjects of partition 0. Those of partition 1 end with a further level, ``1``; those of its log
begin with ``muster.message.log.p1``.

Requests are batched: one `SharedWork` contains everything that the connections of a login send and
acknowledge at one time, one `CommitWork` a transaction. Each is stored atomically, and a repetition with the
same number is not executed twice.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from muster.bus.rpc import error_replies
from muster.core import errors, subjects
from muster.message import listings, partitions, retries

VERSION: Final = 1
PART: Final = partitions.PART
LOGGED: Final = "Muster-Logged"  # header of topic messages that are already in the log
SLOW: Final = subjects.to_all(PART, "slow")
READ: Final = ("read", "log")

CLIENT_ID_BYTES_MAX: Final = 1024
SENDS_MAX: Final = 50_000  # in one work
WORK_BYTES_MAX: Final = 32 << 20  # messages and acknowledgements of a transaction
SHARED_SENDS_MAX: Final = 900  # of several senders in one work
REQUEST_BYTES_MAX: Final = 512 << 10  # in one request, unless its first message alone is larger
ACK_BYTES: Final = 10  # size of an acknowledgement
LARGE_BYTES: Final = 640 << 10  # a payload above this size is stored in chunks
CHUNK_BYTES: Final = 512 << 10
HEADER_BYTES_MAX: Final = 320 << 10  # so that what a dispatcher adds to a dead letter fits as well


def request_subject(identity: str, partition: int = 0) -> str:
    return subjects.from_identity(PART, identity, "request", *partitions.level(partition))


def notify_subject(identity: str, partition: int = 0) -> str:
    return subjects.from_identity(PART, identity, "notify", *partitions.level(partition))


def read_subject(identity: str, partition: int = 0) -> str:
    return subjects.from_identity(PART, identity, *READ, *partitions.level(partition))


def deliver_subject(identity: str, connection: str, partition: int = 0) -> str:
    return subjects.to_identity(PART, identity, "deliver", connection, *partitions.level(partition))


def started_subject(partition: int = 0) -> str:
    return subjects.to_all(PART, "dispatcher", *partitions.level(partition))


def origin(identity: str, client_id: str) -> str:
    """Identifies the sender of a message, for consumers with no-local. It never equals the name of a
    connection.
    """
    return f"{identity}:{client_id}"


class SendMessage(msgspec.Struct, frozen=True, array_like=True):
    destination: str
    meta: str  # `messages.MessageMeta` in JSON
    data: bytes


class _Request(msgspec.Struct, frozen=True, tag_field="request", omit_defaults=True):
    pass


class ClientHello(_Request, frozen=True, tag="hello"):
    """``connection``: the identity, ``-``, and a token.

    ``client_id``: scoped to the identity; other identities may use the same client id.

    ``broker`` and ``number``: identify the bus connection in the brokers' disconnect events.

    ``registration``: increases with each hello of the connection; 0: it does not count what it receives.
    """

    connection: str
    client_id: str | None = None
    version: int = VERSION
    registration: int = 0
    broker: str = ""
    number: int = 0


class Ping(_Request, frozen=True, tag="ping"):
    """The reply follows the waiting messages of these ``consumers``, as far as their credit allows."""

    connection: str
    consumers: list[int] = []


class Disconnect(_Request, frozen=True, tag="disconnect"):
    """``lost``: the application is gone, so every message it held may have been seen.

    ``seen``: otherwise, the held messages that the application saw, by backlog.
    """

    connection: str
    lost: bool = False
    seen: dict[str, list[int]] = {}


class StageMessages(_Request, frozen=True, tag="stage"):
    """Messages of a work that is too large for one request. They wait for its `CommitWork`. ``after``: the
    number of messages staged before.
    """

    connection: str
    work: int
    after: int
    sends: list[SendMessage]


class StoreChunk(_Request, frozen=True, tag="store-chunk"):
    """Store the next chunk of a large body, before the message that refers to it. ``body``: an identifier
    that no other client can guess. The reply's ``count`` identifies the chunk.
    """

    connection: str
    body: str
    data: bytes
    partition: int = 0  # to which the request is sent


class ReadChunk(_Request, frozen=True, tag="read-chunk"):
    """Every client that has received the message, and therefore its ``body``, may read the chunk."""

    body: str
    chunk: int
    partition: int = 0


class ReleaseBody(_Request, frozen=True, tag="release-body"):
    """No message with this large body will be stored. Current subscribers of a topic may read it for a short
    time, if it was published there.
    """

    body: str
    partition: int = 0


class CommitWork(_Request, frozen=True, tag="work"):
    """The works of a connection have increasing numbers, and one is in progress at a time.

    ``acks``: sequences by backlog. ``strict``: an acknowledgement of a message that the connection does not
    hold rolls back the work.

    ``staged``: the number of messages staged before; `errors.Conflict` if they are missing.

    A transaction may contain messages and acknowledgements of several partitions. The dispatcher that
    receives it coordinates the others.
    """

    connection: str
    number: int
    sends: list[SendMessage] = []
    acks: dict[str, list[int]] = {}
    strict: bool = False
    staged: int = 0


class SharedWork(_Request, frozen=True, tag="shared-work"):
    """What several connections of the caller send and acknowledge, stored atomically. ``connection`` is
    registered for this purpose, and numbers its works as in `CommitWork`.

    ``acks``: sequences by backlog, by the connection that received them. `errors.Conflict`: one of these
    connections is not registered, and nothing is stored.
    """

    connection: str
    number: int
    sends: list[SendMessage] = []
    acks: dict[str, dict[str, list[int]]] = {}


class AttachConsumer(_Request, frozen=True, tag="attach"):
    """Attach a consumer to a queue or subscription. Of subscriptions that are not durable, the dispatcher
    stores the names of shared ones only; their consumers subscribe to the topic themselves.
    """

    connection: str
    consumer: int
    destination: str
    subscription: str | None = None
    durable: bool = False
    shared: bool = False
    selector: str | None = None
    no_local: bool = False
    credit: int = 0
    without_client_id: bool = False  # a shared subscription without a client id


class DetachConsumer(_Request, frozen=True, tag="detach"):
    """``seen``: delivered messages that the client saw, by backlog; others are delivered again, uncounted."""

    connection: str
    consumer: int
    seen: dict[str, list[int]] = {}


class GrantCredit(_Request, frozen=True, tag="credit"):
    connection: str
    consumer: int
    more: int


class SlowConsumer(_Request, frozen=True, tag="slow"):
    """A consumer of this topic or topic pattern has too many waiting messages; ``recovered``: no longer."""

    connection: str
    topic: str
    recovered: bool = False


class StopDelivery(_Request, frozen=True, tag="stop"):
    """Stop deliveries. The reply follows the last delivery."""

    connection: str
    consumers: list[int]


class ReleaseMessages(_Request, frozen=True, tag="release"):
    """``counted``: the delivery failed and counts. ``reason``: it can never succeed, so the message becomes a
    dead letter; `messages.EXPIRED`: it has expired. ``elsewhere``: the consumer that held it does not receive
    it again, others may. ``delay_s``: not before that time, or that of the queue's settings if it is longer.
    ``error``: why the delivery failed.
    """

    connection: str
    deliveries: dict[str, list[int]]
    counted: bool = True
    reason: str | None = None
    elsewhere: bool = False
    delay_s: Annotated[float, msgspec.Meta(ge=0, le=retries.DELAY_S_MAX)] = 0.0
    error: Annotated[str, msgspec.Meta(max_length=retries.ERROR_CHARACTERS_MAX)] = ""


class EndSubscription(_Request, frozen=True, tag="unsubscribe"):
    """End a subscription of the connection's client id, or with ``without_client_id`` one that has none.

    ``owner``: the identity and client id of a subscription of another client.
    """

    connection: str
    name: str
    without_client_id: bool = False
    owner: tuple[str, str] | None = None


class DeleteTemporary(_Request, frozen=True, tag="delete-temporary"):
    """Delete a temporary queue or topic of a connection of the sender."""

    destination: str


class CheckTemporary(_Request, frozen=True, tag="check-temporary"):
    """`message.errors.InvalidDestination` if the temporary queue or topic does not exist any more."""

    destination: str


class BrowseQueue(_Request, frozen=True, tag="browse"):
    """The reply's ``continue_after`` is the ``after`` of the next request; 0: the end was reached. A reply
    may contain no messages before that: the work for one request is limited.

    ``must_exist``: an unknown queue is an error. For JMS clients it is empty: a queue begins with its use.
    """

    queue: str
    selector: str | None = None
    after: int = 0
    limit: int = 100
    must_exist: bool = False


class CountPartitions(_Request, frozen=True, tag="partitions"):
    """The reply contains the number of partitions, as that to a `ClientHello`."""


class ListQueues(_Request, frozen=True, tag="queues"):
    pass


class ListSubscriptions(_Request, frozen=True, tag="subscriptions"):
    """The durable subscriptions that the caller made, or all if it may list them."""


class ListScheduled(_Request, frozen=True, tag="scheduled"):
    """Messages with a delivery time in the future, in order of that time: those that the caller sent, and
    those of queues it may browse and topics it may subscribe to.

    ``destination`` None: all. ``after``: the delivery time and the number of the last row before.
    """

    destination: str | None = None
    after: tuple[int, int] = (0, 0)
    limit: int = 100


class CancelScheduled(_Request, frozen=True, tag="cancel-scheduled"):
    """Delete a message before its delivery time: by its ``number`` in the list, or by its message ``id``. The
    sender may do so, and every identity with the right ``admin`` on the queue.

    The reply's ``count`` is 0 if there is none, for example because it was delivered.
    """

    number: int = 0
    id: str = ""


class PurgeQueue(_Request, frozen=True, tag="purge"):
    """``epoch``: only the dispatcher of this epoch executes the request; 0: any.

    A repetition that reaches another dispatcher is therefore not executed a second time.
    """

    queue: str
    selector: str | None = None
    epoch: int = 0


class MoveMessages(_Request, frozen=True, tag="move"):
    """``to`` None: move each dead letter back to its original destination. ``epoch``: see `PurgeQueue`."""

    queue: str
    to: str | None = None
    selector: str | None = None
    limit: int = 100
    epoch: int = 0


DispatcherRequest = (
    ClientHello
    | Ping
    | Disconnect
    | StageMessages
    | StoreChunk
    | ReadChunk
    | ReleaseBody
    | CommitWork
    | SharedWork
    | AttachConsumer
    | DetachConsumer
    | GrantCredit
    | SlowConsumer
    | StopDelivery
    | ReleaseMessages
    | EndSubscription
    | DeleteTemporary
    | CheckTemporary
    | BrowseQueue
    | CountPartitions
    | ListQueues
    | ListSubscriptions
    | ListScheduled
    | CancelScheduled
    | PurgeQueue
    | MoveMessages
)
COUNTED: Final = (GrantCredit, ReleaseMessages)  # notifications whose loss is detected
#: What has a flow control of its own. Of others the time is charged: a new selector may take 20 ms.
TRAFFIC: Final = (CommitWork, SharedWork, StageMessages, StoreChunk, ReadChunk, *COUNTED)
READS: Final = (BrowseQueue, CountPartitions, ListQueues, ListSubscriptions, ListScheduled)


class DispatcherReply(msgspec.Struct, omit_defaults=True):
    """``error``: why the request failed.

    ``epoch``: of the dispatcher that replies. A replaced dispatcher may reply before it is stopped; clients
    ignore such replies.

    ``partitions``: the number of partitions that the queues are divided into.

    ``delivered`` and ``notified``, in the reply to a ping: how many deliveries the connection was sent since
    its hello, and how many `COUNTED` notifications of it arrived; -1: unknown.
    """

    error: error_replies.ErrorReply | None = None
    epoch: int = 0
    key: str = ""  # of the backlog that the consumer is attached to
    count: int = 0
    messages: list[MessageDelivery] = []
    queues: list[listings.QueueRow] = []
    subscriptions: list[listings.SubscriptionRow] = []
    scheduled: list[listings.ScheduledRow] = []
    data: bytes = b""
    continue_after: int = 0
    partitions: int = 1
    delivered: int = -1
    notified: int = -1
    owner: str = ""  # in the reply to `CountPartitions`: host and process id of the dispatcher


def failed(error: errors.MusterError) -> DispatcherReply:
    return DispatcherReply(error=error_replies.to_error_reply(error))


class MessageDelivery(msgspec.Struct, frozen=True, array_like=True):
    consumer: int
    key: str
    sequence: int
    count: int  # previous deliveries
    meta: str
    data: bytes


class DeliveryBatch(msgspec.Struct, frozen=True, array_like=True):
    """``before``: how many deliveries the connection was sent before these, since its ``registration``."""

    epoch: int
    deliveries: list[MessageDelivery]
    registration: int = 0
    before: int = 0


class DispatcherStarted(msgspec.Struct, frozen=True):
    epoch: int


encode: Final = msgspec.msgpack.Encoder().encode
_requests: Final = msgspec.msgpack.Decoder(DispatcherRequest)
decode_started: Final = msgspec.msgpack.Decoder(DispatcherStarted).decode
decode_slow: Final = msgspec.msgpack.Decoder(SlowConsumer).decode
_replies: Final = msgspec.msgpack.Decoder(DispatcherReply)
decode_deliveries: Final = msgspec.msgpack.Decoder(DeliveryBatch).decode


def decode_request(data: bytes) -> DispatcherRequest:
    try:
        request: DispatcherRequest = _requests.decode(data)
        return request
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidInput(f"not a request to the dispatcher: {error}") from error


def decode_reply(data: bytes) -> DispatcherReply:
    try:
        return _replies.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.MusterError(f"the reply of the dispatcher cannot be decoded: {error}") from error


def read_reply(data: bytes) -> DispatcherReply:
    """Decode a reply; raises the error that it contains."""
    reply = decode_reply(data)
    if reply.error is not None:
        raise error_replies.from_error_reply(reply.error)
    return reply
