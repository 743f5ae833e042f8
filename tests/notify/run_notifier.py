"""A notifier in a process of its own, to be killed: ``python -m tests.notify.run_notifier URL NAME``."""

from __future__ import annotations

import asyncio
import sys

from muster.bus.client import client
from muster.notify import settings as settings_
from muster.notify.matcher import kernels_numpy
from muster.notify.notifier import notifier


async def main(url: str, name: str) -> None:
    settings = settings_.NotifySettings(lease_s=3.0, ack_wait_s=2.0, beat_s=0.5)
    async with (
        await client.connect([url], identity=name, audit_s=0) as bus,
        notifier.Notifier(bus, settings, kernels=kernels_numpy),
    ):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
