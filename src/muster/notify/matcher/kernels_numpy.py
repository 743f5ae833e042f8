"""The inner loops in numpy only: the reference and fallback for `muster.notify.matcher.kernels_numba`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from muster.notify.matcher import opcodes

Array = npt.NDArray[Any]


def pack(mask: Array) -> Array:
    """Convert a mask of rows (a multiple of 64) to a bitmap."""
    return np.packbits(mask, bitorder="little").view(np.uint64)


def unpack(bits: Array) -> Array:
    return np.unpackbits(bits.view(np.uint8), bitorder="little")


def run(steps: Array, bits: Array, codes: Array, numbers: Array, stride: int, out: Array) -> tuple[int, int]:
    words = len(out)
    stack: list[Array] = []
    compared = 0
    for place, (operation, a, b, c) in enumerate(steps.tolist()):
        match operation:
            case opcodes.BITMAP:
                stack.append(bits[a, :words])
            case opcodes.RANGE:
                stack.append(_within(codes[a * stride : a * stride + words * 64], b, c))
            case opcodes.WITHIN:
                stack[-1] = _narrowed(stack[-1], codes[a * stride : a * stride + words * 64], b, c)
            case opcodes.AND:
                top = stack.pop()
                stack[-1] = stack[-1] & top
            case opcodes.OR:
                top = stack.pop()
                stack[-1] = stack[-1] | top
            case opcodes.NOT:
                top = stack.pop()
                stack[-1] = stack[-1] & ~top
            case opcodes.NEXT:
                stack[-1] = stack[-1] & bits[a, :words]
            case opcodes.BELOW | opcodes.FROM | opcodes.FLOAT_BELOW | opcodes.FLOAT_FROM:
                rows = _rows_of(stack[-1], codes[a * stride : a * stride + words * 64], b % 256)
                column, bounds = numbers[b // 256 * stride :], steps
                if operation in (opcodes.FLOAT_BELOW, opcodes.FLOAT_FROM):
                    column, bounds = column.view(np.float64), steps.view(np.float64)
                below = operation in (opcodes.BELOW, opcodes.FLOAT_BELOW)
                false = rows[(column[rows] < bounds[place, 3]) != below]
                stack[-1] = stack[-1].copy()
                np.bitwise_and.at(stack[-1], false >> 6, ~(np.uint64(1) << (false & 63).astype(np.uint64)))
                compared += len(rows)
            case _:
                stack.append(np.full(words, np.uint64(0xFFFFFFFFFFFFFFFF if a else 0)))
    out[:] = stack[0]
    return int(np.bitwise_count(out).sum()), compared


def _narrowed(bits: Array, column: Array, low: int, span: int) -> Array:
    """AND with the rows whose code is from ``low`` to ``low + span``."""
    nonzero = np.flatnonzero(bits)
    if len(nonzero) * 8 >= len(bits):
        narrowed: Array = bits & _within(column, low, span)
        return narrowed
    narrowed = np.zeros_like(bits)  # the few remaining words are evaluated one by one
    narrowed[nonzero] = bits[nonzero] & _within(column.reshape(-1, 64)[nonzero].reshape(-1), low, span)
    return narrowed


def _rows_of(bits: Array, column: Array, code: int) -> Array:
    """Return the rows of a bitmap that have the code."""
    nonzero = np.flatnonzero(bits)
    if len(nonzero) * 8 >= len(bits):
        rows = np.flatnonzero(column == code)
    else:
        at, place = np.nonzero(column.reshape(-1, 64)[nonzero] == code)
        rows = nonzero[at] * 64 + place
    chosen: Array = rows[(bits[rows >> 6] >> (rows & 63).astype(np.uint64)) & np.uint64(1) != 0]
    return chosen


def _within(column: Array, low: int, span: int) -> Array:
    return pack((column - np.uint8(low)) <= np.uint8(span))


def intersect(rows: Array, chosen: Array, out: Array) -> int:
    np.bitwise_and.reduce(rows[chosen], axis=0, out=out)
    return int(np.bitwise_count(out).sum())


def positions(bits: Array, out: Array) -> int:
    # First by word: most words are empty.
    words = np.flatnonzero(bits)
    masks = unpack(bits[words]).reshape(-1, 64)
    at, bit = np.nonzero(masks)
    out[: len(at)] = words[at] * 64 + bit
    return len(at)


def policies_of(true: Array, owner: Array, out: Array) -> int:
    true_positions = np.empty(int(np.bitwise_count(true).sum()), np.int64)
    positions(true, true_positions)
    owners = owner[true_positions]
    # The conjunctions of a policy are adjacent.
    policies = owners[np.flatnonzero(np.diff(owners, prepend=-1))]
    out[: len(policies)] = policies
    return len(policies)


def _members(true: Array, owner: Array, room: Array, spans: Array, members: Array) -> Array:
    policies = room[: policies_of(true, owner, room)]
    policies = policies[policies < len(spans)]
    sizes = spans[policies, 1].astype(np.int64)
    if not sizes.sum():
        return np.empty(0, members.dtype)
    offsets = np.repeat(spans[policies, 0] - np.concatenate(([0], np.cumsum(sizes)[:-1])), sizes)
    return members[offsets + np.arange(len(offsets))]


def by_policy(
    true: Array, owner: Array, room: Array, spans: Array, members: Array, address: Array, out: Array
) -> int:
    rows = _members(true, owner, room, spans, members)
    chosen = rows[(address[rows >> 6] >> (rows & 63).astype(np.uint64)) & np.uint64(1) != 0]
    out[: len(chosen)] = chosen
    return len(chosen)


def by_address(address: Array, hits: int, policy_of: Array, parts: Array, true: Array, out: Array) -> int:
    rows = np.empty(hits, np.int64)
    positions(address, rows)
    rows = rows[policy_of[rows] >= 0]
    first, count = parts[policy_of[rows]].astype(np.int64).T
    chosen = np.zeros(len(rows), np.bool_)
    for place in range(int(count.max(initial=0))):
        present = place < count
        at = np.where(present, first + place, 0)
        chosen |= present & ((true[at >> 6] >> (at & 63).astype(np.uint64)) & np.uint64(1) != 0)
    matched = rows[chosen]
    out[: len(matched)] = matched
    return len(matched)


def encode_rows(values: Array, rows: Array, edges: Array, codes: Array) -> None:
    numbers = values[rows]
    intervals = np.searchsorted(edges, numbers, side="right") + 1
    codes[rows] = np.where(numbers == numbers, intervals, 0).astype(np.uint8)


def split_interval(values: Array, codes: Array, code: int, edge: float) -> None:
    codes += codes > code
    rows = np.flatnonzero(codes == code)
    codes[rows[values[rows] >= edge]] = code + 1


def move_bits(rows: Array, old: Array, new: Array, where: Array, bits: Array) -> None:
    words, bit = rows >> 6, np.uint64(1) << (rows & 63).astype(np.uint64)
    gone, come = old != 0, new != 0
    np.bitwise_and.at(bits, (where[old[gone] - 1], words[gone]), ~bit[gone])
    np.bitwise_or.at(bits, (where[new[come] - 1], words[come]), bit[come])


def write_sets(rows: Array, masks: Array, first: int, count: int, bits: Array) -> None:
    words, bit = rows >> 6, np.uint64(1) << (rows & 63).astype(np.uint64)
    for k in range(count):
        has = (masks >> np.uint64(k)) & np.uint64(1) != 0
        np.bitwise_or.at(bits[first + k], words[has], bit[has])
        np.bitwise_and.at(bits[first + k], words[~has], ~bit[~has])


def gather(text: Array, starts: Array, lengths: Array, out: Array) -> None:
    """Concatenate parts of a text."""
    out[:] = text[_stretches(starts, lengths)]


def _stretches(starts: Array, lengths: Array) -> Array:
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
