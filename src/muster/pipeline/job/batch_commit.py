"""The commit of a micro-batch: what `batch_plan` planned is written, published, and then saved.

The order matters: an interrupted batch is repeated, with the same results under the same message ids, and
the tables of the history refuse a batch that they have already.  The alert tracker does not change twice, so
its updates of the first attempt stay *unpublished* until the brokers have stored them and *unrecorded* until
the history has them; both are saved with its state.  `BatchCommitter.commit` runs in a thread of Spark; the
tracker and the bus belong to the event loop, for which it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from muster.bus import api
from muster.core import errors, messages
from muster.core.reports import columns
from muster.core.telemetry import log
from muster.pipeline import protocol, steps
from muster.pipeline import settings as settings_
from muster.pipeline.alerts import notifications, tracker
from muster.pipeline.fleet import rollups
from muster.pipeline.history import data_files, delta, rollup_rows, tables
from muster.pipeline.job import batch_plan, commit_state, query, window_rows
from muster.pipeline.job.driver import driver_lease, fenced_stream
from muster.supervision import tasks

#: Positions in the streams up to which the history has every message: stored with commits of `nodes`.
POSITIONS = {stream: f"stream-{stream}" for stream in (columns.REPORTS_STREAM, columns.SUMMARIES_STREAM)}

#: Of reports that are not about a group or zone, by scope.
KINDS: Mapping[str, type[messages.WireMessage]] = {
    "system": columns.SystemReport,
    "top": protocol.TopNodes,
}
REASONS_MAX = 256  # counters
T = TypeVar("T")


class BatchCommitter:
    def __init__(
        self,
        bus: api.Bus,
        settings: settings_.PipelineSettings,
        *,
        history: str,
        run: str,
        state_root: str,
        authority: driver_lease.DriverAuthority,
    ) -> None:
        known, contacts = notifications.load_rules(settings)
        self.rules = known
        self._steps = steps.read(settings.steps)
        self.counts: dict[str, int] = {}  # by reason, since the start
        self._latest: dict[tuple[str, str], bytes] = {}  # encoded reports, by scope and name
        self.machines = 0
        self.state_bytes = 0  # of shards, outside of Spark's state
        self.total_rows = 0
        self.done_ms = 0  # when the last batch was committed, by the local clock
        self.bus = bus
        self._authority = authority
        self._history_root, self._keep_s = history, settings.as_of_s
        self._tables: dict[str, delta.HistoryTable] = {}
        self._state_root = state_root
        self._log = log.EventLog("pipeline", pipeline=bus.identity)
        self._saving = asyncio.Lock()
        stored = commit_state.CommitStateStore(state_root, authority.epoch).load()
        self._batch = stored.batch
        self.clock_ms = stored.clock_ms  # the broker's clock at the newest message read
        self.alert_tracker = tracker.AlertTracker(
            (*known, *batch_plan.OWN_RULES), stored.alerts, forget_s=settings.forget_s
        )
        window_ms = int(settings.window_s * 1000)
        baselines = rollups.Baselines()
        self._planner = batch_plan.BatchPlanner(
            known,
            baselines,
            top=settings.top,
            window_ms=window_ms,
            open_alerts=self.alert_tracker.alerts(),
            alerts_run=stored.run or run,
        )
        self.follow(run)
        self.sender = notifications.AlertNotificationSender(
            contacts, settings, unsent=stored.unsent, count=self.count
        )
        self._unpublished = stored.unpublished  # alert changes that the brokers have not stored yet
        # Stored by the brokers, not yet written to the history.
        self._unrecorded = stored.unrecorded
        self._recording = stored.recording
        self._load_history(history, baselines, window_ms)
        self._loop: asyncio.AbstractEventLoop
        self._results: fenced_stream.FencedStream
        self._alerts: fenced_stream.FencedStream

    def follow(self, run: str) -> None:
        """Commit the batches of this checkpoint from now on."""
        self._run = run
        self._epoch = self._authority.epoch
        self._store = commit_state.CommitStateStore(self._state_root, self._epoch)
        self._planner.follow(run, self.alert_tracker.on())

    async def open(self, streams: Sequence[api.StreamSettings]) -> None:
        """``streams``: those of `protocol.streams`, in its order."""
        self._loop = asyncio.get_running_loop()
        self._results, self._alerts = [
            fenced_stream.FencedStream(await self.bus.stream(stream), self._authority) for stream in streams
        ]
        await self._results.fence(columns.result_subject(self.bus.identity, protocol.MARKER))
        await self._alerts.fence(protocol.alert(self.bus.identity, protocol.MARKER))

    def count(self, reason: str, count: int = 1) -> None:
        if reason not in self.counts and len(self.counts) >= REASONS_MAX:  # channels name their own
            reason = "other"
        self.counts[reason] = self.counts.get(reason, 0) + count

    def latest(self, scope: str, name: str) -> messages.WireMessage | None:
        """The last report of a scope."""
        data = self._latest.get((scope, name))
        return None if data is None else messages.decode(data, KINDS.get(scope, columns.GroupReport))

    def remove_former_state(self) -> None:
        """Remove the alert state of earlier drivers, when this one has saved its own."""
        self._store.remove_before()

    def commit(self, number: int, received: window_rows.BatchRows) -> None:
        self._authority.check()
        on = self._in_loop(self._on()).result()
        plan = self._planner.plan(number, received, self._steps, on)
        for step, why in self._planner.new_faults(plan).items():
            self._log.error("step-failed", step=step, error=why)
        # Arrow writes files and brokers store reports while Python encodes the next ones.
        with futures.ThreadPoolExecutor(1, "history") as pool:
            writing = pool.submit(self._write_history, plan)
            made: list[batch_plan.EncodedReport] = []
            publishing = []
            for encoded in plan.reports(self.bus.identity):
                publishing.append(self._in_loop(self._publish(encoded)))
                made += encoded
            writing.result()
        for published in publishing:
            published.result()
        if removals := plan.removals(self.bus.identity):
            self._in_loop(self._publish(removals)).result()
        self._in_loop(self._conclude(plan, made)).result()
        self.state_bytes = sum(output.state_bytes for output in received.outputs)
        for name in plan.gone:
            self._latest.pop(name, None)

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _load_history(self, root: str, baselines: rollups.Baselines, window_ms: int) -> None:
        scored = self._planner.evaluator.scored
        try:
            rollup_rows.load_baselines(baselines, root, scored, window_ms=window_ms)
        except (errors.MusterError, OSError) as error:
            self._log.error("history-not-read", error=error)

    def _write_history(self, plan: batch_plan.BatchPlan) -> None:
        """Commit the files of the executors, and the rows of the system."""
        number, received, counts = plan.number, plan.received, plan.counts
        outputs = received.outputs
        files = [file for output in outputs for file in output.files]
        positions = {
            name: position
            for name, position in zip(
                POSITIONS.values(),
                (
                    max((output.reports for output in outputs), default=0),
                    max((output.summaries for output in outputs), default=0),
                ),
                strict=True,
            )
            if position
        }
        try:
            if files or positions:
                table, transaction = self._table(tables.NODES), (self._run, number)
                table.commit(files, transaction, positions, epoch=self._epoch)
        except errors.StaleEpoch:
            raise
        except (errors.MusterError, OSError) as error:
            self._count_failure(error, counts, query.HISTORY_LOST, sum(file.rows for file in files))
        files = [file for part in received.parts for file in part.files]
        rows = [] if received.rows is None else [received.rows]
        if plan.system:
            rows.append(rollup_rows.rows(plan.system))
        try:
            if files or rows:
                self._write_rows(tables.GROUPS, number, rows, files)
        except errors.StaleEpoch:
            raise
        except (errors.MusterError, OSError) as error:
            missing = sum(table.num_rows for table in rows) + sum(file.rows for file in files)
            self._count_failure(error, counts, window_rows.NOT_STORED, missing)

    def _table(self, name: str) -> delta.HistoryTable:
        """Opened when it is first needed."""
        if name not in self._tables:
            self._tables[name] = delta.HistoryTable(self._history_root, name, keep_s=self._keep_s)
        return self._tables[name]

    def _write_rows(
        self, name: str, number: int, rows: Sequence[pa.Table], others: Sequence[data_files.DataFile] = ()
    ) -> None:
        """Write rows and commit them with other files, unless the table has this batch already."""
        table = self._table(name)
        if not table.has(self._run, number):
            stem = f"{self._run}-{self._epoch}-{number}"
            joined = pa.concat_tables(rows) if rows else None
            written = data_files.write(self._history_root, name, joined, stem).files if joined else []
            table.commit([*others, *written], (self._run, number), epoch=self._epoch)

    def _count_failure(self, error: Exception, counts: dict[str, int], reason: str, rows: int) -> None:
        for name, number in ((reason, rows), (window_rows.explain_failure(error), 1)):
            counts[name] = counts.get(name, 0) + number
        self._log.error("history-not-written", error=error)

    async def _on(self) -> frozenset[tuple[str, str]]:
        return self.alert_tracker.on()

    async def _publish(self, reports: list[batch_plan.EncodedReport]) -> None:
        await self._results.publish([report.outgoing for report in reports if report.outgoing is not None])

    async def _conclude(self, plan: batch_plan.BatchPlan, made: list[batch_plan.EncodedReport]) -> None:
        self._planner.conclude(plan, self.sender.failing())
        await self._finish(plan.number, plan.verdicts, plan.clock_ms, made, plan.counts, plan.machines)

    async def _finish(
        self,
        number: int,
        verdicts: list[tracker.RuleVerdict],
        clock_ms: int,
        made: list[batch_plan.EncodedReport],
        counts: dict[str, int],
        machines: int,
    ) -> None:
        self.clock_ms = max(self.clock_ms, clock_ms)
        self._batch = (self._run, number)
        # Nothing is saved between the change of the tracker and the queues of what follows from it.
        await self.publish_updates(self.alert_tracker.apply(verdicts, clock_ms))
        self._latest.update({(report.scope, report.name): report.data for report in made if report.data})
        for _ in (report for report in made if report.outgoing is None):
            self.count("unpublished")
        await self._record_alerts(number)
        await self.save()
        self.machines = machines
        self.total_rows += counts.get("rows", 0)
        self.done_ms = int(time.time() * 1000)
        for reason, count in counts.items():
            self.count(reason, count)

    async def _record_alerts(self, number: int) -> None:
        """Write alert changes to the history, once.

        They are saved with the transaction that will contain them: after a crash it is known from the table
        whether they were written.
        """
        if not self._unrecorded:
            return
        count = len(self._unrecorded)
        try:
            if self._recording is not None:  # the process ended between the commit and saving its state
                count = await asyncio.to_thread(self._count_recorded, self._recording)
                del self._unrecorded[:count]
            self._recording = commit_state.RecordedAlerts(self._run, number, len(self._unrecorded))
            changed = list(self._unrecorded)
            count = len(changed)
            await self.save()
            if not await asyncio.to_thread(self._write_alerts, number, changed):
                count = 0  # a repeated batch: they belong to the next one
        except errors.StaleEpoch:
            raise
        except (errors.MusterError, OSError) as error:
            self.count("alerts-not-in-history", count)
            self._log.error("history-not-written", error=error)
        self._recording = None
        del self._unrecorded[:count]

    def _count_recorded(self, recorded: commit_state.RecordedAlerts) -> int:
        return recorded.count if self._table(tables.ALERTS).has(recorded.run, recorded.batch) else 0

    def _write_alerts(self, number: int, changed: list[messages.Alert]) -> bool:
        if not changed:
            return True
        if self._table(tables.ALERTS).has(self._run, number):
            return False
        self._write_rows(tables.ALERTS, number, [rollup_rows.alert_rows(changed)])
        return True

    async def publish_updates(self, outcome: tracker.AlertUpdates) -> None:
        """Publish alert changes and queue notifications. The next call repeats a failed publication."""
        self._queue(outcome)
        publishing = list(self._unpublished)
        await self._alerts.publish(
            [
                api.OutgoingMessage(
                    protocol.alert(self.bus.identity, alert.rule),
                    messages.encode(alert),
                    message_id=f"{alert.rule}:{alert.about}:{alert.state.value}:{alert.since_ms}",
                )
                for alert in publishing
            ]
        )
        published = {id(alert) for alert in publishing}
        self._unrecorded += [alert for alert in self._unpublished if id(alert) in published]
        self._unpublished = [alert for alert in self._unpublished if id(alert) not in published]

    async def store_updates(self, outcome: tracker.AlertUpdates) -> None:
        """Store the changes of a user, and then publish them; `errors.TimedOut` if they may be lost.

        A successor that took over meanwhile may have read the state before. What cannot be published now is
        published later.
        """
        self._queue(outcome)
        try:
            await self._save()
            await self._authority.confirm()
        except (errors.MusterError, OSError) as error:
            raise errors.TimedOut(f"it is not known whether the change is stored: {error}") from error
        with contextlib.suppress(errors.MusterError):
            await self.publish_updates(tracker.AlertUpdates())

    def _queue(self, outcome: tracker.AlertUpdates) -> None:
        for notification in outcome.notifications:
            self.sender.add(notification)
        self._unpublished += outcome.alerts

    async def advance_clock(self) -> None:
        """Alerts advance with the clock of the stream, which stops while nothing is read."""
        outcome = self.alert_tracker.tick(self.clock_ms)
        if outcome.alerts or self._unpublished:
            await self.publish_updates(outcome)
            await self.save()

    async def save(self) -> None:
        """Save the state, if possible: the next call saves it as well."""
        try:
            await self._save()
        except (errors.MusterError, OSError) as error:
            self.count("alerts-not-saved")
            self._log.error("alerts-not-saved", error=error)

    async def _save(self) -> None:
        """Not if another process is the driver, or may be. One at a time: the last has the latest state."""
        async with self._saving:
            self._authority.check()
            state = commit_state.CommitState(
                self.alert_tracker.state(),
                self.sender.unsent(),
                self._unpublished,
                self._unrecorded,
                self._recording,
                self._planner.alerts_run,
                self._batch,
                self.clock_ms,
            )
            # Encoded on the event loop, which changes all of it: a thread could see half of a change.
            await tasks.finish(asyncio.to_thread(self._store.save, msgspec.json.encode(state)))
