"""What waits at a closing consumer of a shared subscription reaches the others, whatever their connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from muster.bus.memory import network
from muster.core import errors
from muster.message import destinations, messages, protocol
from muster.message.client import api, consumers
from muster.message.dispatcher import leadership, state
from muster.testing import eventually
from tests.message import test_hostile_requests

pytestmark = pytest.mark.virtual_time

NEWS = destinations.topic("news")
COUNT = 40


@contextlib.asynccontextmanager
async def serving(net: network.SimulatedNetwork, may: state.May = state.allow_all) -> AsyncIterator[None]:
    started = leadership.DispatcherLeadership(await net.connect("dispatcher"), lease_ttl_s=2, may=may)
    running = asyncio.create_task(started.run())
    try:
        await started.acting.wait()
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def received(consumer: consumers.Consumer) -> list[str]:
    bodies: list[str] = []
    while (message := await consumer.receive(5)) is not None:
        bodies.append(str(message.body()))
    return bodies


async def send(net: network.SimulatedNetwork, sharing: list[consumers.Consumer]) -> None:
    async with api.Connection(await net.connect("publisher")) as publisher:
        producer = publisher.session().producer(NEWS, persistent=False)
        for number in range(COUNT):
            await producer.send(f"{number}")
    await eventually.eventually(lambda: sum(len(consumer._arrived) for consumer in sharing) == COUNT)
    assert all(consumer._arrived for consumer in sharing), "each has a part"


@pytest.mark.parametrize("other", ["ann", "bob"])
async def test_consumers_of_other_connections_receive_what_a_closed_one_did_not(
    simulated_network: network.SimulatedNetwork, other: str
):
    net = simulated_network
    async with serving(net):
        closing_bus, staying_bus = await net.connect("ann"), await net.connect(other)
        async with api.Connection(closing_bus) as closing, api.Connection(staying_bus) as staying:
            first = await closing.session().shared_consumer(NEWS, "share", "JMSPriority = 4")
            second = await staying.session().shared_consumer(NEWS, "share", "JMSPriority = 4")
            await send(net, [first, second])
            await closing.close()
            assert sorted(await received(second)) == sorted(map(str, range(COUNT)))


async def test_messages_passed_on_are_passed_on_again(simulated_network: network.SimulatedNetwork):
    net = simulated_network
    async with serving(net), contextlib.AsyncExitStack() as stack:
        sharing = []
        for _ in range(3):
            connection = await stack.enter_async_context(api.Connection(await net.connect("ann")))
            sharing.append(await connection.session().shared_consumer(NEWS, "share"))
        await send(net, sharing)
        await sharing[0].close()
        await eventually.eventually(lambda: sum(len(consumer._arrived) for consumer in sharing) == COUNT)
        await sharing[1].close()
        assert sorted(await received(sharing[2])) == sorted(map(str, range(COUNT)))


async def test_other_identities_receive_nothing_from_one_that_may_not_publish(
    simulated_network: network.SimulatedNetwork,
):
    def may(identity: str, action: str, subject: str) -> bool:
        return not (identity == "ann" and action == "pub")

    net = simulated_network
    async with serving(net, may), contextlib.AsyncExitStack() as stack:
        sharing = []
        for identity in ("ann", "bob", "ann"):
            connection = await stack.enter_async_context(api.Connection(await net.connect(identity)))
            sharing.append(await connection.session().shared_consumer(NEWS, "share"))
        await send(net, sharing)
        of_bob = len(sharing[1]._arrived)
        await sharing[0].close()
        assert len(await received(sharing[2])) == COUNT - of_bob, "its own identity trusts it"
        await sharing[2].close()
        assert len(await received(sharing[1])) == of_bob


async def test_a_raw_client_passes_on_messages_of_its_own_subscriptions_only(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    message = protocol.SendMessage("topic:other", messages.encode_meta(messages.MessageMeta()).decode(), b"")
    async with serving(net), test_hostile_requests.hostile(net) as mallory:
        pass_on = protocol.PassOnMessages(mallory.name, 1, [message])
        with pytest.raises(errors.InvalidInput, match="shared subscription"):
            await mallory.request(pass_on)
        await mallory.attach(NEWS, subscription="share", shared=True)
        with pytest.raises(errors.InvalidInput, match="not a topic of the subscription"):
            await mallory.request(pass_on)
