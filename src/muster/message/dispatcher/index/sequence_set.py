"""Sets of numbers that are close together, stored as ranges.

The numbers of a queue have gaps where the log contains messages of other queues. A range therefore states
that all numbers *of this queue* in it are included. The caller joins ranges when no number of the queue is
missing between them. The size then depends on the numbers left out, not on those included.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator


class SequenceSet:
    __slots__ = ("_begins", "_ends")

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __contains__(self, number: int) -> bool:
        at = bisect.bisect_right(self._begins, number) - 1
        return at >= 0 and number <= self._ends[at]

    def __len__(self) -> int:
        return len(self._begins)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._begins, self._ends, strict=True)

    def add(self, first: int, last: int | None = None) -> None:
        """Add one number, or all from ``first`` to ``last``."""
        if last is None:
            last = first
        begins, ends = self._begins, self._ends
        if not ends or first > ends[-1] + 1:  # the usual case: numbers increase
            begins.append(first)
            ends.append(last)
            return
        low = bisect.bisect_left(ends, first - 1)  # first range that touches it
        high = bisect.bisect_right(begins, last + 1)  # after the last range that touches it
        if low < high:
            first, last = min(first, begins[low]), max(last, ends[high - 1])
        begins[low:high] = [first]
        ends[low:high] = [last]

    def end_of(self, number: int) -> int:
        """The end of the range that contains the number; 0 if there is none."""
        at = bisect.bisect_right(self._begins, number) - 1
        return self._ends[at] if at >= 0 and number <= self._ends[at] else 0

    def cover(self, first: int, last: int, but: Iterable[int]) -> None:
        """Add all numbers from ``first`` to ``last`` except some, which are passed in order."""
        for number in but:
            if number > last:
                break
            if first < number:
                self.add(first, number - 1)
            first = max(first, number + 1)
        if first <= last:
            self.add(first, last)

    def cut(self, number: int) -> None:
        """Remove all numbers up to ``number``."""
        gone = bisect.bisect_right(self._ends, number)
        del self._begins[:gone]
        del self._ends[:gone]
        if self._begins:
            self._begins[0] = max(self._begins[0], number + 1)
