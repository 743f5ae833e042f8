"""Pages with messages of several destinations: stored at once, sorted at a checkpoint, found again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from muster.bus import api as bus_api
from muster.bus.memory import network, streams
from muster.message import destinations, messages, partitions, protocol, settings
from muster.message import errors as message_errors
from muster.message.client import api
from muster.message.dispatcher import backlog_reader, dispatcher, large_bodies, leadership
from muster.message.dispatcher.log import (
    checkpoints,
    compaction,
    journal,
    ledger,
    log_reader,
    message_cache,
    pages,
    shared_pages,
)
from muster.testing import virtual_clock
from tests.message import test_races

pytestmark = pytest.mark.virtual_time

QUEUES = [destinations.queue(name) for name in ("a", "b", "c")]
NEWS = [destinations.topic(f"news/{name}") for name in "xy"]
SUBJECTS = partitions.LogSubjects()


@pytest.fixture(autouse=True)
def read_from_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly everything that is delivered, and the clock goes with the loop."""
    monkeypatch.setattr("time.time_ns", virtual_clock.FakeClock().time_ns)
    monkeypatch.setattr(message_cache, "LAST_MAX", 3)
    monkeypatch.setattr(backlog_reader, "READ_AHEAD", 4)


async def send(session: api.Session, to: list[destinations.Destination], *bodies: str) -> None:
    """Each body to each destination, in one transaction."""
    for body in bodies:
        for destination in to:
            await session.producer(destination).send(body)
    await session.commit()


async def stored(net: network.SimulatedNetwork, subject: str = ">") -> list[bus_api.StoredMessage]:
    stream = await (await net.connect("reader-of-the-log")).open_stream(partitions.stream(0))
    first = (await stream.state()).first_sequence
    return [page async for page in stream.read(first, subject=subject, gaps=True)]


async def test_a_transaction_over_several_destinations_is_one_page(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    async with test_races.serving(net), api.Connection(await net.connect("a"), client_id="app") as connection:
        session = connection.session(api.AcknowledgeMode.TRANSACTED)
        news = await connection.session().durable_consumer(destinations.topic("news/*"), "all")
        readers = [await connection.session().consumer(queue) for queue in QUEUES]
        before = (await stored(net))[-1].sequence
        await send(session, [*QUEUES, *NEWS], "1", "2")
        pages_made = [page for page in await stored(net) if page.sequence > before]
        assert [page.subject for page in pages_made][:1] == [SUBJECTS.shared]
        assert not [page for page in pages_made[1:] if list(pages.read(page))]
        for reader in readers:
            assert await test_races.received(reader) == ["1", "2"]
        assert sorted(await test_races.received(news)) == ["1", "1", "2", "2"]
        rows = (await connection.request(protocol.ListQueues())).queues
        assert [(row.queue, row.depth) for row in rows] == [("a", 0), ("b", 0), ("c", 0)]


async def test_messages_are_in_order_whatever_pages_they_are_in(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    """Some alone and some with others, before, between and after checkpoints, read by the next dispatcher."""
    monkeypatch.setattr(dispatcher, "WATCH_S", 0.2)
    net = simulated_network
    expected: list[str] = []
    for _ in range(3):
        async with (
            test_races.serving(net, checkpoint_records=10),
            api.Connection(await net.connect("a"), client_id="app") as connection,
        ):
            await (await connection.session().durable_consumer(destinations.topic("news/x"), "x")).close()
            session = connection.session(api.AcknowledgeMode.TRANSACTED)
            for number in range(18):
                bodies = [f"{len(expected)}", f"{len(expected) + 1}"]
                await send(session, [QUEUES[0]] if number % 3 else [*QUEUES, *NEWS], *bodies)
                if number % 3 == 1:
                    await send(session, [NEWS[0], QUEUES[1]], *bodies)
                expected += bodies
                await asyncio.sleep(0.1)
            await asyncio.sleep(1)
    alone = {number for number in range(0, 108, 2) if number // 2 % 18 % 3}
    by_two = {number for number in alone if number // 2 % 18 % 3 == 1}
    async with test_races.serving(net), api.Connection(await net.connect("a"), client_id="app") as connection:
        session = connection.session()
        browsed = [str(message.body()) async for message in session.browse(QUEUES[0])]
        assert browsed == expected
        assert await test_races.received(await session.consumer(QUEUES[0])) == expected
        of_b = [body for body in expected if int(body) // 2 * 2 not in alone - by_two]
        assert await test_races.received(await session.consumer(QUEUES[1])) == of_b
        news = await session.durable_consumer(destinations.topic("news/x"), "x")
        assert await test_races.received(news) == of_b
        of_c = [body for body in expected if int(body) // 2 * 2 not in alone]
        assert await test_races.received(await session.consumer(QUEUES[2])) == of_c


async def test_a_queue_that_nobody_reads_retains_no_messages_of_others(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatcher, "WATCH_S", 0.2)
    net = simulated_network
    async with (
        test_races.serving(net, checkpoint_records=10),
        api.Connection(await net.connect("a")) as connection,
    ):
        session = connection.session(api.AcknowledgeMode.TRANSACTED)
        reader = await connection.session().consumer(QUEUES[1])
        await send(session, QUEUES[:2], "x" * 1000)
        for number in range(40):
            await send(session, QUEUES[1:], f"{number}" + "x" * 1000)
        assert len(await test_races.received(reader)) == 41
        purging = protocol.PurgeQueue("c")
        assert (await connection.request(purging)).count == 40
        for number in range(20):
            await session.producer(QUEUES[1]).send(f"{number}")
            await session.commit()
            await asyncio.sleep(0.1)
        assert not await stored(net, SUBJECTS.shared)
        sorted_pages = await stored(net, f"{SUBJECTS.sorted_prefix}>")
        assert {page.subject for page in sorted_pages} == {SUBJECTS.sorted(SUBJECTS.queue("a"))}
        assert sum(len(page.data) for page in sorted_pages) < 2000
        assert [str(await _body(connection))[:1]] == ["x"]
        async with asyncio.timeout(30):  # virtual
            while await stored(net, f"{SUBJECTS.sorted_prefix}>"):
                await session.producer(QUEUES[1]).send("more records")
                await session.commit()
                await asyncio.sleep(0.1)


async def _body(connection: api.Connection) -> Any:
    async with await connection.session().consumer(QUEUES[0]) as consumer:
        message = await consumer.receive(3)
        assert message is not None
        return message.body()


async def test_delayed_messages_wait_with_others_until_they_are_due(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    """Some of a page before the checkpoint that sorts it, some after, and some by the next dispatcher."""
    net = simulated_network
    first, running = await test_races.act(net, "first", 1)
    shared = first._log
    delayed = f"{SUBJECTS.sorted_prefix}delay"
    async with api.Connection(await net.connect("a")) as connection:
        session = connection.session(api.AcknowledgeMode.TRANSACTED)
        reader = await connection.session().consumer(QUEUES[0])
        before = (await stored(net))[-1].sequence
        for delay_s in (0, 2, 12, 15, 25, 40):
            await session.producer(QUEUES[0], delay_s=delay_s).send(f"{delay_s}")
        await session.commit()
        made = [page for page in await stored(net) if page.sequence > before and list(pages.read(page))]
        assert [(page.subject, len(list(pages.read(page)))) for page in made] == [(SUBJECTS.shared, 6)]
        assert await test_races.received(reader, 5) == ["0", "2"]
        (cancelled,) = (
            row
            for row in (await connection.request(protocol.ListScheduled())).scheduled
            if row.delivery_time_ms - row.timestamp_ms == 15_000
        )
        for _ in range(2):  # the second one sorts nothing
            await checkpoints.write(shared)
            assert not await stored(net, SUBJECTS.shared)
            ((numbered),) = map(list, map(pages.read, await stored(net, delayed)))
            assert len(numbered) == 4
            assert not shared.ledger.delayed_done
        assert (await connection.request(protocol.CancelScheduled(number=cancelled.number))).count == 1
        assert await test_races.received(reader, 8) == ["12"]
        await checkpoints.write(shared)
        assert len(await stored(net, delayed)) == 1
        assert len(shared.ledger.delayed_done) == 2
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        second, running = await test_races.act(net, "second", 2)
        assert await test_races.received(reader, 12) == ["25"]
        assert await test_races.received(reader, 15) == ["40"]
        await checkpoints.write(second._log)
        assert not await stored(net, delayed)
        assert not second._log.ledger.delayed_done
        assert not list(second._log.shared_pages)
        assert not await stored(net, SUBJECTS.delay)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_delayed_messages_of_the_former_version_have_pages_of_their_own(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    bus = await net.connect("former")
    stream = await bus.stream(
        bus_api.StreamSettings(partitions.stream(0), SUBJECTS.all, max_age_s=0, max_bytes=1 << 30)
    )
    due_ms = time.time_ns() // 1_000_000 + 5_000
    meta = messages.MessageMeta(destination=str(QUEUES[0]), delivery_time_ms=due_ms)
    raw = messages.encode_meta(meta).decode()
    done, _ = [
        await stream.publish(SUBJECTS.delay, msgspec.msgpack.encode([None, [[raw, body]]]))
        for body in (b"done", b"due")
    ]
    record = ledger.LogRecord(acked={ledger.DELAY_KEY: [pages.number(int(done), 0)]})
    await stream.publish(SUBJECTS.record, msgspec.msgpack.encode([record, []]))
    async with test_races.serving(net), api.Connection(await net.connect("a")) as connection:
        consumer = await connection.session().consumer(QUEUES[0])
        assert await test_races.received(consumer, 10) == ["b'due'"]
        await asyncio.sleep(1)
        assert not await stored(net, SUBJECTS.delay)


async def test_what_a_dispatcher_sorted_before_it_died_is_not_found_twice(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    net = simulated_network
    first, running = await test_races.act(net, "first", 1)
    async with api.Connection(await net.connect("a")) as connection:
        await send(connection.session(api.AcknowledgeMode.TRANSACTED), QUEUES, "1", "2", "3")
        await compaction.sort(first._log)
        assert await stored(net, f"{SUBJECTS.sorted_prefix}>")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with test_races.serving(net):
            for queue in QUEUES:
                consumer = await connection.session().consumer(queue)
                assert await test_races.received(consumer) == ["1", "2", "3"]
            assert not await stored(net, f"{SUBJECTS.sorted_prefix}>")


async def test_a_large_body_is_kept_for_a_message_that_is_sorted_while_bodies_are_counted(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    """The message moves behind what is read, and its former page is deleted before it is read."""
    monkeypatch.setattr(dispatcher, "WATCH_S", 0.3)
    monkeypatch.setattr(streams, "PAGE", 2)
    net = simulated_network
    plain = log_reader.LogReader.read_pages

    async def slowly(reader: log_reader.LogReader, first: int, *args: Any) -> AsyncIterator[Any]:
        async for page in plain(reader, first, *args):
            if first == 1 and not args and counting.is_set():
                await asyncio.sleep(0.2)
            yield page

    counting = asyncio.Event()
    large = "x" * (1 << 20)
    async with test_races.serving(net), api.Connection(await net.connect("a")) as connection:
        for number in range(12):
            await connection.session().producer(QUEUES[1]).send(f"{number}")
        session = connection.session(api.AcknowledgeMode.TRANSACTED)
        await session.producer(QUEUES[0]).send(large)
        await session.producer(QUEUES[1]).send("small")
        await session.commit()
    monkeypatch.setattr(log_reader.LogReader, "read_pages", slowly)
    async with (
        test_races.serving(net, checkpoint_records=10),
        api.Connection(await net.connect("b")) as connection,
    ):
        counting.set()
        for number in range(40):
            await connection.session().producer(QUEUES[2]).send(f"{number}")
            await asyncio.sleep(0.1)
        await asyncio.sleep(large_bodies.UPLOAD_S + 60)
        message = await (await connection.session().consumer(QUEUES[0])).receive(3)
        assert message is not None
        assert message.body() == large


async def test_messages_are_read_while_they_are_sorted(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    """The checkpoint deletes the pages of which a reader knows."""
    monkeypatch.setattr(log_reader, "DENSE", 0)
    monkeypatch.setattr(log_reader, "GETS_MAX", 1)
    net = simulated_network
    acting, running = await test_races.act(net, "first", 1)
    async with api.Connection(await net.connect("a")) as connection:
        session = connection.session(api.AcknowledgeMode.TRANSACTED)
        for number in range(8):
            await send(session, QUEUES, f"{number}")
        shared, found = acting._log, []
        subject = SUBJECTS.queue("a")
        numbers = list(shared.shared_pages.unsorted(subject))
        async for together in shared.reader.read(subject):
            found += [number for number, _, _ in together]
            if len(found) == 1:
                await checkpoints.write(shared)
                assert not await stored(net, SUBJECTS.shared)
        assert found == numbers
        of_page = [found async for _, found in shared.reader.find(subject, numbers[2:4])]
        assert [number for found in of_page for number, _, _ in found] == numbers[2:4]
        for queue in QUEUES:
            await connection.request(protocol.PurgeQueue(queue.name))
        await checkpoints.write(shared)
        assert not list(shared.shared_pages)
        assert not await stored(net, f"{SUBJECTS.sorted_prefix}>")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("kilobytes", [200, 400, 2000])
async def test_a_log_without_room_is_not_sorted_and_loses_nothing(
    simulated_network: network.SimulatedNetwork, kilobytes: int
):
    net = simulated_network
    started = leadership.DispatcherLeadership(
        await net.connect("dispatcher"),
        settings.MessageSettings(checkpoint_records=10),
        lease_ttl_s=2,
        max_bytes=kilobytes << 10,
    )
    running = asyncio.create_task(started.run())
    async with api.Connection(await net.connect("a")) as connection:
        session = connection.session(api.AcknowledgeMode.TRANSACTED)
        sent: list[str] = []
        for number in range(1000):
            body = f"{number} ".ljust(9_000, "x")
            try:
                await send(session, QUEUES, body)
            except message_errors.TransactionRolledBack:
                break
            sent.append(body)
            await asyncio.sleep(0.2)
        assert 0.6 * (kilobytes << 10) < 27_000 * len(sent) < kilobytes << 10
        await asyncio.sleep(10)
        for queue in QUEUES:
            assert await test_races.received(await connection.session().consumer(queue)) == sent
        await asyncio.sleep(40)
        await send(session, QUEUES, *sent[: len(sent) // 2])  # there is room again
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_the_log_of_the_former_version_is_read(simulated_network: network.SimulatedNetwork):
    """Its pages have up to 1,024 messages, all of one destination."""
    net = simulated_network
    bus = await net.connect("former")
    stream = await bus.stream(
        bus_api.StreamSettings(partitions.stream(0), SUBJECTS.all[-2:], max_age_s=0, max_bytes=1 << 30)
    )
    meta = messages.encode_meta(messages.MessageMeta()).decode()
    for first in (0, 1024):
        record = ledger.LogRecord(stored={"q:a": 1024})
        held = [[meta, f"{number}".encode()] for number in range(first, first + 1024)]
        await stream.publish(SUBJECTS.queue("a"), msgspec.msgpack.encode([record, held]))
    bodies = [f"{number}".encode() for number in range(2048)]
    for chunk in range(2):
        async with test_races.serving(net), api.Connection(await net.connect("a")) as connection:
            session = connection.session(api.AcknowledgeMode.TRANSACTED)
            consumer = await session.consumer(QUEUES[0])
            for body in bodies[1000 * chunk : 1000 * (chunk + 1)]:
                message = await consumer.receive(3)
                assert message is not None
                assert message.body() == body
            await send(session, QUEUES[:2], f"new {chunk}")
    async with test_races.serving(net), api.Connection(await net.connect("a")) as connection:
        consumer = await connection.session().consumer(QUEUES[0])
        assert len(await test_races.received(consumer)) == 48 + 2


# The index


def test_a_message_is_found_where_it_was_last_written():
    index = shared_pages.SharedPages(SUBJECTS.group)
    a, b, topic = SUBJECTS.queue("a"), SUBJECTS.queue("b"), SUBJECTS.topic("topic.news")
    first = pages.number(7, pages.SHARED)
    index.stored(7, [(a, 2), (b, 1), (topic, 1)])
    index.stored(9, [(a, 1), (b, 1)])
    in_9 = pages.number(9, pages.SHARED)
    assert list(index.unsorted(a)) == [first, first + 1, in_9]
    assert list(index.unsorted(a, in_9)) == [in_9]
    assert list(index.unsorted(SUBJECTS.group(topic))) == [first + 3]
    assert index.is_unsorted(first)
    assert not index.is_unsorted(pages.number(9, 1)), "in a page of its destination alone"
    page = ledger.SortedPage(a, first, first + 1, 12, 2)
    index.sort(7, [page])
    assert (list(index.unsorted(a)), list(index.unsorted(b))) == ([in_9], [in_9 + 1])
    assert not index.is_unsorted(first)
    assert index.page_of(a, first + 1) == page
    assert index.page_of(a, first + 2) is index.page_of(b, first) is index.page_of(a, in_9) is None
    assert index.page_of(a, pages.number(7, 0)) is None, "of a page of its own, between those"
    assert [group in index for group in (a, b, "muster.message.log.topic")] == [True, True, False]
    assert index.sorted_pages(a, first + 1) == [page]
    assert index.sorted_pages(a, first + 2) == []
    assert index.obsolete({a: first}) == []
    assert index.obsolete({a: first + 1}) == [page]
    index.delete([page])
    assert list(index) == []
    assert a in index, "in the shared page 9"


def test_a_shared_page_has_what_fits_and_the_rest_is_in_further_ones():
    def copy(queue: str, size: int) -> journal.JournalMessage:
        to = destinations.queue(queue)
        return journal.JournalMessage(to, messages.MessageMeta(), "{}", bytes(size), SUBJECTS.queue(to.name))

    for sizes in ([100, 100], [300 << 10, 100 << 10], [300 << 10] * 4, [800 << 10, 100, 100], [10] * 2000):
        copies = [copy("abc"[at % 3], size) for at, size in enumerate(sizes)]
        made, places = journal._build_pages(copies, ledger.LogRecord(consumed=["q:a"]), 20, SUBJECTS)
        assert all(len(pages.encode(page)) < 1 << 20 for _, page in made)
        assert all(len(page.held) <= pages.PLACES for _, page in made)
        read: dict[int, tuple[str, bytes]] = {}
        for sequence, (subject, page) in enumerate(made, 1):
            message = bus_api.StoredMessage(subject, pages.encode(page), {}, sequence, 0)
            read |= {number: (of, held.data) for number, of, held in pages.read(message)}
        numbers = [pages.number(1 + page, place) for page, place in places]
        assert len(set(numbers)) == len(sizes)
        for copied, number in zip(copies, numbers, strict=True):
            assert read[number] == (copied.subject, copied.data)
            assert bool(number & pages.SHARED) == (made[(number >> pages.BITS) - 1][0] == SUBJECTS.shared)
        for queue in "abc":
            of_queue = [
                number
                for copied, number in zip(copies, numbers, strict=True)
                if copied.destination.name == queue
            ]
            assert of_queue == sorted(of_queue)
        if sizes == [10] * 2000:
            assert len(made) == 4
