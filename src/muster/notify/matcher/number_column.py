"""A column of numbers: the exact values, and a one-byte code of the interval that contains each of them.

*Edges* divide the numbers into intervals.  Code 0 is NULL, code 1 is below the first edge, and code c begins
at edge c - 2.  So a comparison with an edge is a range of codes.  A comparison with another constant is
decided by codes as well, except for the rows in the interval of the constant: their numbers are compared.

Two kinds of edges keep these rows few:

- Quantiles of the present numbers.  They are chosen when addresses have caused many comparisons of numbers,
  and chosen again when the numbers have changed so much that this happens again.  A frequent number has an
  interval of its own, in which no other constant can be.
- Constants that occur a second time, while there is space.
"""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from muster.notify.matcher import opcodes, receiver_columns
from muster.notify.matcher.receiver_columns import Array, Step
from muster.predicates import ast, types, values
from muster.predicates.backends import columns as exact

EDGES_MAX: Final = 254
QUANTILES: Final = 160  # the other edges are constants
STALE_SHARE: Final = 1 / 8  # of the numbers, written since the quantiles were computed: they have moved
SAMPLE: Final = 1 << 16  # numbers of which the quantiles are computed
SEEN_MAX: Final = 1024


class NumberColumn:
    def __init__(self, room: receiver_columns.ColumnStorage, kind: types.ValueKind) -> None:
        self._room = room
        self.kind = kind
        self.version = 0
        self._whole = kind is types.ValueKind.INT
        self._type: Any = np.int64 if self._whole else np.float64
        self._column = room.new_codes()
        self._numbers = room.new_numbers()
        self._edges: list[Any] = []
        self._array = np.empty(0, self._type)
        self._seen: set[Any] = set()
        self._constants: set[Any] = set()  # that are edges
        self._written = 0  # rows, since the quantiles were computed

    def _codes(self) -> Array:
        return self._room.codes_of(self._column)

    def _values(self) -> Array:
        return self._room.numbers_of(self._numbers).view(self._type)

    def write(self, rows: Array, cells: Sequence[Any]) -> None:
        if self._whole:
            null = np.fromiter((cell is None for cell in cells), np.bool_, len(cells))
            new = np.fromiter((0 if cell is None else cell for cell in cells), np.int64, len(cells))
        else:
            new, null = np.array(cells, np.float64), None  # None becomes NaN
        numbers, codes = self._values(), self._codes()
        numbers[rows] = new
        self._written += len(rows)
        self._room.kernels.encode_rows(numbers, rows, self._array, codes)
        if null is not None:
            codes[rows[null]] = 0

    def read(self, row: int) -> types.Value:
        if self._codes()[row] == 0:
            return None
        value: types.Value = self._values()[row].item()
        return value

    def cells(self, rows: Array) -> list[types.Value]:
        numbers: list[types.Value] = self._values()[rows].tolist()
        for place in np.flatnonzero(self._codes()[rows] == 0).tolist():
            numbers[place] = None
        return numbers

    def grow(self) -> None:
        pass

    def present(self) -> list[Step]:
        return [(opcodes.RANGE, self._column, 1, 254)]

    def exact(self, rows: int) -> exact.Column:
        null = self._codes()[:rows] == 0
        if self._whole:
            return exact.Column(types.ValueKind.INT, self._values()[:rows], null=null)
        return exact.Column(types.ValueKind.FLOAT, np.where(null, np.nan, self._values()[:rows]))

    # -- clauses

    def steps(self, clause: ast.Clause, *, when: bool) -> list[Step]:
        if (
            not isinstance(clause, ast.Comparison)
            or not isinstance(clause.right, ast.Literal)
            or not clause.right.kind.is_number
        ):
            return receiver_columns.nothing() if when else self.present()
        bound: Any = clause.right.value
        sign = clause.operator if when else ast.OPPOSITE[clause.operator]
        known: tuple[ast.ComparisonOperator, Any] | bool = (sign, bound)
        if self._whole and isinstance(bound, float):
            known = values.integer_bound(sign, bound)
        elif not self._whole and isinstance(bound, int):
            known = values.float_bound(sign, bound)
        if isinstance(known, bool):
            return self.present() if known else receiver_columns.nothing()
        return self._compare(*known)

    def _compare(self, sign: ast.ComparisonOperator, bound: Any) -> list[Step]:
        match sign:
            case "<":
                return self._between(None, bound)
            case ">=":
                return self._between(bound, None)
            case "<=":
                return self._between(None, self._after(bound))
            case "=":
                return self._between(bound, self._after(bound))
        after = self._after(bound)
        above = receiver_columns.nothing() if after is None else self._between(after, None)
        return above if sign == ">" else [*self._between(None, bound), *above, (opcodes.OR, 0, 0, 0)]

    def _between(self, low: Any, high: Any) -> list[Step]:
        """Return the steps for the numbers from ``low`` to below ``high``; None: without this limit."""
        first, last = 1, 255
        comparing: list[Step] = []
        if low is not None:
            is_edge = self._is_edge(low)
            first = self._code(low) + is_edge
            if not is_edge:
                comparing.append(self._step(opcodes.FROM, opcodes.FLOAT_FROM, first, low))
        if high is not None:
            is_edge = self._is_edge(high)
            last = self._code(high)
            if not is_edge:
                comparing.append(self._step(opcodes.BELOW, opcodes.FLOAT_BELOW, last, high))
        return [(opcodes.RANGE, self._column, first, last - first), *comparing]

    def _step(self, whole: int, real: int, code: int, bound: Any) -> Step:
        place = self._numbers * 256 + code
        if self._whole:
            return whole, self._column, place, bound
        return real, self._column, place, struct.unpack("q", struct.pack("d", bound))[0]

    def _after(self, bound: Any) -> Any:
        """Return the next greater number; None if there is none."""
        if self._whole:
            return bound + 1 if bound < types.INT_MAX else None
        return math.nextafter(bound, math.inf) if bound < math.inf else None

    def _code(self, bound: Any) -> int:
        """Return the code of the interval that contains the bound, or that ends there."""
        return bisect.bisect_left(self._edges, bound) + 1

    # -- edges

    @property
    def has_room(self) -> bool:
        """Whether constants can become edges."""
        return len(self._edges) < EDGES_MAX

    def _is_edge(self, bound: Any) -> bool:
        """Whether this is an edge; it becomes one when it occurs a second time."""
        at = bisect.bisect_left(self._edges, bound)
        if at < len(self._edges) and self._edges[at] == bound:
            return True
        if not self.has_room:
            return False
        if bound not in self._seen:
            if len(self._seen) >= SEEN_MAX:
                self._seen.clear()
            self._seen.add(bound)
            return False
        self._constants.add(bound)
        self._set_edges([*self._edges[:at], bound, *self._edges[at:]])
        self._room.kernels.split_interval(self._values(), self._codes(), at + 1, self._type(bound))
        return True

    def balance(self) -> None:
        """Compute the quantiles anew, if enough numbers have changed."""
        if self._written >= self._room.used * STALE_SHARE:
            self._choose_edges()

    def drop_constants(self) -> None:
        """Make space for other constants."""
        self._constants.clear()
        self._seen.clear()
        self._choose_edges()

    def _choose_edges(self) -> None:
        numbers, codes = self._values(), self._codes()
        rows = np.flatnonzero(codes)
        sample = np.sort(numbers[rows[:: max(1, len(rows) // SAMPLE)]])
        quantiles = sample[np.arange(1, QUANTILES) * len(sample) // QUANTILES] if len(sample) else sample
        starts, counts = np.unique(quantiles, return_counts=True)
        edges = {*starts.tolist(), *map(self._after, starts[counts > 1].tolist())} - {None}
        if len(edges | self._constants) > EDGES_MAX:
            self._constants.clear()
        self._set_edges(sorted(edges | self._constants))
        self._room.kernels.encode_rows(numbers, rows, self._array, codes)
        self._written = 0

    def _set_edges(self, edges: list[Any]) -> None:
        self._edges = edges
        self._array = np.array(edges, self._type)
        self.version += 1
