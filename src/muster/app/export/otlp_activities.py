"""Export of the activity log to a collector of OpenTelemetry, as log records."""

from __future__ import annotations

from muster.app.export import activity_export
from muster.bus.http import client, telemetry_export
from muster.core import errors, messages
from muster.core.telemetry import otlp

PROCESS = "activities"


def to_entry(entry: messages.Decision, domain: str) -> otlp.LogEntry:
    return otlp.LogEntry(
        at_ns=entry.at_ms * 1_000_000,
        severity=activity_export.SEVERITY.get(entry.outcome, "info"),
        text=activity_export.text_of(entry),
        facts={"part": "activity", "what": entry.what, **activity_export.facts_of(entry, domain)},
        trace_id=entry.trace_id or "",
    )


class OtlpActivities(activity_export.ActivityExport):
    name = "otlp_activities"

    async def _deliver(self, entry: messages.Decision, domain: str) -> None:
        """An entry that the collector does not accept is not sent again: another answer is not expected."""
        body = otlp.encode_logs([to_entry(entry, domain)], telemetry_export.describe_process(PROCESS))
        response = await client.post(
            f"{self._url.rstrip('/')}/v1/logs",
            body,
            headers=telemetry_export.JSON,
            timeout_s=telemetry_export.TIMEOUT_S,
        )
        if response.status in telemetry_export.RETRYABLE:
            raise errors.Unavailable(f"HTTP status {response.status}")
        if not 200 <= response.status < 300:
            self._missed += 1
