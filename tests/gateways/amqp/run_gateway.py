"""A gateway as a process to kill: ``python -m tests.gateways.amqp.run_gateway URL NAME [PORT]``."""

from __future__ import annotations

import asyncio
import sys

from muster.bus import api
from muster.bus.client import client
from muster.cli import command
from muster.gateways.amqp import gateway as amqp_gateway
from muster.trust.login import passwords


async def main(url: str, name: str, port: str = "0") -> None:
    async def dial(login: passwords.PasswordLogin) -> api.Bus:
        return await client.connect((url,), identity=login.name)

    async with amqp_gateway.AmqpGateway(dial, None, anonymous="client", name=name, port=int(port)) as gateway:
        sys.stdout.write(f"serving {gateway.port}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    command.run(main(*sys.argv[1:]), fast=True)
