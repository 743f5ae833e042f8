"""What became of an event or an alert: the event that answers it, its receivers, and their operations.

Notifiers store every event with the receivers that they found. The responder derives the id of an event from
the alert that it answers, and reactions the id of an operation from the event.  So one id connects them.
"""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from muster.bus import api
from muster.core import errors, messages, subjects
from muster.notify import protocol
from muster.pipeline import protocol as pipeline_protocol
from muster.trust.permissions import roles
from muster.web.auth import sessions
from muster.web.data.measurements import alert_spans

if TYPE_CHECKING:
    from muster.web.data import read_model

M = TypeVar("M", bound=messages.WireMessage)
SEARCHED = 5_000  # messages of a stream, the newest ones
BYTES_MAX = 32 << 20  # of these messages: those about events name their receivers
NAMES_MAX = 200
KEPT_S, ALERTS_KEPT_S = 3.0, 10.0
DECIDED = subjects.log_subject(protocol.PART, "history", "decision")
_ANSWER = re.compile(r"alert-(\d+)-\d+-\d+")  # an event of the responder: the alert's place in its stream


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event. ``receivers``: how many it matched; ``alert``: the place of the alert that it answers."""

    id: str
    type: str
    sender: str
    at_ms: int
    address: str
    content: dict[str, Any] = {}
    durable: bool = False
    receivers: int = 0
    alert: int | None = None


class LoopStep(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened. ``what``: alert, event, matched, or the name of an operation."""

    at_ms: int
    what: str
    text: str
    outcome: str = ""
    event: str = ""


class EventTrace(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its first receivers. ``waiting``: those that have not acknowledged it; null: it is not
    durable. ``attributes``: those of the sender that policies saw."""

    event: EventRow
    attributes: dict[str, Any] = {}
    receivers: list[str] = []
    waiting: list[str] | None = None
    steps: list[LoopStep] = []


class LoopTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What followed from an alert, oldest first."""

    rule: str
    about: str
    steps: list[LoopStep] = []


Decided = Sequence[protocol.DecisionRecord]  # of one event, by the notifiers
Numbered = tuple[int, messages.Alert]  # its place in the stream


def row(decided: Decided) -> EventRow:
    first = min(decided, key=lambda record: record.at_ms)
    event = first.event
    answered = _ANSWER.fullmatch(event.id)
    return EventRow(
        id=event.id,
        type=event.type,
        sender=event.sender,
        at_ms=event.at_ms or first.at_ms,
        address=event.address,
        content=dict(event.content),
        durable=any(record.sequence for record in decided),
        receivers=sum(record.count for record in decided),
        alert=int(answered[1]) if answered else None,
    )


def event_steps(decided: Decided, operations: Iterable[messages.Decision]) -> list[LoopStep]:
    """``operations``: of all of the last minutes; those for this event have its id."""
    event = row(decided)
    steps = [
        LoopStep(
            at_ms=event.at_ms,
            what="event",
            text=f"{event.sender} sent {event.type} to {event.address}",
            event=event.id,
        )
    ]
    steps += [
        LoopStep(
            at_ms=record.at_ms,
            what="matched",
            text=f"{record.notifier}: matching receivers: {record.count:,}",
            event=event.id,
        )
        for record in decided
    ]
    steps += [
        LoopStep(
            at_ms=record.at_ms,
            what=record.what,
            text=f"{record.target}: {record.why}",
            outcome=record.outcome.value,
            event=event.id,
        )
        for record in operations
        if record.details.get("id", "").rpartition(":")[2] == event.id
    ]
    return steps


def alert_steps(changes: Iterable[Numbered]) -> list[LoopStep]:
    return [
        LoopStep(
            at_ms=alert.at_ms,
            what="alert",
            text=f"{alert.rule} of {alert.about}: {alert_spans.in_words(alert.condition, alert.value)}"
            + (f"; {alert.reason}" if alert.reason else ""),
            outcome=alert.state.value,
        )
        for _, alert in changes
    ]


def in_order(steps: Iterable[LoopStep]) -> list[LoopStep]:
    return sorted(steps, key=lambda step: step.at_ms)


class EventHistory:
    """Events are read with the identity of the person, an operator; alerts are for all."""

    def __init__(self, source: read_model.ReadModel) -> None:
        self._feed = source.feed
        self._decided = StreamTail(protocol.STREAM_HISTORY, protocol.DecisionRecord, DECIDED)
        self._matched = StreamTail(protocol.STREAM_MATCHES, protocol.MatchRecord)
        self._alerts = StreamTail(pipeline_protocol.ALERTS_STREAM, messages.Alert)

    async def events(self, person: sessions.LoginSession) -> list[Decided]:
        """The latest events, the newest first, each with what the notifiers decided."""

        async def read() -> list[Decided]:
            decided: dict[str, list[protocol.DecisionRecord]] = {}
            bus = await self._feed.link.as_person(person.name, roles.Role.OPERATOR)
            for _, record in await self._decided.read(bus):
                decided.setdefault(record.event.id, []).append(record)
            return list(reversed(decided.values()))

        return await self._feed.cache.get("events", "notify", KEPT_S, read)

    async def trace(self, person: sessions.LoginSession, id: str) -> EventTrace:
        decided = next((own for own in await self.events(person) if own[0].event.id == id), None)
        if decided is None:
            raise errors.NotFound(f"there is no event {id[:100]!r} among the latest")
        event = row(decided)
        names = sorted({name for record in decided for name in record.to})
        steps = event_steps(decided, self._feed.decisions)
        if event.alert is not None:
            log = await self.alert_log()
            answered = next((alert for place, alert in log if place == event.alert), None)
            if answered is not None:
                steps += alert_steps(_changes_of(log, answered.rule, answered.about, since=event.alert))
        return EventTrace(
            event=event,
            attributes=dict(decided[0].event.attributes),
            receivers=names[:NAMES_MAX],
            waiting=await self._waiting(person, decided, names) if event.durable else None,
            steps=in_order(steps),
        )

    async def trace_loop(self, person: sessions.LoginSession, rule: str, about: str) -> LoopTrace:
        log = await self.alert_log()
        changes = _changes_of(log, rule, about)
        if not changes:
            raise errors.NotFound(f"there is no alert {rule!r} about {about!r} among the latest")
        places = {place for place, _ in changes}
        steps = alert_steps(changes)
        for decided in await self.events(person):
            if row(decided).alert in places:
                steps += event_steps(decided, self._feed.decisions)
        return LoopTrace(rule=rule, about=about, steps=in_order(steps))

    async def alert_log(self) -> list[Numbered]:
        """The latest changes of alerts with their places in the stream, oldest first."""

        return await self._feed.cache.get(
            "alert log", "alerts", ALERTS_KEPT_S, lambda: self._alerts.read(self._feed.link.bus)
        )

    async def _waiting(
        self, person: sessions.LoginSession, decided: Decided, names: Sequence[str]
    ) -> list[str]:
        """The receivers that owe an acknowledgement. Notifiers delete an event that none owes."""
        sequence = max(record.sequence for record in decided)
        bus = await self._feed.link.as_person(person.name, roles.Role.OPERATOR)
        stream = await bus.open_stream(protocol.STREAM_EVENTS)
        state = await stream.state()
        if state.first_sequence > sequence or not state.messages:
            return []
        acknowledged: set[str] = set()
        for _, record in await self._matched.read(bus):
            acknowledged.update(record.acked.get(sequence, ()))
        return [name for name in names if name not in acknowledged][:NAMES_MAX]


def _changes_of(log: Sequence[Numbered], rule: str, about: str, since: int = 0) -> list[Numbered]:
    return [
        (place, alert)
        for place, alert in log
        if (alert.rule, alert.about) == (rule, about) and place >= since
    ]


class StreamTail(Generic[M]):
    """The newest messages of a stream that are of a type, with their places. Each is read once: a page that
    is open while they change would read them all every few seconds."""

    def __init__(self, name: str, kind: type[M], subject: str | None = None) -> None:
        self._name, self._kind, self._subject = name, kind, subject
        self._kept: collections.deque[tuple[int, M, int]] = collections.deque()  # place, message, bytes
        self._next = 1

    async def read(self, bus: api.Bus) -> list[tuple[int, M]]:
        """None if the stream does not exist."""
        try:
            stream = await bus.open_stream(self._name)
        except errors.NotFound:
            return []
        state = await stream.state()
        newest = state.last_sequence
        if newest < self._next - 1:  # another stream
            self._kept.clear()
            self._next = 1
        kept, first = self._kept.copy(), max(state.first_sequence, newest - SEARCHED + 1, self._next)
        size = sum(item[2] for item in kept)
        if state.messages and first <= newest:
            async for stored in stream.read(first, newest, subject=self._subject, gaps=True):
                with contextlib.suppress(errors.MusterError):
                    message = messages.decode(stored.data, self._kind)
                    kept.append((stored.sequence, message, len(stored.data)))
                    size += len(stored.data)
                while kept and (size > BYTES_MAX or kept[0][0] <= newest - SEARCHED):
                    size -= kept.popleft()[2]
        if newest >= self._next:  # another read may have ended meanwhile, and have more
            self._kept, self._next = kept, newest + 1
        return [(place, message) for place, message, _ in kept]
