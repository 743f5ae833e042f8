"""Whether a size is level: its slope by robust regression (Theil and Sen). Pure.

The slope of a size is the median of the slopes of all pairs of samples. A process that was killed begins
again with another size, so only samples of one life are paired, without the time in which it warms up.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP_S = 300.0  # of each life of a process: caches, pools and windows of duplicates fill
PAIRS_S_MIN = 60.0  # of closer samples the slope is only noise
HOUR_S = 3600.0

#: By size: growth in an hour that is no leak, absolutely and as a share of the median.
ALLOWED = {
    "memory": (8e6, 0.10),
    "descriptors": (4, 0.10),
    "threads": (2, 0.10),
    "tasks": (10, 0.10),
    "bytes": (8e6, 0.10),
}


@dataclass(frozen=True, slots=True)
class SizeSample:
    at_s: float
    life: int  # of the process: its pid
    value: float


@dataclass(frozen=True, slots=True)
class Trend:
    subject: str  # a process, a stream or a file
    size: str
    samples: int
    median: float
    last: float
    per_hour: float | None  # None: too few samples of one life
    is_level: bool


def trend(subject: str, size: str, samples: Sequence[SizeSample], *, warm_up_s: float = WARM_UP_S) -> Trend:
    values = [sample.value for sample in samples]
    median = statistics.median(values)
    slopes = _slopes(samples, warm_up_s)
    per_hour = statistics.median(slopes) * HOUR_S if slopes else None
    absolute, share = ALLOWED[size]
    is_level = per_hour is None or per_hour <= max(absolute, share * median)
    return Trend(subject, size, len(values), median, values[-1], per_hour, is_level)


def _slopes(samples: Sequence[SizeSample], warm_up_s: float) -> list[float]:
    slopes = []
    lives: dict[int, list[SizeSample]] = {}
    for sample in samples:
        lives.setdefault(sample.life, []).append(sample)
    for life in lives.values():
        warm = [sample for sample in life if sample.at_s - life[0].at_s >= warm_up_s]
        for place, earlier in enumerate(warm):
            for later in warm[place + 1 :]:
                apart_s = later.at_s - earlier.at_s
                if apart_s >= PAIRS_S_MIN:
                    slopes.append((later.value - earlier.value) / apart_s)
    return slopes
