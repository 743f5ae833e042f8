"""A process that serves over the broker and directly: ``URL KEYS``."""

from __future__ import annotations

import asyncio
import functools
import pathlib
import sys

from muster.bus import api
from muster.bus.client import client
from muster.bus.direct import bus as direct_bus
from muster.bus.direct import listener
from muster.trust import keyring, peer_admission

NAME = "service-1"


async def main(url: str, keys: str) -> None:
    trust = keyring.Keyring.open(pathlib.Path(keys))

    async def reply(message: api.Message) -> None:
        await message.respond(NAME.encode())

    async with await client.connect((url,), identity=NAME) as bus:
        direct = direct_bus.DirectBus(bus, NAME, lambda _: "")
        admission = peer_admission.PeerAdmission(trust.folder)
        creds = functools.partial(trust.credentials, NAME)
        async with listener.DirectListener(direct, admission, creds, part="manage"):
            await direct.subscribe("muster.manage.from.*.read.ping", group="ping", handler=reply)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
