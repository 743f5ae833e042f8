"""A suspended machine: hours pass that the event loop's clock does not count."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from muster.bus import uptime
from muster.core import errors
from muster.inform import client, protocol
from muster.inform.node import node as node_node
from muster.inform.node.log import executed, freshness
from tests.sim.parts import contexts as simulated_contexts


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no such clock")
async def test_time_in_suspend_counts(bus, monkeypatch):
    node = await node_node.start(bus)
    try:
        assert not node.freshness.is_stalled
        awake = time.clock_gettime
        monkeypatch.setattr(time, "clock_gettime", lambda which: awake(which) + 2 * 86_400)
        monkeypatch.setattr(node.freshness, "now_s", uptime.clock_of(asyncio.get_running_loop()))
        assert node.freshness.is_stalled
    finally:
        await node.close()


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no such clock")
@pytest.mark.may_leak("files", reason="libuv keeps a pipe for signals until the process ends")
def test_time_in_suspend_counts_on_uvloop():
    """A domain runs on it, where it is installed."""
    uvloop = pytest.importorskip("uvloop")

    async def clock() -> Any:
        return uptime.clock_of(asyncio.get_running_loop())

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert getattr(runner.run(clock()), "args", None) == (time.CLOCK_BOOTTIME,)


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no such clock")
async def test_a_node_has_that_clock(bus):
    node = await node_node.start(bus)
    try:
        before = time.clock_gettime(time.CLOCK_BOOTTIME)
        assert before <= node.freshness.now_s() <= time.clock_gettime(time.CLOCK_BOOTTIME)
        assert getattr(node.freshness.now_s, "args", None) == (time.CLOCK_BOOTTIME,)
    finally:
        await node.close()


@pytest.mark.virtual_time
async def test_a_node_after_suspend_drops_deleted_contexts_and_suspects_no_other(simulated_network):
    net, loop = simulated_network, asyncio.get_running_loop()
    short = msgspec.structs.replace(simulated_contexts.SETTINGS, tombstone_s=300.0)
    slept_s = 0.0
    first = await node_node.start(await net.connect("n1"), settings=short, now_ns=net.now_ns)
    second = await node_node.start(
        await net.connect("n2"), settings=short, now_ns=net.now_ns, uptime_s=lambda: loop.time() + slept_s
    )
    contexts = client.InformClient(await net.connect("ann"), node="n1")
    await asyncio.sleep(20.0)
    for key in ("kept", "deleted"):
        await contexts.put(key, b"v", ack="replicated")
    net.cut("n2")  # it receives nothing, as while it is suspended
    await contexts.delete("deleted")
    replica = first.replicas.index["deleted"]
    await first.primary.forget("deleted", replica)  # as after 300 s, which n2's loop does not count
    slept_s = 301.0
    net.heal()
    await asyncio.sleep(3.0)
    assert list(second.replicas.index) == ["kept"]
    assert second.directory.nodes == ["n1"]
    assert second.replicas.index["kept"].holders == ("n1", "n2"), "no node was declared lost"
    for node in (first, second):
        await node.close()


@pytest.mark.virtual_time
async def test_a_node_that_was_cut_off_for_longer_than_a_tombstone_drops_deleted_contexts(simulated_network):
    net = simulated_network
    short = msgspec.structs.replace(simulated_contexts.SETTINGS, tombstone_s=30.0)
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
    assert await nodes[0].records.current("deleted") is None, "its tombstone is purged"
    net.heal()
    await asyncio.sleep(20.0)
    for node in nodes:
        assert node.failure() is None
        assert list(node.replicas.index) == ["kept"]
        await node.close()


@pytest.mark.virtual_time
async def test_a_node_that_stood_still_does_not_carry_out_old_writes(simulated_network):
    """Their clients got a reply from another node, and other clients have written since."""
    net = simulated_network
    node = await node_node.start(
        await net.connect("n1"), settings=simulated_contexts.SETTINGS, now_ns=net.now_ns
    )
    put = protocol.PutContext("k", b"old", request="r")
    await node.writer.write(put, "ann")
    await node.writer.write(protocol.PutContext("k", b"new"), "ann")
    for task in (*node._loops,):  # as in a frozen process
        task.cancel()
    await asyncio.sleep(executed.EXECUTED_S + 1)
    with pytest.raises(errors.TimedOut):
        await node.writer.write(put, "ann")
    with pytest.raises(errors.TimedOut):
        await node.primary.update(protocol.UpdateContext(put, "ann"))
    ann = client.InformClient(await net.connect("ann"), timeout_s=1.0)
    with pytest.raises(errors.TimedOut):
        await ann.write(put)
    assert node.not_requests["stalled"] == 1
    last = await node.records.current("k")
    assert last is not None
    assert last.record.value == b"new"
    await node.close()


@pytest.mark.virtual_time
async def test_a_write_is_not_tried_for_longer_than_the_log_recognises_it(simulated_network, monkeypatch):
    net = simulated_network
    node = await node_node.start(
        await net.connect("n1"), settings=simulated_contexts.SETTINGS, now_ns=net.now_ns
    )
    attempts: list[float] = []

    async def refuse(record: protocol.ContextRecord, since: int) -> int:
        attempts.append(node.freshness.now_s())
        await asyncio.sleep(15.0)
        raise errors.Conflict("another record")

    monkeypatch.setattr(node.log, "append", refuse)
    with pytest.raises(errors.TimedOut):
        await node.writer.write(protocol.PutContext("k", b"v"), "ann")
    assert attempts[-1] - attempts[0] <= freshness.WRITE_S
    await node.close()


@pytest.mark.virtual_time
async def test_a_deletion_by_a_late_clock_stays_for_the_time_of_the_log(simulated_network):
    """Also if another time at which the context was due has passed."""
    net = simulated_network
    settings = msgspec.structs.replace(simulated_contexts.SETTINGS, tombstone_s=300.0)
    node = await node_node.start(
        await net.connect("n1"), settings=settings, now_ns=lambda: net.now_ns() - 10 * 86_400 * 10**9
    )
    ann = client.InformClient(await net.connect("ann"))
    await ann.put("k", b"v", lease_s=30.0)
    await ann.put("k", b"v")
    await ann.delete("k")
    last = await node.records.current("k")
    assert last is not None
    await asyncio.sleep(100.0)
    assert await node.records.current("k") == last, "another node may be offline"
    await asyncio.sleep(settings.tombstone_s)
    assert await node.records.current("k") is None
    await node.close()
