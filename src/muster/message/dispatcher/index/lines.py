"""The waiting messages of a queue in delivery order, and the consumers that take from them in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from muster.message import messages
from muster.message.dispatcher.index import sorted_numbers

ConsumerKey = tuple[str, int]  # connection, number
PRIORITIES: Final = 10


def level_of(meta: messages.MessageMeta) -> int:
    """The priority, limited to the range that JMS defines."""
    priority = meta.priority
    return priority if 0 <= priority < PRIORITIES else (0 if priority < 0 else PRIORITIES - 1)


def precedes(first: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether a message is delivered before another; both as level and number."""
    return first[0] > other[0] or (first[0] == other[0] and first[1] < other[1])


class PriorityNumbers:
    """Numbers of messages by priority, the highest first, and then in log order."""

    __slots__ = ("_by_level", "_levels")

    def __init__(self) -> None:
        self._by_level: dict[int, sorted_numbers.SortedNumbers] = {}
        self._levels: list[int] = []  # those with numbers, the highest first

    def __len__(self) -> int:
        return sum(map(len, self._by_level.values()))

    def __bool__(self) -> bool:
        return bool(self._levels)

    def __iter__(self) -> Iterator[int]:
        for level in self._levels:
            yield from self._by_level[level]

    def first(self) -> tuple[int, int] | None:
        """Level and number of the first message."""
        if not self._levels:
            return None
        level = self._levels[0]
        number = self._by_level[level].first
        return None if number is None else (level, number)

    def items(self) -> Iterator[tuple[int, int]]:
        for level in self._levels:
            for number in self._by_level[level]:
                yield level, number

    def includes(self, level: int, number: int) -> bool:
        numbers = self._by_level.get(level)
        return numbers is not None and number in numbers

    def level(self, number: int) -> int | None:
        """The level of a number; None if it is not included."""
        return next((level for level in self._levels if number in self._by_level[level]), None)

    def add(self, level: int, number: int) -> None:
        numbers = self._by_level.get(level)
        if numbers is None:
            numbers = self._by_level[level] = sorted_numbers.SortedNumbers()
            self._levels = sorted(self._by_level, reverse=True)
        numbers.add(number)

    def discard(self, level: int, number: int) -> bool:
        numbers = self._by_level.get(level)
        if numbers is None or not numbers.discard(number):
            return False
        if not numbers:
            del self._by_level[level]
            self._levels.remove(level)
        return True

    def clear(self) -> None:
        self._by_level.clear()
        self._levels.clear()


@dataclass(slots=True, eq=False)
class HeldMessage:
    """A message that was delivered to a consumer and is not acknowledged."""

    number: int
    level: int
    group: str | None
    count: int  # previous deliveries
    failures: int  # failed deliveries, as far as known
    holder: BacklogConsumer


@dataclass(slots=True, eq=False)
class BacklogConsumer:
    key: ConsumerKey
    credit: int = 0
    selector: str | None = None
    held: dict[int, HeldMessage] = field(default_factory=dict)  # in the order of delivery
    reserved: PriorityNumbers = field(default_factory=PriorityNumbers)  # of its groups
    reserved_groups: set[str] = field(default_factory=set)
    in_turn: bool = False


@dataclass(slots=True, eq=False)
class SelectorLine:
    """The messages that a selector accepts, and its consumers with credit, the next one first.

    Without a selector, ``numbers`` are the waiting messages of the backlog themselves. Otherwise some of them
    may have been taken by other consumers meanwhile: they are removed when they are first in line.
    """

    selector: str | None
    numbers: PriorityNumbers
    unscanned: int = 0  # up to here, the messages have not been tested yet; 0: all have been
    users: int = 0  # attached consumers
    turn: deque[BacklogConsumer] = field(default_factory=deque)
