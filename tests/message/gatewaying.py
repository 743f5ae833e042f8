"""A gateway as a process of its own, to be killed: ``python -m tests.message.gatewaying URL NAME [PORT]``."""

from __future__ import annotations

import asyncio
import sys

from muster.bus import api, client
from muster.cli import base
from muster.message.amqp import server
from muster.trust import passwords


async def main(url: str, name: str, port: str = "0") -> None:
    async def dial(login: passwords.Login) -> api.Bus:
        return await client.connect((url,), identity=login.name)

    async with server.Gateway(dial, None, anonymous="client", name=name, port=int(port)) as gateway:
        sys.stdout.write(f"serving {gateway.port}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    base.run(main(*sys.argv[1:]), fast=True)
