"""All that is read: one copy of what the bus says, for every page and every request of this process.

What services announce is kept here as it comes by (reports in columns, alerts, decisions, the pipeline's
progress, changes of state), each within a bound.  What has to be asked for is asked through one cache, whose
tags the announcements touch: a thousand open pages ask a service no more often than one.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import datetime
import math
import time
from collections.abc import Awaitable, Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from muster.bus import api
from muster.core import errors, messages, reports, subjects
from muster.inform import client as inform_client
from muster.inform import protocol as inform_protocol
from muster.inform import services
from muster.manage import client as manage_client
from muster.manage import protocol as manage_protocol
from muster.manage import requests
from muster.message import destinations, faults
from muster.message import messages as jms
from muster.message import protocol as message_protocol
from muster.monitor import client as monitor_client
from muster.monitor import model
from muster.notify import client as notify_client
from muster.notify import protocol as notify_protocol
from muster.pipeline import client as pipeline_client
from muster.pipeline import protocol as pipeline_protocol
from muster.web import cache, link, machines

T = TypeVar("T")

READ_S = 4.0  # how long a page waits for a service
CHANGES_KEPT = 500
DECISIONS_KEPT = 2_000
PROGRESS_KEPT = 600
LOAD_KEPT = 360
SAMPLE_S = 5.0
ROWS_MAX = 1_000  # of history in one answer
WATCHED = (
    manage_protocol.STATES,
    reports.REPORTS_SUBJECTS,
    pipeline_protocol.REPORTS,
    pipeline_protocol.ALERTS,
    pipeline_protocol.PROGRESS,
    subjects.announced("bus", "alert"),
    messages.DECISIONS_SUBJECTS,
)


class Source:
    def __init__(self, door: link.Door, *, history: Path, domain: str) -> None:
        self.domain = domain
        self.cache = cache.Cache()
        self.machines = machines.Machines()
        self.changes: collections.deque[manage_protocol.State] = collections.deque(maxlen=CHANGES_KEPT)
        self.decisions: collections.deque[messages.Decision] = collections.deque(maxlen=DECISIONS_KEPT)
        self.batches: collections.deque[pipeline_protocol.Progress] = collections.deque(maxlen=PROGRESS_KEPT)
        self.load: collections.deque[tuple[float, dict[str, float]]] = collections.deque(maxlen=LOAD_KEPT)
        self._budgets: dict[tuple[str, str], messages.Alert] = {}
        self._history = history
        self._counted: tuple[float, dict[str, int]] = (0.0, {})
        self._listeners: dict[str, set[asyncio.Event]] = {}
        self.link = link.Link(door, on_connected=self._begin, on_lost=self._lost)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.link.run())
            group.create_task(self._sample())

    # What comes by

    async def _begin(self, bus: api.Bus) -> None:
        self.cache.clear()
        for subject in WATCHED:
            await bus.subscribe(subject, handler=self._heard, max_pending=4096)
        with contextlib.suppress(errors.MusterError):
            self.decisions.clear()
            self.decisions.extend(await manage_client.Client(bus).decisions(last=DECISIONS_KEPT))
        with contextlib.suppress(errors.MusterError):
            for one in await monitor_client.recent(bus, window_s=30.0):
                self.machines.add(one.batch)
        self._touch("link")

    def _lost(self) -> None:
        self.cache.clear()
        self._touch("link")

    def _heard(self, message: api.Message) -> None:
        part = message.subject.split(".")
        with contextlib.suppress(errors.MusterError):  # rubbish changes nothing here
            match part[1], part[2], part[4] if len(part) > 4 else part[3]:
                case "monitor", _, _:
                    self.machines.take(message.data, at_s=time.time())
                    self._touch("machines")
                case "manage", "all", _:
                    self.changes.append(messages.decode(message.data, manage_protocol.State))
                    self._touch("manage")
                case _, "log", _:
                    self.decisions.append(messages.decode(message.data, messages.Decision))
                    self._touch("audit")
                    self._touch("manage")
                case "pipeline", _, "alert":
                    self._touch("alerts")
                case "pipeline", _, "report":
                    self._touch("reports")
                case "pipeline", _, "progress":
                    self.batches.append(messages.decode(message.data, pipeline_protocol.Progress))
                    self._touch("pipeline")
                case "bus", _, _:
                    alert = messages.decode(message.data, messages.Alert)
                    self._budgets[alert.rule, alert.about] = alert
                    if alert.state is messages.AlertState.RESOLVED:
                        del self._budgets[alert.rule, alert.about]
                    self._touch("alerts")

    def _touch(self, tag: str) -> None:
        self.cache.touch(tag)
        for event in self._listeners.get(tag, ()):
            event.set()

    @contextlib.contextmanager
    def hearing(self, *tags: str) -> Any:
        """An event that is set when something with one of these tags changes."""
        event = asyncio.Event()
        for tag in tags:
            self._listeners.setdefault(tag, set()).add(event)
        try:
            yield event
        finally:
            for tag in tags:
                self._listeners[tag].discard(event)

    async def _sample(self) -> None:
        """Messages and bytes in a second, from the brokers' counters."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            if self.machines.is_due:
                await self.machines.table()
            with contextlib.suppress(errors.MusterError):
                brokers = await self.brokers()
                now_s = time.time()
                counts = {
                    f"{one['name']} {way}": int(one.get(f"{way}_messages") or 0)
                    for one in brokers
                    for way in ("in", "out")
                }
                before_s, before = self._counted
                self._counted = (now_s, counts)
                if before:
                    rates = {
                        name: max(0, count - before.get(name, count)) / (now_s - before_s)
                        for name, count in counts.items()
                    }
                    self.load.append((now_s, rates))

    async def _ask(self, key: Hashable, tag: str, kept_s: float, ask: Callable[[api.Bus], Awaitable[T]]) -> T:
        async def make() -> T:
            async with asyncio.timeout(READ_S * 2):
                return await ask(self.link.bus)

        try:
            return await self.cache.get(key, tag, kept_s, make)
        except TimeoutError as error:
            raise errors.TimedOut("no answer in time") from error

    # Management

    def _manage(self, bus: api.Bus) -> manage_client.Client:
        return manage_client.Client(bus, timeout_s=READ_S)

    async def summary(self) -> dict[str, Any]:
        return await self._ask("summary", "manage", 5.0, lambda bus: self._manage(bus).summary())

    async def resources(self, *, where: str = "", after: str = "", limit: int = 50) -> manage_client.Page:
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

    # Brokers

    async def _control(self, verb: str) -> list[dict[str, Any]]:
        async def ask(bus: api.Bus) -> list[dict[str, Any]]:
            subject = subjects.said_by("bus", bus.identity, "brokers", verb)
            found: list[dict[str, Any]] = await requests.ask(bus, subject, patience_s=1.0, try_s=READ_S)
            return found

        return await self._ask(("brokers", verb), "brokers", 2.0, ask)

    async def brokers(self) -> list[dict[str, Any]]:
        return await self._control("list")

    async def links(self) -> list[dict[str, Any]]:
        return await self._control("links")

    # Reports

    async def system(self) -> reports.SystemReport | None:
        """The pipeline's, as long as it is not old; else made from the reports that came by."""
        found = await self._latest("system", "")
        if found is not None:
            assert isinstance(found, reports.SystemReport)
            return found
        return await self.cache.get("system made", "machines", 2.0, self.machines.system)

    async def group(self, name: str) -> reports.GroupReport:
        found: Any = await self._latest("group", name)
        if found is None:
            found = await self.machines.group(name)
        if found is None:
            raise errors.NotFound(f"no report of the group {name!r}")
        assert isinstance(found, reports.GroupReport)
        return found

    async def _latest(self, level: str, name: str) -> reports.SystemReport | reports.GroupReport | None:
        async def ask(bus: api.Bus) -> reports.SystemReport | reports.GroupReport | None:
            pipeline = pipeline_client.Client(bus)
            return await (pipeline.system() if level == "system" else pipeline.group(name))

        found = await self._ask(("latest", level, name), "reports", 5.0, ask)
        if found is None:
            return None
        window_ms = max(60_000, 5 * (found.to_ms - found.from_ms))
        return found if found.to_ms + window_ms > time.time() * 1000 else None

    async def node(self, machine: str) -> messages.NodeReport:
        found = await self.machines.node(machine)
        if found is None:
            raise errors.NotFound(f"no report of the machine {machine!r}", hint="look into the history")
        return found

    async def report_at(self, level: str, name: str, at_ms: int, window_s: float) -> msgspec.Struct:
        """As it was then: the pipeline's report if it is still kept, else made from what the stream has."""

        async def ask(bus: api.Bus) -> msgspec.Struct | None:
            if level != "node":
                kind: Any = reports.SystemReport if level == "system" else reports.GroupReport
                made = [
                    messages.decode(data, kind) async for data in monitor_client.results(bus, level, name)
                ]
                fitting = [one for one in made if at_ms - window_s * 1000 <= one.to_ms <= at_ms]
                if fitting:
                    found: msgspec.Struct = max(fitting, key=lambda one: one.to_ms)
                    return found
            then = machines.Machines()
            for one in await monitor_client.recent(bus, window_s=window_s, at_ms=at_ms):
                then.add(one.batch)
            match level:
                case "system":
                    return await then.system()
                case "group":
                    return await then.group(name)
            return await then.node(name)

        found = await self._ask(("at", level, name, at_ms, window_s), "past", 60.0, ask)
        if found is None:
            raise errors.NotFound(f"no report of the {level} {name} in the {window_s:g} s before then")
        return found

    # Alerts and the pipeline

    async def alerts(self) -> list[messages.Alert]:
        """Those of the pipeline, and of budgets; the worst first."""
        found = list(self._budgets.values())
        with contextlib.suppress(errors.Unavailable):  # no pipeline: then there are none of its alerts
            found += await self._ask(
                "alerts", "alerts", 5.0, lambda bus: pipeline_client.Client(bus).alerts()
            )
        order = {messages.Level.CRITICAL: 0, messages.Level.WARNING: 1, messages.Level.INFO: 2}
        return sorted(found, key=lambda one: (order[one.level], -one.since_ms, one.rule, one.about))

    async def silences(self) -> list[dict[str, Any]]:
        found = await self._ask("silences", "alerts", 5.0, lambda bus: pipeline_client.Client(bus).silences())
        return [msgspec.to_builtins(one) for one in found]

    async def progress(self) -> pipeline_protocol.Progress:
        return await self._ask(
            "progress", "pipeline", 2.0, lambda bus: pipeline_client.Client(bus).progress()
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
    ) -> list[dict[str, Any]]:
        from muster.pipeline import query

        asked = query.Query(kind, where or "TRUE", from_ms, to_ms, columns, min(limit, ROWS_MAX))

        def search() -> list[dict[str, Any]]:
            if not self._history.is_dir():
                raise errors.NotFound(
                    "there is no history here", hint="the pipeline writes it: `muster pipeline run`"
                )
            rows: list[dict[str, Any]] = []
            for batch in query.search(self._history, asked):
                rows += batch.to_pylist()
            return [{name: _plain(value) for name, value in row.items()} for row in rows]

        return await self.cache.get(("history", asked), "history", 5.0, lambda: asyncio.to_thread(search))

    async def plot(
        self, level: str, name: str, metric: str, *, from_ms: int, points: int = 240
    ) -> list[dict[str, Any]]:
        """A metric of a level over time, thinned: at most ``points`` rows, oldest first."""
        from muster.pipeline import query

        where = " AND ".join(
            f"{column} = '{value.replace(chr(39), 2 * chr(39))}'"
            for column, value in (("level", level), ("name", name), ("metric", metric))
            if value or column != "name"
        )
        wanted = ("from", "sum", "count", "min", "max", "p95", "machines", "stale")
        asked = query.Query("levels", where, from_ms, None, wanted)

        def search() -> list[dict[str, Any]]:
            if not self._history.is_dir():
                return []
            rows: list[dict[str, Any]] = []
            for batch in query.search(self._history, asked):
                rows += batch.to_pylist()
                if len(rows) > 100_000:
                    raise errors.LimitExceeded("too many rows for one plot", hint="choose a shorter time")
            rows.sort(key=lambda row: row["from"])
            step = max(1, math.ceil(len(rows) / points))
            return [
                {
                    "at_ms": int(row["from"].timestamp() * 1000),
                    "mean": row["sum"] / row["count"] if row["count"] else None,
                    **{key: row[key] for key in ("min", "max", "p95", "machines", "stale")},
                }
                for row in rows[::step]
            ]

        return await self.cache.get(
            ("plot", asked, points), "history", 10.0, lambda: asyncio.to_thread(search)
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
            check = model.check(predicted_s, [one.max_s for one in recent])
            found |= {
                "measured_max_s": round(check.measured_s, 3),
                "ratio": round(check.ratio, 3),
                "within_20_percent": check.holds,
            }
        return found

    # Contexts

    def _inform(self, bus: api.Bus) -> inform_client.Client:
        return inform_client.Client(bus, timeout_s=READ_S)

    async def information_nodes(self) -> list[dict[str, Any]]:
        found = await self._ask("nodes", "inform", 2.0, lambda bus: self._inform(bus).nodes())
        return [{**msgspec.structs.asdict(one), "load": msgspec.structs.asdict(one.load)} for one in found]

    async def contexts(self, where: str, *, limit: int = 100) -> dict[str, Any]:
        found = await self._ask(
            ("contexts", where, limit),
            "inform",
            2.0,
            lambda bus: self._inform(bus).find(where or "TRUE", limit=limit),
        )
        return {"items": [context_row(one) for one in found.contexts], "silent": found.silent}

    async def context(self, key: str) -> inform_protocol.Context:
        return await self._ask(("context", key), "inform", 0.5, lambda bus: self._inform(bus).get(key))

    async def copies(self, key: str) -> list[dict[str, Any]]:
        found = await self._ask(("copies", key), "inform", 1.0, lambda bus: self._inform(bus).where(key))
        return [msgspec.structs.asdict(one) for one in found]

    async def context_history(self, key: str, *, after: int, limit: int) -> dict[str, Any]:
        found = await self._ask(
            ("changes", key, after),
            "inform",
            1.0,
            lambda bus: self._inform(bus).history(key, after_version=after),
        )
        some = found.changes[:limit]
        rows = []
        for one in some:
            row = {**msgspec.structs.asdict(one)}
            value = row.pop("value")
            rows.append({**row, **({} if value is None else shown(value))})
        more = len(found.changes) > len(some)
        return {"items": rows, "complete": found.complete, "next": some[-1].version if more else None}

    async def entries(self, where: str, *, limit: int) -> list[dict[str, Any]]:
        found = await self._ask(
            ("entries", where, limit),
            "inform",
            2.0,
            lambda bus: services.Services(self._inform(bus)).find(where, limit=limit),
        )
        return [entry_row(one) for one in found]

    async def entry(self, id: str) -> dict[str, Any]:
        found = await self._ask(
            ("entry", id), "inform", 0.5, lambda bus: services.Services(self._inform(bus)).get(id)
        )
        return entry_row(found)

    # Notification

    async def parties(self, where: str, *, prefix: str = "", limit: int) -> dict[str, Any]:
        found = await self._ask(
            ("parties", where, prefix, limit),
            "notify",
            2.0,
            lambda bus: notify_client.parties(bus, where=where, prefix=prefix, limit=limit),
        )
        return {"count": found.count, "items": found.parties}

    async def who(
        self, address: str, *, event: notify_protocol.Send | None, sender: str, limit: int
    ) -> dict[str, Any]:
        key = ("who", address, sender, limit, event and (event.type, str(event.content)))
        found = await self._ask(
            key,
            "notify",
            1.0,
            lambda bus: notify_client.who(bus, address, event=event, sender=sender, limit=limit),
        )
        return {
            "count": found.count,
            "parties": [one["party"] for one in found.parties],
            "near": found.near[:limit],
        }

    async def explain(self, event: notify_protocol.Send, *, sender: str, receiver: str) -> dict[str, Any]:
        return await self._ask(
            ("explain", event.address, event.type, str(event.content), sender, receiver),
            "notify",
            1.0,
            lambda bus: notify_client.explain(bus, event, sender=sender, receiver=receiver),
        )

    async def check_policy(self, policy: str) -> dict[str, Any]:
        return await self._ask(("check", policy), "notify", 5.0, lambda bus: notify_client.check(bus, policy))

    async def models(self) -> list[dict[str, Any]]:
        return await self._ask("models", "notify", 5.0, notify_client.defined)

    # Messages

    async def _dispatcher(self, key: Hashable, asked: message_protocol.Ask) -> message_protocol.Answer:
        async def ask(bus: api.Bus) -> message_protocol.Answer:
            return await dispatch(bus, message_protocol.read_subject(bus.identity), asked)

        return await self._ask(("message", key), "message", 1.0, ask)

    async def queues(self) -> list[dict[str, Any]]:
        return (await self._dispatcher("queues", message_protocol.ListQueues())).rows

    async def subscriptions(self) -> list[dict[str, Any]]:
        return (await self._dispatcher("subscriptions", message_protocol.ListSubscriptions())).rows

    async def browse(
        self, queue: str, *, selector: str | None, after: int, limit: int
    ) -> tuple[list[dict[str, Any]], int | None]:
        asked = message_protocol.Browse(queue, selector or None, after, limit)
        found = (await self._dispatcher(("browse", queue, selector, after, limit), asked)).messages
        rows = [_message_row(one, queue) for one in found]
        return rows, found[-1].sequence if len(found) >= limit else None


async def dispatch(
    bus: api.Bus, subject: str, asked: message_protocol.Ask, *, timeout_s: float = READ_S
) -> message_protocol.Answer:
    try:
        told = await bus.request(subject, message_protocol.encode(asked), timeout_s=timeout_s)
    except errors.TimedOut:
        raise
    except errors.Unavailable as error:
        raise errors.Unavailable(
            "no dispatcher of messages runs", hint="is [message] enabled in the domain's settings?"
        ) from error
    answer = message_protocol.decode_answer(told.data)
    if answer.error is not None:
        raise faults.named(answer.error, answer.message)
    return answer


def shown(value: bytes) -> dict[str, str]:
    """Bytes as JSON can say them: text where it is text."""
    try:
        return {"value": value.decode()}
    except UnicodeDecodeError:
        return {"value_base64": base64.b64encode(value).decode()}


def context_row(one: inform_protocol.Context) -> dict[str, Any]:
    return {
        "key": one.key,
        **shown(one.value),
        "attributes": dict(one.attributes),
        "version": one.version,
        "stamp": one.stamp,
        "writer": one.writer,
        "source": one.source,
        "copy": one.copy,
        "age_s": round(one.age_s, 6),
        "expires_at_ms": one.expires_at_ns // 1_000_000 or None,
    }


def entry_row(one: services.Entry) -> dict[str, Any]:
    row = msgspec.structs.asdict(one)
    row.pop("description")
    return {**row, **{f"description{k.removeprefix('value')}": v for k, v in shown(one.description).items()}}


def _message_row(one: message_protocol.Delivery, queue: str) -> dict[str, Any]:
    found = jms.rebuild(jms.decode_meta(one.meta), one.data, destinations.queue(queue))
    body = found.body()
    return {
        "sequence": one.sequence,
        "id": found.message_id,
        "type": type(found).__name__,
        "priority": found.priority,
        "timestamp_ms": found.timestamp_ms,
        "expiration_ms": found.expiration_ms,
        "redelivered": found.redelivered,
        "properties": {name: _plain(value) for name, value in found.properties.items()},
        "body": _plain(body),
    }


def _plain(value: Any) -> Any:
    """As JSON can say it."""
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case datetime.datetime():
            return value.isoformat(timespec="milliseconds")
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(name): _plain(one) for name, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case None | str() | bool() | int():
            return value
    return str(value)
