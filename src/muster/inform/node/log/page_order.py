"""Which records of the log count. Pure.

Several nodes append pages to the log, each after the pages that it knows.  A page names the sequence up to
which its node had applied the log (``basis``).  A record counts if no record of its key came in between;
otherwise it is void for all nodes, and its node writes again.  So every record that counts continues the
state that its writer saw, and the log needs no condition for each key.

A fence changes the primary of many keys.  So a record is also void if it names a primary that was fenced in
between: trimming writes records of other primaries again.

Keys are remembered for `WINDOW` sequences.  A page with an earlier basis is void as a whole.  Both depend on
the log alone, so all nodes decide alike.  A node that reads a trimmed log cannot decide about pages whose
basis is before its beginning, and ignores them: trimming keeps `WINDOW` sequences before the first record
that is live, so what they wrote has been overwritten, or forgotten, by a page that the node can decide about.
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
        self._fenced: dict[str, int] = {}  # the last fence of each node
        self._begin: int | None = None

    @property
    def is_begun(self) -> bool:
        return self._begin is not None

    def begin(self, after: int) -> None:
        """All pages after this sequence are added."""
        self.clear()
        self._begin = after

    def changed_at(self, record: protocol.ContextRecord) -> int:
        """The sequence of the last page with a record of its key, or a fence of its primary; 0: none for
        `WINDOW` sequences."""
        changed_at = self._last.get(record.key, 0)
        if self._fenced and record.holders:
            return max(changed_at, self._fenced.get(record.holders[0], 0))
        return changed_at

    def add(self, sequence: int, page: protocol.ContextLogPage, node: str | None = None) -> list[bool]:
        """Add the next page, which is on the subject of ``node``. Return which of its records count."""
        last, basis = self._last, page.basis
        if page.fence and node is not None:
            self._fenced[node] = sequence
        is_decided = sequence - basis <= WINDOW and basis >= (self._begin or 0)
        counts: list[bool] = []
        for record in page.records:
            counts.append(is_decided and self.changed_at(record) <= basis)
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
        self._fenced.clear()
        self._begin = None


def is_continued(first: int, applied: int) -> bool:
    """Whether a node that has applied the log up to ``applied`` can decide about all later pages, if the log
    begins with ``first``."""
    return first <= max(1, applied - WINDOW)
