"""The analytic model against the running system, on the whole way from a machine to a result.

A report is in the root when the micro-batch that read it is done.  Its age then is measured from outside:
the stream says when each message was stored and what is in it, and the pipeline's batches say which of them
they read and when they were done.  Batches that had to catch up (after a start, or behind one that took
longer than the trigger) are no steady state, and are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from muster.bus import api
from muster.core import errors
from muster.monitor import capacity_model
from muster.monitor import client as monitor_client
from muster.pipeline import client as pipeline_client
from muster.pipeline import protocol


@dataclass(frozen=True, slots=True)
class CapacityCheck:
    """``stages`` are the parts of the prediction, by name."""

    rows: int
    batches: int
    stages: dict[str, float]
    predicted_s: float
    measured_s: float  # the oldest
    p50_s: float
    p99_s: float
    ratio: float
    holds: bool  # within 20 %

    @property
    def p99_limit_s(self) -> float:
        """The sum of holding times and the trigger, and five seconds."""
        return sum(took for name, took in self.stages.items() if name != "batch") + 5.0


async def check(bus: api.Bus, *, window_s: float = 60.0, pipeline: str = "pipeline") -> CapacityCheck:
    """Of the reports stored in the last ``window_s``. Without a pipeline: the way to the stream."""
    producers = await monitor_client.find(bus)
    try:
        recent = await monitor_client.recent(bus, window_s=window_s)
    except errors.NotFound:
        recent = []
    if not recent:
        raise errors.NotFound(
            f"no report reached the stream in the last {window_s:g} s", hint="widen --window"
        )
    levels = dict.fromkeys(range(1, 1 + max(one.facts.level for one in recent)), 0.0)
    for producer in producers:
        levels[producer.level] = max(levels.get(producer.level, 0.0), producer.hold_s)
    stages = {f"channels of level {level}": hold_s for level, hold_s in sorted(levels.items())}
    stored_s = np.concatenate([np.full(one.batch.num_rows, one.stored_at_ms / 1000) for one in recent])
    made_s = np.concatenate(
        [one.batch.column("reported_at").cast("int64").to_numpy() / 1e6 for one in recent]
    )
    try:
        batches = await pipeline_client.PipelineClient(bus, pipeline=pipeline).batches()
    except errors.Unavailable:
        return _checked(stages, stored_s - made_s, 0)
    steady = steady_batches(batches)
    if not steady:
        raise errors.NotFound("the pipeline is catching up", hint="ask again after some triggers")
    read = ingest_times(stored_s, steady)
    known = ~np.isnan(read)
    if not known.any():
        raise errors.NotFound("the pipeline has not read them yet", hint="widen --window")
    stages["Spark's trigger"] = steady[-1][1].trigger_s
    stages["batch"] = float(np.median([one.batch_s for _, one in steady]))
    return _checked(stages, (read - made_s)[known], len(steady))


Steady = tuple[
    float, protocol.BatchProgress
]  # a batch, and when the newest message of the one before was stored


def steady_batches(batches: Sequence[protocol.BatchProgress], *, slack: float = 1.25) -> list[Steady]:
    """Those that had no more to read than came between two triggers."""
    found = []
    for before, one in itertools.pairwise(batches):
        began_s = one.at_ms / 1000 - one.batch_s
        if one.batch == before.batch + 1 and began_s - before.newest_ms / 1000 <= slack * one.trigger_s:
            found.append((before.newest_ms / 1000, one))
    return found


def ingest_times(
    stored_s: np.ndarray[tuple[int], np.dtype[np.float64]], steady: Sequence[Steady]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """When the batch that read each message was done; NaN where that was none of these."""
    found = np.full(len(stored_s), np.nan)
    for after_s, one in steady:
        found[(stored_s > after_s) & (stored_s <= one.newest_ms / 1000)] = one.at_ms / 1000
    return found


def _checked(
    stages: dict[str, float], ages_s: np.ndarray[tuple[int], np.dtype[np.float64]], batches: int
) -> CapacityCheck:
    predicted_s = sum(stages.values())
    found = capacity_model.check(predicted_s, ages_s.tolist())
    p50_s, p99_s = (float(np.percentile(ages_s, share)) for share in (50, 99))
    return CapacityCheck(
        len(ages_s),
        batches,
        stages,
        predicted_s,
        found.measured_s,
        p50_s,
        p99_s,
        found.ratio,
        found.holds,
    )
