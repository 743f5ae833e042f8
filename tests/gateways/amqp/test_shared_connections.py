"""Clients with the same login share a bus connection, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from proton import reactor as proton_reactor  # noqa: E402
from proton import utils as proton_utils  # noqa: E402

from muster.app.supervisor import endpoints  # noqa: E402
from muster.bus import api  # noqa: E402
from muster.core.telemetry import metrics  # noqa: E402
from muster.gateways.amqp import connection  # noqa: E402
from muster.gateways.amqp import gateway as amqp_gateway  # noqa: E402
from muster.gateways.amqp.links import topics  # noqa: E402
from muster.message import destinations  # noqa: E402
from muster.message.client import topic_listeners  # noqa: E402
from muster.message.dispatcher import leadership  # noqa: E402
from muster.testing import eventually, fixtures  # noqa: E402
from muster.trust.login import passwords  # noqa: E402


class GatewayWorld:
    """A gateway, and the connections to the bus that it has made."""

    def __init__(self, connect: fixtures.Connect) -> None:
        self._connect = connect
        self.dialled: list[api.Bus] = []
        self.gateway = amqp_gateway.AmqpGateway(self._connect_bus, None, anonymous="nobody")

    async def _connect_bus(self, login: passwords.PasswordLogin) -> api.Bus:
        self.dialled.append(await self._connect(f"{login.name}-{len(self.dialled)}"))
        return self.dialled[-1]

    def client(self) -> proton_utils.BlockingConnection:
        """For threads."""
        url = f"amqp://127.0.0.1:{self.gateway.port}"
        return proton_utils.BlockingConnection(url, timeout=30, allowed_mechs="ANONYMOUS", reconnect=False)

    def topic_links(self) -> list[topics.TopicLink]:
        links = (link for bridge in self.gateway.connections for link in bridge.outgoing_links.values())
        return [link for link in links if isinstance(link, topics.TopicLink)]

    def sent(self) -> list[int]:
        """How many messages each listener was sent."""
        return sorted(link._sent for link in self.topic_links())


@pytest_asyncio.fixture
async def world(
    dispatcher: leadership.DispatcherLeadership, connect: fixtures.Connect
) -> AsyncIterator[GatewayWorld]:
    made = GatewayWorld(connect)
    async with made.gateway:
        yield made


async def test_two_clients_have_one_connection_until_both_have_left(world: GatewayWorld):
    def work() -> list[str]:
        first, second = world.client(), world.client()
        receivers = [session.create_receiver("topic:hall") for session in (first, second)]
        sender = second.create_sender("topic:hall")
        sender.send(proton.Message(body="to both"))
        bodies = [receiver.receive(timeout=30).body for receiver in receivers]
        first.close()
        sender.send(proton.Message(body="to one"))
        bodies.append(receivers[1].receive(timeout=30).body)
        second.close()
        return bodies

    assert await asyncio.to_thread(work) == ["to both", "to both", "to one"]
    (bus,) = world.dialled
    await eventually.eventually(lambda: bus.state is api.ConnectionState.CLOSED, timeout_s=30)


class Shared(proton_reactor.ReceiverOption):  # type: ignore[misc]
    def apply(self, receiver: Any) -> None:
        words = [proton.symbol(word) for word in ("topic", "shared", "global")]
        receiver.source.capabilities.put_object(proton.Array(proton.UNDESCRIBED, proton.Data.SYMBOL, *words))


async def test_a_subscription_shared_by_clients_of_one_identity_is_still_shared(world: GatewayWorld):
    count = 30

    def work() -> list[proton_utils.BlockingConnection]:
        clients = [world.client(), world.client()]
        for item in clients:
            item.create_receiver("hall", credit=count, name="team|global", options=Shared())
        sender = clients[0].create_sender("topic:hall")
        for number in range(count):
            sender.send(proton.Message(body=str(number)))
        return clients

    clients = await asyncio.to_thread(work)
    await world.dialled[0].flush()  # so whatever was accepted has come
    assert len(world.sent()) == 2
    assert sum(world.sent()) == count, "each went to one of the two"
    for client in clients:
        await asyncio.to_thread(client.close)


async def test_what_waits_at_a_link_that_closes_reaches_those_that_share_its_subscription(
    world: GatewayWorld,
):
    count = 30

    def work() -> list[proton_utils.BlockingConnection]:
        clients = [world.client(), world.client()]
        for client, credit in zip(clients, (1, count), strict=True):
            client.create_receiver("hall", credit=credit, name="team|global", options=Shared())
        sender = clients[1].create_sender("topic:hall")
        for number in range(count):
            sender.send(proton.Message(body=str(number)))
        return clients

    clients = await asyncio.to_thread(work)
    await world.dialled[0].flush()
    assert 1 in world.sent()
    assert sum(world.sent()) < count, "some wait for the credit of the first"
    links = world.topic_links()
    await asyncio.to_thread(clients[0].close)
    await eventually.eventually(lambda: sum(link._sent for link in links) == count, timeout_s=30)
    await asyncio.to_thread(clients[1].close)


async def test_who_lost_the_bus_for_good_has_to_log_in_again(world: GatewayWorld):
    first = await asyncio.to_thread(world.client)
    assert len(world.gateway.connections) == 1
    await world.dialled[0].close()
    await eventually.eventually(lambda: not world.gateway.connections, timeout_s=30)
    first.timeout = 0.1  # it gets no reply
    with contextlib.suppress(proton.ProtonException):
        await asyncio.to_thread(first.close)

    def again() -> str:
        made = world.client()
        receiver = made.create_receiver("topic:hall")
        made.create_sender("topic:hall").send(proton.Message(body="here again"))
        body = receiver.receive(timeout=30).body
        made.close()
        return str(body)

    assert await asyncio.to_thread(again) == "here again"
    assert len(world.dialled) == 2


class NamedListener:
    """Adds its name to ``heard_by`` for each message."""

    def __init__(self, name: str, heard_by: list[str]) -> None:
        self.owner = self.name = name
        self._heard_by = heard_by

    def offer(self, _: topic_listeners.TopicMessage) -> None:
        self._heard_by.append(self.name)


async def test_listeners_of_one_connection_are_called_one_after_the_other(connect: fixtures.Connect):
    order: list[str] = []

    bus = await connect("listens")
    listeners = topic_listeners.TopicListeners(bus, topic_listeners.TopicMessage)
    taps: Any = [NamedListener(owner, order) for owner in ("a", "b", "a", "b")]
    for tap in taps:
        await listeners.add("hall", "hall", None, tap)
    await bus.publish(destinations.topic("hall").subject, b"x")
    await bus.flush()
    assert order == ["a", "a", "b", "b"]
    await listeners.remove("hall", taps[0])
    await bus.publish(destinations.topic("hall").subject, b"x")
    await bus.flush()
    assert order[4:] == ["a", "b", "b"]


async def test_connections_take_turns_however_many_listeners_each_has():
    heard_by: list[str] = []

    class Bridge(connection.AmqpConnection):
        written = 0

        def flush(self) -> None:
            super().flush()
            self.written = len(heard_by)

    gateway = amqp_gateway.AmqpGateway(_nobody, None)
    many, few, alone = Bridge(gateway), Bridge(gateway), Bridge(gateway)
    crowd: Any = (NamedListener("many", heard_by),) * connection.TURN_DELIVERIES
    values: Any = (NamedListener("few", heard_by),) * 5
    single: Any = (NamedListener("alone", heard_by),)
    output: Any = _Said()
    message = topics.EncodedTopicMessage(output)
    for _ in range(3):
        many.enqueue_topic_message(crowd, message)
        few.enqueue_topic_message(values, message)
    alone.enqueue_topic_message(single, message)
    assert heard_by == [], "not before its turn"
    await asyncio.sleep(0)
    turns = ["many"] * len(crowd) + ["few"] * 3 * len(values) + ["alone"]
    assert heard_by[: len(turns)] == turns
    total = 3 * (len(crowd) + len(values)) + 1
    await eventually.eventually(lambda: len(heard_by) == total and many.written == total, timeout_s=30)


async def test_who_cannot_keep_up_holds_a_bounded_number_of_messages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "PENDING_MAX", 5)
    topic_messages: list[topics.EncodedTopicMessage] = []

    class MessageListener:
        def offer(self, topic_message: topics.EncodedTopicMessage) -> None:
            topic_messages.append(topic_message)

    taps: Any = (MessageListener(),)
    measured = metrics.Metrics()
    made = connection.AmqpConnection(amqp_gateway.AmqpGateway(_nobody, None, measure=measured))
    output: Any = _Said()
    messages = [topics.EncodedTopicMessage(output) for _ in range(20)]
    for message in messages:
        made.enqueue_topic_message(taps, message)
    assert topic_messages == messages[:15], "without waiting for a turn"
    await eventually.eventually(lambda: topic_messages == messages, timeout_s=30)


async def test_gateways_may_share_a_port():
    shared = endpoints.Endpoint("amqp", "127.0.0.1", 0, shared=True)
    async with amqp_gateway.AmqpGateway(_nobody, None, listener=shared.listen()) as first:
        with pytest.raises(OSError, match="in use"):
            await amqp_gateway.AmqpGateway(_nobody, None, port=first.port).start()
        again = dataclasses.replace(shared, port=first.port).listen()
        async with amqp_gateway.AmqpGateway(_nobody, None, listener=again) as second:
            clients = []
            while not (first.connections and second.connections):
                clients.append(await asyncio.open_connection("127.0.0.1", first.port))
            for _, writer in clients:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()


async def test_what_expired_while_it_waited_for_a_turn_is_not_handed_out():
    class CountingListener:
        def __init__(self) -> None:
            self.heard = 0

        def offer(self, message: topics.EncodedTopicMessage) -> None:
            self.heard += 1

    class Short(topics.EncodedTopicMessage):
        expires_ms = 1

    measured = metrics.Metrics()
    made = connection.AmqpConnection(amqp_gateway.AmqpGateway(_nobody, None, measure=measured))
    output: Any = _Said()
    tap: Any = CountingListener()
    for kind in (topics.EncodedTopicMessage, Short, topics.EncodedTopicMessage):
        made.enqueue_topic_message((tap,) * connection.TURN_DELIVERIES, kind(output))
    await eventually.eventually(lambda: tap.heard == 2 * connection.TURN_DELIVERIES, timeout_s=30)
    expired = measured.value("muster_amqp_dropped_messages_total", reason="expired")
    assert expired == connection.TURN_DELIVERIES


class _Said:
    subject = "topic.hall"
    data = b"x"

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}

    def header(self, name: str) -> str | None:
        return None


async def _nobody(login: passwords.PasswordLogin) -> api.Bus:
    raise AssertionError(login)
