"""A million plain machines, the pipeline alone for ten minutes, its channels somewhere else."""

from __future__ import annotations

from benchmarks import harness, pipeline

RUN_S_MAX, QUICK_S_MAX = pipeline.RUN_S_MAX, pipeline.QUICK_S_MAX


def run(quick: bool) -> list[harness.Row]:
    return pipeline.alone(quick)
