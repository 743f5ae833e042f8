"""The columns of a table of receivers: how each kind of attribute is stored, and how a clause is evaluated.

A clause about one column is evaluated with bitmaps and with ranges of one-byte codes:

- words (strings, booleans): a code for each word, 0 for NULL, and a bitmap for each word if there are few;
- sets: a bitmap for the presence of a set, and one for each word of the domain;
- numbers: the exact value, and the code of the interval that contains it (see `number_column`).

Other clauses (many words, arithmetic) are evaluated on the exact columns with
`muster.predicates.backends.columnar`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from muster.notify.matcher import opcodes
from muster.predicates import ast, like_patterns, types
from muster.predicates.backends import columns as exact

Array = npt.NDArray[Any]
Step = tuple[int, int, int, int]

BITMAPS_MAX: Final = 128
WORDS_BYTES: Final = 1 << 20  # of the words of a column; with more, unused ones are removed
RANGES_MAX: Final = 8


class ColumnStorage(Protocol):
    """The storage of bits, codes and numbers of columns, implemented by the table."""

    kernels: Any
    bits: Array
    capacity: int
    used: int

    def new_bitmaps(self, count: int) -> int: ...
    def free_bitmaps(self, numbers: list[int]) -> None: ...
    def new_codes(self) -> int: ...
    def codes_of(self, column: int) -> Array: ...
    def new_numbers(self) -> int: ...
    def numbers_of(self, column: int) -> Array: ...


def nothing() -> list[Step]:
    return [(opcodes.FILL, 0, 0, 0)]


def everything() -> list[Step]:
    return [(opcodes.FILL, 1, 0, 0)]


class ReceiverColumn(Protocol):
    version: int

    def write(self, rows: Array, cells: Sequence[Any]) -> None: ...
    def read(self, row: int) -> types.Value: ...
    def cells(self, rows: Array) -> list[types.Value]:
        """Return the values of many rows."""
        ...

    def grow(self) -> None: ...
    def present(self) -> list[Step]: ...
    def steps(self, clause: ast.Clause, *, when: bool) -> list[Step] | None:
        """Return the steps for rows where the clause has this truth value; None if codes do not suffice."""
        ...

    def exact(self, rows: int) -> exact.Column: ...


class WordColumn:
    """Strings and booleans."""

    def __init__(self, room: ColumnStorage, kind: types.ValueKind) -> None:
        self._room = room
        self.kind = kind
        self.version = 0
        self._codes_by_word: dict[Any, int] = {}
        self._words: list[Any] = []
        self._bytes = 0  # of all words
        self._bytes_max = WORDS_BYTES
        self._column = room.new_codes()
        self._wide: Array | None = None  # codes that need more than a byte
        self._bitmaps: Array | None = np.empty(0, np.int64)  # by code; None: too many words for bitmaps
        self._exact: exact.Column | None = None
        if kind is types.ValueKind.BOOL:
            self._learn([False, True])

    def write(self, rows: Array, cells: Sequence[Any]) -> None:
        known = self._codes_by_word
        try:
            new = np.fromiter((0 if cell is None else known[cell] for cell in cells), np.int64, len(cells))
        except KeyError:
            self._learn(cells)
            known = self._codes_by_word
            new = np.fromiter((0 if cell is None else known[cell] for cell in cells), np.int64, len(cells))
        codes = self._codes()
        if self._bitmaps is not None:
            old = codes[rows].astype(np.int64)
            self._room.kernels.move_bits(rows, old, new, self._bitmaps, self._room.bits)
        codes[rows] = new

    def _codes(self) -> Array:
        return self._room.codes_of(self._column) if self._wide is None else self._wide

    def _learn(self, cells: Sequence[Any]) -> None:
        is_full = len(self._words) > 4096 + 2 * self._room.used or self._bytes > self._bytes_max
        if is_full and self._wide is not None:
            self._forget()
        for cell in cells:
            if cell is not None and cell not in self._codes_by_word:
                self._words.append(cell)
                self._codes_by_word[cell] = len(self._words)
                self._bytes += len(str(cell))
        self.version += 1
        self._exact = None
        count = len(self._words)
        if self._bitmaps is not None:
            if count > BITMAPS_MAX or self._bytes > WORDS_BYTES:
                self._room.free_bitmaps(self._bitmaps.tolist())
                self._bitmaps = None
            else:
                more = [self._room.new_bitmaps(1) for _ in range(count - len(self._bitmaps))]
                self._bitmaps = np.concatenate((self._bitmaps, np.array(more, np.int64)))
        if self._wide is None and (count > 255 or self._bytes > WORDS_BYTES):
            self._wide = self._room.codes_of(self._column).astype(np.uint32)

    def _forget(self) -> None:
        """Remove unused words: frequent changes of a string must not fill the memory."""
        assert self._wide is not None
        used = np.unique(self._wide)
        used = used[used != 0]
        renamed = np.zeros(len(self._words) + 1, np.uint32)
        renamed[used] = np.arange(1, len(used) + 1, dtype=np.uint32)
        self._wide = renamed[self._wide]
        self._words = [self._words[code - 1] for code in used.tolist()]
        self._codes_by_word = {word: code for code, word in enumerate(self._words, 1)}
        self._bytes = sum(map(len, self._words))
        self._bytes_max = max(WORDS_BYTES, 2 * self._bytes)

    def read(self, row: int) -> types.Value:
        code = int(self._codes()[row])
        word: types.Value = None if code == 0 else self._words[code - 1]
        return word

    def cells(self, rows: Array) -> list[types.Value]:
        words = self._words
        return [None if code == 0 else words[code - 1] for code in self._codes()[rows].tolist()]

    def which(self, rows: Array, fits: Callable[[str], bool]) -> Array:
        """Return which of the rows have a word that satisfies the clause."""
        codes = self._codes()[rows]
        chosen = np.zeros(len(self._words) + 1, np.bool_)
        for code in np.unique(codes).tolist():
            chosen[code] = code != 0 and fits(self._words[code - 1])
        matches: Array = chosen[codes]
        return matches

    def grow(self) -> None:
        if self._wide is not None:
            more = np.zeros(self._room.capacity - len(self._wide), np.uint32)
            self._wide = np.concatenate((self._wide, more))
        self._exact = None

    def present(self) -> list[Step]:
        return [] if self._wide is not None else [(opcodes.RANGE, self._column, 1, 254)]

    def words_held(self) -> list[Any] | None:
        """Return all words that rows may have; None if they are too many."""
        return self._words if len(self._words) <= BITMAPS_MAX else None

    def steps(self, clause: ast.Clause, *, when: bool) -> list[Step] | None:
        if self._wide is not None:
            return None
        known = self._codes_by_word
        match clause:
            case ast.Comparison(right=ast.Literal() as literal) if (
                literal.kind is self.kind and clause.operator in ("=", "<>")
            ):
                # 1 and 1.0 are equal to True in Python, but their kinds differ.
                code = known.get(literal.value)
                return self._among([code] if code else [], when=when is (clause.operator == "="))
            case ast.In() if self.kind is types.ValueKind.STRING:
                codes = [code for word in set(clause.words) if (code := known.get(word))]
                return self._among(codes, when=when)
            case ast.Like() if self.kind is types.ValueKind.STRING:
                fits = like_patterns.matcher(clause.pattern, clause.escape)
                return self._among([code for word, code in known.items() if fits(word)], when=when)
            case _:
                return nothing() if when else self.present()  # different types: FALSE

    def _among(self, codes: list[int], *, when: bool) -> list[Step] | None:
        if when:
            return self._any(sorted(codes))
        if len(codes) == 1 and self._bitmaps is not None:
            return [
                *self.present(),
                (opcodes.BITMAP, int(self._bitmaps[codes[0] - 1]), 0, 0),
                (opcodes.NOT, 0, 0, 0),
            ]
        return self._any(sorted(set(range(1, len(self._words) + 1)) - set(codes)))

    def _any(self, codes: list[int]) -> list[Step] | None:
        if not codes:
            return nothing()
        if self._bitmaps is not None and len(codes) <= RANGES_MAX:
            numbers = [int(self._bitmaps[code - 1]) for code in codes]
            steps: list[Step] = [(opcodes.BITMAP, numbers[0], 0, 0)]
            for number in numbers[1:]:
                steps += [(opcodes.BITMAP, number, 0, 0), (opcodes.OR, 0, 0, 0)]
            return steps
        runs: list[tuple[int, int]] = []
        for code in codes:
            if runs and runs[-1][1] == code - 1:
                runs[-1] = (runs[-1][0], code)
            else:
                runs.append((code, code))
        return _ranges(self._column, runs)

    def exact(self, rows: int) -> exact.Column:
        # One-byte codes are stored with those of other columns and move when a column is added.
        if self._exact is None or len(self._exact) != rows or self._wide is None:
            words = tuple(self._words) if self.kind is types.ValueKind.STRING else ()
            self._exact = exact.Column(self.kind, self._codes()[:rows], words)
        return self._exact


class SetColumn:
    def __init__(self, room: ColumnStorage, domain: tuple[str, ...]) -> None:
        self._room = room
        self.version = 0
        self._bit = {word: 2 << place for place, word in enumerate(domain)}
        self._domain = domain
        self._first = room.new_bitmaps(1 + len(domain))

    def write(self, rows: Array, cells: Sequence[Any]) -> None:
        bit = self._bit
        masks = np.fromiter(
            (0 if cell is None else 1 + sum(bit[word] for word in cell) for cell in cells),
            np.uint64,
            len(cells),
        )
        self._room.kernels.write_sets(rows, masks, self._first, 1 + len(self._domain), self._room.bits)

    def _has(self, row: int, place: int) -> bool:
        return bool((int(self._room.bits[self._first + place, row >> 6]) >> (row & 63)) & 1)

    def read(self, row: int) -> types.Value:
        if not self._has(row, 0):
            return None
        return frozenset(word for place, word in enumerate(self._domain, 1) if self._has(row, place))

    def cells(self, rows: Array) -> list[types.Value]:
        masks = np.zeros(len(rows), np.uint64)
        for place in range(1 + len(self._domain)):
            bits = self._room.bits[self._first + place, rows >> 6] >> (rows & 63).astype(np.uint64)
            masks |= (bits & np.uint64(1)) << np.uint64(place)
        known: dict[int, types.Value] = {}
        for mask in np.unique(masks).tolist():
            words = frozenset(word for place, word in enumerate(self._domain, 1) if mask >> place & 1)
            known[mask] = words if mask & 1 else None
        return [known[mask] for mask in masks.tolist()]

    def grow(self) -> None:
        pass

    def present(self) -> list[Step]:
        return [(opcodes.BITMAP, self._first, 0, 0)]

    def steps(self, clause: ast.Clause, *, when: bool) -> list[Step] | None:
        if isinstance(clause, ast.Contains) and clause.word in self._bit:
            step = (opcodes.BITMAP, self._first + 1 + self._domain.index(clause.word), 0, 0)
            return [step] if when else [*self.present(), step, (opcodes.NOT, 0, 0, 0)]
        return nothing() if when else self.present()

    def exact(self, rows: int) -> exact.Column:
        words = -(-rows // 64)
        masks = np.zeros(words * 64, np.uint64)
        for place in range(1 + len(self._domain)):
            bits = self._room.bits[self._first + place, :words]
            masks |= np.unpackbits(bits.view(np.uint8), bitorder="little").astype(np.uint64) << np.uint64(
                place
            )
        return exact.Column(types.ValueKind.SET, masks[:rows], self._domain)


def _ranges(column: int, runs: list[tuple[int, int]]) -> list[Step] | None:
    if len(runs) > RANGES_MAX:
        return None
    if not runs:
        return nothing()
    steps: list[Step] = []
    for place, (low, high) in enumerate(runs):
        steps.append((opcodes.RANGE, column, low, high - low))
        if place:
            steps.append((opcodes.OR, 0, 0, 0))
    return steps
