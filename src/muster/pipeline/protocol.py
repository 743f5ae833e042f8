"""The wire of the pipeline: subjects, streams and message types.

    muster.pipeline.from.<pipeline>.report.<scope>[.<name>]  group, zone and system; kept in ``system``
    muster.pipeline.from.<pipeline>.report.top               the machines with the highest values
    muster.pipeline.from.<pipeline>.alert.<rule>             alerts (core.messages); kept in ``alerts``
    muster.pipeline.from.<pipeline>.progress                 how the job fares; not kept
    muster.pipeline.from.<user>.read.<verb>                  asks for status, batches, alerts, …
    muster.pipeline.from.<user>.request.<verb>               acknowledge, silence, unsilence, stop
    muster.monitor.from.<pipeline>.batch.root.tick           nothing, so that time passes for Spark even
                                                             when the whole fleet is silent

A question is a JSON object, an answer ``{"result": …}`` or ``{"error": {"code", "message", "hint"}}``.
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

Counts = dict[str, int]

#: What `Progress.counts` counts, in words. ``deferred RULE`` besides: alerts of a rule that were raised in a
#: later batch because too many began at once.
COUNTED = {
    "malformed": "messages that could not be read",
    "too-large": "messages that were too large to be read",
    "wrong-schema": "messages with other columns than reports have",
    "wrong-version": "messages of a version that is not known here",
    "forged": "messages whose header names another group than their rows",
    "future": "reports from too far in the future: a machine's clock is wrong",
    "late": "reports that came after their window had closed; the history has them",
    "duplicated": "reports that were seen already, and counted once",
    "unusable": "reports that could not be taken in: a fault of Muster's, please report it",
    "unpublished": "results that could not be said: a fault of Muster's, please report it",
    "summaries": "rows of summaries that were taken in: nothing is wrong with them",
    "not-in-history": "reports that could not be written to the history",
    "rollups-not-in-history": "group, zone and system reports that could not be written to the history",
    "alerts-not-in-history": "changes of alerts that could not be written to the history",
    "notices-not-sent": "notices about alerts that a receiver did not take, or that its full queue dropped",
    "history-full": "times the history had no room",
    "history-failed": "times the history could not be written for another reason",
    "query-failed": "times Spark's query ended by itself and was started again; nothing is lost by that",
    "bus-errors": "times the brokers did not take a tick or an alert; it is tried again",
    "progress-not-kept": "accounts of batches that could not be kept for `muster pipeline fit`",
    "not-compacted": "times the history could not be compacted; it is tried again",
    "alerts-not-saved": "times the book of alerts could not be saved; it is tried again",
}


class TopNodes(messages.WireMessage, frozen=True, kw_only=True, tag="top/1"):
    """The machines with the highest values of some metrics in one window."""

    from_ms: messages.TimeMs
    to_ms: messages.TimeMs
    metrics: dict[str, list[columns.RankedNode]]


class BatchProgress(
    messages.WireMessage, frozen=True, kw_only=True, tag="pipeline-progress/1", omit_defaults=True
):
    """One micro-batch of the job, and what has been counted since it started."""

    state: str = "running"  # starting, running, stopping, failed
    reason: str = ""
    at_ms: messages.TimeMs = 0  # when the batch was done
    newest_ms: messages.TimeMs = 0  # when the newest message it read was stored
    trigger_s: float = 0.0
    batch: int = -1
    batch_s: float = 0.0
    rows: int = 0  # reports in the batch
    rows_s: float = 0.0
    messages: int = 0
    lag_messages: int = 0  # in the stream, and not yet read
    lag_s: float = 0.0  # how old the newest report was that the batch read, when it was done
    state_bytes: int = 0
    state_rows: int = 0
    machines: int = 0
    stages_ms: Counts = msgspec.field(default_factory=dict)
    cpu_ms: Counts = msgspec.field(default_factory=dict)  # of Spark's Python workers, since the start
    counts: Counts = msgspec.field(
        default_factory=dict
    )  # refused, late, duplicated, …: by reason, since the start
    total_rows: int = 0


def alert(pipeline: str, rule: str) -> str:
    return subjects.from_identity(PART, pipeline, "alert", rule)


def progress(pipeline: str) -> str:
    return subjects.from_identity(PART, pipeline, "progress")


def top(pipeline: str) -> str:
    return columns.result_subject(pipeline, "top")


def read(user: str, verb: str) -> str:
    return subjects.from_identity(PART, user, "read", verb)


def request(user: str, verb: str) -> str:
    return subjects.from_identity(PART, user, "request", verb)


def tick(pipeline: str) -> str:
    return subjects.from_identity("monitor", pipeline, "batch", "root", TICK)


def is_tick(subject: str) -> bool:
    return subject.endswith(f".batch.root.{TICK}")


def streams(
    *,
    alerts_max_bytes: int = 256 << 20,
    alerts_max_age_s: float = 30 * 86400.0,
    system_max_bytes: int = 256 << 20,
    kept: int = 8,
    replicas: int = 1,
) -> list[api.StreamSettings]:
    """Where results are kept. Repeats are dropped: of reports for an hour, of alerts for a day."""
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
