"""Tables of rows, with the columns that the command line shows too. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muster.core.formats import cell_texts
from muster.web.components import widgets
from muster.web.components.html import Child, Markup

Cell = Callable[[Any], Child]

TITLES = {"since_ms": "Since", "at_ms": "Time"}  # cells have the time, those of the command line the age
ABBREVIATIONS = ("cpu", "id", "pid", "url")
BADGES = ("state", "severity", "status", "outcome", "replica_kind")


def table(
    rows: Sequence[Any],
    columns: Sequence[str],
    *,
    label: str,
    none: Child = "",
    cells: Mapping[str, Cell] | None = None,
) -> Markup:
    """A table of ``rows``. ``columns``: of an operation; one with ``?`` is shown as well.

    ``cells``: the content of a column, by its name, instead of the field. A name that is no column is a
    further one at the end: with ``#`` before it one of numbers, and without a title if it is empty.
    """
    given = dict(cells or {})
    names = [column.removesuffix("?") for column in columns]
    names += [name for name in given if name not in names]
    heads = [("#" if _is_numeric(name, rows) else "") + head(name) for name in names]
    lines: list[list[Child]] = [
        [given[name](row) if name in given else field(name, getattr(row, name)) for name in names]
        for row in rows
    ]
    return widgets.table(heads, lines, label=label, none=none)


def head(name: str) -> str:
    if name in TITLES:
        return TITLES[name]
    words = cell_texts.title(name.removeprefix("#")).split(" ")
    text = " ".join(word.upper() if word in ABBREVIATIONS else word for word in words)
    return text[:1].upper() + text[1:]


def _is_numeric(name: str, rows: Sequence[Any]) -> bool:
    if name.startswith("#"):
        return True
    values = [getattr(row, name, None) for row in rows]
    known = [value for value in values if value is not None]
    return cell_texts.is_numeric(known) and cell_texts.time_s(name, known[0]) is None


def field(name: str, value: Any) -> Child:
    """The content of a cell: a badge for a state, a time, or the text of the command line."""
    if isinstance(value, enum.Enum):
        value = value.value
    if name in BADGES and isinstance(value, str) and value:
        return widgets.badge(value)
    if isinstance(value, int | float) and (at_s := cell_texts.time_s(name, value)) is not None:
        return widgets.moment(int(at_s * 1000))
    text = cell_texts.cell(name, value)
    return f"{value:,}" if type(value) is int and text == str(value) else text
