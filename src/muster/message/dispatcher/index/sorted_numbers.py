"""Sorted sets of numbers, eight bytes each: the index of a queue has one entry for each message.

The numbers are in blocks. Adding at the end and taking from the front, the usual cases, touch one block; all
other operations find theirs by bisection.
"""

from __future__ import annotations

import bisect
import operator
from array import array
from collections.abc import Iterator
from typing import Final

_BLOCK: Final = 512
_last: Final = operator.itemgetter(-1)


class SortedNumbers:
    __slots__ = ("_blocks", "_count")

    def __init__(self) -> None:
        self._blocks: list[array[int]] = []  # none is empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for block in self._blocks:
            yield from block

    def __contains__(self, number: int) -> bool:
        blocks = self._blocks
        if not blocks or number > blocks[-1][-1] or number < blocks[0][0]:
            return False
        block = blocks[bisect.bisect_left(blocks, number, key=_last)]
        at = bisect.bisect_left(block, number)
        return block[at] == number

    @property
    def first(self) -> int | None:
        return self._blocks[0][0] if self._blocks else None

    def add(self, number: int) -> bool:
        """False: it is included already."""
        blocks = self._blocks
        if not blocks or number > blocks[-1][-1]:
            if blocks and len(blocks[-1]) < _BLOCK:
                blocks[-1].append(number)
            else:
                blocks.append(array("q", (number,)))
            self._count += 1
            return True
        which = bisect.bisect_left(blocks, number, key=_last)
        block = blocks[which]
        at = bisect.bisect_left(block, number)
        if block[at] == number:
            return False
        block.insert(at, number)
        if len(block) > 2 * _BLOCK:
            blocks[which : which + 1] = [block[:_BLOCK], block[_BLOCK:]]
        self._count += 1
        return True

    def discard(self, number: int) -> bool:
        """Whether it was included."""
        blocks = self._blocks
        if not blocks or number > blocks[-1][-1] or number < blocks[0][0]:
            return False
        which = 0 if number <= blocks[0][-1] else bisect.bisect_left(blocks, number, key=_last)
        block = blocks[which]
        at = bisect.bisect_left(block, number)
        if block[at] != number:
            return False
        if len(block) == 1:
            del blocks[which]
        else:
            del block[at]
        self._count -= 1
        return True

    def remove(self, number: int) -> tuple[int | None, int | None] | None:
        """Remove a number; returns its neighbours, or None if it was not included."""
        blocks = self._blocks
        if blocks and blocks[0][0] == number:  # the usual case
            block = blocks[0]
            del block[0]
            if not block:
                del blocks[0]
            self._count -= 1
            return None, blocks[0][0] if blocks else None
        return self.neighbours(number) if self.discard(number) else None

    def neighbours(self, number: int) -> tuple[int | None, int | None]:
        """The last number before this one and the first after it."""
        blocks = self._blocks
        which = bisect.bisect_left(blocks, number, key=_last)
        if which == len(blocks):
            return (blocks[-1][-1] if blocks else None), None
        block = blocks[which]
        at = bisect.bisect_left(block, number)
        before = block[at - 1] if at else (blocks[which - 1][-1] if which else None)
        at += block[at] == number
        if at < len(block):
            return before, block[at]
        return before, blocks[which + 1][0] if which + 1 < len(blocks) else None

    def clear(self) -> None:
        self._blocks.clear()
        self._count = 0
