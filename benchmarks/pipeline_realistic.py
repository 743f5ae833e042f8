"""The largest realistic fleet that two channels and the pipeline hold for ten minutes."""

from __future__ import annotations

from benchmarks import harness, pipeline

RUN_S_MAX, QUICK_S_MAX = pipeline.LADDER_S_MAX, pipeline.QUICK_S_MAX


def run(quick: bool) -> list[harness.Row]:
    return pipeline.largest("realistic", (600_000, 500_000, 400_000, 300_000, 200_000, 100_000), quick)
