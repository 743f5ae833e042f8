"""Callers that wait for a change of a key, or of any key with a prefix."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable


class ChangeEvents:
    def __init__(self) -> None:
        self.closing = False
        # Weak references: clients may wait for keys that never exist.
        self._waiting: weakref.WeakValueDictionary[str, asyncio.Event] = weakref.WeakValueDictionary()
        self._waiting_for_prefix: weakref.WeakValueDictionary[str, asyncio.Event]
        self._waiting_for_prefix = weakref.WeakValueDictionary()

    def changed(self, keys: Iterable[str]) -> None:
        """A page with records of these keys has been applied."""
        if not self._waiting and not self._waiting_for_prefix:
            return
        for key in keys:
            waiting = self._waiting.pop(key, None)
            if waiting is not None:
                waiting.set()
            if len(self._waiting_for_prefix) <= len(key):
                prefixes = [prefix for prefix in self._waiting_for_prefix if key.startswith(prefix)]
            else:  # a client may wait for thousands of prefixes
                prefixes = [key[:size] for size in range(len(key) + 1)]
            for prefix in prefixes:
                waiting = self._waiting_for_prefix.pop(prefix, None)
                if waiting is not None:
                    waiting.set()

    def of_key(self, key: str) -> asyncio.Event:
        """Return an event that is set when the log has another record of ``key``."""
        return self._waiting.setdefault(key, asyncio.Event())

    def of_prefix(self, prefix: str) -> asyncio.Event:
        """Return an event that is set when the log has another record of a key with this prefix."""
        return self._waiting_for_prefix.setdefault(prefix, asyncio.Event())

    def wake_all(self) -> None:
        """Wake all waiting callers because the node is closing."""
        self.closing = True
        for waiting in [*self._waiting.values(), *self._waiting_for_prefix.values()]:
            waiting.set()
