"""The process that runs the job: Spark in threads of its own, the bus on the event loop.

For each micro-batch (`_take`, in a thread of Spark's): reports, judgements and alerts are worked out, written
to the history, published, and then remembered.  In that order: a batch that is interrupted is done again,
with the same results under the same message ids and file names.

Meanwhile the loop publishes ticks and progress, lets time pass for the book of alerts, sends notices, and
answers questions.  A query that ends on its own is started again after a wait; that is a failure that shows
in the progress, and in the counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from muster.bus import api
from muster.core import errors, log, messages, reports, subjects
from muster.pipeline import (
    alerts,
    checkpoint,
    compaction,
    fitting,
    fleet,
    history,
    job,
    levels,
    notices,
    protocol,
    results,
    rules,
    session,
)
from muster.pipeline import settings as settings_

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

POLL_S = 0.25
RESTART_WAIT_MAX_S = 60.0
PUBLISH_AT_ONCE = 500
COMPACT_S = 300.0
MEMORY_NAME = "alerts.json"


@dataclass(frozen=True, slots=True)
class Places:
    """Where things lie. ``servers``, ``credentials`` and ``ca`` are for Spark's own connections."""

    folder: Path
    servers: tuple[str, ...]
    credentials: str | None = None
    ca: str | None = None
    history_max_bytes: int = 0  # 0: no limit
    history_max_age_s: float = 0.0
    streams: tuple[api.StreamSettings, ...] = field(default_factory=lambda: tuple(protocol.streams()))

    def checkpoint(self, settings: settings_.Pipeline) -> Path:
        return Path(settings.checkpoint_dir or self.folder / "pipeline" / "checkpoint")

    def history(self, settings: settings_.Pipeline) -> Path:
        return Path(settings.history_dir or self.folder / "history")


class Remembered(msgspec.Struct):
    """What survives the process besides Spark's checkpoint."""

    book: alerts.Memory
    unsent: list[alerts.Notice] = msgspec.field(default_factory=list)


class Service:
    def __init__(
        self,
        bus: api.Bus,
        settings: settings_.Pipeline,
        places: Places,
        *,
        spark: SparkSession | None = None,
        on_progress: Callable[[protocol.Progress], None] | None = None,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._places = places
        self._given_spark = spark
        self._on_progress = on_progress
        self._log = log.Events("pipeline", pipeline=bus.identity)
        self._rules, self._receivers = _load_rules(settings)
        self._label = checkpoint.open_(places.checkpoint(settings), settings)
        self._history = places.history(settings)
        self._memory_path = places.checkpoint(settings).parent / MEMORY_NAME
        remembered = self._remember()
        self._book = alerts.Book(self._rules, remembered.book)
        self._sender = notices.Sender(self._receivers, settings, unsent=remembered.unsent)
        self._window_ms = int(settings.window_s * 1000)
        baselines = results.Baselines()
        levels.teach(baselines, self._history)
        self._judge = results.Judge(self._rules, baselines, self._window_ms)
        self._latest: dict[tuple[str, str], messages.Message] = {}
        self._progress = protocol.Progress(state="starting")
        self._counts: dict[str, int] = {}
        self._total_rows = 0
        self._seen_batch = -1
        self._machines = 0
        self._clock_ms = 0
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._results: api.Stream
        self._alerts: api.Stream

    # Life

    async def run(self) -> None:
        """Until `stop` is called or asked for."""
        self._loop = asyncio.get_running_loop()
        self._results, self._alerts = [await self._bus.stream(wanted) for wanted in self._places.streams]
        async with contextlib.AsyncExitStack() as stack:
            for pattern in (protocol.READS, protocol.REQUESTS):
                await stack.enter_async_context(await self._bus.subscribe(pattern, handler=self._answer))
            side = [
                asyncio.create_task(self._every(self._settings.trigger_s / 2, self._tick)),
                asyncio.create_task(self._every(1.0, self._pass_time)),
                asyncio.create_task(self._sender.run(self._save)),
            ]
            main = asyncio.create_task(self._run_query())
            try:
                await asyncio.wait((main, *side), return_when=asyncio.FIRST_COMPLETED)
                for task in side:
                    if task.done():
                        task.result()  # they end only by failing
                await main
            finally:
                self._stop.set()
                for task in side:
                    task.cancel()
                await asyncio.gather(main, *side, return_exceptions=True)
        await asyncio.to_thread(self._save)

    def stop(self) -> None:
        self._stop.set()

    async def _run_query(self) -> None:
        if not await self._wait_for_stream():
            return
        spark = self._given_spark
        if spark is None:
            spark = await asyncio.to_thread(self._start_spark)
        compacting = asyncio.create_task(self._compact(spark)) if self._settings.compact else None
        try:
            wait_s = 1.0
            while not self._stop.is_set():
                query = await asyncio.to_thread(self._start_query, spark)
                started = time.monotonic()
                try:
                    reason = await self._watch(query)
                finally:
                    await asyncio.to_thread(_stop_query, query)
                if reason is None:
                    break
                self._count("query-failed")
                self._progress = msgspec.structs.replace(
                    self._progress, state="failed", reason=reason[-1000:]
                )
                self._log.error("query-failed", reason=reason[:2000])
                await self._say_progress()
                if time.monotonic() - started > RESTART_WAIT_MAX_S:
                    wait_s = 1.0
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), wait_s)
                wait_s = min(2 * wait_s, RESTART_WAIT_MAX_S)
        finally:
            if compacting is not None:
                compacting.cancel()
                await asyncio.gather(compacting, return_exceptions=True)
            if self._given_spark is None:
                await asyncio.to_thread(spark.stop)

    async def _wait_for_stream(self) -> bool:
        """Channels make it, maybe later than we are here."""
        while not self._stop.is_set():
            try:
                await self._bus.open_stream(reports.REPORTS_STREAM)
                return True
            except errors.NotFound:
                self._progress = msgspec.structs.replace(
                    self._progress, reason=f"waiting for the stream {reports.REPORTS_STREAM!r}"
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), 1.0)
        return False

    def _start_spark(self) -> SparkSession:
        return session.start(
            master=self._settings.master,
            name=f"muster {self._bus.identity}",
            work_dir=self._places.folder / "pipeline",
            extra={
                "spark.sql.shuffle.partitions": str(self._settings.partitions),
                "spark.driver.memory": self._settings.memory,
                "spark.executor.memory": self._settings.memory,
            },
        )

    def _start_query(self, spark: SparkSession) -> StreamingQuery:
        settings = self._settings
        session.activate(spark)
        wanted = job.Job(
            plan=fleet.Plan(
                window_s=settings.window_s,
                delay_s=settings.delay_s,
                skew_s=settings.skew_s,
                stale_after=settings.stale_after,
                forget_s=settings.forget_s,
                top=settings.top,
                top_metrics=settings.top_metrics,
                rules=tuple(rule for rule in self._rules if rule.level == "node"),
            ),
            servers=self._places.servers,
            credentials=self._places.credentials,
            ca=self._places.ca,
            checkpoint=str(self._places.checkpoint(settings) / "spark"),
            history=str(self._history),
            run=self._label.run,
            shards=settings.shards,
            partitions=settings.partitions,
            splits=settings.splits,
            max_messages=settings.max_messages,
            after=history.last_sequence(self._history),
        )
        return job.start(spark, wanted, self._take, trigger_s=settings.trigger_s)

    async def _watch(self, query: StreamingQuery) -> str | None:
        """Until it is to stop (None) or has ended on its own (why)."""
        while not self._stop.is_set():
            active, found = await asyncio.to_thread(_look_at, query)
            if not active:
                return found or "the query ended"
            if found is not None and found["batchId"] != self._seen_batch:
                self._seen_batch = found["batchId"]
                self._progress = self._measure(found)
                await self._say_progress()
                await asyncio.to_thread(self._keep_progress)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), POLL_S)
        self._progress = msgspec.structs.replace(self._progress, state="stopping")
        return None

    async def _every(self, period_s: float, work: Callable[[], Any]) -> None:
        while True:
            await asyncio.sleep(period_s)
            try:
                await work()
            except errors.MusterError as error:
                self._count("bus-errors")
                self._log.warning("not-done", error=error)

    # One micro-batch, in a thread of Spark's

    def _take(self, number: int, outputs: list[fleet.Output], counts: dict[str, int]) -> None:
        found = results.levels((one for output in outputs for one in output.closed), self._settings.top)
        on = asyncio.run_coroutine_threadsafe(self._on(), self._loop).result()
        judgements = [
            *results.of_machines(change for output in outputs for change in output.changes),
            *self._judge.judge(found, on),
        ]
        judgements.sort(key=lambda one: one.at_ms)
        clock_ms = max((output.clock_ms for output in outputs), default=0)
        made = self._make(found)
        try:
            levels.write(found, self._window_ms, self._history, self._label.run, number)
        except (errors.MusterError, OSError) as error:
            counts["levels-not-in-history"] = len(found)
            self._log.error("history-not-written", error=error)
        finish = self._finish(number, judgements, clock_ms, made, counts, sum(o.machines for o in outputs))
        asyncio.run_coroutine_threadsafe(finish, self._loop).result()

    async def _on(self) -> frozenset[tuple[str, str]]:
        return self._book.on()

    def _make(self, found: list[results.Many]) -> list[tuple[str, str, messages.Message]]:
        made: list[tuple[str, str, messages.Message]] = []
        for many in found:
            if many.level == "system":
                groups = [one for one in found if one.level == "group" and one.from_ms == many.from_ms]
                made.append(("system", "", results.system_report(many, groups, self._window_ms)))
                if many.top:
                    made.append(("top", "", results.top(many, self._window_ms)))
            else:
                made.append((many.level, many.name, results.group_report(many, self._window_ms)))
        return made

    async def _finish(
        self,
        number: int,
        judgements: list[alerts.Judgement],
        clock_ms: int,
        made: list[tuple[str, str, messages.Message]],
        counts: dict[str, int],
        machines: int,
    ) -> None:
        self._clock_ms = max(self._clock_ms, clock_ms)
        outcome = self._book.judge(judgements, clock_ms)
        await _in_groups(self._publish(*one) for one in made)
        await self._obey(outcome)
        for level, name, message in made:
            self._latest[level, name] = message
        await asyncio.to_thread(self._keep_alerts, outcome.alerts, number)
        await asyncio.to_thread(self._save)
        self._machines = machines
        self._total_rows += counts.get("rows", 0)
        for reason, count in counts.items():
            self._count(reason, count)

    async def _publish(self, level: str, name: str, message: messages.Message) -> None:
        try:
            subject = reports.result_subject(self._bus.identity, level, name)
            data = messages.encode(message)
        except (errors.InvalidInput, errors.LimitExceeded):  # a name that no subject can hold, or too much
            self._count("unpublished")
            return
        to_ms = message.to_ms  # type: ignore[attr-defined]
        await self._results.publish(subject, data, message_id=f"{level}:{name}:{to_ms}")

    def _keep_alerts(self, changed: list[messages.Alert], number: int) -> None:
        try:
            levels.write_alerts(changed, self._history, self._label.run, number)
        except (errors.MusterError, OSError) as error:
            self._count("alerts-not-in-history", len(changed))
            self._log.error("history-not-written", error=error)

    async def _obey(self, outcome: alerts.Outcome) -> None:
        """Publish what changed, and queue what people are to be told."""
        await _in_groups(
            self._alerts.publish(
                protocol.alert(self._bus.identity, one.rule),
                messages.encode(one),
                message_id=f"{one.rule}:{one.about}:{one.state.value}:{one.since_ms}",
            )
            for one in outcome.alerts
        )
        for notice in outcome.notices:
            self._sender.add(notice)

    # Besides

    async def _tick(self) -> None:
        """So that Spark has something to read, and time passes for machines that fell silent together."""
        stream = await self._bus.open_stream(reports.REPORTS_STREAM)
        await stream.publish(protocol.tick(self._bus.identity), b"")

    async def _pass_time(self) -> None:
        """Alerts ripen by the clock of the stream, which stands still while nothing is read."""
        outcome = self._book.tick(self._clock_ms)
        if outcome.alerts:
            await self._obey(outcome)
            await asyncio.to_thread(self._save)

    def _count(self, reason: str, count: int = 1) -> None:
        self._counts[reason] = self._counts.get(reason, 0) + count

    async def _say_progress(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._progress)
        with contextlib.suppress(errors.Unavailable):
            await self._bus.publish(protocol.progress(self._bus.identity), messages.encode(self._progress))

    def _keep_progress(self) -> None:
        try:
            fitting.keep(self._memory_path.with_name(fitting.PROGRESS_NAME), self._progress)
        except OSError as error:
            self._count("progress-not-kept")
            self._log.warning("progress-not-kept", error=error)

    async def _compact(self, spark: SparkSession) -> None:
        """Every few minutes, whatever hours and days are over. What fails is tried again the next time."""
        while True:
            await asyncio.sleep(COMPACT_S)
            try:
                done = await asyncio.to_thread(compaction.run, spark, self._history, int(time.time() * 1000))
                done["pruned"] = await asyncio.to_thread(
                    history.prune,
                    self._history,
                    max_bytes=self._places.history_max_bytes,
                    max_age_s=self._places.history_max_age_s,
                    now_s=time.time(),
                )
                if any(done.values()):
                    self._log.info("compacted", **done)
            except Exception as error:  # noqa: BLE001 (Spark raises what it likes)
                self._count("not-compacted")
                self._log.error("not-compacted", error=error)

    def _measure(self, found: dict[str, Any]) -> protocol.Progress:
        """Spark's own account of a batch, in our words."""
        source = found["sources"][0]
        states = found.get("stateOperators") or [{}]
        duration_ms = found.get("durationMs") or {}
        batch_s = duration_ms.get("triggerExecution", 0) / 1000
        rows = self._counts.get("rows", 0)
        before = self._counts.get("rows before", 0)
        self._counts["rows before"] = rows
        shown = {
            name: count
            for name, count in self._counts.items()
            if name not in ("rows", "rows before") and not name.startswith(job.CPU)
        }
        cpu = {
            name.removeprefix(job.CPU): count // 1000
            for name, count in self._counts.items()
            if name.startswith(job.CPU)
        }
        return protocol.Progress(
            state="running",
            at_ms=int(time.time() * 1000),
            batch=found["batchId"],
            batch_s=batch_s,
            rows=rows - before,
            rows_s=(rows - before) / max(self._settings.trigger_s, batch_s),
            messages=int(source.get("numInputRows") or 0),
            lag_messages=_behind(source),
            lag_s=max(0.0, time.time() - self._clock_ms / 1000) if self._clock_ms else 0.0,
            state_bytes=int(states[0].get("memoryUsedBytes") or 0),
            state_rows=int(states[0].get("numRowsTotal") or 0),
            machines=self._machines,
            stages_ms={name: int(took) for name, took in duration_ms.items()},
            cpu_ms=cpu,
            counts=shown,
            total_rows=self._total_rows,
        )

    def _remember(self) -> Remembered:
        try:
            return msgspec.json.decode(self._memory_path.read_bytes(), type=Remembered)
        except FileNotFoundError:
            return Remembered(alerts.Memory())
        except msgspec.MsgspecError as error:
            raise errors.Conflict(
                f"the book of alerts {self._memory_path} cannot be read: {error}",
                hint="move it away to start with an empty one",
            ) from error

    def _save(self) -> None:
        data = msgspec.json.encode(Remembered(self._book.memory(), self._sender.unsent()))
        fresh = self._memory_path.with_suffix(f".{uuid.uuid4().hex[:8]}")
        try:
            with fresh.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._memory_path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            self._count("alerts-not-saved")
            self._log.error("alerts-not-saved", error=error)

    # Questions

    async def _answer(self, message: api.Message) -> None:
        sender = subjects.sender_of(message.subject)
        if message.reply is None or not message.reply.startswith(f"{subjects.inbox(sender)}."):
            return
        try:
            answer: dict[str, Any] = {"result": await self._serve(sender, message)}
        except errors.MusterError as error:
            answer = {"error": {"code": error.code, "message": error.message, "hint": error.hint}}
        await message.respond(msgspec.json.encode(answer))

    async def _serve(self, sender: str, message: api.Message) -> Any:
        kind, _, verb = message.subject.removeprefix(subjects.said_by(protocol.PART, sender, "")).partition(
            "."
        )
        try:
            given = msgspec.json.decode(message.data or b"{}", type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise errors.InvalidInput(f"the question is not a JSON object: {error}") from error
        if kind == "read":
            return self._read(verb, given)
        if "*" not in self._settings.operators and sender not in self._settings.operators:
            raise errors.Forbidden(
                f"{sender} may not {verb}", hint="pipeline.operators in the settings lists who may"
            )
        self._log.info("asked", by=sender, verb=verb)
        return await self._do(sender, verb, given)

    def _read(self, verb: str, given: dict[str, Any]) -> Any:
        match verb:
            case "status":
                return self._progress
            case "alerts":
                return self._book.alerts()
            case "silences":
                return self._book.silences()
            case "latest":
                return self._latest.get((str(given.get("level")), str(given.get("name", ""))))
        raise errors.NotFound(f"nothing called {verb!r} can be read here")

    async def _do(self, sender: str, verb: str, given: dict[str, Any]) -> Any:
        now_ms = max(self._clock_ms, int(time.time() * 1000))
        match verb:
            case "stop":
                self.stop()
                return None
            case "acknowledge":
                asked = _asked(given, _Acknowledge)
                outcome = self._book.acknowledge(asked.rule, asked.about, sender, now_ms)
                made: Any = None
            case "silence":
                wish = _asked(given, _Silence)
                start_ms = now_ms if wish.from_ms is None else wish.from_ms
                made = alerts.Silence(
                    id=uuid.uuid4().hex[:8],
                    covers=wish.covers,
                    from_ms=start_ms,
                    until_ms=start_ms + int(wish.for_s * 1000),
                    by=sender,
                    reason=wish.reason,
                )
                outcome = self._book.silence(made, now_ms)
            case "unsilence":
                outcome, made = self._book.unsilence(_asked(given, _Unsilence).id, now_ms), None
            case _:
                raise errors.NotFound(f"there is no request {verb!r}")
        await self._obey(outcome)
        await asyncio.to_thread(self._save)
        return made


class _Acknowledge(msgspec.Struct, forbid_unknown_fields=True):
    rule: str
    about: str


class _Silence(msgspec.Struct, forbid_unknown_fields=True):
    covers: str
    for_s: float
    from_ms: int | None = None
    reason: str = ""


class _Unsilence(msgspec.Struct, forbid_unknown_fields=True):
    id: str


def _asked(given: dict[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(str(error)) from error


def _load_rules(
    settings: settings_.Pipeline,
) -> tuple[tuple[rules.Rule, ...], dict[str, notices.Receiver]]:
    if not settings.rules:
        return (), {}
    path = Path(settings.rules).expanduser()
    found = rules.load(path)
    receivers = notices.load(path, settings)
    for rule in found:
        for name in rule.notify:
            if name not in receivers:
                raise errors.InvalidInput(
                    f"{path}: the rule {rule.name!r} notifies {name!r}, who is not there"
                )
    return found, receivers


async def _in_groups(work: Iterable[Any]) -> None:
    """Together they share the broker's syncs; so many at once are enough for that."""
    waiting = list(work)
    for start in range(0, len(waiting), PUBLISH_AT_ONCE):
        await asyncio.gather(*waiting[start : start + PUBLISH_AT_ONCE])


def _look_at(query: StreamingQuery) -> tuple[bool, Any]:
    if not query.isActive:
        error = query.exception()
        return False, str(error) if error else ""
    return True, query.lastProgress


def _stop_query(query: StreamingQuery) -> None:
    with contextlib.suppress(Exception):  # Spark reports a batch that was interrupted as an error
        query.stop()


def _behind(source: dict[str, Any]) -> int:
    """Messages stored and not read yet. Spark gives offsets as JSON text, or as what that means."""
    latest, end = (
        msgspec.json.decode(one) if isinstance(one, str) else one
        for one in (source.get("latestOffset"), source.get("endOffset"))
    )
    if not isinstance(latest, dict) or not isinstance(end, dict):
        return 0
    return sum(max(0, int(latest[name]) - int(end.get(name, 0))) for name in latest)
