"""A real broker in operator mode that trusts our documents, and plain connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import nats
from nats.aio.client import Client

from muster.trust import credentials, keyring


class SignedServer:
    def __init__(self, process: asyncio.subprocess.Process, ports: dict[str, int]) -> None:
        self.process = process
        self.ports = ports
        self.log: list[str] = []

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.ports['client']}"

    async def line(self, pattern: str) -> str:
        """The next line of the log that matches."""
        assert self.process.stderr
        while True:
            text = (await self.process.stderr.readline()).decode()
            assert text, "the broker ended:\n" + "".join(self.log)
            self.log.append(text)
            if re.search(pattern, text):
                return text

    def reload(self) -> None:
        self.process.send_signal(signal.SIGHUP)


@contextlib.asynccontextmanager
async def server(
    folder: pathlib.Path, trust: keyring.Keyring | None = None, **extra: Any
) -> AsyncIterator[SignedServer]:
    """``extra`` is merged into the configuration."""
    binary = shutil.which("nats-server", path=str(pathlib.Path(sys.executable).parent)) or "nats-server"
    config: dict[str, Any] = {
        "server_name": "test",
        "listen": "127.0.0.1:-1",
        "jetstream": {"store_dir": str(folder / "jetstream")},
    }
    if trust:
        known = trust.broker()
        config |= {
            "operator": known.operator_jwt,
            "system_account": known.system_account,
            "resolver": {"type": "full", "dir": str(folder / "resolver")},
            "resolver_preload": known.accounts,
        }
    path = folder / "server.conf"
    path.write_text(json.dumps(config | extra))
    process = await asyncio.create_subprocess_exec(
        binary, "-c", str(path), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    running = SignedServer(process, {})
    try:
        async with asyncio.timeout(30):
            await running.line("Server is ready")
        for text in running.log:
            if matches := re.search(r"Listening for (\w+) (?:clients|connections).*?:(\d+)\s*$", text):
                running.ports[matches[1].lower()] = int(matches[2])
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        # The pipe's transport is closed by reading to its end.
        assert process.stderr
        await process.stderr.read()


@contextlib.asynccontextmanager
async def connected(
    to: SignedServer, who: credentials.Credentials, **options: Any
) -> AsyncIterator[tuple[Client, asyncio.Queue[str]]]:
    """A nats-py connection under these credentials, and the errors that the broker sends it."""
    complaints: asyncio.Queue[str] = asyncio.Queue()

    async def complain(error: Exception) -> None:
        complaints.put_nowait(str(error))

    client = await nats.connect(
        to.url,
        user_jwt_cb=lambda: bytearray(who.user_jwt.encode()),
        signature_cb=who.answer,
        error_cb=complain,
        **{"allow_reconnect": False, "connect_timeout": 5, "inbox_prefix": f"_INBOX.{who.identity}"}
        | options,
    )
    try:
        yield client, complaints
    finally:
        await client.close()


class PlainLine:
    """A connection by hand, on which the broker's answer to one sentence is known before the next."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def say(self, sentence: str) -> str:
        """The broker's error; empty if there is none."""
        self._writer.write(f"{sentence}\r\nPING\r\n".encode())
        complaint = ""
        while (text := (await self._reader.readline()).decode().strip()) != "PONG":
            if not text:
                return complaint or "closed"
            if text.startswith("-ERR"):
                complaint = text
        return complaint

    async def hear(self) -> str:
        """Messages of the broker that were not requested, without its pings."""
        while (text := (await self._reader.readline()).decode().strip()) == "PING":
            self._writer.write(b"PONG\r\n")
        return text

    async def publish(self, subject: str) -> str:
        return await self.say(f"PUB {subject} 0\r\n")

    async def subscribe(self, subject: str) -> str:
        return await self.say(f"SUB {subject} 1\r\nUNSUB 1")


@contextlib.asynccontextmanager
async def line(to: SignedServer, who: credentials.Credentials) -> AsyncIterator[tuple[PlainLine, str]]:
    """The connection, and the broker's error for these credentials: empty if it accepted them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", to.ports["client"])
    try:
        nonce = json.loads((await reader.readline()).split(b" ", 1)[1])["nonce"]
        hello = {
            "jwt": who.user_jwt,
            "sig": who.answer(nonce).decode(),
            "verbose": False,
            "pedantic": False,
            "headers": True,
        }
        made = PlainLine(reader, writer)
        yield made, await made.say(f"CONNECT {json.dumps(hello)}")
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def knock(to: SignedServer, who: credentials.Credentials) -> str:
    async with line(to, who) as (_, answer):
        return answer


async def knock_as_leaf(to: SignedServer, who: credentials.Credentials) -> str:
    """The error of the leaf listener for these credentials; empty if it accepts them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", to.ports["leafnode"])
    try:
        nonce = json.loads((await reader.readline()).split(b" ", 1)[1])["nonce"]
        hello = {"jwt": who.user_jwt, "sig": who.answer(nonce).decode(), "name": "leaf", "headers": True}
        writer.write(f"CONNECT {json.dumps(hello)}\r\nPING\r\n".encode())
        while text := (await reader.readline()).decode().strip():
            if text.startswith("-ERR"):
                return text
            if text == "PONG":
                return ""
        return "closed"
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def settle(client: Client) -> None:
    """Return when the broker has received all messages: nats-py's ping overtakes pending ones."""
    await client.flush()
    await client.flush()
