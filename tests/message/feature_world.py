"""Random use of every feature of queues and subscriptions, with faults, in virtual time.

Selectors, groups, priorities, expiry, large bodies, delays, transactions, dead letters, shared and unshared
durable subscriptions that are replaced and ended, and messages that one consumer returns for others; slow
reads of the log, small caches, dispatchers that are killed and connections that break. `run` returns what
broke a promise:

- a message goes only to consumers whose selector accepts it, and not after it expired;
- it is not lost, not received after its transaction was committed, and not twice in one transaction;
- an application that receives it again sees it marked, and one that returned it for others does not see it;
- a subscription that exists while a message is sent, and still exists in the end, receives it;
- first deliveries of a group go to one consumer as long as it is attached, in order;
- messages of one producer to one consumer are in order, whatever their sizes;
- an expired message is no dead letter.

    python -m tests.message.feature_world FIRST COUNT
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from muster.bus import api as bus_api
from muster.bus.memory import streams
from muster.core import errors
from muster.message import destinations, messages, protocol, settings
from muster.message import errors as message_errors
from muster.message.client import api, consumers
from muster.message.dispatcher import backlog_reader, delivery
from muster.message.dispatcher.log import message_cache
from muster.testing import virtual_clock
from tests.message import model_world

JOBS = destinations.queue("jobs")
GROUPED = destinations.queue("grouped")
DEAD = destinations.queue(destinations.DEAD_LETTERS)
NEWS = destinations.topic("news/a")
FLASH = destinations.topic("flash")
MODES = (api.AcknowledgeMode.AUTO, api.AcknowledgeMode.CLIENT, api.AcknowledgeMode.TRANSACTED)
SELECTORS: dict[str | None, Callable[[str, int], bool]] = {
    None: lambda colour, n: True,
    "colour = 'red'": lambda colour, n: colour == "red",
    "colour IN ('green', 'blue')": lambda colour, n: colour != "red",
    "n > 5": lambda colour, n: n > 5,
    "colour = 'red' OR n < 3": lambda colour, n: colour == "red" or n < 3,
    "NOT (colour = 'blue')": lambda colour, n: colour != "blue",
}
PREFETCH = (0, 1, 2, 5, 50)
LARGE = "x" * (1 << 20)
QUIET_S = 60.0  # after which everything that can be delivered has been
RECEIVE_S = 1.0


@dataclasses.dataclass
class Sent:
    number: int
    to: destinations.Destination
    colour: str
    n: int
    group: str | None
    priority: int
    delayed: bool
    expires_ms: int = 0

    def matches(self, selector: str | None) -> bool:
        return SELECTORS[selector](self.colour, self.n)

    @property
    def has_expired(self) -> bool:
        return 0 < self.expires_ms < time.time_ns() // 1_000_000


class FeatureWorld(model_world.DispatcherWorld):
    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance.choice([1, 2]))
        self._settings = settings.MessageSettings(
            max_deliveries=chance.choice([0, 1, 3]),
            checkpoint_records=chance.choice([3, 10]),
            connection_timeout_s=5,
            partitions=self._settings.partitions,
        )
        self.chance = chance
        self.slow_s = chance.choice([0.0, 0.3, 1.0])  # the longest that reading a page of the log takes
        self.problems: list[str] = []
        self.sent: dict[str, Sent] = {}
        self.confirmed: set[str] = set()
        self.finished: dict[str, bool] = {}  # acknowledged; True: in a transaction
        self.in_doubt: set[str] = set()
        self.failed_late: set[str] = set()  # returned by an application after they expired
        self.owners: dict[str, tuple[Worker, int, int]] = {}  # of groups; the dispatcher and the last message
        self.workers: list[Worker] = []
        self.subscribers: list[Subscriber] = []
        self.names = itertools.count(1)

    def problem(self, *words: object) -> None:
        self.problems.append(" ".join(map(str, words)))

    async def connect(self, identity: str, **options: Any) -> api.Connection:
        connection = api.Connection(await self.net.connect(identity), **options)
        connection.on_error = lambda error: None
        return await connection.__aenter__()

    async def kill_dispatcher(self) -> None:
        for worker in self.workers:
            worker.returned.clear()  # the next dispatcher does not know
        await super().kill_dispatcher()

    # What is sent.

    def _compose(
        self, to: destinations.Destination, *, persistent: bool = True
    ) -> tuple[str, messages.TextMessage, dict[str, Any]]:
        """A message, and how to send it."""
        chance, number = self.chance, len(self.sent)
        text = f"{number}:"
        sent = self.sent[text] = Sent(
            number,
            to,
            chance.choice(["red", "green", "blue"]),
            chance.randrange(10),
            chance.choice(["g1", "g2"]) if to == GROUPED else None,
            chance.choice([4, 4, 4, 9, 1]) if to == JOBS else 4,
            delayed=persistent and to != GROUPED and chance.random() < 0.15,
        )
        message = messages.TextMessage(
            text + (LARGE if chance.random() < 0.1 else ""), properties={"colour": sent.colour, "n": sent.n}
        )
        if sent.group is not None:
            message.properties["JMSXGroupID"] = sent.group
        ttl_s = chance.choice([0, 0, 0, 1.0, 5.0]) if to == JOBS else 0
        delay_s = sent.delayed * chance.choice([1.0, 4.0])
        return text, message, {"priority": sent.priority, "ttl_s": ttl_s, "delay_s": delay_s}

    async def send_one(self, to: destinations.Destination, *, persistent: bool = True) -> None:
        text, message, options = self._compose(to, persistent=persistent)
        waiting = self._waiting()
        producer = self.producing.producer(to, persistent=persistent)
        if not persistent and self.chance.random() < 0.5:
            producer.submit(message)
            return
        try:
            await producer.send(message, **options)
        except errors.Unavailable:
            return
        self._confirm(text, message, waiting)

    async def send_at_once(self) -> None:
        """To several destinations, in a transaction."""
        waiting = self._waiting()
        composed: list[tuple[str, messages.TextMessage]] = []
        for _ in range(self.chance.randrange(2, 7)):
            to = self.chance.choice([JOBS, GROUPED, NEWS])
            text, message, options = self._compose(to)
            await self.transacting.producer(to).send(message, **options)
            composed.append((text, message))
        try:
            await self.transacting.commit()
        except errors.Unavailable:
            return
        for text, message in composed:
            self._confirm(text, message, waiting)

    def _waiting(self) -> list[tuple[Subscriber, int]]:
        return [(subscriber, subscriber.version) for subscriber in self.subscribers]

    def _confirm(
        self, text: str, message: messages.TextMessage, waiting: list[tuple[Subscriber, int]]
    ) -> None:
        sent = self.sent[text]
        sent.expires_ms = message.expiration_ms
        self.confirmed.add(text)
        for subscriber, version in waiting if sent.to == NEWS else ():
            stays = version and version == subscriber.version
            if stays and sent.matches(subscriber.selector) and text not in subscriber.seen:
                subscriber.expected.add(text)

    def received(self, message: messages.JmsMessage, selector: str | None) -> tuple[str, Sent]:
        text = str(message.body()).partition(":")[0] + ":"
        sent = self.sent[text]
        if not sent.matches(selector):
            self.problem(text, "does not match", selector)
        if sent.expires_ms and sent.expires_ms < time.time_ns() // 1_000_000 - 1:
            self.problem(text, "was received after it expired")
        return text, sent

    # One run.

    async def begin(self) -> None:
        await self.start_dispatcher()
        connection = await self.connect("producer")
        self.producing = connection.session()
        self.transacting = connection.session(api.AcknowledgeMode.TRANSACTED)
        self.subscribers = [Subscriber(self, shared=shared) for shared in (False, True)]
        for subscriber in self.subscribers:
            await subscriber.open()
        hearing = await (await self.connect("listener")).session().consumer(FLASH)
        self.listening = asyncio.ensure_future(self._listen(hearing))

    async def _listen(self, consumer: consumers.Consumer) -> None:
        last = -1
        while (message := await consumer.receive()) is not None:
            _, sent = self.received(message, None)
            if sent.number <= last:
                self.problem(sent.number, "was overtaken by", last)
            last = sent.number

    async def step(self) -> None:
        chance = self.chance
        match chance.choice(STEPS):
            case "send":
                await self.send_one(chance.choice([JOBS, GROUPED]))
            case "publish":
                await self.send_one(NEWS)
            case "at once":
                await self.send_at_once()
            case "flash":
                for _ in range(chance.choice([1, 3])):
                    await self.send_one(FLASH, persistent=False)
            case "work" if len(self.workers) < 5:
                worker = Worker(self, f"worker-{next(self.names)}")
                await worker.open()
                self.workers.append(worker)
            case "leave" if self.workers:
                worker = self.workers.pop(chance.randrange(len(self.workers)))
                await worker.close(lost=chance.random() < 0.3)
            case "subscribe":
                await chance.choice(self.subscribers).attach()
            case "detach":
                await chance.choice(self.subscribers).detach()
            case "unsubscribe":
                await chance.choice(self.subscribers).unsubscribe()
            case "kill":
                await self.kill_dispatcher()
            case "cut" if self.workers:
                worker = chance.choice(self.workers)
                self.forget_owner(worker)
                self.net.disconnect(worker.connection.bus)  # type: ignore[arg-type]
            case "wait":
                await asyncio.sleep(chance.choice([0.01, 0.1, 1.0, 6.0]))

    def forget_owner(self, worker: Worker) -> None:
        self.owners = {group: owner for group, owner in self.owners.items() if owner[0] is not worker}

    async def end(self) -> None:
        await asyncio.sleep(QUIET_S)
        self.slow_s = 0.0
        await asyncio.sleep(QUIET_S)  # for those that read slowly until now
        waiting = {
            self.received(message, None)[0]
            for queue in (JOBS, GROUPED)
            async for message in self.producing.browse(queue)
        }
        held = {text for worker in self.workers for text, _ in worker.held}
        for text in waiting - held:
            able = [worker.name for worker in self.workers if worker.can_receive(text)]
            if able:
                self.problem(text, "waits although these can receive it:", *able)
        for worker in self.workers:
            await worker.close()
        for subscriber in self.subscribers:
            if subscriber.version and not subscriber.consumers:
                await subscriber.attach(subscriber.selector)
        await asyncio.sleep(QUIET_S)
        for subscriber in self.subscribers:
            if subscriber.version and subscriber.expected:
                self.problem(subscriber.name, "did not receive", *sorted(subscriber.expected))
        left = await self._take_all(JOBS) + await self._take_all(GROUPED)
        dead = await self._take_all(DEAD)
        for text in left:
            if text in self.finished:
                self.problem(text, "is in its queue although it was acknowledged")
        for text in dead:
            if text in self.failed_late:
                self.problem(text, "is a dead letter although it expired before")
        known = {*left, *dead, *self.finished, *self.in_doubt}
        for text in self.confirmed - known:
            if self.sent[text].to in (JOBS, GROUPED) and not self.sent[text].has_expired:
                self.problem(text, "is lost")
        self.problems += map(repr, self.errors)

    async def _take_all(self, queue: destinations.Destination) -> list[str]:
        async with await self.producing.consumer(queue) as consumer:
            texts = []
            while (message := await consumer.receive(20)) is not None:
                texts.append(str(message.body()).partition(":")[0] + ":")
        if len(texts) != len(set(texts)):
            self.problem("received twice from", queue, texts)
        return texts


STEPS = [
    *("send",) * 8,
    *("publish",) * 4,
    *("at once",) * 4,
    *("flash",) * 2,
    *("work",) * 2,
    "leave",
    *("subscribe",) * 3,
    "detach",
    "unsubscribe",
    "kill",
    "cut",
    *("wait",) * 3,
]


class Worker:
    """Consumes a queue."""

    def __init__(self, world: FeatureWorld, name: str) -> None:
        self.world, self.name = world, name
        self.mode = world.chance.choice(MODES)
        self.queue = world.chance.choice([JOBS, JOBS, GROUPED])
        self.selector = world.chance.choice(list(SELECTORS)) if self.queue == JOBS else None
        self.held: list[tuple[str, messages.JmsMessage]] = []
        self.seen: set[str] = set()
        self.returned: set[str] = set()  # for others
        self.excluded: set[str] = set()  # the same, and what may be among it
        self.registered: dict[str, object] = {}  # when a message was received
        self._is_stopping = False

    async def open(self) -> None:
        self.connection = await self.world.connect(self.name)
        self.session = self.connection.session(self.mode)
        prefetch = self.world.chance.choice(PREFETCH)
        self.consumer = await self.session.consumer(self.queue, self.selector, prefetch=prefetch)
        self.working = asyncio.ensure_future(self._work())

    def can_receive(self, text: str) -> bool:
        sent = self.world.sent[text]
        return (
            not self.working.done()
            and sent.to == self.queue
            and sent.matches(self.selector)
            and text not in self.excluded
        )

    async def _work(self) -> None:
        world, chance = self.world, self.world.chance
        try:
            while not self._is_stopping:
                message = await self.consumer.receive(RECEIVE_S)
                if message is not None:
                    self._receive(message)
                if self.held and (message is None or len(self.held) >= chance.choice([1, 3, 8])):
                    if chance.random() < 0.1:
                        await asyncio.sleep(6.0)  # some expire
                    await self._end()
        except (errors.Unavailable, message_errors.IllegalState):
            world.in_doubt.update(text for text, _ in self.held)

    def _receive(self, message: messages.JmsMessage) -> None:
        world = self.world
        text, sent = world.received(message, self.selector)
        if any(text == other for other, _ in self.held):
            world.problem(text, "was received twice in one transaction of", self.name)
        if text in self.returned:
            world.problem(text, "came back to", self.name, "which returned it for others")
        if text in self.seen and not message.redelivered:
            world.problem(text, "was received again and is not marked")
        self.seen.add(text)
        self.registered[text] = self._registration()
        if sent.group is not None and not message.redelivered:
            epoch = max(epoch for epoch, _ in self._registration())
            owner, dispatcher, last = world.owners.get(sent.group, (self, epoch, -1))
            if dispatcher == epoch and (owner is not self or sent.number <= last):
                world.problem(text, "of", sent.group, "came to", self.name, "after", last, "to", owner.name)
            world.owners[sent.group] = self, epoch, sent.number
        if self.mode is api.AcknowledgeMode.AUTO:
            world.in_doubt.add(text)
        else:
            self.held.append((text, message))

    async def _end(self) -> None:
        world, chance = self.world, self.world.chance
        held, self.held = self.held, []
        texts = [text for text, _ in held]
        is_transacted = self.mode is api.AcknowledgeMode.TRANSACTED
        try:
            action = chance.random()
            if action < 0.15 and len(held) == 1:
                await self._return_for_others(held[0][0])
            elif action < 0.35:
                late = [text for text in texts if world.sent[text].has_expired]
                await (self.session.rollback() if is_transacted else self.session.recover())
                now = self._registration()  # otherwise, it may have been a dead letter before it expired
                world.failed_late.update(text for text in late if self.registered[text] == now)
            else:
                await (self.session.commit() if is_transacted else held[-1][1].acknowledge())
                for text in texts:
                    if is_transacted and world.finished.get(text):
                        world.problem(text, "was committed twice")
                    world.finished[text] = is_transacted
        except message_errors.TransactionRolledBack:
            pass
        except BaseException:
            world.in_doubt.update(texts)
            raise

    def _registration(self) -> list[tuple[int, int]]:
        return [(link._epoch, link._registration_number) for link in self.connection._links.values()]

    async def _return_for_others(self, text: str) -> None:
        (entry,) = self.session.unacknowledged.values()
        self.returned.add(text)
        await self.consumer.pause()
        await self.connection.request(
            protocol.ReleaseMessages(self.connection.name, {entry.key: [entry.sequence]}, elsewhere=True)
        )
        self.session.unacknowledged.clear()
        self.excluded.add(text)
        if self.registered[text] != self._registration():
            self.returned.discard(text)  # it may not have counted as held
        await self.consumer.resume()

    async def close(self, *, lost: bool = False) -> None:
        self._is_stopping = True
        self.world.forget_owner(self)
        if lost:
            self.working.cancel()
        await asyncio.gather(self.working, return_exceptions=True)
        self.world.forget_owner(self)
        if lost:
            self.world.net.crash(self.connection.bus)  # type: ignore[arg-type]
        else:
            await self.connection.close()


class Subscriber:
    """The clients of one durable subscription, of which ``version`` changes when it is made; 0: there is
    none, or it is being changed."""

    def __init__(self, world: FeatureWorld, *, shared: bool) -> None:
        self.world, self.shared = world, shared
        self.name = "shared" if shared else "alone"
        self.version = self._versions = 0
        self.selector: str | None = None
        self.expected: set[str] = set()
        self.seen: set[str] = set()
        self.consumers: list[consumers.Consumer] = []
        self.reading: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        options = {} if self.shared else {"client_id": "client"}
        connections = [await self.world.connect(self.name, **options) for _ in range(1 + self.shared)]
        self.sessions = [connection.session() for connection in connections]

    async def attach(self, *selector: str | None) -> None:
        """With a given selector, or another one: then the subscription is replaced."""
        chance = self.world.chance
        wanted = selector[0] if selector else chance.choice([self.selector, *SELECTORS])
        await self.detach()
        if wanted != self.selector or not self.version:
            self.version, self.selector = 0, wanted
            self.expected.clear()
        for session in self.sessions[: chance.choice([1, 2])]:
            attach = session.shared_durable_consumer if self.shared else session.durable_consumer
            consumer = await attach(NEWS, self.name, wanted, prefetch=chance.choice(PREFETCH))
            self.consumers.append(consumer)
            self.reading.append(asyncio.ensure_future(self._read(consumer, wanted)))
        if not self.version:
            self._versions += 1
            self.version = self._versions

    async def _read(self, consumer: consumers.Consumer, selector: str | None) -> None:
        last, seen = -1, set[str]()
        try:
            while not consumer.closed:
                message = await consumer.receive(RECEIVE_S)
                if message is None:
                    continue
                text, sent = self.world.received(message, selector)
                if not message.redelivered:
                    if text in (seen if self.shared else self.seen):
                        self.world.problem(text, "was received again by", self.name, "and is not marked")
                    # What one of several consumers held comes to another one when it closes.
                    is_passed_on = self.shared and consumer not in self.consumers
                    if sent.number <= last and not (sent.delayed or is_passed_on):
                        self.world.problem(text, "came to", self.name, "after", last)
                    last = last if sent.delayed else sent.number
                seen.add(text)
                self.seen.add(text)
                self.expected.discard(text)
        except (errors.Unavailable, message_errors.IllegalState):
            pass

    async def detach(self) -> None:
        closing, self.consumers = self.consumers, []
        reading, self.reading = self.reading, []
        for consumer in closing:
            await consumer.close()
        await asyncio.gather(*reading)

    async def unsubscribe(self) -> None:
        await self.detach()
        if self.version:
            self.version = 0
            self.expected.clear()
            await self.sessions[0].unsubscribe(self.name)


async def _run(world: FeatureWorld) -> None:
    await world.begin()
    for _ in range(world.chance.randrange(60, 160)):
        await world.step()
    await world.end()


def _slow_reads(patch: pytest.MonkeyPatch, chance: random.Random, world: FeatureWorld) -> None:
    """Reading the log takes a while, and little of it stays in memory."""
    patch.setattr(message_cache, "LAST_MAX", chance.choice([2, 4, 50]))
    patch.setattr(backlog_reader, "READ_AHEAD", chance.choice([1, 3, 100]))
    patch.setattr(delivery, "IDLE_S", chance.choice([1.0, 30.0]))
    read, get = streams.SimulatedStream.read, streams.SimulatedStream.get

    async def pause() -> None:
        if world.slow_s and chance.random() < 0.5:
            await asyncio.sleep(chance.random() * world.slow_s)

    async def slow_read(stream: streams.SimulatedStream, *args: Any, **more: Any) -> AsyncIterator[Any]:
        await pause()
        async for page in read(stream, *args, **more):
            await pause()
            yield page

    async def slow_get(stream: streams.SimulatedStream, sequence: int) -> bus_api.StoredMessage:
        await pause()
        return await get(stream, sequence)

    patch.setattr(streams.SimulatedStream, "read", slow_read)
    patch.setattr(streams.SimulatedStream, "get", slow_get)


def run(seed: int) -> list[str]:
    """The broken promises of one seed."""
    chance = random.Random(seed)
    patch = pytest.MonkeyPatch()
    runner = asyncio.Runner(loop_factory=virtual_clock.VirtualLoop)
    loop = runner.get_loop()
    patch.setattr(time, "time_ns", lambda: virtual_clock.EPOCH_NS + round(loop.time() * 1e9))
    patch.setattr("secrets.token_hex", lambda size=32: chance.randbytes(size).hex())

    async def main() -> FeatureWorld:
        world = FeatureWorld(chance)
        _slow_reads(patch, chance, world)
        try:
            await _run(world)
        except errors.MusterError as error:
            world.problem("an operation failed:", repr(error))
        return world

    try:
        return runner.run(main()).problems
    finally:
        patch.undo()
        runner.close()


def main() -> None:
    first, count = map(int, sys.argv[1:3])
    for seed in range(first, first + count):
        for problem in run(seed):
            sys.stdout.write(f"seed {seed}: {problem}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{count} seeds done\n")


if __name__ == "__main__":
    main()
