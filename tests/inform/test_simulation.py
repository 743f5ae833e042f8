from __future__ import annotations

import asyncio

import msgspec
import pytest

from muster.bus.memory import network
from muster.inform import client
from muster.inform.node import node as node_node
from muster.testing import virtual_clock
from tests.inform import simulation


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_nothing_acknowledged_is_lost_one_primary_at_a_time_and_copies_come_back(first: int):
    acknowledged = sum(
        len(versions)
        for seed in range(first, first + 10)
        for versions in simulation.run(seed).acknowledged.values()
    )
    assert acknowledged > 100, "there was something to lose"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1000, 2000, 50))
def test_a_thousand_seeds(first: int):
    for seed in range(first, first + 50):
        simulation.run(seed)


def test_a_seed_is_a_run():
    assert simulation.run(3).history == simulation.run(3).history


def test_who_was_cut_off_for_longer_than_deletions_are_remembered_keeps_nothing_deleted():
    async def cut_off() -> None:
        net = network.SimulatedNetwork(1)
        short = msgspec.structs.replace(simulation.SETTINGS, tombstone_s=30.0)
        nodes = [
            await node_node.start(await net.connect(name), settings=short, now_ns=net.now_ns)
            for name in ("n1", "n2")
        ]
        contexts = client.InformClient(await net.connect("ann"), node="n1", timeout_s=15.0)
        await asyncio.sleep(5.0)
        await contexts.put("kept", b"v", ack="replicated")
        await contexts.put("deleted", b"v", ack="replicated")
        net.cut("n2")
        await contexts.delete("deleted")
        await asyncio.sleep(100.0)
        assert await nodes[0].state.log.last("deleted") is None, "it is forgotten"
        net.heal()
        await asyncio.sleep(20.0)
        for node in nodes:
            assert node.failure() is None
            assert list(node.state.replicas.index) == ["kept"]
            await node.close()

    virtual_clock.run_virtual(cut_off())
