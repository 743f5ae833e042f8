"""The scenes of the demo: what a domain does, shown on a running one in a few seconds.

Each scene uses the same interfaces as any program, checks the result, and summarises it in a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from muster.app import domain
from muster.bus import api, leases
from muster.client import front, notifications
from muster.core import errors, topics
from muster.trust.permissions import roles


@dataclass(frozen=True, slots=True)
class Scene:
    name: str
    line: str
    facts: dict[str, Any] = field(default_factory=dict)


async def scenes(running: domain.Domain) -> AsyncIterator[Scene]:
    alice = front.AsyncMuster(await running.connect("alice", roles.Role.USER))
    bob = front.AsyncMuster(await running.connect("bob", roles.Role.USER))
    admin = front.AsyncMuster(await running.connect("admin", roles.Role.OPERATOR))
    async with alice, bob, admin:
        yield await messages(alice, bob)
        yield await selection(alice, bob)
        yield await storage(admin.bus)
        yield await notification(admin)
        yield await management(admin)
    yield await takeover(running)


def up(running: domain.Domain, took_s: float) -> Scene:
    return Scene("domain", f"up in {took_s:.1f} s: {', '.join(running.servers)}", {"seconds": took_s})


async def messages(sender: front.AsyncMuster, receiver: front.AsyncMuster) -> Scene:
    """Publish to a topic, and receive with a pattern."""
    topic = "Course/CPS616/Session/HPJava"
    async with await receiver.subscribe("Course/*/Session/HPJava") as subscription:
        began = time.perf_counter()
        await sender.publish(topic, "room 4")
        message = await subscription.next(timeout_s=5)
        took_ms = (time.perf_counter() - began) * 1000
    expect(message.text == "room 4", "the received message differs from the one that was sent")
    return Scene(
        "messages",
        f"{receiver.identity} got {sender.identity}'s message on {topic} in {took_ms:.1f} ms",
        {"topic": topic, "latency_ms": took_ms},
    )


async def selection(sender: front.AsyncMuster, receiver: front.AsyncMuster) -> Scene:
    """Select messages with a predicate."""
    text, count = "load > 0.8 AND zone IN ('north', 'east')", 100
    async with await receiver.subscribe("demo/reports/*", where=f"{text} OR node = {count}") as subscription:
        for node in range(count + 1):
            report = {
                "node": node,
                "load": node / count,
                "zone": ("north", "south", "east", "west")[node % 4],
            }
            await sender.publish(f"demo/reports/{node}", report)
        selected = 0
        while (await subscription.next(timeout_s=10)).json()["node"] != count:
            selected += 1
    expect(selected == 9, f"9 of the reports match, but {selected} were selected")
    return Scene(
        "selection",
        f"{selected} of {count} messages match {text}",
        {"predicate": text, "reports": count, "selected": selected},
    )


async def storage(bus: api.Bus) -> Scene:
    """Acknowledged messages are synced to disk; concurrent publishes share a sync."""
    count = 1_000
    subject = topics.Topic.parse("demo/log").subject
    stream = await bus.stream(api.StreamSettings("demo", subjects=(subject,), max_bytes=16 << 20))
    began = time.perf_counter()
    last = max(await asyncio.gather(*(stream.publish(subject, b"%d" % n) for n in range(count))))
    took_s = time.perf_counter() - began
    kept = [int(message.data) async for message in stream.read(last - count + 1, last)]
    expect(kept == list(range(count)), "the stream returned other messages than were stored")
    return Scene(
        "storage",
        f"{count:,} messages stored and synced in {took_s:.2f} s, and read back in order",
        {"messages": count, "seconds": took_s},
    )


async def notification(m: front.AsyncMuster) -> Scene:
    """Send an event to those in a given state."""
    address = "load > 0.6"
    await m.notify.define("Server", load=float)
    await m.notify.define_event("shed", percent=int)

    async def reaches(receiver: notifications.AsyncReceiver, timeout_s: float) -> bool:
        with contextlib.suppress(errors.TimedOut):
            return (await receiver.next(timeout_s=timeout_s)).type == "shed"
        return False

    async with contextlib.AsyncExitStack() as joined:
        servers = [
            await joined.enter_async_context(
                await m.notify.join(f"server-{n}", "Server", {"load": n / 10}, policy="shed")
            )
            for n in range(10)
        ]
        began = time.perf_counter()
        await m.notify.send("shed", {"percent": 20}, to=address)
        reached = sum(await asyncio.gather(*(reaches(server, 20) for server in servers[7:])))
        took_ms = (time.perf_counter() - began) * 1000
        reached += sum(await asyncio.gather(*(reaches(server, 0.2) for server in servers[:7])))
    expect(reached == 3, f"3 servers have {address}, but {reached} received the event")
    return Scene(
        "events",
        f"an event for {address} reached {reached} of {len(servers)} servers in {took_ms:.0f} ms",
        {"address": address, "reached": reached, "latency_ms": took_ms},
    )


async def management(m: front.AsyncMuster) -> Scene:
    """Keep a process running."""
    web = {"name": "web", "type": "process", "agent": "local", "config": {"command": ["sleep", "1000"]}}
    await m.fleet.apply({"resources": [web]})
    await m.fleet.wait("web", "up")
    began = time.perf_counter()
    await m.fleet.execute("web", "signal", number=9)
    async with asyncio.timeout(30):
        while not (row := (await m.fleet.resources("web"))[0]).restarts or row.state != "up":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    took_s = time.perf_counter() - began
    await m.fleet.delete("web", wait_s=30)
    return Scene(
        "services", f"the process web was killed, and is up again after {took_s:.1f} s", {"seconds": took_s}
    )


async def takeover(running: domain.Domain) -> Scene:
    """Two processes compete for a lease; the first loses its connection and cannot act any more."""
    name = "manage.demo"
    first = await running.connect("worker-1", roles.Role.REGISTRY)
    async with (
        await running.connect("worker-2", roles.Role.REGISTRY) as second,
        await leases.Leases.open(second) as of_second,
    ):
        old = await (await leases.Leases.open(first)).acquire(name, timeout_s=5)
        waiting = asyncio.create_task(of_second.acquire(name, timeout_s=20))
        await second.flush()
        began = time.perf_counter()
        await first.close()
        new = await waiting
        took_ms = (time.perf_counter() - began) * 1000
        fence = leases.EpochFence(new.epoch)
        with contextlib.suppress(errors.StaleEpoch):
            fence.check(old.epoch)
            raise errors.InvariantViolation("the epoch of a former holder was accepted")
    return Scene(
        "takeover",
        f"worker-1 was cut off; worker-2 had its lease after {took_ms:.0f} ms",
        {"latency_ms": took_ms, "epochs": [old.epoch, new.epoch]},
    )


async def tick(running: domain.Domain) -> None:
    """Publish the time, as long as the demo is running."""
    subject = topics.Topic.parse("demo/clock").subject
    async with await running.connect("clock", roles.Role.USER) as bus:
        while True:
            await bus.publish(subject, time.strftime("%H:%M:%S").encode())
            await asyncio.sleep(1)


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise errors.InvariantViolation(otherwise)
