"""Sets of numbers that lie close together: stretches, not single numbers.

A queue's numbers have gaps where other queues' messages stand in the log.  So a stretch says: of *our*
numbers in it, all are in.  Whoever knows that none of ours is missing between two of them joins them; what
is kept then grows with the numbers left out, not with those that are in.
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
        """One number, or all from ``first`` to ``last``."""
        if last is None:
            last = first
        begins, ends = self._begins, self._ends
        if not ends or first > ends[-1] + 1:  # most are: numbers grow
            begins.append(first)
            ends.append(last)
            return
        low = bisect.bisect_left(ends, first - 1)  # those that touch it lie from here
        high = bisect.bisect_right(begins, last + 1)  # to before here
        if low < high:
            first, last = min(first, begins[low]), max(last, ends[high - 1])
        begins[low:high] = [first]
        ends[low:high] = [last]

    def end_of(self, number: int) -> int:
        """Of the stretch that it is in, if it is in one; else 0."""
        at = bisect.bisect_right(self._begins, number) - 1
        return self._ends[at] if at >= 0 and number <= self._ends[at] else 0

    def cover(self, first: int, last: int, but: Iterable[int]) -> None:
        """All from ``first`` to ``last`` but for some, given in order."""
        for number in but:
            if number > last:
                break
            if first < number:
                self.add(first, number - 1)
            first = max(first, number + 1)
        if first <= last:
            self.add(first, last)

    def cut(self, number: int) -> None:
        """Forget those up to ``number``."""
        gone = bisect.bisect_right(self._ends, number)
        del self._begins[:gone]
        del self._ends[:gone]
        if self._begins:
            self._begins[0] = max(self._begins[0], number + 1)
