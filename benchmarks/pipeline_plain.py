"""A million plain machines, the pipeline alone, for ten minutes: a part of `pipeline`.

    make bench-pipeline_plain MACHINES=1000000

It takes twelve minutes: for a machine that is not free for the three hours of ``make bench-pipeline``.
"""

from __future__ import annotations

import dataclasses
import os

from benchmarks import harness, pipeline

RUN_S_MAX, QUICK_S_MAX = 1800, pipeline.QUICK_S_MAX


def run(quick: bool) -> list[harness.Row]:
    machines = 50_000 if quick else int(os.environ.get("MACHINES") or pipeline.MILLION)
    sizes = pipeline.Sizes({}, warm_periods=3, probe_periods=0, hold_periods=0)
    return pipeline.measured(dataclasses.replace(sizes, alone=machines, alone_periods=3 if quick else 60))
