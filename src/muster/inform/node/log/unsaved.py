"""Changes that the persistent view of a node does not have yet.

The size is bounded, also while the disk is unavailable: beyond `BYTES_MAX` only positions are stored, and
their records are read from the log when the view can be written again.  Pure.
"""

from __future__ import annotations

import bisect
import operator

from muster.inform.node.log import context_log

BYTES_MAX = 32 << 20
ORDER_MIN = 10_000
ENTRY_BYTES = 600  # size of an entry without its value and attributes

Change = context_log.ContextLogEntry | int  # or the position of a record, which is read from the log


class UnsavedChanges:
    """``history``: how many records of a key are of interest."""

    def __init__(self, history: int) -> None:
        self._history = history
        self._changes: dict[str, list[Change]] = {}
        self._order: list[tuple[int, str]] = []  # positions and keys; some of them are removed already
        self._order_max = ORDER_MIN
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._changes)

    @property
    def is_full(self) -> bool:
        return self._bytes >= BYTES_MAX

    def note(self, entry: context_log.ContextLogEntry) -> None:
        changes = self._changes.setdefault(entry.record.key, [])
        if entry.record.reason == "forget":
            self._remove(changes, len(changes))
        else:
            self._remove(changes, len(changes) - self._history)
        changes.append(entry.position if self.is_full else entry)
        self._order.append((entry.position, entry.record.key))
        if len(self._order) > self._order_max:
            all_ = self._changes.items()
            self._order = sorted((position(change), key) for key, changes in all_ for change in changes)
            self._order_max = max(ORDER_MIN, 2 * len(self._order))
        self._bytes += size(changes[-1])

    def keys(self) -> set[str]:
        return set(self._changes)

    def of(self, key: str) -> list[Change]:
        """The records of a key, oldest first."""
        return list(self._changes.get(key, ()))

    def after(self, since: int) -> list[tuple[str, Change]]:
        """The changes after a position, with their keys, in order."""
        return [
            (key, change)
            for at, key in self._order[self._place(since) :]
            for change in self._changes.get(key, ())
            if position(change) == at
        ]

    def _place(self, since: int) -> int:
        return bisect.bisect_right(self._order, since, key=operator.itemgetter(0))

    def first(self, count_max: int, bytes_max: int) -> dict[str, list[Change]]:
        """Return the keys that changed first with their changes, as many as fit, at least one."""
        taken: dict[str, list[Change]] = {}
        total = 0
        for key, changes in self._changes.items():
            total += sum(map(size, changes))
            if taken and (total > bytes_max or len(taken) >= count_max):
                break
            taken[key] = list(changes)
        return taken

    def saved(self, key: str, changes: list[Change]) -> None:
        """Remove changes that the view has; newer ones of the same key stay."""
        there = self._changes.get(key)
        if there is not None:
            last = position(changes[-1])
            self._remove(there, sum(position(change) <= last for change in there))
            if not there:
                del self._changes[key]

    def saved_until(self, last: int) -> None:
        """The view has all changes up to this position."""
        del self._order[: self._place(last)]

    def clear(self) -> None:
        self._changes.clear()
        self._order.clear()
        self._bytes = 0

    def _remove(self, changes: list[Change], count: int) -> None:
        """The oldest ones."""
        if count > 0:
            self._bytes -= sum(map(size, changes[:count]))
            del changes[:count]


def position(change: Change) -> int:
    return change if isinstance(change, int) else change.position


def size(change: Change) -> int:
    if isinstance(change, int):
        return 0
    return ENTRY_BYTES + len(change.record.value or b"") + len(change.record.attributes)
