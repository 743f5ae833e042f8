"""Inputs for network endpoints: requests that were recorded or written by hand, with random changes.

An `Endpoint` sends one input to a real process. What it sends is usually wrong, so errors of the connection
are expected; only the process is judged (`network`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from muster.bus import api
from muster.core import errors
from tests.fuzz import mutations

REPLY_S = 0.5  # wait for a reply to an input
REPLY_BYTES = 1 << 16

Send = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True)
class HttpSeed:
    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    def encode(self) -> bytes:
        head = [f"{self.method} {self.path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
        head += [f"{name}: {value}" for name, value in self.headers]
        head += [f"Content-Length: {len(self.body)}"] if self.body else []
        return "\r\n".join(head).encode() + b"\r\n\r\n" + self.body


def http_input(chance: random.Random, seeds: Sequence[HttpSeed]) -> bytes:
    """Mostly a changed body behind a correct head, so that it is read; else a changed path or any byte."""
    seed = chance.choice(seeds)
    bodies = [other.body for other in seeds if other.body]
    draw = chance.random()
    if draw < 0.6 and seed.body:
        return replace(seed, body=mutations.mutate(chance, [seed.body, *bodies[:4]])).encode()
    if draw < 0.8:
        path = mutations.mutate(chance, [seed.path.encode()], bytes_max=2000)
        return replace(seed, path=path.decode("latin-1")).encode()
    return mutations.mutate(chance, [seed.encode()])


def bytes_input(chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    return mutations.mutate(chance, seeds)


def to_stream(host: str, port: int) -> Send:
    """Sends an input over a connection of its own and reads until the server closes it, or for a moment."""

    async def send(data: bytes) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(4 * REPLY_S):
                reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(data)
                writer.write_eof()
                async with asyncio.timeout(REPLY_S):
                    while await reader.read(REPLY_BYTES):
                        pass
            finally:
                writer.transport.abort()

    return send


def to_datagrams(host: str, port: int) -> Send:
    async def send(data: bytes) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(data, (host, port))
        await asyncio.sleep(0)

    return send


def to_subject(bus: api.Bus, subject: Callable[[], str]) -> Send:
    """Sends an input as a request to the subject that is chosen for it."""

    async def send(data: bytes) -> None:
        with contextlib.suppress(errors.MusterError):
            await bus.request(subject(), data, timeout_s=REPLY_S)

    return send


@dataclass(frozen=True)
class Endpoint:
    name: str
    process: str  # the one that serves it
    make: Callable[[random.Random], bytes]
    send: Send
    good: Callable[[], Awaitable[object]]  # a correct request
    at_once: int = 16
