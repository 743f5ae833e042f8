"""Nodes that are frozen: they are connected, receive requests, and reply to none."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from muster.bus import api
from muster.core import errors, subjects
from muster.inform import client, protocol
from muster.inform import settings as settings_
from muster.inform.node import node as node_node
from muster.inform.node.replicas import links
from muster.testing.eventually import eventually


async def frozen_node(connect: Any) -> list[str]:
    """A member of the group of nodes that replies to nothing; returns the requests that it received."""
    received: list[str] = []

    def receive(message: api.Message) -> None:
        received.append(message.subject)

    bus = await connect("frozen")
    for kind in ("read", "write"):
        pattern = subjects.from_identity(protocol.PART, "*", kind, protocol.ANY, "*")
        await bus.subscribe(pattern, group=node_node.GROUP, handler=receive)
    return received


async def test_a_read_is_also_sent_to_another_node_and_the_silent_one_is_avoided(
    start_node, inform, connect, monkeypatch
):
    monkeypatch.setattr(client, "HEDGE_S", 0.05)
    await start_node("n1")
    await inform.put("k", b"v")
    received = await frozen_node(connect)

    async def reaches_the_frozen_node() -> bool:
        assert (await inform.get("k")).value == b"v"
        return bool(received)

    await eventually(reaches_the_frozen_node)
    assert inform._responsive == "n1"
    received.clear()
    for _ in range(50):
        assert (await inform.get("k")).value == b"v"
    assert received == [], "requests go to the node that replied"


async def test_a_node_that_is_gone_is_not_preferred_any_longer(start_node, inform):
    await start_node("n1")
    await inform.put("k", b"v")
    inform._responsive = "gone"
    inform._responsive_until_s = asyncio.get_running_loop().time() + 3600
    assert (await inform.get("k")).value == b"v"
    assert (await inform.put("k", b"w")).primary == "n1"


async def test_a_write_that_a_frozen_node_received_is_repeated(start_node, inform, connect, monkeypatch):
    monkeypatch.setattr(client, "SLOW_HEDGE_S", 0.05)
    await start_node("n1")
    received = await frozen_node(connect)

    async def reaches_the_frozen_node() -> bool:
        written = await inform.put("k", b"v")
        assert written.primary == "n1"
        inform._responsive_until_s = 0.0
        return bool(received)

    await eventually(reaches_the_frozen_node)
    changes = (await inform.history("k")).changes
    assert len({change.version for change in changes}) == len(changes)


@pytest.mark.virtual_time
async def test_a_frozen_primary_is_replaced_within_seconds_and_a_slow_one_is_not(simulated_network):
    net = simulated_network
    settings = msgspec.structs.replace(settings_.DEFAULT, replicas=2)
    p, q = [
        await node_node.start(await net.connect(name), settings=settings, now_ns=net.now_ns) for name in "pq"
    ]
    await eventually(lambda: bool(p.directory.nodes and q.directory.nodes))
    near = {name: client.InformClient(await net.connect(f"ann-{name}"), node=name) for name in "pq"}
    written = await near["p"].put("k", b"1", ack="replicated")
    assert (written.primary, written.replicas) == ("p", 2)
    loop = asyncio.get_running_loop()

    append = p.log.append

    async def slow(*arguments: Any, **options: Any) -> int:
        await asyncio.sleep(links.PING_AFTER_S + 2 * links.PING_TIMEOUT_S)
        return await append(*arguments, **options)

    p.log.append = slow  # type: ignore[method-assign, assignment]
    written = await near["q"].put("k", b"2")
    assert written.primary == "p", "it replied to pings"

    p._on_node_message = lambda _: None  # type: ignore[method-assign, assignment]
    for work in p._loops:
        work.cancel()
    for subscription in p._subscriptions:
        await subscription.close()
    frozen = await net.connect("frozen")
    await frozen.subscribe(protocol.to_node("p", "*"), handler=lambda _: None)
    began_s = loop.time()
    written = await near["q"].put("k", b"3")
    assert written.primary == "q"
    assert loop.time() - began_s < settings.timeout_s
    for node in (p, q):
        await node.close()


@pytest.mark.virtual_time
async def test_a_rejection_is_asked_for_again_if_another_attempt_is_under_way(simulated_network):
    """The first attempt was rejected; without another one, its repetition might still be stored."""
    bus = await simulated_network.connect("node")
    codec = protocol.InformCodec("node")
    written = protocol.WriteResult("k", 7, "", "node", 1)
    attempts: list[bool] = []

    async def serve(message: api.Message) -> None:
        attempts.append(protocol.decode(message.data, protocol.DeleteContext).repeat)
        if attempts == [False]:
            await asyncio.sleep(client.SLOW_HEDGE_S + 0.5)
            await message.respond(codec.error(errors.NotFound("no context 'k'")))
        elif len(attempts) == 3:  # the second one is still under way
            await message.respond(codec.result(written))

    tasks: list[asyncio.Task[None]] = []
    pattern = subjects.from_identity(protocol.PART, "*", "write", protocol.ANY, "*")
    await bus.subscribe(pattern, handler=lambda message: tasks.append(asyncio.create_task(serve(message))))
    inform = client.InformClient(await simulated_network.connect("ann"), timeout_s=15.0)
    assert await inform.delete("k") == written
    assert attempts == [False, True, True]
    await asyncio.gather(*tasks)
