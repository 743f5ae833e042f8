"""The process that runs the job: Spark in its own threads, the bus on the event loop.

It waits until it is the driver (`driver_lease`), with Spark already started.  Then it begins a term of its
own in the checkpoint (`driver_terms`).  A driver that another process has replaced ends its Java process at
once, and itself with `errors.StaleEpoch`.

Each micro-batch ends in `batch_commit`; requests are handled by `request_handler`.  The event loop publishes
ticks and progress, advances the clock of the alert tracker, sends notifications, and maintains the history.
A query that ends by itself is restarted after a delay; the failure is visible in the progress and in the
counters.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from muster.bus import api, leases
from muster.bus.rpc import server
from muster.core import errors, messages
from muster.core.reports import columns
from muster.core.telemetry import log
from muster.pipeline import protocol
from muster.pipeline import settings as settings_
from muster.pipeline.batch import cost_fit
from muster.pipeline.fleet import state
from muster.pipeline.history import delta, maintenance, storage, tables
from muster.pipeline.job import (
    batch_commit,
    checkpoint_label,
    driver_lease,
    driver_terms,
    request_handler,
    state_copy,
)
from muster.pipeline.job import query as job_query
from muster.pipeline.source import session
from muster.supervision import tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

POLL_S = 0.25
TICK_S = 1.0  # maximum age of the clock in a small fleet
RESTART_WAIT_MAX_S = 60.0
MAINTAIN_S = 300.0
VACUUM_S = 3600.0
STREAM_SHORTER = "stream-shorter"  # counts streams that end before the position of the checkpoint
CLAIM_ATTEMPTS = 10
#: Why a query ended: its first batch has the state of the former term. The next one does not depend on that.
TRANSFERRED = "transferred"
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
        batch_commit.load_rules(settings)  # an invalid file is an error at once, not after a takeover
        self._checkpoint = settings.checkpoint_root(paths.folder)
        storage.check(self._checkpoint, setting="checkpoint_dir", checkpoint=True)
        self._folder = settings.state_folder(paths.folder)
        self._driver: driver_lease.DriverLease
        self._label: checkpoint_label.CheckpointLabel
        self._term: driver_terms.DriverTerm
        self._committer: batch_commit.BatchCommitter
        self._spark: SparkSession | None = spark
        self._parallelism: tuple[int, int, int] | None = None  # shards, partitions, splits
        self._transfers = False  # whether the query reads the state of an earlier term
        self._progress = protocol.BatchProgress(state="starting")
        self._batches: collections.deque[protocol.BatchProgress] = collections.deque(maxlen=BATCHES_KEPT)
        self._seen_batch = -1
        self._rows_before = 0
        self._first_sequence = 0  # of the stream, when this process began
        self._stop = asyncio.Event()
        self._tasks = tasks.TaskSupervisor(f"pipeline {bus.identity}")

    # Life cycle

    async def run(self) -> None:
        """Run until `stop` is called or requested."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._end_spark)
            replicas = self._paths.streams[0].replicas
            all_leases = await stack.enter_async_context(
                await leases.Leases.open(self._bus, replicas=replicas)
            )
            self._driver = driver_lease.DriverLease(self._bus, all_leases)
            stack.push_async_callback(self._driver.close)
            if not await self._become_driver():
                return
            await asyncio.to_thread(self._begin)
            self._driver.keep(self._is_current)
            await self._committer.open(self._paths.streams)
            handler = self._request_handler()
            await stack.enter_async_context(
                server.RpcServer(self._bus, protocol.PART, handler.operations(), authorize=handler.authorize)
            )
            tick_s = min(TICK_S, self._settings.trigger_s / 2)
            advance, send = self._committer.advance_clock, self._committer.sender.run
            self._tasks.loop("superseded", self._end_when_superseded)
            self._tasks.loop("tick", functools.partial(self._every, tick_s, self._tick))
            self._tasks.loop("clock", functools.partial(self._every, 1.0, advance))
            self._tasks.loop("notifications", functools.partial(send, self._committer.save))
            try:
                await self._run_query()
            finally:
                self._stop.set()
                await self._tasks.close()
            if self._driver.superseded.is_set():
                raise errors.StaleEpoch(
                    "another process has become the driver of the pipeline",
                    epoch=self._term.epoch,
                    current=self._term.epoch + 1,
                )
            await asyncio.to_thread(self._committer.save)

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

    def stop(self) -> None:
        self._stop.set()

    # The driver

    async def _become_driver(self) -> bool:
        """Wait for the lease; False if stopped. A standby starts Spark while it waits."""
        if await self._driver.try_acquire():
            return True
        self._progress = msgspec.structs.replace(
            self._progress, state="standby", reason="another process is the driver"
        )
        if self._on_progress is not None:
            self._on_progress(self._progress)
        await self._ensure_spark()
        waiting = self._tasks.spawn("acquire", self._driver.acquire())
        stopping = self._tasks.spawn("stop", self._stop.wait())
        await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            return False
        stopping.cancel()
        await waiting
        self._progress = msgspec.structs.replace(self._progress, state="starting", reason="")
        return True

    def _begin(self) -> None:
        """Claim an epoch, then read where the last driver stopped: it can commit nothing any more."""
        self._label = checkpoint_label.open_(self._checkpoint)
        is_renewed = self._follow_restored_streams()
        self._begin_term()
        self._committer = batch_commit.BatchCommitter(
            self._bus,
            self._settings,
            history=self._history,
            run=self._label.run,
            state_root=self._settings.state_root(self._paths.folder),
            authority=self._driver,
        )
        if is_renewed:
            self._committer.count(STREAM_SHORTER)

    def _begin_term(self) -> None:
        epoch, run = self._claim_epoch(), self._label.run
        last = driver_terms.read_last(self._checkpoint, run)
        self._term = driver_terms.next_term(epoch, run, last, self._stored_positions())
        if self._term.state is not None:
            driver_terms.relocate(self._checkpoint, self._term.state.epoch)
        driver_terms.begin(self._checkpoint, self._term)
        self._driver.epoch = epoch
        self._parallelism = None
        self._log.info("term-begun", epoch=epoch, batch=self._term.first)

    def _claim_epoch(self) -> int:
        """Higher than every epoch in the checkpoint and the history, and than that of the lease."""
        for _ in range(CLAIM_ATTEMPTS):
            try:
                written = [
                    delta.HistoryTable(self._history, name, keep_s=self._settings.as_of_s)
                    for name in (tables.NODES, tables.GROUPS, tables.ALERTS)
                ]
                claimed = [table.transaction_version(delta.DRIVER) or 0 for table in written]
                epoch = 1 + max([*claimed, *driver_terms.epochs(self._checkpoint), self._driver.lease_epoch])
                for table in written:
                    table.claim(epoch)
                return epoch
            except (storage.ConcurrentChange, errors.StaleEpoch):
                self._driver.check()
            except (storage.HistoryFull, storage.StorageUnavailable) as error:
                # The pipeline runs without a history that cannot be written; then only the lease protects it.
                self._log.error("epoch-not-claimed", error=error)
                return 1 + max([*driver_terms.epochs(self._checkpoint), self._driver.lease_epoch])
        raise errors.Unavailable("the history changes too often to begin as its driver")

    async def _is_current(self) -> bool:
        last = await asyncio.to_thread(driver_terms.read_last, self._checkpoint, self._label.run)
        return last is not None and last.term.epoch == self._term.epoch

    async def _end_when_superseded(self) -> None:
        await self._driver.superseded.wait()
        self._log.error("superseded", epoch=self._term.epoch)
        if self._given_spark is None and self._spark is not None:
            session.kill(self._spark)
            self._spark = None
        self._stop.set()

    async def _has_committed(self) -> bool:
        """Whether Spark has committed a batch of this term."""
        last = await asyncio.to_thread(driver_terms.read_last, self._checkpoint, self._label.run)
        return last is not None and last.term.epoch == self._term.epoch and last.committed is not None

    async def _remove_former(self) -> None:
        """Remove the terms of earlier drivers, which nothing reads any more."""
        try:
            self._driver.check()
            await asyncio.to_thread(driver_terms.remove_before, self._checkpoint, self._term.epoch)
            await asyncio.to_thread(self._committer.remove_former_state)
        except (errors.MusterError, OSError) as error:
            self._log.warning("former-term-not-removed", error=error)

    # The query

    async def _ensure_spark(self) -> SparkSession:
        if self._spark is None:
            self._spark = await asyncio.to_thread(self._start_spark)
        return self._spark

    async def _end_spark(self) -> None:
        if self._given_spark is None and self._spark is not None:
            await asyncio.to_thread(self._spark.stop)

    async def _run_query(self) -> None:
        if not await self._wait_for_stream():
            return
        spark = await self._ensure_spark()
        if self._settings.compact:
            self._tasks.loop("maintenance", self._maintain)
        try:
            wait_s = 1.0
            while not self._stop.is_set():
                await self._check_positions()
                query = await asyncio.to_thread(self._start_query, spark)
                started = time.monotonic()
                try:
                    reason = await self._watch(query)
                finally:
                    await asyncio.to_thread(_stop_query, query)
                if reason is None:
                    break
                if reason == TRANSFERRED:
                    await self._remove_former()
                    continue
                self._committer.count("query-failed")
                self._progress = msgspec.structs.replace(
                    self._progress, state="failed", reason=reason[-1000:]
                )
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

    async def _wait_for_stream(self) -> bool:
        """Channels create the stream, possibly later than this process starts."""
        while not self._stop.is_set():
            try:
                stream = await self._bus.open_stream(columns.REPORTS_STREAM)
                self._first_sequence = (await stream.state()).first_sequence
                return True
            except errors.NotFound:
                self._progress = msgspec.structs.replace(
                    self._progress, reason=f"waiting for the stream {columns.REPORTS_STREAM!r}"
                )
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), 1.0)
        return False

    def _start_spark(self) -> SparkSession:
        return session.start(
            master=self._settings.master,
            name=f"muster {self._bus.identity}",
            work_dir=self._paths.folder / "pipeline",
            extra={
                "spark.driver.memory": self._settings.memory,
                "spark.executor.memory": self._settings.memory,
            },
        )

    def _positions(self) -> dict[str, int]:
        """The last position that was read or planned, by stream."""
        last = driver_terms.read_last(self._checkpoint, self._label.run)
        return {
            **dict.fromkeys(batch_commit.POSITIONS, 0),
            **((last and (last.planned or last.end)) or self._term.until or self._term.after),
        }

    def _stored_positions(self) -> dict[str, int]:
        """Where a new checkpoint starts: after what the history has, unless the label names positions."""
        return {
            stream: self._label.after.get(stream, delta.position(self._history, tables.NODES, name) or 0)
            for stream, name in batch_commit.POSITIONS.items()
        }

    def _follow_restored_streams(self) -> bool:
        """Continue where restored streams end, if the checkpoint or the history is not of the same backup.

        What was read after the backup is in the history, but not in the streams: their sequences are used
        again.
        """
        restored = state_copy.read_restored(self._paths.folder)
        if restored is None:
            return False
        last = driver_terms.read_last(self._checkpoint, self._label.run)
        positions = (last and (last.planned or last.end)) or self._stored_positions()
        after = {
            stream: min(positions.get(stream, 0), restored.streams.get(stream, 0))
            for stream in batch_commit.POSITIONS
        }
        self._renew_checkpoint(after, "restored")
        state_copy.forget_restored(self._paths.folder)
        return True

    async def _check_positions(self) -> None:
        """Read a stream that ends before the position of the checkpoint from its first new message.

        It was created again or lost its last messages.  New are those stored later than the newest message
        that was read; until the next message is stored, the pipeline would skip them.
        """
        positions = await asyncio.to_thread(self._positions)
        after = dict(positions)
        for name, position in positions.items():
            try:
                stream = await self._bus.open_stream(name)
            except errors.NotFound:
                after[name] = 0
                continue
            if (await stream.state()).last_sequence < position:
                after[name] = await _last_stored_by(stream, self._committer.clock_ms)
        if after == positions:
            return
        await asyncio.to_thread(self._renew_checkpoint, after, "shorter")
        await asyncio.to_thread(self._begin_term)
        self._committer.follow(self._label.run)
        self._committer.count(STREAM_SHORTER)

    def _renew_checkpoint(self, after: dict[str, int], reason: str) -> None:
        self._label = checkpoint_label.renew(self._checkpoint, after)
        self._log.warning("checkpoint-renewed", reason=f"streams-{reason}", run=self._label.run, **after)

    def _start_query(self, spark: SparkSession) -> StreamingQuery:
        settings, term = self._settings, self._term
        session.activate(spark)
        if self._parallelism is None:  # fixed for the term
            self._parallelism = settings.parallelism(session.cores(spark))
        shards, partitions, splits = self._parallelism
        last = driver_terms.read_last(self._checkpoint, self._label.run)
        is_new = last is None or last.committed is None
        transferred = None
        if is_new and term.state is not None:
            transferred = driver_terms.spark_folder(self._checkpoint, term.state.epoch), term.state.batch
        self._transfers = transferred is not None
        after, until = (
            tuple(offsets.get(stream, 0) for stream in batch_commit.POSITIONS)
            for offsets in (term.after, term.until)
        )
        plan = job_query.QueryPlan(
            plan=state.FleetStatePlan(
                window_s=settings.window_s,
                delay_s=settings.delay_s,
                skew_s=settings.skew_s,
                stale_after=settings.stale_after,
                forget_s=settings.forget_s,
                top=settings.top,
                top_metrics=settings.top_metrics,
                rules=tuple(rule for rule in self._committer.rules if rule.scope == "node"),
            ),
            servers=self._paths.servers,
            credentials=self._paths.credentials,
            ca=self._paths.ca,
            checkpoint=driver_terms.spark_folder(self._checkpoint, term.epoch),
            history=self._history,
            run=self._label.run,
            pipeline=self._bus.identity,
            epoch=term.epoch,
            first=term.first,
            transferred=transferred,
            shards=shards,
            partitions=partitions,
            splits=splits,
            max_messages=settings.max_messages,
            after=after,
            until=until,
        )
        return job_query.start(spark, plan, self._committer.commit, trigger_s=settings.trigger_s)

    async def _watch(self, query: StreamingQuery) -> str | None:
        """Wait until the service stops (None) or the query ended by itself (the reason)."""
        while not self._stop.is_set():
            active, report = await asyncio.to_thread(_poll, query)
            if not active:
                return report or "the query ended"
            if report is not None and report["batchId"] != self._seen_batch:
                self._seen_batch = report["batchId"]
                self._progress = self._measure(report)
                self._batches.append(self._progress)
                await self._publish_progress()
                await asyncio.to_thread(self._store_progress)
                if self._transfers and await self._has_committed():
                    return TRANSFERRED
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

    async def _maintain(self) -> None:
        """Maintain the tables of the history every few minutes. A failure is retried the next time."""
        limits = maintenance.MaintenanceLimits(
            self._paths.history_max_bytes, self._paths.history_max_age_s, self._settings.as_of_s
        )
        vacuumed = time.monotonic()
        while True:
            await asyncio.sleep(MAINTAIN_S)
            due = time.monotonic() - vacuumed >= VACUUM_S
            try:
                done = await asyncio.to_thread(
                    maintenance.run,
                    self._history,
                    time.time(),
                    limits,
                    with_vacuum=due,
                    check=self._driver.check,
                )
                if any(done.values()):
                    self._log.info("history-maintained", **done)
                if due:
                    vacuumed = time.monotonic()
            except Exception as error:  # noqa: BLE001 (Arrow, DuckDB and delta-rs raise exceptions of many types)
                self._committer.count("not-compacted")
                self._tasks.record_failure("maintenance", error)

    def _measure(self, report: dict[str, Any]) -> protocol.BatchProgress:
        """Convert Spark's progress report of a batch."""
        source = report["sources"][0]
        states = report.get("stateOperators") or [{}]
        duration_ms = report.get("durationMs") or {}
        batch_s = duration_ms.get("triggerExecution", 0) / 1000
        done = self._committer
        rows, self._rows_before = done.total_rows - self._rows_before, done.total_rows
        shown = {
            name: count
            for name, count in done.counts.items()
            if name != "rows" and not name.startswith(job_query.CPU)
        }
        cpu = {
            name.removeprefix(job_query.CPU): count // 1000
            for name, count in done.counts.items()
            if name.startswith(job_query.CPU)
        }
        return protocol.BatchProgress(
            state="running",
            at_ms=done.done_ms or int(time.time() * 1000),
            newest_ms=done.clock_ms,
            trigger_s=self._settings.trigger_s,
            batch=self._term.first + report["batchId"],
            batch_s=batch_s,
            rows=rows,
            rows_s=rows / max(self._settings.trigger_s, batch_s),
            messages=int(source.get("numInputRows") or 0),
            lag_messages=_lag_messages(source),
            lag_s=max(0, done.done_ms - done.clock_ms) / 1000,
            state_bytes=int(states[0].get("memoryUsedBytes") or 0),
            state_rows=int(states[0].get("numRowsTotal") or 0),
            machines=done.machines,
            stages_ms={name: int(took) for name, took in duration_ms.items()},
            cpu_ms=cpu,
            counts=shown,
            total_rows=done.total_rows,
        )


async def _last_stored_by(stream: api.Stream, clock_ms: int) -> int:
    """The sequence of the last message that was stored at this time or before."""
    state_ = await stream.state()
    low, high = state_.first_sequence - 1, state_.last_sequence
    while low < high:
        middle = (low + high + 1) // 2
        try:
            is_old = (await stream.get(middle)).stored_at_ns // 1_000_000 <= clock_ms
        except errors.NotFound:  # removed meanwhile by the retention of the stream
            is_old = True
        low, high = (middle, high) if is_old else (low, middle - 1)
    return low


def _poll(query: StreamingQuery) -> tuple[bool, Any]:
    if not query.isActive:
        error = query.exception()
        return False, str(error) if error else ""
    return True, query.lastProgress


def _stop_query(query: StreamingQuery) -> None:
    with contextlib.suppress(Exception):  # Spark reports a batch that was interrupted as an error
        query.stop()


def _lag_messages(source: dict[str, Any]) -> int:
    """Messages stored and not read yet. Spark reports offsets as JSON text or as decoded JSON."""
    latest, end = (
        msgspec.json.decode(offset) if isinstance(offset, str) else offset
        for offset in (source.get("latestOffset"), source.get("endOffset"))
    )
    if not isinstance(latest, dict) or not isinstance(end, dict):
        return 0
    return sum(max(0, int(latest[name]) - int(end.get(name, 0))) for name in latest)
