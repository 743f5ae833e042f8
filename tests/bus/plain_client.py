"""A client that writes bytes to the broker's socket: what other programs than Muster may send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

from muster.bus.client import credential_source


class PlainClient:
    """Sends lines as they are, and collects the error lines of the broker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.broker_errors: list[bytes] = []

    async def send(self, *commands: bytes) -> None:
        """Returns when the broker has read them."""
        self._writer.write(b"".join(commands) + b"PING\r\n")
        while (line := await self._reader.readuntil(b"\r\n")) != b"PONG\r\n":
            if line.startswith(b"-ERR"):
                self.broker_errors.append(line)


def publish(subject: bytes, data: bytes, reply: bytes = b"", headers: bytes | None = None) -> bytes:
    if headers is None:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(data), data)
    sizes = len(headers), len(headers) + len(data)
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, *sizes, headers, data)


@contextlib.asynccontextmanager
async def connect(
    url: str, creds: credential_source.CredentialSource | None = None
) -> AsyncIterator[PlainClient]:
    address = urllib.parse.urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        info = json.loads((await reader.readuntil(b"\r\n")).removeprefix(b"INFO "))
        login: dict[str, Any] = {"verbose": False, "headers": True, "protocol": 1}
        if creds is not None:
            login.update(jwt=creds.user_jwt, sig=creds.answer(info["nonce"]).decode())
        writer.write(b"CONNECT %b\r\n" % json.dumps(login).encode())
        client = PlainClient(reader, writer)
        await client.send()
        yield client
    finally:
        writer.close()
