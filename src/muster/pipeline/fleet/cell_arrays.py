"""Arithmetic on the arrays of cells: grouping, merging, ranking, and packing for Spark's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

Ranks = tuple[Ints, Floats, Ints]  # rows, values, and numbers of machines

_CODEC = "lz4"
SMALL_BYTES = 1024  # of arrays that are stored as they are: a small shard has hundreds of them
#: By their names in stored arrays. NumPy itself would parse any text as a type.
_STORED = {
    np.dtype(kind).str: np.dtype(kind)
    for kind in (np.bool_, np.uint8, np.uint16, np.uint32, np.int32, np.int64, np.float64)
}
UNCOMPRESSED = -1  # instead of a size


def counted(codes: Ints, bins: int) -> tuple[Ints, Ints]:
    """The distinct codes, in order, and their counts."""
    if bins <= 8 * len(codes):
        counts = np.bincount(codes, minlength=bins)
        filled = np.flatnonzero(counts)
        return filled, counts[filled]
    if bins <= np.iinfo(np.int32).max:  # sorted in half the time
        distinct, counts = np.unique(codes.astype(np.int32), return_counts=True)
        return distinct.astype(np.int64), counts
    return np.unique(codes, return_counts=True)


def starts_of(*keys: Array) -> Ints:
    """Where runs of equal keys start; keys are sorted."""
    if not len(keys[0]):
        return np.zeros(0, np.int64)
    changed = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.flatnonzero(np.r_[True, changed])


def reduced_histogram(parts: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """The sums of equal keys, in order."""
    size = sum(len(keys) for keys, _ in parts)
    bins = max((int(keys.max()) + 1 for keys, _ in parts if len(keys)), default=0)
    if bins <= 8 * size:
        summed = np.zeros(bins, np.int64)
        for part, counts in parts:  # without joining them, which takes longer
            np.add.at(summed, part, counts)
        filled = np.flatnonzero(summed)
        return filled, summed[filled]
    keys, counts = (np.concatenate(columns_) for columns_ in zip(*parts, strict=True))
    order = np.argsort(keys, kind="stable")  # parts are mostly sorted: this merges them
    keys = keys[order]
    starts = starts_of(keys)
    return keys[starts], np.add.reduceat(counts[order], starts)


def extra_figures(row: Ints, word: Ints, value: Floats) -> tuple[Ints, Ints, Floats]:
    """Count, sum, minimum and maximum of each word in each row, in their order."""
    rows, place = _numbered(row)
    width = int(word.max()) + 1
    key = place * width + word
    bins = len(rows) * width
    if bins > 8 * len(key):
        order = np.argsort(key, kind="stable")
        key, value = key[order], value[order]
        starts = starts_of(key)
        figures = np.empty((4, len(starts)))
        figures[0] = np.diff(starts, append=len(key))
        for line, merge in ((1, np.add), (2, np.minimum), (3, np.maximum)):
            merge.reduceat(value, starts, out=figures[line])
        return rows[key[starts] // width], key[starts] % width, figures
    count = np.bincount(key, minlength=bins)
    filled = np.flatnonzero(count)
    figures = np.empty((4, len(filled)))
    figures[0] = count[filled]
    figures[1] = np.bincount(key, weights=value, minlength=bins)[filled]
    for line, merge, start in ((2, np.minimum, np.inf), (3, np.maximum, -np.inf)):
        dense = np.full(bins, start)
        merge.at(dense, key, value)
        figures[line] = dense[filled]
    return rows[filled // width], filled % width, figures


def _numbered(row: Ints) -> tuple[Ints, Ints]:
    """The distinct rows, in order, and the place of each row among them."""
    is_there = np.zeros(int(row.max()) + 1, np.bool_)
    is_there[row] = True
    return np.flatnonzero(is_there), (np.cumsum(is_there) - 1)[row]


#: How figures of metrics that are not standard are merged, and the value of none.
_MERGES: tuple[tuple[np.ufunc, float], ...] = (
    (np.add, 0.0),
    (np.add, 0.0),
    (np.minimum, np.inf),
    (np.maximum, -np.inf),
)


def reduced_extra(parts: Sequence[tuple[Ints, Ints, Floats]]) -> tuple[Ints, Ints, Floats]:
    """The figures of each word in each row, in their order."""
    width = 1 + max((int(word.max()) for _, word, _ in parts if len(word)), default=0)
    keys = [row * width + word for row, word, _ in parts]
    bins = 1 + max((int(key.max()) for key in keys if len(key)), default=-1)
    if bins <= 8 * sum(map(len, keys)):
        is_filled = np.zeros(bins, np.bool_)
        for key in keys:
            is_filled[key] = True
        filled = np.flatnonzero(is_filled)
        sums = np.empty((4, len(filled)))
        for line, (merge, start) in enumerate(_MERGES):
            dense = np.full(bins, start)
            for key, (_, _, figures) in zip(keys, parts, strict=True):
                merge.at(dense, key, figures[line])
            sums[line] = dense[filled]
        return filled // width, filled % width, sums
    joined = np.concatenate(keys)
    order = np.argsort(joined, kind="stable")
    joined = joined[order]
    starts = starts_of(joined)
    sums = np.empty((4, len(starts)))
    for line, (merge, _) in enumerate(_MERGES):
        values = np.concatenate([figures[line] for _, _, figures in parts])
        merge.reduceat(values[order], starts, out=sums[line])
    return joined[starts] // width, joined[starts] % width, sums


def highest(parts: Sequence[Ranks], most: int) -> Ranks:
    """The highest values of each row, in order; of each machine its highest."""
    row, values, machines = (np.concatenate(columns_) for columns_ in zip(*parts, strict=True))
    if not len(row):
        return row, values, machines
    order = _descending(row, values, machines)
    if np.bincount(machines).max() > 1:
        key = row[order] * (int(machines.max()) + 1) + machines[order]
        order = order[np.sort(np.unique(key, return_index=True)[1])]
    starts = starts_of(row[order])
    position = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    kept = order[position < most]
    return row[kept], values[kept], machines[kept]


def _descending(row: Ints, values: Floats, codes: Ints) -> Ints:
    """The order by row, in each row the highest value first; equal ones by their codes.

    Values are often equal.  So they are numbered, and a sort of integers that contain row, number and code
    decides; a sort by three keys would take twice as long.
    """
    by_value = np.argsort(-values)
    ordered = values[by_value]
    rank = np.zeros(len(values), np.int64)
    rank[by_value[1:]] = np.cumsum(ordered[1:] != ordered[:-1])
    rows, ranks, width = (int(column.max()) + 1 for column in (row, rank, codes))
    if rows * ranks * width > np.iinfo(np.int64).max:
        return np.lexsort((codes, rank, row))
    return np.argsort((row * ranks + rank) * width + codes)


def packed(array: Array) -> tuple[int, str, bytes]:
    """Integers in the smallest type that holds them, compressed. Other numbers are hardly compressible."""
    if array.dtype == np.float64 or array.nbytes <= SMALL_BYTES:
        return UNCOMPRESSED, array.dtype.str, array.tobytes()
    if array.dtype == np.int64 and array.size:
        least, most = int(array.min()), int(array.max())
        kinds = (np.uint8, np.uint16, np.uint32) if least >= 0 else ()
        array = array.astype(next((kind for kind in kinds if most <= np.iinfo(kind).max), np.int64))
    data = np.ascontiguousarray(array)
    return data.nbytes, data.dtype.str, pa.compress(data, codec=_CODEC, asbytes=True)


def unpacked(packed: Sequence[Any], kind: Any) -> Array:
    """``packed``: of this version or an earlier one, which compressed all numbers."""
    size, stored, data = packed
    raw = pa.decompress(data, decompressed_size=size, codec=_CODEC, asbytes=True) if size >= 0 else data
    return np.frombuffer(raw, _STORED[stored]).astype(kind)  # a copy that can be changed


def packed_figures(count: Ints, sums: Floats, least: Floats, most: Floats) -> list[Any]:
    """Most cells of small groups have one report: its value is the sum, the minimum and the maximum."""
    is_empty = count == 0
    differs = (least != np.where(is_empty, np.inf, sums)) | (most != np.where(is_empty, -np.inf, sums))
    return [packed(array) for array in (np.packbits(differs), sums[~is_empty], least[differs], most[differs])]


def unpacked_figures(stored: Sequence[Any], count: Ints) -> tuple[Floats, Floats, Floats]:
    bits, values, low, high = (unpacked(array, kind) for array, kind in zip(stored, _FIGURES, strict=True))
    differs = np.unpackbits(bits.astype(np.uint8), count=count.size).astype(np.bool_).reshape(count.shape)
    is_empty = count == 0
    sums = np.zeros(count.shape)
    sums[~is_empty] = values
    least, most = np.where(is_empty, np.inf, sums), np.where(is_empty, -np.inf, sums)
    least[differs], most[differs] = low, high
    return sums, least, most


_FIGURES = (np.int64, np.float64, np.float64, np.float64)


def packed_extra(part: tuple[Ints, Ints, Floats]) -> list[Any]:
    row, word, (count, *others) = part
    counts = count.astype(np.int64)
    rows = np.diff(row, prepend=0) if (np.diff(row) >= 0).all() else None
    return [
        rows is not None,
        packed(row if rows is None else rows),
        packed(word),
        packed(counts),
        packed_figures(counts, *others),
    ]


def unpacked_extra(stored: Sequence[Any]) -> tuple[Ints, Ints, Floats]:
    is_ascending, *arrays, figures = stored
    row, word, count = (unpacked(array, np.int64) for array in arrays)
    lines = np.stack([count.astype(np.float64), *unpacked_figures(figures, count)])
    return np.cumsum(row) if is_ascending else row, word, lines


def packed_ranks(part: Ranks) -> list[Any]:
    return [packed(array) for array in part]


def unpacked_ranks(stored: Sequence[Any]) -> Ranks:
    row, values, machines = stored
    return unpacked(row, np.int64), unpacked(values, np.float64), unpacked(machines, np.int64)


def packed_names(names: pa.StringArray) -> list[Any]:
    if not len(names):
        return []
    sizes = pc.binary_length(names).to_numpy().astype(np.int64)
    text = pc.binary_join(pa.ListArray.from_arrays([0, len(names)], names), "")
    return [packed(sizes), text[0].as_py()]


def unpacked_names(stored: Sequence[Any]) -> pa.StringArray:
    if not stored:
        return pa.array([], pa.string())
    sizes, text = stored
    ends = np.cumsum(unpacked(sizes, np.int64), dtype=np.int32)
    buffers = [None, pa.py_buffer(np.r_[np.int32(0), ends]), pa.py_buffer(text.encode())]
    return pa.StringArray.from_buffers(len(ends), buffers[1], buffers[2])
