"""Tables in memory, for the columnar back end.

A column represents NULL in the cheapest way. Strings are codes into a dictionary, 0 for NULL; booleans are 0
for NULL, 1 for false, 2 for true; sets are bits, of which the lowest shows that there is a set; floats have
NaN. Only integers need a separate mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from muster.core import errors
from muster.predicates import types
from muster.predicates.types import ValueKind

Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

FALSE_CODE: Final = 1
TRUE_CODE: Final = 2
SET_PRESENT: Final = 1


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """``words``: for strings, the dictionary, where word i has the code i + 1; for sets, the domain, where
    word i is bit i + 1. ``null``: for integers, the rows with NULL; None if there are none."""

    kind: ValueKind
    values: Array
    words: tuple[str, ...] = ()
    null: Mask | None = None
    codes: Mapping[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "codes", {word: place for place, word in enumerate(self.words, 1)})

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def of(cls, declared: types.AttributeType, cells: Iterable[object]) -> Column:
        """Create a column from plain values. `errors.InvalidInput` if one does not fit the type."""
        listed: list[Any] = [None if types.is_null(cell) else cell for cell in cells]
        for cell in listed:
            if not declared.accepts(cell):
                raise errors.InvalidInput(f"{cell!r} does not fit a column of type {declared}")
        match declared.kind:
            case ValueKind.STRING:
                words: dict[str, int] = {}
                codes = [0 if cell is None else words.setdefault(cell, len(words) + 1) for cell in listed]
                return cls(ValueKind.STRING, np.array(codes, np.min_scalar_type(len(words))), tuple(words))
            case ValueKind.BOOL:
                code = {None: 0, False: FALSE_CODE, True: TRUE_CODE}
                return cls(ValueKind.BOOL, np.array([code[cell] for cell in listed], np.uint8))
            case ValueKind.INT:
                null = np.array([cell is None for cell in listed], np.bool_)
                numbers = np.array([0 if cell is None else cell for cell in listed], np.int64)
                return cls(ValueKind.INT, numbers, null=null if null.any() else None)
            case ValueKind.FLOAT:
                return cls(ValueKind.FLOAT, np.array(listed, np.float64))
            case ValueKind.SET:
                if len(declared.domain) > 63:
                    raise errors.LimitExceeded("a set in a column can have at most 63 words")
                bit = {word: 2 << place for place, word in enumerate(declared.domain)}
                sets = [
                    0 if cell is None else SET_PRESENT + sum(bit[word] for word in cell) for cell in listed
                ]
                width = np.min_scalar_type((2 << len(bit)) - 1)
                return cls(ValueKind.SET, np.array(sets, width), declared.domain)

    @classmethod
    def from_arrow(cls, kind: ValueKind, array: Any) -> Column:
        """``array``: one of pyarrow, whose values fit the kind."""
        match kind:
            case ValueKind.STRING:
                coded = array if hasattr(array, "dictionary") else array.dictionary_encode()
                codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64) + 1
                return cls(kind, codes, tuple(coded.dictionary.to_pylist()))
            case ValueKind.FLOAT:
                return cls(kind, array.to_numpy(zero_copy_only=False).astype(np.float64, copy=False))
        null = array.is_null().to_numpy(zero_copy_only=False)
        filled = array.fill_null(False if kind is ValueKind.BOOL else 0)
        numbers = filled.to_numpy(zero_copy_only=False).astype(np.int64)
        if kind is ValueKind.BOOL:
            return cls(kind, np.where(null, 0, numbers + FALSE_CODE).astype(np.uint8))
        return cls(kind, numbers, null=null if null.any() else None)

    def present(self) -> Mask | bool:
        """The rows that are not NULL; True if all."""
        match self.kind:
            case ValueKind.INT:
                return True if self.null is None else ~self.null
            case ValueKind.FLOAT:
                return np.equal(self.values, self.values)
            case _:
                return np.not_equal(self.values, 0)


class Table:
    """Columns of one length. A name that has no column is NULL in every row."""

    def __init__(self, columns: Mapping[str, Column], *, rows: int | None = None) -> None:
        lengths = {len(column) for column in columns.values()} | ({rows} if rows is not None else set())
        if len(lengths) != 1:
            raise errors.InvalidInput(f"the columns of a table have one length, not {sorted(lengths)}")
        self.columns = columns
        self.rows: int = lengths.pop()

    @classmethod
    def of(cls, model: types.Model, records: Iterable[Mapping[str, object]]) -> Table:
        """Create a table from messages, with a column for each attribute of the model."""
        listed = list(records)
        columns = {
            key: Column.of(declared, [record.get(key) for record in listed])
            for key, declared in model.items()
        }
        return cls(columns, rows=len(listed))
