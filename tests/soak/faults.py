"""Processes are killed (SIGKILL) or frozen (SIGSTOP), one kind after the other. Seeded."""

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
    def __init__(self, domain: domain_.SoakDomain, seed: int, began_s: float) -> None:
        self._domain = domain
        self._random = random.Random(seed)
        self._began_s = began_s
        self._turn = 0
        self.applied: list[AppliedFault] = []

    async def run(self, period_s: float) -> None:
        while True:
            started_s = time.monotonic()
            await self.apply_next()
            await asyncio.sleep(max(0.0, started_s + period_s - time.monotonic()))  # pace of faults

    async def apply_next(self) -> AppliedFault | None:
        kind = KINDS[self._turn % len(KINDS)]
        self._turn += 1
        candidates = {name: pid for name, pid in (await self.processes()).items() if _kind(name) == kind}
        if not candidates:
            return None
        name = self._random.choice(sorted(candidates))
        fault = self._random.choice(sorted(FAULTS))
        before = candidates[name]
        applied = AppliedFault(time.monotonic() - self._began_s, kind, name, fault)
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


def process_name(page: str) -> str:
    """The name of a process by that of its health page: servers are named after their ports."""
    name = re.sub(r"-\d{4,}$", "", page)
    return "gateway" if name == "amqp" else name


def _kind(name: str) -> str | None:
    if name.startswith("inform-"):
        return "information node"
    return next((kind for kind in KINDS if name.startswith(kind)), None)
