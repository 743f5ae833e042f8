"""A realistic fleet of one size through channels and pipeline for ten minutes: a part of `pipeline`.

    make bench-pipeline_realistic MACHINES=80000

It takes twelve minutes: for a machine that is not free for the three hours of ``make bench-pipeline``.
"""

from __future__ import annotations

import os

from benchmarks import harness, pipeline

RUN_S_MAX, QUICK_S_MAX = 1800, pipeline.QUICK_S_MAX


def run(quick: bool) -> list[harness.Row]:
    machines = 10_000 if quick else int(os.environ.get("MACHINES") or 200_000)
    return pipeline.measured(
        pipeline.Sizes(
            {"realistic": (machines,)}, warm_periods=3, probe_periods=0, hold_periods=2 if quick else 60
        )
    )
