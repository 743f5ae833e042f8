"""The largest plain fleet that two channels and the pipeline hold for ten minutes."""

from __future__ import annotations

from benchmarks import harness, pipeline

RUN_S_MAX, QUICK_S_MAX = pipeline.LADDER_S_MAX, pipeline.QUICK_S_MAX


def run(quick: bool) -> list[harness.Row]:
    return pipeline.largest("plain", (1_400_000, 1_200_000, 1_000_000, 800_000, 600_000, 400_000), quick)
