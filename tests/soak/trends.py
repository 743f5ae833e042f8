"""Whether a size is level: its slope by robust regression (Theil and Sen). Pure.

The slope of a size is the median of the slopes of all pairs of samples. A process that was killed begins
again with another size, so only samples of one life are paired, without the time in which it warms up.
A short life is not judged: its caches still fill, and a few minutes say little about an hour.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LIFE_S_MIN = 1500.0  # a shorter life is not judged
WARM_UP_S = 600.0  # of each life of a process: caches, pools and windows of duplicates fill
PAIRS_S_MIN = 300.0  # of closer samples the slope is only noise
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
    per_hour: float | None  # None: no life was long enough
    is_level: bool  # or not judged


def trend(subject: str, size: str, samples: Sequence[SizeSample]) -> Trend:
    values = [sample.value for sample in samples]
    median = statistics.median(values)
    slopes = _slopes(samples)
    per_hour = statistics.median(slopes) * HOUR_S if slopes else None
    absolute, share = ALLOWED[size]
    is_level = per_hour is None or per_hour <= max(absolute, share * median)
    return Trend(subject, size, len(values), median, values[-1], per_hour, is_level)


def _slopes(samples: Sequence[SizeSample]) -> list[float]:
    slopes = []
    lives: dict[int, list[SizeSample]] = {}
    for sample in samples:
        lives.setdefault(sample.life, []).append(sample)
    for life in lives.values():
        if life[-1].at_s - life[0].at_s < LIFE_S_MIN:
            continue
        warm = [sample for sample in life if sample.at_s - life[0].at_s >= WARM_UP_S]
        for place, earlier in enumerate(warm):
            for later in warm[place + 1 :]:
                apart_s = later.at_s - earlier.at_s
                if apart_s >= PAIRS_S_MIN:
                    slopes.append((later.value - earlier.value) / apart_s)
    return slopes
