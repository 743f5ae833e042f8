"""A small client of MQTT 3.1.1 (QoS 0), enough to try what a broker's listener allows."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator

ACCEPTED = 0
CLOSED = -1  # the broker closed the connection instead of answering
FAILURE = 0x80  # of a subscription

_CONNACK, _PUBLISH, _SUBACK, _PINGRESP = 2, 3, 9, 13


class MqttConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._received: list[bytes] = []

    async def connect(self, user: str, password: str, will: str) -> int:
        """The code of the answer."""
        flags = 0xC2 | (0x04 if will else 0)  # user, password, clean session
        fields = [f"test{secrets.token_hex(4)}", *((will, "") if will else ()), user, password]
        body = _text("MQTT") + bytes([4, flags, 0, 60]) + b"".join(map(_text, fields))
        self._send(0x10, body)
        answer = await self._next(_CONNACK)
        return CLOSED if answer is None else answer[1]

    async def subscribe(self, topic: str) -> int:
        self._send(0x82, b"\x00\x01" + _text(topic) + b"\x00")
        answer = await self._next(_SUBACK)
        return CLOSED if answer is None else answer[2]

    async def publish(self, topic: str, data: bytes, *, retain: bool = False) -> None:
        self._send(0x31 if retain else 0x30, _text(topic) + data)

    async def receive(self) -> tuple[str, bytes] | None:
        body = self._received.pop(0) if self._received else await self._next(_PUBLISH)
        if body is None:
            return None
        end = 2 + int.from_bytes(body[:2])
        return body[2:end].decode(), body[end:]

    async def ping(self) -> None:
        """Returns when the broker has handled all before it, or has closed the connection."""
        self._send(0xC0, b"")
        await self._next(_PINGRESP)

    def abort(self) -> None:
        self._writer.transport.abort()

    def _send(self, kind: int, body: bytes) -> None:
        length, head = len(body), [kind]
        while True:
            head.append(length & 0x7F | (0x80 if length > 0x7F else 0))
            length >>= 7
            if not length:
                break
        self._writer.write(bytes(head) + body)

    async def _next(self, expected: int) -> bytes | None:
        """The body of the next packet of this kind; None: the connection ended."""
        try:
            async with asyncio.timeout(30):
                while True:
                    kind = (await self._reader.readexactly(1))[0] >> 4
                    length, shift = 0, 0
                    while (byte := (await self._reader.readexactly(1))[0]) & 0x80:
                        length |= (byte & 0x7F) << shift
                        shift += 7
                    body = await self._reader.readexactly(length | byte << shift)
                    if kind == expected:
                        return body
                    if kind == _PUBLISH:
                        self._received.append(body)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


def _text(value: str) -> bytes:
    return len(value.encode()).to_bytes(2) + value.encode()


@contextlib.asynccontextmanager
async def connected(
    port: int, user: str, password: str, *, will: str = ""
) -> AsyncIterator[tuple[MqttConnection, int]]:
    """And the code with which the broker answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        made = MqttConnection(reader, writer)
        yield made, await made.connect(user, password, will)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
