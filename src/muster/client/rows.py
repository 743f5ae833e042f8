"""`Rows`: a result of many rows, as a sequence and as a data frame."""

from __future__ import annotations

import functools
import html
import shutil
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import msgspec

from muster.core import errors

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa

T = TypeVar("T")
#: A row of a query that selects its columns itself, or of a table with columns of users.
Record = dict[str, Any]
SHOWN_ROWS = 20
CELL = 40  # characters


class Rows(Sequence[T], Generic[T]):
    """A sequence of rows with `to_arrow`, `to_pandas` and `to_polars`.

    >>> rows = Rows([{"name": "web-1", "state": "up"}, {"name": "web-2", "state": "down"}])
    >>> len(rows), rows[0]["name"]
    (2, 'web-1')
    >>> rows.columns
    ['name', 'state']
    >>> rows.to_pandas().groupby("state").size().to_dict()
    {'down': 1, 'up': 1}

    A notebook shows them as a table.  ``complete`` is False if the domain has more rows than were returned.
    """

    def __init__(self, rows: Iterable[T] = (), *, complete: bool = True, table: Any = None) -> None:
        """``table``: the rows as a pyarrow table, in place of ``rows``."""
        self._given = list(rows)
        self._table = table
        self.complete = complete

    @functools.cached_property
    def _rows(self) -> list[T]:
        if self._table is None:
            return self._given
        from muster.pipeline.history import tables

        return tables.to_pylist(self._table)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Rows[T]: ...
    def __getitem__(self, index: int | slice) -> T | Rows[T]:
        if isinstance(index, slice):
            table = None if self._table is None else self._table.take(list(range(len(self))[index]))
            return Rows(self._given[index], complete=self.complete, table=table)
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._given) if self._table is None else self._table.num_rows

    def __eq__(self, other: object) -> bool:
        return self._rows == (other._rows if isinstance(other, Rows) else other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in order."""
        if self._table is not None:
            return list(self._table.column_names)
        return list(dict.fromkeys(name for row in self.to_dicts() for name in row))

    def to_dicts(self) -> list[Record]:
        """Each row as a dictionary of plain values."""
        return [_plain(row) for row in self._rows]

    def to_arrow(self) -> pa.Table:
        """A pyarrow table. Columns whose values have several types contain JSON."""
        if self._table is not None:
            return self._table
        pa = _require("pyarrow", "monitor")
        records = self.to_dicts()
        return pa.table(
            {name: _column(pa, [record.get(name) for record in records]) for name in self.columns}
        )

    def to_pandas(self) -> pandas.DataFrame:
        """A data frame of pandas."""
        _require("pandas", "spark")
        return self.to_arrow().to_pandas()

    def to_polars(self) -> polars.DataFrame:
        """A data frame of Polars."""
        return _require("polars").from_arrow(self.to_arrow())

    def __repr__(self) -> str:
        more = "" if self.complete else ", and there are more"
        shown = self[:SHOWN_ROWS].to_dicts()
        lines, left_out = _table(shown, self.columns, shutil.get_terminal_size((110, 0)).columns - 4)
        if len(self) > SHOWN_ROWS:
            lines.append(f"… {len(self) - SHOWN_ROWS} more")
        if left_out:
            lines.append(f"not shown: {', '.join(left_out)}")
        count = f"{len(self)} {'row' if len(self) == 1 else 'rows'}{more}"
        return "\n  ".join([f"<{count}>", *lines])

    def _repr_html_(self) -> str:
        names = self.columns
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_cell(row.get(name)))}</td>" for name in names) + "</tr>"
            for row in self[:SHOWN_ROWS].to_dicts()
        )
        count = f"{len(self)} rows" if self.complete else f"{len(self)} rows, and there are more"
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{html.escape(count)}</p>"
        )


def _plain(value: Any) -> Any:
    """Structs by the names of all their fields, also where they are encoded as arrays or without defaults."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {msgspec.to_builtins(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def _column(pa: Any, values: list[Any]) -> Any:
    if all(isinstance(value, dict) and not value for value in values if value is not None):
        return pa.array([None if value is None else "{}" for value in values], pa.string())
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array([None if value is None else msgspec.json.encode(value).decode() for value in values])


def _table(shown: list[Record], names: list[str], width: int) -> tuple[list[str], list[str]]:
    """Aligned lines with a header, and the columns for which there is no room. Empty columns are left out."""
    lines, left_out = [""] * (len(shown) + 1), []
    for name in names:
        cells = [" ".join(_cell(row.get(name)).split()) for row in shown]
        if not any(cell not in ("", "{}", "[]") for cell in cells):
            continue
        cells = [cell if len(cell) <= CELL else cell[: CELL - 1] + "…" for cell in (name, *cells)]
        size = max(map(len, cells))
        if lines[0] and len(lines[0]) + size > width:
            left_out.append(name)
            continue
        lines = [line + cell.ljust(size + 2) for line, cell in zip(lines, cells, strict=True)]
    return [line.rstrip() for line in lines if line], left_out


def _cell(value: object) -> str:
    return "" if value is None else str(value)


def _require(package: str, extra: str = "") -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        install = f"muster-fabric[{extra}]" if extra else package
        raise errors.MissingDependency(
            f"{package} is not installed", hint=f"pip install '{install}'"
        ) from error
