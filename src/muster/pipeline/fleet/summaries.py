"""Summaries of groups and zones that merging channels send, and how they are added to a window's cell."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from muster.core.reports import sketches
from muster.pipeline.fleet import blocks, cells


class ChannelSummary(msgspec.Struct, frozen=True):
    """A row of `reports.summary_schema`, checked."""

    metric: str
    from_ms: int
    count: int
    figures: tuple[float, float, float]
    sketch: sketches.QuantileSketch
    machines: sketches.DistinctSketch
    partial: bool

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> ChannelSummary:
        least, most = (row[name] for name in ("min", "max"))
        figures = (row["sum"], np.inf if least is None else least, -np.inf if most is None else most)
        if row["count"] < 0 or np.isnan(figures).any() or not np.isfinite(figures[0]):
            raise ValueError("a summary has figures that are not finite")
        return cls(
            row["metric"],
            int(row["from"].timestamp() * 1000),
            row["count"],
            figures,
            sketches.QuantileSketch.from_bytes(row["sketch"]),
            sketches.DistinctSketch.from_bytes(row["machines"]),
            row["partial"],
        )

    def add_to(self, cell: cells.WindowCell) -> bool:
        """False if the cell has too many metrics already."""
        total, least, most = self.figures
        cell.partial |= self.partial
        if not self.metric:  # this row counts reports and machines
            cell.total += self.count
            cell.merged = cell.merged or sketches.DistinctSketch()
            cell.merged.merge(self.machines)
            cell.oldest_ms = min(self.from_ms, cell.oldest_ms or self.from_ms)
        elif self.metric in cells.METRICS:
            at = cells.METRICS.index(self.metric)
            cell.count[at] += self.count
            cell.sum[at] += total
            cell.min = np.minimum(cell.min, np.where(np.arange(len(cell.min)) == at, least, np.inf))
            cell.max = np.maximum(cell.max, np.where(np.arange(len(cell.max)) == at, most, -np.inf))
            cells.fold_sketch(cell, at, self.sketch)
        elif self.metric in cell.extra or len(cell.extra) < blocks.EXTRA_MAX:
            cell.fold_extra(self.metric, cells.ExtraMetric(self.count, total, least, most))
        else:
            return False
        return True
