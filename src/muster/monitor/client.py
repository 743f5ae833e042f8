"""Client of the monitor: find producers, read the latest reports, push a service report from an application.

    from muster.monitor import client

    client.push("shop", {"orders_s": 12.5})

A consumer finds a producer in the registry and subscribes to its subject, as in the GMA model.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from muster.bus import api
from muster.bus.http import client
from muster.core import errors, health, messages
from muster.core.reports import columns
from muster.monitor import protocol

if TYPE_CHECKING:
    import pyarrow as pa

SENSOR_VARIABLE = "MUSTER_SENSOR"
SENSOR_URL = "http://127.0.0.1:9125"
PUSH_TIMEOUT_S = 2.0
RECENT_BYTES_MAX = 1 << 30  # of reports that are read at once: a viewer states the window


class RecentReports(NamedTuple):
    """A batch, and when it was stored at the top (or received by this process)."""

    batch: pa.RecordBatch
    facts: columns.BatchInfo
    stored_at_ms: int


def push(
    service: str,
    metrics: Mapping[str, float],
    *,
    state: str = "up",
    reason: str = "",
    period_s: float = 10.0,
    url: str | None = None,
) -> None:
    """Push a service report to the sensor of this machine. Blocking; no bus connection is needed.

    ``url``: address of the sensor; default: the variable ``MUSTER_SENSOR``, otherwise the default port on
    loopback.
    """
    try:
        report = messages.ServiceReport(
            name=service, state=health.HealthState(state), reason=reason, metrics=dict(metrics)
        )
    except ValueError:
        known = ", ".join(member.value for member in health.HealthState)
        raise errors.InvalidInput(f"unknown state {state[:40]!r}: use one of {known}") from None
    address = url or os.environ.get(SENSOR_VARIABLE) or SENSOR_URL
    try:
        response = client.post_blocking(
            f"{address.rstrip('/')}/report?period={period_s:g}s",
            msgspec.json.encode(report),
            headers={"Content-Type": "application/json"},
            timeout_s=PUSH_TIMEOUT_S,
        )
    except errors.Unavailable as error:
        raise errors.Unavailable(
            f"no sensor answers at {address}: {error.message}", hint=f"start one, or set {SENSOR_VARIABLE}"
        ) from error
    if response.status != 200:
        text = response.body[:1000].decode("utf-8", "replace")
        raise errors.InvalidInput(f"the sensor rejected the report: {text}")


async def find(
    bus: api.Bus, *, group: str | None = None, level: int | None = None, produces: str | None = None
) -> list[protocol.ReportProducer]:
    """Producers of the domain, filtered; the highest level first."""
    registry = await bus.key_value(api.KeyValueSettings(bucket=protocol.BUCKET))
    producers = []
    for key in await registry.keys("producer.>"):
        entry = await registry.get(key)
        if entry is None or entry.value is None:
            continue
        try:
            producer = messages.decode(entry.value, protocol.ReportProducer)
        except errors.InvalidInput:
            continue  # of an unknown version
        if (
            (group is None or group in producer.groups)
            and (level is None or level == producer.level)
            and (produces is None or produces == producer.produces)
        ):
            producers.append(producer)
    return sorted(producers, key=lambda item: (-item.level, item.name))


async def recent(bus: api.Bus, *, window_s: float = 60.0, at_ms: int | None = None) -> list[RecentReports]:
    """The batches stored at the top in the ``window_s`` before ``at_ms`` (default: now), oldest first.

    `errors.NotFound` if no channel ever stored one, `errors.LimitExceeded` above `RECENT_BYTES_MAX`.
    """
    try:
        stream = await bus.open_stream(columns.REPORTS_STREAM)
    except errors.NotFound as error:
        raise errors.NotFound(
            "no channel has stored a report yet",
            hint="`muster up --with monitoring` starts a channel and a sensor; elsewhere `muster run sensor`",
        ) from error
    until_ns = at_ms * 1_000_000 if at_ms is not None else time.time_ns() + 10**9
    state = await stream.state()
    if not state.messages:
        return []
    first = await _first_since(stream, state, until_ns - int(window_s * 1e9))
    reports, size = [], 0
    async for message in stream.read(first, state.last_sequence, gaps=True):
        if message.stored_at_ns > until_ns:
            break
        try:
            batch, facts = columns.decode(message.data)
        except errors.MusterError:
            continue  # the pipeline counts invalid messages
        size += batch.nbytes
        if size > RECENT_BYTES_MAX:
            raise errors.LimitExceeded(
                f"the reports of {window_s:g} s are too many to read at once", hint="choose a shorter window"
            )
        reports.append(RecentReports(batch, facts, message.stored_at_ns // 1_000_000))
    return reports


async def results(bus: api.Bus, scope: str, name: str = "") -> AsyncIterator[bytes]:
    """The published reports of a scope (``system``, ``group``), oldest first; empty without a pipeline."""
    try:
        stream = await bus.open_stream(columns.SYSTEM_STREAM)
    except errors.NotFound:
        return
    state = await stream.state()
    if state.messages:
        subject = columns.result_subject("*", scope, name)
        async for message in stream.read(state.first_sequence, state.last_sequence, subject=subject):
            yield message.data


async def _first_since(stream: api.Stream, state: api.StreamState, since_ns: int) -> int:
    """The first sequence stored since then, by binary search."""
    low, high = state.first_sequence, state.last_sequence
    while low < high:
        middle = (low + high) // 2
        try:
            earlier = (await stream.get(middle)).stored_at_ns < since_ns
        except errors.NotFound:  # already removed
            earlier = True
        low, high = (middle + 1, high) if earlier else (low, middle)
    return low
