"""Where the messages are that are not in a page of their destination alone.

    shared page    stored at one time for several destinations
    sorted page    what was still needed of shared pages at a checkpoint, of one group: a queue, all topics,
                   or the messages on their way to one partition. They keep their numbers
    packed page    what was still needed of pages of one group that had become nearly useless

The shared pages since the last checkpoint are few, so the index of their messages is in memory, and a
successor restores it while it reads the records there. All earlier ones have been sorted and deleted: a queue
that nobody reads retains its own messages only. The checkpoint names the sorted and the packed pages. Those
of a group do not overlap, sorted among themselves: a packed page stands for all pages of its group between
its first and its last number, those of sorted pages or those of pages of one destination.

Pure. Groups are those of `partitions.LogSubjects.group`.
"""

from __future__ import annotations

import bisect
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
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
        self._sorted: dict[str, list[ledger.SortedPage]] = {}  # for messages of shared pages
        self._packed: dict[str, list[ledger.SortedPage]] = {}  # for those of pages of one destination
        self._at: dict[int, ledger.SortedPage] = {}  # both, by sequence

    def __contains__(self, group: str) -> bool:
        """Whether the log may contain messages of the group in such pages."""
        return group in self._unsorted or group in self._sorted or group in self._packed

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
        """Those for messages of shared pages, from the number ``first`` on."""
        return _from(self._sorted.get(group, []), first)

    def of_kind(self, group: str, like: int, first: int) -> list[ledger.SortedPage]:
        """Those for messages with numbers like this one, from the number ``first`` on."""
        kind = self._sorted if like & pages.SHARED else self._packed
        return _from(kind.get(group, []), first)

    def at(self, sequence: int) -> ledger.SortedPage | None:
        """The sorted or packed page with this sequence."""
        return self._at.get(sequence)

    def covers_alone(self, group: str, number: int) -> bool:
        """Whether a packed page is in place of a page of one destination that begins with this number."""
        return _covering(self._packed.get(group), number) is not None

    def packed_pages(self, group: str, first: int = 0) -> list[ledger.SortedPage]:
        """Those for messages of pages of one destination, from the number ``first`` on."""
        return _from(self._packed.get(group, []), first)

    def page_of(self, group: str, number: int) -> ledger.SortedPage | None:
        """The page that contains the message if it is in a sorted or packed one."""
        if number & pages.SHARED and (page := _covering(self._sorted.get(group), number)) is not None:
            return page
        # The former version's pages of one destination have such numbers as well.
        return None if self.is_unsorted(number) else _covering(self._packed.get(group), number)

    def is_unsorted(self, number: int) -> bool:
        """Whether the message is in a shared page, if it is not in a page of its destination alone."""
        return bool(number & pages.SHARED) and pages.sequence_of(number) > self.sorted_to

    def sort(self, to: int, made: Iterable[ledger.SortedPage] = ()) -> None:
        """What is needed of the shared pages up to the sequence ``to`` is in the pages ``made``."""
        self.add(made)
        self.sorted_to = max(self.sorted_to, to)
        for group, numbers in list(self._unsorted.items()):
            del numbers[: bisect.bisect_right(numbers, pages.end(to))]
            if not numbers:
                del self._unsorted[group]

    def add(self, made: Iterable[ledger.SortedPage]) -> None:
        """These pages are in the log, in place of others of their groups between the same numbers."""
        for page in made:
            there = self._kind(page).setdefault(page.group, [])
            begin = bisect.bisect_left(there, page.first, key=_last)
            end = bisect.bisect_right(there, page.last, key=_first)
            for replaced in there[begin:end]:
                del self._at[replaced.sequence]
            there[begin:end] = [page]
            self._at[page.sequence] = page

    def _kind(self, page: ledger.SortedPage) -> dict[str, list[ledger.SortedPage]]:
        return self._sorted if page.first & pages.SHARED else self._packed

    def obsolete(self, floors: Mapping[str, int]) -> list[ledger.SortedPage]:
        """Pages without a message above the number ``floors[group]``."""
        return [page for page in self if page.last <= floors[page.group]]

    def delete(self, deleted: Iterable[ledger.SortedPage]) -> None:
        for page in deleted:
            if self._at.pop(page.sequence, None) is not None:
                there = self._kind(page)[page.group]
                there.remove(page)
                if not there:
                    del self._kind(page)[page.group]

    def __iter__(self) -> Iterator[ledger.SortedPage]:
        """All sorted and packed pages."""
        return iter(self._at.values())


def _from(there: list[ledger.SortedPage], first: int) -> list[ledger.SortedPage]:
    return there[bisect.bisect_left(there, first, key=_last) :]


def _covering(there: list[ledger.SortedPage] | None, number: int) -> ledger.SortedPage | None:
    if not there:
        return None
    at = bisect.bisect_right(there, number, key=_first) - 1
    return there[at] if at >= 0 and number <= there[at].last else None
