"""The other side of ``bench-pipeline``: a fleet that reports, and pages for Prometheus to scrape.

python -m benchmarks.pipeline_worker fleet URL MACHINES PERIODS
python -m benchmarks.pipeline_worker pages MACHINES
"""

from __future__ import annotations

import asyncio
import http.server
import json
import resource
import sys
import threading
import time

from muster.bus import client
from muster.core import reports
from muster.simulate import fleet, sensors

MACHINES_A_MESSAGE = 1000
PERIOD_S = 10.0


def plan(machines: int) -> fleet.Plan:
    """A smaller fleet is part of a larger one."""
    return fleet.Plan(
        machines=machines,
        groups=max(1, machines // MACHINES_A_MESSAGE),
        period_s=PERIOD_S,
    )


async def play(url: str, machines: int, periods: int) -> None:
    """Each machine reports once a period. Says ``ready``, starts when told to, says what it stored."""
    played = fleet.Fleet(plan(machines), boot=int(time.time()))  # as if all had just been started
    async with await client.connect([url], identity="fleet", audit_s=0) as bus:
        player = sensors.Player(bus, played)
        print(json.dumps("ready"), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await player.run(ticks=periods)
        used = resource.getrusage(resource.RUSAGE_SELF)
        told = player.statistics
        facts = {
            "rows": told.rows,
            "messages": told.messages,
            "bytes": told.bytes,
            "failed": told.failed,
            "behind_max_s": told.behind_max_s,
            "cpu_s": used.ru_utime + used.ru_stime,
        }
        print(json.dumps(facts), flush=True)


def pages(machines: int) -> None:
    """The same samples as text: a page for each thousand machines, as if they stood behind one exporter."""
    played = fleet.Fleet(plan(machines))
    texts = [[_page(played, slot, tick) for tick in range(3)] for slot in played.slots]
    asked = [0] * len(texts)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            page = int(self.path.rpartition("/")[2])
            body = texts[page][asked[page] % 3]
            asked[page] += 1
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps({"port": server.server_port, "pages": len(texts)}), flush=True)
    while sys.stdin.readline():
        samples = sum(asked) * MACHINES_A_MESSAGE * len(reports.STANDARD_METRICS)
        print(json.dumps({"samples": samples}), flush=True)
    server.shutdown()


def _page(played: fleet.Fleet, slot: fleet.Slot, tick: int) -> bytes:
    batch = played.batch(slot, tick, 1_700_000_000_000)
    heads = [
        f'{{machine="{machine}",group="{group}",zone="{zone}"}}'
        for machine, group, zone in zip(
            *(batch.column(name).to_pylist() for name in ("machine", "group", "zone")), strict=True
        )
    ]
    lines = []
    for name in reports.STANDARD_METRICS:
        lines.append(f"# TYPE {name} gauge")
        lines += [
            f"{name}{head} {value:.6g}"
            for head, value in zip(heads, batch.column(name).to_pylist(), strict=True)
        ]
    return ("\n".join(lines) + "\n").encode()


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "fleet":
        asyncio.run(play(rest[0], int(rest[1]), int(rest[2])))
    else:
        pages(int(rest[0]))
