"""Reads the log: its pages, and the messages of one destination in the order of their numbers.

These are in pages of the destination alone, in sorted and packed pages, and in shared pages that are not
sorted yet (`shared_pages`). A page that is missing has been trimmed, sorted or packed meanwhile.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import itertools
import operator
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

from muster.bus import api
from muster.core import errors
from muster.message import partitions
from muster.message.dispatcher.log import ledger, pages, shared_pages

LAG_S: Final = 0.05
LAG_TRIES: Final = 100
GETS_MAX: Final = 16  # pages requested at one time
DENSE: Final = 8  # pages of the log for each page that is needed, up to which they are read in one request

Numbered = tuple[int, str, pages.PagedMessage]  # number, subject, message
_number: Final = operator.itemgetter(0)


class LogReader:
    """``head``: the last sequence of the log that is known. ``foreign``: the sequences of messages that are
    no pages.
    """

    def __init__(
        self,
        stream: api.Stream,
        subjects: partitions.LogSubjects,
        shared: shared_pages.SharedPages,
        head: Callable[[], int],
        foreign: set[int],
    ) -> None:
        self._stream = stream
        self._subjects = subjects
        self._shared = shared
        self._head = head
        self._foreign = foreign

    # Pages.

    async def page(self, sequence: int) -> api.StoredMessage | None:
        """A page of the log; None if the log does not contain it."""
        try:
            message = await self._stream.get(sequence)
            return message if pages.is_page(message.data) else None
        except errors.NotFound:  # or the broker is a new leader, and does not know it yet
            async for page in self.read_pages(sequence, None, sequence):
                return page
        return None

    async def read_pages(
        self, first: int, subject: str | None = None, last: int | None = None
    ) -> AsyncIterator[api.StoredMessage]:
        """The current pages of the log from sequence ``first`` on, up to ``last``."""
        head, tries = self._head(), 0
        while (state := await self._stream.state()).last_sequence < head:
            if (tries := tries + 1) > LAG_TRIES:  # what it does not know must not be taken for deleted
                raise errors.Unavailable("the brokers do not know the end of the log of messages")
            await asyncio.sleep(LAG_S)  # a new leader among them does not yet
        last = state.last_sequence if last is None else min(last, state.last_sequence)
        while (first := max(first, state.first_sequence)) <= last:
            try:
                async for message in self._stream.read(first, last, subject=subject, gaps=True):
                    if pages.is_page(message.data):
                        yield message
                    else:
                        self._foreign.add(message.sequence)
                    first = message.sequence + 1
                return
            except errors.NotFound:  # a checkpoint trimmed the log meanwhile
                state = await self._stream.state()
                if state.first_sequence <= first:
                    raise

    async def several(
        self, sequences: Iterable[int], subject: str
    ) -> AsyncIterator[tuple[int, api.StoredMessage | None]]:
        """These pages of a subject, None for those that the log does not contain."""
        requested = list(sequences)
        while requested:
            run = _ascending_run(requested)
            if len(run) > 1 and run[-1] - run[0] < DENSE * len(run):
                left = deque(run)
                async for page in self.read_pages(run[0], subject, run[-1]):
                    while left and left[0] < page.sequence:
                        yield left.popleft(), None
                    if left and left[0] == page.sequence:
                        yield left.popleft(), page
                for sequence in left:
                    yield sequence, None
            else:
                run = run[:GETS_MAX]
                for pair in zip(run, await asyncio.gather(*map(self.page, run)), strict=True):
                    yield pair
            del requested[: len(run)]

    # Messages.

    async def read(
        self, subject: str, first: int = 0, last: int | None = None
    ) -> AsyncIterator[list[Numbered]]:
        """The messages of a subject, or of topics and of some others, in the order of their numbers, from the
        page of the number ``first`` on, up to that of ``last``."""
        from_shared = self._from_shared(self._subjects.group(subject), first, last)
        following = await anext(from_shared, None)
        async for together in self._alone(subject, first, last):
            while following is not None and following[0][0] < together[-1][0]:
                if at := bisect.bisect_left(following, together[0][0], key=_number):
                    yield following[:at]
                    following = following[at:] or await anext(from_shared, None)
                else:
                    at = bisect.bisect_left(together, following[0][0], key=_number)
                    yield together[:at]
                    together = together[at:]
            yield together
        while following is not None:
            yield following
            following = await anext(from_shared, None)

    async def _alone(self, subject: str, first: int, last: int | None) -> AsyncIterator[list[Numbered]]:
        """Those in pages of the destination alone, or in packed pages. None of the lists is empty."""
        begin, to = pages.sequence_of(first), None if last is None else pages.sequence_of(last)
        position = pages.number(begin, 0) - 1
        packed = functools.partial(self._shared.packed_pages, self._subjects.group(subject))
        async for page in self.read_pages(begin, subject, to):
            of_page = pages.number(page.sequence, 0)
            async for reached, numbered in self._in_place_of_others(packed, position, of_page):
                position = reached
                if numbered:
                    yield numbered
            if of_page > position and (numbered := list(pages.read(page))):
                position = pages.end(page.sequence)
                yield numbered
        async for _, numbered in self._in_place_of_others(packed, position, to and pages.end(to)):
            if numbered:
                yield numbered

    async def _in_place_of_others(
        self, there: Callable[[int], list[ledger.SortedPage]], position: int, end: int | None
    ) -> AsyncIterator[tuple[int, list[Numbered]]]:
        """The messages after ``position`` of sorted or packed pages that begin up to ``end``, each time with
        the last number of the page. What is packed meanwhile is read from the packed page.
        """
        while following := there(position + 1)[:GETS_MAX]:
            following = [page for page in following if end is None or page.first <= end]
            contents = await asyncio.gather(*(self.page(page.sequence) for page in following))
            for page, stored in zip(following, contents, strict=True):
                if stored is None and page in there(position + 1):
                    position = page.last  # nothing of it is needed
                elif stored is None:
                    break  # another page is in its place
                else:
                    before, position = position, page.last
                    yield position, [message for message in pages.read(stored) if message[0] > before]
            if not following:
                return

    async def _from_shared(self, group: str, first: int, last: int | None) -> AsyncIterator[list[Numbered]]:
        """Those of a group that are in sorted and shared pages. None of the lists is empty."""
        unsorted, position = self._shared.unsorted(group, first), first - 1
        there = functools.partial(self._shared.sorted_pages, group)
        async for reached, numbered in self._in_place_of_others(there, position, last):
            position = reached
            if numbered:
                yield numbered
        due = unsorted[bisect.bisect_right(unsorted, position) :]
        due = due if last is None else due[: bisect.bisect_right(due, last)]
        async for _, numbered in self.find(self._subjects.shared, due, group):
            if numbered:
                yield sorted(numbered, key=_number)

    async def find(
        self, subject: str, numbers: Iterable[int], group: str = ""
    ) -> AsyncIterator[tuple[set[int], list[Numbered]]]:
        """These messages of a subject, or of topics, page by page: the numbers of a page, and those of its
        messages that the log contains. The pages are in the order of the first number of each. ``group``: of
        the messages, if they are in shared pages only."""
        group = group or self._subjects.group(subject)
        async for of_page, numbered in self._pages_of(group, numbers, subject):
            if len(numbered) < len(of_page):
                numbered += await self._sorted_meanwhile(
                    group, of_page - {number for number, _, _ in numbered}
                )
            yield of_page, numbered

    async def message(self, subject: str, number: int) -> pages.PagedMessage | None:
        """A message of a subject; None if the log does not contain it."""
        async for _, numbered in self.find(subject, [number]):
            for _, _, held in numbered:
                return held
        return None

    async def _pages_of(
        self, group: str, numbers: Iterable[int], subject: str
    ) -> AsyncIterator[tuple[set[int], list[Numbered]]]:
        of_pages: dict[tuple[str, int], set[int]] = {}
        for number in numbers:
            if (there := self._shared.page_of(group, number)) is not None:
                place = self._subjects.sorted(group), there.sequence
            elif self._shared.is_unsorted(number):
                place = self._subjects.shared, pages.sequence_of(number)
            else:
                place = subject, pages.sequence_of(number)
            of_pages.setdefault(place, set()).add(number)
        for kind, places in itertools.groupby(list(of_pages), key=operator.itemgetter(0)):
            async for sequence, page in self.several([sequence for _, sequence in places], kind):
                of_page = of_pages[kind, sequence]
                yield of_page, _messages_of(page, of_page)

    async def _sorted_meanwhile(self, group: str, numbers: set[int]) -> list[Numbered]:
        """Those of the messages, which were not where they had been, that the log contains."""
        numbered: list[Numbered] = []
        sequences: set[int] = set()
        for number in numbers:
            if (there := self._shared.page_of(group, number)) is not None:
                sequences.add(there.sequence)
            elif number & pages.SHARED:
                sequences.add(pages.sequence_of(number))
        for sequence in sequences:
            numbered += _messages_of(await self.page(sequence), numbers)
        return numbered

    async def chunk(self, body: str, sequence: int) -> bytes | None:
        """A chunk of a large body; None if it is not stored, or does not belong to this body: clients name
        chunks, and all other messages are in the same log.
        """
        page = await self.page(sequence)
        if page is None or page.subject != self._subjects.body(body):
            return None
        ((_, _, held),) = pages.read(page)
        return held.data


def _messages_of(page: api.StoredMessage | None, numbers: set[int]) -> list[Numbered]:
    return [] if page is None else [message for message in pages.read(page) if message[0] in numbers]


def _ascending_run(numbers: list[int]) -> list[int]:
    """The first of these numbers, as long as they ascend."""
    count = 1
    while count < len(numbers) and numbers[count] > numbers[count - 1]:
        count += 1
    return numbers[:count]
