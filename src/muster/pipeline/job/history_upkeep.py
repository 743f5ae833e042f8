"""Maintains the tables of the history every few minutes, while this process is the driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from muster.core.telemetry import log
from muster.pipeline.history import maintenance
from muster.pipeline.job.driver import driver_lease

MAINTAIN_S = 300.0
VACUUM_S = 3600.0


class HistoryUpkeep:
    def __init__(
        self,
        history: str,
        limits: maintenance.MaintenanceLimits,
        authority: driver_lease.DriverAuthority,
        events: log.EventLog,
    ) -> None:
        self._history = history
        self._limits = limits
        self._authority = authority
        self._log = events

    async def run(self, on_failure: Callable[[Exception], None]) -> None:
        """A failure is passed to ``on_failure`` and retried the next time."""
        vacuumed = time.monotonic()
        while True:
            await asyncio.sleep(MAINTAIN_S)
            due = time.monotonic() - vacuumed >= VACUUM_S
            try:
                done = await asyncio.to_thread(
                    maintenance.run,
                    self._history,
                    time.time(),
                    self._limits,
                    with_vacuum=due,
                    check=self._authority.check,
                )
                if any(done.values()):
                    self._log.info("history-maintained", **done)
                if due:
                    vacuumed = time.monotonic()
            except Exception as error:  # noqa: BLE001 (Arrow, DuckDB and delta-rs raise exceptions of many types)
                on_failure(error)
