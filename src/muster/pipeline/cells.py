"""Cells: what is known of many reports at once, small enough to keep and quick to add up.

A cell covers one window, one group and one zone.  It is made from columns, a message at a time, and cells add
up in any order: counts, sums, least and greatest of every standard metric, how many machines were in which
state, and a histogram from which quantiles are read.  The buckets of the histogram grow by a constant factor,
so a quantile is off by at most `RELATIVE_ERROR` of itself; only buckets that hold something are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from muster.core import reports

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

METRICS = reports.STANDARD_METRICS
RELATIVE_ERROR = 0.025

_LOG_GROWTH = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_SMALLEST = -140  # the bucket of 0.001: whatever is less counts as zero
BUCKETS = 860  # so the last one is that of some 10^15


class Extra(msgspec.Struct):
    """A metric that is not standard: no histogram."""

    count: int = 0
    sum: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    def add(self, other: Extra) -> None:
        self.count += other.count
        self.sum += other.sum
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)


class Top(msgspec.Struct, frozen=True, order=True):
    value: float
    machine: str


def _zeros() -> Ints:
    return np.zeros(len(METRICS), np.int64)


@dataclass(slots=True)
class Cell:
    total: int = 0  # reports
    machines: int = 0  # different ones
    count: Ints = field(default_factory=_zeros)
    sum: Floats = field(default_factory=lambda: np.zeros(len(METRICS)))
    min: Floats = field(default_factory=lambda: np.full(len(METRICS), np.inf))
    max: Floats = field(default_factory=lambda: np.full(len(METRICS), -np.inf))
    places: list[npt.NDArray[np.uint16]] = field(default_factory=list)  # metric * BUCKETS + bucket
    counts: list[npt.NDArray[np.int32]] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    extra: dict[str, Extra] = field(default_factory=dict)
    top: dict[str, list[Top]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    oldest_ms: int | None = None
    partial: bool = False

    def fold(self, values: Floats) -> None:
        """Take in a matrix: a row for each of `METRICS`, a column for each report; NaN where not measured."""
        fold([self], values, np.zeros(1, np.int64))

    def fold_extra(self, name: str, values: Floats) -> None:
        if len(values):
            one = Extra(len(values), float(values.sum()), float(values.min()), float(values.max()))
            self.extra.setdefault(name, Extra()).add(one)

    def add_top(self, name: str, found: Iterable[Top], most: int) -> None:
        merged = [*self.top.get(name, ()), *found]
        best: dict[str, float] = {}
        for one in merged:
            best[one.machine] = max(one.value, best.get(one.machine, -math.inf))
        ranked = sorted((Top(value, machine) for machine, value in best.items()), reverse=True)
        self.top[name] = ranked[:most]

    def add(self, other: Cell, top: int = 10) -> None:
        self.total += other.total
        self.machines += other.machines
        self.count += other.count
        self.sum += other.sum
        self.min = np.minimum(self.min, other.min)
        self.max = np.maximum(self.max, other.max)
        self.places += other.places
        self.counts += other.counts
        _add_counts(self.states, other.states)
        _add_counts(self.dropped, other.dropped)
        for name, one in other.extra.items():
            self.extra.setdefault(name, Extra()).add(one)
        for name, found in other.top.items():
            self.add_top(name, found, top)
        if other.oldest_ms is not None:
            self.oldest_ms = min(other.oldest_ms, self.oldest_ms or other.oldest_ms)
        self.partial |= other.partial

    def rollups(self) -> dict[str, reports.Rollup]:
        histogram = self._histogram()
        found = {
            name: reports.Rollup(
                count=int(self.count[row]),
                sum=float(self.sum[row]),
                min=float(self.min[row]),
                max=float(self.max[row]),
                **_quantiles(histogram[row], float(self.min[row]), float(self.max[row])),
            )
            for row, name in enumerate(METRICS)
            if self.count[row]
        }
        for name, one in self.extra.items():
            found[name] = reports.Rollup(count=one.count, sum=one.sum, min=one.min, max=one.max)
        return found

    def _histogram(self) -> Ints:
        if not self.places:
            return np.zeros((len(METRICS), BUCKETS), np.int64)
        flat = np.bincount(
            np.concatenate(self.places),
            weights=np.concatenate(self.counts),
            minlength=len(METRICS) * BUCKETS,
        )
        return flat.astype(np.int64).reshape(len(METRICS), BUCKETS)

    # To bytes and back: it lives in Spark's state, and travels from executors to the driver.

    def pack(self) -> list[Any]:
        self._join()
        arrays: tuple[npt.NDArray[Any], ...] = (
            self.count,
            self.sum,
            self.min,
            self.max,
            *self.places,
            *self.counts,
        )
        extra = {name: [one.count, one.sum, one.min, one.max] for name, one in self.extra.items()}
        top = {name: [[one.value, one.machine] for one in found] for name, found in self.top.items()}
        rest = (self.states, extra, top, self.dropped, self.oldest_ms, self.partial)
        return [self.total, self.machines, [array.tobytes() for array in arrays], *rest]

    @classmethod
    def unpack(cls, packed: list[Any]) -> Cell:
        total, machines, arrays, states, extra, top, dropped, oldest_ms, partial = packed
        count, sum_, min_, max_, *sparse = arrays
        return cls(
            total,
            machines,
            np.frombuffer(count, np.int64).copy(),
            np.frombuffer(sum_).copy(),
            np.frombuffer(min_).copy(),
            np.frombuffer(max_).copy(),
            [np.frombuffer(sparse[0], np.uint16)] if sparse else [],
            [np.frombuffer(sparse[1], np.int32)] if sparse else [],
            states,
            {name: Extra(*one) for name, one in extra.items()},
            {name: [Top(*one) for one in found] for name, found in top.items()},
            dropped,
            oldest_ms,
            partial,
        )

    def _join(self) -> None:
        if len(self.places) > 1:
            joined = self._histogram().ravel()
            filled = np.flatnonzero(joined)
            self.places = [filled.astype(np.uint16)]
            self.counts = [joined[filled].astype(np.int32)]


def fold(targets: Sequence[Cell], values: Floats, starts: Ints) -> None:
    """As `Cell.fold`, for several cells at once: the columns from ``starts[i]`` on are those of cell i."""
    known = ~np.isnan(values)
    counted = np.add.reduceat(known, starts, axis=1, dtype=np.int64)
    summed = np.add.reduceat(np.where(known, values, 0.0), starts, axis=1)
    least = np.minimum.reduceat(np.where(known, values, np.inf), starts, axis=1)
    most = np.maximum.reduceat(np.where(known, values, -np.inf), starts, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        bucket = np.ceil(np.log(values) * (1 / _LOG_GROWTH)) - _SMALLEST
    bucket[~(values > 0)] = 0  # zero, less than zero, and nothing at all
    place = np.clip(bucket, 0, BUCKETS - 1).astype(np.int64)
    place += (np.arange(len(METRICS)) * BUCKETS)[:, None]
    cell = np.repeat(np.arange(len(starts)), np.diff(np.r_[starts, values.shape[1]]))
    place += (cell * (len(METRICS) * BUCKETS))[None, :]
    found = np.bincount(place[known], minlength=len(starts) * len(METRICS) * BUCKETS)
    for number, target in enumerate(targets):
        target.count += counted[:, number]
        target.sum += summed[:, number]
        target.min = np.minimum(target.min, least[:, number])
        target.max = np.maximum(target.max, most[:, number])
        own = found[number * len(METRICS) * BUCKETS : (number + 1) * len(METRICS) * BUCKETS]
        filled = np.flatnonzero(own)
        target.places.append(filled.astype(np.uint16))
        target.counts.append(own[filled].astype(np.int32))


def _quantiles(histogram: Ints, least: float, most: float) -> dict[str, float]:
    seen = np.cumsum(histogram)
    found = {}
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        bucket = int(np.searchsorted(seen, share * (int(seen[-1]) - 1), side="right"))
        value = 0.0 if bucket == 0 else math.exp((bucket + _SMALLEST) * _LOG_GROWTH) * (1 - RELATIVE_ERROR)
        found[name] = min(max(value, least), most)
    return found


def _add_counts(into: dict[str, int], other: Mapping[str, int]) -> None:
    for name, count in other.items():
        into[name] = into.get(name, 0) + count
