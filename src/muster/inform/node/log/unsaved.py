"""Changes that the persistent view of a node does not have yet.

The size is bounded, also while the disk is unavailable: beyond `BYTES_MAX` only the keys are stored, and
their records are read from the log when the view can be written again.  Pure.
"""

from __future__ import annotations

from muster.inform.node.log import context_log

BYTES_MAX = 32 << 20
ENTRY_BYTES = 600  # size of an entry without its value and attributes


class DeferredChange:
    """A change whose record must be read from the log. Each change has its own object."""

    __slots__ = ()


Change = context_log.ContextLogEntry | DeferredChange | None  # None: the replica was dropped


class UnsavedChanges:
    def __init__(self) -> None:
        self._changes: dict[str, Change] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._changes)

    @property
    def is_full(self) -> bool:
        return self._bytes >= BYTES_MAX

    def note(self, key: str, entry: context_log.ContextLogEntry | None) -> None:
        """Record the newest change of ``key``."""
        self._bytes -= size(self._changes.pop(key, None))
        change: Change = DeferredChange() if entry is not None and self.is_full else entry
        self._changes[key] = change
        self._bytes += size(change)

    def get(self, key: str) -> context_log.ContextLogEntry | None:
        """Return the newest record, if it is in memory."""
        change = self._changes.get(key)
        return change if isinstance(change, context_log.ContextLogEntry) else None

    def first(self, count_max: int, bytes_max: int) -> dict[str, Change]:
        """Return the oldest changes, as many as fit, at least one."""
        taken: dict[str, Change] = {}
        total = 0
        for key, change in self._changes.items():
            total += size(change)
            if taken and (total > bytes_max or len(taken) >= count_max):
                break
            taken[key] = change
        return taken

    def saved(self, taken: dict[str, Change]) -> None:
        """Remove changes that the view has; a newer change of the same key stays."""
        for key, change in taken.items():
            if key in self._changes and self._changes[key] is change:
                del self._changes[key]
                self._bytes -= size(change)


def size(change: Change) -> int:
    if not isinstance(change, context_log.ContextLogEntry):
        return 0
    return ENTRY_BYTES + len(change.record.value or b"") + len(change.record.attributes)
