"""The commit of a micro-batch: reports, verdicts and alerts are written, published, and then saved.

The order matters: an interrupted batch is repeated, with the same results under the same message ids, and
the tables of the history refuse a batch that they have already.  The alert tracker does not change twice, so
its updates of the first attempt stay *unpublished* until the brokers have stored them and *unrecorded* until
the history has them; both are saved with its state.  `BatchCommitter.commit` runs in a thread of Spark; the
tracker and the bus belong to the event loop, for which it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from typing import NamedTuple

import pyarrow as pa

from muster.bus import api
from muster.core import errors, messages
from muster.core.reports import columns
from muster.core.telemetry import log
from muster.pipeline import protocol, steps
from muster.pipeline import settings as settings_
from muster.pipeline.alerts import notifications, rule_file, rules, tracker
from muster.pipeline.fleet import merged, rollups
from muster.pipeline.history import rollup_rows, tables
from muster.pipeline.job import commit_state, history_writer, query, window_rows
from muster.pipeline.job.driver import driver_lease, fenced_stream
from muster.pipeline.source import shard_keys

#: Positions in the streams up to which the history has every message: stored with commits of `nodes`.
POSITIONS = {stream: f"stream-{stream}" for stream in (columns.REPORTS_STREAM, columns.SUMMARIES_STREAM)}

#: The pipeline's own rules: evaluated here, not by their conditions.
LOSS = rules.AlertRule(
    name="reports-lost",
    scope="system",
    when="FALSE",
    severity=messages.Severity.CRITICAL,
    summary="the retention of the stream removed {value:.0f} messages with reports before they were read",
)
REASONS_MAX = 256  # counters
#: Of reports that are not about a group or zone, by scope.
KINDS: Mapping[str, type[messages.WireMessage]] = {
    "system": columns.SystemReport,
    "top": protocol.TopNodes,
}
REMOVED = "removed"  # scope of messages about removed machines
REMOVED_AT_ONCE = 1000  # in one message: names have up to 256 characters
REPORTS_AT_ONCE = 8000  # published while the next ones are encoded
RECONCILE_MS = 60_000  # after a new checkpoint: time for rules to become true again
LOSS_SHOWN_MS = 3_600_000  # so that the alert is seen, although the pipeline has caught up
HISTORY = rules.AlertRule(
    name="history-full",
    scope="system",
    when="FALSE",
    severity=messages.Severity.CRITICAL,
    summary="{value:.0f} rows of the last batch could not be written to the history",
)
STEPS = rules.AlertRule(
    name="step-failing",
    scope="system",
    when="FALSE",
    severity=messages.Severity.WARNING,
    summary="{value:.0f} steps of pipeline.steps failed in the last batch: the log of the pipeline says why",
)
NOTIFICATIONS = rules.AlertRule(
    name="notifications-failing",
    scope="system",
    when="FALSE",
    for_s=60.0,
    severity=messages.Severity.CRITICAL,
    summary="{value:.0f} notifications wait for contacts that do not accept them",
)


Report = tuple[str, str, messages.WireMessage]  # scope, name


class EncodedReport(NamedTuple):
    scope: str
    name: str
    data: bytes
    outgoing: api.OutgoingMessage | None  # None: it cannot be published


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
        known, contacts = rule_file.load(settings)
        self.rules = known
        self._steps = steps.read(settings.steps)
        self._faults: dict[str, str] = {}  # of steps, in the last batch
        self.counts: dict[str, int] = {}  # by reason, since the start
        self._latest: dict[tuple[str, str], bytes] = {}  # encoded reports, by scope and name
        self.machines = 0
        self.state_bytes = 0  # of shards, outside of Spark's state
        self.total_rows = 0
        self.done_ms = 0  # when the last batch was committed, by the local clock
        self.bus = bus
        self._top = settings.top
        self._authority = authority
        self._history_root, self._keep_s = history, settings.as_of_s
        self._state_root = state_root
        self._log = log.EventLog("pipeline", pipeline=bus.identity)
        self._saving = threading.Lock()
        stored = commit_state.CommitStateStore(state_root, authority.epoch).load()
        self._batch = stored.batch
        self.clock_ms = stored.clock_ms  # the broker's clock at the newest message read
        self.alert_tracker = tracker.AlertTracker(
            (*known, HISTORY, LOSS, NOTIFICATIONS, STEPS), stored.alerts, forget_s=settings.forget_s
        )
        self._stored_run = stored.run or run
        self._lost = (0, 0)  # the last messages that were lost: when, and how many
        for alert in self.alert_tracker.alerts():
            if alert.rule == LOSS.name:  # it is shown for its time although the driver was restarted
                self._lost = alert.since_ms, int(alert.value or 0)
        self.follow(run)
        self.sender = notifications.AlertNotificationSender(
            contacts, settings, unsent=stored.unsent, count=self.count
        )
        self._unpublished = stored.unpublished  # alert changes that the brokers have not stored yet
        # Stored by the brokers, not yet written to the history.
        self._unrecorded = stored.unrecorded
        self._recording = stored.recording
        self._window_ms = int(settings.window_s * 1000)
        baselines = rollups.Baselines()
        self._evaluator = rollups.ScopeRuleEvaluator(known, baselines)
        self._load_history(history, baselines)
        self._loop: asyncio.AbstractEventLoop
        self._results: fenced_stream.FencedStream
        self._alerts: fenced_stream.FencedStream

    def follow(self, run: str) -> None:
        """Commit the batches of this checkpoint from now on."""
        self._run = run
        epoch = self._authority.epoch
        self._history = history_writer.HistoryWriter(
            self._history_root, run, epoch=epoch, keep_s=self._keep_s
        )
        self._store = commit_state.CommitStateStore(self._state_root, epoch)
        # Alerts of a former checkpoint that were not evaluated since: the state of a new one cannot end them.
        self._unconfirmed = set(self.alert_tracker.on()) if self._stored_run != run else set()
        self._reconcile_at_ms: int | None = None

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
        outputs, parts, counts = received.outputs, received.parts, received.counts()
        system = rollups.scope_totals((share for part in parts for share in part.system), self._top)
        faults = received.faults()
        faults |= steps.extend_groups(self._steps, system)
        totals = [*(many for part in parts for many in part.totals()), *system]
        on = asyncio.run_coroutine_threadsafe(self._on(), self._loop).result()
        verdicts = [
            *rollups.node_verdicts(change for output in outputs for change in output.changes),
            *self._evaluator.evaluate(totals, on),
        ]
        verdicts.sort(key=lambda verdict: verdict.at_ms)
        clock_ms = max((output.clock_ms for output in outputs), default=0)
        gone = [(many.scope, many.name) for many in totals if many.gone]
        totals = [many for many in totals if not many.gone]
        # Arrow writes files and brokers store reports while Python encodes the next ones.
        with futures.ThreadPoolExecutor(1, "history") as pool:
            writing = pool.submit(self._write_history, number, received, system, counts)
            made: list[EncodedReport] = []
            publishing = []
            for encoded in self._reports(parts, system, totals):
                publishing.append(asyncio.run_coroutine_threadsafe(self._publish(encoded), self._loop))
                made += encoded
            writing.result()
        for published in publishing:
            published.result()
        if totals or counts.get("rows"):  # there was something to write
            verdicts.append(_about_history(counts, clock_ms))
            verdicts.append(self._about_steps(faults, counts, clock_ms))
        verdicts.append(self._about_loss(counts, clock_ms))
        failing = self.sender.failing()
        waiting = float(sum(contact.waiting for contact in failing))
        verdicts.append(tracker.RuleVerdict(NOTIFICATIONS.name, "pipeline", bool(failing), clock_ms, waiting))
        verdicts += self._reconcile(verdicts, clock_ms)
        removed = [machine for output in outputs for machine in output.removed]
        if removed:
            abouts = {f"node:{machine}" for machine in removed}
            verdicts += [
                tracker.RuleVerdict(rule, about, False, clock_ms) for rule, about in on if about in abouts
            ]
            counts["removed"] = len(removed)
            about = [self._encoded(*report) for report in _removed_messages(number, removed, clock_ms)]
            asyncio.run_coroutine_threadsafe(self._publish(about), self._loop).result()
        finish = self._finish(number, verdicts, clock_ms, made, counts, sum(o.machines for o in outputs))
        asyncio.run_coroutine_threadsafe(finish, self._loop).result()
        self.state_bytes = sum(output.state_bytes for output in outputs)
        for name in gone:
            self._latest.pop(name, None)

    def _load_history(self, root: str, baselines: rollups.Baselines) -> None:
        try:
            rollup_rows.load_baselines(baselines, root, self._evaluator.scored, window_ms=self._window_ms)
        except (errors.MusterError, OSError) as error:
            self._log.error("history-not-read", error=error)

    def _write_history(
        self,
        number: int,
        received: window_rows.BatchRows,
        system: list[rollups.ScopeTotals],
        counts: dict[str, int],
    ) -> None:
        """Commit the files of the executors, and the rows of the system."""
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
                self._history.commit(tables.NODES, number, files, positions)
        except errors.StaleEpoch:
            raise
        except (errors.MusterError, OSError) as error:
            self._count_failure(error, counts, query.HISTORY_LOST, sum(file.rows for file in files))
        files = [file for part in received.parts for file in part.files]
        rows = [] if received.rows is None else [received.rows]
        if system:
            rows.append(rollup_rows.rows(system))
        try:
            if files or rows:
                self._history.write(tables.GROUPS, number, pa.concat_tables(rows), files)
        except errors.StaleEpoch:
            raise
        except (errors.MusterError, OSError) as error:
            missing = sum(table.num_rows for table in rows) + sum(file.rows for file in files)
            self._count_failure(error, counts, window_rows.NOT_STORED, missing)

    def _count_failure(self, error: Exception, counts: dict[str, int], reason: str, rows: int) -> None:
        for name, number in ((reason, rows), (window_rows.explain_failure(error), 1)):
            counts[name] = counts.get(name, 0) + number
        self._log.error("history-not-written", error=error)

    def _reconcile(self, verdicts: Sequence[tracker.RuleVerdict], clock_ms: int) -> list[tracker.RuleVerdict]:
        """End alerts of a former checkpoint that were not evaluated again: their objects are gone."""
        if self._stored_run == self._run or not clock_ms:
            return []
        self._unconfirmed -= {(verdict.rule, verdict.about) for verdict in verdicts}
        if self._reconcile_at_ms is None:
            self._reconcile_at_ms = clock_ms + max(RECONCILE_MS, 3 * self._window_ms)
        if clock_ms < self._reconcile_at_ms:
            return []
        ended, self._unconfirmed, self._stored_run = sorted(self._unconfirmed), set(), self._run
        return [tracker.RuleVerdict(rule, about, False, clock_ms) for rule, about in ended]

    def _about_loss(self, counts: Mapping[str, int], clock_ms: int) -> tracker.RuleVerdict:
        if counts.get(shard_keys.LOST):
            self._lost = clock_ms, counts[shard_keys.LOST]
        at_ms, lost = self._lost
        is_shown = lost > 0 and clock_ms - at_ms < LOSS_SHOWN_MS
        return tracker.RuleVerdict(LOSS.name, "pipeline", is_shown, clock_ms, float(lost))

    def _about_steps(
        self, faults: dict[str, str], counts: dict[str, int], clock_ms: int
    ) -> tracker.RuleVerdict:
        for step, why in faults.items():
            counts[f"{steps.FAILED}{step}"] = counts.get(f"{steps.FAILED}{step}", 0) + 1
            if self._faults.get(step) != why:
                self._log.error("step-failed", step=step, error=why)
        self._faults = faults
        return tracker.RuleVerdict(STEPS.name, "pipeline", bool(faults), clock_ms, float(len(faults)))

    async def _on(self) -> frozenset[tuple[str, str]]:
        return self.alert_tracker.on()

    def _reports(
        self,
        parts: list[merged.MergedPart],
        system: list[rollups.ScopeTotals],
        totals: list[rollups.ScopeTotals],
    ) -> Iterator[list[EncodedReport]]:
        """In portions: some are published while the next ones are prepared."""
        reports = (report for part in parts for report in part.reports())
        while portion := [self._outgoing(*report) for report in itertools.islice(reports, REPORTS_AT_ONCE)]:
            yield portion
        made: list[Report] = []
        for many in system:
            groups = [other for other in totals if other.scope == "group" and other.from_ms == many.from_ms]
            made.append(("system", "", rollups.system_report(many, groups)))
            if many.top:
                made.append(("top", "", rollups.top_nodes(many)))
        if made:
            yield [self._encoded(*report) for report in made]

    async def _publish(self, reports: list[EncodedReport]) -> None:
        await self._results.publish([report.outgoing for report in reports if report.outgoing is not None])

    async def _finish(
        self,
        number: int,
        verdicts: list[tracker.RuleVerdict],
        clock_ms: int,
        made: list[EncodedReport],
        counts: dict[str, int],
        machines: int,
    ) -> None:
        self.clock_ms = max(self.clock_ms, clock_ms)
        self._batch = (self._run, number)
        outcome = self.alert_tracker.apply(verdicts, clock_ms)
        await self.publish_updates(outcome)
        self._latest.update({(report.scope, report.name): report.data for report in made if report.data})
        for _ in (report for report in made if report.outgoing is None):
            self.count("unpublished")
        await self._record_alerts(number)
        await asyncio.to_thread(self.save)
        self.machines = machines
        self.total_rows += counts.get("rows", 0)
        self.done_ms = int(time.time() * 1000)
        for reason, count in counts.items():
            self.count(reason, count)

    def _encoded(self, scope: str, name: str, message: messages.WireMessage) -> EncodedReport:
        at_ms = message.at_ms if isinstance(message, protocol.RemovedMachines) else message.to_ms  # type: ignore[attr-defined]
        try:
            return self._outgoing(scope, name, at_ms, messages.encode(message))
        except errors.LimitExceeded:
            return EncodedReport(scope, name, b"", None)

    def _outgoing(self, scope: str, name: str, at_ms: int, data: bytes) -> EncodedReport:
        """``data``: empty if it is too large."""
        if not data:
            return EncodedReport(scope, name, data, None)
        try:
            subject = columns.result_subject(self.bus.identity, scope, name)
        except errors.InvalidInput:
            return EncodedReport(scope, name, data, None)
        outgoing = api.OutgoingMessage(subject, data, message_id=f"{scope}:{name}:{at_ms}")
        return EncodedReport(scope, name, data, outgoing)

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
            await asyncio.to_thread(self.save)
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
        return recorded.count if self._history.has(tables.ALERTS, recorded.run, recorded.batch) else 0

    def _write_alerts(self, number: int, changed: list[messages.Alert]) -> bool:
        if not changed:
            return True
        if self._history.has(tables.ALERTS, self._run, number):
            return False
        self._history.write(tables.ALERTS, number, rollup_rows.alert_rows(changed))
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
            await asyncio.to_thread(self._save)
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
            await asyncio.to_thread(self.save)

    def save(self) -> None:
        """Save the state, if possible: the next call saves it as well."""
        try:
            self._save()
        except (errors.MusterError, OSError) as error:
            self.count("alerts-not-saved")
            self._log.error("alerts-not-saved", error=error)

    def _save(self) -> None:
        """Not if another process is the driver, or may be. One at a time: the last has the latest state."""
        with self._saving:
            self._authority.check()
            self._store.save(
                commit_state.CommitState(
                    self.alert_tracker.state(),
                    self.sender.unsent(),
                    self._unpublished,
                    self._unrecorded,
                    self._recording,
                    self._stored_run,
                    self._batch,
                    self.clock_ms,
                )
            )


def _removed_messages(number: int, machines: list[str], at_ms: int) -> list[Report]:
    return [
        (
            REMOVED,
            f"{number}-{start}",
            protocol.RemovedMachines(at_ms=at_ms, machines=tuple(machines[start : start + REMOVED_AT_ONCE])),
        )
        for start in range(0, len(machines), REMOVED_AT_ONCE)
    ]


def _about_history(counts: Mapping[str, int], clock_ms: int) -> tracker.RuleVerdict:
    missing = sum(counts.get(name, 0) for name in (query.HISTORY_LOST, window_rows.NOT_STORED))
    return tracker.RuleVerdict(HISTORY.name, "pipeline", missing > 0, clock_ms, float(missing))
