"""One information node in a process of its own, for `benchmarks.inform`: ``URL NAME STORE SETTINGS``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import msgspec

from benchmarks import measure
from muster.bus import client
from muster.inform import service, settings
from muster.store import database


async def main(url: str, name: str, store_url: str, wanted: str) -> None:
    chosen = msgspec.json.decode(wanted, type=settings.Inform)
    empty_bytes = measure.resident_bytes(os.getpid())
    begun = time.perf_counter()
    async with await client.connect((url,), identity=name) as bus, await database.open(store_url) as store:
        node = await service.start(bus, settings=chosen, store=store, max_bytes=4 << 30)
        facts = {
            "start_s": time.perf_counter() - begun,
            "contexts": node.desk.copies.permanent,
            "resident_bytes": measure.resident_bytes(os.getpid()),
            "empty_bytes": empty_bytes,
        }
        print(json.dumps(facts), flush=True)
        async with node:
            await asyncio.to_thread(sys.stdin.read)  # until we are let go


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
