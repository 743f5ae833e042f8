"""The process that runs the job: Spark in its own threads, the bus on the event loop.

It waits until it is the driver (`driver_lease`), with Spark already started and rehearsed (`standby`).  Then
it begins a term of its own in the checkpoint (`continuation`).  A driver that another process has replaced
ends its Java process at once, and itself with `errors.StaleEpoch`; one whose Java process no longer responds
ends so that a standby takes over.

Each micro-batch ends in `batch_commit`; requests are handled by `request_handler`.  The event loop publishes
ticks and progress, advances the clock of the alert tracker, sends notifications, and maintains the history.
A query that ends by itself is restarted after a delay; the failure is visible in the progress and in the
counters.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from muster.bus import api, leases
from muster.bus.rpc import server
from muster.core import errors, messages
from muster.core.reports import columns
from muster.core.telemetry import log
from muster.pipeline import cost_fit, protocol, steps
from muster.pipeline import settings as settings_
from muster.pipeline.alerts import notifications, rules
from muster.pipeline.fleet import state
from muster.pipeline.history import maintenance, storage
from muster.pipeline.job import (
    batch_commit,
    checkpoint_label,
    history_upkeep,
    progress,
    query_plan,
    request_handler,
    window_rows,
)
from muster.pipeline.job import query as job_query
from muster.pipeline.job.driver import continuation, driver_lease, driver_terms, standby
from muster.pipeline.source import session, spark_internals
from muster.supervision import tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

POLL_S = 0.25  # for the report of a batch that is committed
IDLE_POLL_S = 2.0
PROBE_S = 1.0  # between calls of Java
RESPONSE_S = 10.0  # a longer pause of Java is a failure
PLANNED_S = 90.0  # after this Spark has ended the workers that planned the query
TICK_S = 1.0  # maximum age of the clock in a small fleet
RESTART_WAIT_MAX_S = 60.0
STREAM_SHORTER = "stream-shorter"  # counts streams that end before the position of the checkpoint
#: Why a query ended: its first batch has the state of the former term. The next one does not depend on that.
TRANSFERRED = "transferred"
GROWN = "grown"  # the fleet is no longer small: it is divided for all cores
SMALL_REPORTS = 20_000  # in a batch: fewer take one core less time than several take to start on them
BATCHES_COMPARED = 20
BATCHES_KEPT = 400  # for requests about recent batches


@dataclass(frozen=True, slots=True)
class PipelinePaths:
    """Folders and connections. ``servers``, ``credentials`` and ``ca`` are for Spark's own connections."""

    folder: Path
    servers: tuple[str, ...]
    credentials: str | None = None
    ca: str | None = None
    history_max_bytes: int = 0  # 0: no limit
    history_max_age_s: float = 0.0
    streams: tuple[api.StreamSettings, ...] = field(default_factory=lambda: tuple(protocol.streams()))


class PipelineService:
    def __init__(
        self,
        bus: api.Bus,
        settings: settings_.PipelineSettings,
        paths: PipelinePaths,
        *,
        spark: SparkSession | None = None,
        on_progress: Callable[[protocol.BatchProgress], None] | None = None,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._paths = paths
        self._given_spark = spark
        self._on_progress = on_progress
        self._log = log.EventLog("pipeline", pipeline=bus.identity)
        self._history = settings.history_root(paths.folder)
        storage.check(self._history)
        notifications.load_rules(settings)  # an invalid file is an error at once, not after a takeover
        steps.read(settings.steps)
        self._checkpoint = settings.checkpoint_root(paths.folder)
        storage.check(self._checkpoint, setting="checkpoint_dir", checkpoint=True)
        self._folder = settings.state_folder(paths.folder)
        self._driver: driver_lease.DriverLease
        self._continuation: continuation.Continuation
        self._committer: batch_commit.BatchCommitter
        self._spark: SparkSession | None = spark
        self._starting: asyncio.Task[SparkSession] | None = None
        self._rehearsal = standby.QueryRehearsal(self._checkpoint)
        self._parallelism: tuple[int, int, int] | None = None  # shards, partitions, splits
        self._is_small = False
        self._transfers = False  # whether the query reads the state of an earlier term
        self._progress = protocol.BatchProgress(state="starting")
        self._batches: collections.deque[protocol.BatchProgress] = collections.deque(maxlen=BATCHES_KEPT)
        self._rows_before = 0
        self._stages = progress.StartTimes()
        self._killed_java = False
        self._loop: asyncio.AbstractEventLoop
        self._stop = asyncio.Event()
        self._wake = asyncio.Event()  # the stop, or a batch that is committed
        self._committed = asyncio.Event()  # a batch, of which Spark has given no report yet
        self._tasks = tasks.TaskSupervisor(f"pipeline {bus.identity}")

    # Life cycle

    async def run(self) -> None:
        """Run until `stop` is called or requested."""
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._end_spark)
            self._begin_spark()  # Java takes longest: all else goes on meanwhile
            replicas = self._paths.streams[0].replicas
            all_leases = await stack.enter_async_context(
                await leases.Leases.open(self._bus, ttl_s=self._settings.lease_s, replicas=replicas)
            )
            self._driver = driver_lease.DriverLease(self._bus, all_leases)
            stack.push_async_callback(self._driver.close)
            if not await self._become_driver():
                return
            self._stages.begin()
            await asyncio.to_thread(self._begin)
            self._driver.keep(self._continuation.is_current)
            self._stages.end("claim")
            await self._committer.open(self._paths.streams)
            self._stages.end("fence")
            handler = self._request_handler()
            await stack.enter_async_context(
                server.RpcServer(self._bus, protocol.PART, handler.operations(), authorize=handler.authorize)
            )
            tick_s = min(TICK_S, self._settings.trigger_s / 2)
            advance, send = self._committer.advance_clock, self._committer.sender.run
            self._tasks.loop("superseded", self._end_when_superseded)
            self._tasks.loop("java", self._end_when_unresponsive)
            self._tasks.loop("tick", functools.partial(self._every, tick_s, self._tick))
            self._tasks.loop("clock", functools.partial(self._every, 1.0, advance))
            self._tasks.loop("notifications", functools.partial(send, self._committer.save))
            is_current = True
            try:
                await self._run_query()
            except Exception as error:
                # Calls of a Java process that has ended, or files that a later driver has removed.
                is_current = await self._is_current()
                if is_current and not self._killed_java:
                    raise
                self._log.info("query-ended", error=error)
            finally:
                self._stop.set()
                await self._tasks.close()
            if self._driver.superseded.is_set() or not is_current:
                raise errors.StaleEpoch(
                    "another process has become the driver of the pipeline",
                    epoch=self._driver.epoch,
                    current=self._driver.epoch + 1,
                )
            if self._killed_java:
                raise errors.Unavailable(f"Spark's Java process did not respond for {RESPONSE_S:g} s")
            await self._committer.save()

    def _request_handler(self) -> request_handler.PipelineRequestHandler:
        return request_handler.PipelineRequestHandler(
            self._committer,
            self._settings.operators,
            progress=self._status,
            batches=lambda: list(self._batches),
            check=self._driver.check,
            stop=self.stop,
        )

    def _status(self) -> protocol.BatchProgress:
        driver = self._driver
        return msgspec.structs.replace(
            self._progress, driver=driver.process, epoch=driver.epoch, standbys=driver.standbys
        )

    def _show(self, state: str, reason: str = "", *, failures: int = 0) -> None:
        """Change the state that progress and health report."""
        self._progress = msgspec.structs.replace(
            self._progress, state=state, reason=reason, failures=failures
        )
        if self._on_progress is not None:
            self._on_progress(self._status())

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()

    # The driver

    async def _become_driver(self) -> bool:
        """Wait for the lease; False if stopped. A standby prepares Spark while it waits."""
        if await self._driver.try_acquire():
            return True
        self._show("standby", "another process is the driver")
        waiting = self._tasks.spawn("acquire", self._driver.acquire())
        stopping = self._tasks.spawn("stop", self._stop.wait())
        preparing = self._tasks.loop("prepare", self._prepare)
        await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
        preparing.cancel()
        await asyncio.to_thread(self._rehearsal.stop)
        if not waiting.done():
            waiting.cancel()
            return False
        stopping.cancel()
        await waiting
        self._parallelism = None  # executors may have come and gone
        self._show("starting")
        return True

    async def _prepare(self) -> None:
        """Start Spark, and rehearse the query again and again."""
        spark = await self._ensure_spark()
        known, _ = notifications.load_rules(self._settings)
        while True:
            try:
                after = await standby.positions(self._bus, batch_commit.POSITIONS)
                parallelism = await asyncio.to_thread(self._divide, spark)
                plan = self._plan(known, parallelism)
                self._driver.prepared = await asyncio.to_thread(self._rehearsal.run, spark, plan, after)
            except errors.Unavailable as error:
                self._log.warning("not-rehearsed", error=error)
            await asyncio.sleep(standby.REPEAT_S)

    def _begin(self) -> None:
        self._continuation = continuation.Continuation(
            self._driver,
            self._log,
            folder=self._paths.folder,
            checkpoint=self._checkpoint,
            history=self._history,
            keep_s=self._settings.as_of_s,
        )
        is_renewed = self._continuation.begin()
        self._committer = batch_commit.BatchCommitter(
            self._bus,
            self._settings,
            history=self._history,
            run=self._continuation.label.run,
            state_root=self._settings.state_root(self._paths.folder),
            authority=self._driver,
        )
        if is_renewed:
            self._committer.count(STREAM_SHORTER)

    async def _end_when_superseded(self) -> None:
        await self._driver.superseded.wait()
        self._log.error("superseded", epoch=self._driver.epoch)
        self._kill_java()
        self.stop()

    async def _end_when_unresponsive(self) -> None:
        """A Java process that is paused, or busy with garbage only, must not keep the lease."""
        while True:
            await asyncio.sleep(PROBE_S)
            if self._spark is not None:
                probing = asyncio.to_thread(spark_internals.probe, self._spark)
                done, _ = await asyncio.wait((self._tasks.spawn("probe", probing),), timeout=RESPONSE_S)
                if not done:
                    break
        self._log.error("java-unresponsive", epoch=self._driver.epoch)
        self._kill_java()
        self.stop()

    async def _is_current(self) -> bool:
        """False only if it is known that a later driver has begun."""
        try:
            return await self._continuation.is_current()
        except (errors.MusterError, OSError):
            return True

    def _kill_java(self) -> None:
        if self._given_spark is None and self._spark is not None:
            self._killed_java = True
            spark_internals.kill(self._spark)
            self._spark = None

    async def _remove_former(self) -> None:
        """Remove the terms of earlier drivers, which nothing reads any more."""
        try:
            self._driver.check()
            await asyncio.to_thread(self._continuation.remove_former)
            await asyncio.to_thread(self._committer.remove_former_state)
        except (errors.MusterError, OSError) as error:
            self._log.warning("former-term-not-removed", error=error)

    # The query

    def _begin_spark(self) -> None:
        # Not one of the supervised tasks, whose end would leave behind a Java that is just starting.
        if self._spark is None and self._starting is None:
            self._starting = asyncio.create_task(asyncio.to_thread(self._start_spark), name="spark")

    async def _ensure_spark(self) -> SparkSession:
        self._begin_spark()
        if self._spark is None:
            assert self._starting is not None
            self._spark = await asyncio.shield(self._starting)  # a standby that becomes the driver waits on
        return self._spark

    async def _end_spark(self) -> None:
        if self._starting is not None and self._spark is None and not self._killed_java:
            with contextlib.suppress(Exception):  # it was raised where Spark was needed
                self._spark = await self._starting
        if self._given_spark is None and self._spark is not None:
            await asyncio.to_thread(self._spark.stop)

    async def _run_query(self) -> None:
        if not await self._wait_for_stream():
            return
        self._show("starting", "Spark is starting")
        spark = await self._ensure_spark()
        self._stages.end("spark")
        self._show("starting", "the first batch is on its way")
        if self._settings.compact:
            limits = maintenance.MaintenanceLimits(
                self._paths.history_max_bytes, self._paths.history_max_age_s, self._settings.as_of_s
            )
            upkeep = history_upkeep.HistoryUpkeep(
                self._history,
                limits,
                self._driver,
                self._log,
                lambda: self._committer.clock_ms,
                None if session.is_local(self._settings.master) else spark,
            )
            self._tasks.loop("maintenance", functools.partial(upkeep.run, self._not_maintained))
        try:
            wait_s = 1.0
            while not self._stop.is_set():
                started = time.monotonic()
                try:
                    reason = await self._run_once(spark)
                except errors.Unavailable as error:  # of the brokers or the storage: they may be back soon
                    reason = str(error)
                if reason is None:
                    break
                if reason == TRANSFERRED:
                    await self._remove_former()
                    continue
                if reason == GROWN:
                    self._parallelism = None
                    await asyncio.to_thread(self._continuation.begin_term)
                    self._committer.follow(self._continuation.label.run)
                    continue
                self._committer.count("query-failed")
                self._show("failed", reason[-1000:], failures=self._progress.failures + 1)
                self._log.error("query-failed", reason=reason[:2000])
                await self._publish_progress()
                if state.UNREADABLE in reason:  # a retry would not help
                    folder = self._checkpoint
                    raise checkpoint_label.CheckpointUnusable(
                        f"the checkpoint in {folder} was not written by this version of Muster: "
                        f"{state.UNREADABLE}",
                        hint=checkpoint_label.advice(folder),
                    )
                if time.monotonic() - started > RESTART_WAIT_MAX_S:
                    wait_s = 1.0
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), wait_s)
                wait_s = min(2 * wait_s, RESTART_WAIT_MAX_S)
        finally:
            await self._tasks.close()

    async def _run_once(self, spark: SparkSession) -> str | None:
        """Run the query until the service stops (None) or the query ended by itself (the reason)."""
        if await self._continuation.follow_shorter_streams(self._bus, self._committer.clock_ms):
            self._parallelism = None
            self._committer.follow(self._continuation.label.run)
            self._committer.count(STREAM_SHORTER)
        query = await asyncio.to_thread(self._start_query, spark)
        self._stages.end("query")
        try:
            return await self._watch(query)
        finally:
            await asyncio.to_thread(job_query.stop, query)

    def _not_maintained(self, error: Exception) -> None:
        self._committer.count("not-compacted")
        self._tasks.record_failure("maintenance", error)

    async def _wait_for_stream(self) -> bool:
        """Channels create the stream, possibly later than this process starts."""
        while not self._stop.is_set():
            try:
                await self._bus.open_stream(columns.REPORTS_STREAM)
                return True
            except errors.NotFound:
                self._show("starting", f"waiting for the stream {columns.REPORTS_STREAM!r}")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), 1.0)
        return False

    def _start_spark(self) -> SparkSession:
        started = session.start(
            master=self._settings.master,
            name=f"muster {self._bus.identity}",
            work_dir=self._paths.folder / "pipeline",
            extra={
                "spark.driver.memory": self._settings.memory,
                "spark.executor.memory": self._settings.memory,
                **session.java_settings(self._settings.master),
                **session.ui_settings(self._settings.ui_port),
                **self._settings.spark_settings(),
            },
        )
        try:
            session.refuse_dynamic_allocation(started)
        except errors.InvalidInput:
            started.stop()
            raise
        return started

    def _start_query(self, spark: SparkSession) -> StreamingQuery:
        term = self._continuation.term
        last = self._continuation.last()
        is_new = last is None or last.committed is None
        transferred = None
        if is_new and term.state is not None:
            transferred = driver_terms.spark_folder(self._checkpoint, term.state.epoch), term.state.batch
        self._transfers = transferred is not None
        after, until = (
            tuple(offsets.get(stream, 0) for stream in batch_commit.POSITIONS)
            for offsets in (term.after, term.until)
        )
        plan = dataclasses.replace(
            self._plan(self._committer.rules, self._divide(spark, is_new=term.first == 0)),
            run=self._continuation.label.run,
            checkpoint=driver_terms.spark_folder(self._checkpoint, term.epoch),
            epoch=term.epoch,
            first=term.first,
            transferred=transferred,
            after=after,
            until=until,
        )
        return job_query.start(spark, plan, self._commit, trigger_s=self._settings.trigger_s)

    def _commit(self, number: int, received: window_rows.BatchRows) -> None:
        """In a thread of Spark."""
        self._committer.commit(number, received)
        self._loop.call_soon_threadsafe(self._show_committed)

    def _show_committed(self) -> None:
        self._committed.set()
        self._wake.set()

    def _divide(self, spark: SparkSession, *, is_new: bool = False) -> tuple[int, int, int]:
        """Shards, partitions and splits: fixed for the term. ``is_new``: nothing was read yet."""
        spark_internals.activate(spark)
        if self._parallelism is None:
            full = self._settings.parallelism(session.cores(spark))
            self._parallelism = full
            if session.is_local(self._settings.master) and self._fits_one_core(is_new=is_new):
                self._parallelism = self._settings.parallelism(1)
            self._is_small = self._parallelism != full
        return self._parallelism

    def _fits_one_core(self, *, is_new: bool) -> bool:
        """By the last batches, of this process or an earlier one here. A new pipeline begins as a small one;
        a driver that takes over from another machine does not know the fleet."""
        batches = list(self._batches) or cost_fit.read(self._folder / cost_fit.PROGRESS_NAME)
        if not batches:
            return is_new
        return max(batch.rows for batch in batches[-BATCHES_COMPARED:]) <= SMALL_REPORTS

    def _plan(
        self, known: Sequence[rules.AlertRule], parallelism: tuple[int, int, int]
    ) -> query_plan.QueryPlan:
        paths = self._paths
        return query_plan.from_settings(
            self._settings,
            known,
            parallelism,
            servers=paths.servers,
            credentials=paths.credentials,
            ca=paths.ca,
            history=self._history,
            pipeline=self._bus.identity,
        )

    async def _watch(self, query: StreamingQuery) -> str | None:
        """As `_run_once`."""
        seen, begun_s = -1, time.monotonic()
        is_planned = self._given_spark is not None
        while not self._stop.is_set():
            active, report = await asyncio.to_thread(job_query.poll, query)
            if not active:
                return report or "the query ended"
            is_new = report is not None and report["batchId"] != seen
            if report is not None and is_new:
                seen = report["batchId"]
                self._progress = self._measured(report)
                self._batches.append(self._progress)
                await self._publish_progress()
                await asyncio.to_thread(self._store_progress)
                if self._transfers and await self._continuation.has_committed():
                    return TRANSFERRED
                if self._is_small and self._progress.rows > SMALL_REPORTS:
                    return GROWN
                if not is_planned and self._spark is not None and time.monotonic() > begun_s + PLANNED_S:
                    is_planned = True
                    await asyncio.to_thread(spark_internals.end_planners, self._spark)
            # Spark reports a batch soon after its commit. Without one there is only its end to be noticed.
            wait_s = POLL_S if self._committed.is_set() and not is_new else IDLE_POLL_S
            if is_new:
                self._committed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), wait_s)
            self._wake.clear()
        self._show("stopping")
        return None

    def _measured(self, report: dict[str, Any]) -> protocol.BatchProgress:
        done = self._committer
        rows, self._rows_before = done.total_rows - self._rows_before, done.total_rows
        if self._stages.end("batch", last=True):
            self._log.info("driver-started", **self._stages.taken_ms)
        return msgspec.structs.replace(
            progress.measure(
                report,
                done,
                first=self._continuation.term.first,
                rows=rows,
                trigger_s=self._settings.trigger_s,
            ),
            start_ms=self._stages.taken_ms,
        )

    async def _every(self, period_s: float, work: Callable[[], Any]) -> None:
        while True:
            await asyncio.sleep(period_s)
            try:
                await work()
            except errors.MusterError as error:
                self._committer.count("bus-errors")
                self._log.warning("task-failed", error=error)

    # Background tasks

    async def _tick(self) -> None:
        """Publish a tick, so that Spark runs a batch and time advances even if all machines are silent."""
        self._driver.check()
        stream = await self._bus.open_stream(columns.REPORTS_STREAM)
        await stream.publish(protocol.tick(self._bus.identity), b"")

    async def _publish_progress(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._status())
        with contextlib.suppress(errors.Unavailable, errors.StaleEpoch):
            self._driver.check()
            await self._bus.publish(protocol.progress(self._bus.identity), messages.encode(self._status()))

    def _store_progress(self) -> None:
        try:
            cost_fit.append_sample(self._folder / cost_fit.PROGRESS_NAME, self._progress)
        except OSError as error:
            self._committer.count("progress-not-stored")
            self._log.warning("progress-not-stored", error=error)
