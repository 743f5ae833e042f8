"""The processes of bench-bus: publishers, subscribers, idle connections; by Muster's bus or by nats-py.

``python -m benchmarks.bus_worker ours|peer URL`` obeys commands, one a line; ``… idle HOST PORT COUNT`` holds
connections.  Both sides run the same loops: their methods have the same names, and each is called as its
documentation shows.
"""

from __future__ import annotations

import asyncio
import functools
import json
import pathlib
import selectors
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from benchmarks import measure

BACKLOG_BYTES = 128 << 20  # what a subscription may fall behind: nats-py's default, for both
COMMAND_S_MAX = 60.0


class Side:
    """What differs between the two: how to connect, and the spelling of some arguments.

    A process imports only its own side: an idle one would cost the other memory and time.
    """

    def __init__(self, name: str, connection: Any) -> None:
        self.ours = name == "ours"
        self.bus = connection
        self.links: Any = None  # what accepts or keeps direct connections
        self.request: Callable[[str, bytes], Awaitable[Any]] = (
            functools.partial(connection.request, timeout_s=5)
            if self.ours
            else functools.partial(connection.request, timeout=5)
        )

    @classmethod
    async def connect(cls, name: str, url: str) -> Side:
        if name == "ours":
            import muster

            return cls(name, await muster.connect(url, identity="bench"))
        import nats

        return cls(name, await nats.connect(url))

    async def subscribe(self, subject: str, handler: Callable[[Any], Awaitable[None]]) -> Callable[[], Any]:
        if self.ours:
            subscription = await self.bus.subscribe(
                subject, handler=handler, max_pending=1_000_000, max_pending_bytes=BACKLOG_BYTES
            )
            return subscription.close  # type: ignore[no-any-return]
        subscription = await self.bus.subscribe(
            subject, cb=handler, pending_msgs_limit=1_000_000, pending_bytes_limit=BACKLOG_BYTES
        )
        await self.bus.flush()
        await self.bus.flush()  # the first one's ping may have overtaken the subscription
        return subscription.unsubscribe  # type: ignore[no-any-return]

    async def durable(self, name: str) -> Callable[[str, bytes], Awaitable[Any]]:
        """A fresh stream of this name, and the function that publishes to it and is acknowledged."""
        if self.ours:
            from muster.bus import api

            stream = await self.bus.stream(api.StreamSettings(name=name, subjects=(f"{name}.>",)))
            return stream.publish  # type: ignore[no-any-return]
        from nats.js import api as peer_api

        streams = self.bus.jetstream(timeout=30)
        await streams.add_stream(peer_api.StreamConfig(name=name, subjects=[f"{name}.>"]))
        return streams.publish  # type: ignore[no-any-return]


async def count(side: Side, subject: str, messages: int) -> None:
    """Say when we listen, and when the last message has come."""
    received = 0
    complete = asyncio.Event()

    async def handle(_: Any) -> None:
        nonlocal received
        received += 1
        if received == messages:
            complete.set()

    end = await side.subscribe(subject, handle)
    say({"ready": True})
    await complete.wait()
    say({"last_ns": time.monotonic_ns()})
    await end()


async def publish(side: Side, subject: str, messages: int, size: int) -> None:
    payload = bytes(size)
    send = side.bus.publish
    start_ns = time.monotonic_ns()
    for _ in range(messages):
        await send(subject, payload)
    await side.bus.flush()
    say({"start_ns": start_ns})


async def answer(side: Side, subject: str) -> None:
    async def handle(message: Any) -> None:
        await message.respond(message.data)

    await side.subscribe(subject, handle)
    say({"ready": True})


async def ask(side: Side, subject: str, requests: int, size: int) -> None:
    payload = bytes(size)
    request = side.request
    took_ns = []
    for _ in range(requests):
        start_ns = time.perf_counter_ns()
        await request(subject, payload)
        took_ns.append(time.perf_counter_ns() - start_ns)
    say({"p50_ns": measure.percentile(took_ns, 50), "p99_ns": measure.percentile(took_ns, 99)})


async def store(side: Side, name: str, senders: int, size: int, seconds: float) -> None:
    """How many publishes were acknowledged while so many senders published, each one after the other."""
    send = await side.durable(name)
    payload = bytes(size)
    stored = 0
    start = time.monotonic()
    deadline = start + seconds

    async def sender(number: int) -> None:
        nonlocal stored
        while time.monotonic() < deadline:
            await send(f"{name}.{number}", payload)
            stored += 1

    await asyncio.gather(*(sender(number) for number in range(senders)))
    say({"rate": stored / (time.monotonic() - start)})


async def listen(side: Side, keys: str) -> None:
    """Accept direct connections, and say where."""
    from muster.bus.direct import bus as direct_bus
    from muster.bus.direct import listener
    from muster.trust import keyring, peer_admission

    trust = keyring.Keyring.open(pathlib.Path(keys))
    side.bus = direct_bus.DirectBus(side.bus, "bench", lambda _: "")
    creds = functools.partial(trust.credentials, "bench")
    side.links = listener.DirectListener(side.bus, peer_admission.PeerAdmission(trust.folder), creds)
    await side.links.start()
    say(msgspec.to_builtins(side.links.address))


async def dial(side: Side, keys: str, address: dict[str, Any]) -> None:
    """Send requests over a direct connection from now on."""
    from muster.bus.client import credential_source
    from muster.bus.direct import bus as direct_bus
    from muster.bus.direct import dialer, frames
    from muster.testing.eventually import eventually
    from muster.trust import keyring

    trust = keyring.Keyring.open(pathlib.Path(keys))
    side.bus = direct_bus.DirectBus(side.bus, "bench", lambda _: direct_bus.ANY)
    side.request = functools.partial(side.bus.request, timeout_s=5)
    access = credential_source.PeerAccess(functools.partial(trust.credentials, "bench"), None)
    side.links = dialer.DirectDialer(side.bus, access)
    side.links.keep(msgspec.convert(address, frames.PeerAddress))
    await eventually(lambda: bool(side.bus.links))
    say({"connected": True})


COMMANDS: dict[str, Callable[..., Awaitable[None]]] = {
    "count": count,
    "publish": publish,
    "answer": answer,
    "ask": ask,
    "store": store,
    "listen": listen,
    "dial": dial,
}


async def obey(name: str, url: str) -> None:
    side = await Side.connect(name, url)
    say({"connected": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        async with asyncio.timeout(COMMAND_S_MAX):
            await COMMANDS[command.pop("do")](side, **command)
    await side.bus.close()


def hold(host: str, port: int, connections: int) -> None:
    """The least a client is: connected, and answering the broker's pings. Until standard input ends."""
    measure.raise_file_limit(connections + 100)
    waiting = selectors.DefaultSelector()
    for _ in range(connections):
        client = socket.create_connection((host, port))
        client.recv(4096)  # INFO
        client.sendall(b'CONNECT {"verbose":false,"lang":"none"}\r\nPING\r\n')
        waiting.register(client, selectors.EVENT_READ)
    answered = 0
    output = False
    waiting.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is sys.stdin:
                return
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(4096)
            if not data:
                raise ConnectionError("the broker closed an idle connection")
            answered += data.count(b"PONG")
            if b"PING" in data:
                key.fileobj.sendall(b"PONG\r\n")
        if answered >= connections and not output:
            output = True
            say({"ready": True})


def say(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "idle":
        hold(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        asyncio.run(obey(sys.argv[1], sys.argv[2]))
