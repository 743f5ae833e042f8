"""The wire of selective notification: subjects, messages, streams.

    receiver says     muster.notify.from.<process>.change.<shard>     Changes    -> Answer, when they hold
                   muster.notify.from.<process>.event.<shard>      Send       -> Answer, admitted or stored
                   muster.notify.from.<process>.ack.<shard>        Acked
                   muster.notify.from.<process>.define             Define     -> Answer
                   muster.notify.from.<process>.trust              Present    -> Answer
                   muster.notify.from.<process>.read.<question>    Ask        -> Told
    delivered      muster.notify.to.<process>.event                Delivered
    notifiers      muster.notify.all.{notifier,summary,known}      each other's summaries, and what is known
                   muster.notify.log.match.<shard>                 an admitted event, to a shard it may match
    kept           muster.notify.log.receiver.<shard>    stream ``receivers``: changes, and snapshots of them
                   muster.notify.log.event            stream ``events``: durable events
                   muster.notify.log.matched.<shard>  stream ``matches``: who gets them, who acknowledged
                   muster.notify.log.history.<what>   stream ``notifications``: what was decided, for replay

A receiver is called ``<process>/<name>``, where the broker vouches for the process; within its own process's
messages it goes by its name.  The receiver's full name decides its *shard*; one notifier at a time holds a
shard, under a lease.  An event goes to the shard of its sender, whose state is there.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
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


# -- what receivers say


class JoinReceiver(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="join", tag_field="change"
):
    """A receiver advertises itself, anew or again: this is then all there is of it."""

    receiver: Name
    model: Name
    state: Values = msgspec.field(default_factory=dict)
    policy: Expression = ""  # empty: it accepts nothing
    delivery: Delivery = "transient"


class UpdateReceivers(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="update", tag_field="change"
):
    """New attribute values of many receivers, in columns: ``values[name][i]`` belongs to ``receivers[i]``."""

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
    """Many receivers of one model join, in columns: ``policies[which[i]]`` is ``receivers[i]``'s policy."""

    receivers: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=100_000)]
    model: Name
    values: dict[Name, list[Value]] = msgspec.field(default_factory=dict)
    policies: Annotated[tuple[Expression, ...], msgspec.Meta(min_length=1)] = ("",)
    which: list[int] = []  # empty: all have the first
    durable: list[int] = []  # places of those that want durable delivery
    changed_s: list[int] = []  # in a snapshot: when each last changed, since 1970


Change = JoinReceiver | JoinReceivers | UpdateReceivers | SetReceiverPolicy | LeaveReceiver


class ReceiverChanges(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-changes/1", omit_defaults=True
):
    """Applied in order. One that is refused does not keep the others back."""

    changes: Annotated[tuple[Change, ...], msgspec.Meta(max_length=100_000)]


class SendEvent(messages.WireMessage, frozen=True, kw_only=True, tag="notify-send/1", omit_defaults=True):
    id: Name  # the sender's choice; a repeat of a durable event is stored once
    sender: Name  # its name in its process
    type: Name
    content: Values = msgspec.field(default_factory=dict)
    address: Expression = "TRUE"
    delivery: Delivery = "transient"
    at_ms: messages.TimeMs = 0


class EventAcks(messages.WireMessage, frozen=True, kw_only=True, tag="notify-acked/1"):
    """These receivers have handled these durable events: sequence -> receivers."""

    events: dict[int, tuple[Name, ...]]


class DefineModel(messages.WireMessage, frozen=True, kw_only=True, tag="notify-model/1", omit_defaults=True):
    name: Name
    attributes: Annotated[dict[Name, str], msgspec.Meta(max_length=1024)]
    of: Literal["receiver", "event"] = "receiver"


class PresentGrant(messages.WireMessage, frozen=True, kw_only=True, tag="notify-trust/1", omit_defaults=True):
    """A signed grant (its chain) or list of revocations. Who brings it does not matter: it is signed."""

    chain: tuple[str, ...] = ()
    revocations: str = ""


class NotifyQuery(messages.WireMessage, frozen=True, kw_only=True, tag="notify-ask/1", omit_defaults=True):
    expression: Expression = ""
    receiver: str = ""  # a full name; of models and grants, after which one to go on
    event: SendEvent | None = None
    sender: str = ""
    state: Values = msgspec.field(default_factory=dict)  # the sender's own, as its holder tells it
    after: str = ""  # of receivers: those whose names come after this
    limit: int = 100


class NotifyQueryResult(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-told/1", omit_defaults=True
):
    """One notifier's answer, for the shards that it holds."""

    notifier: str
    shards: tuple[Shard, ...] = ()
    count: int = 0
    receivers: tuple[dict[str, Any], ...] = ()
    facts: dict[str, Any] = msgspec.field(default_factory=dict)
    fault: error_replies.ErrorReply | None = None


# -- what notifiers answer


class NotifyReply(messages.WireMessage, frozen=True, kw_only=True, tag="notify-answer/1", omit_defaults=True):
    sequence: int = 0  # under which a durable event, or the changes, are stored
    refused: tuple[tuple[int, error_replies.ErrorReply], ...] = ()  # by the place in the message


class ScopedAttributes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is believed of a sender by some receivers only: a grant's scope says by whom.

    By those in ``region``, or below it, as their own state has it; by those that ``audience`` names.
    """

    attributes: Values
    region: str = ""
    audience: tuple[str, ...] = ()  # processes, or receivers by their full names; empty: everybody


class AdmittedEvent(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-event/1", omit_defaults=True
):
    """An event that was admitted: checked, and with the sender's attributes as they were then believed."""

    id: Name
    type: Name
    sender: str  # a full name
    content: Values = msgspec.field(default_factory=dict)
    attributes: Values = msgspec.field(default_factory=dict)  # the sender's
    within: tuple[ScopedAttributes, ...] = ()  # the later ones prevail
    address: Expression = "TRUE"
    at_ms: messages.TimeMs = 0

    def believed(self, within: Iterable[ScopedAttributes] = ()) -> dict[str, types.Value]:
        """All that policies are asked about, by receivers in these scopes."""
        values: dict[str, types.Value] = {self.type: True, **from_wire(self.content)}
        for attributes in (self.attributes, *(scope.attributes for scope in within)):
            values.update((f"sender.{name}", value) for name, value in from_wire(attributes).items())
        return values


class EventDelivery(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-delivered/1", omit_defaults=True
):
    """One event to some receivers of one process."""

    to: tuple[str, ...]
    event: AdmittedEvent
    shard: Shard
    epoch: int
    sequence: int = 0  # of a durable event: to be acknowledged
    floor: int = 0  # no event below this will come again from this shard


# -- what is kept


class ShardLogEntry(msgspec.Struct, frozen=True, kw_only=True):
    process: str
    changes: tuple[Change, ...]


class AppliedChanges(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-kept/1", omit_defaults=True
):
    """Changes that hold, in their order, with canonical policies; none: a notifier now holds the shard.

    A snapshot is a run of messages from ``begin`` to ``end``, all of one epoch with nothing in between.  Only
    when it is whole it stands in place of everything before it.
    """

    entries: tuple[ShardLogEntry, ...] = ()
    at_ms: messages.TimeMs = 0
    epoch: int = 0
    snapshot: Literal["", "begin", "part", "end"] = ""


class MatchRecord(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-matched/1", omit_defaults=True
):
    """How far a shard has matched the stream of events, who got what, and who has acknowledged.

    ``reset``: what was before does not count.
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
    """For the history: an event, and to how many of whose receivers it went."""

    event: AdmittedEvent
    at_ms: messages.TimeMs
    sequence: int = 0
    notifier: str = ""
    to: tuple[str, ...] = ()
    count: int = 0


class ShardSummary(
    messages.WireMessage, frozen=True, kw_only=True, tag="notify-summary/1", omit_defaults=True
):
    """What a notifier's shards hold: an event that can match nothing of it need not be sent there."""

    notifier: str
    shards: tuple[Shard, ...] = ()
    leaving: bool = False
    full: bool = False  # too many acknowledgements are owed for more durable events
    floors: dict[Shard, int] = msgspec.field(
        default_factory=dict
    )  # the first durable event that a shard still needs
    words: dict[str, tuple[str, ...]] = msgspec.field(
        default_factory=dict
    )  # attribute -> every word it has; not listed: anything
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
        # Apart from the events: acknowledgements, which make room there, must find room when they are full.
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
