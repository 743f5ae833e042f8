"""The fleet of ``bench-monitor`` and ``bench-pipeline``: see `muster.simulate.fleet`."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from muster.core import messages
from muster.core.reports import columns, packed
from muster.simulate import fleet

MACHINES_A_GROUP = 20  # on average, in the realistic fleet
ZONES = {"plain": 8, "realistic": 40}


def plan(machines: int, profile: Any, *, period_s: float = 10.0) -> fleet.FleetPlan:
    """The fleet of both benchmarks. A message holds a thousand machines."""
    a_group = 1000 if profile == "plain" else MACHINES_A_GROUP
    return fleet.FleetPlan(
        machines=machines,
        period_s=period_s,
        groups=max(1, machines // a_group),
        zones=ZONES[profile],
        prefix="fleet",
        profile=profile,
    )


def reports_(machines: int, profile: str) -> list[messages.NodeReport]:
    """What each machine that is not silent reports first: with sequence number 1."""
    made = fleet.VirtualFleet(plan(machines, profile), boot=int(time.time()))
    now_ms = int(time.time() * 1000)
    return [
        msgspec.structs.replace(row, sequence=1)
        for slot in made.slots
        for row in columns.from_batch(made.batch(slot, 0, now_ms))
    ]


def head(row: messages.NodeReport) -> tuple[bytes, bytes]:
    """The report before and after its sequence number (8 bytes), so that a sender can count up cheaply."""
    data = packed.encode(row)
    return data[:24], data[32:]
