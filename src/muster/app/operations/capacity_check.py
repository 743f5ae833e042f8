"""Compares the capacity model with the running system, from a machine to a result.

A report has arrived when the micro-batch that read it is done. Its age is measured from outside: the stream
shows when each message was stored, and the pipeline's batches show which messages they read and when they
were done. Batches that had to catch up (after a start, or after one that took longer than the trigger) are
not a steady state and are excluded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from muster.bus import api
from muster.core import errors, units
from muster.monitor import capacity_model
from muster.monitor import client as monitor_client
from muster.pipeline import client as pipeline_client
from muster.pipeline import protocol


@dataclass(frozen=True, slots=True)
class CapacityCheck:
    """``stages`` are the components of the prediction, by name."""

    rows: int
    batches: int
    stages: dict[str, float]
    predicted_s: float
    measured_s: float  # the age of the oldest
    p50_s: float
    p99_s: float
    ratio: float
    holds: bool  # within 20 %


async def check(bus: api.Bus, *, window_s: float = 60.0, pipeline: str = "pipeline") -> CapacityCheck:
    """Check the reports stored in the last ``window_s``. Without a pipeline: only up to the stream."""
    producers = await monitor_client.find(bus)
    try:
        recent = await monitor_client.recent(bus, window_s=window_s)
    except errors.NotFound:
        recent = []
    if not recent:
        raise errors.NotFound(
            f"no report reached the stream in the last {units.rounded_duration(window_s)}",
            hint="widen --window",
        )
    levels = dict.fromkeys(range(1, 1 + max(message.facts.level for message in recent)), 0.0)
    for producer in producers:
        levels[producer.level] = max(levels.get(producer.level, 0.0), producer.hold_s)
    stages = {f"channels of level {level}": hold_s for level, hold_s in sorted(levels.items())}
    stored_s = np.concatenate(
        [np.full(message.batch.num_rows, message.stored_at_ms / 1000) for message in recent]
    )
    made_s = np.concatenate(
        [message.batch.column("reported_at").cast("int64").to_numpy() / 1e6 for message in recent]
    )
    try:
        batches = await pipeline_client.PipelineClient(bus, pipeline=pipeline).batches()
    except errors.Unavailable:
        return _checked(stages, stored_s - made_s, 0)
    steady = steady_batches(batches)
    if not steady:
        raise errors.NotFound("the pipeline is catching up", hint="retry after a few triggers")
    read = ingest_times(stored_s, steady)
    known = ~np.isnan(read)
    if not known.any():
        raise errors.NotFound("the pipeline has not read the reports yet", hint="widen --window")
    stages["Spark's trigger"] = steady[-1][1].trigger_s
    stages["batch"] = float(np.median([batch.batch_s for _, batch in steady]))
    return _checked(stages, (read - made_s)[known], len(steady))


SLACK = 1.25  # of the trigger, between the newest message of a batch and the beginning of the next one

Steady = tuple[
    float, protocol.BatchProgress
]  # a batch, and when the newest message of the previous one was stored


def steady_batches(batches: Sequence[protocol.BatchProgress]) -> list[Steady]:
    """Batches that read no more than what arrived between two triggers."""
    steady = []
    for before, batch in itertools.pairwise(batches):
        began_s = batch.at_ms / 1000 - batch.batch_s
        if batch.batch == before.batch + 1 and began_s - before.newest_ms / 1000 <= SLACK * batch.trigger_s:
            steady.append((before.newest_ms / 1000, batch))
    return steady


def ingest_times(
    stored_s: np.ndarray[tuple[int], np.dtype[np.float64]], steady: Sequence[Steady]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """When the batch that read each message was done; NaN if it was none of these."""
    read_at_s = np.full(len(stored_s), np.nan)
    for after_s, batch in steady:
        read_at_s[(stored_s > after_s) & (stored_s <= batch.newest_ms / 1000)] = batch.at_ms / 1000
    return read_at_s


def _checked(
    stages: dict[str, float], ages_s: np.ndarray[tuple[int], np.dtype[np.float64]], batches: int
) -> CapacityCheck:
    predicted_s = sum(stages.values())
    verdict = capacity_model.check(predicted_s, ages_s.tolist())
    p50_s, p99_s = (float(np.percentile(ages_s, share)) for share in (50, 99))
    return CapacityCheck(
        len(ages_s),
        batches,
        stages,
        predicted_s,
        verdict.measured_s,
        p50_s,
        p99_s,
        verdict.ratio,
        verdict.holds,
    )
