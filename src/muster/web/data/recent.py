"""The latest items of a feed, oldest first, without repeats: read from its history or received since."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class RecentItems(Generic[T]):
    """At most ``kept`` items. An item whose key is already present is ignored."""

    def __init__(self, key: Callable[[T], Hashable], kept: int) -> None:
        self._key = key
        self._kept = kept
        self._items: dict[Hashable, T] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items.values())

    def __reversed__(self) -> Iterator[T]:
        return reversed(self._items.values())

    def add(self, item: T) -> None:
        self._items.setdefault(self._key(item), item)
        if len(self._items) > self._kept:
            del self._items[next(iter(self._items))]

    def take(self) -> list[T]:
        """Remove and return all items."""
        items, self._items = self._items, {}
        return list(items.values())

    def put_before(self, older: Iterable[T]) -> None:
        """Insert ``older`` items before those added since; items in both keep the position of ``older``."""
        newer = self.take()
        for item in (*older, *newer):
            self.add(item)
