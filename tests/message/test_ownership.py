"""Client ids, durable subscriptions and connections belong to the identity that the broker verified."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator

import pytest

from muster.app.components import dispatcher as app_message
from muster.bus.memory import network
from muster.core import errors
from muster.core.telemetry import metrics
from muster.message import destinations, protocol, settings
from muster.message import errors as message_errors
from muster.message.client import api
from muster.message.dispatcher import leadership
from muster.trust import keyring
from muster.trust.permissions import roles

pytestmark = pytest.mark.virtual_time

NEWS = destinations.topic("news/eu")


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> keyring.Keyring:
    made = keyring.Keyring.create(pathlib.Path(tmp_path_factory.mktemp("trust")) / "keys", "north")
    for identity, role in (("ann", "user"), ("bob", "user"), ("olga", "operator"), ("vic", "viewer")):
        made.issue(identity, roles.Role(role))
    return made


@contextlib.asynccontextmanager
async def serving(
    net: network.SimulatedNetwork,
    trust: keyring.Keyring,
    measure: metrics.Metrics | None = None,
    **expected: int,
) -> AsyncIterator[None]:
    started = leadership.DispatcherLeadership(
        await net.connect("dispatcher"),
        settings.MessageSettings(**expected),  # type: ignore[arg-type]
        lease_ttl_s=2,
        may=app_message.TopicPermissions(trust),
        measure=measure,
    )
    running = asyncio.create_task(started.run())
    try:
        await started.acting.wait()
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _subscriptions(connection: api.Connection) -> list[tuple[str, str | None, str]]:
    rows = (await connection.request(protocol.ListSubscriptions())).subscriptions
    return [(row.identity, row.client_id, row.subscription) for row in rows]


async def test_a_client_id_is_one_of_its_identity(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    net = simulated_network
    async with serving(net, trust), api.Connection(await net.connect("bob"), client_id="desk") as bob:
        async with api.Connection(await net.connect("ann"), client_id="desk") as ann:
            await (await ann.session().durable_consumer(NEWS, "all")).close()
        await bob.session().producer(NEWS).send("for ann")
        with pytest.raises(message_errors.InvalidDestination):
            await bob.session().unsubscribe("all")
        own = await bob.session().durable_consumer(NEWS, "all")
        await bob.session().producer(NEWS).send("for both")
        message = await own.receive(30)
        assert message is not None
        assert message.body() == "for both", "that is what came since its own subscription was made"
        await own.close()
        await bob.session().unsubscribe("all")
        async with api.Connection(await net.connect("ann"), client_id="desk") as ann:
            consumer = await ann.session().durable_consumer(NEWS, "all")
            actual = [await consumer.receive(30) for _ in range(2)]
            assert [item.body() for item in actual if item] == ["for ann", "for both"]


async def test_two_connections_of_an_identity_cannot_have_one_client_id(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    net = simulated_network
    async with serving(net, trust), api.Connection(await net.connect("ann"), client_id="desk"):
        with pytest.raises(message_errors.InvalidClientId):
            await api.Connection(await net.connect("ann"), client_id="desk").__aenter__()


async def test_messages_of_another_identity_with_the_same_client_id_are_not_ones_own(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    net = simulated_network
    async with (
        serving(net, trust),
        api.Connection(await net.connect("ann"), client_id="desk") as ann,
        api.Connection(await net.connect("bob"), client_id="desk") as bob,
    ):
        durable = await ann.session().durable_consumer(NEWS, "all", no_local=True)
        listener = await ann.session().consumer(NEWS, no_local=True)
        for connection, text in ((ann, "own"), (bob, "of bob")):
            await connection.session().producer(NEWS).send(text)
        for consumer in (durable, listener):
            message = await consumer.receive(30)
            assert message is not None
            assert message.body() == "of bob"


async def test_an_identity_sees_its_own_subscriptions_and_operators_and_viewers_all(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    net = simulated_network
    async with serving(net, trust), contextlib.AsyncExitStack() as stack:
        connections = {
            name: await stack.enter_async_context(api.Connection(await net.connect(name), client_id=id))
            for name, id in (("ann", "desk"), ("bob", "desk"), ("olga", None), ("vic", None))
        }
        for name in ("ann", "bob"):
            await connections[name].session().durable_consumer(NEWS, f"of {name}")
        own = {name: [(name, "desk", f"of {name}")] for name in ("ann", "bob")}
        for name in ("ann", "bob"):
            assert await _subscriptions(connections[name]) == own[name]
        for name in ("olga", "vic"):
            assert await _subscriptions(connections[name]) == own["ann"] + own["bob"]


async def test_an_operator_ends_the_subscription_of_any_identity(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    net = simulated_network
    async with (
        serving(net, trust),
        api.Connection(await net.connect("bob")) as bob,
        api.Connection(await net.connect("olga")) as olga,
    ):
        async with api.Connection(await net.connect("ann"), client_id="desk") as ann:
            await (await ann.session().durable_consumer(NEWS, "all")).close()
        for name in ("all", "none"):
            with pytest.raises(errors.Forbidden):
                await bob.request(protocol.EndSubscription(bob.name, name, owner=("ann", "desk")))
        await olga.request(protocol.EndSubscription(olga.name, "all", owner=("ann", "desk")))
        assert await _subscriptions(olga) == []


async def test_a_subscription_without_a_client_id_is_shared_by_all_and_ended_by_its_maker(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    net = simulated_network
    async with (
        serving(net, trust),
        api.Connection(await net.connect("ann")) as ann,
        api.Connection(await net.connect("bob")) as bob,
        api.Connection(await net.connect("olga")) as olga,
    ):
        first, second = await asyncio.gather(
            *(
                connection.session().shared_durable_consumer(NEWS, "work", prefetch=1)
                for connection in (ann, bob)
            )
        )
        ((maker, _, _),) = await _subscriptions(olga)
        other = {"ann": bob, "bob": ann}[maker]
        for number in range(4):
            await ann.session().producer(NEWS).send(f"{number}")
        shares = [[await consumer.receive(1) for _ in range(4)] for consumer in (first, second)]
        assert all(any(share) for share in shares), "each gets some"
        actual = [str(message.body()) for share in shares for message in share if message]
        assert sorted(actual) == ["0", "1", "2", "3"]
        await first.close()
        await second.close()
        with pytest.raises(errors.Forbidden):
            await other.session().unsubscribe("work")
        for topic, selector in ((destinations.topic("news/us"), None), (NEWS, "n = 1")):
            with pytest.raises(errors.Forbidden):  # which would end it as well
                await other.session().shared_durable_consumer(topic, "work", selector)
        again = await other.session().shared_durable_consumer(NEWS, "work")
        await again.close()
        await {"ann": ann, "bob": bob}[maker].session().unsubscribe("work")
        await (await other.session().shared_durable_consumer(NEWS, "work")).close()
        await olga.session().unsubscribe("work")


async def test_a_client_id_has_a_largest_size(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    net, measured = simulated_network, metrics.Metrics()
    async with serving(net, trust, measured):
        async with api.Connection(await net.connect("ann"), client_id="é" * 512):
            pass
        with pytest.raises(message_errors.InvalidClientId, match="1024 bytes"):
            await api.Connection(await net.connect("ann"), client_id="é" * 512 + "x").__aenter__()
    assert measured.value("muster_message_refused_connections_total", reason="client-id") == 1


async def test_the_connections_of_an_identity_are_bounded(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    net, measured = simulated_network, metrics.Metrics()

    async def connection(identity: str) -> api.Connection:
        made = api.Connection(await net.connect(identity))
        await made.request(protocol.Ping(made.name))
        return made

    async with serving(net, trust, measured, connections_per_identity=2):
        held = [await connection("bob") for _ in range(2)]
        refused = api.Connection(await net.connect("bob"))
        with pytest.raises(errors.LimitExceeded, match="bob has 2 connections"):
            await refused.request(protocol.Ping(refused.name))
        await refused.close()
        held.append(await connection("ann"))
        await held[0].request(protocol.ClientHello(held[0].name))  # which it repeats whenever it is in doubt
        await held.pop(0).close()
        held.append(await connection("bob"))
        for item in held:
            await item.close()
    assert measured.value("muster_message_refused_connections_total", reason="identity") == 1
