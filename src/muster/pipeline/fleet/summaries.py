"""Summaries of groups and zones that merging channels send, and how they are added to a window's cell."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from muster.core.reports import columns, sketches
from muster.pipeline.fleet import blocks, cells


class ChannelSummary(msgspec.Struct, frozen=True):
    """A row of `columns.summary_schema`, checked."""

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
        is_counted = 0 <= row["count"] <= columns.COUNT_MAX
        if not is_counted or np.isnan(figures).any() or not abs(figures[0]) <= columns.SUM_MAX:
            raise ValueError("a summary has figures that are not finite, or too large")
        return cls(
            row["metric"],
            int(row["from"].timestamp() * 1000),
            row["count"],
            figures,
            sketches.QuantileSketch.from_bytes(row["sketch"]),
            sketches.DistinctSketch.from_bytes(row["machines"]),
            row["partial"],
        )

    def add_to(self, table: cells.CellTable, row: int) -> bool:
        """False if the table has too many metrics already."""
        total, least, most = self.figures
        table.partial[row] |= self.partial
        if not self.metric:  # this row counts reports and machines
            table.total[row] += self.count
            table.merged.setdefault(row, sketches.DistinctSketch()).merge(self.machines)
            table.oldest_ms[row] = min(self.from_ms, table.oldest_ms[row])
        elif self.metric in cells.METRICS:
            at = cells.METRICS.index(self.metric)
            table.count[at, row] += self.count
            table.sum[at, row] += total
            table.min[at, row] = min(least, table.min[at, row])
            table.max[at, row] = max(most, table.max[at, row])
            table.add_histogram(row, at, self.sketch)
        elif table.has_room_for(self.metric, blocks.EXTRA_MAX):
            figures = np.array([[self.count], [total], [least], [most]])
            table.add_figures(np.array([row]), np.array([0]), figures, [self.metric])
        else:
            return False
        return True
