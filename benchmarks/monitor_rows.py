"""Node reports for ``bench-monitor``: a dozen metrics each, some 0.5 kB as XML."""

from __future__ import annotations

import random
import time

from muster.core import messages, reports


def reports_(machines: int, *, prefix: str = "fleet.m", seed: int = 1) -> list[messages.NodeReport]:
    chance = random.Random(seed)
    now_ms = int(time.time() * 1000)
    return [
        messages.NodeReport(
            machine=f"{prefix}{number}",
            group=f"g{number % 100}",
            zone=f"z{number % 8}",
            boot=now_ms,
            sequence=1,
            at_ms=now_ms,
            period_s=10.0,
            metrics={name: round(chance.uniform(0, 100), 2) for name in reports.STANDARD_METRICS},
        )
        for number in range(machines)
    ]


def head(row: messages.NodeReport) -> tuple[bytes, bytes]:
    """The report's JSON before and after its sequence number, so that a sender can count up cheaply."""
    before, _, after = messages.encode(row).partition(b'"sequence":1')
    return before + b'"sequence":', after
