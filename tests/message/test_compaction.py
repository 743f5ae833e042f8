"""Pages that are nearly useless are packed: nothing needed is lost, and the rest is deleted."""

from __future__ import annotations

import asyncio
import random

import pytest

from muster.bus.memory import network
from muster.core import topics
from muster.message import destinations, messages, partitions, settings
from muster.message.client import api
from muster.message.dispatcher import dispatcher, leadership
from muster.message.dispatcher.log import compaction, journal, ledger, log_reader
from muster.testing import virtual_clock
from tests.message import test_races
from tests.message.test_shared_pages import stored

pytestmark = pytest.mark.virtual_time

JOBS = destinations.queue("jobs")
SUBJECTS = partitions.LogSubjects()
LOG_BYTES = 2 << 20
ROUND = 40  # messages of 5 kB


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes with the loop."""
    monkeypatch.setattr("time.time_ns", virtual_clock.FakeClock().time_ns)


async def test_a_message_that_no_consumer_selects_does_not_retain_those_after_it(
    simulated_network: network.SimulatedNetwork,
):
    """The log is written eight times over, and no sender waits."""
    net = simulated_network
    started = leadership.DispatcherLeadership(
        await net.connect("dispatcher"), settings.MessageSettings(), lease_ttl_s=2, max_bytes=LOG_BYTES
    )
    running = asyncio.create_task(started.run())
    async with api.Connection(await net.connect("a")) as connection:
        session = connection.session()
        consumer = await session.consumer(JOBS, "kind IS NULL")
        producer = session.producer(JOBS)
        sent = 0
        while sent * 5000 < 8 * LOG_BYTES:
            rare = messages.TextMessage(f"{sent}", properties={"kind": "rare"})
            futures = [producer.submit(rare), *(producer.submit("x" * 5000) for _ in range(ROUND))]
            async with asyncio.timeout(3):
                await asyncio.gather(*futures)
            for _ in range(ROUND):
                assert await consumer.receive(3) is not None
            sent += ROUND
            await asyncio.sleep(0.3)
        kept = [str(message.body()) async for message in session.browse(JOBS)]
        assert kept == [f"{number}" for number in range(0, sent, ROUND)]
        assert len(await stored(net, f"{SUBJECTS.sorted_prefix}>")) < 5
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    async with test_races.serving(net), api.Connection(await net.connect("a")) as connection:
        consumer = await connection.session().consumer(JOBS)
        assert await test_races.received(consumer) == kept


async def test_an_idle_subscription_retains_no_messages_of_other_topics(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    started = leadership.DispatcherLeadership(
        await net.connect("dispatcher"), settings.MessageSettings(), lease_ttl_s=2, max_bytes=LOG_BYTES
    )
    running = asyncio.create_task(started.run())
    quiet, busy = destinations.topic("quiet"), destinations.topic("busy")
    async with api.Connection(await net.connect("a"), client_id="app") as connection:
        session = connection.session()
        await (await session.durable_consumer(quiet, "idle")).close()
        consumer = await session.durable_consumer(busy, "all")
        await session.producer(quiet).send("one")
        producer = session.producer(busy)
        for _ in range(8 * LOG_BYTES // (ROUND * 5000)):
            async with asyncio.timeout(3):
                await asyncio.gather(*(producer.submit("x" * 5000) for _ in range(ROUND)))
            for _ in range(ROUND):
                assert await consumer.receive(3) is not None
            await asyncio.sleep(0.3)
        assert await test_races.received(await session.durable_consumer(quiet, "idle")) == ["one"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


KEYS = {
    **{ledger.queue_key(name): destinations.queue(name) for name in ("a", "b")},
    "s:x:app:all": destinations.topic("news/x"),
}


class RandomLog:
    """A dispatcher whose log is written, acknowledged, read, sorted and packed in any order."""

    def __init__(self, net: network.SimulatedNetwork, seed: int) -> None:
        self.net = net
        self.random = random.Random(seed)
        self.live: dict[str, dict[int, str]] = {key: {} for key in KEYS}
        self.bodies = 0
        self.epoch = 0
        self.packing = asyncio.Lock()

    async def start(self) -> None:
        self.epoch += 1
        self.acting, self.running = await test_races.act(self.net, f"dispatcher-{self.epoch}", self.epoch)

    async def kill(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    async def send(self) -> None:
        copies: list[journal.JournalMessage] = []
        keys = self.random.sample(list(KEYS), self.random.choice([1, 1, 2, 3]))
        for _ in range(self.random.choice([1, 10, 60])):
            self.bodies += 1
            to = KEYS[self.random.choice(keys)]
            body = f"{self.bodies}".ljust(self.random.choice([10, 2000])).encode()
            copies.append(self.acting._delivery.copy_to(to, messages.MessageMeta(), "{}", body))
        record = ledger.LogRecord(stored=journal.count_by_queue(copies))
        numbers = await self.acting._log.store(journal.JournalItem(copies, record))
        for copy, number in zip(copies, numbers, strict=True):
            key = next(key for key, to in KEYS.items() if to == copy.destination)
            self.live[key][number] = copy.data.decode()

    async def acknowledge(self) -> None:
        key = self.random.choice(list(KEYS))
        share = self.random.choice([0.1, 0.9, 1.0])
        numbers = [number for number in self.live[key] if self.random.random() < share]
        for number in numbers:
            del self.live[key][number]
        await self.acting._log.store(journal.JournalItem([], ledger.LogRecord(acked={key: numbers})))

    async def read(self) -> None:
        """What was there from the beginning to the end of the reader is found once, in order."""
        key = self.random.choice(list(KEYS))
        before = list(self.live[key])
        first = self.random.choice(before) if before and self.random.random() < 0.5 else 0
        found: dict[int, str] = {}
        reader, subject = self.acting._log.reader, self._subject(key)
        async for together in reader.read(subject, first):
            for number, _, held in together:
                assert number not in found, "it was read twice"
                assert not found or number > max(found), "out of order"
                found[number] = held.data.decode()
            await asyncio.sleep(self.random.choice([0, 0.001, 0.1]))
        left = {number: self.live[key][number] for number in before if number in self.live[key]}
        expected = {number: body for number, body in left.items() if number >= first}
        assert {number: found.get(number) for number in expected} == expected

    async def find(self) -> None:
        key = self.random.choice(list(KEYS))
        some_of_them = [number for number in self.live[key] if self.random.random() < 0.3]
        found: dict[int, str] = {}
        async for _, messages_of_page in self.acting._log.reader.find(self._subject(key), some_of_them):
            found |= {number: held.data.decode() for number, _, held in messages_of_page}
            await asyncio.sleep(self.random.choice([0, 0.001]))
        expected = {number: self.live[key][number] for number in some_of_them if number in self.live[key]}
        assert {number: found.get(number) for number in expected} == expected

    def _subject(self, key: str) -> str:
        to = KEYS[key]
        return SUBJECTS.queue(to.name) if to.is_queue else SUBJECTS.topic(topics.Topic.parse(to.name).subject)

    async def checkpoint(self) -> None:
        await self.acting._write_checkpoint()

    async def pack(self) -> None:
        async with self.packing:
            await compaction.pack(self.acting._log, self.acting._write_checkpoint)


@pytest.mark.parametrize("seed", range(20))
async def test_what_is_needed_is_found_while_the_log_is_sorted_and_packed(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, seed: int
):
    monkeypatch.setattr(log_reader, "GETS_MAX", 2)
    monkeypatch.setattr(dispatcher, "WATCH_S", 1000.0)
    monkeypatch.setattr(compaction, "DENSE", [1, 4, 10][seed % 3])
    log = RandomLog(simulated_network, seed)
    await log.start()
    topic = ledger.DurableSubscription(
        key="s:x:app:all", name="all", topic="news/x", identity="x", client_id="app"
    )
    await log.acting._log.store(journal.JournalItem([], ledger.LogRecord(subscribed=[topic])))
    log.acting._log.patterns.add(topic.topic)
    under_way: set[asyncio.Task[None]] = set()
    for _ in range(60):
        what = log.random.choice(
            [log.send] * 4 + [log.acknowledge] * 3 + [log.read] * 3 + [log.find, log.checkpoint, log.pack]
        )
        task = asyncio.create_task(what())
        under_way.add(task)
        if log.random.random() < 0.5:
            await asyncio.gather(*under_way)
            under_way.clear()
        elif log.random.random() < 0.1:
            writes = [each for each in under_way if not each.done()]
            await asyncio.gather(*writes)
            await log.kill()
            await log.start()
    await asyncio.gather(*under_way)
    for key in KEYS:
        await log.acting._log.store(
            journal.JournalItem([], ledger.LogRecord(acked={key: list(log.live[key])}))
        )
    await log.checkpoint()
    await log.pack()
    of_log = (SUBJECTS.checkpoint, SUBJECTS.record)
    assert [page.subject for page in await stored(simulated_network) if page.subject not in of_log] == []
    await log.kill()
