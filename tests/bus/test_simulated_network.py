"""The faults of the simulated network, and the guarantees of the bus under them."""

from __future__ import annotations

import asyncio
import random

import pytest

from muster.bus import api
from muster.bus.memory import connection, network
from muster.core import errors
from muster.testing import virtual_clock
from muster.testing.eventually import eventually
from tests.bus import contract

pytestmark = pytest.mark.virtual_time


async def say(bus: connection.SimulatedBus, count: int) -> None:
    for number in range(count):
        await bus.publish("n", b"%d" % number)
    await bus.flush()


async def receive_numbers(net: network.SimulatedNetwork, count: int = 1000) -> list[int]:
    """What a receiver gets of ``count`` messages."""
    sender, receiver = await net.connect("sender"), await net.connect("receiver")
    subscription = await receiver.subscribe("n")
    await say(sender, count)
    await receiver.flush()
    await asyncio.sleep(10)
    return [int(m.data) for m in await contract.take(subscription, subscription.statistics().pending)]


async def test_a_good_network_delivers_everything_in_order():
    assert await receive_numbers(network.SimulatedNetwork(1)) == list(range(1000))


async def test_loss_is_as_asked_and_counted():
    net = network.SimulatedNetwork(1, faults=network.NetworkFaults(loss=0.1))
    got = await receive_numbers(net)
    assert 850 < len(got) < 950
    assert len(got) + net.lost == 1000
    assert got == sorted(got), "loss alone does not change the order"


async def test_duplication_and_reordering():
    net = network.SimulatedNetwork(1, faults=network.NetworkFaults(duplication=0.1))
    got = await receive_numbers(net)
    assert len(got) == 1000 + net.duplicated
    assert set(got) == set(range(1000))
    got = await receive_numbers(network.SimulatedNetwork(1, faults=network.NetworkFaults(reordering=0.2)))
    assert sorted(got) == list(range(1000))
    assert got != sorted(got)


async def test_delay_is_within_its_bounds():
    net = network.SimulatedNetwork(1, faults=network.NetworkFaults(delay_s_min=1, delay_s_max=2))
    bus = await net.connect("one")
    loop = asyncio.get_running_loop()
    for _ in range(20):
        began = loop.time()
        await bus.flush()
        assert 2 <= loop.time() - began <= 4, "there and back"


async def test_nodes_in_one_partition_reach_only_each_other():
    net = network.SimulatedNetwork(1)
    near, far, here = await net.connect("near"), await net.connect("far"), await net.connect("here")
    ears = {bus: await bus.subscribe("n") for bus in (near, far, here)}
    bucket = await near.key_value(api.KeyValueSettings("b"))

    def pending() -> list[int]:
        return [ear.statistics().pending for ear in ears.values()]

    net.cut("near", "far")
    await here.publish("n", b"")
    await asyncio.sleep(1)
    assert pending() == [0, 0, 1]
    await near.publish("n", b"")
    await asyncio.sleep(1)
    assert pending() == [1, 1, 1]
    with pytest.raises(errors.TimedOut):
        await bucket.put("k", b"")
    await asyncio.sleep(1000)
    assert near.state is api.ConnectionState.CONNECTED, "to a broker of its side"
    net.heal()
    await bucket.put("k", b"")
    await here.publish("n", b"")
    await asyncio.sleep(1)
    assert pending() == [2, 2, 2]


async def test_an_unplugged_node_reaches_no_other_and_both_ends_give_up():
    net = network.SimulatedNetwork(1, faults=network.NetworkFaults(silence_s=5))
    bus, witness = await net.connect("bus"), await net.connect("witness")
    own = await bus.subscribe("n")
    reports = await witness.subscribe("muster.bus.all.connections.disconnect")
    states: list[api.ConnectionState] = []
    bus.on_state(states.append)
    before = bus.connection
    assert before is not None
    net.unplug("bus")
    await bus.publish("n", b"")
    with pytest.raises(errors.TimedOut):
        await bus.flush(timeout_s=1)
    with pytest.raises(errors.NotConnected):
        await net.connect("another", node="bus")
    assert f'"id": {before.number}' in (await reports.next(timeout_s=30)).data.decode()
    assert states == [api.ConnectionState.RECONNECTING]
    await asyncio.sleep(60)
    assert bus.connection is None
    net.heal()
    await eventually(lambda: bus.state is api.ConnectionState.CONNECTED)
    assert bus.connection != before
    await bus.publish("n", b"again")
    assert (await own.next(timeout_s=30)).data == b"again"


async def test_a_killed_process_sends_nothing():
    net = network.SimulatedNetwork(1)
    bus, witness = await net.connect("bus"), await net.connect("witness")
    reports = await witness.subscribe("muster.bus.all.connections.disconnect")
    asking = asyncio.create_task(bus.request("muster.bus.all.connections.disconnect", b"", timeout_s=100))
    await asyncio.sleep(1)
    await reports.next()
    net.crash(bus)
    await reports.next(timeout_s=30)
    with pytest.raises(errors.TimedOut):
        await asking
    with pytest.raises(errors.NotConnected):
        await bus.publish("n", b"")


async def test_a_consumer_misses_nothing_on_a_faulty_network():
    net = network.SimulatedNetwork(5, faults=network.NetworkFaults(loss=0.2, delay_s_max=0.5, silence_s=2))
    writer, reader = await net.connect("writer"), await net.connect("reader")
    stream = await writer.stream(contract.settings())
    seen: list[int] = []
    there = await reader.open_stream("log")

    async def follow() -> None:
        async for message in there.follow(1):
            seen.append(message.sequence)  # noqa: PERF401 - it is cancelled in the middle

    following = asyncio.create_task(follow())
    for number in range(100):
        if number % 20 == 0:
            net.cut("reader")
        elif number % 20 == 10:
            net.unplug("reader")
        elif number % 10 == 5:
            net.heal()
        await stream.publish("log.a", b"", message_id=str(number), timeout_s=600)
    net.heal()
    await eventually(lambda: len(seen) >= 100, timeout_s=600)
    assert seen == list(range(1, 101)), "and an id makes a publish happen once, however often it is sent"
    following.cancel()
    await asyncio.wait([following])


def run(seed: int) -> list[str]:
    async def main() -> list[str]:
        chance = random.Random(seed)
        faults = network.NetworkFaults(loss=0.1, duplication=0.1, reordering=0.1, delay_s_max=0.1)
        net, story = network.SimulatedNetwork(seed, faults=faults), []
        buses = [await net.connect(f"n{n}") for n in range(4)]
        for bus in buses:

            def receive_numbers(message: api.Message, who: str = bus.identity) -> None:
                story.append(f"{asyncio.get_running_loop().time():.6f} {who} {message.data!r}")

            await bus.subscribe("n", handler=receive_numbers, group=chance.choice(["", "g"]))
        for number in range(100):
            await chance.choice(buses).publish("n", b"%d" % number)
            await asyncio.sleep(chance.random() / 10)
        await asyncio.sleep(5)
        return story

    return virtual_clock.run_virtual(main())


def test_a_seed_is_a_run():
    assert run(1) == run(1)
    assert run(1) != run(2)
