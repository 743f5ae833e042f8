"""Export of metrics by push, if the settings name a destination: OTLP over HTTP, or Prometheus remote write.

A report that cannot be delivered is counted and discarded: the next report has the totals.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import platform
import time
from collections.abc import AsyncIterator, Callable, Mapping

from muster.bus.http import client
from muster.core import errors
from muster.core.formats import snappy
from muster.core.settings import domain
from muster.core.telemetry import log, metrics, otlp, remote_write
from muster.supervision import tasks

TIMEOUT_S = 5.0

events = log.EventLog("bus")


@contextlib.asynccontextmanager
async def export_metrics(
    settings: domain.HealthSettings, process: str, measure: metrics.Metrics
) -> AsyncIterator[None]:
    """Export periodically inside the block, and once more at its end."""
    exporters = []
    if settings.otlp_url:
        exporters.append((otlp_exporter(settings.otlp_url, process, measure), settings.otlp_period_s))
    if settings.remote_write_url:
        exporter = remote_write_exporter(settings.remote_write_url, process, measure)
        exporters.append((exporter, settings.remote_write_period_s))
    if not exporters:
        yield
        return
    supervisor = tasks.TaskSupervisor("metrics")
    for exporter, period_s in exporters:
        supervisor.loop(exporter.name, functools.partial(exporter.run, period_s))
    try:
        yield
    finally:
        await supervisor.close()
        for exporter, _ in exporters:
            await exporter.export()


class MetricExporter:
    """``encode`` makes the body of a report; ``name`` is that of the protocol in the metrics."""

    def __init__(
        self,
        name: str,
        url: str,
        headers: Mapping[str, str],
        encode: Callable[[], bytes],
        measure: metrics.Metrics,
    ) -> None:
        self.name = name
        self._url = url
        self._headers = headers
        self._encode = encode
        self._failing = False
        self._sent = measure.counter(f"{name}_exports", "Reports sent to the collector.", ("outcome",))

    async def run(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            await self.export()

    async def export(self) -> bool:
        """Send one report now. True if the collector accepted it."""
        failure = await _post(self._url, self._encode(), self._headers)
        self._sent.add(outcome="failed" if failure else "accepted")
        if failure and not self._failing:  # only the first of consecutive failures
            events.warning("metrics-not-exported", url=self._url, reason=failure)
        self._failing = bool(failure)
        return not failure


def otlp_exporter(url: str, process: str, measure: metrics.Metrics) -> MetricExporter:
    start_ns = time.time_ns()
    resource = {
        "service.name": "muster",
        "service.instance.id": process,
        "process.pid": str(os.getpid()),
        "host.name": platform.node(),
    }

    def encode() -> bytes:
        return otlp.encode(measure.families(), resource, start_ns=start_ns, now_ns=time.time_ns())

    address = f"{url.rstrip('/')}/v1/metrics"
    return MetricExporter("otlp", address, {"Content-Type": "application/json"}, encode, measure)


def remote_write_exporter(url: str, process: str, measure: metrics.Metrics) -> MetricExporter:
    labels = {"job": "muster", "instance": f"{platform.node()}/{process}"}

    def encode() -> bytes:
        return snappy.store(
            remote_write.encode(measure.families(), labels, now_ms=time.time_ns() // 1_000_000)
        )

    return MetricExporter("remote_write", url, remote_write.HEADERS, encode, measure)


async def _post(url: str, body: bytes, headers: Mapping[str, str]) -> str:
    """The reason of a failure, empty on success."""
    try:
        response = await client.post(url, body, headers=headers, timeout_s=TIMEOUT_S)
    except errors.MusterError as error:
        return error.message
    return "" if 200 <= response.status < 300 else f"HTTP status {response.status}"
