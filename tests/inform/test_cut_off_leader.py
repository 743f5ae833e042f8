"""Reads and refusals while the broker that leads the log is cut off from the other brokers, not from its
clients: for seconds it does not know, and answers with what it has."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import msgspec
import pytest

from muster.bus.brokers import binary
from muster.bus.client import client as bus_client
from muster.core import errors
from muster.inform import client, protocol
from muster.inform.node import node as node_node
from muster.inform.node.log import context_log
from muster.testing.eventually import eventually
from tests.inform.conftest import QUICK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ALONE = msgspec.structs.replace(QUICK, replicas=1)
NAMES = ("a", "b", "c")


class Link:
    """A TCP connection to a broker that can be held: nothing passes, and nothing is closed."""

    def __init__(self, to: int) -> None:
        self.passing = asyncio.Event()
        self.passing.set()
        self._to = to
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, near: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far, target = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        for source, sink in ((near, target), (far, writer)):
            task = asyncio.create_task(self._copy(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self.passing.wait()
                sink.write(data)
                await sink.drain()
        sink.close()


class Cluster:
    """Three brokers. Each reaches each other over a link of its own, and no other way."""

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}
        self._links: dict[tuple[str, str], Link] = {}

    @contextlib.asynccontextmanager
    async def running(self, folder: Path) -> AsyncIterator[Cluster]:
        with contextlib.ExitStack() as sockets:
            held = [sockets.enter_context(socket.socket()) for _ in range(2 * len(NAMES))]
            for each in held:
                each.bind(("127.0.0.1", 0))
            ports = [each.getsockname()[1] for each in held]
        own, routes = dict(zip(NAMES, ports, strict=False)), dict(zip(NAMES, ports[3:], strict=True))
        program = await binary.find()
        async with contextlib.AsyncExitStack() as stack:
            for name in NAMES:
                there = []
                for other in NAMES:
                    if other != name:
                        link = self._links[name, other] = Link(routes[other])
                        there.append(f"nats://127.0.0.1:{await link.start()}")
                        stack.push_async_callback(link.stop)
                (folder / f"{name}.conf").write_text(
                    f"server_name: {name}\nlisten: 127.0.0.1:{own[name]}\n"
                    f"jetstream {{ store_dir: {folder}/{name} }}\n"
                    f"cluster {{ name: three, listen: 127.0.0.1:{routes[name]}, "
                    f"routes: [{', '.join(there)}], cluster_advertise: 127.0.0.1:9 }}\n"
                )
                words = (str(program.path), "-c", str(folder / f"{name}.conf"))
                broker = await asyncio.create_subprocess_exec(*words, stderr=subprocess.DEVNULL)
                stack.push_async_callback(_end, broker)
                self.urls[name] = f"nats://127.0.0.1:{own[name]}"
            yield self

    def cut_off(self, name: str, *, heal: bool = False) -> None:
        for pair, link in self._links.items():
            if name in pair:
                (link.passing.set if heal else link.passing.clear)()


async def _end(broker: asyncio.subprocess.Process) -> None:
    broker.kill()
    await broker.wait()


async def test_what_a_leader_that_is_cut_off_answers_is_not_believed(tmp_path):
    async with Cluster().running(tmp_path) as cluster, contextlib.AsyncExitStack() as stack:

        async def connect(name: str, identity: str) -> bus_client.NatsBus:
            """With the storage of the three brokers."""
            while True:
                with contextlib.suppress(errors.Unavailable):
                    bus = await bus_client.connect([cluster.urls[name]], identity=identity)
                    await stack.enter_async_context(bus)
                    await bus.storage.call("STREAM.NAMES")
                    return bus
                await asyncio.sleep(0.1)  # pace

        operator = await connect("a", "operator")
        while True:
            with contextlib.suppress(errors.MusterError):  # until all three have joined
                await context_log.open_stream(operator, replicas=3)
                break
            await asyncio.sleep(0.1)  # pace
        info = await operator.storage.call(f"STREAM.INFO.{protocol.STREAM}")
        leader = str(info["cluster"]["leader"])
        majority = next(name for name in NAMES if name != leader)
        near = await stack.enter_async_context(
            await node_node.start(await connect(leader, "near"), settings=ALONE, replicas=3)
        )
        away = await stack.enter_async_context(
            await node_node.start(await connect(majority, "away"), settings=ALONE, replicas=3)
        )
        ann = client.InformClient(await connect(majority, "ann"), node=away.name)
        bob = client.InformClient(await connect(leader, "bob"), node=near.name, timeout_s=5.0)
        await ann.put("k", b"1")
        before = await ann.put("counted", b"1")
        assert (await bob.get("k", max_staleness_s=0.0)).value == b"1"

        cluster.cut_off(leader)
        await _stored(ann, "k", b"2")  # by the next leader
        await _stored(ann, "new", b"1")
        counted = await _stored(ann, "counted", b"2")
        assert counted.version > before.version
        assert await _outcome(bob.get("k", max_staleness_s=0.0)) in (b"2", None)
        assert await _outcome(bob.get("new", max_staleness_s=0.0)) in (b"1", None)
        assert await _outcome(bob.delete("new", expected_version=before.version)) in (errors.Conflict, None)
        change = bob.put("counted", b"3", expected_version=counted.version)
        assert await _outcome(change) in ("counted", None)

        cluster.cut_off(leader, heal=True)

        async def are_read() -> bool:
            reads = [bob.get(key, max_staleness_s=0.0) for key in ("k", "none")]
            return [await _outcome(read) for read in reads] == [b"2", errors.NotFound]

        await eventually(are_read, timeout_s=60.0, what="reads after the end of the partition")


async def _stored(contexts: client.InformClient, key: str, value: bytes) -> protocol.WriteResult:
    while True:
        with contextlib.suppress(errors.Unavailable):
            return await contexts.put(key, value)


async def _outcome(
    act: Awaitable[protocol.Context | protocol.WriteResult],
) -> bytes | str | type[errors.MusterError] | None:
    """The value that was read, the key that was written or the error; None if the log did not confirm it."""
    try:
        result = await act
    except errors.Unavailable:
        return None
    except errors.MusterError as error:
        return type(error)
    return result.value if isinstance(result, protocol.Context) else result.key
