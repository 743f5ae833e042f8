"""Leaky buckets: how much is tolerated at once, and how fast that is forgotten, for each of many keys.

The table is bounded: keys that were used longest ago are dropped first.  Pure: the time is an argument, and
may be of any clock, also of one that steps.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Generic, TypeVar

KEYS_MAX = 10_000

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class BucketBudget:
    at_once: int  # tolerated at once
    forget_s: float  # then one more in each such time


class LeakyBuckets(Generic[K]):
    def __init__(self, budget: BucketBudget) -> None:
        self._budget = budget
        self._levels: collections.OrderedDict[K, tuple[float, float]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._levels)

    def wait_s(self, key: K, now_s: float) -> float:
        """The time until there is room for one more; 0: now."""
        over = self._level(key, now_s) - (self._budget.at_once - 1)
        # Rounding must not leave a client waiting for the last fraction of a second.
        return over * self._budget.forget_s if over > 1e-6 else 0.0

    def add(self, key: K, now_s: float, amount: float = 1.0) -> None:
        level = min(self._level(key, now_s) + amount, 2.0 * self._budget.at_once)
        self._levels.pop(key, None)
        self._levels[key] = (level, now_s)
        while len(self._levels) > KEYS_MAX:
            self._levels.popitem(last=False)

    def _level(self, key: K, now_s: float) -> float:
        level, at_s = self._levels.get(key, (0.0, now_s))
        if now_s < at_s:  # the clock was set back: the leak counts from here
            self._levels[key] = (level, now_s)
            return level
        return max(0.0, level - (now_s - at_s) / self._budget.forget_s)
