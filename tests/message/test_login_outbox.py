"""Connections with the same login share their works, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from muster.bus.memory import network
from muster.core import errors
from muster.message import destinations, protocol
from muster.message.client import api as client_api
from muster.message.dispatcher import clients, works
from muster.message.dispatcher import lifetime as lifetime_
from muster.testing import virtual_clock
from tests.message import test_races

pytestmark = pytest.mark.virtual_time

JOBS = destinations.queue("jobs")
CLIENTS = 16


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes with the loop."""
    monkeypatch.setattr("time.time_ns", virtual_clock.FakeClock().time_ns)


@pytest.fixture
def shared_works(monkeypatch: pytest.MonkeyPatch) -> list[protocol.SharedWork]:
    """Those that a dispatcher received."""
    received: list[protocol.SharedWork] = []
    share = works.Works.share

    def record(
        self: works.Works,
        connection: clients.ClientConnection,
        work: protocol.SharedWork,
        reply: lifetime_.ReplyCallback,
    ) -> None:
        received.append(work)
        share(self, connection, work, reply)

    monkeypatch.setattr(works.Works, "share", record)
    return received


@pytest.mark.parametrize("buses", [1, CLIENTS])
async def test_what_many_connections_send_and_acknowledge_at_one_time_is_one_work(
    simulated_network: network.SimulatedNetwork, shared_works: list[protocol.SharedWork], buses: int
):
    net = simulated_network
    async with test_races.serving(net):
        connected = [await net.connect("a") for _ in range(buses)]
        clients = [client_api.Connection(connected[at % buses]) for at in range(CLIENTS)]
        sessions = [client.session(client_api.AcknowledgeMode.CLIENT) for client in clients]
        consumers = [await session.consumer(JOBS, prefetch=1) for session in sessions]
        await sessions[0].producer(JOBS).send("first")  # registers the outbox of the login
        assert await consumers[0].receive(5) is not None
        shared_works.clear()
        producers = [session.producer(JOBS) for session in sessions]
        await asyncio.gather(*(producer.send(f"{at}") for at, producer in enumerate(producers)))
        assert sum(len(work.sends) for work in shared_works) == CLIENTS
        assert len(shared_works) <= 2, "one, and what was sent before it was complete"
        messages = [await consumer.receive(5) for consumer in consumers]
        shared_works.clear()
        await asyncio.gather(*(message.acknowledge() for message in messages if message))
        assert len(shared_works) <= 2
        for client in clients:
            await client.close()
        assert [message async for message in _browse(net)] == []


async def test_a_message_that_is_refused_fails_for_its_connection_only(
    simulated_network: network.SimulatedNetwork, shared_works: list[protocol.SharedWork]
):
    def may(identity: str, action: str, subject: str) -> bool:
        return (action, subject) != ("send", "forbidden")

    net = simulated_network
    async with test_races.serving(net, may=may):
        bus = await net.connect("a")
        async with client_api.Connection(bus) as good, client_api.Connection(bus) as bad:
            await good.session().producer(JOBS).send("first")
            forbidden = bad.session().producer(destinations.queue("forbidden"))
            sent = [
                producer.submit(f"{number}")
                for number in range(3)
                for producer in (good.session().producer(JOBS), forbidden)
            ]
            results = await asyncio.gather(*sent, return_exceptions=True)
            assert [type(result) for result in results] == [type(None), errors.Forbidden] * 3
            assert any(len({send.destination for send in work.sends}) > 1 for work in shared_works)
            await bad.session().producer(JOBS).send("allowed")
            shared_works.clear()
            await bad.session().producer(JOBS).send("together again")
            assert shared_works
            bodies = [message.body() async for message in _browse(net)]
            assert bodies == ["first", "0", "1", "2", "allowed", "together again"]


@pytest.mark.parametrize("lost", [False, True])
async def test_a_connection_that_closes_ends_no_work_of_others(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, lost: bool
):
    net = simulated_network
    hold, share, is_slow = asyncio.Event(), works.Works.share, False

    def share_later(self: works.Works, *arguments: Any) -> None:
        if is_slow:
            asyncio.get_running_loop().create_task(_after(hold, lambda: share(self, *arguments)))
        else:
            share(self, *arguments)

    monkeypatch.setattr(works.Works, "share", share_later)
    bus = await net.connect("a")
    async with test_races.serving(net), client_api.Connection(bus) as stays:
        leaves = client_api.Connection(bus)
        await leaves.session().producer(JOBS).send("first")
        await stays.session().producer(JOBS).send("second")
        is_slow = True
        sent = [connection.session().producer(JOBS).submit("more") for connection in (leaves, stays)]
        await asyncio.sleep(0.5)  # until the dispatcher has them
        later = leaves.session().producer(JOBS).submit("too late")
        closing = asyncio.create_task(leaves.close(lost=lost))
        await asyncio.sleep(4)
        with pytest.raises(errors.NotConnected, match="may have been stored"):
            await sent[0]
        with pytest.raises(errors.NotConnected, match="before the message was stored"):
            await later
        hold.set()
        await sent[1]
        await closing
        await stays.session().producer(JOBS).send("last")
        bodies = [message.body() async for message in _browse(net)]
        assert bodies == ["first", "second", "more", "more", "last"]


async def _after(event: asyncio.Event, act: Any) -> None:
    await event.wait()
    act()


@pytest.mark.parametrize("how", ["closes", "is lost"])
async def test_works_continue_when_the_bus_connection_that_carries_them_ends(
    simulated_network: network.SimulatedNetwork, how: str
):
    net = simulated_network
    async with test_races.serving(net):
        first = client_api.Connection(await net.connect("a"), owns_bus=True)
        others = [client_api.Connection(await net.connect("a"), owns_bus=True) for _ in range(2)]
        await first.session().producer(JOBS).send("first")
        producers = [other.session().producer(JOBS) for other in others]
        consumer = await others[0].session(client_api.AcknowledgeMode.CLIENT).consumer(JOBS)
        message = await consumer.receive(5)
        assert message is not None
        sent = [producer.submit(f"{number}") for number in range(20) for producer in producers]
        await asyncio.sleep(0.001)  # some are on their way
        assert not any(future.done() for future in sent)  # type: ignore[attr-defined]
        if how == "closes":
            await first.close()
        else:
            net.disconnect(first.bus)  # type: ignore[arg-type]
        await asyncio.wait_for(asyncio.gather(*sent, message.acknowledge()), 3)
        for connection in (first, *others):
            await connection.close()
        bodies = [each.body() async for each in _browse(net)]
        assert bodies == [f"{number}" for number in range(20) for _ in producers], "each once, in order"


async def test_an_acknowledgement_of_a_connection_that_the_dispatcher_lost_waits_until_it_is_back(
    simulated_network: network.SimulatedNetwork, shared_works: list[protocol.SharedWork]
):
    net = simulated_network
    bus = await net.connect("a")
    async with (
        test_races.serving(net),
        client_api.Connection(bus) as sender,
        client_api.Connection(bus) as receiver,
    ):
        session = receiver.session(client_api.AcknowledgeMode.CLIENT)
        consumer = await session.consumer(JOBS)
        producer = sender.session().producer(JOBS)
        await producer.send("one")
        message = await consumer.receive(5)
        assert message is not None
        await receiver.home.request_once(protocol.Disconnect(receiver.name, lost=True))
        shared_works.clear()
        acknowledged = asyncio.ensure_future(message.acknowledge())
        await producer.send("two")
        await acknowledged
        assert any(work.acks for work in shared_works), "it was refused once"
        assert await test_races.received(consumer) == ["two"]
        assert [each.body() async for each in _browse(net)] == ["two"]


async def test_a_large_message_delays_its_own_connection_only(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    net = simulated_network
    bus = await net.connect("a")
    async with (
        test_races.serving(net),
        client_api.Connection(bus) as slow,
        client_api.Connection(bus) as quick,
    ):
        await slow.session().producer(JOBS).send("first")
        large = "x" * (protocol.LARGE_BYTES + 1)
        producer = slow.session().producer(JOBS)
        net_request = slow.home.request
        uploading = asyncio.Event()

        async def upload_slowly(request: Any, **options: Any) -> protocol.DispatcherReply:
            if isinstance(request, protocol.StoreChunk):
                await uploading.wait()
            return await net_request(request, **options)

        monkeypatch.setattr(slow.home, "request", upload_slowly)
        sent = [producer.submit(large), producer.submit("after it")]
        await quick.session().producer(JOBS).send("before it")
        assert not any(future.done() for future in sent)  # type: ignore[attr-defined]
        uploading.set()
        await asyncio.gather(*sent)
        bodies = [str(message.body()) async for message in _browse(net)]
        assert [body[:9] for body in bodies] == ["first", "before it", "x" * 9, "after it"[:9]]


async def test_the_outbox_of_a_login_ends_with_its_last_connection(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    async with test_races.serving(net):
        bus = await net.connect("a")
        for _ in range(2):
            first, second = client_api.Connection(bus), client_api.Connection(bus)
            for connection in (first, second):
                await connection.session().producer(JOBS).send("x")
            shared = first.shared
            assert second.shared is shared
            await first.close()
            assert not shared.closed
            await second.session().producer(JOBS).send("x")
            await second.close()
            assert shared.closed


async def test_a_connection_left_open_on_a_closed_bus_connection_delays_no_later_one(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    async with test_races.serving(net):
        opened = []
        for _ in range(2):
            bus = await net.connect("a")
            opened.append(client_api.Connection(bus))
            await asyncio.wait_for(opened[-1].session().producer(JOBS).send("x"), 3)
            await bus.close()
        for connection in opened:
            await connection.close()


async def test_a_dispatcher_that_does_not_know_shared_works_stores_those_of_each_connection(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise errors.InvalidInput("not a request to the dispatcher")

    monkeypatch.setattr(works.Works, "share", refuse)
    net = simulated_network
    async with test_races.serving(net), client_api.Connection(await net.connect("a")) as connection:
        session = connection.session(client_api.AcknowledgeMode.CLIENT)
        consumer = await session.consumer(JOBS)
        for body in ("one", "two"):
            await session.producer(JOBS).send(body)
            message = await consumer.receive(5)
            assert message is not None
            await message.acknowledge()
        assert [each async for each in _browse(net)] == []


def _browse(net: network.SimulatedNetwork) -> Any:
    async def messages() -> Any:
        async with client_api.Connection(await net.connect("browser")) as connection:
            async for message in connection.session().browse(JOBS):
                yield message

    return messages()
