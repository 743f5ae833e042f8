"""The wire of the monitor: subjects and message types.

    muster.monitor.from.<sensor>.report.<channel>          one node report, compact JSON (core.messages)
    muster.monitor.from.<channel>.batch.<parent>           node reports in Arrow (core.reports)
    muster.monitor.from.<channel>.summary.<parent>         merged summaries in Arrow
    muster.monitor.from.<channel>.batch.root.<shard>       the same, kept in the stream ``reports``
    muster.monitor.from.<channel>.summary.root.<shard>     the same, kept in the stream ``summaries``
    muster.monitor.all.channel.<channel>                   a channel's beat

Sensors know channels by their beats alone: an agent may listen to what is said to all, and to no stream.
Consumers find producers in the bucket ``monitor`` (`Producer`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from muster.bus import api
from muster.core import messages, subjects
from muster.core.reports import columns

PART = "monitor"
ROOT = "root"  # the parent of a channel that has none: the durable stream
BUCKET = PART
MAX_REPORT_BYTES = 64 << 10  # of one sensor's row: a dozen metrics and a dozen services are 2 kB


class ChannelHeartbeat(
    messages.WireMessage, frozen=True, kw_only=True, tag="channel-beat/1", omit_defaults=True
):
    """A channel lives. Its children choose among those they hear, and leave one that falls silent."""

    boot: messages.Count
    sequence: messages.Count
    period_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]  # when to expect the next beat
    hold_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    level: messages.Count = 1
    open: bool = True  # False while it drains: its children are to leave
    sensors: bool = True  # takes any sensor that has no list of its own
    waiting_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 0.0
    """What arrived longer ago than this has been forwarded, durably where the parent is the stream."""


class ReportProducer(messages.WireMessage, frozen=True, kw_only=True, tag="producer/1", omit_defaults=True):
    """An entry of the registry: who produces what, and where to listen for it (GMA, level 3)."""

    name: messages.Name
    produces: messages.Name  # the schema: node-reports/1 or summaries/1
    subject: messages.Text  # where it is published
    stream: messages.Text = ""  # and kept, if it is
    level: messages.Count = 1
    interpreter: messages.Name = "concat"
    hold_s: float = 0.0
    parents: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()  # whose machines it carries
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
    """The two streams at the top. When they are full the oldest go: what matters is now."""
    return [
        api.StreamSettings(
            name=name, subjects=(subject,), max_bytes=limit, max_age_s=max_age_s, replicas=replicas
        )
        for name, subject, limit in (
            (columns.REPORTS_STREAM, columns.REPORTS_SUBJECTS, max_bytes),
            (columns.SUMMARIES_STREAM, columns.SUMMARIES_SUBJECTS, max_bytes // 8),
        )
    ]
