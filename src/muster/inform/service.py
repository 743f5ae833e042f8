"""An information node: the shell around reading, writing and upkeep.

    async with await service.start(bus, store=store) as node:
        ...

It follows the log, answers clients and other nodes, and runs the rounds of upkeep.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self

from muster.bus import api
from muster.core import errors, heap, subjects, uptime
from muster.inform import contextlog, desk, finding, keeping, protocol, reading, upkeep, views, writing
from muster.inform import settings as settings_
from muster.store import database

IN_FLIGHT_MAX = 4_096
WATCHING_MAX = 16_384  # of their own: who waits for a change keeps nobody from making one
RETRY_S = 0.5
DRAIN_S = 2.0
AT_ONCE_BYTES_MAX = 64 << 10
GROUP = "nodes"

Answer = Callable[[str, bytes], Awaitable[object]]  # from the asker's identity and the question


async def start(
    bus: api.Bus,
    *,
    name: str | None = None,
    settings: settings_.Inform = settings_.DEFAULT,
    store: database.Store | None = None,
    max_bytes: int = contextlog.MAX_BYTES,
    replicas: int = 1,
    joins: bool = False,
    now_ns: Callable[[], int] = time.time_ns,
    uptime_s: Callable[[], float] | None = None,
    role_of: desk.RoleOf | None = None,
    zone: str = "default",
) -> Node:
    """A node that serves: it has read its view and all the log there was. ``name``: or the bus's identity.

    ``joins``: a log that is there stays as it is, whatever the settings say of it.  ``uptime_s``: a clock
    that also counts time in suspend (None: `uptime.clock_of` the loop).  ``role_of``: None where identities
    have no roles: on a bus without trust, where everybody may be anybody.
    """
    name = subjects.token(name or bus.identity)
    log = await contextlog.ContextLog.open(
        bus,
        history=settings.history,
        max_bytes=max_bytes,
        replicas=replicas,
        joins=joins,
        tombstone_s=settings.tombstone_s,
    )
    view = views.View(store, name) if store is not None else None
    shared = desk.Desk(
        name,
        bus,
        log,
        settings=settings,
        view=view,
        now_ns=now_ns,
        uptime_s=uptime_s or uptime.clock_of(asyncio.get_running_loop()),
        role_of=role_of,
        zone=zone,
    )
    node = Node(shared)
    try:
        await node.open()
    except BaseException:
        await node.close()
        raise
    return node


class Node:
    def __init__(self, shared: desk.Desk) -> None:
        self.desk = shared
        self.name = shared.name
        self.reader = reading.Reader(shared)
        self.finder = finding.Finder(shared, self.reader)
        self.writer = writing.Writer(shared)
        self.upkeep = upkeep.Upkeep(shared, self.writer)
        self.refused = 0  # requests beyond what can be in flight
        self.malformed = 0
        self._keeper = keeping.Keeper(shared, shared.view) if shared.view is not None else None
        self._subscriptions: list[api.Subscription] = []
        self._topics: dict[int, api.Subscription] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Future[Any]] = set()  # requests that are being answered
        self._watching: set[asyncio.Future[Any]] = set()  # and those that wait for a change
        reader, writer, keeper = self.reader, self.writer, self.upkeep
        self._verbs: dict[str, Answer] = {
            "get": lambda who, data: reader.get(protocol.decode(data, protocol.Get), who),
            "find": lambda who, data: self.finder.find(protocol.decode(data, protocol.Find), who),
            "changes": lambda who, data: reader.changes(protocol.decode(data, protocol.Changes), who),
            "history": lambda who, data: reader.history(protocol.decode(data, protocol.Changes), who),
            "where": lambda _, data: reader.where(protocol.decode(data, protocol.Name).key),
            "nodes": self._nodes,
            "put": lambda who, data: writer.write(protocol.decode(data, protocol.Put), who),
            "delete": lambda who, data: writer.write(protocol.decode(data, protocol.Delete), who),
        }
        self._kinds: dict[str, Callable[[bytes], Awaitable[object]]] = {
            "update": lambda data: writer.update(protocol.decode(data, protocol.Update)),
            "become-primary": self._become_primary,
            "find": self._find_here,
            "where": self._where_here,
        }
        self._heard: dict[str, Callable[[bytes], Awaitable[None] | None]] = {
            "applied": lambda data: writer.applied(protocol.decode(data, protocol.Applied)),
            "server-information": keeper.heard_response,
        }

    # Life.

    async def open(self) -> None:
        if self._keeper is not None:
            await self._keeper.load()
            self._run(self._keeper.run())
        self._run(self._follow())
        await self._catch_up()
        if self.desk.copies.evicted:
            await asyncio.to_thread(heap.give_back)
        for subject, handler, group in (
            (protocol.to_node(self.name, "*"), self._told, None),
            (protocol.to_all("*"), self._told, None),
            (subjects.said_by(protocol.PART, "*", "read", self.name, "*"), self._asked, None),
            (subjects.said_by(protocol.PART, "*", "write", self.name, "*"), self._asked, None),
            (subjects.said_by(protocol.PART, "*", "read", protocol.ANY, "*"), self._asked, GROUP),
            (subjects.said_by(protocol.PART, "*", "write", protocol.ANY, "*"), self._asked, GROUP),
        ):
            self._subscriptions.append(await self.desk.bus.subscribe(subject, group=group, handler=handler))
        await self._subscribe_topics()
        self._run(self._keep_topics())
        await self.upkeep.discover()
        settings = self.desk.settings
        self._run(self._every(settings.refresh_s, self.upkeep.discover))
        self._run(self._every(upkeep.PROBE_S, self.upkeep.probe))
        self._run(self._every(upkeep.PROBE_S, self.upkeep.end_what_is_due))
        self._run(self._every(settings.interval_s, self.upkeep.follow_demand))

    async def close(self) -> None:
        """What was asked is answered; then the node goes."""
        for subscription in (*self._subscriptions, *self._topics.values()):
            with contextlib.suppress(errors.Unavailable):
                await subscription.close()
        self._subscriptions.clear()
        self._topics.clear()
        self.desk.wake_all()
        if asked := self._tasks | self._watching:
            await asyncio.wait(asked, timeout=DRAIN_S)
        while work := (*self._loops, *self._tasks, *self._watching):
            # Again: a write that fails may yet begin a task.
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            self._loops.clear()
        if self._keeper is not None:
            with contextlib.suppress(errors.MusterError):  # the log has what the view lacks
                await self._keeper.save()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def view_failure(self) -> errors.MusterError | None:
        """While its view cannot be written."""
        return self._keeper.failure if self._keeper is not None else None

    def failure(self) -> BaseException | None:
        """What ended one of its loops, if anything did."""
        return next((task.exception() for task in self._loops if task.done() and not task.cancelled()), None)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._loops.append(asyncio.create_task(work, name=f"information node {self.name}"))

    def _spawn(self, work: Coroutine[Any, Any, None], among: set[asyncio.Future[Any]] | None = None) -> None:
        tasks = self._tasks if among is None else among
        task = asyncio.create_task(work, name=f"information node {self.name}: request")
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _every(self, period_s: float, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(period_s)
            try:
                await action()
            except errors.Unavailable as error:
                desk.events.info("round-failed", node=self.name, error=error)

    # The log and the view.

    async def _catch_up(self) -> None:
        """However long it takes, as long as it goes on."""
        shared = self.desk
        moved_at_s = shared.now_s()
        while True:
            position = shared.position
            try:
                return await shared.refresh(api.DURABLE_TIMEOUT_S)
            except errors.Unavailable:
                if shared.position != position:
                    moved_at_s = shared.now_s()
                elif shared.now_s() - moved_at_s > 2 * api.DURABLE_TIMEOUT_S:
                    raise
                await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        shared = self.desk
        while True:
            try:
                async with shared.log.follow(shared.position + 1) as following:
                    while True:
                        try:
                            await self._take_all(following)
                        except errors.Dropped as error:
                            # Older records have made room for newer ones, which come next.
                            shared.position = max(shared.position, error.last)
            except errors.Unavailable as error:
                desk.events.info("log-lost", node=self.name, error=error)
                await asyncio.sleep(RETRY_S)

    async def _take_all(self, following: api.Following) -> None:
        number = 0
        async for stored in following:
            told = self._take(stored)
            if told is not None:
                await self._tell(*told)
            number += 1
            if number % 200 == 0 or self.desk.unsaved.is_full:
                await self._breathe()

    async def _breathe(self) -> None:
        """Let others have a turn, and the view keep up."""
        await asyncio.sleep(0)
        if self._keeper is not None:
            await self._keeper.keep_up()

    def _take(self, stored: api.StoredMessage) -> tuple[str, bytes] | None:
        """Apply a record. What is to be said of it, and where."""
        shared = self.desk
        own = shared.own.pop(stored.sequence, None)
        if own is not None:
            shared.seen(stored.sequence, own)
            return None
        mine = shared.log.under_way(stored)
        try:
            entry = contextlog.Entry(mine, stored.sequence) if mine else contextlog.entry_of(stored)
        except errors.InvalidInput as error:
            self.malformed += 1
            desk.events.error("strange-record", sequence=stored.sequence, error=error)
            shared.seen(stored.sequence, "")
            return None
        record = entry.record
        shared.apply(entry, just_stamped=mine is not None)
        shared.seen(entry.sequence, record.key)
        if self.name not in record.holders:
            self.writer.heard_of(record.key, record.holders)
        elif record.acknowledge and record.holders[0] != self.name:
            told = protocol.Applied(self.name, record.key, record.stamp)
            return protocol.to_node(record.holders[0], "applied"), protocol.encode(told)
        return None

    async def _tell(self, subject: str, data: bytes) -> None:
        with contextlib.suppress(errors.Unavailable):
            await self.desk.bus.publish(subject, data)

    # Topics of contexts.

    async def _keep_topics(self) -> None:
        while True:
            await self.desk.buckets_changed.wait()
            self.desk.buckets_changed.clear()
            try:
                await self._subscribe_topics()
            except errors.Unavailable:
                self.desk.buckets_changed.set()
                await asyncio.sleep(RETRY_S)

    async def _subscribe_topics(self) -> None:
        held = self.desk.copies.buckets
        for bucket in [bucket for bucket in held if bucket not in self._topics]:
            self._topics[bucket] = await self.desk.bus.subscribe(
                protocol.topic(bucket, "*"), handler=self._topic
            )
        for bucket in [bucket for bucket in self._topics if bucket not in held]:
            await self._topics.pop(bucket).close()

    def _topic(self, message: api.Message) -> None:
        """A question to the holders of a context: who holds nothing of that name keeps silent."""
        kind = message.subject.rpartition(".")[2]
        try:
            if kind == "access":
                asked = protocol.decode(message.data, protocol.Get)
                copy = self.desk.copies.index.get(asked.key)
                if asked.origin == self.name or copy is None or copy.temporary:
                    return
                found = self.reader.local(asked.key, asked.max_staleness_s)
                if found is None:
                    self._spawn(self._answer_access(message, asked))
                    return
                self.desk.demand.add(asked.key, asked.origin)
                self._respond(message, protocol.reply(found))
            elif kind == "select":
                name = protocol.decode(message.data, protocol.Name)
                copy = self.desk.copies.index.get(name.key)
                if copy is not None and not copy.temporary and name.silent != self.name:
                    self._respond(message, protocol.reply(self.desk.information()))
        except errors.InvalidInput as error:
            self.malformed += 1
            desk.events.warning("malformed", subject=message.subject, error=error)

    def _respond(self, message: api.Message, data: bytes) -> None:
        if not message.respond_now(data):
            self._spawn(self._guarded(message.respond(data)))

    async def _answer_access(self, message: api.Message, asked: protocol.Get) -> None:
        with contextlib.suppress(errors.Unavailable):
            found = await self.reader.held(asked)
            if found is not None:
                self.desk.demand.add(asked.key, asked.origin)
                await message.respond(protocol.reply(found))

    # Questions.

    def _asked(self, message: api.Message) -> None:
        """By a client, whose identity the broker has put into the subject."""
        sender, kind, verb = _asker(message.subject)
        if not subjects.may_reply(message.subject, message.reply):
            self.malformed += 1
            return
        self.desk.requests += 1
        answer = self._verbs.get(verb) if (verb in protocol.READS) == (kind == "read") else None
        if answer is None:
            unknown = errors.InvalidInput(f"no verb {verb!r}: there are {', '.join(self._verbs)}")
            self._spawn(self._answer(message, lambda: _raise(unknown)))
        elif not self._done_at_once(verb, sender, message):
            self._spawn_bounded(message, lambda: answer(sender, message.data), waits=verb == "changes")

    def _done_at_once(self, verb: str, sender: str, message: api.Message) -> bool:
        if verb == "get":
            return self._answered_at_once(sender, message)
        return verb in _WRITES and self._begun_at_once(sender, message, _WRITES[verb])

    def _answered_at_once(self, sender: str, message: api.Message) -> bool:
        """A read from memory needs no task. Whatever is out of the ordinary takes the long way."""
        try:
            asked = protocol.decode(message.data, protocol.Get)
            found = self.reader.local(asked.key, asked.max_staleness_s)
            if found is None or len(found.value) > AT_ONCE_BYTES_MAX:
                return False
            self.desk.check(sender, "read", asked.key, found.writer)
            if not message.respond_now(protocol.reply(found)):
                return False
        except errors.MusterError:
            return False
        self.desk.demand.add(asked.key, self.name)
        return True

    def _begun_at_once(
        self, sender: str, message: api.Message, kind: type[protocol.Put] | type[protocol.Delete]
    ) -> bool:
        """Nor does a write, if we are the primary and nobody else is writing the same."""
        try:
            begun = self.writer.begin(protocol.decode(message.data, kind), sender) if self._has_room else None
        except errors.MusterError:
            return False
        if begun is None:
            return False
        self._tasks.add(begun.stored)
        begun.stored.add_done_callback(lambda _: self._finish(message, begun))
        return True

    def _finish(self, message: api.Message, begun: writing.Begun) -> None:
        self._tasks.discard(begun.stored)
        try:
            self._respond(message, protocol.reply(self.writer.finish(begun)))
        except errors.MusterError as error:
            failure = error
            self._spawn(self._answer(message, lambda: self.writer.go_on(begun, failure)))
        except asyncio.CancelledError:
            return  # we are closing, and nobody knows whether it is stored

    def _told(self, message: api.Message) -> None:
        """By another node."""
        kind = message.subject.rpartition(".")[2]
        if message.subject == protocol.to_all("server-information"):
            self._spawn(self._guarded(self.upkeep.heard_request(message.data)))
        elif kind == "store":
            self._spawn(self._answer(message, lambda: self._store(message.data)))
        elif (answer := self._kinds.get(kind)) is not None and message.reply is not None:
            self._spawn_bounded(message, lambda: answer(message.data))
        elif (heard := self._heard.get(kind)) is not None:
            try:
                heard(message.data)
            except errors.InvalidInput:
                self.malformed += 1

    @property
    def _has_room(self) -> bool:
        return len(self._tasks) < IN_FLIGHT_MAX

    def _spawn_bounded(
        self, message: api.Message, work: Callable[[], Awaitable[object]], *, waits: bool = False
    ) -> None:
        among, most = (self._watching, WATCHING_MAX) if waits else (self._tasks, IN_FLIGHT_MAX)
        if len(among) < most:
            self._spawn(self._answer(message, work), among)
        else:
            self.refused += 1
            full = errors.Overloaded(f"{self.name} has {most} requests in flight", retry_after_s=0.1)
            self._spawn(self._answer(message, lambda: _raise(full)))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except errors.InvalidInput:
            self.malformed += 1
        except errors.Unavailable:
            return

    async def _answer(self, message: api.Message, work: Callable[[], Awaitable[object]]) -> None:
        try:
            data = protocol.reply(await work())
        except errors.MusterError as error:
            data = protocol.refusal(error)
        except Exception as error:  # noqa: BLE001  (a bug of ours must not leave the asker waiting)
            desk.events.error("request-failed", subject=message.subject, error=error)
            data = protocol.refusal(errors.InvariantBroken(f"{type(error).__name__}: {error}"))
        with contextlib.suppress(errors.Unavailable):
            try:
                await message.respond(data)
            except errors.LimitExceeded as error:
                await message.respond(
                    protocol.refusal(
                        errors.LimitExceeded(f"too much for one answer: {error}", hint="ask for fewer")
                    )
                )

    async def _nodes(self, _: str, __: bytes) -> list[protocol.NodeView]:
        return self.desk.directory.views(self.desk.information(), self.desk.now_s())

    async def _become_primary(self, data: bytes) -> None:
        name = protocol.decode(data, protocol.Name)
        await self.writer.become_primary(name.key, name.silent)

    async def _find_here(self, data: bytes) -> protocol.FoundHere:
        return await self.finder.find_here(protocol.decode(data, protocol.Find))

    async def _where_here(self, data: bytes) -> list[protocol.CopyView]:
        return self.reader.where_here(protocol.decode(data, protocol.Name).key)

    async def _store(self, data: bytes) -> None:
        self.upkeep.store(protocol.decode(data, protocol.Store))


_WRITES: dict[str, type[protocol.Put] | type[protocol.Delete]] = {
    "put": protocol.Put,
    "delete": protocol.Delete,
}


@functools.lru_cache(1024)
def _asker(subject: str) -> tuple[str, str, str]:
    """Who asks on it, the kind and the verb."""
    sender, parts = subjects.sender_of(subject), subject.split(".")
    return sender, parts[4], parts[-1]


async def _raise(error: errors.MusterError) -> object:
    raise error
