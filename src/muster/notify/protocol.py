"""The wire protocol of selective notification: subjects, messages, streams.

Requests of clients:

    muster.notify.from.<process>.change.<shard>    ReceiverChanges -> NotifyReply, when they are in effect
    muster.notify.from.<process>.event.<shard>     SendEvent       -> NotifyReply, when admitted or stored
    muster.notify.from.<process>.ack.<shard>       EventAcks, without a reply
    muster.notify.from.<process>.define            DefineModel     -> NotifyReply
    muster.notify.from.<process>.trust             PresentGrant    -> NotifyReply
    muster.notify.from.<process>.read.<query>      NotifyQuery     -> NotifyQueryResult

To clients, and between notifiers:

    muster.notify.to.<process>.event               EventDelivery
    muster.notify.all.notifier                     ShardSummary, at every beat
    muster.notify.all.known                        a revision of the bucket, to be confirmed
    muster.notify.log.match.<notifier|all>         AdmittedEvent, to a notifier that may hold a receiver

Streams:

    muster.notify.log.receiver.<shard>             ``receivers``: changes and snapshots
    muster.notify.log.event                        ``events``: durable events
    muster.notify.log.matched.<shard>              ``matches``: their receivers and acknowledgements
    muster.notify.log.history.<kind>               ``notifications``: decisions, for replay

The full name of a receiver is ``<process>/<name>``; the broker proves the process.  Messages of the process
use only the name.  The full name determines the *shard*, and one notifier at a time holds a shard, under a
lease.  An event goes to the shard of its sender, which has the sender's state.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from muster.bus import api
from muster.bus.rpc import error_replies
from muster.core import messages, subjects
from muster.predicates import types

PART: Final = "notify"
BUCKET: Final = "notify"
SHARDS: Final = 16

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Expression = Annotated[str, msgspec.Meta(max_length=messages.MAX_BYTES)]  # its own limits are checked later
Value = str | bool | int | float | tuple[str, ...] | None
Values = dict[Name, Value]
Shard = int
Delivery = Literal["transient", "durable"]


def shard_of(receiver: str) -> Shard:
    return zlib.crc32(receiver.encode()) % SHARDS


def participant_id(process: str, name: str) -> str:
    return f"{process}/{name}"


def lease_of(shard: Shard) -> str:
    return f"{PART}.shard-{shard}"


# -- requests of clients


class JoinReceiver(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="join", tag_field="change"
):
    """A receiver joins; this replaces its former state and policy."""

    receiver: Name
    model: Name
    state: Values = msgspec.field(default_factory=dict)
    policy: Expression = ""  # empty: it accepts nothing
    delivery: Delivery = "transient"


class UpdateReceivers(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="update", tag_field="change"
):
    """New values of many receivers, in columns: ``values[name][i]`` belongs to ``receivers[i]``."""

    receivers: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=100_000)]
    values: dict[Name, list[Value]]


class SetReceiverPolicy(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="policy", tag_field="change"
):
    receiver: Name
    policy: Expression


class LeaveReceiver(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="leave", tag_field="change"
):
    receiver: Name


class JoinReceivers(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="joins", tag_field="change"
):
    """Many receivers of one model join, in columns: ``receivers[i]`` has ``policies[which[i]]``."""

    receivers: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=100_000)]
    model: Name
    values: dict[Name, list[Value]] = msgspec.field(default_factory=dict)
    policies: Annotated[tuple[Expression, ...], msgspec.Meta(min_length=1)] = ("",)
    which: list[int] = []  # empty: all have the first policy
    durable: list[int] = []  # positions of receivers with durable delivery
    changed_s: list[int] = []  # in a snapshot: last change of each, in seconds since 1970


Change = JoinReceiver | JoinReceivers | UpdateReceivers | SetReceiverPolicy | LeaveReceiver


class ReceiverChanges(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-changes/1", omit_defaults=True
):
    """Applied in order; a rejected change does not affect the others."""

    changes: Annotated[tuple[Change, ...], msgspec.Meta(max_length=100_000)]


class SendEvent(messages.WireMessage, frozen=True, kw_only=True, tag="notify-send/1", omit_defaults=True):
    id: Name  # chosen by the sender; a repeated durable event is stored once
    sender: Name  # its name in its process
    type: Name
    content: Values = msgspec.field(default_factory=dict)
    address: Expression = "TRUE"
    delivery: Delivery = "transient"
    at_ms: messages.TimeMs = 0


ReceiversByEvent = dict[int, tuple[str, ...]]  # sequence of an event -> receivers
RECORD_BYTES: Final = 400_000  # of receivers in one message


def split_receivers(receivers_by_event: Mapping[int, Iterable[str]]) -> Iterator[ReceiversByEvent]:
    """Split into parts that each fit into a message; many receivers of one event are spread over several."""
    piece: ReceiversByEvent = {}
    size = 0
    for sequence, receivers in receivers_by_event.items():
        start: list[str] = []
        for receiver in receivers:
            start.append(receiver)
            size += 3 + 4 * len(receiver)
            if size >= RECORD_BYTES:
                piece[sequence] = tuple(start)
                yield piece
                piece, start, size = {}, [], 0
        if start:
            piece[sequence] = tuple(start)
            size += 16
    if piece:
        yield piece


class EventAcks(messages.WireMessage, frozen=True, kw_only=True, tag="notify-acked/1"):
    """Acknowledgements of durable events: sequence -> receivers."""

    events: dict[int, tuple[Name, ...]]


class DefineModel(messages.WireMessage, frozen=True, kw_only=True, tag="notify-model/1", omit_defaults=True):
    name: Name
    attributes: Annotated[dict[Name, str], msgspec.Meta(max_length=1024)]
    of: Literal["receiver", "event"] = "receiver"


class PresentGrant(messages.WireMessage, frozen=True, kw_only=True, tag="notify-trust/1", omit_defaults=True):
    """A signed grant (its chain) or list of revocations; any client may submit it."""

    chain: tuple[str, ...] = ()
    revocations: str = ""


ANYWHERE: Final = "*"  # in the text that names of receivers are searched for: PREFIX*PART


class NotifyQuery(messages.WireMessage, frozen=True, kw_only=True, tag="notify-query/1", omit_defaults=True):
    expression: Expression = ""
    receiver: str = ""  # a full name; for models and grants, the key to continue after
    event: SendEvent | None = None
    sender: str = ""
    state: Values = msgspec.field(default_factory=dict)  # of the sender, from the notifier that holds it
    after: str = ""  # only receivers with greater names
    limit: Annotated[int, msgspec.Meta(ge=1)] = 100


class NotifyQueryResult(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-query-result/1", omit_defaults=True
):
    """The reply of one notifier, for the shards that it holds."""

    notifier: str
    shards: tuple[Shard, ...] = ()
    count: int = 0
    receivers: tuple[Any, ...] = ()  # rows, see `rows`
    facts: dict[str, Any] = msgspec.field(default_factory=dict)
    fault: error_replies.ErrorReply | None = None


# -- replies and deliveries


class NotifyReply(messages.WireMessage, frozen=True, kw_only=True, tag="notify-reply/1", omit_defaults=True):
    sequence: int = 0  # of the stored event or changes
    refused: tuple[tuple[int, error_replies.ErrorReply], ...] = ()  # by position in the message


class ScopedAttributes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Attributes of a sender that count only for the receivers in the scope of a grant.

    These are the receivers whose state is in ``region`` or below it, and that ``audience`` names.
    """

    attributes: Values
    region: str = ""
    audience: tuple[str, ...] = ()  # processes, or full names of receivers; empty: all


class AdmittedEvent(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-event/1", omit_defaults=True
):
    """A checked event, with the attributes of the sender at the time of admission."""

    id: Name
    type: Name
    sender: str  # a full name
    content: Values = msgspec.field(default_factory=dict)
    attributes: Values = msgspec.field(default_factory=dict)  # the sender's
    within: tuple[ScopedAttributes, ...] = ()  # later ones override
    address: Expression = "TRUE"
    at_ms: messages.TimeMs = 0

    def attribute_values(self, within: Iterable[ScopedAttributes] = ()) -> dict[str, types.Value]:
        """Return the values with which policies of receivers in these scopes are evaluated."""
        values: dict[str, types.Value] = from_wire(self.content)
        for attributes in (self.attributes, *(scope.attributes for scope in within)):
            values.update((f"sender.{name}", value) for name, value in from_wire(attributes).items())
        # Last, so that neither content nor a grant replaces the type and what the broker proved.
        process = self.sender.partition("/")[0]
        return values | {self.type: True, "sender._id": self.sender, "sender._process": process}


class EventDelivery(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-delivered/1", omit_defaults=True
):
    """An event for receivers of one process."""

    to: tuple[str, ...]
    event: AdmittedEvent
    shard: Shard
    epoch: int
    sequence: int = 0  # of a durable event, for the acknowledgement
    floor: int = 0  # no earlier event will be sent again by this shard


# -- stored messages


class ShardLogEntry(msgspec.Struct, frozen=True, kw_only=True):
    process: str
    changes: tuple[Change, ...]


class AppliedChanges(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-applied/1", omit_defaults=True
):
    """Applied changes in order, with canonical policies; empty: a notifier has acquired the shard.

    A snapshot is a sequence of messages from ``begin`` to ``end``, all of one epoch and without others in
    between.  Only a complete snapshot replaces the messages before it.
    """

    entries: tuple[ShardLogEntry, ...] = ()
    at_ms: messages.TimeMs = 0
    epoch: int = 0
    snapshot: Literal["", "begin", "part", "end"] = ""


class MatchRecord(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-matched/1", omit_defaults=True
):
    """The position of a shard in the stream of events, the receivers of events, and acknowledgements.

    ``reset``: this record replaces all earlier ones.
    """

    position: int
    epoch: int
    matched: dict[int, tuple[str, ...]] = msgspec.field(
        default_factory=dict
    )  # sequence of an event -> receivers
    acked: dict[int, tuple[str, ...]] = msgspec.field(default_factory=dict)
    reset: bool = False


class DecisionRecord(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-decided/1", omit_defaults=True
):
    """For the history: an event, and its receivers at one notifier."""

    event: AdmittedEvent
    at_ms: messages.TimeMs
    sequence: int = 0
    notifier: str = ""
    to: tuple[str, ...] = ()
    count: int = 0


class ShardSummary(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-summary/1", omit_defaults=True
):
    """What a notifier holds: an event that cannot match it need not be forwarded there."""

    notifier: str
    shards: tuple[Shard, ...] = ()
    leaving: bool = False
    full: bool = False  # too many pending acknowledgements for more durable events
    floors: dict[Shard, int] = msgspec.field(
        default_factory=dict
    )  # the first durable event that a shard still needs
    words: dict[str, tuple[str, ...]] = msgspec.field(
        default_factory=dict
    )  # attribute -> all words that occur; not listed: any word
    accepts: tuple[str, ...] | None = None  # event types; None: any


STREAM_RECEIVERS: Final = "receivers"
STREAM_EVENTS: Final = "events"
STREAM_MATCHES: Final = "matches"
STREAM_HISTORY: Final = "notifications"


def streams(*, max_bytes: int, replicas: int = 1) -> tuple[api.StreamSettings, ...]:
    refuse: dict[str, Any] = {"on_full": api.FullPolicy.REFUSE, "max_age_s": 0.0, "replicas": replicas}
    return (
        api.StreamSettings(
            STREAM_RECEIVERS, (subjects.log_subject(PART, "receiver", "*"),), max_bytes=max_bytes, **refuse
        ),
        api.StreamSettings(
            STREAM_EVENTS, (subjects.log_subject(PART, "event"),), max_bytes=max_bytes, **refuse
        ),
        # Separate from the events: when those are full, there must be space for acknowledgements.
        api.StreamSettings(
            STREAM_MATCHES, (subjects.log_subject(PART, "matched", "*"),), max_bytes=max_bytes, **refuse
        ),
        api.StreamSettings(
            STREAM_HISTORY,
            (subjects.log_subject(PART, "history", ">"),),
            max_bytes=max_bytes,
            replicas=replicas,
        ),
    )


def from_wire(values: Mapping[str, Value]) -> dict[str, types.Value]:
    return {name: frozenset(value) if isinstance(value, tuple) else value for name, value in values.items()}


def cell(value: types.Value) -> Value:
    return tuple(sorted(value)) if isinstance(value, set | frozenset) else value  # type: ignore[return-value]


def to_wire(values: Mapping[str, types.Value]) -> dict[str, Value]:
    return {name: cell(value) for name, value in values.items()}
