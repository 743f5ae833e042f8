"""Client of the pipeline, for programs, the web interface, the command line and the simulator.

Requests go to the running pipeline, which replies from memory.  Clients that may read streams (operators and
services) also get the latest report from the stream when no pipeline runs, and can follow alerts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

import msgspec

from muster.bus import api
from muster.bus.rpc import client
from muster.core import errors, messages
from muster.core.reports import columns
from muster.pipeline import protocol
from muster.pipeline.alerts import tracker

M = TypeVar("M", bound=messages.WireMessage)
TIMEOUT_S = 10.0
TEST_TIMEOUT_S = 45.0  # longer than the pipeline waits for a contact


class PipelineClient:
    def __init__(self, bus: api.Bus, *, pipeline: str = "pipeline") -> None:
        self._bus = bus
        self._pipeline = pipeline

    # Reports

    async def system(self) -> columns.SystemReport | None:
        """The latest report; None before the first window is closed."""
        return await self._latest("system", "", columns.SystemReport)

    async def group(self, name: str) -> columns.GroupReport | None:
        return await self._latest("group", name, columns.GroupReport)

    async def zone(self, name: str) -> columns.GroupReport | None:
        return await self._latest("zone", name, columns.GroupReport)

    async def top(self) -> protocol.TopNodes | None:
        return await self._latest("top", "", protocol.TopNodes)

    async def _latest(self, scope: str, name: str, kind: type[M]) -> M | None:
        try:
            report = await self._call(protocol.read, "latest", scope=scope, name=name)
        except errors.Unavailable:
            try:
                stream = await self._bus.open_stream(columns.SYSTEM_STREAM)
            except errors.NotFound:
                return None
            stored = await stream.last_for(columns.result_subject(self._pipeline, scope, name))
            return None if stored is None else messages.decode(stored.data, kind)
        return None if report is None else messages.decode(msgspec.json.encode(report), kind)

    # Alerts

    async def alerts(self) -> list[messages.Alert]:
        """All unresolved alerts, those that need attention first."""
        alerts = [
            messages.decode(msgspec.json.encode(row), messages.Alert) async for row in self._pages("alerts")
        ]
        return sorted(alerts, key=tracker.urgency)

    async def has_alerts(self) -> bool:
        """Whether a pipeline has run, so that its alerts can be followed."""
        try:
            await self._bus.open_stream(protocol.ALERTS_STREAM)
        except errors.NotFound:
            return False
        return True

    async def follow_alerts(self, *, first: int | None = None) -> AsyncIterator[tuple[int, messages.Alert]]:
        """Each change with its sequence in the stream, starting at ``first`` or now.

        Messages that are not alerts are skipped.  `errors.Dropped` if the stream no longer has some of them;
        another call can continue after its ``last``.
        """
        stream = await self._bus.open_stream(protocol.ALERTS_STREAM)
        start = (await stream.state()).last_sequence + 1 if first is None else first
        async with stream.follow(start, gaps=True) as following:
            async for stored in following:
                try:
                    yield stored.sequence, messages.decode(stored.data, messages.Alert)
                except errors.MusterError:
                    continue

    async def acknowledge(self, rule: str, about: str) -> None:
        """Acknowledge an alert."""
        await self._call(protocol.request, "acknowledge", rule=rule, about=about)

    async def resolve(self, rule: str, about: str) -> None:
        """End an alert; it is raised again if its rule is evaluated and still true."""
        await self._call(protocol.request, "resolve", rule=rule, about=about)

    async def silence(
        self, covers: str, *, for_s: float, from_ms: int | None = None, reason: str = ""
    ) -> tracker.Silence:
        """Suppress notifications of the selected alerts. With a later ``from_ms``: a maintenance window."""
        row = await self._call(
            protocol.request, "silence", covers=covers, for_s=for_s, from_ms=from_ms, reason=reason
        )
        return msgspec.convert(row, tracker.Silence)

    async def unsilence(self, id: str) -> None:
        await self._call(protocol.request, "unsilence", id=id)

    async def silences(self) -> list[tracker.Silence]:
        silences = [msgspec.convert(row, tracker.Silence) async for row in self._pages("silences")]
        return sorted(silences, key=lambda silence: silence.until_ms)

    async def test_contact(self, name: str) -> list[tracker.DeliveryResult]:
        """Send a test notification to a contact of alerts: a result for its webhook and for its mail."""
        rows = await self._call(protocol.request, "test", timeout_s=TEST_TIMEOUT_S, receiver=name)
        return msgspec.convert(rows, list[tracker.DeliveryResult])

    # The fleet

    async def forget(self, machines: Sequence[str] = (), *, where: str = "") -> None:
        """Remove machines from the fleet and end their alerts, with the next batch.

        ``where``: a predicate over machine, group, zone, period_s and age_s.  A machine that reports later
        is added again.  The history keeps its rows.
        """
        await self._call(protocol.request, "remove", machines=list(machines), where=where)

    # The job

    async def progress(self) -> protocol.BatchProgress:
        """`errors.Unavailable` if no pipeline runs."""
        row = await self._call(protocol.read, "status")
        return messages.decode(msgspec.json.encode(row), protocol.BatchProgress)

    async def batches(self) -> list[protocol.BatchProgress]:
        """The last few hundred batches, the newest last."""
        rows = await self._call(protocol.read, "batches")
        return [messages.decode(msgspec.json.encode(row), protocol.BatchProgress) for row in rows]

    async def follow_progress(self) -> AsyncIterator[protocol.BatchProgress]:
        async with await self._bus.subscribe(protocol.progress(self._pipeline)) as subscription:
            async for message in subscription:
                yield messages.decode(message.data, protocol.BatchProgress)

    async def stop(self) -> None:
        """Stop the pipeline after the current batch."""
        await self._call(protocol.request, "stop")

    async def _call(
        self, subject: Any, operation: str, *, timeout_s: float = TIMEOUT_S, **arguments: Any
    ) -> Any:
        options = _options() | {"timeout_s": timeout_s}
        return await client.call(self._bus, subject(self._bus.identity, operation), arguments, **options)

    def _pages(self, operation: str) -> AsyncIterator[Any]:
        return client.pages(self._bus, protocol.read(self._bus.identity, operation), **_options())


def _options() -> dict[str, Any]:
    absent = errors.Unavailable("no pipeline runs on this bus", hint="start one with `muster run pipeline`")
    return {"timeout_s": TIMEOUT_S, "waits": False, "absent": absent}
