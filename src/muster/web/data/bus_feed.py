"""Subscriptions of the web process, with bounded buffers for all pages and requests.

Services publish reports, alerts, decisions, the pipeline's progress and changes of state.  Other data is
requested through one cache (`muster.web.data.read_model`), whose entries these messages invalidate by tag.  A
thousand open pages therefore cause no more requests than one.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

from muster.bus import api
from muster.bus.brokers import control
from muster.core import errors, messages, subjects
from muster.core.reports import columns
from muster.manage import client as manage_client
from muster.manage import protocol as manage_protocol
from muster.monitor import client as monitor_client
from muster.pipeline import protocol as pipeline_protocol
from muster.supervision import tasks
from muster.web.data import cache, connections, recent
from muster.web.data.measurements import latest_reports, samples

T = TypeVar("T")

READ_S = 4.0  # time limit of a request to a service
CHANGES_KEPT = 500
DECISIONS_KEPT = 2_000
PROGRESS_KEPT = 600
SYSTEMS_KEPT = 360
SAMPLE_S = 5.0
BURSTS_KEPT = 600
ENDED_S = 600.0  # without a report: a channel that has ended
WAYS = ("in", "out")
CHANNELS_MAX = 300
WATCHED = (
    manage_protocol.STATES,
    columns.REPORTS_SUBJECTS,
    pipeline_protocol.REPORTS,
    pipeline_protocol.ALERTS,
    pipeline_protocol.PROGRESS,
    subjects.to_all("bus", "alert"),
    messages.DECISIONS_SUBJECTS,
)


Point = tuple[float, columns.Rollups]  # time in s, and the fleet's metrics


def decision_key(record: messages.Decision) -> str:
    """A decision and its outcome are two records with the same id."""
    return f"{record.id}-{record.outcome.value}"


def _system(data: bytes) -> Point:
    made = messages.decode(data, columns.SystemReport)
    return made.to_ms / 1000, made.metrics


def _moment(point: Point) -> float:
    return point[0]


class BusFeed:
    def __init__(self, location: connections.DomainLocation, *, domain: str) -> None:
        self.domain = domain
        self.cache = cache.TaggedCache()
        self.machines = latest_reports.LatestReports()
        self.recent = self.machines.recent
        self.samples = samples.SampleLog()
        #: Each adds to the samples.
        self.samplers: list[Callable[[float], Awaitable[None]]] = [self._sample_brokers]
        #: The reports of the last bursts of each channel, and those that it has dropped: times and numbers.
        self._arrived: dict[str, dict[str, collections.deque[tuple[float, int]]]] = {}
        self.changes: collections.deque[manage_protocol.ResourceStateChange] = collections.deque(
            maxlen=CHANGES_KEPT
        )
        self.decisions = recent.RecentItems(decision_key, DECISIONS_KEPT)
        self.batches: collections.deque[pipeline_protocol.BatchProgress] = collections.deque(
            maxlen=PROGRESS_KEPT
        )
        self.systems = recent.RecentItems(_moment, SYSTEMS_KEPT)
        self._counted: tuple[float, dict[str, tuple[int, int]]] = (0.0, {})  # messages in and out
        self._listeners: dict[str, set[asyncio.Event]] = {}
        self.link = connections.BusConnections(location, on_connected=self._begin, on_lost=self._lost)

    async def run(self) -> None:
        supervisor = tasks.TaskSupervisor("web")
        running = [supervisor.loop("connection", self.link.run), supervisor.loop("samples", self._sample)]
        try:
            await asyncio.wait(running)
        finally:
            await supervisor.close()

    # Subscriptions

    async def _begin(self, bus: api.Bus) -> None:
        """Subscribe first and then read older messages, so that none is missed."""
        self.cache.clear()
        decisions, systems = self.decisions.take(), self.systems.take()
        for subject in WATCHED:
            await bus.subscribe(subject, handler=self._receive, max_pending=4096)
        with contextlib.suppress(errors.MusterError):
            decisions = await manage_client.ManageClient(bus).decisions(last=DECISIONS_KEPT)
        self.decisions.put_before(decisions)
        with contextlib.suppress(errors.MusterError):
            for batch in await monitor_client.recent(bus, window_s=30.0):
                self.machines.add(batch.batch)
        with contextlib.suppress(errors.MusterError):
            systems = [_system(data) async for data in monitor_client.results(bus, "system")]
        self.systems.put_before(systems)
        self._touch("link")

    def _lost(self) -> None:
        self.cache.clear()
        self._touch("link")

    def _receive(self, message: api.Message) -> None:
        part = message.subject.split(".")
        with contextlib.suppress(errors.MusterError):  # malformed messages are ignored
            match part[1], part[2], part[4] if len(part) > 4 else part[3]:
                case "monitor", _, _:
                    if (taken := self.machines.take(message.data, at_s=time.time())) is not None:
                        self._count_arrival(*taken)
                    self._touch("machines")
                case "manage", "all", _:
                    self.changes.append(messages.decode(message.data, manage_protocol.ResourceStateChange))
                    self._touch("manage")
                case _, "log", _:
                    self.decisions.add(messages.decode(message.data, messages.Decision))
                    self._touch("activity")
                    self._touch("manage")
                case "pipeline", _, "alert":
                    self._touch("alerts")
                case "pipeline", _, "report":
                    if part[5:] == ["system"]:
                        self.systems.add(_system(message.data))
                    elif part[5:6] == ["removed"]:
                        removed = messages.decode(message.data, pipeline_protocol.RemovedMachines)
                        self.machines.remove(removed.machines, removed.at_ms)
                        self._touch("machines")
                    self._touch("reports")
                case "pipeline", _, "progress":
                    progress = messages.decode(message.data, pipeline_protocol.BatchProgress)
                    if progress.at_ms:  # no data before the first batch
                        self.batches.append(progress)
                    self._touch("pipeline")
                case "bus", _, _:
                    self._touch("alerts")

    def _count_arrival(self, facts: columns.BatchInfo, reports: int) -> None:
        """`BatchInfo.machines` counts the machines that the channel knows, not those in the batch."""
        if facts.channel in self._arrived or len(self._arrived) < CHANNELS_MAX:
            arrived = self._arrived.setdefault(facts.channel, {})
            for name, count in (("reports", reports), ("dropped", sum(facts.dropped.values()))):
                bursts = arrived.setdefault(name, collections.deque(maxlen=BURSTS_KEPT))
                bursts.append((time.time(), count))

    def _touch(self, tag: str) -> None:
        self.cache.touch(tag)
        for event in self._listeners.get(tag, ()):
            event.set()

    @contextlib.contextmanager
    def changes_of(self, *tags: str) -> Any:
        """An event that is set when data with one of these tags changes."""
        event = asyncio.Event()
        for tag in tags:
            self._listeners.setdefault(tag, set()).add(event)
        try:
            yield event
        finally:
            for tag in tags:
                self._listeners[tag].discard(event)

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            if self.machines.is_due:
                await self.machines.table()
            now_s = time.time()
            ended = [name for name, own in self._arrived.items() if own["reports"][-1][0] < now_s - ENDED_S]
            for channel in ended:
                del self._arrived[channel]
            for channel, arrived in self._arrived.items():
                rates = {name: latest_reports.rate(list(bursts), now_s) for name, bursts in arrived.items()}
                self.samples.add("channel", channel, now_s, rates)
            self.samples.forget(now_s)
            for sample in self.samplers:
                with contextlib.suppress(errors.MusterError):
                    await sample(now_s)

    async def _sample_brokers(self, _: float) -> None:
        """Messages per second, from counters. They are not read from the cache: the time has to be theirs."""
        brokers = await self.ask_domain("counters", lambda domain: domain.brokers())
        now_s = time.time()
        before_s, before = self._counted
        self._counted = now_s, {row.name: (row.in_messages or 0, row.out_messages or 0) for row in brokers}
        total = dict.fromkeys(WAYS, 0.0)
        for name, counts in self._counted[1].items():
            past = before.get(name, counts)
            rates = [max(0, new - old) / (now_s - before_s) for new, old in zip(counts, past, strict=True)]
            for way, rate in zip(WAYS, rates, strict=True):
                total[way] += rate
            if name in before:
                self.samples.add("broker", name, now_s, dict(zip(WAYS, rates, strict=True)))
        if before:
            self.samples.add("domain", "", now_s, total)

    async def query(
        self, key: Hashable, tag: str, kept_s: float, ask: Callable[[api.Bus], Awaitable[T]]
    ) -> T:
        async def make() -> T:
            async with asyncio.timeout(READ_S * 2):
                return await ask(self.link.bus)

        try:
            return await self.cache.get(key, tag, kept_s, make)
        except TimeoutError as error:
            raise errors.TimedOut("no reply in time") from error

    # The domain's process

    async def ask_domain(
        self, verb: str, ask: Callable[[control.BrokerControl], Awaitable[T]], tag: str = "brokers"
    ) -> T:
        async def call(bus: api.Bus) -> T:
            try:
                return await ask(control.BrokerControl(bus, timeout_s=READ_S, retry_s=READ_S, waits=True))
            except errors.TimedOut as error:
                raise errors.TimedOut(
                    f"the domain's process did not reply within {READ_S:g} s",
                    hint="the request is repeated automatically",
                ) from error

        return await self.query(("brokers", verb), tag, 2.0, call)

    async def brokers(self) -> list[control.BrokerDescription]:
        return await self.ask_domain("list", lambda domain: domain.brokers())

    async def components(self) -> list[control.ComponentRow]:
        return await self.ask_domain("components", lambda domain: domain.components())

    async def links(self) -> list[control.LinkRow]:
        return await self.ask_domain("links", lambda domain: domain.links())
