"""Export by push, if the settings name a destination: OTLP over HTTP, or Prometheus remote write.

OTLP carries metrics, the log events of the process and the spans of its requests; remote write has metrics
only. A report of metrics that cannot be delivered is counted and discarded: the next report has the totals.
Log events and spans wait for the collector, `WAITING_MAX` of each; what is beyond that is counted as dropped.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import itertools
import logging
import os
import platform
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from muster.bus import spans
from muster.bus.http import client
from muster.core import errors
from muster.core.formats import snappy
from muster.core.settings import domain
from muster.core.telemetry import log, metrics, otlp, remote_write
from muster.supervision import tasks

TIMEOUT_S = 5.0
FLUSH_S = 2.0  # between two deliveries of log events and spans
WAITING_MAX = 4096
BATCH_MAX = 512
JSON = {"Content-Type": "application/json"}
RETRYABLE = (429, 502, 503, 504)  # as the protocol defines; other answers mean that the data is not accepted

T = TypeVar("T")

events = log.EventLog("bus")


@contextlib.asynccontextmanager
async def export_telemetry(
    settings: domain.HealthSettings, process: str, measure: metrics.Metrics
) -> AsyncIterator[None]:
    """Export periodically inside the block, and once more at its end."""
    exporters: list[tuple[Exporter, float]] = []
    stack = contextlib.ExitStack()
    if settings.otlp_url and "metrics" in settings.otlp_signals:
        exporters.append((otlp_exporter(settings.otlp_url, process, measure), settings.otlp_period_s))
    if settings.otlp_url and "logs" in settings.otlp_signals:
        logs = SignalExporter("logs", settings.otlp_url, otlp.encode_logs, process, measure)
        stack.enter_context(_logged_to(logs))
        exporters.append((logs, FLUSH_S))
    if settings.otlp_url and "traces" in settings.otlp_signals:
        traces = SignalExporter("traces", settings.otlp_url, otlp.encode_spans, process, measure)
        stack.enter_context(spans.recorded_to(traces.add))
        exporters.append((traces, FLUSH_S))
    if settings.remote_write_url:
        remote = remote_write_exporter(settings.remote_write_url, process, measure)
        exporters.append((remote, settings.remote_write_period_s))
    if not exporters:
        yield
        return
    supervisor = tasks.TaskSupervisor("metrics")
    for exporter, period_s in exporters:
        supervisor.loop(exporter.name, functools.partial(exporter.run, period_s))
    try:
        with stack:
            yield
    finally:
        await supervisor.close()
        for exporter, _ in exporters:
            await exporter.export()


class Exporter(Protocol):
    @property
    def name(self) -> str: ...
    async def run(self, period_s: float) -> None: ...
    async def export(self) -> bool: ...


class SignalExporter(Generic[T]):
    """Log events or spans, delivered in the order in which they were added."""

    def __init__(
        self,
        name: str,
        url: str,
        encode: Callable[[Sequence[T], Mapping[str, str]], bytes],
        process: str,
        measure: metrics.Metrics,
    ) -> None:
        self.name = f"otlp {name}"
        self._url = f"{url.rstrip('/')}/v1/{name}"
        self._encode = encode
        self._resource = describe_process(process)
        self._waiting: collections.deque[T] = collections.deque()
        self._failing = False
        counts = measure.counter(
            f"otlp_{name}", "Records sent to the collector, refused by it, or dropped.", ("outcome",)
        )
        self._count = counts.add

    def add(self, item: T) -> None:
        if len(self._waiting) >= WAITING_MAX:
            self._count(outcome="dropped")
        else:
            self._waiting.append(item)

    async def run(self, period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            await self.export()

    async def export(self) -> bool:
        """Deliver what waits; False if it has to wait longer."""
        while self._waiting:
            batch = list(itertools.islice(self._waiting, BATCH_MAX))
            status, failure = await _post(self._url, self._encode(batch, self._resource), JSON)
            if failure and not self._failing:
                events.warning("telemetry-not-exported", url=self._url, reason=failure)
            self._failing = bool(failure)
            if failure and (not status or status in RETRYABLE):
                return False
            for _ in batch:
                self._waiting.popleft()
            self._count(len(batch), outcome="refused" if failure else "accepted")
        return True


@contextlib.contextmanager
def _logged_to(exporter: SignalExporter[otlp.LogEntry]) -> Iterator[None]:
    """Pass Muster's log events to the exporter as well."""
    handler = log.RecordHandler(exporter.add)
    logger = logging.getLogger(log.ROOT)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


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
        _, failure = await _post(self._url, self._encode(), self._headers)
        self._sent.add(outcome="failed" if failure else "accepted")
        if failure and not self._failing:  # only the first of consecutive failures
            events.warning("metrics-not-exported", url=self._url, reason=failure)
        self._failing = bool(failure)
        return not failure


def otlp_exporter(url: str, process: str, measure: metrics.Metrics) -> MetricExporter:
    start_ns = time.time_ns()
    resource = describe_process(process)

    def encode() -> bytes:
        return otlp.encode(measure.families(), resource, start_ns=start_ns, now_ns=time.time_ns())

    address = f"{url.rstrip('/')}/v1/metrics"
    return MetricExporter("otlp", address, JSON, encode, measure)


def describe_process(process: str) -> dict[str, str]:
    return {
        "service.name": "muster",
        "service.instance.id": process,
        "process.pid": str(os.getpid()),
        "host.name": platform.node(),
    }


def remote_write_exporter(url: str, process: str, measure: metrics.Metrics) -> MetricExporter:
    labels = {"job": "muster", "instance": f"{platform.node()}/{process}"}

    def encode() -> bytes:
        return snappy.store(
            remote_write.encode(measure.families(), labels, now_ms=time.time_ns() // 1_000_000)
        )

    return MetricExporter("remote_write", url, remote_write.HEADERS, encode, measure)


async def _post(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
    """The status, 0 without a response, and the reason of a failure, empty on success."""
    try:
        response = await client.post(url, body, headers=headers, timeout_s=TIMEOUT_S)
    except errors.MusterError as error:
        return 0, error.message
    accepted = 200 <= response.status < 300
    return response.status, "" if accepted else f"HTTP status {response.status}"
