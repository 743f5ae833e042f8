"""What happens while something else is stored, read or given back: the interleavings that lost messages.

In virtual time over the simulated network, so that each interleaving is the one that is meant.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from muster.bus import api
from muster.bus.memory import network, streams
from muster.core import errors
from muster.core import messages as core_messages
from muster.message import destinations, messages, partitions, protocol, settings
from muster.message import errors as message_errors
from muster.message.client import api as client_api
from muster.message.client import consumers
from muster.message.dispatcher import backlog, backlog_reader, delivery, dispatcher, leadership, rights
from muster.message.dispatcher.admin import queue_admin
from muster.message.dispatcher.index import lines
from muster.message.dispatcher.log import journal, message_cache
from muster.testing import virtual_clock
from muster.testing.eventually import eventually
from tests.message import backlog_driver as driver

pytestmark = pytest.mark.virtual_time

JOBS = destinations.queue("jobs")
OTHER = destinations.queue("other")
NEWS = destinations.topic("news")


class Disk:
    """Of the brokers: slow, or full, when a test says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self.full = False
        self.refusals = 0  # of the next batches, for want of room
        plain = streams.SimulatedStream.publish_batch

        async def store(stream: streams.SimulatedStream, *args: Any, **more: Any) -> int:
            if stream.name == partitions.stream(0):
                await self.ready.wait()
                if self.full or self.refusals:
                    self.refusals = max(0, self.refusals - 1)
                    raise errors.LimitExceeded("insufficient storage")
            return await plain(stream, *args, **more)

        patch.setattr(streams.SimulatedStream, "publish_batch", store)
        self.readable = asyncio.Event()
        self.readable.set()
        get = streams.SimulatedStream.get

        async def read(stream: streams.SimulatedStream, sequence: int) -> api.StoredMessage:
            await self.readable.wait()
            return await get(stream, sequence)

        patch.setattr(streams.SimulatedStream, "get", read)


@pytest.fixture
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes with the loop."""
    monkeypatch.setattr("time.time_ns", virtual_clock.FakeClock().time_ns)


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher reads nearly everything that it delivers from the log."""
    monkeypatch.setattr(message_cache, "LAST_MAX", 3)
    monkeypatch.setattr(backlog_reader, "READ_AHEAD", 4)


@pytest.fixture
async def disk(monkeypatch: pytest.MonkeyPatch, wall_clock: None) -> Disk:
    return Disk(monkeypatch)


@contextlib.asynccontextmanager
async def serving(
    net: network.SimulatedNetwork, *, may: rights.May = rights.allow_all, **expected: Any
) -> AsyncIterator[leadership.DispatcherLeadership]:
    started = leadership.DispatcherLeadership(
        await net.connect("dispatcher"), settings.MessageSettings(**expected), lease_ttl_s=2, may=may
    )
    running = asyncio.create_task(started.run())
    try:
        await started.acting.wait()
        yield started
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def act(
    net: network.SimulatedNetwork,
    name: str,
    epoch: int,
    change: Callable[[dispatcher.Dispatcher], None] = lambda made: None,
) -> tuple[dispatcher.Dispatcher, asyncio.Task[None]]:
    """A dispatcher without a lease; ``change`` it before it begins."""
    bus = await net.connect(name)
    stream = await bus.stream(
        api.StreamSettings(
            partitions.stream(0),
            partitions.LogSubjects().all,
            max_bytes=1 << 30,
            max_age_s=0,
            on_full=api.FullPolicy.REFUSE,
        )
    )
    made = dispatcher.Dispatcher(bus, stream, epoch, settings.MessageSettings())
    change(made)
    running = asyncio.create_task(made.run())
    await asyncio.sleep(0.3)
    return made, running


async def received(consumer: consumers.Consumer, timeout_s: float = 3.0) -> list[str]:
    bodies: list[str] = []
    while (message := await consumer.receive(timeout_s)) is not None:
        bodies.append(str(message.body()))
    return bodies


async def test_a_subscription_of_several_topics_gets_each_message_of_a_batch_once(
    simulated_network: network.SimulatedNetwork, wall_clock: None, small_memory: None
):
    net = simulated_network
    async with (
        serving(net),
        client_api.Connection(await net.connect("c"), client_id="app") as connection,
    ):
        subscription = destinations.topic("orders/*")
        consumer = await connection.session().durable_consumer(subscription, "all", prefetch=1)
        transacted = connection.session(client_api.AcknowledgeMode.TRANSACTED)
        producers = [transacted.producer(destinations.topic(f"orders/{each}")) for each in "ab"]
        for number in range(20):
            await producers[number % 2].send(f"{number}")
        await transacted.commit()
        assert sorted(await received(consumer), key=int) == [f"{number}" for number in range(20)]


async def test_a_delayed_message_arrives_though_a_send_is_stored_with_it(
    simulated_network: network.SimulatedNetwork, disk: Disk, small_memory: None
):
    net = simulated_network
    async with (
        serving(net),
        client_api.Connection(await net.connect("c")) as connection,
        client_api.Connection(await net.connect("d")) as other,
    ):
        consumer = await connection.session().consumer(JOBS, prefetch=1)
        session = other.session()
        await session.producer(JOBS, delay_s=1.0).send("delayed")
        for number in range(10):
            await session.producer(JOBS).send(f"{number}")
        disk.ready.clear()
        pending = [session.producer(OTHER).submit("in the way")]
        await asyncio.sleep(1.5)
        async with client_api.Connection(await net.connect("e")) as third:
            pending.append(third.session().producer(JOBS).submit("10"))
            await asyncio.sleep(0.5)
            disk.ready.set()
            await asyncio.gather(*pending)
            assert sorted(await received(consumer)) == sorted([*(f"{each}" for each in range(11)), "delayed"])


@pytest.mark.parametrize("purging", [False, True], ids=["move", "purge"])
async def test_what_is_being_moved_or_purged_goes_to_no_consumer(
    simulated_network: network.SimulatedNetwork, disk: Disk, purging: bool, small_memory: None
):
    net = simulated_network
    async with (
        serving(net),
        client_api.Connection(await net.connect("w")) as admin,
        client_api.Connection(await net.connect("a")) as connection,
    ):
        for number in range(60):
            await admin.session().producer(JOBS).send(f"{number}")
        consumer = await connection.session().consumer(JOBS, prefetch=4)
        first = await consumer.receive(3)
        assert first is not None
        requests = (
            protocol.PurgeQueue("jobs") if purging else protocol.MoveMessages("jobs", to=str(OTHER), limit=30)
        )
        await asyncio.sleep(0.5)  # its acknowledgement is stored: nothing is ahead of the request
        disk.ready.clear()
        taking = asyncio.create_task(admin.request(requests))
        await asyncio.sleep(0.1)
        late = await connection.session().consumer(JOBS, prefetch=4)  # with credit while it is stored
        eating = asyncio.gather(received(consumer), received(late))
        await asyncio.sleep(0.1)
        disk.ready.set()
        count, bodies = (await taking).count, itertools.chain(*await eating)
        eaten = [str(first.body()), *bodies]
        there = [str(message.body()) async for message in admin.session().browse(OTHER)]
        assert not set(eaten) & set(there)
        assert count + len(eaten) == 60


def due_at(destination: destinations.Destination, text: str, due_s: float) -> protocol.SendMessage:
    """A message with a delivery time, by the clock of the event loop."""
    due_ms = time.time_ns() // 1_000_000 + round((due_s - asyncio.get_running_loop().time()) * 1000)
    meta = messages.MessageMeta(
        kind="t", destination=str(destination), delivery_time_ms=due_ms, persistent=True
    )
    return protocol.SendMessage(str(destination), messages.encode_meta(meta).decode(), text.encode())


async def consumer_of(connection: client_api.Connection, kind: str) -> consumers.Consumer:
    session = connection.session()
    match kind:
        case "queue":
            return await session.consumer(JOBS)
        case "topic":
            return await session.consumer(NEWS)
        case _:
            return await session.durable_consumer(NEWS, "all")


@pytest.mark.parametrize("kind", ["queue", "topic", "durable"])
@pytest.mark.parametrize("stage", ["stored", "released", "refused"])
async def test_a_message_that_is_due_when_it_arrives_overtakes_no_delayed_one(
    simulated_network: network.SimulatedNetwork, disk: Disk, kind: str, stage: str
):
    """While the earlier one is being stored, being released, or not released because the log is full."""
    net = simulated_network
    destination = JOBS if kind == "queue" else NEWS
    async with (
        serving(net),
        client_api.Connection(await net.connect("r"), client_id="app") as reader,
        client_api.Connection(await net.connect("a")) as first,
        client_api.Connection(await net.connect("b")) as second,
    ):
        consumer = await consumer_of(reader, kind)
        now = asyncio.get_running_loop().time()
        if stage == "stored":
            disk.ready.clear()
        pending = [first.submit([due_at(destination, "1", now + 0.2)])]
        await asyncio.sleep(0.1)
        if stage == "released":
            disk.readable.clear()
        if stage == "refused":
            disk.refusals = 1
        await asyncio.sleep(0.3)
        pending.append(second.submit([due_at(destination, "3", now + 0.3)]))
        await asyncio.sleep(0.1)
        pending.append(second.submit([due_at(destination, "2", now + 0.25)]))
        await asyncio.sleep(0.1)
        disk.ready.set()
        disk.readable.set()
        await asyncio.gather(*pending)
        received_texts = await received(consumer)
        assert received_texts[0] == "1"
        assert sorted(received_texts) == ["1", "2", "3"]
        if stage == "refused":
            assert received_texts == ["1", "2", "3"], "by delivery time: all three were waiting"


@pytest.mark.parametrize("kind", ["queue", "durable"])
async def test_a_message_overtakes_no_delayed_one_of_an_earlier_dispatcher(
    simulated_network: network.SimulatedNetwork, disk: Disk, kind: str
):
    net = simulated_network
    destination = JOBS if kind == "queue" else NEWS
    async with contextlib.AsyncExitStack() as clients:
        sender = await clients.enter_async_context(client_api.Connection(await net.connect("a")))
        now = asyncio.get_running_loop().time()
        async with serving(net):
            reader = client_api.Connection(await net.connect("r"), client_id="app")
            consumer = await consumer_of(await clients.enter_async_context(reader), kind)
            await sender.submit([due_at(destination, "1", now + 5)])
            await sender.submit([due_at(destination, "2", now + 5.5)])
        await asyncio.sleep(10)
        disk.readable.clear()
        async with serving(net):
            await sender.submit([due_at(destination, "3", now + 6)])
            disk.readable.set()
            assert await received(consumer) == ["1", "2", "3"]


async def test_of_two_transactions_one_commits_the_acknowledgement_of_a_message(
    simulated_network: network.SimulatedNetwork, disk: Disk
):
    net = simulated_network
    async with (
        serving(net),
        client_api.Connection(await net.connect("w")) as writer,
        client_api.Connection(await net.connect("a")) as first,
        client_api.Connection(await net.connect("b")) as second,
    ):
        await writer.session().producer(JOBS).send("job")
        first_session, two = (each.session(client_api.AcknowledgeMode.TRANSACTED) for each in (first, second))
        assert await (await first_session.consumer(JOBS, prefetch=1)).receive(5) is not None
        await first_session.producer(OTHER).send("done by the first")
        other = await two.consumer(JOBS, prefetch=1)
        disk.ready.clear()
        committing = asyncio.create_task(first_session.commit())
        await asyncio.sleep(0.2)
        net.disconnect(first.bus)  # type: ignore[arg-type]
        assert await other.receive(2) is None, "its acknowledgement is being stored"
        disk.ready.set()
        await committing
        assert await other.receive(2) is None
        assert [str(each.body()) async for each in writer.session().browse(OTHER)] == ["done by the first"]


async def test_what_a_refused_commit_acknowledged_goes_to_others(
    simulated_network: network.SimulatedNetwork, disk: Disk
):
    net = simulated_network
    async with (
        serving(net),
        client_api.Connection(await net.connect("w")) as writer,
        client_api.Connection(await net.connect("a")) as first,
        client_api.Connection(await net.connect("b")) as second,
    ):
        await writer.session().producer(JOBS).send("job")
        first_session, two = (each.session(client_api.AcknowledgeMode.TRANSACTED) for each in (first, second))
        assert await (await first_session.consumer(JOBS, prefetch=1)).receive(5) is not None
        other = await two.consumer(JOBS, prefetch=1)
        disk.ready.clear()
        committing = asyncio.create_task(first_session.commit())
        await asyncio.sleep(0.2)
        await first.home.request_once(protocol.Disconnect(first.name, lost=True))
        disk.full = True
        disk.ready.set()
        with pytest.raises(message_errors.TransactionRolledBack):
            await committing
        disk.full = False
        again = await other.receive(2)
        assert again is not None
        assert again.redelivered


@pytest.mark.parametrize("patience_s", [0.0, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.006])
async def test_a_cancelled_rollback_loses_track_of_nothing(
    simulated_network: network.SimulatedNetwork, wall_clock: None, patience_s: float
):
    net = simulated_network
    async with serving(net), client_api.Connection(await net.connect("a")) as connection:
        for number in range(5):
            await connection.session().producer(JOBS).send(f"{number}")
        session = connection.session(client_api.AcknowledgeMode.TRANSACTED)
        consumer = await session.consumer(JOBS)
        assert await consumer.receive(2) is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await session.rollback()
        await asyncio.sleep(1)
        assert await received(consumer) == [f"{number}" for number in range(5)]
        await session.rollback()
        assert await received(consumer) == [f"{number}" for number in range(5)]


@pytest.mark.parametrize("refused", [False, True])
async def test_a_cancelled_commit_is_done_or_gives_its_messages_back(
    simulated_network: network.SimulatedNetwork, disk: Disk, refused: bool
):
    net = simulated_network
    async with serving(net), client_api.Connection(await net.connect("a")) as connection:
        await connection.session().producer(JOBS).send("job")
        session = connection.session(client_api.AcknowledgeMode.TRANSACTED)
        consumer = await session.consumer(JOBS)
        assert await consumer.receive(2) is not None
        disk.ready.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await session.commit()
        disk.full = refused
        disk.ready.set()
        await asyncio.sleep(0.1)
        disk.full = False
        assert await received(consumer) == (["job"] if refused else [])


@pytest.mark.parametrize("waits", [False, True], ids=["after", "during"])
async def test_a_refused_commit_takes_nothing_from_the_next_transaction(
    simulated_network: network.SimulatedNetwork, disk: Disk, waits: bool
):
    """The caller gives up on a commit, receives more and commits again; then the first commit is refused."""
    net = simulated_network
    async with serving(net), client_api.Connection(await net.connect("a")) as connection:
        for text in ("first", "second"):
            await connection.session().producer(JOBS).send(text)
        session = connection.session(client_api.AcknowledgeMode.TRANSACTED)
        consumer = await session.consumer(JOBS)
        assert await consumer.receive(2) is not None
        disk.ready.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await session.commit()
        second = await consumer.receive(2)
        assert second is not None
        assert second.body() == "second"
        committing = asyncio.create_task(session.commit()) if waits else None
        await asyncio.sleep(0.1)
        disk.refusals = 1
        disk.ready.set()
        await asyncio.sleep(0.1)
        await (committing or session.commit())
        assert await received(consumer) == ["first"]


async def test_a_commit_does_not_contain_what_came_again_after_it_began(
    simulated_network: network.SimulatedNetwork, disk: Disk
):
    """Several commits wait. One fails, so its message comes again, and is part of the commit after that."""
    net = simulated_network
    async with serving(net), client_api.Connection(await net.connect("a")) as connection:
        session = connection.session(client_api.AcknowledgeMode.TRANSACTED)
        consumer = await session.consumer(JOBS)
        commits: list[asyncio.Task[None]] = []
        disk.ready.clear()
        sending = [connection.session().producer(JOBS).submit(text) for text in "abc"]
        disk.ready.set()
        await asyncio.gather(*sending)
        for text in "abc":
            assert (received_message := await consumer.receive(3)) is not None
            assert received_message.body() == text
            disk.ready.clear()
            commits.append(asyncio.create_task(session.commit()))
            await asyncio.sleep(0.1)
        commits.append(asyncio.create_task(session.commit()))
        await asyncio.sleep(0.1)
        disk.ready.set()
        await commits[0]
        disk.refusals = 1
        with pytest.raises(message_errors.TransactionRolledBack):
            await commits[1]
        disk.ready.clear()
        assert (again := await consumer.receive(3)) is not None
        assert again.body() == "b"
        last = asyncio.create_task(session.commit())
        await asyncio.sleep(0.1)
        disk.ready.set()
        await commits[2]
        disk.refusals = 1
        outcomes = await asyncio.gather(commits[3], last, return_exceptions=True)
        left = await received(consumer)
        assert left == ([] if outcomes[1] is None else ["b"])


async def test_what_a_commit_in_doubt_acknowledged_is_in_no_later_commit(
    simulated_network: network.SimulatedNetwork, wall_clock: None
):
    """Otherwise its messages would be done, and what it sent would not be."""
    net = simulated_network
    async with client_api.Connection(await net.connect("a")) as connection:
        session = connection.session(client_api.AcknowledgeMode.TRANSACTED)
        async with serving(net):
            for text in ("first", "second"):
                await connection.session().producer(JOBS).send(text)
            consumer = await session.consumer(JOBS, prefetch=1)
            assert await consumer.receive(2) is not None
            await session.producer(OTHER).send("of the first")
        connection.in_doubt_s = 1.0
        with pytest.raises(errors.TimedOut):
            await session.commit()
        connection.in_doubt_s = 60.0
        async with serving(net):
            second = await consumer.receive(10)
            assert second is not None
            assert second.body() == "second"
            await session.commit()
            assert await received(consumer) == ["first"]
            assert [each async for each in session.browse(OTHER)] == []


async def test_a_new_dispatcher_marks_what_a_lost_consumer_had_received(
    simulated_network: network.SimulatedNetwork, wall_clock: None
):
    net = simulated_network
    async with serving(net):
        first = client_api.Connection(await net.connect("a"))
        session = first.session(client_api.AcknowledgeMode.CLIENT)
        await session.producer(JOBS).send("job")
        assert await (await session.consumer(JOBS)).receive(2) is not None
        await first.close(lost=True)
    async with serving(net), client_api.Connection(await net.connect("b")) as second:
        again = await (await second.session().consumer(JOBS)).receive(10)
        assert again is not None
        assert again.redelivered


async def test_the_mark_of_an_earlier_delivery_survives_a_dispatcher_that_delivered_nothing(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, wall_clock: None
):
    """The second dispatcher loses its consumer before it has read the log; the third one delivers."""
    net = simulated_network
    async with serving(net):
        first = client_api.Connection(await net.connect("a"))
        session = first.session(client_api.AcknowledgeMode.CLIENT)
        await session.producer(JOBS).send("job")
        assert await (await session.consumer(JOBS)).receive(2) is not None
        await first.close(lost=True)
    read_page = streams.SimulatedStream.page
    async with serving(net), client_api.Connection(await net.connect("b")) as second:

        async def slow_page(*args: Any) -> Any:
            await asyncio.sleep(1)
            return await read_page(*args)

        monkeypatch.setattr(streams.SimulatedStream, "page", slow_page)
        await (await second.session().consumer(JOBS)).close()
        await asyncio.sleep(3)
        monkeypatch.setattr(streams.SimulatedStream, "page", read_page)
    async with serving(net), client_api.Connection(await net.connect("c")) as third:
        again = await (await third.session().consumer(JOBS)).receive(10)
        assert again is not None
        assert again.redelivered


async def test_a_connection_that_was_refused_is_served_when_there_is_room(
    simulated_network: network.SimulatedNetwork, wall_clock: None
):
    net = simulated_network
    async with (
        serving(net, connections_per_identity=1),
        client_api.Connection(await net.connect("w")) as writer,
        client_api.Connection(await net.connect("a")) as first,
    ):
        consumer = await first.session().consumer(JOBS)
        await first.home.request_once(protocol.Disconnect(first.name, lost=True))
        async with client_api.Connection(await net.connect("a")) as second:
            await second.session().consumer(OTHER)
            refused: list[errors.MusterError] = []
            first.on_error = refused.append
            await eventually(lambda: bool(refused))
            assert [type(error) for error in refused] == [errors.LimitExceeded]
        await writer.session().producer(JOBS).send("job")
        assert await consumer.receive(30) is not None


async def test_an_identity_stages_at_most_half_of_what_may_wait(
    simulated_network: network.SimulatedNetwork, wall_clock: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(journal, "QUEUED_BYTES_MAX", 4_000)
    net = simulated_network

    async def stage(connection: client_api.Connection) -> None:
        send = protocol.SendMessage(str(JOBS), "{}", b"x" * 1_500)
        await connection.home.request_once(protocol.StageMessages(connection.name, 1, 0, [send]))

    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(serving(net))
        first, second, other = [
            await stack.enter_async_context(client_api.Connection(await net.connect(name)))
            for name in ("a", "a", "b")
        ]
        for connection in (first, second, other):
            await connection.request(protocol.Ping(connection.name))
        await stage(first)
        with pytest.raises(errors.Overloaded):
            await stage(second)
        await stage(other)
        await first.close()
        await stage(second)


async def test_acknowledgements_for_which_there_was_no_room_are_stored_when_there_is(
    simulated_network: network.SimulatedNetwork, disk: Disk
):
    net = simulated_network
    async with (
        serving(net),
        client_api.Connection(await net.connect("w")) as writer,
        client_api.Connection(await net.connect("a")) as connection,
    ):
        failures: list[errors.MusterError] = []
        connection.on_error = failures.append
        for number in range(20):
            await writer.session().producer(JOBS).send(f"{number}")
        consumer = await connection.session().consumer(JOBS, prefetch=20)
        disk.full = True
        got = [await consumer.receive(2) for _ in range(10)]
        assert all(got)
        await asyncio.sleep(30)
        assert len(failures) == 1, "the application is notified once"
        disk.full = False
        assert await received(consumer) == [f"{number}" for number in range(10, 20)]
        await connection.outbox.wait_idle()
        assert (await writer.request(protocol.ListQueues())).queues[0].depth == 0


async def test_a_consumer_is_attached_again_as_soon_as_the_log_has_space(
    simulated_network: network.SimulatedNetwork, disk: Disk
):
    net = simulated_network
    async with (
        serving(net),
        client_api.Connection(await net.connect("w")) as writer,
        client_api.Connection(await net.connect("a")) as connection,
    ):
        connection.on_error = lambda _: None
        consumer = await connection.session().consumer(JOBS)
        await asyncio.sleep(1)
        disk.full = True
        net.disconnect(connection.bus)  # type: ignore[arg-type]
        await asyncio.sleep(10)
        disk.full = False
        await writer.session().producer(JOBS).send("job")
        assert await received(consumer, 10) == ["job"]


async def test_closing_while_acknowledgements_are_slow_marks_what_was_handled(
    simulated_network: network.SimulatedNetwork, disk: Disk
):
    net = simulated_network
    async with serving(net), client_api.Connection(await net.connect("b")) as second:
        await second.session().producer(JOBS).send("job")
        async with client_api.Connection(await net.connect("a")) as first:
            assert await (await first.session().consumer(JOBS)).receive(2) is not None
            disk.full = True  # so the acknowledgement waits, and longer than closing does
        disk.full = False
        again = await (await second.session().consumer(JOBS)).receive(10)
        assert again is not None
        assert again.redelivered


async def test_a_deposed_dispatcher_that_replies_first_blocks_no_client(
    simulated_network: network.SimulatedNetwork, wall_clock: None
):
    net = simulated_network

    loop = asyncio.get_running_loop()

    def deaf(made: dispatcher.Dispatcher) -> None:
        made._other_started = lambda message: None  # type: ignore[method-assign]

    def late(made: dispatcher.Dispatcher) -> None:
        send_reply = made._delivery.send_reply
        made._delivery.send_reply = lambda *actual: loop.call_later(0.02, send_reply, *actual)  # type: ignore[method-assign,assignment]

    _, running = await act(net, "first", 1, deaf)
    async with (
        client_api.Connection(await net.connect("c")) as connection,
        client_api.Connection(await net.connect("p")) as writer,
    ):
        consumer = await connection.session().consumer(JOBS, prefetch=5)
        _, running_too = await act(net, "second", 2, late)
        await asyncio.sleep(0.5)
        for number in range(8):
            await writer.session().producer(JOBS).send(f"{number}")
        assert await received(consumer) == [f"{number}" for number in range(8)]
    for task in (running, running_too):
        task.cancel()
    await asyncio.gather(running, running_too, return_exceptions=True)


async def test_a_dispatcher_ends_when_it_learns_of_its_successor(
    simulated_network: network.SimulatedNetwork, wall_clock: None
):
    _, running = await act(simulated_network, "first", 1)
    _, successor = await act(simulated_network, "second", 2)
    with pytest.raises(errors.StaleEpoch):
        async with asyncio.timeout(60):
            await running
    assert not successor.done()
    successor.cancel()
    await asyncio.gather(successor, return_exceptions=True)


@pytest.mark.parametrize("checkpoint_records", [10, 5000])
async def test_a_temporary_queue_outlives_a_cut_connection_whose_client_comes_back(
    simulated_network: network.SimulatedNetwork, wall_clock: None, checkpoint_records: int
):
    net = simulated_network
    net.faults.silence_s = 0.5
    async with (
        serving(net, connection_timeout_s=5, checkpoint_records=checkpoint_records),
        client_api.Connection(await net.connect("w")) as writer,
    ):
        await asyncio.sleep(6)  # the dispatcher has been there for long
        connection = client_api.Connection(await net.connect("r"))
        session = connection.session(client_api.AcknowledgeMode.CLIENT)
        replies = await session.temporary_queue()
        consumer = await session.consumer(replies)
        await writer.session().producer(None).send("first", to=replies)
        assert await consumer.receive(2) is not None
        net.unplug("r")
        for number in range(15):
            await writer.session().producer(OTHER).send(f"{number}")
        await asyncio.sleep(4)
        await writer.session().producer(None).send("second", to=replies)
        net.heal()
        await asyncio.sleep(2.5)
        await session.recover()
        assert await received(consumer) == ["first", "second"]
        await connection.close()
        await asyncio.sleep(3)
        with pytest.raises(message_errors.InvalidDestination):
            await writer.session().producer(None).send("third", to=replies)
        assert all(row.queue == "other" for row in (await writer.request(protocol.ListQueues())).queues)


async def test_a_temporary_queue_ends_when_its_client_does_not_come_back(
    simulated_network: network.SimulatedNetwork, wall_clock: None
):
    net = simulated_network
    net.faults.silence_s = 0.5
    async with (
        serving(net, connection_timeout_s=5),
        client_api.Connection(await net.connect("w")) as writer,
    ):
        await asyncio.sleep(6)
        async with client_api.Connection(await net.connect("r")) as connection:
            session = connection.session()
            replies = await session.temporary_queue()
            await session.consumer(replies)
            net.unplug("r")
            await asyncio.sleep(13)
            with pytest.raises(message_errors.InvalidDestination):
                await writer.session().producer(None).send("a reply", to=replies)
            net.heal()


async def test_a_dead_letter_for_which_there_was_no_room_is_buried_when_there_is(
    simulated_network: network.SimulatedNetwork, disk: Disk
):
    net = simulated_network
    async with serving(net, max_deliveries=1), client_api.Connection(await net.connect("a")) as connection:
        session = connection.session(client_api.AcknowledgeMode.CLIENT)
        await session.producer(JOBS).send("poison")
        consumer = await session.consumer(JOBS)
        assert await consumer.receive(2) is not None
        disk.full = True
        await session.recover()
        await asyncio.sleep(5)
        disk.full = False
        dead = await session.consumer(destinations.queue(destinations.DEAD_LETTERS))
        assert await received(dead) == ["poison"]
        assert await received(consumer) == []


async def test_one_unstorable_item_takes_no_other_with_it(
    simulated_network: network.SimulatedNetwork, disk: Disk, monkeypatch: pytest.MonkeyPatch
):
    net = simulated_network
    patched = streams.SimulatedStream.publish_batch

    async def picky(stream: streams.SimulatedStream, batch: Any, **more: Any) -> int:
        if any(b"unstorable" in message.data for message in batch):
            raise errors.InvalidInput("not this one")
        return await patched(stream, batch, **more)

    monkeypatch.setattr(streams.SimulatedStream, "publish_batch", picky)
    async with (
        serving(net),
        client_api.Connection(await net.connect("a")) as first,
        client_api.Connection(await net.connect("b")) as second,
    ):
        disk.ready.clear()
        pending = [first.session().producer(OTHER).submit("in the way")]
        await asyncio.sleep(0.1)
        async with client_api.Connection(await net.connect("c")) as third:
            pending += [
                third.session().producer(JOBS).submit("unstorable"),
                second.session().producer(JOBS).submit("job"),
            ]
            await asyncio.sleep(0.1)
            disk.ready.set()
            actual = await asyncio.gather(*pending, return_exceptions=True)
        assert [type(outcome) for outcome in actual] == [type(None), errors.InvalidInput, type(None)]


async def _moving(
    net: network.SimulatedNetwork, disk: Disk
) -> tuple[client_api.Connection, asyncio.Task[protocol.DispatcherReply]]:
    """A move of three of ten messages that is not answered as long as one question waits for its answer."""
    connection = client_api.Connection(await net.connect("admin"))
    for number in range(10):
        await connection.session().producer(JOBS).send(f"{number}")
    disk.ready.clear()
    moving = asyncio.create_task(connection.request(protocol.MoveMessages("jobs", to=str(OTHER), limit=3)))
    await asyncio.sleep(8)
    return connection, moving


async def test_a_move_that_is_asked_again_is_done_once(
    simulated_network: network.SimulatedNetwork, disk: Disk
):
    async with serving(simulated_network):
        connection, moving = await _moving(simulated_network, disk)
        disk.ready.set()
        assert (await moving).count == 3
        assert len([message async for message in connection.session().browse(OTHER)]) == 3
        await connection.close()


async def test_a_move_that_a_new_dispatcher_knows_nothing_of_is_in_doubt(
    simulated_network: network.SimulatedNetwork, disk: Disk
):
    async with serving(simulated_network):
        connection, moving = await _moving(simulated_network, disk)
    disk.ready.set()
    async with serving(simulated_network):
        with pytest.raises(errors.TimedOut, match="may have been executed"):
            await moving
        assert len([message async for message in connection.session().browse(OTHER)]) == 0
        await connection.close()


async def test_acts_on_queues_are_in_the_audit_whatever_their_outcome(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    may: rights.May = lambda identity, right, queue: (identity, right) != ("user", "admin")  # noqa: E731
    async with (
        serving(net, may=may),
        client_api.Connection(await net.connect("admin")) as admin,
        client_api.Connection(await net.connect("user")) as user,
    ):
        await admin.session().producer(JOBS).send("job")
        with pytest.raises(errors.Forbidden) as refused:
            await user.request(protocol.PurgeQueue("jobs"))
        assert "creds" in (refused.value.hint or ""), "what to do about it reaches the caller"
        await admin.request(protocol.MoveMessages("jobs", to=str(OTHER)))
        await admin.request(protocol.PurgeQueue("other"))
        stream = await (await net.connect("reader")).open_stream(core_messages.DECISIONS_STREAM)
        actual = [
            core_messages.decode(message.data, core_messages.Decision)
            async for message in stream.read(1, (await stream.state()).last_sequence)
        ]
        assert [(record.who, record.what, record.target, record.outcome) for record in actual] == [
            ("user", "purge", "queue:jobs", core_messages.DecisionOutcome.REFUSED),
            ("admin", "move", "queue:jobs", core_messages.DecisionOutcome.DONE),
            ("admin", "purge", "queue:other", core_messages.DecisionOutcome.DONE),
        ]


async def test_a_sender_gets_an_error_if_its_connection_is_closed_while_a_message_is_stored(
    simulated_network: network.SimulatedNetwork, disk: Disk
):
    """Not a cancellation: the caller did not cancel, and the message may have been stored."""
    net = simulated_network
    async with serving(net):
        connection = client_api.Connection(await net.connect("a"))
        disk.ready.clear()
        sending = asyncio.create_task(connection.session().producer(JOBS).send("one"))
        await asyncio.sleep(0.1)
        await connection.close()
        with pytest.raises(errors.NotConnected, match="may have been stored"):
            await sending
        disk.ready.set()


async def test_ending_a_subscription_that_is_asked_again_while_it_is_stored_succeeds(
    simulated_network: network.SimulatedNetwork, disk: Disk
):
    net = simulated_network
    async with serving(net), client_api.Connection(await net.connect("a"), client_id="c") as connection:
        session = connection.session()
        await (await session.durable_consumer(destinations.topic("news"), "all")).close()
        disk.ready.clear()
        ending = asyncio.create_task(session.unsubscribe("all"))
        await asyncio.sleep(8)  # the request is repeated after 5 s
        disk.ready.set()
        await ending
        assert (await connection.request(protocol.ListSubscriptions())).subscriptions == []


async def test_a_dispatcher_that_fails_with_questions_pending_has_a_successor(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, wall_clock: None
):
    """A question that waits for the log is cancelled when the dispatcher stops, before its turn has come."""
    net = simulated_network
    failing = asyncio.Event()
    plain = streams.SimulatedStream.publish_batch

    async def store(stream: streams.SimulatedStream, *args: Any, **more: Any) -> int:
        if stream.name == partitions.stream(0) and not failing.is_set():
            await failing.wait()
            raise errors.TimedOut("no acknowledgement came")
        return await plain(stream, *args, **more)

    async with serving(net), client_api.Connection(await net.connect("a")) as connection:
        await connection.session().producer(OTHER).send("before")
        monkeypatch.setattr(streams.SimulatedStream, "publish_batch", store)
        sending = asyncio.create_task(connection.session().producer(JOBS).send("one"))
        await asyncio.sleep(0.1)
        browsing = asyncio.create_task(connection.request(protocol.BrowseQueue(OTHER.name)))
        await asyncio.sleep(0.1)
        failing.set()
        await sending
        assert len((await browsing).messages) == 1


@pytest.mark.parametrize(
    "request_",
    [protocol.PurgeQueue("jobs"), protocol.MoveMessages("jobs", to=str(OTHER))],
    ids=["purge", "move"],
)
async def test_messages_that_could_not_be_moved_for_lack_of_room_are_delivered(
    simulated_network: network.SimulatedNetwork, disk: Disk, request_: protocol.DispatcherRequest
):
    net = simulated_network
    async with serving(net), client_api.Connection(await net.connect("a")) as connection:
        for number in range(3):
            await connection.session().producer(JOBS).send(f"{number}")
        disk.refusals = 1
        with pytest.raises(errors.LimitExceeded):
            await connection.request(request_)
        assert disk.refusals == 0
        assert await received(await connection.session().consumer(JOBS)) == ["0", "1", "2"]


async def test_a_move_that_fails_reports_how_many_messages_were_moved(
    simulated_network: network.SimulatedNetwork, disk: Disk, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(queue_admin, "BATCH_MESSAGES", 2)
    net = simulated_network
    async with serving(net), client_api.Connection(await net.connect("a")) as connection:
        producer = connection.session().producer(destinations.queue(destinations.DEAD_LETTERS))
        died = {messages.DEAD_FROM: str(OTHER)}
        for properties in (died, died, {}):
            await producer.send(messages.TextMessage("one", properties=properties))
        with pytest.raises(
            errors.InvalidInput, match="after 2 messages: a message that is not a dead letter"
        ):
            await connection.request(protocol.MoveMessages(destinations.DEAD_LETTERS))
        assert len([message async for message in connection.session().browse(OTHER)]) == 2
        with pytest.raises(errors.InvalidInput, match=r"^a message that is not a dead letter"):
            await connection.request(protocol.MoveMessages(destinations.DEAD_LETTERS))


async def test_a_message_that_is_rolled_back_may_return_through_another_consumer_of_the_session(
    simulated_network: network.SimulatedNetwork, wall_clock: None
):
    net = simulated_network
    async with serving(net), client_api.Connection(await net.connect("a")) as connection:
        session = connection.session(client_api.AcknowledgeMode.TRANSACTED)
        both = [await session.consumer(JOBS, prefetch=1) for _ in range(2)]
        await connection.session().producer(JOBS).send("job")
        for _ in range(3):
            taken = [*await received(both[0]), *await received(both[1])]
            assert taken == ["job"]
            await session.rollback()


async def test_messages_whose_page_is_missing_in_the_log_hold_up_no_others(
    simulated_network: network.SimulatedNetwork, wall_clock: None, small_memory: None
):
    net = simulated_network
    async with serving(net), client_api.Connection(await net.connect("a")) as connection:
        session = connection.session()
        for number in range(12):
            await session.producer(JOBS).send(f"{number}")
        stream = await (await net.connect("admin")).open_stream(partitions.stream(0))
        pages = [
            page.sequence async for page in stream.read(1, subject=partitions.LogSubjects().queue("jobs"))
        ]
        for sequence in (pages[0], pages[5]):
            await stream.delete(sequence)
        consumer = await session.consumer(JOBS)
        assert await received(consumer) == [f"{number}" for number in range(12) if number not in (0, 5)]
        rows = (await connection.request(protocol.ListQueues())).queues
        assert [row.depth for row in rows] == [0]


async def test_messages_that_the_leader_does_not_know_yet_are_not_missing(
    simulated_network: network.SimulatedNetwork,
    wall_clock: None,
    small_memory: None,
    monkeypatch: pytest.MonkeyPatch,
):
    """A broker that has become the leader applies what is stored, however long that takes."""
    net = simulated_network
    known, get, state = [0], streams.SimulatedStream.get, streams.SimulatedStream.state

    async def lagging_get(stream: streams.SimulatedStream, sequence: int) -> api.StoredMessage:
        if known[0] and stream.name == partitions.stream(0) and sequence > known[0]:
            raise errors.NotFound("not yet")
        return await get(stream, sequence)

    async def lagging_state(stream: streams.SimulatedStream) -> api.StreamState:
        at = await state(stream)
        if known[0] and stream.name == partitions.stream(0):
            return dataclasses.replace(at, last_sequence=min(at.last_sequence, known[0]))
        return at

    monkeypatch.setattr(streams.SimulatedStream, "get", lagging_get)
    monkeypatch.setattr(streams.SimulatedStream, "state", lagging_state)
    async with serving(net), client_api.Connection(await net.connect("a")) as connection:
        session = connection.session()
        for number in range(12):
            await session.producer(JOBS).send(f"{number}")
        known[0] = 3
        consumer = await session.consumer(JOBS)
        texts = await received(consumer, 20)
        known[0] = 0
        texts += await received(consumer, 20)
        assert texts == [f"{number}" for number in range(12)]


async def test_a_subscription_stays_indexed_for_a_while_after_its_consumer_closed(
    simulated_network: network.SimulatedNetwork, wall_clock: None, small_memory: None
):
    net = simulated_network
    acting, running = await act(net, "dispatcher", 1)
    connection = client_api.Connection(await net.connect("a"), client_id="app")
    session, news = connection.session(), destinations.topic("news")
    bodies: list[str] = []
    for wait_s in (0.0, 1.0, 2 * delivery.IDLE_S):
        consumer = await session.durable_consumer(news, "all")
        assert await received(consumer) == bodies
        await consumer.close()
        await asyncio.sleep(wait_s)
        bodies = [f"{wait_s} {number}" for number in range(6)]
        for body in bodies:
            await session.producer(news).send(body)
        (source,) = acting._ledger.backlogs.values()
        assert source.live is (wait_s < delivery.IDLE_S)
    consumer = await session.durable_consumer(news, "all")
    assert await received(consumer) == bodies
    await consumer.close()
    await session.unsubscribe("all")
    await session.producer(news).send("for no subscription")
    assert not running.done()
    await connection.close()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_consumers_do_not_wait_for_the_end_of_a_long_log(
    simulated_network: network.SimulatedNetwork,
    wall_clock: None,
    small_memory: None,
    monkeypatch: pytest.MonkeyPatch,
):
    """A new dispatcher delivers in order of priority once it has indexed a queue, or after a few seconds."""
    net = simulated_network
    async with serving(net), client_api.Connection(await net.connect("a")) as connection:
        for number in range(12):
            await connection.session().producer(JOBS, priority=4 + number % 2).send(f"{number}")
    read_page = streams.SimulatedStream.page

    async def slow_page(stream: streams.SimulatedStream, *args: Any) -> Any:
        page, state_ = await read_page(stream, *args)
        if stream.name == partitions.stream(0):
            await asyncio.sleep(4)
        return page[:3], state_

    monkeypatch.setattr(streams.SimulatedStream, "page", slow_page)
    async with serving(net), client_api.Connection(await net.connect("b")) as connection:
        consumer = await connection.session().consumer(JOBS, prefetch=1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await consumer.receive(60) is not None
        assert loop.time() - began < 20
        assert len(await received(consumer, 60)) == 11


def test_a_consumer_that_crashes_again_and_again_buries_what_it_fails_with_and_nothing_else():
    driven_backlog = driver.DrivenBacklog("q:q", max_deliveries=10)
    driven_backlog.live = True
    for number in range(1, 201):
        driven_backlog.send(number, messages.MessageMeta())
    dead: list[backlog.Instruction] = []
    for crash in range(10):
        key = (f"c{crash}", 1)
        driven_backlog.attach(lines.BacklogConsumer(key, 200))
        driven_backlog.deliver(0)
        dead += driven_backlog.detach(key, seen=None)
    assert [(type(instruction), instruction.number) for instruction in dead] == [
        (backlog.DeadLetterMessage, 1)
    ]
    driven_backlog.attach(lines.BacklogConsumer(("last", 1), 200))
    rest = driven_backlog.deliver(0)
    assert [actual.number for actual in rest] == list(range(2, 201))
    counts = [actual.count for actual in rest if isinstance(actual, backlog.DeliverMessage)]
    assert counts == [10] * 199, "they may have been seen, and are marked"


async def test_a_temporary_queue_may_be_deleted_with_its_first_message(
    simulated_network: network.SimulatedNetwork, disk: Disk
):
    """Both are stored by one record."""
    net = simulated_network
    async with (
        serving(net),
        client_api.Connection(await net.connect("a")) as owner,
        client_api.Connection(await net.connect("b")) as writer,
        client_api.Connection(await net.connect("c")) as other,
    ):
        session = owner.session()
        replies = await session.temporary_queue()
        epoch = (await owner.request(protocol.ListQueues())).epoch
        for connection in (writer, other):
            await connection.session().producer(OTHER).send("registers")
        disk.ready.clear()
        pending = [other.session().producer(OTHER).submit("in the way")]
        await asyncio.sleep(0.1)
        pending.append(writer.session().producer(None).submit("a reply", to=replies))
        await asyncio.sleep(0.1)
        deleting = asyncio.create_task(session.delete_temporary(replies))
        await asyncio.sleep(0.1)
        disk.ready.set()
        await asyncio.gather(*pending, deleting)
        await asyncio.sleep(1)
        listed = await owner.request(protocol.ListQueues())
        assert [row.queue for row in listed.queues] == [OTHER.name]
        assert listed.epoch == epoch, "the dispatcher has failed"
