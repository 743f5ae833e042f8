"""Durable events: stored, matched once, recorded, delivered, and delivered again until acknowledged.

Every notifier follows the stream of events in order.  For each shard that it holds, it finds the receivers of
an event and stores them before it delivers.  So the next holder of the shard delivers to the same receivers,
whatever has changed since, and delivers again only if an acknowledgement is missing.  The client drops
duplicates.

Other notifiers rely on what is recorded (`Shard.floor`), never on state that only this notifier has: an event
is deleted when the record of no shard needs it any more.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator, Iterable

from muster.bus import api
from muster.bus.rpc import requests
from muster.core import errors, messages, subjects
from muster.notify import protocol
from muster.notify.matcher import grant_scopes
from muster.notify.notifier import decision_log, event_router, grants
from muster.notify.notifier import state as common_
from muster.notify.notifier.shards import members
from muster.notify.notifier.shards import shard as shards_shard
from muster.predicates import ast

PART = protocol.PART
EVENT = subjects.log_subject(PART, "event")
IN_FLIGHT = 4096
OWING_MAX = 2_000_000  # pending acknowledgements; with more, durable events are refused
OWING_OF_PROCESS_MAX = OWING_MAX // 4  # with more, the oldest events of its receivers are given up
# Before that, a process that is above this limit has so many times `ack_wait_s` to acknowledge.
GIVE_UP_AFTER_WAITS = 3
RECOVERED = 0.9  # share of the limit below which a process has that time again
REDELIVERED_AT_ONCE = 1000
EVENTS_REMEMBERED = 10_000
BYTES_REMEMBERED = 64 << 20
RETRY_S = 0.5


class DurableEvents:
    def __init__(
        self,
        common: common_.NotifierState,
        others: members.NotifierMembers,
        grant_view: grants.GrantView,
        router: event_router.EventRouter,
        past: decision_log.DecisionLog,
    ) -> None:
        self._common = common
        self._members = others
        self._grants = grant_view
        self._router = router
        self._history = past
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._dirty = asyncio.Event()
        self._followed = 0
        self._following: asyncio.Task[None] | None = None
        self._remembered: collections.OrderedDict[int, tuple[protocol.AdmittedEvent, int]] = (
            collections.OrderedDict()
        )
        self._remembered_bytes = 0
        self._above_since: dict[str, float] = {}  # processes above their limit
        self._lost = 0  # up to here, events that were lost are counted

    async def start(self, events: api.Stream, matches: api.Stream) -> None:
        self._events, self._matches = events, matches

    # -- storing

    async def store(
        self, event: protocol.AdmittedEvent, waiting: asyncio.Future[protocol.NotifyReply]
    ) -> None:
        """Store an event, then reply. Returns when there is room for the next event."""
        if self._members.is_full:
            raise errors.Overloaded(
                f"{OWING_MAX:,} acknowledgements are pending already",
                hint="remove receivers that do not return (muster notify leave)",
            )
        await self._room.acquire()
        self._common.tasks.spawn("store", self._store(event, waiting))

    async def _store(
        self, event: protocol.AdmittedEvent, waiting: asyncio.Future[protocol.NotifyReply]
    ) -> None:
        try:
            sequence = await self._events.publish(
                EVENT, messages.encode(event, "msgpack"), message_id=f"{event.sender}:{event.id}"
            )
        except errors.MusterError as error:
            common_.finish(waiting, error)
        except BaseException:
            common_.finish(waiting, common_.moving())
            raise
        else:  # an `api.Duplicate` cannot be encoded
            common_.finish(waiting, protocol.NotifyReply(sequence=int(sequence)))
        finally:
            self._room.release()

    # -- gaining a shard

    async def replay(self, held: shards_shard.Shard) -> None:
        """Read the records of a shard, and append one of our own: the former holder can append no more."""
        while True:
            async for data, sequence in read(self._matches, held.matched_subject, held.matched_sequence + 1):
                held.pending.replay(messages.decode(data, protocol.MatchRecord))
                held.matched_sequence = sequence
            if not held.matched_sequence:
                held.pending.position = (await self._events.state()).last_sequence
            held.require_lease()
            with contextlib.suppress(errors.Conflict):
                await self._replace(held)
                return

    async def _replace(self, held: shards_shard.Shard) -> None:
        """Replace all records with the pending acknowledgements."""
        records = held.pending.full_records(held.lease.epoch)
        await self._append(held, records)
        held.matched_bytes = 0
        await self._matches.purge(
            subject=held.matched_subject, before=held.matched_sequence - len(records) + 1
        )

    async def _append(self, held: shards_shard.Shard, records: list[protocol.MatchRecord]) -> None:
        floor = held.pending.floor
        batch = [
            api.OutgoingMessage(
                held.matched_subject,
                messages.encode(record, "msgpack"),
                message_id=next(self._common.record_ids),
                expected_last_subject_sequence=held.matched_sequence if not place else None,
            )
            for place, record in enumerate(records)
        ]
        held.matched_sequence = int(await self._matches.publish_batch(batch))
        held.matched_bytes += sum(len(message.data) for message in batch)
        held.floor, held.recorded = max(held.floor, floor), records[-1].position

    # -- matching, in the order of the stream

    def follow(self) -> None:
        """Follow the stream of events for all held shards; start earlier for a new shard that is behind."""
        first = 1 + min(held.pending.position for held in self._common.held.values())
        if self._following is not None and not self._following.done():
            if first > self._followed:
                return
            self._following.cancel()
        self._followed = first - 1
        self._following = self._common.tasks.loop("event log", self._follow)

    async def _follow(self) -> None:
        first = self._followed + 1  # after a failure as well
        while True:
            try:
                async with self._events.follow(first, gaps=True) as following:
                    async for stored in following:
                        self._followed = stored.sequence
                        first = stored.sequence + 1
                        self._on_stored(stored)
            except errors.Dropped as error:
                # Events are purged when no shard needs them.  If a shard that is held here still needed
                # them, they are lost; otherwise a shard that has moved away was the last to need them.
                first = error.last + 1
                # Reading starts again for each shard that is gained: a loss is counted once.
                lost = error.last - max(error.first - 1, self._lost)
                if lost > 0 and any(
                    held.pending.position < error.last for held in self._common.held.values()
                ):
                    self._lost = error.last
                    self._common.count("events-lost", lost)
                    common_.events.warning("events-lost", first=error.first, last=error.last)
            except errors.Unavailable as error:
                common_.events.warning("events-not-followed", error=error)
                await asyncio.sleep(RETRY_S)

    def _on_stored(self, stored: api.StoredMessage) -> None:
        try:
            event = messages.decode(stored.data, protocol.AdmittedEvent)
            address = self._router.address(event.address)
        except errors.MusterError as error:
            self._common.count("bad-event")
            common_.events.warning("bad-event", sequence=stored.sequence, error=error)
            return
        self._remember(stored, event)
        self._match(stored.sequence, event, address)

    def _match(self, sequence: int, event: protocol.AdmittedEvent, address: ast.Condition) -> None:
        late = {s: held for s, held in self._common.held.items() if held.pending.position < sequence}
        if not late:
            return
        self._grants.expire()
        engine = self._common.engine
        reached: list[str] = []
        by_shard: dict[protocol.Shard, tuple[list[str], list[str]]] = {}
        for result in grant_scopes.find(engine, event, address):
            table = engine.tables[result.table]
            shards, durable = table.shard_of[result.rows].tolist(), table.durable(result.rows).tolist()
            for receiver, shard, is_durable in zip(engine.names([result]), shards, durable, strict=True):
                if shard in late:
                    by_shard.setdefault(shard, ([], []))[not is_durable].append(receiver)
                    reached.append(receiver)
        for shard, held in late.items():
            receivers, passing = by_shard.get(shard, ((), []))
            held.pending.match(sequence, receivers)
            if passing:
                held.passing[sequence] = passing
        self._history.decided(event, sequence, reached)
        self._dirty.set()

    # -- recording, then delivering

    async def record_all(self) -> None:
        """Store the receivers of events before delivery; everything that is waiting goes into one batch."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            dirty = [held for held in self._common.held.values() if held.lease.held and held.has_unrecorded]
            await asyncio.gather(*(self._record(held) for held in dirty))
            await asyncio.sleep(0)

    async def _record(self, held: shards_shard.Shard) -> None:
        held.unstored += held.pending.records(held.lease.epoch)
        passing, held.passing = held.passing, {}
        try:
            await self._append(held, held.unstored)
        except errors.LimitExceeded as error:
            # Nothing was stored, and these records must be stored before any others.
            common_.events.warning("matches-full", shard=held.shard, error=error)
            self._common.count("matches-full")
            held.passing = {**passing, **held.passing}
            await asyncio.sleep(RETRY_S)
            self._dirty.set()
            return
        except errors.MusterError as error:
            # Another notifier holds the shard, or the outcome is unknown: read the shard again.
            common_.events.warning("record-refused", shard=held.shard, error=error)
            self._common.count("record-refused")
            held.uncertain.set()
            return
        records, held.unstored = held.unstored, []
        try:
            if held.matched_bytes > self._common.settings.stream_bytes // protocol.SHARDS // 4:
                await self._replace(held)
        except errors.MusterError as error:
            common_.events.warning("record-refused", shard=held.shard, error=error)
            held.uncertain.set()
            return
        for sequence, receivers in passing.items():
            await self._deliver_once(sequence, receivers)
        for record in records:
            for sequence, matched in record.matched.items():
                owing = held.pending.owed.get(sequence, ())
                await self._deliver(held, sequence, [receiver for receiver in matched if receiver in owing])

    async def _deliver_once(self, sequence: int, receivers: list[str]) -> None:
        with contextlib.suppress(errors.MusterError):
            event = await self._event(sequence)
            if event is not None:
                await self._router.deliver(event, receivers)

    async def _deliver(self, held: shards_shard.Shard, sequence: int, receivers: list[str]) -> None:
        if not receivers:
            return
        held.sent_at[sequence] = time.monotonic()
        try:
            event = await self._event(sequence)
            if event is None:
                self._common.count("event-gone")
                held.pending.drop(sequence)
                return
            for process, names in event_router.by_process(receivers):
                if not held.lease.held:
                    return
                delivered = protocol.EventDelivery(
                    to=tuple(names),
                    event=event,
                    shard=held.shard,
                    epoch=held.lease.epoch,
                    sequence=sequence,
                    floor=held.floor,
                )
                await self._common.bus.publish(
                    subjects.to_identity(PART, process, "event"), messages.encode(delivered)
                )
        except errors.MusterError as error:  # it is delivered again after `ack_wait_s`
            common_.events.warning("not-delivered", sequence=sequence, error=error)
            return
        self._common.count("delivered-durable", len(receivers))

    def _remember(self, stored: api.StoredMessage, event: protocol.AdmittedEvent) -> None:
        if stored.sequence in self._remembered:
            return
        self._remembered[stored.sequence] = (event, len(stored.data))
        self._remembered_bytes += len(stored.data)
        while len(self._remembered) > EVENTS_REMEMBERED or self._remembered_bytes > BYTES_REMEMBERED:
            _, (_, size) = self._remembered.popitem(last=False)
            self._remembered_bytes -= size

    async def _event(self, sequence: int) -> protocol.AdmittedEvent | None:
        if sequence in self._remembered:
            return self._remembered[sequence][0]
        try:
            stored = await self._events.get(sequence)
        except errors.NotFound:
            return None
        event = messages.decode(stored.data, protocol.AdmittedEvent)
        self._remember(stored, event)
        return event

    # -- acknowledgements

    def acknowledged(self, pattern: str, message: api.Message) -> None:
        """Handle receipts. They get no reply: an event without acknowledgement is delivered again."""
        caller = requests.accept(message, pattern, self._common.refused, needs_reply=False)
        if caller is None:
            self._common.count("no-request")
            return
        process = caller.identity
        try:
            held = self._common.held_of(message.subject)
            acked = messages.decode(message.data, protocol.EventAcks)
        except errors.MusterError as error:
            self._common.count(error.code)
            return
        for sequence, names in acked.events.items():
            for name in names:
                if held.pending.acknowledge(sequence, protocol.participant_id(process, name)):
                    self._common.count("acknowledged")
        self._dirty.set()

    def joined(self, held: shards_shard.Shard, receivers: Iterable[str]) -> None:
        """Make the pending events of receivers due now: they may have returned."""
        returned = frozenset(receivers) if held.pending.owed else ()
        for sequence, owing in held.pending.owed.items():
            if not owing.isdisjoint(returned):
                held.sent_at.pop(sequence, None)

    def left(self, held: shards_shard.Shard, receiver: str) -> None:
        held.pending.forget(receiver)
        self._dirty.set()

    async def redeliver(self) -> None:
        settings = self._common.settings
        while True:
            await asyncio.sleep(min(1.0, settings.ack_wait_s / 2))
            limit = time.monotonic() - settings.ack_wait_s
            self._give_up()
            for held in list(self._common.held.values()):
                if not held.lease.held:
                    continue
                if held.has_unrecorded:  # matched while the lease was suspended
                    self._dirty.set()
                for sequence in held.due(limit, REDELIVERED_AT_ONCE):
                    if owing := held.pending.owed.get(sequence):
                        self._common.count("redelivered", len(owing))
                        await self._deliver(held, sequence, sorted(owing))
                for sequence in [seq for seq in held.sent_at if seq not in held.pending.owed]:
                    del held.sent_at[sequence]
            with contextlib.suppress(errors.MusterError):
                await self._forget_events()

    def _give_up(self) -> None:
        """A process that does not acknowledge must not make the notifier refuse the events of all others.

        While there is room for others, it has time to acknowledge: a burst alone is no reason to give up.
        """
        shards = [held.pending for held in self._common.held.values() if held.lease.held]
        owing: collections.Counter[str] = collections.Counter()
        for pending in shards:
            owing.update(pending.owing_of)
        now, patience_s = time.monotonic(), GIVE_UP_AFTER_WAITS * self._common.settings.ack_wait_s
        self._above_since = {
            process: self._above_since.get(process, now)
            for process, count in owing.items()
            if count > OWING_OF_PROCESS_MAX
            or (process in self._above_since and count > RECOVERED * OWING_OF_PROCESS_MAX)
        }
        for process, since in self._above_since.items():
            count = owing[process]
            excess = count - OWING_OF_PROCESS_MAX
            if excess <= 0 or (now - since < patience_s and owing.total() < OWING_MAX):
                continue
            # Each shard in proportion, so that it is the oldest events everywhere.
            given_up = sum(
                pending.give_up(process, -(-excess * pending.owing_of[process] // count))
                for pending in shards
                if process in pending.owing_of
            )
            self._common.count("given-up", given_up)
            common_.events.warning("acknowledgements-given-up", process=process, count=given_up)
            self._dirty.set()

    async def _forget_events(self) -> None:
        """Delete events that no shard needs any more. The holder of shard 0 does this."""
        if 0 not in self._common.held:
            return
        floors = self._members.floors()
        if len(floors) == protocol.SHARDS and (floor := min(floors.values())) > 1:
            await self._events.purge(before=floor)


async def read(stream: api.Stream, subject: str, first: int) -> AsyncIterator[tuple[bytes, int]]:
    """Yield the messages of a subject from a sequence to the current end."""
    while True:
        state = await stream.state()
        start = max(first, state.first_sequence)
        if not state.messages or start > state.last_sequence:
            return
        try:
            async for stored in stream.read(start, state.last_sequence, subject=subject):
                first = stored.sequence + 1
                yield stored.data, stored.sequence
            return
        except errors.NotFound:
            # Another shard purged its own messages at the front. Those of this shard are purged only here.
            continue
