"""The pages' templates: Jinja2 files in ``muster/web/templates``, in which every value is escaped.

``widgets.html`` has the building blocks that all of them use, as macros: badges, tables, fields, buttons.
"""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import markupsafe

from muster.core.formats import cell_texts
from muster.web.components import drawings, page, texts

WIDGETS = "widgets.html"
WORD_MAX = 24
NAMING = ("version", "sequence", "number", "pid", "partition")  # numbers that are names, not quantities
BADGES = ("state", "severity", "status", "outcome", "replica_kind", "act")


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("muster.web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "ago": texts.relative_time,
        "counted": texts.counted,
        "duration": texts.seconds,
        "json": functools.partial(json.dumps, ensure_ascii=False),
        "measurement": texts.measurement,
        "number": texts.number,
        "percent": texts.percent,
        "quoted": texts.quoted,
        "rate": texts.rate,
        "sentence": texts.sentence,
        "size": texts.size,
        "sql": texts.literal,
    }
    made.globals |= {
        "clock": texts.clock,
        "figure": texts.figure,
        "link": page.link_to,
        "share_parts": drawings.shares,
        "table": table,
        "title_of": texts.title,
        "tone": texts.tone,
    }
    made.globals |= {
        name: macro
        for name, macro in vars(made.get_template(WIDGETS).module).items()
        if not name.startswith("_")
    }
    return made


def render(name: str, /, **values: Any) -> markupsafe.Markup:
    return markupsafe.Markup(_environment().get_template(name).render(**values))


def block(name: str, block_name: str, /, **values: Any) -> markupsafe.Markup:
    """A block of a template alone; nothing if it has no such block."""
    template = _environment().get_template(name)
    if block_name not in template.blocks:
        return markupsafe.Markup()
    return markupsafe.Markup("".join(template.blocks[block_name](template.new_context(values))))


def widget(name: str, /, *arguments: Any, **values: Any) -> markupsafe.Markup:
    """A macro of ``widgets.html``."""
    macro: Any = _environment().globals[name]
    made: markupsafe.Markup = macro(*arguments, **values)
    return made


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure with its meaning; ``look``: a style, as of a state."""

    label: str
    value: str
    note: str = ""
    look: str = ""
    href: str = ""


# Tables of rows, with the columns that the command line shows too


def table(
    rows: Sequence[Any],
    columns: Sequence[str],
    *,
    label: str,
    none: str = "No data yet.",
    cells: Mapping[str, Callable[[Any], Any]] | None = None,
) -> markupsafe.Markup:
    """A table of ``rows``. ``columns``: of an operation; one with ``?`` is shown as well.

    ``cells``: the content of a column, by its name, instead of the field. A name that is no column is a
    further one at the end: with ``#`` before it one of numbers, and without a title if it is empty.
    """
    given = dict(cells or {})
    names = [column.removesuffix("?") for column in columns]
    names += [name for name in given if name not in names]
    numeric = [_is_numeric(name, rows) for name in names]
    lines = [
        [
            _styled(given[name](row) if name in given else _field(name, getattr(row, name)), right)
            for name, right in zip(names, numeric, strict=True)
        ]
        for row in rows
    ]
    heads = [(texts.title(name.removeprefix("#")), right) for name, right in zip(names, numeric, strict=True)]
    return widget("rows_table", heads, lines, label, none)


def _is_numeric(name: str, rows: Sequence[Any]) -> bool:
    if name.startswith("#"):
        return True
    values = [getattr(row, name, None) for row in rows]
    known = [value for value in values if value is not None]
    return cell_texts.is_numeric(known) and cell_texts.time_s(name, known[0]) is None


def _field(name: str, value: Any) -> str:
    """The content of a cell: a badge for a state, a time, or the text of the command line."""
    if isinstance(value, enum.Enum):
        value = value.value
    if name in BADGES and isinstance(value, str) and value:
        return widget("badge", value)
    if isinstance(value, int | float) and (at_s := cell_texts.time_s(name, value)) is not None:
        return widget("moment", int(at_s * 1000))
    text = cell_texts.cell(name, value)
    return f"{value:,}" if type(value) is int and text == str(value) and name not in NAMING else text


def _styled(cell: str, right: bool) -> tuple[str, str]:
    """A cell and its style. Short names are not wrapped at hyphens, and sentences get a wide column; badges,
    times and links have the width of their content."""
    cell = cell.strip()
    if right or (isinstance(cell, markupsafe.Markup) and "<" in cell):
        return cell, "num" if right else ""
    return cell, "word" if len(cell) <= WORD_MAX and " " not in cell else "text"
