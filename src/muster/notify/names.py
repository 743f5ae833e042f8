"""The rows of receivers by their names, and back, in few bytes.

A dictionary would take some 75 bytes for each entry beside the name itself; this takes 8: an open table of
rows, probed from the name's hash on, that compares with the names that stand by row anyway.
"""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from typing import Final

EMPTY: Final = -1
GONE: Final = -2  # somebody was here: a search goes on


class Names:
    def __init__(self) -> None:
        self.of_row: list[str] = []  # "" where the row is nobody's
        self._places = array.array("i", [EMPTY]) * 1024
        self._taken = 0  # places that are not empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return filter(None, self.of_row)

    def row(self, name: str) -> int:
        """-1 if nobody has this name."""
        places, of_row = self._places, self.of_row
        mask = len(places) - 1
        at = hash(name) & mask
        while (row := places[at]) != EMPTY:
            if row >= 0 and of_row[row] == name:
                return row
            at = (at + 1) & mask
        return -1

    def rows(self, names: Sequence[str]) -> list[int]:
        """The same for many."""
        places, of_row = self._places, self.of_row
        mask = len(places) - 1
        found = []
        for name in names:
            at = hash(name) & mask
            while (row := places[at]) != EMPTY:
                if row >= 0 and of_row[row] == name:
                    break
                at = (at + 1) & mask
            found.append(row)
        return found

    def add(self, name: str, row: int) -> None:
        """A name that nobody has yet."""
        if row >= len(self.of_row):
            self.of_row.extend([""] * (row + 1 - len(self.of_row)))
        if 2 * (self._taken + 1) > len(self._places):
            self._rebuild()
        self.of_row[row] = name
        self._put(name, row)
        self._count += 1

    def add_many(self, names: Sequence[str], rows: Sequence[int]) -> None:
        """Names that nobody has yet, each once."""
        if (last := max(rows, default=-1)) >= len(self.of_row):
            self.of_row.extend([""] * (last + 1 - len(self.of_row)))
        if 2 * (self._taken + len(names)) > len(self._places):
            self._rebuild(len(names))
        for name, row in zip(names, rows, strict=True):
            self.of_row[row] = name
            self._put(name, row)
        self._count += len(names)

    def remove(self, name: str) -> None:
        mask = len(self._places) - 1
        at = hash(name) & mask
        while self._places[at] < 0 or self.of_row[self._places[at]] != name:
            at = (at + 1) & mask
        self.of_row[self._places[at]] = ""
        self._places[at] = GONE
        self._count -= 1

    def _put(self, name: str, row: int) -> None:
        places = self._places
        mask = len(places) - 1
        at = hash(name) & mask
        while places[at] != EMPTY:
            at = (at + 1) & mask
        places[at] = row
        self._taken += 1

    def _rebuild(self, more: int = 1) -> None:
        size = 1024
        while size < 4 * (self._count + more):
            size *= 2
        self._places = array.array("i", [EMPTY]) * size
        self._taken = 0
        for row, name in enumerate(self.of_row):
            if name:
                self._put(name, row)
