"""A notifier: holds receivers, decides who gets an event, and sees to it that they do.

Receivers are spread over shards, shards over the notifiers there are (`placement`), each under a lease.  A
notifier that gains a shard reads the shard's log, and only then listens for it; one whose lease is in doubt
(its connection is away) decides nothing.  An event goes to the shard of its sender.  There the sender's
attributes are known; the event is checked, and passed to each notifier that may hold somebody it matches.

A durable event is stored first.  Every notifier follows that stream in order, matches, stores who gets the
event, delivers, and delivers again until each of them has acknowledged.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Coroutine, Iterable
from typing import Any

import msgspec

from muster.bus import api, leases
from muster.core import errors, log, messages, metrics, subjects
from muster.notify import engine as engines
from muster.notify import fair, holding, known, placement, plain, protocol, questions, summaries
from muster.notify import model as models
from muster.notify import settings as settings_
from muster.predicates import ast
from muster.trust import documents

events = log.Events("notify")
_JSON = msgspec.json.Encoder()

PART = protocol.PART
GONE_BEATS = 5
NAMES_MAX = 4000  # in one delivery
EVERYBODY = "all"
BY = "Muster-Notifier"
FRESH_BEATS = 3
DURABLE_IN_FLIGHT = 4096
REDELIVERED_AT_ONCE = 1000
EVENTS_REMEMBERED = 10_000
CHANGES_REMEMBERED = 100_000
RECORDS_MAX = 5000  # of matches, before they are replaced by what is still owed


class Notifier:
    def __init__(
        self,
        bus: api.Bus,
        settings: settings_.Notify | None = None,
        *,
        root: str = "",
        domain: str = "",
        replicas: int = 1,
        measure: metrics.Metrics | None = None,
        kernels: Any = None,
    ) -> None:
        """``root``: the public key that grants must lead to; without one, none is believed."""
        self.name = bus.identity
        self._bus = bus
        self._settings = settings or settings_.Notify()
        self._replicas = replicas
        self.known = known.Known(root=root, domain=domain)
        self._hurries = kernels is None  # to the fastest kernels, once they are loaded
        self.engine = engines.Engine(kernels=kernels or plain)
        self.counts: collections.Counter[str] = collections.Counter()
        self._counter = (measure or metrics.Metrics()).counter(
            "notify_events", "What happened to events and changes, by outcome.", ("outcome",)
        )
        self.held: dict[protocol.Shard, holding.Holding] = {}
        self._members: dict[str, tuple[float, protocol.Summary]] = {}
        self._told: protocol.Summary | None = None
        self._gaining: dict[protocol.Shard, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: list[api.Subscription] = []
        self._queue: fair.FairQueue[tuple[str, api.Message]] = fair.FairQueue(self._settings.sender_pending)
        self._room = asyncio.Semaphore(DURABLE_IN_FLIGHT)
        self._dirty = asyncio.Event()
        self._moved = asyncio.Event()  # members or shards changed
        self._followed = 0
        self._following: asyncio.Task[None] | None = None
        self._remembered: collections.OrderedDict[int, protocol.Event] = collections.OrderedDict()
        self._addresses: dict[str, ast.Condition] = {}
        self._known_revision = 0
        self._known_changed = asyncio.Event()
        self._history: list[api.Outgoing] = []
        self._expiries: dict[str, float] = {}
        self.since_ms: dict[str, int] = {}  # when a party last changed, of those that did lately

    # -- life

    async def start(self) -> None:
        wanted = protocol.streams(max_bytes=self._settings.stream_bytes, replicas=self._replicas)
        self._parties, self._events, self._history_stream = [await self._bus.stream(one) for one in wanted]
        self._bucket = await self._bus.key_value(
            api.KeyValueSettings(protocol.BUCKET, replicas=self._replicas)
        )
        ready = asyncio.Event()
        self._spawn(self._watch_known(ready))
        await ready.wait()
        self._leases = await leases.Leases.open(
            self._bus, ttl_s=self._settings.lease_s, replicas=self._replicas
        )
        await self._listen(subjects.announced(PART, "notifier"), self._heard)
        await self._listen(subjects.announced(PART, "known"), self._asked_known)
        for hearer in (self.name, EVERYBODY):
            await self._listen(subjects.logged(PART, "match", hearer), self._passed_on)
        await self._listen(subjects.said_by(PART, "*", "read", ">"), self._asked)
        await self._listen(subjects.said_by(PART, "*", "define"), self._defined, group=PART)
        await self._listen(subjects.said_by(PART, "*", "trust"), self._presented, group=PART)
        for work in (
            self._beat(),
            self._place(),
            self._admit_all(),
            self._record_all(),
            self._deliver_again(),
            self._keep_history(),
        ):
            self._spawn(work)
        if self._hurries:
            self._spawn(self._hasten())
        events.info("notifier-started", notifier=self.name)

    async def _hasten(self) -> None:
        """In a thread, after the start: meanwhile the plain kernels decide the same, only slower."""
        self.engine.use(await asyncio.to_thread(engines.warmed))

    async def stop(self) -> None:
        with contextlib.suppress(errors.MusterError):
            await self._say(leaving=True)
        for subscription in self._subscriptions:
            await subscription.close()
        for held in self.held.values():
            for subscription in held.subscriptions:
                await subscription.close()
        tasks = [*self._tasks, *self._gaining.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if hasattr(self, "_leases"):
            await self._leases.close()
        self.held.clear()

    async def __aenter__(self) -> Notifier:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def serving(self, shards: Iterable[protocol.Shard] = range(protocol.SHARDS)) -> None:
        """Returns when this notifier holds these shards."""
        wanted = set(shards)
        while not wanted <= set(self.held):
            self._moved.clear()
            await self._moved.wait()

    @property
    def task_failed(self) -> BaseException | None:
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception():
                return task.exception()
        return None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"notifier {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._count("internal-error")
            events.error("task-failed", error=error)

    async def _listen(self, subject: str, handler: api.Handler, *, group: str | None = None) -> None:
        self._subscriptions.append(await self._bus.subscribe(subject, handler=handler, group=group))

    def _count(self, outcome: str, number: int = 1) -> None:
        self.counts[outcome] += number
        self._counter.add(number, outcome=outcome)

    async def _answer(self, message: api.Message, process: str, answer: messages.Message) -> None:
        # Nowhere but to the asker's own inbox: the broker does not check what reply subject it names.
        if message.reply and message.reply.startswith(f"{subjects.inbox(process)}."):
            with contextlib.suppress(errors.Unavailable):
                await message.respond(messages.encode(answer))

    def _reply(self, message: api.Message, process: str, answer: messages.Message) -> None:
        self._spawn(self._answer(message, process, answer))

    # -- what all notifiers know

    async def _watch_known(self, ready: asyncio.Event) -> None:
        async with await self._bucket.watch() as watch:
            async for entry in watch:
                if entry is None:
                    ready.set()
                    continue
                if entry.value is not None:
                    try:
                        self.known.take(entry.key, entry.value)
                    except (errors.MusterError, msgspec.MsgspecError, documents.No) as error:
                        self._count("bad-record")
                        events.warning("bad-record", key=entry.key, error=error)
                self._addresses.clear()
                for held in self.known.vocabulary.parties.values():
                    self.engine.define(held)
                if entry.key.startswith(("grant.", "revoked.")):
                    self._trust_changed()
                self._known_revision = entry.revision
                self._known_changed.set()

    async def _defined(self, message: api.Message) -> None:
        process = subjects.sender_of(message.subject)
        try:
            define = messages.decode(message.data, protocol.Define)
            key = self.known.model_key(define)
            revision = await self._bucket.put(key, messages.encode(define))
            await self._everybody_knows(revision)
        except errors.MusterError as error:
            self._count(error.code)
            await self._answer(message, process, _refusal(error))
        else:
            await self._answer(message, process, protocol.Answer(sequence=revision))

    async def _presented(self, message: api.Message) -> None:
        process = subjects.sender_of(message.subject)
        try:
            present = messages.decode(message.data, protocol.Present)
            if present.revocations:
                key, value = self.known.revocation_key(present.revocations), present.revocations.encode()
            else:
                key = self.known.grant_key(present.chain, now=time.time())
                value = _JSON.encode(present.chain)
            revision = await self._bucket.put(key, value)
            await self._everybody_knows(revision)
        except errors.MusterError as error:
            self._count(error.code)
            await self._answer(message, process, _refusal(error))
        else:
            await self._answer(message, process, protocol.Answer(sequence=revision))

    async def _everybody_knows(self, revision: int) -> None:
        """Wait until this notifier and the others have seen a revision of the bucket."""
        await self._until_known(revision)
        others = len(self._others())
        if others:
            await self._bus.gather(
                subjects.announced(PART, "known"), str(revision).encode(), enough=others + 1, timeout_s=5.0
            )

    async def _until_known(self, revision: int) -> None:
        while self._known_revision < revision:
            self._known_changed.clear()
            await self._known_changed.wait()

    def _asked_known(self, message: api.Message) -> None:
        async def when_known() -> None:
            with contextlib.suppress(ValueError, errors.MusterError):
                await self._until_known(int(message.data))
                await message.respond(b"known")

        self._spawn(when_known())

    # -- who else is there, and who holds what

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(errors.Unavailable):
                await self._say()
            self._expire()
            self._moved.set()
            await asyncio.sleep(self._settings.beat_s)

    async def _say(
        self, *, leaving: bool = False, confirmed: bool = False, also: tuple[protocol.Shard, ...] = ()
    ) -> None:
        """What this notifier holds, to the others; ``confirmed``: until they have all heard it."""
        floors = {shard: held.pending.floor for shard, held in self.held.items()}
        accepts = self.engine.policies.accepts()
        summary = protocol.Summary(
            notifier=self.name,
            shards=() if leaving else (*self.held, *also),
            leaving=leaving,
            floors=floors,
            words=summaries.words_of(self.engine),
            accepts=None if accepts is None else tuple(sorted(accepts)),
        )
        self._told = summary
        subject, data = subjects.announced(PART, "notifier"), messages.encode(summary)
        if not confirmed:
            await self._bus.publish(subject, data)
            return
        # Whoever does not answer is gone soon, and then nobody waits for it.
        while others := len(self._others()):
            answers = await self._bus.gather(subject, data, enough=others, timeout_s=self._settings.beat_s)
            if len(answers) >= others:
                return

    def _heard(self, message: api.Message) -> None:
        try:
            summary = messages.decode(message.data, protocol.Summary)
        except errors.MusterError:
            self._count("malformed")
            return
        if summary.notifier == self.name:
            return
        new = summary.notifier not in self._members
        if summary.leaving:
            self._members.pop(summary.notifier, None)
        else:
            self._members[summary.notifier] = (time.monotonic(), summary)
        if new or summary.leaving:
            self._moved.set()
        if message.reply:
            self._spawn(self._confirm(message))

    async def _confirm(self, message: api.Message) -> None:
        with contextlib.suppress(errors.Unavailable):
            await message.respond(b"heard")

    def _others(self) -> list[str]:
        limit = time.monotonic() - GONE_BEATS * self._settings.beat_s
        for name in [name for name, (at, _) in self._members.items() if at < limit]:
            del self._members[name]
        return list(self._members)

    async def _place(self) -> None:
        """Gain the shards that are ours to hold, give up those that are not."""
        while True:
            self._moved.clear()
            members = [self.name, *self._others()]
            for shard in range(protocol.SHARDS):
                ours = placement.holder_of(shard, members) == self.name
                task = self._gaining.get(shard)
                if ours and task is None:
                    task = self._gaining[shard] = asyncio.create_task(self._tenure(shard))
                    task.add_done_callback(lambda done, shard=shard: self._tenure_ended(shard, done))  # type: ignore[misc]
                elif not ours and task is not None:
                    task.cancel()
            await self._moved.wait()

    def _tenure_ended(self, shard: protocol.Shard, task: asyncio.Task[None]) -> None:
        self._gaining.pop(shard, None)
        if not task.cancelled() and (error := task.exception()):
            events.warning("shard-lost", shard=shard, error=error)
        self._moved.set()

    async def _tenure(self, shard: protocol.Shard) -> None:
        lease = await self._leases.acquire(protocol.lease_of(shard))
        held = holding.Holding(shard, lease)
        writer: asyncio.Task[None] | None = None
        try:
            await self._replay(held)
            for kind, handler in (
                ("change", self._changed),
                ("event", self._sent),
                ("ack", self._acknowledged),
            ):
                held.subscriptions.append(
                    await self._bus.subscribe(subjects.said_by(PART, "*", kind, str(shard)), handler=handler)
                )
            await self._say(confirmed=True, also=(shard,))
            self.held[shard] = held
            self._follow_from(held.pending.position + 1)
            self._moved.set()
            events.info("shard-gained", shard=shard, epoch=lease.epoch, parties=len(self.engine))
            writer = asyncio.create_task(self._write(held))
            lost = asyncio.create_task(lease.lost.wait())
            await asyncio.wait([writer, lost], return_when=asyncio.FIRST_COMPLETED)
            lost.cancel()
            if writer.done() and not writer.cancelled() and (error := writer.exception()):
                raise error
        finally:
            self.held.pop(shard, None)
            for subscription in held.subscriptions:
                await subscription.close()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            for party in [party for party in self.engine.parties() if protocol.shard_of(party) == shard]:
                self.engine.leave(party)
            await lease.release()

    async def _replay(self, held: holding.Holding) -> None:
        """Everything the shard's logs say."""
        shard = held.shard
        for party in [party for party in self.engine.parties() if protocol.shard_of(party) == shard]:
            self.engine.leave(party)
        async for stored in _read(self._parties, held.subject):
            kept = messages.decode(stored.data, protocol.Kept)
            held.sequence = stored.sequence
            held.since_snapshot += 1
            if kept.reset:
                held.since_snapshot = 0
                for party in [one for one in self.engine.parties() if protocol.shard_of(one) == shard]:
                    self.engine.leave(party)
            for entry in kept.entries:
                for change in entry.changes:
                    try:
                        holding.apply(self.engine, self.known, entry.process, change)
                    except errors.MusterError as error:
                        self._count("replay-refused")
                        events.warning("replay-refused", shard=shard, error=error)
        last = 0
        async for stored in _read(self._events, held.matched_subject):
            held.pending.replay(messages.decode(stored.data, protocol.Matched))
            held.matched_sequence = last = stored.sequence
        if not last:
            held.pending.position = (await self._events.state()).last_sequence
        for party in self.engine.parties():
            if protocol.shard_of(party) == shard:
                self._believe_receiver(party)

    # -- changes of parties

    def _changed(self, message: api.Message) -> None:
        process = subjects.sender_of(message.subject)
        held = self._held_of(message)
        if held is None:
            return
        try:
            changes = messages.decode(message.data, protocol.Changes)
        except errors.MusterError as error:
            self._count(error.code)
            self._reply(message, process, _refusal(error))
            return

        def done(sequence: int, refused: list[tuple[int, protocol.Fault]]) -> None:
            self._reply(message, process, protocol.Answer(sequence=sequence, refused=tuple(refused)))

        try:
            held.queue.put_nowait(holding.Said(process, changes.changes, done, len(message.data)))
        except asyncio.QueueFull:
            self._count("overloaded")
            full = errors.Overloaded(f"shard {held.shard} has too many changes waiting")
            self._reply(message, process, _refusal(full))

    def _held_of(self, message: api.Message) -> holding.Holding | None:
        """The shard that a message is about, if it is ours to decide for at this moment."""
        held = self.held.get(int(message.subject.rpartition(".")[2]))
        if held is None or not held.lease.held:
            self._count("not-held")
            away = errors.Unavailable("this shard is on its way to another notifier, or back to this one")
            self._reply(message, subjects.sender_of(message.subject), _refusal(away))
            return None
        return held

    async def _write(self, held: holding.Holding) -> None:
        """The one writer of a shard's log."""
        while True:
            said = [await held.queue.get()]
            size = said[0].size
            while not held.queue.empty() and size < holding.BYTES_MAX // 2:
                said.append(held.queue.get_nowait())
                size += said[-1].size
            await self._write_some(held, said)

    async def _write_some(self, held: holding.Holding, said: list[holding.Said]) -> None:
        checker = holding.Checker(self.engine, self.known, self._count)
        entries, outcomes = [], []
        for one in said:
            accepted, refused = checker.check(one, held.shard)
            outcomes.append((one, refused))
            if accepted:
                entries.append((one.process, tuple(accepted)))
        if entries:
            data = holding.kept(entries, held.lease.epoch)
            held.sequence = await self._parties.publish(
                held.subject, data, expected_last_subject_sequence=held.sequence
            )
            for process, accepted_ in entries:
                for change in accepted_:
                    self._apply(held, process, change)
            self._history.append(api.Outgoing(subjects.logged(PART, "history", "change"), data))
            held.since_snapshot += 1
            if held.since_snapshot >= self._settings.snapshot_changes:
                await self._snapshot(held)
            if self._members and summaries.is_wider(self.engine, self._told):
                await self._say(confirmed=True)
        for one, refused in outcomes:
            one.done(held.sequence, refused)

    def _apply(self, held: holding.Holding, process: str, change: protocol.Change) -> None:
        holding.apply(self.engine, self.known, process, change)
        self._count("changes")
        names = change.parties if isinstance(change, protocol.Update) else (change.party,)
        if len(self.since_ms) > CHANGES_REMEMBERED:
            self.since_ms.clear()
        changed = (protocol.party_id(process, name) for name in names)
        self.since_ms.update(dict.fromkeys(changed, int(time.time() * 1000)))
        if isinstance(change, protocol.Join):
            party = protocol.party_id(process, change.party)
            self._believe_receiver(party)
            # It may have come back: what it is owed is due now.
            for sequence, owing in held.pending.owed.items():
                if party in owing:
                    held.sent_at.pop(sequence, None)
        elif isinstance(change, protocol.Leave):
            held.pending.forget(protocol.party_id(process, change.party))
            self._dirty.set()

    async def _snapshot(self, held: holding.Holding) -> None:
        made = holding.snapshot(self.engine, held.shard, held.lease.epoch)
        held.since_snapshot = 0
        if len(made) > 1000:
            return  # more than an atomic batch holds: the log stays as it is
        batch = [api.Outgoing(held.subject, data) for data in made]
        first = held.sequence
        held.sequence = await self._parties.publish_batch(
            [
                api.Outgoing(held.subject, made[0], expected_last_subject_sequence=first),
                *batch[1:],
            ]
        )
        await self._parties.purge(subject=held.subject, before=held.sequence - len(made) + 1)
        self._count("snapshots")

    # -- restricted attributes of receivers

    def _believe_receiver(self, party: str) -> None:
        process, _, name = party.partition("/")
        now = time.time()
        found = self.known.believed(process, name, now=now)
        declared = self.engine.model_of(party).attributes
        restricted = [key for key in declared if models.restricted(key)]
        if not restricted:
            return
        values: dict[str, list[Any]] = {}
        for key in restricted:
            held = found.get(key)
            fits = held is not None and declared[key].accepts(held.value)
            values[key] = [held.value if held is not None and fits else None]
        self.engine.update([party], values)
        if found:
            self._expiries[party] = min(held.granted.expires_at for held in found.values())
        else:
            self._expiries.pop(party, None)

    def _trust_changed(self) -> None:
        with_restricted = [
            table for table in self.engine.tables if any(map(models.restricted, table.model.attributes))
        ]
        if with_restricted:
            for party in list(self.engine.parties()):
                self._believe_receiver(party)

    def _expire(self) -> None:
        now = time.time()
        for party in [party for party, at in self._expiries.items() if at <= now]:
            self._expiries.pop(party, None)
            if party in self.engine:
                self._believe_receiver(party)

    # -- events

    def _sent(self, message: api.Message) -> None:
        process = subjects.sender_of(message.subject)
        if not self._queue.put(process, (process, message)):
            self._count("overloaded")
            error = errors.Overloaded(f"{process} has {self._settings.sender_pending} events waiting already")
            self._reply(message, process, _refusal(error))

    async def _admit_all(self) -> None:
        turn = 0
        while True:
            process, message = await self._queue.get()
            held = self._held_of(message)
            if held is None:
                continue
            try:
                send = messages.decode(message.data, protocol.Send)
                event, address = self.admit(process, send)
            except errors.MusterError as error:
                self._count(error.code)
                self._reply(message, process, _refusal(error))
                continue
            self._count("admitted")
            if send.delivery == "durable":
                await self._room.acquire()
                self._spawn(self._store(message, process, event))
            else:
                try:
                    await self._decide(event, address)
                except errors.MusterError as error:  # too large to pass on, or the connection is away
                    self._count(error.code)
                    self._reply(message, process, _refusal(error))
                    continue
                if message.reply:
                    await self._answer(message, process, protocol.Answer())
            turn += 1
            if turn % 16 == 0:
                await asyncio.sleep(0)

    def admit(self, process: str, send: protocol.Send) -> tuple[protocol.Event, ast.Condition]:
        """The event as it is believed: checked, and with the sender's attributes as they are now."""
        address = self._address(send.address)
        content = self.known.vocabulary.event(send.type, protocol.from_wire(send.content))
        attributes = self.sender(process, send.party)
        event = protocol.Event(
            id=send.id,
            type=send.type,
            sender=protocol.party_id(process, send.party),
            content=protocol.to_wire(content),
            attributes=protocol.to_wire(attributes),
            address=send.address,
            at_ms=send.at_ms or int(time.time() * 1000),
        )
        return event, address

    def _address(self, text: str) -> ast.Condition:
        found = self._addresses.get(text)
        if found is None:
            found = self.known.vocabulary.address(text)
            if len(self._addresses) > 10_000:
                self._addresses.clear()
            self._addresses[text] = found
        return found

    def sender(self, process: str, name: str) -> dict[str, Any]:
        """What policies may know of a sender: what it says of itself, and what authorities say of it."""
        party = protocol.party_id(process, name)
        state = self.engine.state_of(party) if party in self.engine else {}
        own = {key: value for key, value in state.items() if not models.restricted(key)}
        believed = self.known.believed(process, name, now=time.time())
        granted = {key: held.value for key, held in believed.items()}
        return {**own, **granted, "_process": process, "_party": party}

    async def _decide(self, event: protocol.Event, address: ast.Condition) -> None:
        """A transient event: deliver here, and pass it to the others who may hold somebody."""
        self._expire()
        await self._deliver_now(event, self.engine.match(event.believed(), address))
        known = set(self.held).union(*(summary.shards for _, summary in self._members.values()))
        if len(known) < protocol.SHARDS:
            # Somebody holds, or is about to hold, shards that we were not told of: say it to everybody.
            await self._bus.publish(
                subjects.logged(PART, "match", EVERYBODY), messages.encode(event), headers={BY: self.name}
            )
            return
        for other, (heard_at, summary) in list(self._members.items()):
            # A summary that is not fresh may be too narrow.
            fresh = time.monotonic() - heard_at < FRESH_BEATS * self._settings.beat_s
            if fresh and not summaries.may_match(summary, event.believed(), address):
                self._count("pruned")
                continue
            await self._bus.publish(subjects.logged(PART, "match", other), messages.encode(event))

    async def _passed_on(self, message: api.Message) -> None:
        if message.headers.get(BY) == self.name:
            return
        event = messages.decode(message.data, protocol.Event)
        self._expire()
        await self._deliver_now(event, self.engine.match(event.believed(), self._address(event.address)))

    async def _deliver_now(self, event: protocol.Event, parties: list[str]) -> None:
        parties = [party for party in parties if self._decides(party)]
        self._decided(event, 0, parties)
        for process, names in _by_process(parties):
            delivered = protocol.Delivered(to=tuple(names), event=event, shard=-1, epoch=0)
            await self._bus.publish(subjects.addressed_to(PART, process, "event"), messages.encode(delivered))
        self._count("delivered", len(parties))

    def _decides(self, party: str) -> bool:
        held = self.held.get(protocol.shard_of(party))
        return held is not None and held.lease.held

    def _decided(self, event: protocol.Event, sequence: int, parties: list[str]) -> None:
        record = protocol.Decided(
            event=event,
            at_ms=int(time.time() * 1000),
            sequence=sequence,
            notifier=self.name,
            to=tuple(parties[:1000]),
            count=len(parties),
        )
        self._history.append(
            api.Outgoing(subjects.logged(PART, "history", "decision"), messages.encode(record))
        )

    async def _keep_history(self) -> None:
        """What was decided, for replay: in batches, a second late, bounded."""
        while True:
            await asyncio.sleep(self._settings.beat_s)
            while self._history:
                batch, self._history = self._history[:500], self._history[500:]
                if len(self._history) > 100_000:
                    self._count("history-dropped", len(self._history))
                    self._history.clear()
                try:
                    await self._history_stream.publish_batch(batch)
                except errors.MusterError as error:
                    self._count("history-dropped", len(batch))
                    events.warning("history-dropped", error=error)

    # -- durable events

    async def _store(self, message: api.Message, process: str, event: protocol.Event) -> None:
        try:
            sequence = await self._events.publish(
                subjects.logged(PART, "event"),
                messages.encode(event, "msgpack"),
                message_id=f"{event.sender}:{event.id}",
            )
        except errors.MusterError as error:
            self._count(error.code)
            await self._answer(message, process, _refusal(error))
        else:
            await self._answer(message, process, protocol.Answer(sequence=sequence))
        finally:
            self._room.release()

    def _follow_from(self, first: int) -> None:
        """Follow the stream of events from ``first`` at the latest: a shard that came may be behind."""
        if self._following is not None and not self._following.done():
            if first > self._followed:
                return
            self._following.cancel()
        self._following = self._spawn(self._follow(first))

    async def _follow(self, first: int) -> None:
        async with self._events.follow(first, subject=subjects.logged(PART, "event"), gaps=True) as following:
            async for stored in following:
                self._followed = stored.sequence
                try:
                    event = messages.decode(stored.data, protocol.Event)
                    address = self._address(event.address)
                except errors.MusterError as error:
                    self._count("bad-event")
                    events.warning("bad-event", sequence=stored.sequence, error=error)
                    continue
                self._remember(stored.sequence, event)
                self._match_durable(stored.sequence, event, address)

    def _match_durable(self, sequence: int, event: protocol.Event, address: ast.Condition) -> None:
        late = {s for s, held in self.held.items() if held.pending.position < sequence}
        if not late:
            return
        self._expire()
        by_shard: dict[protocol.Shard, list[str]] = {}
        transient: list[str] = []
        for party in self.engine.match(event.believed(), address):
            shard = protocol.shard_of(party)
            if shard not in late:
                continue
            if self.engine.is_durable(party):
                by_shard.setdefault(shard, []).append(party)
            else:
                transient.append(party)
        for shard in late:
            self.held[shard].pending.match(sequence, by_shard.get(shard, ()))
        everybody = [party for parties in by_shard.values() for party in parties]
        self._decided(event, sequence, everybody)
        if transient:
            self._spawn(self._deliver_now(event, transient))
        self._dirty.set()

    async def _record_all(self) -> None:
        """Store who gets what before it is delivered; all that waits goes in one batch."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            dirty = [held for held in self.held.values() if held.lease.held and held.pending.is_dirty]
            if not dirty:
                continue
            await asyncio.gather(*(self._record(held) for held in dirty))
            await asyncio.sleep(0)

    async def _record(self, held: holding.Holding) -> None:
        held.since_reset += 1
        reset = held.since_reset >= RECORDS_MAX
        record = held.pending.whole(held.lease.epoch) if reset else held.pending.record(held.lease.epoch)
        try:
            held.matched_sequence = await self._events.publish(
                held.matched_subject,
                messages.encode(record, "msgpack"),
                expected_last_subject_sequence=held.matched_sequence,
            )
        except errors.MusterError as error:
            # Somebody else holds the shard, or it cannot be known whether this was stored: begin anew.
            events.warning("record-refused", shard=held.shard, error=error)
            self._count("record-refused")
            if task := self._gaining.get(held.shard):
                task.cancel()
            return
        if reset:
            held.since_reset = 0
            await self._events.purge(subject=held.matched_subject, before=held.matched_sequence)
        for sequence, parties in record.matched.items():
            await self._deliver_durable(
                held, sequence, [one for one in parties if one in held.pending.owed.get(sequence, ())]
            )

    async def _deliver_durable(self, held: holding.Holding, sequence: int, parties: list[str]) -> None:
        if not parties:
            return
        event = await self._event(sequence)
        held.sent_at[sequence] = time.monotonic()
        if event is None or not held.lease.held:
            return
        for process, names in _by_process(parties):
            delivered = protocol.Delivered(
                to=tuple(names), event=event, shard=held.shard, epoch=held.lease.epoch, sequence=sequence
            )
            await self._bus.publish(subjects.addressed_to(PART, process, "event"), messages.encode(delivered))
        self._count("delivered-durable", len(parties))

    def _remember(self, sequence: int, event: protocol.Event) -> None:
        self._remembered[sequence] = event
        if len(self._remembered) > EVENTS_REMEMBERED:
            self._remembered.popitem(last=False)

    async def _event(self, sequence: int) -> protocol.Event | None:
        if sequence not in self._remembered:
            try:
                stored = await self._events.get(sequence)
            except errors.NotFound:
                return None
            self._remember(sequence, messages.decode(stored.data, protocol.Event))
        return self._remembered.get(sequence)

    async def _deliver_again(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._settings.ack_wait_s / 2))
            limit = time.monotonic() - self._settings.ack_wait_s
            for held in list(self.held.values()):
                if not held.lease.held:
                    continue
                due = [seq for seq in held.pending.owed if held.sent_at.get(seq, 0.0) <= limit]
                for sequence in due[:REDELIVERED_AT_ONCE]:
                    owing = held.pending.owed.get(sequence)
                    if owing:
                        self._count("redelivered", len(owing))
                        await self._deliver_durable(held, sequence, sorted(owing))
                for sequence in [seq for seq in held.sent_at if seq not in held.pending.owed]:
                    del held.sent_at[sequence]
            with contextlib.suppress(errors.MusterError):
                await self._forget_events()

    async def _forget_events(self) -> None:
        """Events that no shard needs any more; whoever holds shard 0 sees to it."""
        if 0 not in self.held:
            return
        floors = {shard: held.pending.floor for shard, held in self.held.items()}
        for _, summary in self._members.values():
            floors.update(summary.floors)
        if len(floors) == protocol.SHARDS and (floor := min(floors.values())) > 1:
            await self._events.purge(subject=subjects.logged(PART, "event"), before=floor)

    def _acknowledged(self, message: api.Message) -> None:
        process = subjects.sender_of(message.subject)
        held = self._held_of(message)
        if held is None:
            return
        try:
            acked = messages.decode(message.data, protocol.Acked)
        except errors.MusterError as error:
            self._count(error.code)
            return
        for sequence, names in acked.events.items():
            for name in names:
                if held.pending.acknowledge(sequence, protocol.party_id(process, name)):
                    self._count("acknowledged")
        self._dirty.set()

    # -- questions

    def _asked(self, message: api.Message) -> None:
        process = subjects.sender_of(message.subject)
        question = message.subject.rpartition(".")[2]
        try:
            told = questions.answer(self, question, messages.decode(message.data, protocol.Ask))
        except errors.MusterError as error:
            told = protocol.Told(notifier=self.name, fault=protocol.fault_of(error))
        self._reply(message, process, told)


def _refusal(error: errors.MusterError) -> protocol.Answer:
    return protocol.Answer(refused=((-1, protocol.fault_of(error)),))


def _by_process(parties: Iterable[str]) -> Iterable[tuple[str, list[str]]]:
    """Names of one process together, as many as fit into a message."""
    found: dict[str, list[str]] = {}
    for party in parties:
        process, _, name = party.partition("/")
        found.setdefault(process, []).append(name)
    for process, names in found.items():
        for start in range(0, len(names), NAMES_MAX):
            yield process, names[start : start + NAMES_MAX]


async def _read(stream: api.Stream, subject: str) -> Any:
    state = await stream.state()
    if state.messages:
        async for stored in stream.read(state.first_sequence, state.last_sequence, subject=subject):
            yield stored
