"""The recent end of the log in memory, so that a backlog that has read nearly all of the log can become live.

More messages are stored while a backlog reads, so on a busy log it would never reach the end. It reads the
rest from here, in one step.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from muster.message.dispatcher.log import journal

COUNT_MAX: Final = 5_000
BYTES_MAX: Final = 8 << 20


class LogTail:
    """All messages with a number above ``start``."""

    def __init__(self) -> None:
        self.start = 0
        self._last = 0
        self._bytes = 0
        self._held: deque[tuple[int, journal.JournalMessage]] = deque()

    def add(self, number: int, copy: journal.JournalMessage) -> None:
        self._last = max(self._last, number)
        self._held.append((number, copy))
        self._bytes += len(copy.data)
        while len(self._held) > COUNT_MAX or self._bytes > BYTES_MAX:
            gone, copy = self._held.popleft()
            self._bytes -= len(copy.data)
            self.start = max(self.start, gone)

    def covers(self, position: int) -> bool:
        return position >= self.start

    def after(self, position: int) -> list[tuple[int, journal.JournalMessage]]:
        """The messages after a position, in order."""
        if self._last <= position:
            return []
        return sorted(((number, copy) for number, copy in self._held if number > position), key=_number)


def _number(pair: tuple[int, journal.JournalMessage]) -> int:
    return pair[0]
