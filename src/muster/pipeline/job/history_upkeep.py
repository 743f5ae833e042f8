"""Maintains the tables of the history every few minutes, while this process is the driver."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from muster.core import errors
from muster.core.telemetry import log
from muster.pipeline.history import maintenance, maintenance_process
from muster.pipeline.job.driver import driver_lease
from muster.supervision import children

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAINTAIN_S = 300.0
VACUUM_S = 3600.0


class HistoryUpkeep:
    def __init__(
        self,
        history: str,
        limits: maintenance.MaintenanceLimits,
        authority: driver_lease.DriverAuthority,
        events: log.EventLog,
        clock_ms: Callable[[], int],
        spark: SparkSession | None = None,
    ) -> None:
        """``clock_ms``: the broker's clock at the newest message read; ``spark``: of a cluster."""
        self._history = history
        self._limits = limits
        self._authority = authority
        self._log = events
        self._clock_ms = clock_ms
        self._spark = spark

    async def run(self, on_failure: Callable[[Exception], None]) -> None:
        """A failure is passed to ``on_failure`` and retried the next time."""
        vacuumed = time.monotonic()
        while True:
            await asyncio.sleep(MAINTAIN_S)
            due = time.monotonic() - vacuumed >= VACUUM_S
            try:
                done = await self.maintain(with_vacuum=due)
            except (errors.MusterError, OSError) as error:
                on_failure(error)
                continue
            if any(done.values()):
                self._log.info("history-maintained", **done)
            if due:
                vacuumed = time.monotonic()

    async def maintain(self, *, with_vacuum: bool) -> dict[str, int]:
        """All steps once, each only if this process is still the driver. What was done, in numbers."""
        done: dict[str, int] = {}
        if self._spark is not None:
            done = await asyncio.to_thread(self._use_executors, self._spark)
        request = maintenance_process.MaintenanceRequest(
            root=self._history,
            now_s=self._now_s(),
            max_bytes=self._limits.max_bytes,
            max_age_s=self._limits.max_age_s,
            keep_s=self._limits.keep_s,
            with_vacuum=with_vacuum,
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            maintenance_process.__name__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # spark-submit may have added archives with the code to the path of this process only.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            while (line := await process.stdout.readline()) == b"\n":
                self._authority.check()
                process.stdin.write(b"\n")
            if not line:
                raise errors.Unavailable(
                    f"the maintenance of the history ended early (exit code {await process.wait()})"
                )
            result = msgspec.json.decode(line, type=maintenance_process.MaintenanceResult)
            if result.error:
                raise errors.Unavailable(f"the history could not be maintained: {result.error}")
            return {name: count + done.get(name, 0) for name, count in result.done.items()}
        finally:
            process.stdin.close()
            await children.end_process(process, kill=True)

    def _use_executors(self, spark: SparkSession) -> dict[str, int]:
        from muster.pipeline.history import spark_maintenance

        if not spark_maintenance.is_large(self._history, self._now_s()):
            return {}
        keep_s, check = self._limits.keep_s, self._authority.check
        try:
            return spark_maintenance.run(spark, self._history, self._now_s(), keep_s, check)
        except errors.StaleEpoch:
            raise
        except Exception as error:  # noqa: BLE001 (Spark raises exceptions of many types)
            self._log.warning("executors-did-not-maintain", error=error)
            return {}  # the small process does what it can

    def _now_s(self) -> float:
        """Not later than the newest message: rows are not too old because the local clock is ahead."""
        return min(time.time(), self._clock_ms() / 1000)
