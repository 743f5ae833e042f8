"""``make storm AGENTS=10000 SENSORS=100000``: all agents and sensors reconnect after a broker restart."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

from tests.storm import domain, fleet_process

FILE = pathlib.Path(__file__).parent / "result.json"
ROWS = (
    ("another broker process runs", "replaced_s"),
    ("half of the agents are connected", "half_s"),
    ("all agents are connected", "connected_s"),
    ("all agents have sent a heartbeat", "beating_s"),
    ("all agents are registered again (they register every 30 s)", "registered_s"),
    ("all resources are up, and stay so", "up_s"),
    ("reports of sensors are stored again", "reports_s"),
)


def markdown(result: dict[str, Any]) -> str:
    lines = [
        f"{result['agents']:,} agents, one connection and one resource each, and {result['sensors']:,} "
        f"sensors behind {result['channels']} connections, on {result['cores']} cores that they share with "
        f"the domain (load {result['load']:.1f} before, {result['date']}):",
        "",
        "| after the broker was killed | seconds |",
        "|---|---|",
    ]
    for words, name in ROWS:
        seconds = result[name]
        lines.append(f"| {words} | {'**not in time**' if seconds is None else f'{seconds:.1f}'} |")
    lines += [
        "",
        f"The agents made {result['attempts']:,} attempts to connect, at most "
        f"{result['attempts_per_s']:,.0f} in a second. "
        f"At most {result['not_up']:,} resources were not up. The new broker used at most "
        f"{result['broker_cores']:.1f} cores and {result['broker_bytes'] / 1e6:,.0f} MB, and was started "
        f"{result['broker_restarts']} time(s). {result['reports_lost']} batches of reports were given up.",
        "",
    ]
    if result.get("cpu_s"):
        lines += [
            f"Processor time: {_listed(result['used_cores'], 'cores')} before; "
            f"{_listed(result['cpu_s'], 's')} until all agents had sent a heartbeat.",
            "",
        ]
    return "\n".join(lines)


def _listed(amounts: dict[str, float], unit: str) -> str:
    parts = ", ".join(f"{kind} {amount:g}" for kind, amount in sorted(amounts.items()))
    return f"{sum(amounts.values()):.1f} {unit} ({parts})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make storm", description=__doc__)
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--sensors", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=4, help="that hold the agents")
    parser.add_argument("--write", action="store_true", help="store the result for the documentation")
    options = parser.parse_args()
    # A broker that ends may still write.
    with tempfile.TemporaryDirectory(prefix="muster-storm-", ignore_cleanup_errors=True) as folder:
        storm = asyncio.run(
            domain.storm(pathlib.Path(folder), options.agents, options.sensors, options.processes)
        )
    result = dataclasses.asdict(storm) | {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "channels": fleet_process.CHANNELS,
    }
    sys.stdout.write(markdown(result))
    if options.write:
        FILE.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if storm.is_over else 1


if __name__ == "__main__":
    sys.exit(main())
