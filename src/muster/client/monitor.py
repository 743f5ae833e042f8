"""`m.alerts` and `m.reports`: the results of the pipeline, and what sensors report."""

from __future__ import annotations

from collections.abc import AsyncIterator

from muster.bus import api
from muster.client import rows
from muster.core import messages
from muster.core.reports import columns
from muster.pipeline import client, protocol
from muster.pipeline.alerts import tracker


class AsyncAlerts:
    """The alerts of the pipeline; as `muster alert`."""

    def __init__(self, bus: api.Bus) -> None:
        self._client = client.PipelineClient(bus)

    async def list(self) -> rows.Rows[messages.Alert]:
        """All unresolved alerts, the most urgent first."""
        return rows.Rows(await self._client.alerts())

    async def watch(self) -> AsyncIterator[messages.Alert]:
        """Every change of an alert from now on, without end."""
        async for _, alert in self._client.follow_alerts():
            yield alert

    async def acknowledge(self, rule: str, about: str) -> None:
        """Acknowledge the alert of this rule about this machine or group."""
        await self._client.acknowledge(rule, about)

    async def resolve(self, rule: str, about: str) -> None:
        """End an alert; it is raised again if its rule is evaluated and still true."""
        await self._client.resolve(rule, about)

    async def silence(self, covers: str, *, for_s: float, reason: str = "") -> tracker.Silence:
        """Suppress the notifications of the alerts that match the predicate ``covers``."""
        return await self._client.silence(covers, for_s=for_s, reason=reason)


class AsyncReports:
    """The latest reports; as `muster report`."""

    def __init__(self, bus: api.Bus) -> None:
        self._bus = bus
        self._client = client.PipelineClient(bus)

    async def system(self) -> columns.SystemReport | None:
        """The latest report about the complete fleet; None before the first one."""
        return await self._client.system()

    async def group(self, name: str) -> columns.GroupReport | None:
        """The latest report about a group; None before the first one."""
        return await self._client.group(name)

    async def zone(self, name: str) -> columns.GroupReport | None:
        """The latest report about a zone; None before the first one."""
        return await self._client.zone(name)

    async def top(self) -> protocol.TopNodes | None:
        """The machines with the highest values."""
        return await self._client.top()

    async def forget(self, *machines: str, where: str = "") -> None:
        """Remove machines from the fleet and end their alerts: by name, or by a predicate."""
        await self._client.forget(machines, where=where)

    async def nodes(self, *, window_s: float = 60.0) -> rows.Rows[rows.Record]:
        """The latest report of each machine in the last ``window_s``."""
        from muster.monitor import client as monitor_client
        from muster.monitor import live_view

        recent = await monitor_client.recent(self._bus, window_s=window_s)
        return rows.Rows(table=live_view.latest(reports.batch for reports in recent))
