"""The commit of a micro-batch: reports, verdicts and alerts are written, published, and then saved.

The order matters: an interrupted batch is repeated, with the same results under the same message ids and file
names.  The alert tracker does not change twice, so its updates of the first attempt stay *unpublished* until
the brokers have stored them, and are saved with its state.  `BatchCommitter.commit` runs in a thread of
Spark; the tracker and the bus belong to the event loop, for which it waits.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from muster.bus import api
from muster.core import errors, messages
from muster.core.reports import columns
from muster.core.telemetry import log
from muster.pipeline import protocol
from muster.pipeline import settings as settings_
from muster.pipeline.alerts import notifications, rules, tracker
from muster.pipeline.fleet import rollups, state
from muster.pipeline.history import rollup_rows
from muster.pipeline.history import tables as history_
from muster.pipeline.job import query

PUBLISH_AT_ONCE = 500
STATE_NAME = "alerts.json"

#: The pipeline's own rule: evaluated here, not by its condition.
HISTORY = rules.AlertRule(
    name="history-full",
    scope="system",
    when="FALSE",
    severity=messages.Severity.CRITICAL,
    summary="{value:.0f} rows of the last batch could not be written to the history",
)


class CommitState(msgspec.Struct):
    """The state that survives the process, besides Spark's checkpoint."""

    alerts: tracker.AlertTrackerState
    unsent: list[tracker.AlertNotification] = msgspec.field(default_factory=list)
    unpublished: list[messages.Alert] = msgspec.field(default_factory=list)


class BatchCommitter:
    def __init__(
        self, bus: api.Bus, settings: settings_.PipelineSettings, *, history: Path, run: str, state_path: Path
    ) -> None:
        known, receivers = _load_rules(settings)
        self.rules = known
        self.counts: dict[str, int] = {}  # by reason, since the start
        self.latest: dict[tuple[str, str], messages.WireMessage] = {}
        self.machines = 0
        self.total_rows = 0
        self.clock_ms = 0  # the broker's clock at the newest message read
        self.done_ms = 0  # when the last batch was committed, by the local clock
        self._bus = bus
        self._top = settings.top
        self._history = history
        self._run = run
        self._state_path = state_path
        self._log = log.EventLog("pipeline", pipeline=bus.identity)
        stored = self._load_state()
        self.alert_tracker = tracker.AlertTracker(
            (*known, HISTORY), stored.alerts, forget_s=settings.forget_s
        )
        self.sender = notifications.AlertNotificationSender(
            receivers, settings, unsent=stored.unsent, count=self.count
        )
        self._unpublished = stored.unpublished  # alert changes that the brokers have not stored yet
        self._unrecorded: list[messages.Alert] = []  # stored by the brokers, not yet written to the history
        self._window_ms = int(settings.window_s * 1000)
        mark = history_.done(history, run)
        self._summaries = mark.summaries if mark is not None else -1  # the last summary that was read
        baselines = rollups.Baselines()
        self._evaluator = rollups.ScopeRuleEvaluator(known, baselines, self._window_ms)
        rollup_rows.load_baselines(baselines, history, self._evaluator.scored)
        self._loop: asyncio.AbstractEventLoop
        self._results: api.Stream
        self._alerts: api.Stream

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
        try:
            rollup_rows.write(totals, self._window_ms, self._history, self._run, number)
        except (errors.MusterError, OSError) as error:
            counts["rollups-not-in-history"] = len(totals)
            counts[query.explain_failure(error)] = counts.get(query.explain_failure(error), 0) + 1
            self._log.error("history-not-written", error=error)
        if totals or counts.get("rows"):  # there was something to write
            verdicts.append(_about_history(counts, clock_ms))
        finish = self._finish(number, verdicts, clock_ms, made, counts, sum(o.machines for o in outputs))
        asyncio.run_coroutine_threadsafe(finish, self._loop).result()
        for name in gone:
            self.latest.pop(name, None)
        self.mark_done(number, max((output.summaries for output in outputs), default=0))

    def mark_done(self, number: int, summaries: int) -> None:
        """Mark the batch as complete in the history."""
        self._summaries = max(self._summaries, summaries)
        try:
            history_.mark_done(self._history, self._run, history_.BatchMarker(number, self._summaries))
        except OSError as error:  # no disk space: the mark of the next batch covers this one
            self._log.warning("batch-not-marked", batch=number, error=error)

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
        outcome = self.alert_tracker.apply(verdicts, clock_ms)
        await _in_groups(self._publish(*result) for result in made)
        await self.publish_updates(outcome)
        for scope, name, message in made:
            self.latest[scope, name] = message
        kept, self._unrecorded = self._unrecorded, []
        await asyncio.to_thread(self._write_alerts, kept, number)
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

    def _write_alerts(self, changed: list[messages.Alert], number: int) -> None:
        try:
            rollup_rows.write_alerts(changed, self._history, self._run, number)
        except (errors.MusterError, OSError) as error:
            self.count("alerts-not-in-history", len(changed))
            self._log.error("history-not-written", error=error)

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
            return msgspec.json.decode(self._state_path.read_bytes(), type=CommitState)
        except FileNotFoundError:
            return CommitState(tracker.AlertTrackerState())
        except msgspec.MsgspecError as error:
            raise errors.Conflict(
                f"the alert state {self._state_path} cannot be read: {error}",
                hint="move the file away to start with an empty state",
            ) from error

    def save(self) -> None:
        data = msgspec.json.encode(
            CommitState(self.alert_tracker.state(), self.sender.unsent(), self._unpublished)
        )
        fresh = self._state_path.with_suffix(f".{uuid.uuid4().hex[:8]}")
        try:
            with fresh.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._state_path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
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
