"""Queues in several partitions, on the simulated bus: routing, transfers, transactions and moving owners."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from muster.bus.memory import network, streams
from muster.core import errors
from muster.message import destinations, listings, partitions, protocol, settings
from muster.message import errors as message_errors
from muster.message.client import api, consumers
from muster.message.dispatcher import leadership
from muster.message.dispatcher.peers import membership
from muster.testing import eventually, virtual_clock

pytestmark = pytest.mark.virtual_time

COUNT = 3


def queue_in(partition: int, number: int = 0, count: int = COUNT) -> destinations.Destination:
    names = (f"jobs-{suffix}" for suffix in itertools.count())
    matching = (name for name in names if partitions.of_queue(name, count) == partition)
    return destinations.queue(next(itertools.islice(matching, number, None)))


ONE, TWO, HOME = queue_in(1), queue_in(2), queue_in(0)


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes with the loop."""
    monkeypatch.setattr("time.time_ns", virtual_clock.FakeClock().time_ns)


@contextlib.asynccontextmanager
async def serving(
    net: network.SimulatedNetwork, identity: str = "dispatcher", **options: Any
) -> AsyncIterator[leadership.DispatcherLeadership]:
    options.setdefault("partitions", COUNT)
    started = leadership.DispatcherLeadership(
        await net.connect(identity), settings.MessageSettings(**options), lease_ttl_s=2
    )
    running = asyncio.create_task(started.run())
    try:
        yield started
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def connected(
    net: network.SimulatedNetwork, identity: str = "client", client_id: str | None = None
) -> AsyncIterator[api.Connection]:
    async with api.Connection(await net.connect(identity), client_id=client_id) as connection:
        yield connection


async def texts(consumer: consumers.Consumer, timeout_s: float = 3.0) -> list[str]:
    bodies: list[str] = []
    while (message := await consumer.receive(timeout_s)) is not None:
        bodies.append(str(message.body()))
    return bodies


async def drain(connection: api.Connection, queue: destinations.Destination) -> list[str]:
    async with connection.session() as session, await session.consumer(queue) as consumer:
        return await texts(consumer)


async def test_queues_of_all_partitions_behave_like_those_of_one(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    queues = [queue_in(partition, number) for partition in range(COUNT) for number in range(2)]
    async with serving(net) as started, connected(net) as connection:
        session = connection.session()
        for queue in queues:
            for number in range(3):
                await session.producer(queue).send(f"{queue.name}/{number}")
        assert started.owned == set(range(COUNT))
        rows = (await connection.request(protocol.ListQueues())).queues
        assert [(row.queue, row.depth) for row in rows] == sorted((queue.name, 3) for queue in queues)
        for queue in queues:
            expected = [f"{queue.name}/{number}" for number in range(3)]
            assert [str(message.body()) async for message in session.browse(queue)] == expected
            assert await drain(connection, queue) == expected
        await session.producer(ONE).send("purged")
        assert (await connection.request(protocol.PurgeQueue(ONE.name))).count == 1


async def test_a_reader_that_does_not_register_sees_all_partitions(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    async with serving(net), connected(net) as connection:
        for queue in (ONE, TWO, HOME):
            await connection.session().producer(queue).send("x")
        async with connected(net, "viewer") as viewer:
            rows = (await viewer.request(protocol.ListQueues())).queues
            assert {row.queue for row in rows} == {ONE.name, TWO.name, HOME.name}
            page = (await viewer.request(protocol.BrowseQueue(TWO.name))).messages
            assert [delivery.data for delivery in page] == [b"x"]


async def test_scheduled_messages_of_all_partitions_are_listed_in_order_and_cancelled(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    async with serving(net), connected(net) as connection:
        session = connection.session()
        for delay_s, queue in ((30, ONE), (10, TWO), (20, HOME), (40, TWO)):
            await session.producer(queue).send("later", delay_s=delay_s)
        rows: list[listings.ScheduledRow] = []
        after = (0, 0)
        while page := (await connection.request(protocol.ListScheduled(None, after, 2))).scheduled:
            rows += page
            after = page[-1].delivery_time_ms, page[-1].number
        assert [row.destination for row in rows] == [str(queue) for queue in (TWO, HOME, ONE, TWO)]
        assert (await connection.request(protocol.CancelScheduled(rows[2].number))).count == 1
        assert (await connection.request(protocol.CancelScheduled(id=rows[3].id or ""))).count == 1
        await asyncio.sleep(60)
        assert [len(await drain(connection, queue)) for queue in (ONE, TWO, HOME)] == [0, 1, 1]


async def test_a_transaction_of_several_partitions_is_stored_as_a_whole(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    news = destinations.topic("news")
    async with serving(net), connected(net, client_id="app") as connection:
        durable = await connection.session().durable_consumer(news, "all")
        sender = connection.session()
        for queue in (ONE, TWO, HOME):
            await sender.producer(queue).send(f"from {queue.name}")
        session = connection.session(api.AcknowledgeMode.TRANSACTED)
        receivers = [await session.consumer(queue) for queue in (ONE, TWO, HOME)]
        targets = [queue_in(partition, 5) for partition in range(COUNT)]
        for attempt in range(2):
            for receiver in receivers:
                message = await receiver.receive(5)
                assert message is not None
                assert message.redelivered is bool(attempt)
            for target in (*targets, news):
                await session.producer(target).send(f"attempt {attempt}")
            await (session.commit() if attempt else session.rollback())
        rows = {row.queue: row.depth for row in (await connection.request(protocol.ListQueues())).queues}
        assert {name for name, depth in rows.items() if depth} == {target.name for target in targets}
        for target in targets:
            assert await drain(connection, target) == ["attempt 1"]
        assert await texts(durable) == ["attempt 1"]


async def test_a_transaction_fails_as_a_whole_if_one_message_belongs_to_another_consumer(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    async with serving(net), connected(net) as connection:
        for queue in (ONE, TWO):
            await connection.session().producer(queue).send("x")
        session = connection.session(api.AcknowledgeMode.TRANSACTED)
        first, second = await session.consumer(ONE), await session.consumer(TWO)
        assert await first.receive(5)
        assert await second.receive(5)
        # Its dispatcher delivers it to another connection, for example after a pause of this one
        async with connected(net, "other") as other:
            link = connection.link(2)
            await link.request_once(protocol.Disconnect(connection.name, lost=True))
            elsewhere = await other.session(api.AcknowledgeMode.CLIENT).consumer(TWO)
            assert await elsewhere.receive(5)
            await session.producer(HOME).send("never")
            with pytest.raises(message_errors.TransactionRolledBack):
                await session.commit()
            assert not await drain(connection, HOME)
            again = await first.receive(5)
            assert again is not None
            assert again.redelivered


async def test_dead_letters_and_moved_messages_change_partitions_once(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    async with serving(net, max_deliveries=1), connected(net) as connection:
        session = connection.session(api.AcknowledgeMode.CLIENT)
        for partition in range(COUNT):
            await session.producer(queue_in(partition), delay_s=0.5).send(f"{partition}")
            consumer = await session.consumer(queue_in(partition))
            assert await consumer.receive(5)
            await session.recover()
            await consumer.close()
        dead = destinations.queue(destinations.DEAD_LETTERS)

        async def all_dead() -> bool:
            rows = (await connection.request(protocol.ListQueues())).queues
            return any(row.queue == dead.name and row.depth == COUNT for row in rows)

        await eventually.eventually(all_dead)
        moved = await connection.request(protocol.MoveMessages(dead.name))
        assert moved.count == COUNT
        for partition in range(COUNT):
            assert await drain(connection, queue_in(partition)) == [f"{partition}"]


async def test_a_large_message_follows_its_message_into_another_partition(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    net = simulated_network
    monkeypatch.setattr(protocol, "LARGE_BYTES", 1000)
    monkeypatch.setattr(protocol, "CHUNK_BYTES", 700)
    body = bytes(range(256)) * 10
    async with serving(net), connected(net) as connection:
        await connection.session().producer(ONE).send("begin")
        session = connection.session(api.AcknowledgeMode.TRANSACTED)
        assert await (await session.consumer(ONE)).receive(5)
        await session.producer(TWO).send(body)
        await session.commit()
        await session.close()
        consumer = await connection.session().consumer(TWO)
        message = await consumer.receive(5)
        assert message is not None
        assert message.body() == body
        await consumer.close()
        await connection.session().producer(HOME).send(body)
        await connection.request(protocol.MoveMessages(HOME.name, str(ONE)))
        consumer = await connection.session().consumer(ONE)
        message = await consumer.receive(5)
        assert message is not None
        assert message.body() == body
        await connection.outbox.wait_idle()
        bus = await net.connect("admin")

        async def bodies() -> int:
            """Chunks of bodies in all logs."""
            count = 0
            for partition in range(COUNT):
                stream = await bus.open_stream(partitions.stream(partition))
                subject = f"{partitions.LogSubjects(partition).body_prefix}>"
                count += len([page async for page in stream.read(1, subject=subject)])
            return count

        async def none_left() -> bool:
            return not await bodies()

        await eventually.eventually(none_left, timeout_s=30)


async def test_temporary_queues_belong_to_their_connection_in_every_partition(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    async with serving(net), connected(net, "server") as server:
        await asyncio.sleep(60)  # a connection that did not register in time would count as gone
        for _ in range(6):  # connections in different partitions
            async with connected(net) as client:
                session = client.session()
                replies = await session.temporary_queue()
                transacted = server.session(api.AcknowledgeMode.TRANSACTED)
                await transacted.producer(replies).send("first")
                await transacted.producer(HOME).send("request")
                await transacted.commit()
                assert await drain(client, replies) == ["first"]
                assert await drain(client, HOME) == ["request"]
                await session.delete_temporary(replies)
                with pytest.raises(message_errors.InvalidDestination):
                    await server.session().producer(replies).send("late")
                await transacted.producer(replies).send("late")
                await transacted.producer(HOME).send("request")
                with pytest.raises(message_errors.TransactionRolledBack):
                    await transacted.commit()
                assert not await drain(client, HOME)


async def test_a_client_id_is_unique_in_all_partitions_together(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    async with serving(net), connected(net, client_id="app") as connection:
        await connection.session().producer(ONE).send("x")
        with pytest.raises(message_errors.InvalidClientId):
            await api.Connection(await net.connect("client"), client_id="app").__aenter__()


async def test_the_number_of_partitions_never_changes(simulated_network: network.SimulatedNetwork):
    net = simulated_network
    async with serving(net), connected(net) as connection:
        await connection.session().producer(TWO).send("x")
    async with serving(net, partitions=5) as started, connected(net) as connection:
        assert await drain(connection, TWO) == ["x"]
        assert started.owned == set(range(COUNT))
        assert "divided into 3 partitions" in started.problem


def test_partitions_are_divided_evenly_and_move_only_if_necessary():
    for members in range(1, 9):
        names = [f"process-{number}" for number in range(members)]
        before = membership.owners(8, names)
        loads = Counter(before.values())
        assert max(loads.values()) <= -(-8 // members)
        assert membership.owners(8, reversed(names)) == before


async def test_a_process_that_joins_receives_its_share_and_one_that_leaves_returns_it(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    async with serving(net, "first") as first:
        await eventually.eventually(lambda: first.owned == set(range(COUNT)))
        async with serving(net, "second") as second:
            await eventually.eventually(lambda: len(second.owned) >= 1, timeout_s=30)
            await eventually.eventually(lambda: first.owned | second.owned == set(range(COUNT)), timeout_s=30)
            assert not first.owned & second.owned
        await eventually.eventually(lambda: first.owned == set(range(COUNT)), timeout_s=30)


class WriteFault:
    """One write to the logs, after a number of others, fails."""

    def __init__(self, patch: pytest.MonkeyPatch, after: int, kind: str) -> None:
        self.left = after
        self.happened = asyncio.Event()
        plain = streams.SimulatedStream.publish_batch

        async def store(stream: streams.SimulatedStream, *arguments: Any, **options: Any) -> int:
            armed = self.left > 0 and stream.name.startswith("messages")
            if armed:
                self.left -= 1
            if not armed or self.left:
                return await plain(stream, *arguments, **options)
            if kind in ("crash after", "no acknowledgement"):
                await plain(stream, *arguments, **options)
            self.happened.set()
            if kind == "no room":
                raise errors.LimitExceeded("insufficient storage")
            if kind == "no acknowledgement":
                raise errors.TimedOut("no acknowledgement came")
            await asyncio.Event().wait()
            raise AssertionError

        patch.setattr(streams.SimulatedStream, "publish_batch", store)


@pytest.mark.parametrize("kind", ["crash before", "crash after", "no room", "no acknowledgement"])
@pytest.mark.parametrize("step", range(1, 9))
async def test_a_fault_at_any_write_of_a_transaction_leaves_all_or_nothing(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, step: int, kind: str
):
    """The client repeats its commit until a process replies."""
    net = simulated_network
    async with connected(net) as connection, contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        await first.enter_async_context(serving(net, "first"))
        stack.push_async_callback(first.aclose)
        for queue in (ONE, TWO, HOME):
            await connection.session().producer(queue).send(f"{queue.name}")
        session = connection.session(api.AcknowledgeMode.TRANSACTED)
        receivers = [await session.consumer(queue) for queue in (ONE, TWO, HOME)]
        for receiver in receivers:
            assert await receiver.receive(5)
        targets = [queue_in(partition, 7) for partition in range(COUNT)]
        for target in targets:
            await session.producer(target).send("result")
        fault = WriteFault(monkeypatch, step, kind)
        commit = asyncio.create_task(session.commit())
        happened = asyncio.ensure_future(fault.happened.wait())
        await asyncio.wait({commit, happened}, return_when=asyncio.FIRST_COMPLETED)
        happened.cancel()
        if kind.startswith("crash"):
            await first.aclose()
            await stack.enter_async_context(serving(net, "second"))
        outcome = (await asyncio.gather(commit, return_exceptions=True))[0]
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, message_errors.TransactionRolledBack)
            await session.rollback()
        for receiver in receivers:
            await receiver.close()
        await session.close()
        done = [await drain(connection, target) for target in targets]
        left = [await drain(connection, queue) for queue in (ONE, TWO, HOME)]
        if outcome is None:
            assert (done, left) == ([["result"]] * 3, [[]] * 3)
        else:
            assert (done, left) == ([[]] * 3, [[queue.name] for queue in (ONE, TWO, HOME)])


def leftovers() -> list[str]:
    """The tasks of dispatchers that have not ended."""
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("dispatcher: ")]


class SlowSubscriptions:
    """Subscriptions of a process that take a while to open and to close, each a different time."""

    def __init__(self, patch: pytest.MonkeyPatch, bus: Any, choice: random.Random) -> None:
        self.open = 0
        subscribe = bus.subscribe

        async def slowly(*arguments: Any, **options: Any) -> Any:
            await asyncio.sleep(choice.random() * 0.2)
            subscription = await subscribe(*arguments, **options)
            self.open += 1
            close = subscription.close

            async def close_slowly() -> None:
                await asyncio.sleep(choice.random() * 0.2)
                await close()
                self.open -= 1

            subscription.close = close_slowly
            return subscription

        patch.setattr(bus, "subscribe", slowly)


@pytest.mark.parametrize("seed", range(8))
async def test_a_process_that_leaves_at_any_moment_leaves_nothing_behind(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, seed: int
):
    """Its dispatchers are starting, serving or ending; they end completely."""
    choice = random.Random(seed)
    bus = await simulated_network.connect("leaver")
    subscriptions = SlowSubscriptions(monkeypatch, bus, choice)
    message_settings = settings.MessageSettings(partitions=COUNT)
    running = asyncio.create_task(leadership.DispatcherLeadership(bus, message_settings, lease_ttl_s=2).run())
    await asyncio.sleep(choice.random() * 4)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert leftovers() == []
    assert subscriptions.open == 0


async def move_tokens(
    net: network.SimulatedNetwork, name: str, choice: random.Random, enough: asyncio.Event
) -> int:
    """Move messages between queues in transactions; returns the number of commits that succeeded."""
    committed = 0
    async with connected(net, name) as connection:
        session = connection.session(api.AcknowledgeMode.TRANSACTED)
        receivers = [await session.consumer(queue, prefetch=2) for queue in DRILL_QUEUES]
        while not enough.is_set():
            try:
                taken = [
                    message
                    for receiver in choice.sample(receivers, 2)
                    if (message := await receiver.receive(0.2)) is not None
                ]
                for message in taken:
                    await session.producer(choice.choice(DRILL_QUEUES)).send(str(message.body()))
                if choice.random() < 0.2:
                    await session.rollback()
                else:
                    await session.commit()
                    committed += bool(taken)
            except (errors.Unavailable, message_errors.TransactionRolledBack):
                with contextlib.suppress(errors.Unavailable):
                    await session.rollback()
    return committed


DRILL_QUEUES = [queue_in(partition, number) for partition in range(COUNT) for number in range(2)]


@pytest.mark.parametrize("seed", range(2))
async def test_no_message_is_lost_or_doubled_while_queues_move_between_processes(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, seed: int
):
    """Processes join, leave, end and are cut off from the brokers under load; every token is in one queue."""
    monkeypatch.setattr(membership, "SETTLE_S", 0.5)
    net, choice = simulated_network, random.Random(seed)
    tokens = [f"token-{number}" for number in range(24)]
    async with serving(net, "steady"), connected(net) as connection:
        for number, token in enumerate(tokens):
            await connection.session().producer(DRILL_QUEUES[number % len(DRILL_QUEUES)]).send(token)
        enough = asyncio.Event()
        movers = [
            asyncio.create_task(
                move_tokens(net, f"mover-{number}", random.Random(seed * 10 + number), enough)
            )
            for number in range(3)
        ]
        for turn in range(4):
            async with serving(net, f"guest-{turn}") as guest:
                await eventually.eventually(guest.acting.is_set, timeout_s=60)
                await asyncio.sleep(choice.random() * 2)
                if turn % 2:
                    net.cut(f"guest-{turn}")
                    await asyncio.sleep(3)
                    net.heal()
                    await asyncio.sleep(choice.random())
        enough.set()
        assert sum(await asyncio.gather(*movers)) > 20
        drained = [token for queue in DRILL_QUEUES for token in await drain(connection, queue)]
        assert Counter(drained) == Counter(tokens)
