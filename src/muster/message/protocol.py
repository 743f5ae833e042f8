"""The wire between JMS clients and the dispatcher of the log; version 1.

    muster.message.from.<user>.request     a request (`Ask`), answered (`Answer`) in the asker's reply space
    muster.message.from.<user>.notify      the same without an answer: credit, releases
    muster.message.from.<user>.read.log    requests that change nothing; what a viewer may say
    muster.message.to.<user>.deliver.<c>   `Deliveries` for the connection c
    muster.message.all.dispatcher          a dispatcher has begun (`Began`): attach anew
    muster.message.all.slow                a topic has a consumer that cannot keep up (`Slow`): wait a little
    muster.message.log.queue.<name>        the log: messages of queues,
    muster.message.log.<topic's subject>   of topics, where a durable subscription wants them,
    muster.message.log.delay               those whose time has not come,
    muster.message.log.record              what was acknowledged, subscribed and done (`ledger`),
    muster.message.log.checkpoint          and the sum of it

Everything is in batches: one `Work` holds what a connection sends and acknowledges at one time, is stored as
a whole or not at all, and may be repeated with the same number without being done twice.  That makes a
commit, a single persistent send and a lazy acknowledgement the same thing.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from muster.bus.rpc import error_replies as rpc_faults
from muster.core import errors, subjects
from muster.message import destinations

VERSION: Final = 1
PART: Final = "message"
STREAM: Final = "messages"
LEASE: Final = "message.dispatcher"
LOGGED: Final = "Muster-Logged"  # header: this message of a topic came out of the log
STARTED: Final = subjects.to_all(PART, "dispatcher")
SLOW: Final = subjects.to_all(PART, "slow")
READ: Final = ("read", "log")
DELAY: Final = subjects.log_subject(PART, "delay")
RECORD: Final = subjects.log_subject(PART, "record")
CHECKPOINT: Final = subjects.log_subject(PART, "checkpoint")
# By name, not "all that this part logs": decisions of every part are kept in the audit's own stream.
LOGS: Final = (
    DELAY,
    RECORD,
    CHECKPOINT,
    subjects.log_subject(PART, "queue", ">"),
    subjects.log_subject(PART, subjects.TOPIC_PREFIX, ">"),
)

CLIENT_ID_BYTES_MAX: Final = 1024
SENDS_MAX: Final = 900  # in one work: the broker takes batches of 1,000
WORK_BYTES_MAX: Final = 16 << 20  # a transaction's messages and acknowledgements
REQUEST_BYTES_MAX: Final = 512 << 10  # of them in one request, unless the first alone is larger
ACK_BYTES: Final = 10  # of one acknowledgement


def request_subject(identity: str) -> str:
    return subjects.from_identity(PART, identity, "request")


def notify_subject(identity: str) -> str:
    return subjects.from_identity(PART, identity, "notify")


def read_subject(identity: str) -> str:
    return subjects.from_identity(PART, identity, *READ)


def deliver_subject(identity: str, connection: str) -> str:
    return subjects.to_identity(PART, identity, "deliver", connection)


def queue_subject(name: str) -> str:
    return subjects.log_subject(PART, "queue", destinations.token(name))


def topic_subject(subject: str) -> str:
    """Where the log keeps what was said on a users' subject, or pattern of them."""
    return subjects.log_subject(PART, subject)


def origin(identity: str, client_id: str) -> str:
    """Of messages, for consumers that do not want what their own client sends; no connection is named so."""
    return f"{identity}:{client_id}"


class SendMessage(msgspec.Struct, frozen=True, array_like=True):
    """``spoken``: who listens to the topic hears it from the sender, when it is stored."""

    destination: str
    meta: str  # `messages.Meta` in JSON
    data: bytes
    published_by_sender: bool = False


class _Request(msgspec.Struct, frozen=True, tag_field="request", omit_defaults=True):
    pass


class ClientHello(_Request, frozen=True, tag="hello"):
    """``connection``: the identity, ``-``, and a token.

    ``client_id``: of the sender's identity; other identities may use the same text for clients of their own.

    ``broker`` and ``number``: the connection as the brokers know it, who say when it closes.

    ``without_echo``: it does not hear what it says itself.
    """

    connection: str
    client_id: str | None = None
    version: int = VERSION
    broker: str = ""
    number: int = 0
    without_echo: bool = False


class Ping(_Request, frozen=True, tag="ping"):
    """Answered when what waits for these ``consumers``, as far as their credit goes, has been sent."""

    connection: str
    consumers: list[int] = []


class EchoOff(_Request, frozen=True, tag="echo-off"):
    """From now on this connection does not hear what it says itself."""

    connection: str


class DelayedPublished(_Request, frozen=True, tag="delayed-published"):
    """Of a delayed message whose time has come: its sender has said it, or could not."""

    connection: str
    number: int
    published: bool


class Disconnect(_Request, frozen=True, tag="disconnect"):
    """``lost``: the application behind the connection is gone, so what it held may have been seen.

    ``seen``: otherwise, of what it held, the application saw these, by backlog.
    """

    connection: str
    lost: bool = False
    seen: dict[str, list[int]] = {}


class StageMessages(_Request, frozen=True, tag="stage"):
    """Messages of a work that is too large for one request; they wait for it. ``after`` so many others."""

    connection: str
    work: int
    after: int
    sends: list[SendMessage]


class CommitWork(_Request, frozen=True, tag="work"):
    """A connection's works have growing numbers, and one is under way at a time.

    ``acks``: sequences by backlog. ``strict``: an acknowledgement that is not ours undoes the whole.

    ``staged``: so many of its messages came before it; `errors.Conflict` if they are not there.
    """

    connection: str
    number: int
    sends: list[SendMessage] = []
    acks: dict[str, list[int]] = {}
    strict: bool = False
    staged: int = 0


class AttachConsumer(_Request, frozen=True, tag="attach"):
    """A consumer of a queue or a subscription. Of those that are not durable the dispatcher keeps the shared
    ones' names and nothing else: their consumers listen to the topic themselves.
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
    without_client_id: bool = False  # a shared subscription outside the client id


class DetachConsumer(_Request, frozen=True, tag="detach"):
    """``seen``: of what was delivered, the client saw these, by backlog; the rest comes again uncounted."""

    connection: str
    consumer: int
    seen: dict[str, list[int]] = {}


class GrantCredit(_Request, frozen=True, tag="credit"):
    connection: str
    consumer: int
    more: int


class SlowConsumer(_Request, frozen=True, tag="slow"):
    """A consumer of this topic, or pattern of topics, has too much waiting; ``eased``: no more."""

    connection: str
    topic: str
    recovered: bool = False


class StopDelivery(_Request, frozen=True, tag="stop"):
    """No more deliveries: when it is answered, all there were have been sent."""

    connection: str
    consumers: list[int]


class ReleaseMessages(_Request, frozen=True, tag="release"):
    """``counted``: the delivery failed and counts. ``reason``: it can never succeed, so a dead letter."""

    connection: str
    deliveries: dict[str, list[int]]
    counted: bool = True
    reason: str | None = None


class EndSubscription(_Request, frozen=True, tag="unsubscribe"):
    """Of the connection's own client id, or with ``everyone`` of none.

    ``of``: instead, the identity and the client id whose subscription it is.
    """

    connection: str
    name: str
    without_client_id: bool = False
    owner: tuple[str, str] | None = None


class DeleteQueue(_Request, frozen=True, tag="delete-queue"):
    """A temporary queue is no more."""

    name: str


class BrowseQueue(_Request, frozen=True, tag="browse"):
    queue: str
    selector: str | None = None
    after: int = 0
    limit: int = 100


class ListQueues(_Request, frozen=True, tag="queues"):
    pass


class ListSubscriptions(_Request, frozen=True, tag="subscriptions"):
    """The durable subscriptions that the sender made; for those who may see them, all."""


class PurgeQueue(_Request, frozen=True, tag="purge"):
    """``epoch``: only the dispatcher of this epoch does it; 0: any.

    So a repetition that finds another dispatcher is not carried out a second time.
    """

    queue: str
    selector: str | None = None
    epoch: int = 0


class MoveMessages(_Request, frozen=True, tag="move"):
    """``to`` None: each back to where it came from before it died. ``epoch``: as with `Purge`."""

    queue: str
    to: str | None = None
    selector: str | None = None
    limit: int = 100
    epoch: int = 0


DispatcherRequest = (
    ClientHello
    | Ping
    | EchoOff
    | DelayedPublished
    | Disconnect
    | StageMessages
    | CommitWork
    | AttachConsumer
    | DetachConsumer
    | GrantCredit
    | SlowConsumer
    | StopDelivery
    | ReleaseMessages
    | EndSubscription
    | DeleteQueue
    | BrowseQueue
    | ListQueues
    | ListSubscriptions
    | PurgeQueue
    | MoveMessages
)
READS: Final = (BrowseQueue, ListQueues, ListSubscriptions)


class DispatcherReply(msgspec.Struct, omit_defaults=True):
    """``error``: it was not done, for this reason.

    ``epoch``: of the dispatcher that answers.  One that has been replaced may not know it yet, and answer
    first; its answers do not count.
    """

    error: rpc_faults.ErrorReply | None = None
    epoch: int = 0
    key: str = ""  # of the backlog attached to
    count: int = 0
    messages: list[MessageDelivery] = []
    rows: list[dict[str, Any]] = []


def failed(error: errors.MusterError) -> DispatcherReply:
    return DispatcherReply(error=rpc_faults.to_error_reply(error))


class MessageDelivery(msgspec.Struct, frozen=True, array_like=True):
    consumer: int
    key: str
    sequence: int
    count: int  # how often it was delivered before
    meta: str
    data: bytes


class DeliveryBatch(msgspec.Struct, frozen=True, array_like=True):
    """``due``: of the connection's own delayed messages those that it is to say now, numbers and marks."""

    epoch: int
    deliveries: list[MessageDelivery]
    due: list[tuple[int, str]] = []


class DispatcherStarted(msgspec.Struct, frozen=True):
    epoch: int


encode: Final = msgspec.msgpack.Encoder().encode
_requests: Final = msgspec.msgpack.Decoder(DispatcherRequest)
decode_started: Final = msgspec.msgpack.Decoder(DispatcherStarted).decode
decode_slow: Final = msgspec.msgpack.Decoder(SlowConsumer).decode
decode_reply: Final = msgspec.msgpack.Decoder(DispatcherReply).decode
decode_deliveries: Final = msgspec.msgpack.Decoder(DeliveryBatch).decode


def decode_request(data: bytes) -> DispatcherRequest:
    try:
        request: DispatcherRequest = _requests.decode(data)
        return request
    except msgspec.DecodeError as error:
        raise errors.InvalidInput(f"no request to the dispatcher: {error}") from error
