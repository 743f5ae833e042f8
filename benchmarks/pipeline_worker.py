"""The other side of ``bench-pipeline``: a fleet that reports, and pages for Prometheus to scrape.

python -m benchmarks.pipeline_worker fleet URL PROFILE MACHINES PERIODS TALLY [CHANNEL …]
python -m benchmarks.pipeline_worker pages PROFILE MACHINES
"""

from __future__ import annotations

import asyncio
import http.server
import json
import pathlib
import sys
import threading
import time

import numpy as np

from benchmarks import monitor_rows, pipeline_tally
from muster.bus.client import client
from muster.core.reports import columns
from muster.simulate import fleet, playback, realistic

PERIOD_S = 10.0
SLOW_CLOCK_MS = 1000  # a report whose clock is further behind than this may be late through no fault of ours


class Counted(fleet.VirtualFleet):
    """Remembers which reports it made."""

    def __init__(self, plan: fleet.FleetPlan, *, boot: int) -> None:
        super().__init__(plan, boot=boot)
        self.tally = pipeline_tally.Tally(plan.machines)
        self.samples = 0
        self.slow_clocks = 0  # reports of machines with such clocks

    def sample(self, slot: fleet.FleetSlot, tick: int, at_ms: int) -> fleet.FleetReports:
        made = super().sample(slot, tick, at_ms)
        rows = np.flatnonzero(made.reporting)
        numbers = slot.number + rows  # each once
        self.tally.counts[numbers] += 1
        self.tally.sums[numbers] += realistic.hashed(made.boot[rows], made.sequence[rows])
        self.samples += len(rows) * len(columns.STANDARD_METRICS)
        if slot.lives is not None:
            sizes = np.array([len(names) for names in realistic.ROLES])
            self.samples += int(sizes[slot.lives.roles[rows]].sum())
            self.slow_clocks += int(np.count_nonzero(slot.lives.clock_ms[rows] < -SLOW_CLOCK_MS))
        return made


async def play(
    url: str, profile: str, machines: int, periods: int, tally: pathlib.Path, channels: list[str]
) -> None:
    """Each machine reports once a period. Prints ``ready``, starts on a line of input, prints what it sent.

    With channels: single reports, as sensors send them, evenly to these channels.  Without: messages of a
    thousand machines into the stream, as first-level channels would store them.  A fleet that is a whole
    period behind its clock stops.
    """
    plan = monitor_rows.plan(machines, profile, period_s=PERIOD_S)
    boot = int(time.time())  # as if all had just been started
    parts = [
        Counted(plan.share(number, max(1, len(channels))), boot=boot)
        for number in range(1, max(1, len(channels)) + 1)
    ]
    async with await client.connect([url], identity=plan.prefix, audit_s=0) as bus:
        players = [
            playback.FleetPlayer(
                bus, part, form="reports" if channels else "batches", channel=channels[at] if channels else ""
            )
            for at, part in enumerate(parts)
        ]
        print(json.dumps("ready"), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(player.run(ticks=periods)) for player in players]
            while (await asyncio.wait(running, timeout=1))[1]:
                if max(player.statistics.behind_s for player in players) > PERIOD_S:
                    for task in running:
                        task.cancel()
        await bus.flush(timeout_s=30)
    total = pipeline_tally.Tally(machines)
    for part in parts:
        total.counts += part.tally.counts
        total.sums += part.tally.sums
    total.save(tally)
    statistics = [player.statistics for player in players]
    facts = {
        "rows": sum(statistic.rows for statistic in statistics),
        "bytes": sum(statistic.bytes for statistic in statistics),
        "failed": sum(statistic.failed for statistic in statistics),
        "behind_max_s": max(statistic.behind_max_s for statistic in statistics),
        "samples": sum(part.samples for part in parts),
        "slow_clocks": sum(part.slow_clocks for part in parts),
    }
    print(json.dumps(facts), flush=True)


def pages(profile: str, machines: int) -> None:
    """The same samples as text: a page for each thousand machines, as if they stood behind one exporter."""
    made = fleet.VirtualFleet(monitor_rows.plan(machines, profile, period_s=PERIOD_S))
    texts = [[_page(made, slot, tick) for tick in range(3)] for slot in made.slots]
    requests = [0] * len(texts)
    samples = [0]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            page = int(self.path.rpartition("/")[2])
            body, count = texts[page][requests[page] % 3]
            requests[page] += 1
            samples[0] += count
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
        print(json.dumps({"samples": samples[0]}), flush=True)
    server.shutdown()


def _page(made: fleet.VirtualFleet, slot: fleet.FleetSlot, tick: int) -> tuple[bytes, int]:
    """The text, and how many samples are in it."""
    lines: dict[str, list[str]] = {}
    for row in columns.from_batch(made.batch(slot, tick, 1_700_000_000_000)):
        labels = f'{{machine="{row.machine}",group="{row.group}",zone="{row.zone}"}}'
        for name, value in row.metrics.items():
            lines.setdefault(name, []).append(f"{name}{labels} {value:.10g}")
    text = [
        line
        for name, samples in lines.items()
        for line in (f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}", *samples)
    ]
    return ("\n".join(text) + "\n").encode(), len(text) - len(lines)


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "fleet":
        asyncio.run(play(rest[0], rest[1], int(rest[2]), int(rest[3]), pathlib.Path(rest[4]), rest[5:]))
    else:
        pages(rest[0], int(rest[1]))
