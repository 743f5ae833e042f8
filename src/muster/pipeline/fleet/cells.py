"""Cells: aggregates of many reports, compact to store and quick to merge.

A cell covers one window of one group, one zone or the system.  It is computed from columns, thousands of
reports at a time.  Cells can be merged in any order.  A cell has count, sum, minimum and maximum of every
standard metric, the number of machines in each state, and a histogram for quantiles.

A histogram bucket is the exponent of a number and the first five bits of its mantissa.  These are the upper
bits of a float in memory, so one shift finds the bucket, without a logarithm.  Buckets are a 32nd of a power
of two wide, and the relative error of a quantile is at most `RELATIVE_ERROR`.  Only non-empty buckets are
stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from muster.core.reports import columns, sketches

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

METRICS = columns.STANDARD_METRICS
RELATIVE_ERROR = 1 / 64

_SHIFT = 18  # of the 23 bits behind a 32-bit float's exponent
_FIRST = (127 - 10) << 5  # the bucket of 2^-10: smaller values count as zero, which is bucket 0
BUCKETS = 60 * 32  # so the last one is that of 2^50, about 10^15
_WIDTH = len(METRICS) * BUCKETS  # the buckets of a metric follow those of the previous one
_MIDDLES = np.array([0, *(np.arange(1, BUCKETS) - 1 + _FIRST << _SHIFT) + (1 << _SHIFT - 1)], np.int32).view(
    np.float32
)

SHARES = (0.5, 0.95, 0.99)
#: The rows of `Cell.figures`.
FIGURES = ("count", "sum", "min", "max", "p50", "p95", "p99")


class ExtraMetric(msgspec.Struct):
    """A metric that is not standard: no histogram."""

    count: int = 0
    sum: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    def add(self, other: ExtraMetric) -> None:
        self.count += other.count
        self.sum += other.sum
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)


def _zeros() -> Ints:
    return np.zeros(len(METRICS), np.int64)


@dataclass(slots=True)
class WindowCell:
    total: int = 0  # reports
    machines: int = 0  # different ones
    count: Ints = field(default_factory=_zeros)
    sum: Floats = field(default_factory=lambda: np.zeros(len(METRICS)))
    min: Floats = field(default_factory=lambda: np.full(len(METRICS), np.inf))
    max: Floats = field(default_factory=lambda: np.full(len(METRICS), -np.inf))
    places: list[npt.NDArray[np.uint16]] = field(default_factory=list)  # metric * BUCKETS + bucket
    counts: list[npt.NDArray[np.int64]] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    extra: dict[str, ExtraMetric] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    oldest_ms: int | None = None
    partial: bool = False
    merged: sketches.DistinctSketch | None = None  # machines known only from summaries
    #: For each ranked metric the highest values so far, and the rows of their machines in the node columns.
    ranks: dict[str, tuple[Floats, Ints]] = field(default_factory=dict)

    def fold(self, values: Floats) -> None:
        """Add a matrix: a row for each of `METRICS`, a column for each report; NaN where not measured."""
        aggregate([self], values, np.zeros(1, np.int64))

    def fold_extra(self, name: str, metric: ExtraMetric) -> None:
        self.extra.setdefault(name, ExtraMetric()).add(metric)

    def rank(self, name: str, values: Floats, places: Ints, most: int) -> None:
        if name in self.ranks:
            values, places = (
                np.concatenate(pair) for pair in zip(self.ranks[name], (values, places), strict=True)
            )
        order = np.argsort(-values, kind="stable")
        _, first = np.unique(places[order], return_index=True)  # of each machine its highest
        kept = order[np.sort(first)][:most]
        self.ranks[name] = values[kept], places[kept]

    def add(self, other: WindowCell) -> None:
        """Merge everything except the ranks."""
        self.total += other.total
        self.machines += other.machines
        self.count += other.count
        self.sum += other.sum
        self.min = np.minimum(self.min, other.min)
        self.max = np.maximum(self.max, other.max)
        self.places += other.places
        self.counts += other.counts
        add_counts(self.states, other.states)
        add_counts(self.dropped, other.dropped)
        for name, metric in other.extra.items():
            self.fold_extra(name, metric)
        if other.oldest_ms is not None:
            self.oldest_ms = min(other.oldest_ms, self.oldest_ms or other.oldest_ms)
        self.partial |= other.partial
        if other.merged is not None:
            self.merged = self.merged or sketches.DistinctSketch()
            self.merged.merge(other.merged)

    def machine_count(self) -> int:
        """Number of different machines."""
        return self.machines + (self.merged.count() if self.merged is not None else 0)

    def figures(self) -> Floats:
        """A row for each of `FIGURES`, a column for each metric; NaN where nothing was measured."""
        self._join()
        known = self.count > 0
        figures = np.full((len(FIGURES), len(METRICS)), np.nan)
        figures[0] = self.count
        figures[1:4, known] = np.stack([self.sum, self.min, self.max])[:, known]
        if not any(map(len, self.places)):
            return figures
        places, counts = self.places[0], self.counts[0]
        seen = np.cumsum(counts)
        of_metric = np.bincount(places // BUCKETS, weights=counts, minlength=len(METRICS))
        before = np.cumsum(of_metric) - of_metric
        rank = before + np.array(SHARES)[:, None] * (of_metric - 1)
        at = np.minimum(np.searchsorted(seen, rank, side="right"), len(places) - 1)
        value = _MIDDLES[places[at] % BUCKETS]
        figures[4:, known] = np.clip(value, self.min, self.max)[:, known]
        figures[4:, of_metric == 0] = np.nan
        return figures

    # Serialization: for Spark's state, and from executors to the driver.

    def pack(self) -> list[Any]:
        self._join()
        arrays: tuple[Array, ...] = (
            self.count,
            self.sum,
            self.min,
            self.max,
            *self.places,
            *(counts.astype(np.int32) for counts in self.counts),
        )
        extra = {
            name: [metric.count, metric.sum, metric.min, metric.max] for name, metric in self.extra.items()
        }
        ranks = {name: [values.tobytes(), at.tobytes()] for name, (values, at) in self.ranks.items()}
        merged = None if self.merged is None else bytes(self.merged)
        rest = (self.states, extra, self.dropped, self.oldest_ms, self.partial, merged, ranks)
        return [self.total, self.machines, [array.tobytes() for array in arrays], *rest]

    @classmethod
    def unpack(cls, packed: list[Any]) -> WindowCell:
        total, machines, arrays, states, extra, dropped, oldest_ms, partial, merged, ranks = packed
        count, sum_, min_, max_, *sparse = arrays
        return cls(
            total,
            machines,
            np.frombuffer(count, np.int64).copy(),
            np.frombuffer(sum_).copy(),
            np.frombuffer(min_),
            np.frombuffer(max_),
            [np.frombuffer(sparse[0], np.uint16)] if sparse else [],
            [np.frombuffer(sparse[1], np.int32).astype(np.int64)] if sparse else [],
            states,
            {name: ExtraMetric(*fields) for name, fields in extra.items()},
            dropped,
            oldest_ms,
            partial,
            None if merged is None else sketches.DistinctSketch.from_bytes(merged),
            {
                name: (np.frombuffer(values), np.frombuffer(at, np.int64))
                for name, (values, at) in ranks.items()
            },
        )

    def _join(self) -> None:
        if len(self.places) > 1:
            places, counts = np.concatenate(self.places), np.concatenate(self.counts)
            if len(places) > _WIDTH // 8:
                joined = np.bincount(places, weights=counts, minlength=_WIDTH)
                filled = np.flatnonzero(joined)
                self.places, self.counts = [filled.astype(np.uint16)], [joined[filled].astype(np.int64)]
            else:
                order = np.argsort(places, kind="stable")
                ordered = places[order]
                starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
                self.places, self.counts = [ordered[starts]], [np.add.reduceat(counts[order], starts)]


def aggregate(targets: Sequence[WindowCell], values: Floats, starts: Ints) -> None:
    """As `WindowCell.fold`, for several cells: the columns from ``starts[i]`` on belong to cell i."""
    sizes = np.diff(starts, append=values.shape[1])
    known = np.isfinite(values)  # no sum survives an infinity
    everywhere = bool(known.all())
    if everywhere:
        counted = np.broadcast_to(sizes, (len(METRICS), len(starts)))
        summed = np.add.reduceat(values, starts, axis=1)
        least = np.minimum.reduceat(values, starts, axis=1)
        most = np.maximum.reduceat(values, starts, axis=1)
    else:
        counted = np.add.reduceat(known, starts, axis=1, dtype=np.int64)
        summed = np.add.reduceat(np.where(known, values, 0.0), starts, axis=1)
        least = np.minimum.reduceat(np.where(known, values, np.inf), starts, axis=1)
        most = np.maximum.reduceat(np.where(known, values, -np.inf), starts, axis=1)
    place = bucket_of(values)
    place += (np.arange(len(METRICS)) * BUCKETS)[:, None]
    place += np.repeat(np.arange(len(starts)) * _WIDTH, sizes)
    filled, counts = _counted(place.ravel() if everywhere else place[known], len(starts) * _WIDTH)
    bounds = np.searchsorted(filled, np.arange(len(starts) + 1) * _WIDTH)
    places = (filled % _WIDTH).astype(np.uint16)
    for number, target in enumerate(targets):
        target.count += counted[:, number]
        target.sum += summed[:, number]
        target.min = np.minimum(target.min, least[:, number])
        target.max = np.maximum(target.max, most[:, number])
        target.places.append(places[bounds[number] : bounds[number + 1]])
        target.counts.append(counts[bounds[number] : bounds[number + 1]])


def bucket_of(values: Floats) -> Ints:
    with np.errstate(over="ignore", invalid="ignore"):
        bits = values.astype(np.float32).view(np.int32)
    buckets = (bits >> _SHIFT).astype(np.int64)  # negative numbers have the highest bit set
    buckets -= _FIRST - 1
    return np.clip(buckets, 0, BUCKETS - 1, out=buckets)


def fold_sketch(cell: WindowCell, metric: int, sketch: sketches.QuantileSketch) -> None:
    """Add the histogram of values that are known only as a sketch."""
    values, counts = sketch.histogram()
    cell.places.append((bucket_of(values) + metric * BUCKETS).astype(np.uint16))
    cell.counts.append(counts)


def add_counts(into: dict[str, int], other: Mapping[str, int] | Iterable[tuple[str, int]]) -> None:
    for name, count in dict(other).items():
        into[name] = into.get(name, 0) + count


def _counted(codes: Ints, bins: int) -> tuple[Ints, Ints]:
    """The distinct codes, in order, and their counts."""
    if bins <= 8 * len(codes):
        counts = np.bincount(codes, minlength=bins)
        filled = np.flatnonzero(counts)
        return filled, counts[filled]
    return np.unique(codes, return_counts=True)
