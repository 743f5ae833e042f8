"""Processes are killed (SIGKILL) or frozen (SIGSTOP), one kind after the other. Seeded.

In the second half of a run only the first process of a kind that exists several times fails. The others live
long enough to judge whether their sizes are level.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from dataclasses import dataclass

from muster.core import errors
from tests.soak import domain as domain_

KINDS = (
    "broker",
    "manager",
    "dispatcher",
    "notifier",
    "information node",
    "channel",
    "gateway",
    "registry",
    "web",
)
FAULTS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
REPLACED_S_MAX = 50.0


@dataclass
class AppliedFault:
    at_s: float  # since the beginning
    kind: str
    name: str
    fault: str
    replaced_s: float | None = None  # None: not within `REPLACED_S_MAX`


class FaultInjector:
    def __init__(
        self, domain: domain_.SoakDomain, seed: int, began_s: float, *, spare_after_s: float
    ) -> None:
        self._domain = domain
        self._random = random.Random(seed)
        self._began_s = began_s
        self._spare_after_s = spare_after_s
        self._turn = 0
        self.applied: list[AppliedFault] = []

    async def run(self, period_s: float) -> None:
        while True:
            started_s = time.monotonic()
            await self.apply_next()
            await asyncio.sleep(max(0.0, started_s + period_s - time.monotonic()))  # pace of faults

    async def apply_next(self) -> AppliedFault | None:
        spares = time.monotonic() - self._began_s >= self._spare_after_s
        candidates = choose(await self.processes(), self._turn, spares=spares)
        self._turn += 1
        if not candidates:
            return None
        name = self._random.choice(sorted(candidates))
        fault = self._random.choice(sorted(FAULTS))
        before = candidates[name]
        applied = AppliedFault(time.monotonic() - self._began_s, kind_of(name) or "", name, fault)
        self.applied.append(applied)
        os.kill(before, FAULTS[fault])
        since_s = time.monotonic()
        while time.monotonic() - since_s < REPLACED_S_MAX:
            await asyncio.sleep(0.5)  # pace of looking
            with contextlib.suppress(errors.MusterError):
                if (await self.processes()).get(name, before) != before:
                    applied.replaced_s = round(time.monotonic() - since_s, 1)
                    break
        return applied

    async def processes(self) -> dict[str, int]:
        """Every process of the domain and beside it, by name."""
        status = await self._domain.status()
        pids = {process_name(page["process"]): page["pid"] for page in status["pages"]}
        pids |= {f"broker {row['name']}": row["pid"] for row in status["brokers"] if row["pid"]}
        pids |= {name: child.pid for name, child in self._domain.beside.items() if child.pid is not None}
        return pids


def choose(processes: dict[str, int], turn: int, *, spares: bool) -> dict[str, int]:
    """The processes of which one fails in this turn, by name."""
    by_kind: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for name in sorted(processes):
        kind = kind_of(name)
        if kind is not None:
            by_kind[kind][name] = processes[name]
    if not spares:
        return by_kind[KINDS[turn % len(KINDS)]]
    first = [dict(list(group.items())[:1]) for group in by_kind.values() if len(group) > 1]
    return first[turn % len(first)] if first else {}


def process_name(page: str) -> str:
    """The name of a process by that of its health page: servers are named after their ports."""
    name = re.sub(r"-\d{4,}$", "", page)
    return "gateway" if name == "amqp" else name


def kind_of(name: str) -> str | None:
    if name.startswith("inform-"):
        return "information node"
    return next((kind for kind in KINDS if name.startswith(kind)), None)
