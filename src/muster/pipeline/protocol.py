"""The wire protocol of the pipeline: subjects, streams and message types.

    muster.pipeline.from.<pipeline>.report.<scope>[.<name>]  group, zone and system; stored in ``system``
    muster.pipeline.from.<pipeline>.report.top               the machines with the highest values
    muster.pipeline.from.<pipeline>.report.removed           the machines that a user removed
    muster.pipeline.from.<pipeline>.alert.<rule>             alerts (core.messages); stored in ``alerts``
    muster.pipeline.from.<pipeline>.progress                 progress of the job; not stored
    muster.pipeline.from.<user>.read.<operation>             requests for status, batches, alerts, …
    muster.pipeline.from.<user>.request.<operation>          acknowledge, silence, unsilence, test, stop
    muster.monitor.from.<pipeline>.batch.root.removal        machines that a user removes from the fleet
    muster.monitor.from.<pipeline>.batch.root.tick           empty, so that time advances for Spark even
                                                             when the whole fleet is silent

A request is a JSON object; the reply is ``{"result": …}`` or ``{"error": {"code", "message", "hint"}}``.
"""

from __future__ import annotations

import msgspec

from muster.bus import api
from muster.core import messages, subjects
from muster.core.reports import columns

PART = "pipeline"
ALERTS_STREAM = "alerts"
ALERTS = subjects.from_identity(PART, "*", "alert", ">")
REPORTS = subjects.from_identity(PART, "*", "report", ">")
PROGRESS = subjects.from_identity(PART, "*", "progress")
TICK = "tick"
REMOVAL = "removal"
MARKER = "@driver"  # in subjects of messages that only end the publications of a former driver

Counts = dict[str, int]

#: Descriptions of the counters in `BatchProgress.counts`. In addition ``deferred RULE``: alerts of a rule
#: that were raised in a later batch because too many began at once; ``channel REASON``: reports that channels
#: dropped, by their reason; ``step-failed STEP``: batches in which a user's step failed.
COUNTED = {
    "lost-messages": "messages that the retention of the stream removed before they were read",
    "malformed": "messages that could not be decoded",
    "too-large": "messages that exceed the size limit",
    "wrong-schema": "messages whose columns are not those of reports",
    "wrong-version": "messages of an unknown version",
    "copied": "messages that an identity which may read streams had the broker store a second time",
    "too-many-groups": "reports of groups beyond the limit of 100,000",
    "metrics-truncated": "values of metrics that are not standard, beyond the limit of names",
    "future": "reports from too far in the future: the clock of a machine is wrong",
    "late": "reports that arrived after their window was closed; the history has them",
    "duplicated": "reports that were received before, and counted once",
    "unusable": "reports that could not be processed: an error in Muster, please report it",
    "unpublished": "results that could not be published: an error in Muster, please report it",
    "summaries": "rows of summaries that were processed; not an error",
    "removed": "machines that a user removed from the fleet; not an error",
    "not-in-history": "reports that could not be written to the history",
    "rollups-not-in-history": "group, zone and system reports that could not be written to the history",
    "alerts-not-in-history": "alert changes that could not be written to the history",
    "notifications-not-sent": "alert notifications that a contact did not accept for hours, that its full "
    "queue dropped, or whose contact was removed",
    "history-full": "times the history had no disk space",
    "history-failed": "times the history could not be written for another reason",
    "query-failed": "times Spark's query ended by itself and was restarted; no data is lost",
    "bus-errors": "times the brokers did not accept a tick or an alert; it is retried",
    "progress-not-stored": "progress samples that could not be stored for `muster pipeline fit`",
    "not-compacted": "times the history could not be compacted; it is retried",
    "other": "events whose reason is not listed: there are too many different ones",
    "alerts-not-saved": "times the alert state could not be saved; it is retried",
}


class TopNodes(messages.WireMessage, frozen=True, kw_only=True, tag="top/1"):
    """The machines with the highest values of some metrics in one window."""

    from_ms: messages.TimeMs
    to_ms: messages.TimeMs
    metrics: dict[str, list[columns.RankedNode]]


class RemovedMachines(messages.WireMessage, frozen=True, kw_only=True, tag="removed/1"):
    """Machines that a user removed from the fleet. Later reports add them again."""

    at_ms: messages.TimeMs
    machines: tuple[str, ...]


class FailingContact(msgspec.Struct, frozen=True, kw_only=True):
    """A contact that does not accept notifications at present; they are repeated."""

    name: str
    transport: str  # webhook or mail
    since_ms: messages.TimeMs
    waiting: int  # notifications
    reason: str


class BatchProgress(
    messages.WireMessage, frozen=True, kw_only=True, tag="pipeline-progress/1", omit_defaults=True
):
    """Progress of a micro-batch, and the counters since the start of the job."""

    state: str = "running"  # starting, running, stopping, failed
    driver: str = ""  # host and process
    epoch: int = 0  # grows with every driver
    standbys: tuple[str, ...] = ()
    reason: str = ""
    failures: int = 0  # of the query, in a row: it ended before its first batch
    at_ms: messages.TimeMs = 0  # when the batch was done
    newest_ms: messages.TimeMs = 0  # when the newest message it read was stored
    trigger_s: float = 0.0
    batch: int = -1
    batch_s: float = 0.0
    rows: int = 0  # reports in the batch
    rows_s: float = 0.0
    messages: int = 0
    lag_messages: int = 0  # in the stream, and not yet read
    lag_s: float = 0.0  # age of the newest report of the batch when the batch was done
    state_bytes: int = 0
    state_rows: int = 0
    machines: int = 0
    stages_ms: Counts = msgspec.field(default_factory=dict)
    start_ms: Counts = msgspec.field(default_factory=dict)  # from the driver's lease to its first batch
    cpu_ms: Counts = msgspec.field(default_factory=dict)  # of Spark's Python workers, since the start
    counts: Counts = msgspec.field(
        default_factory=dict
    )  # refused, late, duplicated, …: by reason, since the start
    total_rows: int = 0
    failing_contacts: tuple[FailingContact, ...] = ()


def alert(pipeline: str, rule: str) -> str:
    return subjects.from_identity(PART, pipeline, "alert", rule)


def progress(pipeline: str) -> str:
    return subjects.from_identity(PART, pipeline, "progress")


def driver_lease(pipeline: str) -> str:
    return f"{PART}.{pipeline}"


def read(user: str, operation: str) -> str:
    return subjects.from_identity(PART, user, "read", operation)


def request(user: str, operation: str) -> str:
    return subjects.from_identity(PART, user, "request", operation)


def tick(pipeline: str) -> str:
    return subjects.from_identity("monitor", pipeline, "batch", "root", TICK)


def removal(pipeline: str) -> str:
    return subjects.from_identity("monitor", pipeline, "batch", "root", REMOVAL)


def is_tick(subject: str) -> bool:
    return subject.endswith(f".batch.root.{TICK}")


def is_internal(subject: str) -> bool:
    """Whether a message in the stream of reports is the pipeline's own."""
    return subject.startswith("muster.monitor.from.") and subject.endswith(
        (f".batch.root.{TICK}", f".batch.root.{REMOVAL}")
    )


def streams(
    *,
    alerts_max_bytes: int = 256 << 20,
    alerts_max_age_s: float = 30 * 86400.0,
    system_max_bytes: int = 256 << 20,
    kept: int = 8,
    replicas: int = 1,
) -> list[api.StreamSettings]:
    """The streams of results. Duplicates are dropped: reports for an hour, alerts for a day."""
    return [
        api.StreamSettings(
            name=columns.SYSTEM_STREAM,
            subjects=(REPORTS,),
            max_bytes=system_max_bytes,
            max_age_s=7 * 86400.0,
            max_messages_per_subject=kept,
            replicas=replicas,
            duplicate_window_s=3600.0,
        ),
        api.StreamSettings(
            name=ALERTS_STREAM,
            subjects=(ALERTS,),
            max_bytes=alerts_max_bytes,
            max_age_s=alerts_max_age_s,
            replicas=replicas,
            duplicate_window_s=86400.0,
        ),
    ]
