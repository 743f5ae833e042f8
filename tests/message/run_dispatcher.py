"""A dispatcher to be killed: ``python -m tests.message.run_dispatcher URL NAME [PARTITIONS]``."""

from __future__ import annotations

import asyncio
import sys

from muster.bus.client import client
from muster.message import settings
from muster.message.dispatcher import leadership


async def main(url: str, name: str, partitions: str = "1") -> None:
    bus = await client.connect((url,), identity=name)
    dispatching = leadership.DispatcherLeadership(
        bus, settings.MessageSettings(checkpoint_records=20, partitions=int(partitions)), lease_ttl_s=2
    )
    running = asyncio.create_task(dispatching.run())
    await dispatching.acting.wait()
    sys.stdout.write("acting\n")
    sys.stdout.flush()
    await running


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
