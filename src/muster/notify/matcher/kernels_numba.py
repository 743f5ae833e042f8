"""The inner loops with numba, if it is installed: a few machine instructions for 64 receivers.

A *bitmap* is an array of 64-bit words; bit ``i % 64`` of word ``i // 64`` represents row ``i``.  An address
becomes a postfix *program* that one compiled loop interprets over blocks of 8,192 rows, so no address needs a
compilation and the stack stays in the first-level cache.

`muster.notify.matcher.kernels_numpy` has the same functions in numpy only: slower, always available, and the
reference for the tests of these.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from muster.notify.matcher import name_table, opcodes

BLOCK: Final = 128  # words
AHEAD: Final = 16  # receivers that are processed during a fetch from memory
DEPTH: Final = opcodes.DEPTH

BITMAP, RANGE, AND, OR, FILL = opcodes.BITMAP, opcodes.RANGE, opcodes.AND, opcodes.OR, opcodes.FILL
NEXT, WITHIN, EMPTY = opcodes.NEXT, opcodes.WITHIN, name_table.EMPTY
BELOW, FROM, FLOAT_BELOW = opcodes.BELOW, opcodes.FROM, opcodes.FLOAT_BELOW


@intrinsic
def _within(_: Any, array: Any, at: Any, low: Any, span: Any) -> Any:
    """Return a word with a bit for each of 64 bytes from ``at`` on: between ``low`` and ``low + span``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = ir.VectorType(ir.IntType(8), 64)
        nothing = ir.Constant(lanes, ir.Undefined)
        first = ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)

        def everywhere(value: Any) -> Any:
            return builder.shuffle_vector(
                builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0)), nothing, first
            )

        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), lanes.as_pointer())
        distance = builder.sub(builder.load(place, align=1), everywhere(arguments[2]))
        return builder.bitcast(
            builder.icmp_unsigned("<=", distance, everywhere(arguments[3])), ir.IntType(64)
        )

    return types.uint64(array, types.intp, types.uint8, types.uint8), generate


@intrinsic
def _ones(_: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic
def _lowest(_: Any, word: Any) -> Any:
    """Return the number of the lowest set bit; 64 if there is none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@intrinsic
def _prefetch(_: Any, array: Any, at: Any) -> Any:
    """Start to fetch an element that is read soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        place = builder.bitcast(builder.gep(data, [arguments[1]]), pointer)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        for_reading, keep, of_data = (ir.Constant(number, value) for value in (0, 3, 1))
        builder.call(fetch, [place, for_reading, keep, of_data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@njit(cache=True)
def _compare(
    own: Any,
    codes: Any,
    base: int,
    code: Any,
    numbers: Any,
    first: int,
    bound: Any,
    below: bool,
    undecided: Any,
    rows: Any,
) -> int:
    """Of the rows of one code, keep those whose number is below the bound, or is not; return their number.

    Each number is at another place in memory: all of a block are fetched before the first is compared.
    """
    nonzero = 0
    for i in range(own.size):
        nonzero += own[i] != 0
    if nonzero * 8 < own.size:  # the few remaining words are evaluated one by one
        for i in range(own.size):
            undecided[i] = own[i]
            if own[i] != 0:
                undecided[i] &= _within(codes, base + i * 64, code, np.uint8(0))
    else:
        for i in range(own.size):
            undecided[i] = own[i] & _within(codes, base + i * 64, code, np.uint8(0))
    count = 0
    for i in range(own.size):
        word = undecided[i]
        while word != 0:
            rows[count] = i * 64 + np.int64(_lowest(word))
            _prefetch(numbers, first + rows[count])
            count += 1
            word &= word - np.uint64(1)
    for i in range(count):
        row = rows[i]
        # Without a branch: within an interval the result cannot be predicted.
        false = np.uint64((numbers[first + row] < bound) != below)
        own[row >> 6] &= ~(false << np.uint64(row & 63))
    return count


@njit(cache=True)
def run(steps: Any, bits: Any, codes: Any, numbers: Any, stride: int, out: Any) -> Any:
    """Interpret an address; return how many rows match, and how many numbers were compared.

    ``codes`` and ``numbers`` contain columns of ``stride`` elements one after the other.
    """
    words = out.size
    stack = np.empty((DEPTH, BLOCK), np.uint64)
    undecided, rows = np.empty(BLOCK, np.uint64), np.empty(BLOCK * 64, np.int64)
    floats, float_bounds = numbers.view(np.float64), steps.view(np.float64)
    total = np.uint64(0)
    compared = 0
    for start in range(0, words, BLOCK):
        size = min(BLOCK, words - start)
        top = -1
        for step in range(steps.shape[0]):
            operation, a = steps[step, 0], steps[step, 1]
            if operation == BITMAP:
                top += 1
                own, other = stack[top], bits[a, start : start + size]
                for i in range(size):
                    own[i] = other[i]
            elif operation == NEXT:
                own, other = stack[top], bits[a, start : start + size]
                for i in range(size):
                    own[i] &= other[i]
            elif operation in (RANGE, WITHIN):
                base = a * stride + start * 64
                low, span = np.uint8(steps[step, 2]), np.uint8(steps[step, 3])
                if operation == RANGE:
                    top += 1
                    own = stack[top]
                    for i in range(size):
                        own[i] = _within(codes, base + i * 64, low, span)
                    continue
                own = stack[top]
                nonzero = 0
                for i in range(size):
                    nonzero += own[i] != 0
                if nonzero * 8 < size:  # the few remaining words are evaluated one by one
                    for i in range(size):
                        if own[i] != 0:
                            own[i] &= _within(codes, base + i * 64, low, span)
                else:
                    for i in range(size):
                        own[i] &= _within(codes, base + i * 64, low, span)
            elif operation == FILL:
                top += 1
                own = stack[top]
                own[:] = ~np.uint64(0) if a else np.uint64(0)
            elif operation >= BELOW:
                part = stack[top, :size]
                code, column = np.uint8(steps[step, 2] & 255), steps[step, 2] >> 8
                base, first = a * stride + start * 64, column * stride + start * 64
                if operation <= FROM:
                    bound, below = steps[step, 3], operation == BELOW
                    compared += _compare(
                        part, codes, base, code, numbers, first, bound, below, undecided, rows
                    )
                else:
                    real, below = float_bounds[step, 3], operation == FLOAT_BELOW
                    compared += _compare(part, codes, base, code, floats, first, real, below, undecided, rows)
            else:
                top -= 1
                own, other = stack[top], stack[top + 1]
                if operation == AND:
                    for i in range(size):
                        own[i] &= other[i]
                elif operation == OR:
                    for i in range(size):
                        own[i] |= other[i]
                else:
                    for i in range(size):
                        own[i] &= ~other[i]
        own, other = stack[0], out[start : start + size]
        for i in range(size):
            other[i] = own[i]
            total += _ones(own[i])
    return total, compared


@njit(cache=True)
def intersect(rows: Any, chosen: Any, out: Any) -> int:
    """Compute the AND of some rows of a matrix of bitmaps; return the number of set bits."""
    size = out.size
    first = rows[chosen[0]]
    for i in range(size):
        out[i] = first[i]
    for j in range(1, chosen.size):
        row = rows[chosen[j]]
        for i in range(size):
            out[i] &= row[i]
    total = np.uint64(0)
    for i in range(size):
        total += _ones(out[i])
    return total


@njit(cache=True)
def positions(bits: Any, out: Any) -> int:
    """Return the numbers of the set bits."""
    count = 0
    for i in range(bits.size):
        word = bits[i]
        while word != 0:
            out[count] = i * 64 + _lowest(word)
            count += 1
            word &= word - np.uint64(1)
    return count


@njit(cache=True)
def policies_of(true: Any, owner: Any, out: Any) -> int:
    """Return the distinct policies of the true conjunctions."""
    count = 0
    last = -1
    for i in range(true.size):
        word = true[i]
        while word != 0:
            policy = owner[i * 64 + _lowest(word)]
            word &= word - np.uint64(1)
            # The conjunctions of a policy are adjacent.
            if policy != last:
                last = out[count] = policy
                count += 1
    return count


@njit(cache=True)
def _stretches(true: Any, owner: Any, spans: Any, members: Any, out: Any) -> Any:
    """Return the positions of the receivers of the true policies, as in ``spans``.

    Every step reads another place in memory.  Each kind of step is done for all policies before the next
    kind, so that the reads overlap.
    """
    policies = out[: policies_of(true, owner, out)]
    stretches = np.empty((policies.size, 3), np.int32)
    count = 0
    for i in range(policies.size):
        policy = policies[i]
        if policy < spans.shape[0]:
            span = spans[policy]
            if span[2] < 0:
                _prefetch(members, span[0])
            stretches[count, 0] = span[0]
            stretches[count, 1] = span[1]
            stretches[count, 2] = span[2]
            count += span[1] != 0
    return stretches[:count]


@njit(cache=True)
def by_policy(true: Any, owner: Any, room: Any, spans: Any, members: Any, address: Any, out: Any) -> int:
    """Return the ids of the receivers that match the address and whose policy has a true conjunction."""
    stretches = _stretches(true, owner, spans, members, room)
    count = np.int64(0)
    for i in range(stretches.shape[0]):
        start, size, row = stretches[i]
        if row < 0:
            for j in range(start, start + size):
                member = np.uint64(members[j])
                # Written in any case: there is no branch to mispredict.
                out[count] = member
                count += np.int64(
                    (address[member >> np.uint64(6)] >> (member & np.uint64(63))) & np.uint64(1)
                )
            continue
        end = row + size
        while row < end:  # one word of the address at a time
            bits, width = _piece(address, row, end)
            while bits != 0:
                out[count] = row + _lowest(bits)
                count += 1
                bits &= bits - np.uint64(1)
            row += width
    return int(count)


@njit(cache=True)
def _piece(address: Any, row: int, end: int) -> Any:
    """Return the bits of the rows from ``row`` to ``end`` that are in one word, and their number."""
    width = min(64 - (row & 63), end - row)
    bits = (address[row >> 6] >> np.uint64(row & 63)) & (~np.uint64(0) >> np.uint64(64 - width))
    return bits, width


@njit(cache=True)
def _hits(address: Any, few: bool, out: Any) -> int:
    """Like `positions`, but writes two at a time in any case: there is no branch to mispredict."""
    if few:
        return positions(address, out)
    hits = np.int64(0)
    for i in range(address.size):
        word = address[i]
        end = hits + np.int64(_ones(word))
        out[hits] = i * 64 + _lowest(word)
        word &= word - np.uint64(1)
        out[hits + 1] = i * 64 + _lowest(word)
        word &= word - np.uint64(1)
        hits += 2
        while word != 0:
            out[hits] = i * 64 + _lowest(word)
            word &= word - np.uint64(1)
            hits += 1
        hits = end
    return hits


@njit(cache=True)
def by_address(address: Any, hits: int, policy_of: Any, parts: Any, true: Any, out: Any) -> int:
    """Return the ids of the receivers that match the address and whose policy has a true conjunction.

    Each of them is at another place in memory, so the data is fetched some receivers ahead.
    """
    hits = _hits(address, hits * 8 < address.size, out)
    matched = np.int64(0)
    last = np.uint64(true.size - 1)
    for i in range(hits):
        _prefetch(policy_of, out[min(i + 2 * AHEAD, hits - 1)])
        _prefetch(parts, 2 * policy_of[out[min(i + AHEAD, hits - 1)]])
        row = out[i]
        policy = policy_of[row]
        known = max(policy, 0)
        first, count = np.uint64(parts[known, 0]), parts[known, 1]
        # Its conjunctions are adjacent, at most 64 of them: in one word or in two.
        at, shift = first >> np.uint64(6), first & np.uint64(63)
        bits = true[at] >> shift
        bits |= (true[min(at + np.uint64(1), last)] << np.uint64(1)) << (np.uint64(63) - shift)
        bits &= ~np.uint64(0) >> np.uint64(64 - max(count, 1))
        out[matched] = row
        # A policy that can never be true has no conjunction.
        matched += np.int64((bits != 0) & (policy >= 0) & (count > 0))
    return matched


@njit(cache=True)
def encode_rows(values: Any, rows: Any, edges: Any, codes: Any) -> None:
    """Compute the codes of some rows of a column of numbers: 0 for NULL, then one for each interval."""
    for i in range(rows.size):
        row = rows[i]
        value = values[row]
        if value != value:
            codes[row] = 0
            continue
        low, high = 0, edges.size
        while low < high:
            middle = (low + high) >> 1
            if value >= edges[middle]:
                low = middle + 1
            else:
                high = middle
        codes[row] = np.uint8(low + 1)


@njit(cache=True)
def split_interval(values: Any, codes: Any, code: int, edge: Any) -> None:
    """Divide the interval of a code at a new edge: the rows at or above the edge get the next code."""
    lower = np.uint8(code)
    for row in range(codes.size):
        codes[row] += np.uint8(codes[row] > lower)
    for start in range(0, codes.size, 64):
        left = _within(codes, start, lower, np.uint8(0))
        while left != 0:
            place = start + np.int64(_lowest(left))
            codes[place] += np.uint8(values[place] >= edge)
            left &= left - np.uint64(1)


@njit(cache=True)
def write_sets(rows: Any, masks: Any, first: int, count: int, bits: Any) -> None:
    """Write the bit of each row in ``count`` bitmaps: bit k of its mask in bitmap ``first + k``."""
    for i in range(rows.size):
        word, bit = rows[i] >> 6, np.uint64(1) << np.uint64(rows[i] & 63)
        for k in range(count):
            if (masks[i] >> np.uint64(k)) & np.uint64(1):
                bits[first + k, word] |= bit
            else:
                bits[first + k, word] &= ~bit


@njit(cache=True)
def move_bits(rows: Any, old: Any, new: Any, where: Any, bits: Any) -> None:
    """Move rows from one code to another: code c has the bitmap ``where[c - 1]``."""
    for i in range(rows.size):
        word, bit = rows[i] >> 6, np.uint64(1) << np.uint64(rows[i] & 63)
        if old[i] != 0:
            bits[where[old[i] - 1], word] &= ~bit
        if new[i] != 0:
            bits[where[new[i] - 1], word] |= bit


@njit(cache=True)
def lookup(
    hashes: Any, data: Any, ends: Any, places: Any, starts: Any, sizes: Any, text: Any, out: Any
) -> None:
    """Return the rows of names: the i-th ends in ``data`` at ``ends[i]``; -1 for an unknown name."""
    mask = places.size - 1
    first = 0
    for i in range(hashes.size):
        size = ends[i] - first
        at = hashes[i] & mask
        out[i] = -1
        while places[at] != EMPTY:
            row = places[at]
            if row >= 0 and sizes[row] == size:
                start = starts[row]
                k = 0
                while k < size and text[start + k] == data[first + k]:
                    k += 1
                if k == size:
                    out[i] = row
                    break
            at = (at + 1) & mask
        first = ends[i]


@njit(cache=True)
def gather(text: Any, starts: Any, lengths: Any, out: Any) -> None:
    """Concatenate parts of a text."""
    at = 0
    for i in range(starts.size):
        for k in range(starts[i], starts[i] + lengths[i]):
            out[at] = text[k]
            at += 1
