"""A shard's log and its snapshots: a snapshot of the receivers replaces the changes before it.

A snapshot stores receivers in columns, thousands in a message, and replay reads them in columns: a million in
seconds.  A snapshot may take many messages.  It is valid only if its last message is stored; replay skips an
incomplete one (its writer died, the stream was full) and uses the log before it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np

from muster.core import errors, messages
from muster.notify import authorities, models, protocol
from muster.notify.matcher import matcher

RECEIVERS: Final = 4000  # in a message; halved if they do not fit
BYTES_MAX: Final = 900_000

Part = Literal["", "begin", "part", "end"]


def encode_applied(
    entries: Sequence[tuple[str, Sequence[protocol.Change]]], epoch: int, snapshot: Part = ""
) -> bytes:
    return messages.encode(
        protocol.AppliedChanges(
            entries=tuple(
                protocol.ShardLogEntry(process=process, changes=tuple(changes))
                for process, changes in entries
            ),
            at_ms=int(time.time() * 1000),
            epoch=epoch,
            snapshot=snapshot,
        ),
        "msgpack",
    )


# -- writing


def snapshot(engine: matcher.Matcher, shard: protocol.Shard, epoch: int) -> Iterator[bytes]:
    """The receivers of a shard as messages. It may pause in between: only the shard's writer changes them."""
    yield encode_applied((), epoch, "begin")
    for number, table in enumerate(engine.tables):
        rows = table.rows_of(shard)
        for start in range(0, len(rows), RECEIVERS):
            yield from _written(engine, number, rows[start : start + RECEIVERS], epoch)
    yield encode_applied((), epoch, "end")


def _written(engine: matcher.Matcher, table: int, rows: Any, epoch: int) -> Iterator[bytes]:
    joins = _joins(engine, table, rows)
    try:
        data = encode_applied(joins, epoch, "part")
    except messages.MessageTooLarge:
        data = b""
    if 0 < len(data) <= BYTES_MAX:
        yield data
    elif len(rows) == 1:
        yield from _split(joins[0], epoch)
    else:
        middle = len(rows) // 2
        yield from _written(engine, table, rows[:middle], epoch)
        yield from _written(engine, table, rows[middle:], epoch)


def _split(entry: tuple[str, list[protocol.JoinReceivers]], epoch: int) -> Iterator[bytes]:
    """A receiver that is too large for a message: it joins without values, and each of them follows."""
    process, (join,) = entry
    yield encode_applied([(process, [msgspec.structs.replace(join, values={})])], epoch, "part")
    for name, cells_ in join.values.items():
        update = protocol.UpdateReceivers(receivers=join.receivers, values={name: cells_})
        yield encode_applied([(process, [update])], epoch, "part")


def _joins(engine: matcher.Matcher, number: int, rows: Any) -> list[tuple[str, list[protocol.JoinReceivers]]]:
    table = engine.tables[number]
    by_process: dict[str, tuple[list[str], list[int]]] = {}
    for place, receiver in enumerate(engine.names([matcher.MatchResult(number, rows)])):
        process, _, name = receiver.partition("/")
        names, places = by_process.setdefault(process, ([], []))
        names.append(name)
        places.append(place)
    cells = table.cells(rows)
    held, durable, changed_s = table.policy_of[rows], table.durable(rows), table.changed_s[rows]
    entries: list[tuple[str, list[protocol.JoinReceivers]]] = []
    for process, (names, places) in by_process.items():
        numbers, which = np.unique(held[places], return_inverse=True)
        texts = ("" if policy < 0 else engine.policies.text(policy) for policy in numbers.tolist())
        join = protocol.JoinReceivers(
            receivers=tuple(names),
            model=table.model.name,
            values={
                name: [protocol.cell(listed[place]) for place in places]
                for name, listed in cells.items()
                if not models.restricted(name)
            },
            policies=tuple(texts),
            which=which.tolist(),
            durable=np.flatnonzero(durable[places]).tolist(),
            changed_s=changed_s[places].tolist(),
        )
        entries.append((process, [join]))
    return entries


# -- reading


class _Joining:
    """Receivers of one model that join together, in columns."""

    def __init__(self) -> None:
        self.receivers: list[str] = []
        self._columns: dict[str, list[Any]] = {}
        self._policies: dict[str, int] = {}  # text -> number
        self._which: list[int] = []
        self._durable: list[int] = []
        self._changed_s: list[int] = []

    def add(self, process: str, joins: protocol.JoinReceivers, at_s: int) -> None:
        before, count = len(self.receivers), len(joins.receivers)
        self.receivers += [protocol.participant_id(process, name) for name in joins.receivers]
        for name in joins.values.keys() - self._columns.keys():
            self._columns[name] = [None] * before
        for name, column in self._columns.items():
            column += cells(joins.values[name]) if name in joins.values else [None] * count
        numbers = [self._policies.setdefault(text, len(self._policies)) for text in joins.policies]
        self._which += [numbers[number] for number in joins.which] or numbers[:1] * count
        self._durable += [before + place for place in joins.durable]
        self._changed_s += joins.changed_s or [at_s] * count

    def join(self, engine: matcher.Matcher, model: models.Model, shard: protocol.Shard) -> None:
        durable = np.zeros(len(self.receivers), np.bool_)
        durable[self._durable] = True
        engine.join_many(
            self.receivers,
            model,
            {name: listed for name, listed in self._columns.items() if name in model.attributes},
            list(self._policies),
            np.array(self._which, np.int64),
            durable=durable,
            shard=shard,
            at_s=np.array(self._changed_s, np.uint32),
        )


class ShardReplay:
    """Replays the log of a shard into a matcher: call `take` for each message, then `finish`."""

    def __init__(
        self, engine: matcher.Matcher, knows: authorities.AuthorityView, shard: protocol.Shard
    ) -> None:
        self._engine = engine
        self._knows = knows
        self._shard = shard
        self._joining: dict[str, _Joining] = {}  # by model
        self._there: set[str] = set()  # receivers in ``_joining``
        self._snapshot: list[protocol.AppliedChanges] | None = None
        self.since_snapshot = 0
        self.bytes = 0
        self.refused: list[errors.MusterError] = []

    def take(self, data: bytes) -> None:
        message = messages.decode(data, protocol.AppliedChanges)
        self.since_snapshot += 1
        self.bytes += len(data)
        match message.snapshot:
            case "begin":
                self._snapshot = []
            case "part":
                if self._snapshot is not None:
                    self._snapshot.append(message)
            case "end":
                if self._snapshot is not None:
                    self._replace(self._snapshot)
                    self._snapshot = None
            case _:
                self._snapshot = None
                self._changes(message)

    def finish(self) -> None:
        for model, joining in self._joining.items():
            try:
                joining.join(self._engine, self._knows.vocabulary.receiver_model(model), self._shard)
            except errors.MusterError as error:
                self.refused.append(error)
        self._joining.clear()
        self._there.clear()

    def _replace(self, snapshot: list[protocol.AppliedChanges]) -> None:
        self._engine.leave_shard(self._shard)
        self._joining.clear()
        self._there.clear()
        self.since_snapshot = self.bytes = 0
        for message in snapshot:
            self._changes(message)

    def _changes(self, message: protocol.AppliedChanges) -> None:
        for entry in message.entries:
            for change in entry.changes:
                if isinstance(change, protocol.JoinReceivers | protocol.JoinReceiver):
                    self._join(entry.process, joins_of(change), message.at_ms // 1000)
                    continue
                self.finish()
                try:
                    apply(
                        self._engine, self._knows, self._shard, entry.process, change, message.at_ms // 1000
                    )
                except errors.MusterError as error:
                    self.refused.append(error)

    def _join(self, process: str, joins: protocol.JoinReceivers, at_s: int) -> None:
        names = {protocol.participant_id(process, name) for name in joins.receivers}
        if not self._there.isdisjoint(names):
            self.finish()
        self._there |= names
        self._joining.setdefault(joins.model, _Joining()).add(process, joins, at_s)


def joins_of(change: protocol.JoinReceiver | protocol.JoinReceivers) -> protocol.JoinReceivers:
    if isinstance(change, protocol.JoinReceivers):
        return change
    return protocol.JoinReceivers(
        receivers=(change.receiver,),
        model=change.model,
        values={name: [value] for name, value in change.state.items()},
        policies=(change.policy,),
        durable=[0] if change.delivery == "durable" else [],
    )


def cells(listed: list[protocol.Value]) -> list[Any]:
    return [frozenset(cell) if cell.__class__ is tuple else cell for cell in listed]


def apply(
    engine: matcher.Matcher,
    knows: authorities.AuthorityView,
    shard: protocol.Shard,
    process: str,
    change: protocol.Change,
    at_s: int,
) -> None:
    """Apply a change that was validated by this notifier or a former holder."""
    match change:
        case protocol.JoinReceiver():
            model = knows.vocabulary.receiver_model(change.model)
            engine.join(
                protocol.participant_id(process, change.receiver),
                model,
                model.require(protocol.from_wire(change.state)),
                change.policy,
                durable=change.delivery == "durable",
                shard=shard,
                at_s=at_s,
            )
        case protocol.JoinReceivers():
            joining = _Joining()
            joining.add(process, change, at_s)
            joining.join(engine, knows.vocabulary.receiver_model(change.model), shard)
        case protocol.UpdateReceivers():
            columns = {name: cells(listed) for name, listed in change.values.items()}
            engine.update(receivers_of(process, change), columns, at_s)
        case protocol.SetReceiverPolicy():
            receiver = protocol.participant_id(process, change.receiver)
            engine.set_policy(receiver, change.policy, at_s)
        case protocol.LeaveReceiver():
            receiver = protocol.participant_id(process, change.receiver)
            if receiver in engine:
                engine.leave(receiver)


def receivers_of(process: str, change: protocol.Change) -> list[str]:
    names = (
        change.receivers
        if isinstance(change, protocol.UpdateReceivers | protocol.JoinReceivers)
        else (change.receiver,)
    )
    return [f"{process}/{name}" for name in names]
