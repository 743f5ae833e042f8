"""One cell of a table: what is known of a group, a zone or the system in one window."""

from __future__ import annotations

import numpy as np

from muster.core.reports import columns
from muster.pipeline.fleet import cells


class WindowCell:
    """One row of a table; without a table, a new one."""

    __slots__ = ("row", "table")

    def __init__(self, table: cells.CellTable | None = None, row: int = 0) -> None:
        self.table = cells.CellTable(1) if table is None else table
        self.row = row

    def fold(self, values: cells.Floats) -> None:
        """Add reports: a row for each metric, a column for each report; NaN where not measured."""
        reports = values.shape[1]
        zeros = np.zeros(reports, np.int64)
        rows, no = np.full(reports, self.row), np.zeros(reports, np.bool_)
        self.table.add_reports(rows, values, zeros, zeros, no, no)

    @property
    def total(self) -> int:
        return int(self.table.total[self.row])

    @property
    def machines(self) -> int:
        return int(self.table.machines[self.row])

    @property
    def count(self) -> cells.Ints:
        return self.table.count[:, self.row]

    @property
    def sum(self) -> cells.Floats:
        return self.table.sum[:, self.row]

    @property
    def states(self) -> dict[str, int]:
        counts = self.table.stated()[self.row]
        return {name: count for name, count in zip(cells.STATES, counts, strict=True) if count}

    @property
    def extra(self) -> dict[str, cells.ExtraMetric]:
        return self.table.extras()[self.row]

    @property
    def dropped(self) -> dict[str, int]:
        return self.table.dropped.get(self.row, {})

    @property
    def oldest_ms(self) -> int | None:
        oldest = int(self.table.oldest_ms[self.row])
        return None if oldest == cells.NEVER else oldest

    @property
    def partial(self) -> bool:
        return bool(self.table.partial[self.row])

    def machine_count(self) -> int:
        """Number of different machines."""
        merged = self.table.merged.get(self.row)
        return self.machines + (merged.count() if merged is not None else 0)

    def rollups(self) -> dict[str, columns.MetricRollup]:
        return self.table.rollups()[self.row]

    def figures(self) -> cells.Floats:
        """A row for each of `cells.FIGURES`, a column for each metric; NaN where nothing was measured."""
        figures: cells.Floats = self.table.figures()[self.row]
        return figures
