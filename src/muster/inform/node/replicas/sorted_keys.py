"""The sorted keys of a node's replicas, for searches that continue at a key.

Stored in blocks of some hundred keys: an insertion moves the keys of one block only.  Pure.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

BLOCK = 1_000


class SortedKeys:
    def __init__(self) -> None:
        self._blocks: list[list[str]] = []
        self._lasts: list[str] = []  # the last key of each block

    def add(self, key: str) -> None:
        place = bisect.bisect_left(self._lasts, key)
        if place == len(self._blocks):  # greater than all others
            if not place or len(self._blocks[-1]) >= BLOCK:
                self._blocks.append([])
                self._lasts.append(key)
            self._blocks[-1].append(key)
            self._lasts[-1] = key
            return
        block = self._blocks[place]
        at = bisect.bisect_left(block, key)
        if block[at] != key:
            block.insert(at, key)
            if len(block) > 2 * BLOCK:
                self._blocks[place : place + 1] = [block[:BLOCK], block[BLOCK:]]
                self._lasts.insert(place, block[BLOCK - 1])

    def discard(self, key: str) -> None:
        place = bisect.bisect_left(self._lasts, key)
        if place == len(self._blocks):
            return
        block = self._blocks[place]
        at = bisect.bisect_left(block, key)
        if block[at] != key:
            return
        del block[at]
        if not block:
            del self._blocks[place], self._lasts[place]
        else:
            self._lasts[place] = block[-1]

    def after(self, key: str, count: int, *, itself: bool = False) -> Sequence[str]:
        """Return at most ``count`` keys greater than ``key``; empty only if there are none.

        ``itself``: include ``key`` if it is present.
        """
        first = bisect.bisect_left if itself else bisect.bisect_right
        place = first(self._lasts, key)
        if place == len(self._blocks):
            return ()
        block = self._blocks[place]
        at = first(block, key)
        return block[at : at + count]
