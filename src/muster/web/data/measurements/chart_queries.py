"""The data of charts, by what they are about: from memory for the last minutes, from the history before."""

from __future__ import annotations

import asyncio
import time
import typing
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from muster.core import clock, errors
from muster.core.reports import columns
from muster.manage import operations
from muster.web.auth import sessions
from muster.web.data import dispatcher_calls, history_reader
from muster.web.data.measurements import alert_spans, charts, latest_reports, recent_reports, samples
from muster.web.data.measurements.charts import Row

if TYPE_CHECKING:
    from muster.web.data import read_model

STEP_S_MIN = 5.0  # of the mean of many machines: shorter than most reporting periods, it would be uneven
REPORTS_KEPT_S = 1.0
AGES_STEP_S = 10  # within a second a single batch may arrive
SAMPLED = ("channel", "queue", "node", "broker")
MEMBERS = ("fleet", "group", "zone")
SCOPES = {"fleet": "system", "group": "group", "zone": "zone", "machine": "node"}
METRICS_MAX = 16  # charts of a thing
OWN_AGENT, OWN_MACHINE = "local", "sensor"  # of the machine of the domain; elsewhere both have one name
BATCHES = {"batch_s": "batch", "rows_s": "reports", "lag_s": "age of the newest"}
Kind = Literal[
    "fleet", "group", "zone", "machine", "service", "resource",
    "domain", "broker", "pipeline", "channel", "queue", "node", "context",
]  # fmt: skip
UNITS = {"rows_s": "/s", "messages": "/s", "rates": "/s", "reports": "/s", "age": " s", "distance": " ms"}


class ChartQueries:
    def __init__(self, source: read_model.ReadModel) -> None:
        self._source = source
        self._feed = source.feed

    async def chart(
        self,
        person: sessions.LoginSession,
        kind: str,
        name: str,
        metric: str,
        *,
        from_ms: int,
        to_ms: int,
        points: int = 600,
    ) -> charts.Chart:
        """`errors.NotFound` for a kind of thing that has no charts."""
        if kind == "queue" and not dispatcher_calls.may_browse(person, name):
            raise errors.Forbidden(f"{person.name} may not browse the queue {name!r}")
        if kind not in typing.get_args(Kind):
            raise errors.NotFound(f"there are no charts of a {kind!r}")
        from_s, to_s = from_ms / 1000, to_ms / 1000
        step_s = max(STEP_S_MIN, (to_s - from_s) / points)
        if kind == "context":
            rows = await self._context_history(person, name, metric)
        elif kind in SAMPLED:
            rows = self._feed.samples.rows(kind, name, metric)
        elif kind in MEMBERS:
            rows = await self._members(SCOPES[kind], name, metric, from_s, step_s)
        else:
            rows = list(await getattr(self, f"_{kind}")(name, metric, from_s, to_s, step_s))
        unit = UNITS.get(metric, charts.unit(metric))
        if kind in SCOPES and metric not in columns.STANDARD_METRICS and not unit:
            shares = charts.in_percent(rows)
            rows, unit = (rows, unit) if shares is None else (shares, " %")
        made = charts.chart(metric, rows, from_s=from_s, to_s=to_s, points=points, unit=unit)
        threshold, marks = await self._alerts(kind, name, metric, from_ms, to_ms)
        if threshold is not None and unit == " %" and not metric.endswith("_percent"):
            threshold *= 100
        if kind == "domain" and metric == "age":
            threshold = (await self._source.capacity()).predicted_max_s or None
        return msgspec.structs.replace(made, threshold=threshold, marks=marks)

    async def charted(self, kind: str, name: str) -> list[charts.ChartedThing]:
        """What has charts of this kind: the thing with the name, or all. Of a machine, its services too.

        Metrics specific to this fleet come first.
        """
        names: dict[str, list[str]] = {}
        match kind:
            case "fleet":
                measured = {metric for _, metrics in self._feed.systems for metric in metrics}
                names[""] = _ordered(measured, latest_reports.METRICS) or ["cpu_percent"]
            case "group" | "zone":
                report = await (self._source.group(name) if kind == "group" else self._source.zone(name))
                names[name] = _ordered(report.metrics, latest_reports.METRICS)
            case "machine":
                return await self._charted_machine(name)
            case "resource":
                return await self._charted_resource(name)
            case "domain":
                names[""] = ["age", "messages"]
            case "pipeline":
                names[""] = list(BATCHES)
            case _ if kind in SAMPLED:
                metrics = [metric for sampled, metric in samples.LINES if sampled == kind]
                names = dict.fromkeys(self._feed.samples.names(kind), metrics)
        return [
            charts.ChartedThing(kind=kind, name=own, metrics=metrics[:METRICS_MAX])
            for own, metrics in names.items()
            if name in ("", own)
        ]

    async def _charted_machine(self, name: str) -> list[charts.ChartedThing]:
        latest = await self._source.node(name)
        metrics = _ordered(latest.metrics, columns.STANDARD_METRICS)[:METRICS_MAX]
        return [
            charts.ChartedThing(kind="machine", name=name, metrics=metrics),
            *(
                charts.ChartedThing(
                    kind="service", name=f"{name}/{service.name}", metrics=sorted(service.metrics)[:4]
                )
                for service in latest.services[:METRICS_MAX]
            ),
        ]

    async def _charted_resource(self, name: str) -> list[charts.ChartedThing]:
        """Its machine, if it is not measured itself."""
        details: Any = await self._source.read(operations.DESCRIBE, name=name)
        machine = await self.machine_of(details.agent)
        own = sorted((await self._reports(machine)).service(name))
        if own:
            return [charts.ChartedThing(kind="resource", name=name, metrics=own)]
        if await self._feed.machines.node(machine) is None:
            machine = name  # of a fleet in which each machine is a resource
        if await self._feed.machines.node(machine) is None:
            return []
        return [charts.ChartedThing(kind="machine", name=machine, metrics=["cpu_percent", "memory_percent"])]

    async def _alerts(
        self, kind: str, name: str, metric: str, from_ms: int, to_ms: int
    ) -> tuple[float | None, list[charts.ChartMark]]:
        """The threshold of the rules about this metric, and when they held."""
        scope = SCOPES.get(kind)
        if scope is None:
            return None, []
        about = scope if scope == "system" else f"{scope}:{name}"
        threshold, marks = None, []
        for span in await self._source.alert_spans():
            limit = alert_spans.limit_of(span.condition, metric)
            if span.about != about or limit is None:
                continue
            threshold = limit
            if span.from_ms < to_ms and (span.to_ms or to_ms) > from_ms:
                mark = charts.ChartMark(
                    from_ms=span.from_ms, to_ms=span.to_ms, severity=span.severity, text=span.rule
                )
                marks.append(mark)
        return threshold, marks

    # Machines

    async def _reports(self, machine: str) -> recent_reports.MachineReports:
        """Those in memory: read once for all charts of the machine's page."""
        of_machine = self._feed.recent.of_machine
        return await self._feed.cache.get(
            ("reports", machine), "charts", REPORTS_KEPT_S, lambda: asyncio.to_thread(of_machine, machine)
        )

    async def _machine(self, name: str, metric: str, from_s: float, to_s: float, _: float) -> list[Row]:
        rows = (await self._reports(name)).metric(metric)
        before_s = rows[0][0] if rows else (to_s // 60 + 1) * 60  # the same for a minute: it is cached
        if from_s >= before_s - STEP_S_MIN:
            return rows
        from_ms, to_ms = int(from_s // 60) * 60_000, int(before_s * 1000)
        query = history_reader.machine_query(name, metric, from_ms, to_ms)
        return [*await self._source.series(query, metric, 60.0), *rows]

    async def _service(self, name: str, metric: str, *_: float) -> list[Row]:
        machine, _slash, service = name.partition("/")
        return (await self._reports(machine)).service(service).get(metric, [])

    async def _members(self, scope: str, name: str, metric: str, from_s: float, step_s: float) -> list[Row]:
        recent = self._feed.recent
        column = scope if name else "machine"
        rows = await self._feed.cache.get(
            ("members", column, name, metric, round(step_s)),
            "charts",
            min(step_s, 10.0),
            lambda: asyncio.to_thread(recent.members, column, name, metric, 0.0, step_s),
        )
        before_s = rows[0][0] if rows else time.time()
        if from_s >= before_s - step_s:
            return list(rows)
        query = history_reader.members_query(scope, name, metric, int(from_s // 10 * 10_000))
        older = await self._source.series(query, metric, 10.0)
        return [*(row for row in older if row[0] < before_s), *rows]

    # The domain

    async def _domain(self, _: str, metric: str, *__: float) -> list[Row]:
        if metric != "age":
            return self._feed.samples.rows("domain", "", metric)
        seconds = latest_reports.merged(self._feed.machines.seconds(), AGES_STEP_S)
        complete_s = time.time() - AGES_STEP_S
        return [
            (second.at_s, {"median": second.p50_s, "oldest": second.max_s})
            for second in seconds
            if second.at_s <= complete_s
        ]

    async def _pipeline(self, _: str, metric: str, *__: float) -> list[Row]:
        if metric not in BATCHES:
            raise _no_metric(metric)
        return [
            (batch.at_ms / 1000, {BATCHES[metric]: getattr(batch, metric)}) for batch in self._feed.batches
        ]

    async def _context_history(self, person: sessions.LoginSession, key: str, metric: str) -> list[Row]:
        """The number of changes of a context, or its values if they are numbers."""
        page = await self._source.inform.context_history(person, key, after=0, limit=None)
        rows: list[Row] = []
        for number, change in enumerate(page.items, 1):
            try:
                value = float(number if metric == "changes" else change.value or "nan")
            except ValueError:
                continue
            rows.append((clock.wall_ms_of(change.stamp) / 1000, {metric: value}))
        return rows

    async def _resource(self, name: str, metric: str, from_s: float, to_s: float, step_s: float) -> list[Row]:
        """What the sensor of its machine measures of the service with its name."""
        details: Any = await self._source.read(operations.DESCRIBE, name=name)
        machine = await self.machine_of(details.agent)
        return await self._service(f"{machine}/{name}", metric)

    async def machine_of(self, agent: str) -> str:
        """The machine that reports for an agent."""
        known = await self._feed.machines.node(agent)
        return OWN_MACHINE if known is None and agent == OWN_AGENT else agent


def agents_of(machine: str) -> tuple[str, ...]:
    """The agents that may run on a machine."""
    return (machine, OWN_AGENT) if machine == OWN_MACHINE else (machine,)


def _ordered(measured: Iterable[str], standard: Iterable[str]) -> list[str]:
    """The metrics specific to this fleet, and the standard ones that are measured."""
    names = set(measured)
    return [*sorted(names - {*columns.STANDARD_METRICS}), *(name for name in standard if name in names)]


def _no_metric(metric: str) -> errors.NotFound:
    return errors.NotFound(f"there is no chart of {metric!r}")
