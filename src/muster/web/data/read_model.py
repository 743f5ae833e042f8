"""All that is read: one copy of what the bus says, for every page and every request of this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from muster.bus import api
from muster.bus.rpc import error_replies as rpc_faults
from muster.bus.rpc import origin
from muster.core import errors, messages
from muster.core.reports import columns as reports_columns
from muster.inform import client as inform_client
from muster.inform import protocol as inform_protocol
from muster.inform import service_entries
from muster.manage import client as manage_client
from muster.message import protocol as message_protocol
from muster.monitor import capacity_model
from muster.monitor import client as monitor_client
from muster.notify import protocol as notify_protocol
from muster.notify import queries
from muster.pipeline import client as pipeline_client
from muster.pipeline import protocol as pipeline_protocol
from muster.trust.permissions import roles
from muster.web.auth import sessions
from muster.web.data import bus_feed, connections, history_reader, latest_reports
from muster.web.data import rows as rows_

READ_S = bus_feed.READ_S

T = TypeVar("T")


class ReadModel(bus_feed.BusFeed):
    def __init__(self, door: connections.DomainLocation, *, history: Path, domain: str) -> None:
        super().__init__(door, domain=domain)
        self._history = history

    # Management

    def _manage(self, bus: api.Bus) -> manage_client.ManageClient:
        return manage_client.ManageClient(bus, timeout_s=READ_S)

    async def summary(self) -> dict[str, Any]:
        return await self._ask("summary", "manage", 5.0, lambda bus: self._manage(bus).summary())

    async def resources(
        self, *, where: str = "", after: str = "", limit: int = 50
    ) -> manage_client.ResourcePage:
        return await self._ask(
            ("resources", where, after, limit),
            "manage",
            5.0,
            lambda bus: self._manage(bus).enumerate(where=where, after=after, limit=limit),
        )

    async def resource(self, name: str) -> dict[str, Any]:
        return await self._ask(
            ("resource", name), "manage", 2.0, lambda bus: self._manage(bus).describe(name)
        )

    async def managers(self) -> list[dict[str, Any]]:
        return await self._ask("managers", "manage", 2.0, lambda bus: self._manage(bus).managers())

    async def agents(self) -> list[dict[str, Any]]:
        return await self._ask("agents", "manage", 5.0, lambda bus: self._manage(bus).agents())

    async def rollouts(self) -> list[dict[str, Any]]:
        return await self._ask("rollouts", "manage", 2.0, lambda bus: self._manage(bus).rollouts())

    # Reports

    def must_hear(self) -> None:
        """Raises where the domain is away: that nothing was heard then does not mean that nothing is."""
        _ = self.link.bus

    async def system(self) -> reports_columns.SystemReport | None:
        """The pipeline's, as long as it is not old; else made from the reports that came by."""
        found = await self._latest("system", "")
        if found is not None:
            assert isinstance(found, reports_columns.SystemReport)
            return found
        return await self.cache.get("system made", "machines", 2.0, self.machines.system)

    async def group(self, name: str) -> reports_columns.GroupReport:
        found: Any = await self._latest("group", name)
        if found is None:
            found = await self.machines.group(name)
        if found is None:
            raise errors.NotFound(f"no report of the group {name!r}")
        assert isinstance(found, reports_columns.GroupReport)
        return found

    async def _latest(
        self, scope: str, name: str
    ) -> reports_columns.SystemReport | reports_columns.GroupReport | None:
        async def ask(bus: api.Bus) -> reports_columns.SystemReport | reports_columns.GroupReport | None:
            pipeline = pipeline_client.PipelineClient(bus)
            return await (pipeline.system() if scope == "system" else pipeline.group(name))

        found = await self._ask(("latest", scope, name), "reports", 5.0, ask)
        if found is None:
            return None
        window_ms = max(60_000, 5 * (found.to_ms - found.from_ms))
        return found if found.to_ms + window_ms > time.time() * 1000 else None

    async def node(self, machine: str) -> messages.NodeReport:
        found = await self.machines.node(machine)
        if found is None:
            raise errors.NotFound(f"no report of the machine {machine!r}", hint="look into the history")
        return found

    async def report_at(self, scope: str, name: str, at_ms: int, window_s: float) -> msgspec.Struct:
        """As it was then: the pipeline's report if it is still kept, else made from what the stream has."""

        async def ask(bus: api.Bus) -> msgspec.Struct | None:
            if scope != "node":
                kind: Any = reports_columns.SystemReport if scope == "system" else reports_columns.GroupReport
                made = [
                    messages.decode(data, kind) async for data in monitor_client.results(bus, scope, name)
                ]
                fitting = [one for one in made if at_ms - window_s * 1000 <= one.to_ms <= at_ms]
                if fitting:
                    found: msgspec.Struct = max(fitting, key=lambda one: one.to_ms)
                    return found
            then = latest_reports.LatestReports()
            for one in await monitor_client.recent(bus, window_s=window_s, at_ms=at_ms):
                then.add(one.batch)
            match scope:
                case "system":
                    return await then.system()
                case "group":
                    return await then.group(name)
            return await then.node(name)

        found = await self._ask(("at", scope, name, at_ms, window_s), "past", 60.0, ask)
        if found is None:
            raise errors.NotFound(f"no report of the {scope} {name} in the {window_s:g} s before then")
        return found

    # Alerts and the pipeline

    async def alerts(self) -> list[messages.Alert]:
        """Those of the pipeline, and of budgets; the worst first."""
        found: list[messages.Alert] = []
        asked = (
            self._ask("alerts", "alerts", 5.0, lambda bus: pipeline_client.PipelineClient(bus).alerts()),
            self._budget_alerts(),
        )
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            match answer:
                case errors.NotConnected() | errors.TimedOut():
                    raise answer  # no answer does not mean that all is well
                case errors.Unavailable():
                    pass  # no pipeline, or no process of the domain: then it has no alerts
                case BaseException():
                    raise answer
                case _:
                    found += answer
        return sorted(found, key=alert_order)

    async def _budget_alerts(self) -> list[messages.Alert]:
        return msgspec.convert(await self._control("alerts", "alerts"), list[messages.Alert])

    async def judged(self) -> bool:
        """Whether there is a pipeline, which judges rules."""
        try:
            await self.progress()
        except errors.Unavailable:
            return False
        return True

    async def silences(self) -> list[dict[str, Any]]:
        found = await self._ask(
            "silences", "alerts", 5.0, lambda bus: pipeline_client.PipelineClient(bus).silences()
        )
        return [msgspec.to_builtins(one) for one in found]

    async def progress(self) -> pipeline_protocol.BatchProgress:
        return await self._ask(
            "progress", "pipeline", 2.0, lambda bus: pipeline_client.PipelineClient(bus).progress()
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
        """The newest first, and the cursor of the following page."""
        from muster.pipeline.history import search

        asked = search.HistorySearch(kind, where or "TRUE", from_ms, to_ms, columns)
        limit = min(limit, history_reader.ROWS_MAX)
        return await self.cache.get(
            ("history", asked, limit, cursor),
            "history",
            5.0,
            lambda: asyncio.to_thread(history_reader.read_page, self._history, asked, limit, cursor),
        )

    async def plot(
        self, scope: str, name: str, metric: str, *, from_ms: int, points: int = 240
    ) -> list[dict[str, Any]]:
        """A metric of a scope over time, thinned: at most ``points`` rows, oldest first."""
        asked = history_reader.rollup_query(scope, name, metric, from_ms)
        return await self.cache.get(
            ("plot", asked, points),
            "history",
            10.0,
            lambda: asyncio.to_thread(history_reader.plot, self._history, asked, points),
        )

    # Capacity

    async def capacity(self) -> dict[str, Any]:
        """The model's worst case against what was measured, over the last minutes."""
        producers = await self._ask("producers", "producers", 10.0, monitor_client.find)
        seconds = self.machines.seconds()
        heard = [level for level, at_s in self.machines.levels.items() if time.time() - at_s < 120]
        holds_s = dict.fromkeys(range(1, 1 + max(heard, default=0)), 0.0)
        for producer in producers:
            holds_s[producer.level] = max(holds_s.get(producer.level, 0.0), producer.hold_s)
        predicted_s = sum(holds_s.values())
        recent = [one for one in seconds if one.at_s > time.time() - 120]
        found: dict[str, Any] = {
            "levels": len(holds_s),
            "channels": [msgspec.structs.asdict(producer) for producer in producers],
            "predicted_max_s": round(predicted_s, 3),
            "measured": [
                {"at_ms": one.at_s * 1000, "rows": one.rows, "p50_s": one.p50_s, "max_s": one.max_s}
                for one in seconds
            ],
            "measured_max_s": None,
            "ratio": None,
            "within_20_percent": None,
        }
        if recent and predicted_s:
            check = capacity_model.check(predicted_s, [one.max_s for one in recent])
            found |= {
                "measured_max_s": round(check.measured_s, 3),
                "ratio": round(check.ratio, 3),
                "within_20_percent": check.holds,
            }
        return found

    # Contexts

    def _inform(self, bus: api.Bus) -> inform_client.InformClient:
        return inform_client.InformClient(bus, timeout_s=READ_S)

    async def information_nodes(self) -> list[dict[str, Any]]:
        found = await self._ask("nodes", "inform", 2.0, lambda bus: self._inform(bus).nodes())
        return [{**msgspec.structs.asdict(one), "load": msgspec.structs.asdict(one.load)} for one in found]

    async def _as(self, person: sessions.LoginSession) -> api.Bus:
        operates = person.role.covers(sessions.WebRole.OPERATOR)
        role = roles.Role.OPERATOR if operates else roles.Role.VIEWER
        return await self.link.as_person(person.name, role)

    async def _read(
        self, person: sessions.LoginSession, ask: Callable[[inform_client.InformClient], Awaitable[T]]
    ) -> T:
        """As the person, and anew: who may read a context, and how old it is, is told where it is kept."""
        try:
            async with asyncio.timeout(READ_S * 2):
                return await ask(self._inform(await self._as(person)))
        except TimeoutError as error:
            raise errors.TimedOut("no answer in time") from error

    async def contexts(
        self, person: sessions.LoginSession, where: str, *, limit: int = 100, after: str = ""
    ) -> dict[str, Any]:
        found = await self._read(
            person, lambda inform: inform.find(where or "TRUE", limit=limit, after=after, within_s=READ_S)
        )
        return _page([rows_.context_row(one) for one in found.contexts], found)

    async def context(
        self, person: sessions.LoginSession, key: str, *, max_staleness_s: float | None = None
    ) -> inform_protocol.Context:
        return await self._read(person, lambda inform: inform.get(key, max_staleness_s=max_staleness_s))

    async def watch(
        self, person: sessions.LoginSession, key: str, *, after_version: int
    ) -> AsyncIterator[inform_protocol.ContextChange]:
        async def connected() -> inform_client.InformClient:  # one that is in use: idle ones are closed
            return self._inform(await self._as(person))

        async for change in inform_client.watch(connected, key, after_version=after_version):
            yield change

    async def copies(self, key: str) -> list[dict[str, Any]]:
        found = await self._ask(("copies", key), "inform", 1.0, lambda bus: self._inform(bus).where(key))
        return [msgspec.structs.asdict(one) for one in found]

    async def context_history(
        self, person: sessions.LoginSession, key: str, *, after: int, limit: int | None
    ) -> dict[str, Any]:
        found = await self._read(person, lambda inform: inform.history(key, after_version=after))
        some = found.changes[:limit]
        rows = []
        for one in some:
            row = {**msgspec.structs.asdict(one)}
            value = row.pop("value")
            rows.append({**row, **({} if value is None else rows_.decode_value(value))})
        more = len(found.changes) > len(some)
        return {"items": rows, "complete": found.complete, "next": some[-1].version if more else None}

    async def entries(
        self, person: sessions.LoginSession, where: str, *, limit: int, after: str
    ) -> dict[str, Any]:
        found = await self._read(
            person,
            lambda inform: service_entries.ServiceEntries(inform).search(
                where, limit=limit, after=after, within_s=READ_S
            ),
        )
        rows = [
            {**rows_.entry_row(service_entries.from_context(one)), "source": one.source}
            for one in found.contexts
        ]
        return _page(rows, found)

    async def entry(self, person: sessions.LoginSession, id: str) -> dict[str, Any]:
        return rows_.entry_row(
            await self._read(person, lambda inform: service_entries.ServiceEntries(inform).get(id))
        )

    # Notification

    async def receivers(self, where: str, *, prefix: str = "", after: str = "", limit: int) -> dict[str, Any]:
        found = await self._ask(
            ("receivers", where, prefix, after, limit),
            "notify",
            2.0,
            lambda bus: queries.list_receivers(bus, where=where, prefix=prefix, after=after, limit=limit),
        )
        return {"count": found.count, "items": found.receivers, "next": found.next}

    async def who(
        self, address: str, *, event: notify_protocol.SendEvent | None, sender: str, limit: int
    ) -> dict[str, Any]:
        key = ("who", address, sender, limit, event and (event.type, str(event.content)))
        found = await self._ask(
            key,
            "notify",
            1.0,
            lambda bus: queries.match_receivers(bus, address, event=event, sender=sender, limit=limit),
        )
        return {
            "count": found.count,
            "receivers": [one["receiver"] for one in found.receivers],
            "near": found.near[:limit],
        }

    async def explain(
        self, event: notify_protocol.SendEvent, *, sender: str, receiver: str
    ) -> dict[str, Any]:
        return await self._ask(
            ("explain", event.address, event.type, str(event.content), sender, receiver),
            "notify",
            1.0,
            lambda bus: queries.explain(bus, event, sender=sender, receiver=receiver),
        )

    async def check_policy(self, policy: str) -> dict[str, Any]:
        return await self._ask(("check", policy), "notify", 5.0, lambda bus: queries.check(bus, policy))

    async def models(self) -> list[dict[str, Any]]:
        return await self._ask("models", "notify", 5.0, queries.defined)

    # Messages

    async def _dispatcher(
        self, key: Hashable, asked: message_protocol.DispatcherRequest
    ) -> message_protocol.DispatcherReply:
        async def ask(bus: api.Bus) -> message_protocol.DispatcherReply:
            return await call_dispatcher(bus, message_protocol.read_subject(bus.identity), asked)

        return await self._ask(("message", key), "message", 1.0, ask)

    async def queues(self) -> list[dict[str, Any]]:
        return (await self._dispatcher("queues", message_protocol.ListQueues())).rows

    async def subscriptions(self) -> list[dict[str, Any]]:
        return (await self._dispatcher("subscriptions", message_protocol.ListSubscriptions())).rows

    async def browse(
        self, queue: str, *, selector: str | None, after: int, limit: int
    ) -> tuple[list[dict[str, Any]], int | None]:
        asked = message_protocol.BrowseQueue(queue, selector or None, after, limit)
        found = (await self._dispatcher(("browse", queue, selector, after, limit), asked)).messages
        rows = [rows_.message_row(one, queue) for one in found]
        if not found:
            return rows, None
        # An answer is also cut by its size: whether there is more, the dispatcher has to say.
        last = found[-1].sequence
        following = message_protocol.BrowseQueue(queue, selector or None, last, 1)
        more = (await self._dispatcher(("browse", queue, selector, last, 1), following)).messages
        return rows, last if more else None


_SEVERITY = {messages.Severity.CRITICAL: 0, messages.Severity.WARNING: 1, messages.Severity.INFO: 2}


def alert_order(one: messages.Alert) -> tuple[int, int, str, str]:
    """The worst first, then the newest."""
    return _SEVERITY[one.severity], -one.since_ms, one.rule, one.about


async def call_dispatcher(
    bus: api.Bus, subject: str, asked: message_protocol.DispatcherRequest, *, timeout_s: float = READ_S
) -> message_protocol.DispatcherReply:
    try:
        told = await bus.request(
            subject, message_protocol.encode(asked), timeout_s=timeout_s, headers=origin.headers()
        )
    except errors.TimedOut:
        raise
    except errors.Unavailable as error:
        raise errors.Unavailable(
            "no dispatcher of messages runs", hint="is [message] enabled in the domain's settings?"
        ) from error
    origin.answered()
    answer = message_protocol.decode_reply(told.data)
    if answer.error is not None:
        raise rpc_faults.from_error_reply(answer.error)
    return answer


def _page(rows: list[dict[str, Any]], found: inform_protocol.FindResult) -> dict[str, Any]:
    """One page of a search, and what it lacks."""
    return {
        "items": rows,
        "next": found.reached if found.more else None,
        "silent": found.silent,
        "failed": found.failed,
        "cut": found.cut,
    }
