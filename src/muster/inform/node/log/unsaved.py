"""What a node's view at rest does not have yet.

Bounded, whatever happens to the disk: beyond `BYTES_MAX` only the keys are remembered, and what stands under
them is read from the log when the view can be written again.  Pure.
"""

from __future__ import annotations

from muster.inform.node.log import context_log

BYTES_MAX = 32 << 20
ENTRY_BYTES = 600  # of an entry beside its value and attributes


class DeferredChange:
    """Something changed, and the log knows what. Each change has a mark of its own."""

    __slots__ = ()


Change = context_log.ContextLogEntry | DeferredChange | None  # None: the copy is gone


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
        """The newest of ``key``."""
        self._bytes -= size(self._changes.pop(key, None))
        change: Change = DeferredChange() if entry is not None and self.is_full else entry
        self._changes[key] = change
        self._bytes += size(change)

    def get(self, key: str) -> context_log.ContextLogEntry | None:
        """As far as it is known here."""
        change = self._changes.get(key)
        return change if isinstance(change, context_log.ContextLogEntry) else None

    def first(self, count_max: int, bytes_max: int) -> dict[str, Change]:
        """The oldest, as many as fit, and one at least."""
        taken: dict[str, Change] = {}
        total = 0
        for key, change in self._changes.items():
            total += size(change)
            if taken and (total > bytes_max or len(taken) >= count_max):
                break
            taken[key] = change
        return taken

    def saved(self, taken: dict[str, Change]) -> None:
        """They are in the view, and what was noted of them meanwhile is not."""
        for key, change in taken.items():
            if key in self._changes and self._changes[key] is change:
                del self._changes[key]
                self._bytes -= size(change)


def size(change: Change) -> int:
    if not isinstance(change, context_log.ContextLogEntry):
        return 0
    return ENTRY_BYTES + len(change.record.value or b"") + len(change.record.attributes)
