"""Which records of the log count. Pure.

Several nodes append pages to the log, each after the pages that it knows.  A page names the sequence up to
which its node had applied the log (``basis``).  A record counts if no record of its key came in between;
otherwise it is void for all nodes, and its node writes again.  So every record that counts continues the
state that its writer saw, and the log needs no condition for each key.

Keys are remembered for `WINDOW` sequences.  A page with an earlier basis is void as a whole.  Both depend on
the log alone, so all nodes decide alike: also one that began to read later, if it reads `WINDOW` sequences
before the first one that it applies.
"""

from __future__ import annotations

from collections import deque

from muster.inform import protocol

WINDOW = 512  # sequences
RECORDS_MAX = 512  # in a page: what is remembered is bounded


class PageOrder:
    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # by key
        self._pages: deque[tuple[int, list[str]]] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._pages

    def changed_at(self, key: str) -> int:
        """The sequence of the last page with a record of ``key``; 0: none for `WINDOW` sequences."""
        return self._last.get(key, 0)

    def add(self, sequence: int, page: protocol.ContextLogPage) -> list[bool]:
        """Add the next page. Return which of its records count."""
        last, basis = self._last, page.basis
        is_late = sequence - basis > WINDOW
        counts: list[bool] = []
        for record in page.records:
            counts.append(not is_late and last.get(record.key, 0) <= basis)
            last[record.key] = sequence
        self._pages.append((sequence, [record.key for record in page.records]))
        while self._pages[0][0] < sequence - WINDOW:
            passed, keys = self._pages.popleft()
            for key in keys:
                if last.get(key) == passed:
                    del last[key]
        return counts

    def clear(self) -> None:
        self._last.clear()
        self._pages.clear()
