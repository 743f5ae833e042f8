"""A sensor: publishes a report about its machine and services in every period. The report is the heartbeat.

The channel is selected from the channels' heartbeats (`parent_selection`).  Sent reports are kept until the
heartbeats of the channel confirm that they were forwarded.  If the sensor moves to another channel or was
disconnected, they are sent again with the same sequence, so that they are counted once.  While no channel is
alive, reports go to a bounded buffer on disk, and are sent in order afterwards.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import time
from pathlib import Path

import msgspec

from muster.bus import api
from muster.bus.http import client
from muster.core import duplicates, errors, lifecycle, messages
from muster.core.reports import packed
from muster.core.telemetry import log
from muster.monitor import parent_selection, protocol
from muster.monitor import settings as settings_
from muster.monitor.sensor import disk_buffer, host_metrics, intake, metric_formats, service_reports
from muster.supervision import tasks

events = log.EventLog("monitor")

CONFIRM_MARGIN_S = 1.0
DRAIN_AT_ONCE = 100
DRAIN_PAUSE_S = 0.05  # so that a reconnecting fleet does not cause a load peak
SCRAPE_TIMEOUT_S = 3.0
SCRAPE_BYTES_MAX = 4 << 20
OWN_SERVICE = "sensor"  # in the report: what the sensor itself dropped, by reason


class Sensor(lifecycle.ServiceContext):
    """``async with Sensor(bus, settings, buffer_dir): …``; its machine has the identity of its bus."""

    def __init__(self, bus: api.Bus, settings: settings_.SensorSettings, buffer_dir: Path) -> None:
        self._bus = bus
        self._settings = settings
        self._buffer_dir = buffer_dir
        self._pages = dict(map(settings_.named, settings.scrape))
        self.machine = bus.identity
        self._boot = time.time_ns() // 1_000_000
        self._sequence = 0
        self._parents = parent_selection.ParentSelector(bus.identity, settings.channels)
        self._parent: str | None = (
            None  # the channel of the last report, if the connection has not changed since
        )
        self._unconfirmed: collections.deque[tuple[float, bytes]] = collections.deque(maxlen=duplicates.KEPT)
        self.services = service_reports.ServiceReports()
        self.intake = intake.SensorIntake(self.services, time.monotonic, period_s=settings.period_s)
        self._host: host_metrics.HostMetrics
        self._buffer: disk_buffer.ReportBuffer
        self._tasks = tasks.TaskSupervisor(f"sensor {self.machine}")
        self._beats: api.Subscription | None = None
        self._drain_now = asyncio.Event()
        self._lock = asyncio.Lock()  # one sender at a time, to keep the order of sequences
        self._forget_listener = bus.on_state(self._connection_changed)
        self._failed_scrapes: set[str] = set()  # a failure is logged once, until a scrape succeeds
        self.sent = 0
        self.moves = 0

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    async def start(self) -> None:
        settings = self._settings
        processes = dict(map(settings_.named, settings.processes))
        self._host = await asyncio.to_thread(host_metrics.HostMetrics, processes)
        self._buffer = await asyncio.to_thread(
            disk_buffer.ReportBuffer, self._buffer_dir, bytes_max=settings.buffer_bytes
        )
        if settings.intake:
            await self.intake.open(http_port=settings.http_port, statsd_port=settings.statsd_port)
        self._beats = await self._bus.subscribe(protocol.BEATS, handler=self._on_heartbeat)
        self._tasks.loop("report", self._report_always)
        self._tasks.loop("buffer", self._drain_always)

    async def stop(self) -> None:
        self._forget_listener()
        await self._tasks.close()
        if self._beats is not None:
            await self._beats.close()
        await self.intake.close()

    # Sampling.

    async def sample(self) -> messages.NodeReport:
        """Create a report of the machine."""
        await self._scrape()
        metrics, processes = await asyncio.to_thread(lambda: (self._host.sample(), self._host.services()))
        pushed = {report.name: report for report in self.services.collect(time.monotonic())}
        services = {**{report.name: report for report in processes}, **pushed}
        if self.services.dropped:
            counts = {f"dropped_{reason}": float(count) for reason, count in self.services.dropped.items()}
            services = {OWN_SERVICE: messages.ServiceReport(name=OWN_SERVICE, metrics=counts), **services}
        kept = tuple(services.values())[: service_reports.SERVICES_MAX]
        self._count_dropped("service-too-much", len(services) - len(kept))
        self._sequence += 1
        return messages.NodeReport(
            machine=self.machine,
            group=self._settings.group,
            zone=self._settings.zone,
            boot=self._boot,
            sequence=self._sequence,
            at_ms=time.time_ns() // 1_000_000,
            period_s=self._settings.period_s,
            dropped=self._buffer.dropped,
            metrics=metrics,
            services=kept,
        )

    async def _scrape(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name, url in self._pages.items():
                group.create_task(self._scrape_one(name, url))

    async def _scrape_one(self, name: str, url: str) -> None:
        try:
            for report in await scrape(name, url):
                self.services.push(report, time.monotonic(), period_s=self._settings.period_s)
        except errors.MusterError as error:
            self.services.dropped[f"scrape-{error.code}"] += 1
            if name not in self._failed_scrapes:
                events.warning("scrape-failed", service=name, url=url, error=error)
            self._failed_scrapes.add(name)
        else:
            self._failed_scrapes.discard(name)

    async def _report_always(self) -> None:
        # A random start within the first period distributes the reports of a fleet.
        next_s = time.monotonic() + random.random() * min(self._settings.period_s, 1.0)
        while True:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            try:
                await self.emit(await self.sample())
            except Exception as error:  # noqa: BLE001
                # The heartbeat continues after any error, such as a full disk or an invalid service report.
                self.services.dropped["report-failed"] += 1
                self._tasks.record_failure("report", error)
            next_s = max(next_s + self._settings.period_s, time.monotonic())

    # Sending.

    async def emit(self, report: messages.NodeReport) -> None:
        """Send a report, or buffer it until it can be sent, in order."""
        data = self._encoded(report)
        async with self._lock:
            if len(self._buffer) or not await self._send([data]):
                await asyncio.to_thread(self._buffer.append, data)
                self._drain_now.set()

    def _encoded(self, report: messages.NodeReport) -> bytes:
        """Encode a report within the limits of channels.

        Services that no channel would accept are dropped. If the report is too large, the largest services
        lose metrics; only if none has any, services are dropped.
        """
        try:
            return _checked(report)
        except errors.MusterError:
            services = [service for service in report.services if packed.is_valid(service)]
        self._count_dropped("service-invalid", len(report.services) - len(services))
        room_bytes = packed.BYTES_MAX
        while True:
            try:
                return _checked(msgspec.structs.replace(report, services=tuple(services)))
            except errors.MusterError:
                if not services:
                    raise
            room_bytes = room_bytes * 3 // 4
            before = sum(len(service.metrics) for service in services)
            services = service_reports.trim(services, room_bytes)
            metrics = before - sum(len(service.metrics) for service in services)
            self._count_dropped("service-metrics", metrics)
            if not metrics:
                self._count_dropped("service-too-much", len(services) - len(services) // 2)
                services = services[: len(services) // 2]

    def _count_dropped(self, reason: str, number: int) -> None:
        if number:
            self.services.dropped[reason] += number

    async def _send(self, rows: list[bytes]) -> bool:
        parent = self._parents.choose(time.monotonic())
        if parent is None or self._bus.state is not api.ConnectionState.CONNECTED:
            return False
        subject = protocol.report(self._bus.identity, parent)
        try:
            if parent != self._parent:
                for _, data in self._unconfirmed:
                    await self._bus.publish(subject, data)
                self._unconfirmed = collections.deque(
                    ((time.monotonic(), data) for _, data in self._unconfirmed),
                    maxlen=duplicates.KEPT,
                )
                self.moves += 1
                self._parent = parent
            for data in rows:
                await self._bus.publish(subject, data)
                self._unconfirmed.append((time.monotonic(), data))
        except errors.Unavailable:
            self._parent = None
            return False
        self.sent += len(rows)
        return True

    async def _drain_always(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.period_s):
                    await self._drain_now.wait()
            self._drain_now.clear()
            with contextlib.suppress(errors.Unavailable):
                while await self._drain():
                    pass

    async def _drain(self) -> bool:
        """Send the oldest buffered reports; True if there may be more."""
        async with self._lock:
            rows = await asyncio.to_thread(self._buffer.peek, DRAIN_AT_ONCE)
            if not rows or not await self._send(rows):
                return False
            await self._bus.flush()
            await asyncio.to_thread(self._buffer.done, len(rows))
        await asyncio.sleep(DRAIN_PAUSE_S)
        return True

    def _on_heartbeat(self, message: api.Message) -> None:
        with contextlib.suppress(errors.InvalidInput, errors.LimitExceeded):
            beat = messages.decode(message.data, protocol.ChannelHeartbeat)
            channel, now_s = protocol.channel_of(message.subject), time.monotonic()
            self._parents.record_heartbeat(channel, beat, now_s)
            if channel == self._parent:
                gone_on_s = now_s - beat.waiting_s - CONFIRM_MARGIN_S
                while self._unconfirmed and self._unconfirmed[0][0] < gone_on_s:
                    self._unconfirmed.popleft()
            if len(self._buffer):
                self._drain_now.set()

    def _connection_changed(self, state: api.ConnectionState) -> None:
        if state is not api.ConnectionState.CONNECTED:
            self._parent = None  # messages in flight may be lost and are sent again


def _checked(report: messages.NodeReport) -> bytes:
    data = packed.encode(report)
    packed.decode(data)
    return data


async def scrape(name: str, url: str) -> list[messages.ServiceReport]:
    """The metrics at a URL as reports of the service ``name``, or of the services that they name."""
    answer = await client.get(url, timeout_s=SCRAPE_TIMEOUT_S, body_bytes_max=SCRAPE_BYTES_MAX)
    if answer.status != 200:
        raise errors.Unavailable(f"{url} answered {answer.status}")
    text = answer.body.decode("utf-8", "replace")
    values = metric_formats.openmetrics(text, name, content_type=answer.content_type)
    return list(metric_formats.service_reports(values))
