"""The read model: queries of pages and REST, cached for all requests of the process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from muster.bus import api
from muster.bus.rpc import operations
from muster.core import errors, messages, units
from muster.core.reports import columns as reports_columns
from muster.manage import operations as manage_operations
from muster.message import listings
from muster.message import protocol as message_protocol
from muster.monitor import capacity_model
from muster.monitor import client as monitor_client
from muster.monitor import protocol as monitor_protocol
from muster.pipeline import client as pipeline_client
from muster.pipeline import operations as pipeline_operations
from muster.web.auth import sessions
from muster.web.data import (
    bus_feed,
    connections,
    context_queries,
    dispatcher_calls,
    event_log,
    history_reader,
    sql_runner,
    topology,
    turns,
)
from muster.web.data import rows as rows_
from muster.web.data.measurements import alert_spans, chart_queries, charts, latest_reports

if TYPE_CHECKING:
    from muster.pipeline.history import search

READ_S = bus_feed.READ_S
SCHEDULED_MAX = 1000  # the next messages
KEPT_S = 2.0
SAMPLED_S_MAX = 30.0  # older samples are not of now
LIMITED = ("manage",)  # data of clients that wait longer for their service if they are not told otherwise

T = TypeVar("T")


class ReadModel:
    def __init__(self, location: connections.DomainLocation, *, history: str, domain: str) -> None:
        self.feed = bus_feed.BusFeed(location, domain=domain)
        self.inform = context_queries.ContextQueries(self.feed)
        self._history = history
        self._sql = sql_runner.SqlRunner(history)
        self.long = turns.WorkTurns(turns.LONG_AT_ONCE, "searches")
        self.events = event_log.EventHistory(self)
        self.charts = chart_queries.ChartQueries(self)
        self.feed.samplers += [self._sample_queues, self._sample_nodes]

    async def _in_turn(self, read: Callable[..., T], *arguments: Any) -> T:
        async with self.long.turn():
            return await asyncio.to_thread(read, *arguments)

    async def read(self, declared: operations.ServiceOperation, **request: Any) -> Any:
        """The result of an operation of a service's table."""
        key = (declared.client, declared.method, *sorted(request.items()))
        limits = {"timeout_s": READ_S} if declared.data in LIMITED else {}
        return await self.feed.query(
            key, declared.data, KEPT_S, lambda bus: declared.call(bus, request, **limits)
        )

    # Reports

    def require_connection(self) -> None:
        """Raise if the domain is not connected: then missing data does not mean that there is none."""
        _ = self.feed.link.bus

    async def system(self) -> reports_columns.SystemReport | None:
        """The report of the pipeline if it is recent, else a report computed from the received batches."""
        system = await self._latest("system", "")
        if system is not None:
            assert isinstance(system, reports_columns.SystemReport)
            return system
        return await self.feed.cache.get("system made", "machines", 2.0, self.feed.machines.system)

    async def group(self, name: str) -> reports_columns.GroupReport:
        return await self._members("group", name)

    async def zone(self, name: str) -> reports_columns.GroupReport:
        return await self._members("zone", name)

    async def _members(self, scope: str, name: str) -> reports_columns.GroupReport:
        report: Any = await self._latest(scope, name)
        if report is None:
            report = await self.feed.cache.get(
                ("made", scope, name), "machines", 2.0, lambda: self.feed.machines.members(scope, name)
            )
        if report is None:
            raise errors.NotFound(f"no report of the {scope} {name!r}")
        assert isinstance(report, reports_columns.GroupReport)
        return report

    async def _latest(
        self, scope: str, name: str
    ) -> reports_columns.SystemReport | reports_columns.GroupReport | None:
        async def ask(bus: api.Bus) -> reports_columns.SystemReport | reports_columns.GroupReport | None:
            pipeline = pipeline_client.PipelineClient(bus)
            match scope:
                case "system":
                    return await pipeline.system()
                case "zone":
                    return await pipeline.zone(name)
            return await pipeline.group(name)

        report = await self.feed.query(("latest", scope, name), "reports", 5.0, ask)
        if report is None:
            return None
        window_ms = max(60_000, 5 * (report.to_ms - report.from_ms))
        return report if report.to_ms + window_ms > time.time() * 1000 else None

    async def node(self, machine: str) -> messages.NodeReport:
        node = await self.feed.machines.node(machine)
        if node is None:
            raise errors.NotFound(f"no report of the machine {machine!r}", hint="search the history")
        return node

    async def report_at(self, scope: str, name: str, at_ms: int, window_s: float) -> msgspec.Struct:
        """A past report: of the pipeline if it is still stored, else computed from the stream."""

        async def ask(bus: api.Bus) -> msgspec.Struct | None:
            if scope != "node":
                kind: Any = reports_columns.SystemReport if scope == "system" else reports_columns.GroupReport
                made = [
                    messages.decode(data, kind) async for data in monitor_client.results(bus, scope, name)
                ]
                fitting = [
                    candidate for candidate in made if at_ms - window_s * 1000 <= candidate.to_ms <= at_ms
                ]
                if fitting:
                    latest: msgspec.Struct = max(fitting, key=lambda candidate: candidate.to_ms)
                    return latest
            async with self.long.turn():
                then = latest_reports.LatestReports()
                for batch in await monitor_client.recent(bus, window_s=window_s, at_ms=at_ms):
                    then.add(batch.batch)
                match scope:
                    case "system":
                        return await then.system()
                    case "group":
                        return await then.members("group", name)
                return await then.node(name)

        report = await self.feed.query(("at", scope, name, at_ms, window_s), "past", 60.0, ask)
        if report is None:
            raise errors.NotFound(
                f"no report of the {scope} {name} in the {units.rounded_duration(window_s)} before this time"
            )
        return report

    # Alerts and the pipeline

    async def alerts(self) -> list[messages.Alert]:
        """Alerts of the pipeline and of budgets, the most severe first."""
        alerts: list[messages.Alert] = []
        search_ = (
            self.read(pipeline_operations.ALERTS),
            self._budget_alerts(),
        )
        for answer in await asyncio.gather(*search_, return_exceptions=True):
            match answer:
                case errors.NotConnected() | errors.TimedOut():
                    raise answer  # a missing reply does not mean that there are no alerts
                case errors.Unavailable():
                    pass  # without a pipeline or a domain process there are no alerts of it
                case BaseException():
                    raise answer
                case _:
                    alerts += answer
        return sorted(alerts, key=alert_order)

    async def _budget_alerts(self) -> list[messages.Alert]:
        return await self.feed.ask_domain("alerts", lambda domain: domain.alerts(), "alerts")

    async def alert_spans(self) -> list[alert_spans.AlertSpan]:
        """When the alerts of the last changes fired, the newest first."""

        async def made() -> list[alert_spans.AlertSpan]:
            return alert_spans.spans(alert for _, alert in await self.events.alert_log())

        return await self.feed.cache.get("alert spans", "alerts", event_log.ALERTS_KEPT_S, made)

    async def machine_summary(self) -> rows_.MachineSummary:
        machines = self.feed.machines
        return await self.feed.cache.get("machine summary", "machines", 2.0, machines.summary)

    async def overview(self) -> rows_.FleetOverview:
        missing: dict[str, str] = {}

        async def known(name: str, ask: Awaitable[T]) -> T | None:
            try:
                return await ask
            except errors.Unavailable as error:
                missing[name] = error.message
                return None

        alerts = await known("alerts", self.alerts())
        firing = [alert for alert in alerts or () if alert.state is messages.AlertState.FIRING]
        counts = {
            severity.value: sum(alert.severity is severity for alert in firing)
            for severity in messages.Severity
        }
        sampled = self.feed.samples.rows("domain", "", "messages")[-1:]
        return rows_.FleetOverview(
            domain=self.feed.domain,
            connected=self.feed.link.is_up,
            machines=await self.machine_summary(),
            reports_per_s=self.feed.machines.rows_per_s(),
            messages_per_s=next(
                (rates["in"] for at_s, rates in sampled if at_s > time.time() - SAMPLED_S_MAX), None
            ),
            resources=await known("resources", self.read(manage_operations.SUMMARY)),
            alerts=None if alerts is None else counts,
            missing=missing,
        )

    async def topology(self) -> topology.DomainTopology:
        missing: dict[str, str] = {}

        async def known(name: str, ask: Awaitable[T], otherwise: T) -> T:
            try:
                return await ask
            except errors.MusterError as error:  # a process of another version refuses what it does not know
                missing[name] = error.message
                return otherwise

        progress, brokers, links, producers, managers, nodes, components, summary = await asyncio.gather(
            known("pipeline", self.read(pipeline_operations.PROGRESS), None),
            known("brokers", self.feed.brokers(), []),
            known("links", self.feed.links(), []),
            known("channels", self.producers(), []),
            known("managers", self.read(manage_operations.MANAGERS), []),
            known("information nodes", self.inform.information_nodes(), []),
            known("components", self.feed.components(), []),
            self.machine_summary(),
        )
        missing.pop("pipeline", None)  # none runs
        return topology.topology(
            brokers=brokers,
            links=links,
            producers=producers,
            managers=managers,
            nodes=nodes,
            components=components,
            machines=summary.machines,
            pipeline=progress.state if progress is not None else "",
            missing=missing,
        )

    # History

    async def history(
        self,
        kind: str,
        where: str,
        *,
        from_ms: int | None,
        to_ms: int | None,
        columns: tuple[str, ...] = (),
        limit: int = 100,
        cursor: str = "",
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Rows, the newest first, and the cursor of the next page."""
        from muster.pipeline.history import search

        query = search.HistorySearch(kind, where or "TRUE", from_ms, to_ms, columns)
        limit = min(limit, history_reader.ROWS_MAX)
        return await self.feed.cache.get(
            ("history", query, limit, cursor),
            "history",
            5.0,
            lambda: self._in_turn(history_reader.read_page, self._history, query, limit, cursor),
        )

    async def series(self, query: search.HistorySearch, metric: str, kept_s: float) -> list[charts.Row]:
        """The stored rows of a chart."""
        return await self.feed.cache.get(
            ("series", query, metric),
            "history",
            kept_s,
            lambda: self._in_turn(history_reader.series, self._history, query, metric),
        )

    async def sql(self, text: str, *, rows: int, as_of_ms: int | None = None) -> sql_runner.SqlRows:
        """The result of a query over the tables of the history."""
        return await self.feed.cache.get(
            ("sql", text, rows, as_of_ms),
            "history",
            30.0,
            lambda: self._sql.run(text, rows=rows, as_of_ms=as_of_ms),
        )

    # Capacity

    async def producers(self) -> list[monitor_protocol.ReportProducer]:
        return list(await self.feed.query("producers", "producers", 10.0, monitor_client.find))

    async def capacity(self) -> rows_.CapacityView:
        """The worst case of the model and the measurements of the last minutes."""
        producers = await self.producers()
        seconds = self.feed.machines.seconds()
        active = [level for level, at_s in self.feed.machines.levels.items() if time.time() - at_s < 120]
        holds_s = dict.fromkeys(range(1, 1 + max(active, default=0)), 0.0)
        for producer in producers:
            holds_s[producer.level] = max(holds_s.get(producer.level, 0.0), producer.hold_s)
        predicted_s = sum(holds_s.values())
        recent = [second for second in seconds if second.at_s > time.time() - 120]
        view = rows_.CapacityView(
            levels=len(holds_s),
            channels=list(producers),
            predicted_max_s=round(predicted_s, 3),
            measured=[
                rows_.ArrivalRow(
                    at_ms=second.at_s * 1000, rows=second.rows, p50_s=second.p50_s, max_s=second.max_s
                )
                for second in seconds
            ],
        )
        if not recent or not predicted_s:
            return view
        check = capacity_model.check(predicted_s, [second.max_s for second in recent])
        return msgspec.structs.replace(
            view,
            measured_max_s=round(check.measured_s, 3),
            ratio=round(check.ratio, 3),
            within_20_percent=check.holds,
        )

    # Messages

    async def dispatcher(
        self, key: Hashable, request: message_protocol.DispatcherRequest
    ) -> message_protocol.DispatcherReply:
        async def ask(bus: api.Bus) -> message_protocol.DispatcherReply:
            return await dispatcher_calls.call(bus, message_protocol.read_subject, request)

        return await self.feed.query(("message", key), "message", 1.0, ask)

    async def queues(self, person: sessions.LoginSession) -> list[listings.QueueRow]:
        queues = (await self.dispatcher("queues", message_protocol.ListQueues())).queues
        return [row for row in queues if dispatcher_calls.may_browse(person, row.queue)]

    async def _sample_queues(self, now_s: float) -> None:
        for row in (await self.dispatcher("queues", message_protocol.ListQueues())).queues:
            values = {
                "waiting": row.depth,
                "in flight": row.in_flight,
                "in": row.in_per_s,
                "out": row.out_per_s,
            }
            self.feed.samples.add("queue", row.queue, now_s, values)

    async def _sample_nodes(self, now_s: float) -> None:
        for node in await self.inform.information_nodes():
            load = node.load
            values = {
                "permanent": load.contexts,
                "temporary": node.temporary,
                "messages": load.messages_per_s,
            }
            self.feed.samples.add("node", node.node, now_s, values)

    async def scheduled(
        self, person: sessions.LoginSession, destination: str | None
    ) -> list[listings.ScheduledRow]:
        request = message_protocol.ListScheduled(destination, limit=SCHEDULED_MAX)
        reply = await self.dispatcher(("scheduled", destination), request)
        return dispatcher_calls.visible_scheduled(person, reply.scheduled)

    async def browse(
        self, person: sessions.LoginSession, queue: str, *, selector: str | None, after: int, limit: int
    ) -> tuple[list[rows_.BrowsedMessage], int | None]:
        dispatcher_calls.check_browse(person, queue)
        request = message_protocol.BrowseQueue(queue, selector or None, after, limit, must_exist=True)
        page = await self.dispatcher(("browse", queue, selector, after, limit), request)
        rows = [dispatcher_calls.browsed(delivery, queue) for delivery in page.messages]
        last = page.continue_after
        if not last:
            return rows, None
        following = message_protocol.BrowseQueue(queue, selector or None, last, 1)
        rest = await self.dispatcher(("browse", queue, selector, last, 1), following)
        return rows, last if rest.messages or rest.continue_after else None


_SEVERITY = {messages.Severity.CRITICAL: 0, messages.Severity.WARNING: 1, messages.Severity.INFO: 2}


def alert_order(alert: messages.Alert) -> tuple[int, bool, int, str, str]:
    """The most severe first, then those that are not only pending, then the newest."""
    pending = alert.state is messages.AlertState.PENDING
    return _SEVERITY[alert.severity], pending, -alert.since_ms, alert.rule, alert.about
