"""Where the messages are whose page has several destinations.

    shared page    stored at one time for several destinations
    sorted page    what was still needed of shared pages at a checkpoint, of one group: a queue, all topics,
                   or the messages on their way to one partition. They keep their numbers

The shared pages since the last checkpoint are few, so the index of their messages is in memory, and a
successor restores it while it reads the records there. All earlier ones have been sorted and deleted: a queue
that nobody reads retains its own messages only. The sorted pages of a group have ascending numbers, and the
checkpoint names them.

Pure. Groups are those of `partitions.LogSubjects.group`.
"""

from __future__ import annotations

import bisect
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from muster.message.dispatcher.log import ledger, pages

_first: Final = operator.attrgetter("first")
_last: Final = operator.attrgetter("last")


class SharedPages:
    """``group``: the group of a subject. ``sorted_to``: the shared pages up to here have been sorted."""

    def __init__(self, group: Callable[[str], str]) -> None:
        self._group = group
        self.sorted_to = 0
        self._unsorted: dict[str, array[int]] = {}  # the numbers of messages by group
        self._sorted: dict[str, list[ledger.SortedPage]] = {}

    def __contains__(self, group: str) -> bool:
        """Whether the log may contain messages of the group in such pages."""
        return group in self._unsorted or group in self._sorted

    def stored(self, sequence: int, parts: Iterable[tuple[str, int]]) -> None:
        """A shared page is in the log."""
        number = pages.number(sequence, pages.SHARED)
        for subject, count in parts:
            numbers = self._unsorted.setdefault(self._group(subject), array("q"))
            numbers.extend(range(number, number + count))
            number += count

    def unsorted(self, group: str, first: int = 0) -> array[int]:
        """The numbers of messages that are not sorted yet, from ``first`` on."""
        numbers = self._unsorted.get(group, array("q"))
        return numbers[bisect.bisect_left(numbers, first) :]

    def groups(self) -> list[str]:
        """Those with messages that are not sorted yet."""
        return list(self._unsorted)

    def sorted_pages(self, group: str, first: int = 0) -> list[ledger.SortedPage]:
        """Those with messages from ``first`` on."""
        there = self._sorted.get(group, [])
        return there[bisect.bisect_left(there, first, key=_last) :]

    def page_of(self, group: str, number: int) -> ledger.SortedPage | None:
        """The sorted page that contains the message; None: it is in the page of its number."""
        there = self._sorted.get(group)
        if not there or not number & pages.SHARED:
            return None
        at = bisect.bisect_right(there, number, key=_first) - 1
        return there[at] if at >= 0 and number <= there[at].last else None

    def is_unsorted(self, number: int) -> bool:
        """Whether the message is in a shared page, if it is not in a page of its destination alone."""
        return bool(number & pages.SHARED) and pages.sequence_of(number) > self.sorted_to

    def sort(self, to: int, made: Iterable[ledger.SortedPage] = ()) -> None:
        """What is needed of the shared pages up to the sequence ``to`` is in the pages ``made``."""
        for page in made:
            self._sorted.setdefault(page.group, []).append(page)
        self.sorted_to = max(self.sorted_to, to)
        for group, numbers in list(self._unsorted.items()):
            del numbers[: bisect.bisect_right(numbers, pages.end(to))]
            if not numbers:
                del self._unsorted[group]

    def drop(self, group: str, to: int) -> None:
        """The sorted pages of a group that have no message after the number ``to`` are deleted."""
        there = self._sorted.get(group, [])
        del there[: bisect.bisect_right(there, to, key=_last)]
        if not there:
            self._sorted.pop(group, None)

    def delete(self, sequence: int) -> None:
        """A sorted page is deleted."""
        for group, there in list(self._sorted.items()):
            there[:] = [page for page in there if page.sequence != sequence]
            if not there:
                del self._sorted[group]

    def __iter__(self) -> Iterator[ledger.SortedPage]:
        """All sorted pages."""
        for there in self._sorted.values():
            yield from there

    def sorted_groups(self) -> list[str]:
        return list(self._sorted)
