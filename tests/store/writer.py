"""Run as a process, to be killed: several writers commit as fast as they can and print what was acknowledged.

Each transaction writes a new record and overwrites two others with one value; each line on the output is
"WRITER NUMBER VERSION", written after the commit returned.
"""

from __future__ import annotations

import asyncio
import os
import sys

from muster.store import api, database

WRITERS = 8


async def main(url: str, namespace: str) -> None:
    password = os.environ.get("STORE_PASSWORD")
    store = await database.open(url, settings=api.StoreOptions(namespace=namespace), password=password)

    async def write(name: int) -> None:
        for number in range(10**9):
            async with store.transaction() as tx:
                tx.put("new", f"{name}-{number}", b"")
                tx.put("pair", f"{name}-a", str(number).encode() * 50)
                tx.put("pair", f"{name}-b", str(number).encode() * 50)
            os.write(1, f"{name} {number} {tx.version}\n".encode())

    await asyncio.gather(*(write(name) for name in range(WRITERS)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
