"""The wire protocol of the monitor: subjects and message types.

    muster.monitor.from.<sensor>.report.<channel>          one node report, packed (core.reports.packed)
    muster.monitor.from.<channel>.batch.<parent>           node reports in Arrow (core.reports)
    muster.monitor.from.<channel>.summary.<parent>         merged summaries in Arrow
    muster.monitor.from.<channel>.batch.root.<shard>       the same, stored in the stream ``reports``
    muster.monitor.from.<channel>.summary.root.<shard>     the same, stored in the stream ``summaries``
    muster.monitor.all.channel.<channel>                   a channel's heartbeat

Sensors discover channels only by their heartbeats: agents may receive announcements, but not read streams.
Consumers find producers in the bucket ``monitor`` (`ReportProducer`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from muster.bus import api
from muster.core import messages, subjects
from muster.core.reports import columns, packed

PART = "monitor"
ROOT = "root"  # the parent of a channel that has none: the durable stream
BUCKET = PART
MAX_REPORT_BYTES = packed.BYTES_MAX  # of a sensor's report: a dozen metrics and a dozen services are 2 kB


class ChannelHeartbeat(
    messages.WireMessage, frozen=True, kw_only=True, tag="channel-beat/1", omit_defaults=True
):
    """Heartbeat of a channel. Children select among the channels that are alive, and leave a silent one."""

    boot: messages.Count
    sequence: messages.Count
    period_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]  # until the next heartbeat
    hold_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    level: messages.Count = 1
    open: bool = True  # False while it drains: its children must leave
    sensors: bool = True  # accepts sensors without a list of channels
    waiting_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 0.0
    """Messages that arrived earlier than this have been forwarded, durably if the parent is the stream."""


class ReportProducer(messages.WireMessage, frozen=True, kw_only=True, tag="producer/1", omit_defaults=True):
    """Registry entry of a producer: its schema and subject (GMA, level 3)."""

    name: messages.Name
    produces: messages.Name  # the schema: node-reports/1 or summaries/1
    subject: messages.Text  # where it is published
    stream: messages.Text = ""  # if it is stored
    level: messages.Count = 1
    interpreter: messages.Name = "concat"
    hold_s: float = 0.0
    parents: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()  # of the machines in its reports
    machines: messages.Count = 0
    at_ms: messages.TimeMs = 0


def report(sensor: str, channel: str) -> str:
    return subjects.from_identity(PART, sensor, "report", channel)


def reports_to(channel: str) -> str:
    return subjects.from_identity(PART, "*", "report", channel)


def batch(channel: str, parent: str, *, shard: int = 0, schema: str = columns.NODE_SCHEMA) -> str:
    kind = "batch" if schema == columns.NODE_SCHEMA else "summary"
    where = (ROOT, str(shard)) if parent == ROOT else (parent,)
    return subjects.from_identity(PART, channel, kind, *where)


def batches_to(parent: str) -> tuple[str, ...]:
    return subjects.from_identity(PART, "*", "batch", parent), subjects.from_identity(
        PART, "*", "summary", parent
    )


def beat(channel: str) -> str:
    return subjects.to_all(PART, "channel", channel)


def channel_of(beat_subject: str) -> str:
    return beat_subject.rpartition(".")[2]


BEATS = subjects.to_all(PART, "channel", "*")


def streams(
    *, max_bytes: int = 4 << 30, max_age_s: float = 86400.0, replicas: int = 1
) -> list[api.StreamSettings]:
    """The two streams at the top. When they are full, the oldest messages are dropped."""
    return [
        api.StreamSettings(
            name=name, subjects=(subject,), max_bytes=limit, max_age_s=max_age_s, replicas=replicas
        )
        for name, subject, limit in (
            (columns.REPORTS_STREAM, columns.REPORTS_SUBJECTS, max_bytes),
            (columns.SUMMARIES_STREAM, columns.SUMMARIES_SUBJECTS, max_bytes // 8),
        )
    ]
