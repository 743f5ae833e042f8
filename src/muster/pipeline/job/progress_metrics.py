"""The progress of the pipeline as metrics, for the health page of the process."""

from __future__ import annotations

from muster.bus.http import health as http_health
from muster.core import backoff, health
from muster.core.telemetry import metrics
from muster.pipeline import protocol

_STATES = {
    "running": health.HealthState.UP,
    "standby": health.HealthState.UP,
    "stopping": health.HealthState.DRAINING,
    "failed": health.HealthState.LATE,
}


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
