"""Export of metrics to an OTLP collector over HTTP, if the settings name one.

A report that cannot be delivered is counted and discarded: the next report has the totals.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import platform
import time
from collections.abc import AsyncIterator

from muster.bus.http import client
from muster.core import errors
from muster.core.settings import domain
from muster.core.telemetry import log, metrics, otlp
from muster.supervision import tasks

TIMEOUT_S = 5.0

events = log.EventLog("bus")


@contextlib.asynccontextmanager
async def otlp_export(
    settings: domain.HealthSettings, process: str, measure: metrics.Metrics
) -> AsyncIterator[None]:
    """Export periodically inside the block, and once more at its end."""
    if not settings.otlp_url:
        yield
        return
    exporter = OtlpExporter(settings.otlp_url, process, measure)
    supervisor = tasks.TaskSupervisor("OTLP")
    supervisor.loop("export", functools.partial(exporter.run, settings.otlp_period_s))
    try:
        yield
    finally:
        await supervisor.close()
        await exporter.export()


class OtlpExporter:
    def __init__(self, url: str, process: str, measure: metrics.Metrics) -> None:
        self._url = f"{url.rstrip('/')}/v1/metrics"
        self._measure = measure
        self._resource = {
            "service.name": "muster",
            "service.instance.id": process,
            "process.pid": str(os.getpid()),
            "host.name": platform.node(),
        }
        self._start_ns = time.time_ns()
        self._failing = False
        self._sent = measure.counter("otlp_exports", "Reports sent to the OTLP collector.", ("outcome",))

    async def run(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            await self.export()

    async def export(self) -> bool:
        """Send one report now. True if the collector accepted it."""
        body = otlp.encode(
            self._measure.families(), self._resource, start_ns=self._start_ns, now_ns=time.time_ns()
        )
        failure = await _post(self._url, body)
        self._sent.add(outcome="failed" if failure else "accepted")
        if failure and not self._failing:  # only the first of consecutive failures
            events.warning("metrics-not-exported", url=self._url, reason=failure)
        self._failing = bool(failure)
        return not failure


async def _post(url: str, body: bytes) -> str:
    """The reason of a failure, empty on success."""
    try:
        response = await client.post(
            url, body, headers={"Content-Type": "application/json"}, timeout_s=TIMEOUT_S
        )
    except errors.MusterError as error:
        return error.message
    return "" if 200 <= response.status < 300 else f"HTTP status {response.status}"
