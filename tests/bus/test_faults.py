"""Brokers killed under load: nothing acknowledged is lost, and clients reconnect.

Workload: many publishers of one connection.  Nemesis: kill -9.  History: which publishes were acknowledged.
Checker: an acknowledged message is in the stream at its sequence, and a message with an id is there once.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal

import pytest

import muster
from muster.bus import api
from muster.bus.brokers import broker as brokers
from muster.bus.brokers import monitor, network
from muster.bus.client import client
from muster.bus.streams import integrity
from muster.core import errors
from muster.testing.eventually import eventually

LOG = api.StreamSettings("log", ("log.>",), max_bytes=64 << 20)


class StreamLoad:
    """Publishers with and without message ids, and the acknowledgements they received."""

    def __init__(self, stream: api.Stream) -> None:
        self._stream = stream
        self._stop = asyncio.Event()
        self.acknowledged: dict[bytes, int] = {}
        self.unsure: list[bytes] = []

    async def publisher(self, number: int, *, safe: bool) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            data = b"%d/%d" % (number, count)
            try:
                self.acknowledged[data] = await self._stream.publish(
                    f"log.{number}",
                    data,
                    message_id=data.decode() if safe else None,
                    timeout_s=30 if safe else 3,
                )
            except errors.TimedOut:
                assert not safe, "with an id it can be repeated, so it is never in doubt for long"
                self.unsure.append(data)

    @contextlib.asynccontextmanager
    async def running(self):
        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(self.publisher(number, safe=number % 2 == 0))
            yield
            self._stop.set()

    def more(self, count: int):
        """A condition: so many have been acknowledged since."""
        expected = len(self.acknowledged) + count
        return lambda: len(self.acknowledged) >= expected

    async def check(self, stream: api.Stream) -> None:
        stored = [message async for message in stream.read(1)]
        assert [message.sequence for message in stored] == list(range(1, len(stored) + 1))
        by_sequence = {message.sequence: message.data for message in stored}
        lost = {data: at for data, at in self.acknowledged.items() if by_sequence.get(at) != data}
        assert not lost, f"{len(lost)} of {len(self.acknowledged)} acknowledged messages are not there"
        copies = collections.Counter(message.data for message in stored)
        doubled = [data for data, count in copies.items() if count > 1]
        assert not doubled
        for number in range(40):
            mine = [
                int(data.split(b"/")[1]) for data in by_sequence.values() if data.startswith(b"%d/" % number)
            ]
            assert mine == sorted(mine), "the order of one publisher is kept"


async def test_a_broker_killed_under_load_loses_nothing_it_acknowledged(broker: brokers.Broker):
    async with await muster.connect(broker.url) as bus:
        stream = await bus.stream(LOG)
        load = StreamLoad(stream)
        async with load.running():
            for _ in range(2):
                await eventually(load.more(300), timeout_s=30)
                assert broker.pid
                os.kill(broker.pid, signal.SIGKILL)
            await eventually(load.more(300), timeout_s=30)
        assert bus.statistics().reconnects >= 2
        await load.check(stream)


async def leader_of(bus: client.NatsBus, stream: str) -> str:
    report = await bus._durable.api.call(f"STREAM.INFO.{stream}")
    return str(report["cluster"]["leader"])


async def test_reads_are_current_after_replicas_are_raised(cluster: network.BrokerNetwork):
    async with contextlib.AsyncExitStack() as stack:
        buses = [
            await stack.enter_async_context(await muster.connect(broker.url, identity=broker.name))
            for broker in cluster.brokers.values()
        ]
        settings = api.KeyValueSettings("b", max_bytes=1 << 20)
        buckets = [await bus.key_value(settings) for bus in buses]  # of one replica
        await buses[0].limit(
            "KV_b", max_bytes=1 << 20, max_age_s=0, on_full=api.FullPolicy.REFUSE, replicas=3
        )

        async def replicated() -> bool:
            report = (await buses[0].storage.call("STREAM.INFO.KV_b"))["cluster"]
            return [row["current"] for row in report.get("replicas", ())] == [True, True]

        await eventually(replicated, timeout_s=20)
        for number in range(300):
            revision = await buckets[0].put("k", b"%d" % number)
            actual = await asyncio.gather(*(bucket.get("k") for bucket in buckets))
            assert [entry and entry.revision for entry in actual] == [revision] * 3


async def test_the_leader_killed_under_load_loses_nothing_and_clients_roam(cluster: network.BrokerNetwork):
    async with await muster.connect(cluster.urls, identity="writer") as bus:
        await bus.stream(api.StreamSettings("log", ("log.>",), max_bytes=64 << 20, replicas=3))
        leader = await leader_of(bus, "log")
    others = [broker.url for broker in cluster.brokers.values() if broker.name != leader]
    async with (
        await muster.connect(cluster[leader].url, identity="writer") as bus,
        await muster.connect(others, identity="reader") as reader,
    ):
        stream, seen = await bus.open_stream("log"), []
        listening = await reader.subscribe("news")

        async def follow() -> None:
            async with (await reader.open_stream("log")).follow(1) as following:
                async for message in following:
                    seen.append(message.sequence)  # noqa: PERF401 - it is cancelled in the middle

        following = asyncio.create_task(follow())
        load = StreamLoad(stream)
        async with load.running():
            await eventually(load.more(300), timeout_s=30)
            await cluster[leader].kill()
            await eventually(lambda: bus.broker in cluster.brokers and bus.broker != leader)
            await bus.publish("news", b"roamed")
            assert (await listening.next(timeout_s=30)).data == b"roamed"
            await eventually(load.more(300), timeout_s=30)
        await load.check(stream)
        last = (await stream.state()).last_sequence
        await eventually(lambda: len(seen) >= last, timeout_s=30)
        assert seen == list(range(1, last + 1)), "the follower missed nothing, and saw nothing twice"
        following.cancel()
        await asyncio.wait([following])


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_leader_that_was_frozen_does_not_report_its_old_end(cluster, monkeypatch):
    """For about a second after its return, it and its successor both answer."""
    monkeypatch.setattr(monitor, "SILENT_S", 300.0)  # the broker is not killed
    settings = api.StreamSettings("s", subjects=("s.>",), max_bytes=1 << 20, max_age_s=0, replicas=3)
    async with contextlib.AsyncExitStack() as stack:
        members = list(cluster.brokers.values())
        buses = [
            await stack.enter_async_context(
                await client.connect([member.url], identity=member.name, audit_s=0)
            )
            for member in members
        ]
        await (await buses[0].stream(settings)).publish("s.a", b"before")
        marked = await integrity.marks(buses[0])
        leader = (await integrity.replicas(buses[0], "s")).leader
        (frozen,) = [member.pid for member in members if member.name == leader]
        streams = [await bus.open_stream("s") for bus in buses]
        (writer, *_) = [
            stream for stream, member in zip(streams, members, strict=True) if member.name != leader
        ]
        os.kill(frozen, signal.SIGSTOP)
        end = 1
        while end < 100:
            with contextlib.suppress(errors.Unavailable):
                end = await writer.publish("s.a", b"after", message_id=str(end), timeout_s=15)
        os.kill(frozen, signal.SIGCONT)
        until = asyncio.get_running_loop().time() + 3
        while asyncio.get_running_loop().time() < until:
            for bus, stream in zip(buses, streams, strict=True):
                assert (await stream.state()).last_sequence == end
                now = await integrity.marks(bus)
                assert integrity.regression(marked["s"], now["s"]) == ""
                marked = now
