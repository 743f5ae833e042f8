"""The AMQP gateway with clients that send early, are silent, demand too much, or disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

import pytest

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from muster.bus import api  # noqa: E402
from muster.gateways.amqp import gateway as amqp_gateway  # noqa: E402
from muster.gateways.amqp import memory_budget  # noqa: E402
from muster.gateways.amqp.links import consumers  # noqa: E402
from muster.gateways.amqp.protocol import engine, frames  # noqa: E402
from muster.message import destinations, messages, protocol  # noqa: E402
from muster.message.amqp_format import amqp_types  # noqa: E402
from muster.message.client import partition_link  # noqa: E402
from muster.message.dispatcher import leadership  # noqa: E402
from muster.testing import eventually, fixtures  # noqa: E402
from muster.trust.login import passwords  # noqa: E402
from tests.gateways.amqp import raw_client, test_outcomes  # noqa: E402
from tests.message import conftest  # noqa: E402

ORDERS = destinations.queue("orders")


async def test_what_a_vanished_client_had_comes_again_marked(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    session = (await dial()).session()
    await session.producer(destinations.queue("orders")).send("one")

    def vanish() -> None:
        raw = raw_client.Raw(gateway.port, "vanishing")
        receiver = raw.session.receiver("in")
        receiver.source.address = "queue:orders"
        receiver.open()
        receiver.flow(1)
        raw.until(lambda: receiver.current is not None and receiver.current.readable)
        raw.socket.close()

    await asyncio.to_thread(vanish)
    message = await (await session.consumer(destinations.queue("orders"))).receive(30)
    assert message is not None
    assert (message.body(), message.redelivered) == ("one", True)


@pytest.mark.parametrize("sent_bytes", [b"", b"AMQP\x03\x01\x00\x00", "opened"])
async def test_a_half_open_connection_is_given_up(
    gateway: amqp_gateway.AmqpGateway, dispatcher: leadership.DispatcherLeadership, sent_bytes: bytes | str
):
    opened = sent_bytes == "opened"
    async with amqp_gateway.AmqpGateway(gateway.connect, None, anonymous="nobody", idle_s=1.0) as impatient:
        reader, writer = await asyncio.open_connection("127.0.0.1", impatient.port)
        if isinstance(sent_bytes, bytes):
            writer.write(sent_bytes)
        else:
            frame = (len(raw_client.OPEN) + 8).to_bytes(4, "big") + b"\x02\x00\x00\x00" + raw_client.OPEN
            writer.write(raw_client.LOGIN + b"AMQP\x00\x01\x00\x00" + frame)
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
                assert (b"resource-limit-exceeded" in answer) == opened, "it got the reason"
        writer.close()
        await eventually.eventually(lambda: not impatient.connections)


async def test_a_client_that_does_not_wait_for_answers_is_served(gateway: amqp_gateway.AmqpGateway):
    """Login, open, begin and attach in one write, as fast clients do."""

    def work() -> int:
        made = proton.Connection()
        made.container = "hasty"
        session = made.session()
        link = session.sender("hasty")
        link.target.address = "queue:hasty"
        for connection in (made, session, link):
            connection.open()
        transport = proton.Transport()
        transport.bind(made)
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as over:
            over.sendall(raw_client.LOGIN)
            got = b""
            while b"\x00\x53\x44" not in got:
                got += over.recv(4096)
            while not link.credit:
                while (size := transport.pending()) > 0:
                    over.sendall(transport.peek(size))
                    transport.pop(size)
                transport.push(over.recv(4096))
            return int(link.credit)

    assert await asyncio.to_thread(work) > 0


async def test_a_client_that_does_not_read_costs_little_and_misses_nothing(
    gateway: amqp_gateway.AmqpGateway, connect: fixtures.Connect
):
    """It has given credit without end, and its socket is full."""
    count, size = 400, 40_000
    raw = await asyncio.to_thread(raw_client.Raw, gateway.port, "deaf")
    receiver = raw.session.receiver("in")
    receiver.source.address = "topic:flood"
    receiver.open()
    receiver.flow(1_000_000)
    await asyncio.to_thread(raw.until, lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)
    (bridge,) = gateway.connections
    bus = await connect("plain")
    for number in range(count):
        await bus.publish(destinations.topic("flood").subject, f"{number:06}".encode() + b"x" * size)
    await bus.flush()

    def held() -> int:
        return sum(len(part) for part in bridge.running._out)

    (link,) = bridge.running.links()
    await eventually.eventually(lambda: not bridge.running.may_send(link))
    assert held() < engine.OUT_BYTES_MAX + 2 * size
    got: list[int] = []

    def read_all() -> None:
        while len(got) < count:
            raw.read()
            while (current := receiver.current) is not None and current.readable and not current.partial:
                body = proton.Message()
                body.decode(receiver.recv(current.pending))
                receiver.advance()
                current.settle()
                got.append(int(body.body[:6]))
            raw.write()

    async with asyncio.timeout(60):
        await asyncio.to_thread(read_all)
    assert got == list(range(count))
    raw.socket.close()


async def test_a_client_that_does_not_read_leaves_the_messages_of_a_queue_to_others(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    """It has given credit without end. All beyond what its socket takes would wait in the gateway."""
    count, body = 800, "x" * 50_000
    connection = await dial()
    producer = connection.session().producer(ORDERS)
    await asyncio.gather(*(producer.submit(body) for _ in range(count)))
    raw = await asyncio.to_thread(raw_client.Raw, gateway.port, "deaf")
    receiver = raw_client.receiver(raw, "queue:orders", 1_000_000)
    await asyncio.to_thread(raw.until, lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)
    (bridge,) = gateway.connections
    (tap,) = bridge.outgoing_links.values()
    assert isinstance(tap, consumers.DispatcherLink)
    await eventually.eventually(lambda: not bridge.running.may_send(tap.link))
    await bridge.jms.request(protocol.Ping(bridge.jms.name, [tap.number]))  # all that it may get has come
    assert sum(len(data) for _, _, data, _ in tap._waiting) < 2 * consumers.AHEAD_BYTES_MAX
    other = await connection.session().consumer(ORDERS, prefetch=1)
    assert await other.receive(30) is not None

    def read_all() -> None:
        for _ in range(count - 2):  # of the other consumer: one is received, and one waits there
            delivery = raw_client.receive(raw, receiver)[1]
            delivery.update(proton.Delivery.ACCEPTED)
            delivery.settle()

    await asyncio.to_thread(read_all)
    raw.socket.close()


async def test_credit_that_is_reduced_and_raised_again_is_not_granted_twice(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    """The dispatcher is slow to stop, and the client grants credit again meanwhile."""
    plain = partition_link.PartitionLink.request
    stopping, go_on = asyncio.Event(), asyncio.Event()

    async def request(link: partition_link.PartitionLink, message: Any, **options: Any) -> Any:
        reply = await plain(link, message, **options)
        if isinstance(message, protocol.StopDelivery):
            stopping.set()
            await go_on.wait()
        return reply

    raw = await asyncio.to_thread(raw_client.FrameClient, gateway.port, "wavering")
    await asyncio.to_thread(raw.send, *raw.attach_receiver(0, [amqp_types.text("queue:orders")]))
    await asyncio.to_thread(raw.until, frames.ATTACH)
    (bridge,) = gateway.connections
    (tap,) = bridge.outgoing_links.values()
    assert isinstance(tap, consumers.DispatcherLink)
    await asyncio.to_thread(raw.send, *raw.flow(0, 5))
    await eventually.eventually(lambda: tap._granted == 5)
    monkeypatch.setattr(partition_link.PartitionLink, "request", request)
    await asyncio.to_thread(raw.send, *raw.flow(0, 0))
    await stopping.wait()
    await asyncio.to_thread(raw.send, *raw.flow(0, 10))
    await eventually.eventually(lambda: tap.link.credit == 10)
    go_on.set()
    await eventually.eventually(lambda: tap._granted == 10)
    producer = (await dial()).session().producer(ORDERS)
    for number in range(15):
        await producer.send(f"{number}")
    consumer = await (await dial()).session().consumer(ORDERS)
    rest = [await consumer.receive(30) for _ in range(5)]
    assert [message.body() for message in rest if message] == [f"{number}" for number in range(10, 15)]
    raw.socket.close()


@pytest.mark.parametrize("kind", ["light", "durable", "delayed"])
async def test_a_client_that_does_not_want_its_own_messages_gets_those_of_others(
    gateway: amqp_gateway.AmqpGateway, bus: api.Bus, kind: str
):
    def say(raw: raw_client.Raw, text: str) -> None:
        sender = raw.session.sender(text)
        sender.target.address = "topic:hall"
        sender.open()
        raw.until(lambda: sender.credit > 0)
        delivery = sender.delivery("1")
        made = proton.Message(body=text, durable=kind != "light")
        if kind == "delayed":
            made.annotations = {proton.symbol("x-opt-delivery-time"): int(time.time() * 1000) + 200}
        sender.send(made.encode())
        sender.advance()
        raw.until(lambda: delivery.settled)

    def work(port: int) -> str:
        mine, other = raw_client.Raw(port, "mine"), raw_client.Raw(port, "other")
        receiver = mine.session.receiver("in")
        receiver.source.address = "topic:hall"
        descriptor = proton.symbol("apache.org:no-local-filter:list")
        receiver.source.filter.put_dict({proton.symbol("no-local"): proton.Described(descriptor, "NoLocal")})
        receiver.open()
        receiver.flow(10)
        mine.until(lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)
        say(mine, "mine")
        say(other, "theirs")
        mine.until(lambda: receiver.current is not None and receiver.current.readable)
        got = proton.Message()
        got.decode(receiver.recv(receiver.current.pending))
        for client in (mine, other):
            client.socket.close()
        return str(got.body)

    subscription = await bus.subscribe(destinations.topic("hall").subject)
    async with amqp_gateway.AmqpGateway(gateway.connect, None, anonymous="nobody") as deaf:
        assert await asyncio.to_thread(work, deaf.port) == "theirs"
    assert {(await subscription.next(timeout_s=10)).data for _ in range(2)} == {b"mine", b"theirs"}


async def test_what_was_acknowledged_between_two_dispatchers_does_not_come_again(
    connect: fixtures.Connect, dial: conftest.Dial
):
    async def join(login: passwords.PasswordLogin) -> api.Bus:
        return await connect("gateway")

    orders = destinations.queue("orders")
    sending = await dial()
    producer = sending.session().producer(orders)
    async with amqp_gateway.AmqpGateway(join, None, anonymous="nobody") as gateway:
        async with conftest.serving(connect, "first"):
            await producer.send("once")
            raw = await asyncio.to_thread(raw_client.Raw, gateway.port, "reader")
            receiver = raw_client.receiver(raw, "queue:orders")
            got, delivery = await asyncio.to_thread(raw_client.receive, raw, receiver)
            assert got.body == "once"
        delivery.update(proton.Delivery.ACCEPTED)
        delivery.settle()
        await asyncio.to_thread(raw.write)
        (bridge,) = gateway.connections
        await eventually.eventually(lambda: any(bridge.jms.outbox.pending_acks()))
        async with conftest.serving(connect, "second"):
            await producer.send("another")
            got, _ = await asyncio.to_thread(raw_client.receive, raw, receiver)
            assert got.body == "another"
            raw.socket.close()
            await sending.close()


async def test_a_coordinator_that_goes_rolls_back_what_it_did_not_discharge(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    session = (await dial()).session()
    await session.producer(destinations.queue("orders")).send("one")

    def work() -> tuple[object, ...]:
        raw = raw_client.Raw(gateway.port, "undecided")
        receiver = raw_client.receiver(raw, "queue:orders")
        coordinator = raw.session.sender("transactions")
        coordinator.target.type = proton.Terminus.COORDINATOR
        coordinator.open()
        raw.until(lambda: coordinator.credit > 0)
        declared = coordinator.delivery("declare")
        body = proton.Described(proton.symbol("amqp:declare:list"), [None])
        coordinator.send(proton.Message(body=body).encode())
        coordinator.advance()
        raw.until(lambda: declared.remote_state)
        (name,) = declared.remote.data
        _, delivery = raw_client.receive(raw, receiver)
        delivery.local.data = [name, proton.Described(proton.ulong(proton.Delivery.ACCEPTED), [])]
        delivery.update(0x34)
        delivery.settle()
        coordinator.close()
        again, delivery = raw_client.receive(raw, receiver)
        delivery.update(proton.Delivery.ACCEPTED)
        delivery.settle()
        raw.write()
        raw.socket.close()
        return again.body, again.delivery_count

    assert await asyncio.to_thread(work) == ("one", 1)


async def test_a_link_whose_client_did_not_wait_for_it_takes_nothing(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    connection = await dial()
    await connection.session().producer(destinations.queue("orders")).send("one")

    def come_and_go() -> raw_client.Raw:
        raw = raw_client.Raw(gateway.port, "hasty")
        for credit in (10, 0):  # the second one's answers come after what was done with the first
            receiver = raw_client.receiver(raw, "queue:orders", credit)
            raw.write()
            if not credit:
                raw.until(lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)  # noqa: B023
            receiver.close()
            raw.until(lambda: receiver.state & proton.Endpoint.REMOTE_CLOSED)  # noqa: B023
            receiver.free()
        return raw

    raw = await asyncio.to_thread(come_and_go)
    (queue,) = (await connection.request(protocol.ListQueues())).queues
    assert (queue.consumers, queue.in_flight, queue.depth) == (0, 0, 1)
    raw.socket.close()


async def test_a_link_without_credit_gets_nothing_and_holds_nothing_back(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    session = (await dial()).session()

    def idle() -> raw_client.Raw:
        raw = raw_client.Raw(gateway.port, "idle")
        receiver = raw_client.receiver(raw, "queue:orders", 0)
        raw.until(lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)
        return raw

    raw = await asyncio.to_thread(idle)
    for number in range(3):
        await session.producer(destinations.queue("orders")).send(f"{number}")
    consumer = await session.consumer(destinations.queue("orders"))
    got = [await consumer.receive(30) for _ in range(3)]
    assert [message.body() for message in got if message] == ["0", "1", "2"]
    (link,) = [
        outgoing_link.link
        for bridge in gateway.connections
        for outgoing_link in bridge.outgoing_links.values()
    ]
    assert (link.credit, link.delivered) == (0, 0)
    raw.socket.close()


async def test_a_temporary_queue_ends_with_the_receiver_that_made_it(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    connection = await dial()

    def work() -> raw_client.Raw:
        raw = raw_client.Raw(gateway.port, "asks")
        for number in range(3):
            receiver = raw.session.receiver(f"{number}")
            receiver.source.dynamic = True
            receiver.open()
            raw.until(lambda: receiver.remote_source.address)  # noqa: B023
            sender = raw.session.sender(f"{number}")
            sender.target.address = receiver.remote_source.address
            sender.open()
            raw.until(lambda: sender.credit > 0)  # noqa: B023
            delivery = sender.delivery("1")
            sender.send(proton.Message(body="answer", durable=True).encode())
            sender.advance()
            raw.until(lambda: delivery.settled)  # noqa: B023
            receiver.close()
            raw.until(lambda: receiver.state & proton.Endpoint.REMOTE_CLOSED)  # noqa: B023
        return raw

    raw = await asyncio.to_thread(work)
    assert (await connection.request(protocol.ListQueues())).queues == []
    (bridge,) = gateway.connections
    assert bridge.link_factory.temporaries == set()
    raw.socket.close()


async def test_two_clients_cannot_have_one_id_at_whichever_gateway(gateway: amqp_gateway.AmqpGateway):
    def work(port: int) -> str:
        first, second = raw_client.Raw(gateway.port, "only"), raw_client.Raw(port, "only")
        first.until(lambda: first.connection.state & proton.Endpoint.REMOTE_ACTIVE)
        second.until(lambda: second.connection.state & proton.Endpoint.REMOTE_CLOSED)
        condition = second.connection.remote_condition
        for client in (first, second):
            client.socket.close()
        return f"{condition.name} {condition.info}"

    async with amqp_gateway.AmqpGateway(gateway.connect, None, anonymous="nobody") as another:
        for port in (gateway.port, another.port):
            replies = await asyncio.to_thread(work, port)
            assert "amqp:invalid-field" in replies
            assert "container-id" in replies
            await eventually.eventually(lambda: not gateway.connections and not gateway.tasks.pending)


async def test_begun_messages_of_one_connection_are_bounded_over_all_of_its_links(
    gateway: amqp_gateway.AmqpGateway,
):
    limits = memory_budget.GatewayLimits(links=20, unfinished_bytes=4 << 20, unsettled_bytes=1 << 20)

    def work(port: int) -> list[str]:
        raw = raw_client.Raw(port, "beginner")
        senders = []
        for number in range(8):
            sender = raw.session.sender(f"out{number}")
            sender.target.address = "queue:orders"
            sender.open()
            senders.append(sender)
        raw.until(lambda: all(sender.credit for sender in senders))
        for sender in senders:
            sender.delivery(sender.name)
            sender.stream(bytes(600 << 10))  # and never the rest of it
            raw.write()
        raw.until(lambda: any(sender.state & proton.Endpoint.REMOTE_CLOSED for sender in senders))
        closed = [sender.remote_condition.name for sender in senders if sender.remote_condition]
        raw.socket.close()
        return closed

    async with amqp_gateway.AmqpGateway(
        gateway.connect, None, anonymous="nobody", connection_limits=limits
    ) as bounded:
        assert set(await asyncio.to_thread(work, bounded.port)) == {"amqp:resource-limit-exceeded"}
        await eventually.eventually(lambda: not bounded.connections and not bounded._budgets)


async def test_a_connection_with_too_many_links_is_closed(gateway: amqp_gateway.AmqpGateway):
    limits = memory_budget.GatewayLimits(links=20, unfinished_bytes=4 << 20, unsettled_bytes=1 << 20)

    def work(port: int) -> str:
        raw = raw_client.Raw(port, "many")
        for number in range(21):
            raw.session.sender(f"out{number}").open()
        raw.until(lambda: raw.connection.state & proton.Endpoint.REMOTE_CLOSED)
        raw.socket.close()
        return str(raw.connection.remote_condition.name)

    async with amqp_gateway.AmqpGateway(
        gateway.connect, None, anonymous="nobody", login_limits=limits
    ) as bounded:
        assert await asyncio.to_thread(work, bounded.port) == "amqp:resource-limit-exceeded"


async def test_a_login_that_settles_nothing_gets_no_more_than_its_budget(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    limits = memory_budget.GatewayLimits(links=20, unfinished_bytes=4 << 20, unsettled_bytes=300_000)
    session = (await dial()).session()
    producer = session.producer(destinations.queue("orders"))
    for _ in range(10):
        await producer.send("x" * 50_000)

    def work(port: int) -> tuple[int, int]:
        first, second = (raw_client.Raw(port, name) for name in ("first", "second"))
        greedy, modest = (raw_client.receiver(raw, "queue:orders", 100) for raw in (first, second))
        deliveries = [raw_client.receive(first, greedy)[1] for _ in range(6)]
        second.until(lambda: modest.state & proton.Endpoint.REMOTE_ACTIVE)
        before = modest.queued
        for delivery in deliveries:
            delivery.update(proton.Delivery.ACCEPTED)
            delivery.settle()
        first.write()
        first.socket.settimeout(30)
        got = 0
        while got < 4:
            for raw, receiver in ((first, greedy), (second, modest)):
                raw.socket.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    raw_client.receive(raw, receiver)
                    got += 1
        for raw in (first, second):
            raw.socket.close()
        return before, got

    async with amqp_gateway.AmqpGateway(
        gateway.connect, None, anonymous="nobody", login_limits=limits
    ) as bounded:
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(work, bounded.port) == (0, 4)


async def test_open_transactions_are_bounded_over_all_connections_of_a_login(
    gateway: amqp_gateway.AmqpGateway,
):
    limits = memory_budget.GatewayLimits(
        links=20, unfinished_bytes=1 << 20, unsettled_bytes=1 << 20, transaction_bytes=100_000
    )
    accepted, rejected = 0x24, 0x25  # both as outcomes in the transaction

    def work(port: int) -> list[object]:
        results: list[object] = []
        clients = [test_outcomes.Transacting(port, name) for name in ("first", "second")]
        names = [client.declare() for client in clients]
        senders = [client.raw.session.sender("out") for client in clients]

        def send(number: int) -> None:
            sender, raw = senders[number], clients[number].raw
            if not sender.target.address:
                sender.target.address = "queue:orders"
                sender.open()
                raw.until(lambda: sender.credit)
            delivery = sender.delivery(f"{len(results)}")
            delivery.local.data = [names[number]]
            delivery.update(0x34)
            sender.send(proton.Message(body="x" * 60_000).encode())
            sender.advance()
            raw.until(lambda: delivery.remote_state)
            results.append(int(delivery.remote.data[1].descriptor))

        send(0)
        send(1)
        discharged = clients[0].say("discharge", [names[0], True])
        clients[0].raw.until(lambda: discharged.remote_state)
        send(1)
        for client in clients:
            client.raw.socket.close()
        return results

    async with amqp_gateway.AmqpGateway(
        gateway.connect, None, anonymous="nobody", login_limits=limits
    ) as bounded:
        assert await asyncio.to_thread(work, bounded.port) == [accepted, rejected, accepted]
        await eventually.eventually(lambda: not bounded.connections and not bounded._budgets)


async def test_an_internal_error_ends_one_connection_only(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial, monkeypatch: pytest.MonkeyPatch
):
    """What it held is delivered to another one."""
    producer = (await dial()).session().producer(destinations.queue("orders"))
    broken = await asyncio.to_thread(raw_client.Raw, gateway.port, "broken")
    raw_client.receiver(broken, "queue:orders")
    await asyncio.to_thread(broken.until, lambda: broken.session.state & proton.Endpoint.REMOTE_ACTIVE)
    (client,) = gateway.connections
    await eventually.eventually(lambda: client.outgoing_links)

    def fail() -> bool:
        raise RuntimeError("broken")

    monkeypatch.setattr(client, "process_pending", fail)
    await producer.send("one")
    await eventually.eventually(lambda: client not in gateway.connections)
    broken.socket.close()

    def work() -> object:
        raw = raw_client.Raw(gateway.port, "sound")
        message, _ = raw_client.receive(raw, raw_client.receiver(raw, "queue:orders"))
        raw.socket.close()
        return message.body

    assert await asyncio.to_thread(work) == "one"


async def test_a_message_nested_too_deeply_stops_no_client(
    gateway: amqp_gateway.AmqpGateway, connect: fixtures.Connect
):
    """Its header is refused like any other malformed one, whichever connection reads it first."""
    names = ("first", "second")
    ready: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in names]

    def work(name: str, attached: asyncio.Future[None]) -> object:
        raw = raw_client.Raw(gateway.port, name)
        receiver = raw_client.receiver(raw, "topic:news")
        raw.until(lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)
        attached.get_loop().call_soon_threadsafe(attached.set_result, None)
        message, _ = raw_client.receive(raw, receiver)
        raw.socket.close()
        return message.body

    working = [asyncio.create_task(asyncio.to_thread(work, *each)) for each in zip(names, ready, strict=True)]
    await asyncio.gather(*ready)
    publisher = await connect("publisher")
    nested = '{"x":' + "[" * 3000 + "]" * 3000 + "}"
    await publisher.publish("topic.news", b"bad", headers={messages.HEADER: nested})
    await publisher.publish("topic.news", b"good")
    assert await asyncio.gather(*working) == ["good", "good"]
