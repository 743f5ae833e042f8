"""The commit of a micro-batch: reports, verdicts and alerts are written, published, and then saved.

The order matters: an interrupted batch is repeated, with the same results under the same message ids, and
the tables of the history refuse a batch that they have already.  The alert tracker does not change twice, so
its updates of the first attempt stay *unpublished* until the brokers have stored them and *unrecorded* until
the history has them; both are saved with its state.  `BatchCommitter.commit` runs in a thread of Spark; the
tracker and the bus belong to the event loop, for which it waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from muster.bus import api
from muster.core import errors, files, messages
from muster.core.reports import columns
from muster.core.telemetry import log
from muster.pipeline import protocol
from muster.pipeline import settings as settings_
from muster.pipeline.alerts import notifications, rules, tracker
from muster.pipeline.fleet import rollups, state
from muster.pipeline.history import data_files, delta, rollup_rows, tables
from muster.pipeline.job import query
from muster.pipeline.source import shard_keys

PUBLISH_AT_ONCE = 500
STATE_VERSION = 1  # of `CommitState`

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
RECONCILE_MS = 60_000  # after a new checkpoint: time for rules to become true again
LOSS_SHOWN_MS = 3_600_000  # so that the alert is seen, although the pipeline has caught up
HISTORY = rules.AlertRule(
    name="history-full",
    scope="system",
    when="FALSE",
    severity=messages.Severity.CRITICAL,
    summary="{value:.0f} rows of the last batch could not be written to the history",
)


class RecordedAlerts(msgspec.Struct, frozen=True):
    """The transaction of `alerts` that contains the first unrecorded alerts, once it is committed."""

    run: str
    batch: int
    count: int


class CommitState(msgspec.Struct):
    """The state that survives the process, besides Spark's checkpoint."""

    alerts: tracker.AlertTrackerState
    unsent: list[tracker.AlertNotification] = msgspec.field(default_factory=list)
    unpublished: list[messages.Alert] = msgspec.field(default_factory=list)
    unrecorded: list[messages.Alert] = msgspec.field(default_factory=list)
    recording: RecordedAlerts | None = None
    run: str = ""  # the checkpoint whose state the alerts follow
    batch: tuple[str, int] | None = None  # the last one that was applied: its checkpoint and number
    clock_ms: int = 0  # the broker's clock at the newest message read
    version: int = STATE_VERSION


class HistoryWriter:
    """The tables of the history, opened when they are first needed."""

    def __init__(self, root: str, run: str, *, keep_s: float) -> None:
        self._root = root
        self._run = run
        self._keep_s = keep_s
        self._tables: dict[str, delta.HistoryTable] = {}

    def commit(
        self,
        name: str,
        batch: int,
        files: Iterable[data_files.DataFile],
        positions: Mapping[str, int] | None = None,
    ) -> bool:
        return self._table(name).commit(files, (self._run, batch), positions)

    def write(self, name: str, batch: int, rows: pa.Table) -> None:
        """Write and commit rows, unless the table has this batch already."""
        table = self._table(name)
        table.refresh()
        last = table.transaction_version(self._run)
        if last is None or last < batch:
            stem = f"{self._run}-{batch}"
            table.commit(data_files.write(self._root, name, rows, stem).files, (self._run, batch))

    def has(self, name: str, run: str, batch: int) -> bool:
        """Whether the batch of a run is in the table."""
        last = delta.position(self._root, name, run)
        return last is not None and last >= batch

    def _table(self, name: str) -> delta.HistoryTable:
        if name not in self._tables:
            self._tables[name] = delta.HistoryTable(self._root, name, keep_s=self._keep_s)
        return self._tables[name]


class BatchCommitter:
    def __init__(
        self, bus: api.Bus, settings: settings_.PipelineSettings, *, history: str, run: str, state_path: Path
    ) -> None:
        known, receivers = _load_rules(settings)
        self.rules = known
        self.counts: dict[str, int] = {}  # by reason, since the start
        self.latest: dict[tuple[str, str], messages.WireMessage] = {}
        self.machines = 0
        self.total_rows = 0
        self._lost = (0, 0)  # the last messages that were lost: when, and how many
        self.done_ms = 0  # when the last batch was committed, by the local clock
        self._bus = bus
        self._top = settings.top
        self._history_root, self._keep_s = history, settings.as_of_s
        self._state_path = state_path
        self._log = log.EventLog("pipeline", pipeline=bus.identity)
        stored = self._load_state()
        self._batch = stored.batch
        self.clock_ms = stored.clock_ms  # the broker's clock at the newest message read
        self.alert_tracker = tracker.AlertTracker(
            (*known, HISTORY, LOSS), stored.alerts, forget_s=settings.forget_s
        )
        self._stored_run = stored.run or run
        self.follow(run)
        self.sender = notifications.AlertNotificationSender(
            receivers, settings, unsent=stored.unsent, count=self.count
        )
        self._unpublished = stored.unpublished  # alert changes that the brokers have not stored yet
        # Stored by the brokers, not yet written to the history.
        self._unrecorded = stored.unrecorded
        self._recording = stored.recording
        self._window_ms = int(settings.window_s * 1000)
        baselines = rollups.Baselines()
        self._evaluator = rollups.ScopeRuleEvaluator(known, baselines, self._window_ms)
        self._load_history(history, baselines)
        self._loop: asyncio.AbstractEventLoop
        self._results: api.Stream
        self._alerts: api.Stream

    def follow(self, run: str) -> None:
        """Commit the batches of this checkpoint from now on."""
        self._run = run
        self._history = HistoryWriter(self._history_root, run, keep_s=self._keep_s)
        # Alerts of a former checkpoint that were not evaluated since: the state of a new one cannot end them.
        self._unconfirmed = set(self.alert_tracker.on()) if self._stored_run != run else set()
        self._reconcile_at_ms: int | None = None

    async def open(self, streams: Sequence[api.StreamSettings]) -> None:
        """``streams``: those of `protocol.streams`, in its order."""
        self._loop = asyncio.get_running_loop()
        self._results, self._alerts = [await self._bus.stream(stream) for stream in streams]

    def count(self, reason: str, count: int = 1) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + count

    def commit(self, number: int, outputs: list[state.ShardOutput], counts: dict[str, int]) -> None:
        totals = rollups.scope_totals((window for output in outputs for window in output.closed), self._top)
        on = asyncio.run_coroutine_threadsafe(self._on(), self._loop).result()
        verdicts = [
            *rollups.node_verdicts(change for output in outputs for change in output.changes),
            *self._evaluator.evaluate(totals, on),
        ]
        verdicts.sort(key=lambda verdict: verdict.at_ms)
        clock_ms = max((output.clock_ms for output in outputs), default=0)
        gone = [(many.scope, many.name) for many in totals if many.gone]
        totals = [many for many in totals if not many.gone]
        made = self._reports(totals)
        self._write_history(number, outputs, totals, counts)
        if totals or counts.get("rows"):  # there was something to write
            verdicts.append(_about_history(counts, clock_ms))
        verdicts.append(self._about_loss(counts, clock_ms))
        verdicts += self._reconcile(verdicts, clock_ms)
        finish = self._finish(number, verdicts, clock_ms, made, counts, sum(o.machines for o in outputs))
        asyncio.run_coroutine_threadsafe(finish, self._loop).result()
        for name in gone:
            self.latest.pop(name, None)

    def _load_history(self, root: str, baselines: rollups.Baselines) -> None:
        try:
            rollup_rows.load_baselines(baselines, root, self._evaluator.scored, window_ms=self._window_ms)
        except (errors.MusterError, OSError) as error:
            self._log.error("history-not-read", error=error)

    def _write_history(
        self,
        number: int,
        outputs: list[state.ShardOutput],
        totals: list[rollups.ScopeTotals],
        counts: dict[str, int],
    ) -> None:
        """Commit the files of the executors, and the rows of groups, zones and the system."""
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
        except (errors.MusterError, OSError) as error:
            self._count_failure(error, counts, query.HISTORY_LOST, sum(file.rows for file in files))
        try:
            if totals:
                self._history.write(tables.GROUPS, number, rollup_rows.rows(totals, self._window_ms))
        except (errors.MusterError, OSError) as error:
            self._count_failure(error, counts, "rollups-not-in-history", len(totals))

    def _count_failure(self, error: Exception, counts: dict[str, int], reason: str, rows: int) -> None:
        for name, number in ((reason, rows), (query.explain_failure(error), 1)):
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

    async def _on(self) -> frozenset[tuple[str, str]]:
        return self.alert_tracker.on()

    def _reports(self, totals: list[rollups.ScopeTotals]) -> list[tuple[str, str, messages.WireMessage]]:
        made: list[tuple[str, str, messages.WireMessage]] = []
        for many in totals:
            if many.scope == "system":
                groups = [
                    other for other in totals if other.scope == "group" and other.from_ms == many.from_ms
                ]
                made.append(("system", "", rollups.system_report(many, groups, self._window_ms)))
                if many.top:
                    made.append(("top", "", rollups.top_nodes(many, self._window_ms)))
            else:
                made.append((many.scope, many.name, rollups.group_report(many, self._window_ms)))
        return made

    async def _finish(
        self,
        number: int,
        verdicts: list[tracker.RuleVerdict],
        clock_ms: int,
        made: list[tuple[str, str, messages.WireMessage]],
        counts: dict[str, int],
        machines: int,
    ) -> None:
        self.clock_ms = max(self.clock_ms, clock_ms)
        self._batch = (self._run, number)
        outcome = self.alert_tracker.apply(verdicts, clock_ms)
        await _in_groups(self._publish(*result) for result in made)
        await self.publish_updates(outcome)
        for scope, name, message in made:
            self.latest[scope, name] = message
        await self._record_alerts(number)
        await asyncio.to_thread(self.save)
        self.machines = machines
        self.total_rows += counts.get("rows", 0)
        self.done_ms = int(time.time() * 1000)
        for reason, count in counts.items():
            self.count(reason, count)

    async def _publish(self, scope: str, name: str, message: messages.WireMessage) -> None:
        try:
            subject = columns.result_subject(self._bus.identity, scope, name)
            data = messages.encode(message)
        except (errors.InvalidInput, errors.LimitExceeded):  # invalid subject, or too large
            self.count("unpublished")
            return
        to_ms = message.to_ms  # type: ignore[attr-defined]
        await self._results.publish(subject, data, message_id=f"{scope}:{name}:{to_ms}")

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
            self._recording = RecordedAlerts(self._run, number, len(self._unrecorded))
            changed = list(self._unrecorded)
            count = len(changed)
            await asyncio.to_thread(self.save)
            if not await asyncio.to_thread(self._write_alerts, number, changed):
                count = 0  # a repeated batch: they belong to the next one
        except (errors.MusterError, OSError) as error:
            self.count("alerts-not-in-history", count)
            self._log.error("history-not-written", error=error)
        self._recording = None
        del self._unrecorded[:count]

    def _count_recorded(self, recorded: RecordedAlerts) -> int:
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
        for notification in outcome.notifications:
            self.sender.add(notification)
        self._unpublished += outcome.alerts
        publishing = list(self._unpublished)
        await _in_groups(
            self._alerts.publish(
                protocol.alert(self._bus.identity, alert.rule),
                messages.encode(alert),
                message_id=f"{alert.rule}:{alert.about}:{alert.state.value}:{alert.since_ms}",
            )
            for alert in publishing
        )
        published = {id(alert) for alert in publishing}
        self._unrecorded += [alert for alert in self._unpublished if id(alert) in published]
        self._unpublished = [alert for alert in self._unpublished if id(alert) not in published]

    async def advance_clock(self) -> None:
        """Alerts advance with the clock of the stream, which stops while nothing is read."""
        outcome = self.alert_tracker.tick(self.clock_ms)
        if outcome.alerts or self._unpublished:
            await self.publish_updates(outcome)
            await asyncio.to_thread(self.save)

    def _load_state(self) -> CommitState:
        try:
            stored = msgspec.json.decode(self._state_path.read_bytes(), type=CommitState)
        except FileNotFoundError:
            return CommitState(tracker.AlertTrackerState())
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise errors.Conflict(
                f"the alert state {self._state_path} cannot be read: {error}",
                hint="move the file away to start with an empty state",
            ) from error
        if stored.version > STATE_VERSION:
            raise errors.Conflict(
                f"the alert state {self._state_path} has version {stored.version}, expected {STATE_VERSION}",
                hint="run a newer Muster, or move the file away to start with an empty state",
            )
        return stored

    def save(self) -> None:
        data = msgspec.json.encode(
            CommitState(
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
        try:
            files.write(self._state_path, data)
        except OSError as error:
            self.count("alerts-not-saved")
            self._log.error("alerts-not-saved", error=error)


def _load_rules(
    settings: settings_.PipelineSettings,
) -> tuple[tuple[rules.AlertRule, ...], dict[str, notifications.AlertContact]]:
    if not settings.rules:
        return (), {}
    path = Path(settings.rules).expanduser()
    known = rules.load(path)
    receivers = notifications.load(path, settings)
    for rule in known:
        for name in rule.notify:
            if name not in receivers:
                raise errors.InvalidInput(
                    f"{path}: the rule {rule.name!r} notifies {name!r}, which is not defined"
                )
    return known, receivers


def _about_history(counts: Mapping[str, int], clock_ms: int) -> tracker.RuleVerdict:
    missing = sum(counts.get(name, 0) for name in (query.HISTORY_LOST, "rollups-not-in-history"))
    return tracker.RuleVerdict(HISTORY.name, "pipeline", missing > 0, clock_ms, float(missing))


async def _in_groups(work: Iterable[Any]) -> None:
    """Concurrent publications share the broker's disk syncs."""
    waiting = list(work)
    for start in range(0, len(waiting), PUBLISH_AT_ONCE):
        await asyncio.gather(*waiting[start : start + PUBLISH_AT_ONCE])
