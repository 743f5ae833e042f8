"""The progress of the pipeline: Spark's report of a batch, the counters of its commit, the driver's start.

Also as metrics, for the health page of the process.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from muster.bus.http import health as http_health
from muster.core import backoff, health
from muster.core.telemetry import metrics
from muster.pipeline import protocol
from muster.pipeline.job import batch_commit, query

_STATES = {
    "running": health.HealthState.UP,
    "standby": health.HealthState.UP,
    "stopping": health.HealthState.DRAINING,
    "failed": health.HealthState.LATE,
}


class StartTimes:
    """How long a driver took from its lease to its first batch, by stage."""

    def __init__(self) -> None:
        self.taken_ms: dict[str, int] = {}
        self._at_s = time.monotonic()
        self._is_over = False

    def begin(self) -> None:
        self._at_s = time.monotonic()

    def end(self, stage: str, *, last: bool = False) -> bool:
        """Record a stage, once; False if the start is over."""
        if self._is_over:
            return False
        now_s = time.monotonic()
        self.taken_ms[stage] = int((now_s - self._at_s) * 1000)
        self._at_s, self._is_over = now_s, last
        return True


def measure(
    report: dict[str, Any],
    done: batch_commit.BatchCommitter,
    *,
    first: int,
    rows: int,
    trigger_s: float,
) -> protocol.BatchProgress:
    """``first``: number of the first batch of the term; ``rows``: reports in this batch."""
    source = report["sources"][0]
    states = report.get("stateOperators") or [{}]
    duration_ms = report.get("durationMs") or {}
    batch_s = duration_ms.get("triggerExecution", 0) / 1000
    return protocol.BatchProgress(
        state="running",
        at_ms=done.done_ms or int(time.time() * 1000),
        newest_ms=done.clock_ms,
        trigger_s=trigger_s,
        batch=first + report["batchId"],
        batch_s=batch_s,
        rows=rows,
        rows_s=rows / max(trigger_s, batch_s),
        messages=int(source.get("numInputRows") or 0),
        lag_messages=lag_messages(source),
        lag_s=max(0, done.done_ms - done.clock_ms) / 1000,
        state_bytes=int(states[0].get("memoryUsedBytes") or 0) + done.state_bytes,
        state_rows=int(states[0].get("numRowsTotal") or 0),
        machines=done.machines,
        stages_ms={name: int(took) for name, took in duration_ms.items()},
        cpu_ms={
            name.removeprefix(query.CPU): count // 1000
            for name, count in done.counts.items()
            if name.startswith(query.CPU)
        },
        counts={
            name: count
            for name, count in done.counts.items()
            if name != "rows" and not name.startswith(query.CPU)
        },
        total_rows=done.total_rows,
        failing_contacts=done.sender.failing(),
    )


def lag_messages(source: dict[str, Any]) -> int:
    """Messages stored and not read yet. Spark reports offsets as JSON text or as decoded JSON."""
    latest, end = (
        msgspec.json.decode(offset) if isinstance(offset, str) else offset
        for offset in (source.get("latestOffset"), source.get("endOffset"))
    )
    if not isinstance(latest, dict) or not isinstance(end, dict):
        return 0
    return sum(max(0, int(latest[name]) - int(end.get(name, 0))) for name in latest)


class ProgressMetrics:
    """Converts progress reports to metrics and health conditions."""

    def __init__(self, to: metrics.Metrics) -> None:
        self._last = protocol.BatchProgress(state="starting")
        self._before: dict[str, int] = {}
        self._counts = to.counter("pipeline_counts", "Events of reports and results, by reason.", ("reason",))
        self._rows = to.counter("pipeline_rows", "Reports processed.")
        self._waiting = to.gauge("pipeline_notifications_waiting", "Notifications for contacts that fail.")
        self._gauges = {
            name: to.gauge(f"pipeline_{metric}", words)
            for name, metric, words in (
                ("batch_s", "batch_seconds", "Duration of the last batch."),
                ("rows_s", "rows_per_second", "Reports per second in the last batch."),
                ("lag_s", "lag_seconds", "Age of the newest report in the last batch when it was done."),
                ("lag_messages", "lag_messages", "Messages in the stream that have not been read."),
                ("state_bytes", "state_bytes", "Memory used by Spark's state."),
                ("machines", "machines", "Known machines."),
            )
        }

    def update(self, progress: protocol.BatchProgress) -> None:
        self._last = progress
        for name, gauge in self._gauges.items():
            gauge.set(getattr(progress, name))
        self._waiting.set(sum(contact.waiting for contact in progress.failing_contacts))
        now = {**progress.counts, "": progress.total_rows}
        for reason, count in now.items():
            grown = max(0, count - self._before.get(reason, 0))
            if reason:
                self._counts.add(grown, reason=reason)
            else:
                self._rows.add(grown)
        self._before = now

    def report(self) -> http_health.HealthReport:
        last = self._last
        state = _STATES.get(last.state, health.HealthState.STARTING)
        if last.failures >= backoff.LOOP_CRASHES:
            state = health.HealthState.FAILED
        return http_health.HealthReport(state, last.reason)
