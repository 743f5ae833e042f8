"""Metrics out, to a collector that speaks OTLP over HTTP: where it is named in the settings.

What cannot be delivered is counted and not kept: the next report says the totals again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator

from muster.core.settings import domain
from muster.core.telemetry import log, metrics, otlp

TIMEOUT_S = 5.0

events = log.EventLog("bus")


@contextlib.asynccontextmanager
async def otlp_export(
    settings: domain.HealthSettings, process: str, measure: metrics.Metrics
) -> AsyncIterator[None]:
    """Export until the end of this block, and once more then."""
    if not settings.otlp_url:
        yield
        return
    exporter = OtlpExporter(settings.otlp_url, process, measure)
    task = asyncio.create_task(exporter.run(settings.otlp_period_s), name="metrics out")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
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
        self._sent = measure.counter("otlp_exports", "Reports of metrics sent out.", ("outcome",))

    async def run(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            await self.export()

    async def export(self) -> bool:
        """Once, now; whether it was taken."""
        body = otlp.encode(
            self._measure.families(), self._resource, start_ns=self._start_ns, now_ns=time.time_ns()
        )
        failure = await asyncio.to_thread(_post, self._url, body)
        self._sent.add(outcome="refused" if failure else "taken")
        if failure and not self._failing:  # once, and not each period
            events.warning("metrics-not-exported", url=self._url, reason=failure)
        self._failing = bool(failure)
        return not failure


def _post(url: str, body: bytes) -> str:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"it answered {error.code}"
    except (OSError, ValueError) as error:
        return str(error)
