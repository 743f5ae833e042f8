"""A real broker in operator mode, told whom to trust by our documents; and plain connections to it."""

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


class Server:
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
    folder: pathlib.Path, trust: keyring.Trust | None = None, **extra: Any
) -> AsyncIterator[Server]:
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
    running = Server(process, {})
    try:
        async with asyncio.timeout(20):
            await running.line("Server is ready")
        for text in running.log:
            if found := re.search(r"Listening for (\w+) (?:clients|connections).*?:(\d+)\s*$", text):
                running.ports[found[1].lower()] = int(found[2])
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
    to: Server, who: credentials.Credentials, **options: Any
) -> AsyncIterator[tuple[Client, list[str]]]:
    """A nats-py connection under these credentials, and the list of errors the broker sends it."""
    complaints: list[str] = []

    async def complain(error: Exception) -> None:
        complaints.append(str(error))

    client = await nats.connect(
        to.url,
        user_jwt_cb=lambda: bytearray(who.user_jwt.encode()),
        signature_cb=who.answer,
        inbox_prefix=f"_INBOX.{who.identity}",
        error_cb=complain,
        **{"allow_reconnect": False, "connect_timeout": 5} | options,
    )
    try:
        yield client, complaints
    finally:
        await client.close()
