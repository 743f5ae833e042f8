"""The parameters of the query, from the settings of the pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muster.core.reports import columns
from muster.pipeline import settings as settings_
from muster.pipeline import steps
from muster.pipeline.alerts import rules
from muster.pipeline.fleet import state
from muster.pipeline.job import window_rows
from muster.pipeline.source import shard_keys


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """The parameters of a query: plain data, because it is sent to the executors."""

    plan: state.FleetStatePlan
    servers: tuple[str, ...]
    history: str
    checkpoint: str = ""
    run: str = ""
    pipeline: str = "pipeline"  # its identity on the bus
    epoch: int = 0
    first: int = 0  # number of the first batch: Spark counts from 0
    transferred: tuple[str, int] | None = None  # a checkpoint of Spark and its batch that have the state
    credentials: str | None = None
    ca: str | None = None
    streams: tuple[str, ...] = (columns.REPORTS_STREAM, columns.SUMMARIES_STREAM)
    shards: int = 4
    partitions: int = 2
    splits: int = 2
    max_messages: int = 4000
    steps: tuple[steps.StepCode, ...] = ()
    after: tuple[int, ...] = (0, 0)  # where a new checkpoint starts in each stream; -1: at the end
    until: tuple[int, ...] = (0, 0)  # where its first batch ends; 0: anywhere

    def stem(self, batch: int, place: object) -> str:
        """The beginning of the names of data files that a batch writes."""
        return f"{self.run}-{self.epoch}-{batch}-{place}"

    def merging(self, folder: str) -> window_rows.MergePlan:
        """``folder``: see `piece_files`. Each shard has a row for each part, so there are fewer parts than
        partitions."""
        parts = max(1, math.isqrt(self.partitions) // 2)
        return window_rows.MergePlan(
            shard_keys.keys(self.partitions, parts), self.plan.top, self.steps, self.history, folder
        )


def from_settings(
    settings: settings_.PipelineSettings,
    known: Sequence[rules.AlertRule],
    parallelism: tuple[int, int, int],
    *,
    servers: tuple[str, ...],
    credentials: str | None,
    ca: str | None,
    history: str,
    pipeline: str,
) -> QueryPlan:
    """Without what belongs to one term: its checkpoint and positions. ``parallelism``: shards, partitions and
    splits."""
    shards, partitions, splits = parallelism
    codes = steps.read(settings.steps)
    return QueryPlan(
        plan=state.FleetStatePlan(
            window_s=settings.window_s,
            delay_s=settings.delay_s,
            skew_s=settings.skew_s,
            stale_after=settings.stale_after,
            forget_s=settings.forget_s,
            top=settings.top,
            top_metrics=settings.top_metrics,
            rules=tuple(rule for rule in known if rule.scope == "node"),
            memory=steps.memory_columns(codes),
        ),
        servers=servers,
        credentials=credentials,
        ca=ca,
        history=history,
        pipeline=pipeline,
        shards=shards,
        partitions=partitions,
        splits=splits,
        max_messages=settings.max_messages,
        steps=codes,
    )
