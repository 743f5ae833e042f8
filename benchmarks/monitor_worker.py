"""The other side of ``bench-monitor``: sensors, and a channel in a process of its own.

python -m benchmarks.monitor_worker sensors URL MACHINES SECONDS
python -m benchmarks.monitor_worker channel URL HOLD_S
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time

from benchmarks import monitor_rows
from muster.bus import client
from muster.monitor import protocol, service


async def sensors(url: str, machines: int, rate: float, total: int) -> None:
    """``total`` reports of ``machines`` machines, at most ``rate`` a second."""
    rows = monitor_rows.reports_(machines)
    heads = [monitor_rows.head(row) for row in rows]
    async with await client.connect([url], identity="fleet", audit_s=0) as bus:
        print(json.dumps("ready"), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        subject = protocol.report("fleet", "c1")
        start = time.monotonic()
        for number in range(total):
            head, tail = heads[number % machines]
            await bus.publish(subject, b"%b%d%b" % (head, number // machines + 1, tail))
            if number % 500 == 499 and (early_s := number / rate - (time.monotonic() - start)) > 0:
                await asyncio.sleep(early_s)
        await bus.flush()
        print(json.dumps({"seconds": time.monotonic() - start}), flush=True)


async def channel(url: str, hold_s: float) -> None:
    """Says once a second how far it is and what CPU time it used."""
    async with (
        await client.connect([url], identity="c1", audit_s=0) as bus,
        service.Channel(bus, service.Settings(hold_s=hold_s)) as running,
    ):
        stop = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        while not stop.done():
            used = resource.getrusage(resource.RUSAGE_SELF)
            facts = {
                "at_s": time.monotonic(),
                "received": running.aggregator.received,
                "forwarded": running.forwarded,
                "dropped": running.dropped,
                "cpu_s": used.ru_utime + used.ru_stime,
                "rss_bytes": used.ru_maxrss * 1024,
            }
            print(json.dumps(facts), flush=True)
            await asyncio.wait([stop], timeout=0.2)


if __name__ == "__main__":
    role, url, *rest = sys.argv[1:]
    if role == "sensors":
        asyncio.run(sensors(url, int(rest[0]), float(rest[1]), int(rest[2])))
    else:
        asyncio.run(channel(url, float(rest[0])))
