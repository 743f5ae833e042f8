"""Cells: aggregates of many reports, in columns.

A cell covers one window of one group, one zone or the system.  It has count, sum, minimum and maximum of
every standard metric, the number of reports in each state, a histogram for quantiles, and the machines with
the highest values.  A `CellTable` has a row for each cell, so that thousands of groups are updated, merged
and stored by a few operations on arrays.  Tables can be merged in any order;
`WindowCell` is a view of one row.

The buckets of histograms are those of `sketches`, with fewer bits: the relative error of a quantile is at
most `RELATIVE_ERROR`.  Only non-empty buckets are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from muster.core import health
from muster.core.reports import columns, sketches
from muster.pipeline.fleet import cell_arrays

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

METRICS = columns.STANDARD_METRICS
_REPORTED = (state.value for state in health.HealthState if state is not health.HealthState.COMPLETED)
STATES = (*_REPORTED, "other")
MANTISSA_BITS = sketches.MANTISSA_BITS - 1
RELATIVE_ERROR = 0.5 / (1 << MANTISSA_BITS)

_FIRST = -10 << MANTISSA_BITS  # the bucket of 2^-10: smaller values count as zero, which is bucket 0
BUCKETS = 60 << MANTISSA_BITS  # so the last one is that of 2^50, about 10^15
_WIDTH = len(METRICS) * BUCKETS  # the buckets of a metric follow those of the previous one
_MIDDLES = np.r_[0.0, sketches.middles(np.arange(BUCKETS - 1) + _FIRST, MANTISSA_BITS)]
_NO_INTS = np.zeros(0, np.int64)
_NO_NAMES = pa.array([], pa.string())
NEVER = np.iinfo(np.int64).max  # in `CellTable.oldest_ms`: there is no report

SHARES = (0.5, 0.95, 0.99)
#: The rows of `WindowCell.figures`.
FIGURES = ("count", "sum", "min", "max", "p50", "p95", "p99")

#: For each array of a table: its rows (0: it has one dimension), its type, its initial value, and how two
#: values are merged.
_ARRAYS: Mapping[str, tuple[int, Any, Any, np.ufunc]] = {
    "total": (0, np.int64, 0, np.add),  # reports
    "machines": (0, np.int64, 0, np.add),  # different ones
    "oldest_ms": (0, np.int64, NEVER, np.minimum),
    "partial": (0, np.bool_, False, np.logical_or),
    "states": (len(STATES), np.int64, 0, np.add),
    "count": (len(METRICS), np.int64, 0, np.add),
    "sum": (len(METRICS), np.float64, 0.0, np.add),
    "min": (len(METRICS), np.float64, np.inf, np.minimum),
    "max": (len(METRICS), np.float64, -np.inf, np.maximum),
}


_COUNTS = tuple(name for name in _ARRAYS if name not in ("sum", "min", "max"))


class CellTable:
    """A row for each cell."""

    total: Ints
    machines: Ints
    oldest_ms: Ints
    partial: Bools
    states: Ints
    count: Ints
    sum: Floats
    min: Floats
    max: Floats

    def __init__(self, rows: int = 0) -> None:
        self.dropped: dict[int, dict[str, int]] = {}  # by row: reports, by reason
        self.merged: dict[int, sketches.DistinctSketch] = {}  # by row: machines known only from summaries
        for name, (height, kind, start, _) in _ARRAYS.items():
            setattr(self, name, np.full((height, rows) if height else rows, start, kind))
        self._words: dict[str, int] = {}  # names of extra metrics, and their codes
        self._extra: list[tuple[Ints, Ints, Floats]] = []  # rows, codes, figures
        # Keys are row * _WIDTH + metric * BUCKETS + bucket.
        self._histogram: list[tuple[Ints, Ints]] = []
        self._ascends = True  # the keys of each part
        self._ranks: dict[str, list[cell_arrays.Ranks]] = {}
        self._is_ranked: set[str] = set()  # of which there are only the highest, in one part
        self._machine_names = [_NO_NAMES]
        self._figures: Floats | None = None
        self._extras: list[dict[str, columns.MetricRollup]] | None = None
        self._rollups: list[dict[str, columns.MetricRollup]] | None = None

    def __len__(self) -> int:
        return len(self.total)

    @property
    def machine_names(self) -> pa.StringArray:
        """Of the machines in rankings, if they are not those of a shard."""
        if len(self._machine_names) > 1:
            self._machine_names = [pa.concat_arrays(self._machine_names)]
        return self._machine_names[0]

    def grow(self, rows: int) -> None:
        """Make sure that there are so many rows."""
        missing = rows - len(self)
        if missing > 0:
            for name, (height, kind, start, _) in _ARRAYS.items():
                more = np.full((height, missing) if height else missing, start, kind)
                setattr(self, name, np.concatenate([getattr(self, name), more], axis=-1))

    def present(self) -> Bools:
        """The cells to which something was added."""
        there: Bools = (self.total > 0) | self.count.any(axis=0)
        ranked = [row for parts in self._ranks.values() for row, _, _ in parts]
        for rows in ([*self.merged], [*self.dropped], *(row for row, _, _ in self._extra), *ranked):
            there[np.asarray(rows, np.int64)] = True
        return there

    # Adding

    def add_reports(
        self, row: Ints, metrics: Floats, reported_ms: Ints, state: Ints, partial: Bools, is_first: Bools
    ) -> None:
        """Add reports. ``metrics``: a row for each of `METRICS`, NaN where not measured; ``state``: an index
        of `STATES`; ``is_first``: whether it is the first report of its machine in the window."""
        self._figures = None
        if (np.diff(row) < 0).any():
            order = np.argsort(row, kind="stable")
            row, metrics, reported_ms = row[order], metrics[:, order], reported_ms[order]
            state, partial, is_first = state[order], partial[order], is_first[order]
        starts = cell_arrays.starts_of(row)
        sizes = np.diff(starts, append=len(row))
        known = np.abs(metrics) <= columns.VALUE_MAX
        everywhere = bool(known.all())
        stated = np.bincount(
            np.repeat(np.arange(len(starts)), sizes) * len(STATES) + state,
            minlength=len(starts) * len(STATES),
        ).reshape(len(starts), len(STATES))
        added: dict[str, Array] = {
            "total": sizes,
            "machines": np.add.reduceat(is_first, starts, dtype=np.int64),
            "oldest_ms": np.minimum.reduceat(reported_ms, starts),
            "partial": np.logical_or.reduceat(partial, starts),
            "states": stated.T,
        }
        if everywhere:
            added["count"] = np.broadcast_to(sizes, (len(METRICS), len(starts)))
            for name in ("sum", "min", "max"):
                added[name] = _ARRAYS[name][3].reduceat(metrics, starts, axis=1)
        else:
            added["count"] = np.add.reduceat(known, starts, axis=1, dtype=np.int64)
            for name in ("sum", "min", "max"):
                _, _, start, merge = _ARRAYS[name]
                added[name] = merge.reduceat(np.where(known, metrics, start), starts, axis=1)
        targets = row[starts]
        for name, values in added.items():
            array = getattr(self, name)
            array[..., targets] = _ARRAYS[name][3](array[..., targets], values)
        place = bucket_of(metrics)
        place += (np.arange(len(METRICS)) * BUCKETS)[:, None]
        place += row * _WIDTH
        codes = place.ravel() if everywhere else place[known]
        if len(codes):
            self._histogram.append(cell_arrays.counted(codes, len(self) * _WIDTH))

    def add_figures(self, row: Ints, word: Ints, figures: Floats, words: Sequence[str]) -> None:
        """Add aggregated metrics that are not standard, as in `extra_arrays`."""
        if len(row):
            codes = np.array([self._words.setdefault(name, len(self._words)) for name in words], np.int64)
            self._extra.append((row, codes[word], figures))

    def has_room_for(self, name: str, most: int) -> bool:
        """Whether this metric is one of the first ``most`` that are not standard."""
        return name in self._words or len(self._words) < most

    def add_histogram(self, row: int, metric: int, sketch: sketches.QuantileSketch) -> None:
        """Add the histogram of values that are known only as a sketch."""
        self._figures = None
        values, counts = sketch.histogram()
        if len(values):
            self._histogram.append((bucket_of(values) + metric * BUCKETS + row * _WIDTH, counts))

    def add_ranks(self, name: str, row: Ints, values: Floats, machines: Array, most: int) -> None:
        """Add values of which each cell keeps the ``most`` highest, one of each machine."""
        measured = np.isfinite(values)
        if not measured.all():
            row, values, machines = row[measured], values[measured], machines[measured]
        if len(row):
            part = row, values, machines
            if len(row) > 4 * most * np.count_nonzero(np.bincount(row)):  # otherwise ranked by `compact`
                part = cell_arrays.highest([part], most)
            self._is_ranked.discard(name)
            self._ranks.setdefault(name, []).append(part)

    def add(self, other: CellTable, rows: Ints) -> None:
        """Merge: row i of ``other`` is added to row ``rows[i]``."""
        if not len(other):
            return
        self._figures = None
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        starts = cell_arrays.starts_of(ordered)
        targets = ordered[starts]
        for name, (_, _, _, merge) in _ARRAYS.items():
            array, values = getattr(self, name), getattr(other, name)[..., order]
            if len(targets) < len(order):
                values = merge.reduceat(values, starts, axis=-1)
            array[..., targets] = merge(array[..., targets], values)
        for keys, counts in other._ascending():
            self._histogram.append((_moved(keys, rows), counts))
        self._ascends = self._ascends and bool((np.diff(rows) > 0).all())
        codes = np.array([self._words.setdefault(name, len(self._words)) for name in other._words], np.int64)
        for row, word, figures in other._extra:
            moved = rows[row], codes[word], figures
            self._extra.append(cell_arrays.reduced_extra([moved]) if len(targets) < len(order) else moved)
        first = sum(map(len, self._machine_names))
        self._machine_names += other._machine_names
        self._is_ranked -= other._ranks.keys()
        for name, parts in other._ranks.items():
            self._ranks.setdefault(name, []).extend(
                (rows[row], values, machines + first) for row, values, machines in parts
            )
        for source, dropped in other.dropped.items():
            add_counts(self.dropped.setdefault(int(rows[source]), {}), dropped)
        for source, sketch in other.merged.items():
            self.merged.setdefault(int(rows[source]), sketches.DistinctSketch()).merge(sketch)

    def select(self, rows: Ints) -> CellTable:
        """A table of these rows only; they ascend."""
        if len(rows) == len(self):
            return self
        place = np.full(len(self), -1)
        place[rows] = np.arange(len(rows))
        table = CellTable()
        for name in _ARRAYS:
            setattr(table, name, getattr(self, name)[..., rows])
        for keys, counts in self._ascending():
            kept = _chosen(np.repeat(place, _sizes(keys, len(place))))
            table._histogram.append((_moved(keys, place)[kept], counts[kept]))
        table._words = dict(self._words)
        for row, word, figures in self._extra:
            kept = _chosen(place[row])
            table._extra.append((place[row[kept]], word[kept], figures[:, kept]))
        for name, parts in self._ranks.items():
            table._ranks[name] = []
            for row, values, machines in parts:
                kept = _chosen(place[row])
                table._ranks[name].append((place[row[kept]], values[kept], machines[kept]))
        table._is_ranked = set(self._is_ranked)
        table._machine_names = list(self._machine_names)
        table.dropped = {int(place[row]): counts for row, counts in self.dropped.items() if place[row] >= 0}
        table.merged = {int(place[row]): sketch for row, sketch in self.merged.items() if place[row] >= 0}
        return table

    # Reading

    def compact(self, most: int) -> None:
        """Join what was added in parts. ``most``: the length of rankings; 0: they stay as they are."""
        if len(self._histogram) > 1 or not self._ascends:
            self._histogram = [cell_arrays.reduced_histogram(self._histogram)]
            self._ascends = True
        if len(self._extra) > 1:
            self._extra = [cell_arrays.reduced_extra(self._extra)]
        if most:
            for name in self._ranks.keys() - self._is_ranked:
                self._ranks[name] = [cell_arrays.highest(self._ranks[name], most)]
                self._is_ranked.add(name)

    def _ascending(self) -> list[tuple[Ints, Ints]]:
        """The histogram in parts whose keys ascend."""
        if not self._ascends:
            self.compact(0)
        return self._histogram

    def name_machines(self, names: pa.StringArray | None = None) -> None:
        """Let the table have the names of the machines in its rankings, and no others. ``names``: of those of
        a shard, if only their numbers are known."""
        names = self.machine_names if names is None else names
        is_used = np.zeros(len(names), np.bool_)
        for parts in self._ranks.values():
            for _, _, machines in parts:
                is_used[machines] = True
        self.renumber_machines(np.cumsum(is_used) - 1)
        self._machine_names = [names.filter(pa.array(is_used))]

    def renumber_machines(self, moved: Ints) -> None:
        """``moved``: the new number of each machine, -1 of a removed one."""
        for parts in self._ranks.values():
            for number, (row, values, machines) in enumerate(parts):
                kept = moved[machines] >= 0
                parts[number] = (row[kept], values[kept], moved[machines[kept]])

    def in_short(self) -> CellTable:
        """A table of the same rows without histograms and rankings."""
        table = CellTable()
        for name in ("_words", "_extra", "dropped", "merged", *_ARRAYS):
            setattr(table, name, getattr(self, name))
        return table

    def set_figures(self, figures: Floats) -> None:
        """As of `figures`, for a table without histograms."""
        self._figures = figures

    def ranks_only(self) -> CellTable:
        """A table of the same rows that has only the rankings."""
        table = CellTable(len(self))
        table._ranks, table._machine_names = self._ranks, list(self._machine_names)
        return table

    def ranked(self) -> dict[str, cell_arrays.Ranks]:
        """The highest values of each ranked metric, as of `compact`: in order of rows, highest first."""
        return {name: parts[0] for name, parts in self._ranks.items() if name in self._is_ranked}

    def ranking(self, row: int) -> dict[str, list[tuple[float, str]]]:
        """The highest values of each ranked metric in a row, and the names of their machines."""
        ranking = {}
        for name, (rows, values, machines) in self.ranked().items():
            start, end = np.searchsorted(rows, (row, row + 1)).tolist()
            if end > start:
                names = self.machine_names.take(pa.array(machines[start:end])).to_pylist()
                ranking[name] = list(zip(values[start:end].tolist(), names, strict=True))
        return ranking

    def extras(self) -> list[dict[str, columns.MetricRollup]]:
        """For each row: the metrics that are not standard. The table must not change afterwards."""
        if self._extras is None:
            self._extras = [{} for _ in range(len(self))]
            names = list(self._words)
            rows, codes, figures = self.extra_arrays()
            values = zip(rows.tolist(), codes.tolist(), *figures.tolist(), strict=True)
            for row, code, count, total, least, most in values:
                self._extras[row][names[code]] = columns.MetricRollup(
                    count=int(count), sum=total, min=least, max=most
                )
        return self._extras

    @property
    def extra_names(self) -> list[str]:
        """Of metrics that are not standard, by their codes."""
        return list(self._words)

    def extra_arrays(self) -> tuple[Ints, Ints, Floats]:
        """Metrics that are not standard: their rows, codes, and lines of count, sum, minimum and maximum."""
        self.compact(0)
        return self._extra[0] if self._extra else (_NO_INTS, _NO_INTS, np.zeros((4, 0)))

    def rollups(self) -> list[dict[str, columns.MetricRollup]]:
        """For each row: its metrics, as in reports. The table must not change afterwards."""
        if self._rollups is None:
            make = columns.MetricRollup
            self._rollups = [{} for _ in range(len(self))]
            # Flat lists: thousands of small ones would keep the garbage collector busy.
            flat = self.figures().swapaxes(0, 1).reshape(len(FIGURES), -1)
            filled = np.flatnonzero(flat[0])
            lists = [_with_none(line[filled]) for line in flat]
            for at, count, total, least, most, p50, p95, p99 in zip(filled.tolist(), *lists, strict=True):
                self._rollups[at // len(METRICS)][METRICS[at % len(METRICS)]] = make(
                    count=int(count), sum=total, min=least, max=most, p50=p50, p95=p95, p99=p99
                )
            for standard, others in zip(self._rollups, self.extras(), strict=True):
                standard |= others
        return self._rollups

    def figures(self) -> Floats:
        """A layer for each row, with a row for each of `FIGURES` and a column for each metric; NaN where
        nothing was measured."""
        if self._figures is None:
            self._figures = self._compute_figures()
        return self._figures

    def _compute_figures(self) -> Floats:
        self.compact(0)
        figures = np.full((len(self), len(FIGURES), len(METRICS)), np.nan)
        figures[:, 0] = self.count.T
        for row, name in enumerate(("sum", "min", "max"), 1):
            figures[:, row] = np.where(self.count > 0, getattr(self, name), np.nan).T
        if not self._histogram or not len(self._histogram[0][0]):
            return figures
        keys, counts = self._histogram[0]
        seen = np.cumsum(counts)
        of_metric = np.bincount(keys // BUCKETS, weights=counts, minlength=len(self) * len(METRICS))
        before = np.cumsum(of_metric) - of_metric
        rank = before + np.array(SHARES)[:, None] * (of_metric - 1)
        at = np.minimum(np.searchsorted(seen, rank, side="right"), len(keys) - 1)
        value = _MIDDLES[keys[at] % BUCKETS].reshape(len(SHARES), len(self), len(METRICS)).swapaxes(0, 1)
        clipped = np.clip(value, self.min.T[:, None], self.max.T[:, None])
        is_known = ((of_metric > 0).reshape(len(self), len(METRICS)) & (self.count.T > 0))[:, None]
        figures[:, 4:] = np.where(is_known, clipped, np.nan)
        return figures

    # Serialization: for Spark's state, and from executors to the driver.

    def pack(self) -> list[Any]:
        self.compact(0)
        arrays: list[Any] = [cell_arrays.packed(getattr(self, name)) for name in _COUNTS]
        arrays.append(cell_arrays.packed_figures(self.count, self.sum, self.min, self.max))
        histogram = [
            (cell_arrays.packed(np.diff(keys, prepend=0)), cell_arrays.packed(counts))
            for keys, counts in self._histogram
        ]
        extra = [cell_arrays.packed_extra(part) for part in self._extra]
        ranks = {
            name: [cell_arrays.packed_ranks(part) for part in parts] for name, parts in self._ranks.items()
        }
        merged = {row: bytes(sketch) for row, sketch in self.merged.items()}
        names = cell_arrays.packed_names(self.machine_names)
        return [len(self), arrays, histogram, list(self._words), extra, ranks, self.dropped, merged, names]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> CellTable:
        rows, (*counts, figures), histogram, words, extra, ranks, dropped, merged, names = packed
        table = cls(0)
        for name, data in zip(_COUNTS, counts, strict=True):
            height, kind, _, _ = _ARRAYS[name]
            array = cell_arrays.unpacked(data, kind)
            setattr(table, name, array.reshape(height, rows) if height else array)
        table.sum, table.min, table.max = cell_arrays.unpacked_figures(figures, table.count)
        table._histogram = [
            (np.cumsum(cell_arrays.unpacked(keys, np.int64)), cell_arrays.unpacked(counts, np.int64))
            for keys, counts in histogram
        ]
        table._words = {name: code for code, name in enumerate(words)}
        table._extra = [cell_arrays.unpacked_extra(part) for part in extra]
        table._ranks = {
            name: [cell_arrays.unpacked_ranks(part) for part in parts] for name, parts in ranks.items()
        }
        table._machine_names = [cell_arrays.unpacked_names(names)]
        table.dropped = dropped
        table.merged = {row: sketches.DistinctSketch.from_bytes(sketch) for row, sketch in merged.items()}
        return table


class WindowCell:
    """What is known of a group, a zone or the system in one window: one row of a table, or of a new one."""

    __slots__ = ("row", "table")

    def __init__(self, table: CellTable | None = None, row: int = 0) -> None:
        self.table = CellTable(1) if table is None else table
        self.row = row

    @property
    def total(self) -> int:
        return int(self.table.total[self.row])

    @property
    def machines(self) -> int:
        return int(self.table.machines[self.row])

    @property
    def count(self) -> Ints:
        return self.table.count[:, self.row]

    @property
    def sum(self) -> Floats:
        return self.table.sum[:, self.row]

    @property
    def states(self) -> dict[str, int]:
        counts = self.table.states[:, self.row].tolist()
        return {name: count for name, count in zip(STATES, counts, strict=True) if count}

    @property
    def extra(self) -> dict[str, columns.MetricRollup]:
        return self.table.extras()[self.row]

    @property
    def dropped(self) -> dict[str, int]:
        return self.table.dropped.get(self.row, {})

    @property
    def oldest_ms(self) -> int | None:
        oldest = int(self.table.oldest_ms[self.row])
        return None if oldest == NEVER else oldest

    @property
    def partial(self) -> bool:
        return bool(self.table.partial[self.row])

    def machine_count(self) -> int:
        """Number of different machines."""
        merged = self.table.merged.get(self.row)
        return self.machines + (merged.count() if merged is not None else 0)

    def rollups(self) -> dict[str, columns.MetricRollup]:
        return self.table.rollups()[self.row]

    def figures(self) -> Floats:
        """A row for each of `FIGURES`, a column for each metric; NaN where nothing was measured."""
        figures: Floats = self.table.figures()[self.row]
        return figures


def bucket_of(values: Floats) -> Ints:
    buckets = sketches.buckets(values, MANTISSA_BITS)
    buckets -= _FIRST - 1
    return np.clip(buckets, 0, BUCKETS - 1, out=buckets)


def _sizes(keys: Ints, rows: int) -> Ints:
    """How many keys of a histogram, which ascend, belong to each row: a division of each takes far longer."""
    return np.diff(np.searchsorted(keys, np.arange(rows + 1) * _WIDTH))


def _moved(keys: Ints, rows: Ints) -> Ints:
    """The keys of a histogram, with the number of each row replaced."""
    return keys + np.repeat((rows - np.arange(len(rows))) * _WIDTH, _sizes(keys, len(rows)))


def _chosen(place: Ints) -> Bools | slice:
    """As an index: those with a place. A slice, which copies nothing, if all have one."""
    chosen: Bools = place >= 0
    return slice(None) if chosen.all() else chosen


def add_counts(into: dict[str, int], other: Mapping[str, int] | Iterable[tuple[str, int]]) -> None:
    for name, count in dict(other).items():
        into[name] = into.get(name, 0) + count


def _with_none(values: Floats) -> list[float | None]:
    """As a list, with None instead of NaN."""
    listed: list[float | None] = values.tolist()
    for place in np.flatnonzero(np.isnan(values)).tolist():
        listed[place] = None
    return listed
