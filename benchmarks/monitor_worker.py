"""The other side of ``bench-monitor``: sensors, and a channel in a process of its own.

python -m benchmarks.monitor_worker sensors URL MACHINES PROFILE
python -m benchmarks.monitor_worker channel URL HOLD_S NAME
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys

from benchmarks import monitor_rows
from muster.bus.client import client
from muster.core.telemetry import log
from muster.monitor import protocol
from muster.monitor.channel import channel as channel_channel


async def sensors(url: str, machines: int, profile: str) -> None:
    """Sends the requested number of reports, and prints a line when they are sent."""
    heads = [monitor_rows.head(row) for row in monitor_rows.reports_(machines, profile)]
    number = 0
    async with await client.connect([url], identity="fleet", audit_s=0) as bus:
        print(json.dumps("ready"), flush=True)
        subject = protocol.report("fleet", "c1")
        while line := await asyncio.to_thread(sys.stdin.readline):
            for _ in range(json.loads(line)):
                head, tail = heads[number % len(heads)]
                number += 1
                sequence = (number - 1) // len(heads) + 1
                await bus.publish(subject, b"%b%b%b" % (head, sequence.to_bytes(8, "little"), tail))
            await bus.flush(timeout_s=30)
            print(json.dumps(number), flush=True)


async def channel(url: str, hold_s: float, name: str) -> None:
    """Says how far it is and what CPU time it used, whenever it is asked. Warnings go to stderr."""
    log.configure(sys.stderr, level="warning", form="text")
    async with (
        await client.connect([url], identity=name, audit_s=0) as bus,
        channel_channel.Channel(bus, channel_channel.ChannelOptions(hold_s=hold_s)) as running,
    ):
        print(json.dumps("ready"), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            used = resource.getrusage(resource.RUSAGE_SELF)
            facts = {
                "received": running.aggregator.received,
                "forwarded": running.forwarded,
                "waiting_s": running.waiting_s,
                "dropped": running.dropped,
                "reconnects": bus.statistics().reconnects,
                "cpu_s": used.ru_utime + used.ru_stime,
                "rss_bytes": used.ru_maxrss * 1024,
            }
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    role, url, *rest = sys.argv[1:]
    if role == "sensors":
        asyncio.run(sensors(url, int(rest[0]), rest[1]))
    else:
        asyncio.run(channel(url, float(rest[0]), rest[1]))
