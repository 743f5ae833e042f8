"""A compact map between names and rows of receivers, also used for texts and numbers of policies.

A Python string takes 50 bytes in addition to its characters, and an entry of a dictionary some 75 more.  Here
the names are concatenated in one UTF-8 buffer; each row has the start and length of its name, and a hash
table with open addressing maps names to rows.  This takes 20 bytes and the name itself.
"""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

EMPTY: Final = -1
GONE: Final = -2  # a removed entry: a search continues
FEW: Final = 32  # names: fewer are looked up faster one by one
CHUNK: Final = 1 << 14
BLOCK: Final = 512  # names: decoded in a tenth of a millisecond
GARBAGE: Final = 1 << 16  # bytes


class NameTable:
    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self._text = bytearray()
        self._garbage = 0  # bytes of removed names
        self._starts = array.array("q")  # by row
        self._sizes = array.array("I")  # by row; 0 for an unused row
        self._places = array.array("i", [EMPTY]) * 1024
        self._taken = 0  # slots that are not empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        for rows in self._used_rows():
            yield from self.of(rows)

    # -- queries

    def row(self, name: str) -> int:
        """Return the row of a name; -1 if the name is unknown."""
        places, mask = self._places, len(self._places) - 1
        at = hash(name) & mask
        if places[at] == EMPTY:
            return -1
        encoded = name.encode()
        size = len(encoded)
        while (row := places[at]) != EMPTY:
            if row >= 0 and self._sizes[row] == size:
                start = self._starts[row]
                if self._text[start : start + size] == encoded:
                    return row
            at = (at + 1) & mask
        return -1

    def rows(self, names: Sequence[str]) -> Array:
        """Return the rows of many names."""
        look_up = getattr(self.kernels, "lookup", None)  # with numpy only, one by one is faster
        if look_up is None or len(names) < FEW:
            return np.fromiter(map(self.row, names), np.int64, len(names))
        data, lengths = _packed(names)
        rows = np.empty(len(names), np.int64)
        look_up(
            np.fromiter(map(hash, names), np.int64, len(names)),
            np.frombuffer(data, np.uint8),
            np.cumsum(lengths),
            np.frombuffer(self._places, np.int32),
            *self._arrays(),
            rows,
        )
        return rows

    def of(self, rows: Array) -> list[str]:
        """Return the names of used rows."""
        if len(rows) < FEW:
            text, starts, sizes = self._text, self._starts, self._sizes
            return [text[starts[row] : starts[row] + sizes[row]].decode() for row in rows.tolist()]
        return _split(*self._of(rows))

    def blocks(self, rows: Array | None = None) -> Iterator[list[str]]:
        """Return the names of used rows, or all names, in blocks: as they are now, whatever changes between
        two blocks."""
        if rows is None:
            rows = np.flatnonzero(np.frombuffer(self._sizes, np.uint32))
        data, lengths = self._of(rows)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        return (
            _split(data[starts[first] : ends[first : first + BLOCK][-1]], lengths[first : first + BLOCK])
            for first in range(0, len(rows), BLOCK)
        )

    def _of(self, rows: Array) -> tuple[bytes, Array]:
        """Return their names concatenated as UTF-8, and the length of each."""
        starts, sizes, text = self._arrays()
        lengths = sizes[rows].astype(np.int64)
        data = np.empty(int(lengths.sum()), np.uint8)
        self.kernels.gather(text, starts[rows], lengths, data)
        return data.tobytes(), lengths

    def _arrays(self) -> tuple[Array, Array, Array]:
        return (
            np.frombuffer(self._starts, np.int64),
            np.frombuffer(self._sizes, np.uint32),
            np.frombuffer(self._text, np.uint8),
        )

    # -- changes

    def add(self, names: Sequence[str], rows: Array) -> None:
        """Add new names, without duplicates."""
        data, lengths = _packed(names)
        if (more := int(rows.max(initial=-1)) + 1 - len(self._sizes)) > 0:
            self._starts.frombytes(bytes(8 * more))
            self._sizes.frombytes(bytes(4 * more))
        np.frombuffer(self._starts, np.int64)[rows] = len(self._text) + np.cumsum(lengths) - lengths
        np.frombuffer(self._sizes, np.uint32)[rows] = lengths
        self._text += data
        self._count += len(names)
        if 3 * (self._taken + len(names)) > 2 * len(self._places):
            self._rebuild()
        else:
            self._put(names, rows)

    def remove(self, rows: Array) -> None:
        places, mask = self._places, len(self._places) - 1
        for name, row in zip(self.of(rows), rows.tolist(), strict=True):
            at = hash(name) & mask
            while places[at] != row:
                at = (at + 1) & mask
            places[at] = GONE
            self._garbage += self._sizes[row]
            self._sizes[row] = 0
        self._count -= len(rows)
        if self._garbage > GARBAGE and 2 * self._garbage > len(self._text):
            self._compact()

    def _put(self, names: Sequence[str], rows: Array) -> None:
        places, mask = self._places, len(self._places) - 1
        for name, row in zip(names, rows.tolist(), strict=True):
            at = hash(name) & mask
            while places[at] != EMPTY:
                at = (at + 1) & mask
            places[at] = row
        self._taken += len(names)

    def _rebuild(self) -> None:
        size = 1024
        while size < 2 * self._count:
            size *= 2
        self._places = array.array("i", [EMPTY]) * size
        self._taken = 0
        for rows in self._used_rows():
            self._put(self.of(rows), rows)

    def _compact(self) -> None:
        text = bytearray()
        for rows in self._used_rows():
            data, lengths = self._of(rows)
            np.frombuffer(self._starts, np.int64)[rows] = len(text) + np.cumsum(lengths) - lengths
            text += data
        self._text, self._garbage = text, 0

    def _used_rows(self) -> Iterator[Array]:
        """Yield the used rows in blocks."""
        for first in range(0, len(self._sizes), CHUNK):
            yield first + np.flatnonzero(self._sizes[first : first + CHUNK])


def _split(data: bytes, lengths: Array) -> list[str]:
    ends = np.cumsum(lengths)
    spans = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    if data.isascii():
        decoded = data.decode()
        return [decoded[start:end] for start, end in spans]
    return [data[start:end].decode() for start, end in spans]


def _packed(names: Sequence[str]) -> tuple[bytes, Array]:
    """Return texts concatenated as UTF-8, and the length of each."""
    text = "".join(names)
    if text.isascii():
        return text.encode(), np.fromiter(map(len, names), np.int64, len(names))
    encoded = [name.encode() for name in names]
    return b"".join(encoded), np.fromiter(map(len, encoded), np.int64, len(names))
