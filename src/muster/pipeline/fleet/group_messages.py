"""Reports of groups and zones as messages, encoded in columns. Pure.

Each of thousands of groups has dozens of metrics with up to seven figures.  As objects they would cost more
than all other work of the driver.  So the parts of all messages (a head for each report, names, records of
figures) are byte strings in one array, and one selection of its elements puts all messages together.  They
are MessagePack, and equal in content to `columns.GroupReport`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from muster.core.reports import columns
from muster.pipeline.fleet import cells

Array = npt.NDArray[np.generic]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_encode = msgspec.msgpack.Encoder().encode


class Pieces:
    """Byte strings, and where each belongs: in the row of a message, after what was added to it before."""

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._sizes: list[Ints] = []
        self._rows: list[Ints] = []
        self._places: list[Ints] = []
        self._count = 0

    def keep(self, texts: Sequence[bytes]) -> Ints:
        """The places of these strings, which no message has yet."""
        self._data.append(b"".join(texts))
        return self._counted(np.fromiter(map(len, texts), np.int64, len(texts)))

    def keep_records(self, records: npt.NDArray[np.uint8]) -> Ints:
        """The same for rows of an array of bytes."""
        self._data.append(records.tobytes())
        return self._counted(np.full(len(records), records.shape[1]))

    def keep_strings(self, strings: pa.StringArray) -> Ints:
        _, offsets, data = strings.buffers()
        ends = np.frombuffer(offsets, np.int32)[strings.offset : strings.offset + len(strings) + 1]
        self._data.append(data.slice(ends[0], ends[-1] - ends[0]).to_pybytes() if data is not None else b"")
        return self._counted(np.diff(ends).astype(np.int64))

    def _counted(self, sizes: Ints) -> Ints:
        self._sizes.append(sizes)
        self._count += len(sizes)
        return np.arange(self._count - len(sizes), self._count)

    def add(self, row: Ints, *places: Ints) -> None:
        """For each row in order: the strings at these places, one after the other."""
        self._rows.append(np.repeat(row, len(places)))
        self._places.append(np.stack(places, axis=1).ravel())

    def messages(self, rows: int) -> list[bytes]:
        row = np.concatenate(self._rows)
        order = np.argsort(row.astype(np.uint16) if rows <= 1 << 16 else row, kind="stable")
        place = np.concatenate(self._places)[order]
        size = np.concatenate(self._sizes)
        strings = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(),
            len(size),
            [None, pa.py_buffer(np.r_[0, np.cumsum(size)]), pa.py_buffer(b"".join(self._data))],
        )
        joined = memoryview(strings.take(pa.array(place)).buffers()[2])
        ends = np.cumsum(np.bincount(row, weights=size[np.concatenate(self._places)], minlength=rows))
        bounds = [0, *ends.astype(np.int64).tolist()]
        return [bytes(joined[start:end]) for start, end in itertools.pairwise(bounds)]


def encode(heads: Sequence[columns.GroupReport], table: cells.CellTable, rows: Ints) -> list[bytes]:
    """A message for each of ``heads``, which lack ``metrics`` and ``top``; ``rows``: theirs in the table."""
    place_of = np.full(len(table), -1)
    place_of[rows] = np.arange(len(rows))
    pieces = Pieces()
    figures = table.figures()[rows]  # report by figure by metric
    counts = figures[:, 0]
    extra_row, extra_code, extra_figures = table.extra_arrays()
    extra_place = place_of[extra_row]
    if (extra_place < 0).any():
        inside = extra_place >= 0
        extra_place, extra_code, extra_figures = (
            extra_place[inside],
            extra_code[inside],
            extra_figures[:, inside],
        )
    metrics = np.count_nonzero(counts, axis=1) + np.bincount(extra_place, minlength=len(rows))
    ranked = {
        name: (place_of[row], values, machines)
        for name, (row, values, machines) in table.ranked().items()
        if len(row)
    }
    lists = {
        name: np.bincount(place[place >= 0], minlength=len(rows)) for name, (place, *_) in ranked.items()
    }
    tops: Ints = np.zeros(len(rows), np.int64)
    for size in lists.values():
        tops += size > 0
    more = ((metrics > 0) + (tops > 0).astype(np.int64)).tolist()
    texts = map(_encode, heads)
    every = np.arange(len(rows))
    pieces.add(
        every,
        pieces.keep([bytes((text[0] + n,)) + text[1:] for text, n in zip(texts, more, strict=True)]),
    )
    _add_counts(pieces, b"\xa7metrics\xde", metrics)
    _add_metrics(pieces, figures)
    keys = pieces.keep([_encode(name) for name in table.extra_names])
    pieces.add(extra_place, keys[extra_code], pieces.keep_records(_records(_SUMS, extra_figures)))
    _add_counts(pieces, b"\xa3top\xde", tops)
    for name, (place, values, machines) in ranked.items():
        _add_counts(pieces, _encode(name) + b"\xdc", lists[name])
        inside = place >= 0
        names = table.machine_names.take(pa.array(machines[inside]))
        sizes = np.diff(np.frombuffer(names.buffers()[1], np.int32)[names.offset :][: len(names) + 1])
        machine = _filled(b"\x82\xa7machine\xda" + bytes(2), sizes[None], ">u2", (10,))
        value = _filled(b"\xa5value\xcb" + bytes(8), values[None, inside], ">f8", (7,))
        pieces.add(
            place[inside],
            pieces.keep_records(machine),
            pieces.keep_strings(names),
            pieces.keep_records(value),
        )
    return pieces.messages(len(rows))


def _add_counts(pieces: Pieces, key: bytes, counts: Ints) -> None:
    """The head of a map or list of so many elements; nothing where there are none."""
    rows = np.flatnonzero(counts)
    records = _filled(key + bytes(2), counts[None, rows], ">u2", (len(key),))
    pieces.add(rows, pieces.keep_records(records))


def _add_metrics(pieces: Pieces, figures: Floats) -> None:
    """Standard metrics: with quantiles, except where only the sum is known."""
    row, metric = np.nonzero(figures[:, 0])
    values = figures[row, :, metric].T
    complete = ~np.isnan(values[4:]).any(axis=0)
    keys = pieces.keep([_encode(name) for name in cells.METRICS])
    records = np.empty(len(row), np.int64)
    records[complete] = pieces.keep_records(_records(_QUANTILES, values[:, complete]))
    records[~complete] = pieces.keep_records(_records(_SUMS, values[:4, ~complete]))
    pieces.add(row, keys[metric], records)


def _template(names: Sequence[str]) -> tuple[bytes, tuple[int, ...]]:
    """A map of a count and of floats, and where the numbers are."""
    text = bytes((0x80 + len(names),))
    places = []
    for name in names:
        text += _encode(name) + (b"\xcf" if name == "count" else b"\xcb")
        places.append(len(text))
        text += bytes(8)
    return text, tuple(places)


_SUMS = _template(cells.FIGURES[:4])
_QUANTILES = _template(cells.FIGURES)


def _records(template: tuple[bytes, tuple[int, ...]], figures: Floats) -> npt.NDArray[np.uint8]:
    text, places = template
    records = _filled(text, figures[1:], ">f8", places[1:])
    records[:, places[0] : places[0] + 8] = _bytes(figures[0].astype(np.int64), ">u8")
    return records


def _filled(text: bytes, numbers: Array, kind: str, places: Sequence[int]) -> npt.NDArray[np.uint8]:
    """The text for each column of numbers, with its numbers at these places."""
    records = np.tile(np.frombuffer(text, np.uint8), (numbers.shape[1], 1))
    size = np.dtype(kind).itemsize
    for line, place in zip(numbers, places, strict=True):
        records[:, place : place + size] = _bytes(line, kind)
    return records


def _bytes(numbers: Array, kind: str) -> npt.NDArray[np.uint8]:
    converted = np.ascontiguousarray(numbers).astype(kind)
    return converted.view(np.uint8).reshape(len(numbers), converted.itemsize)
