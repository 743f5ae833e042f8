"""Messages of the log in memory: those stored last, and those that were read to be delivered.

The last ones are complete up to the end of the log. While a backlog is indexed, more messages are stored, so
on a busy log it would never reach the end. It indexes the rest from here, in one step.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from muster.message import messages
from muster.message.dispatcher.log import journal

LAST_MAX: Final = 5_000
LAST_BYTES_MAX: Final = 8 << 20
OVERHEAD_BYTES: Final = 1000  # of a message in memory


@dataclass(frozen=True, slots=True)
class CachedMessage:
    meta: messages.MessageMeta
    raw: str
    data: bytes


class MessageCache:
    """``start``: the messages above this number are complete. ``read_bytes_max``: size of those that were
    read; the oldest are dropped.
    """

    def __init__(self, read_bytes_max: int) -> None:
        self.start = 0
        self.read_bytes = 0
        self._read_bytes_max = read_bytes_max
        self._last: OrderedDict[int, journal.JournalMessage] = OrderedDict()
        self._last_bytes = 0
        self._read: OrderedDict[int, CachedMessage] = OrderedDict()

    def get(self, number: int) -> journal.JournalMessage | CachedMessage | None:
        return self._last.get(number) or self._read.get(number)

    def add_stored(self, number: int, copy: journal.JournalMessage) -> None:
        """A message was stored; they are added in order."""
        self._last[number] = copy
        self._last_bytes += len(copy.data)
        while len(self._last) > LAST_MAX or self._last_bytes > LAST_BYTES_MAX:
            gone, copy = self._last.popitem(last=False)
            self._last_bytes -= len(copy.data)
            self.start = max(self.start, gone)

    def add_read(self, number: int, meta: messages.MessageMeta, raw: str, data: bytes) -> None:
        self.forget(number)
        self._read[number] = CachedMessage(meta, raw, data)
        self.read_bytes += _size(raw, data)
        while self.read_bytes > self._read_bytes_max and len(self._read) > 1:
            self.forget(next(iter(self._read)))

    def forget(self, number: int) -> None:
        """A message that was read is not needed any more."""
        if (message := self._read.pop(number, None)) is not None:
            self.read_bytes -= _size(message.raw, message.data)

    def covers(self, position: int) -> bool:
        return position >= self.start

    def after(self, position: int) -> list[tuple[int, journal.JournalMessage]]:
        """The stored messages after a position, in order. Only these are visited: every new consumer reads
        the end of the log here, and most are up to date.
        """
        newest_first = itertools.takewhile(lambda item: item[0] > position, reversed(self._last.items()))
        return list(newest_first)[::-1]


def _size(raw: str, data: bytes) -> int:
    return len(raw) + len(data) + OVERHEAD_BYTES
