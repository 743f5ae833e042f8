"""Pages of the history, the newest rows first.

The footers contain the latest time of each file.  Files are read in that order, a few at a time, until no
other file can contain newer rows: the cost of a page of recent rows does not depend on the size of the
history.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from muster.core import errors
from muster.pipeline.history import search, tables

FILES_AT_ONCE = 16
SHOWN_MAX = 200_000  # rows of one millisecond: all of them are read to find the next page
EVER = datetime.datetime.max.replace(tzinfo=datetime.UTC)

#: Columns that order rows of the same time.
TIE_BREAKERS = {
    tables.NODES: ("machine", "boot", "sequence"),
    tables.ROLLUPS: ("scope", "name", "metric"),
    tables.ALERTS: ("rule", "about", "state"),
    tables.DAYS: ("machine", "metric"),
}


@dataclass(frozen=True, slots=True)
class PageCursor:
    """The end of a page: the time of its last row, and how many rows of that millisecond were shown."""

    at_ms: int
    shown: int

    def __str__(self) -> str:
        return f"{self.at_ms}.{self.shown}"

    @classmethod
    def parse(cls, text: str) -> PageCursor:
        at_ms, _, shown = text.partition(".")
        if not all(part.isascii() and part.isdigit() and len(part) < 16 for part in (at_ms, shown)):
            raise errors.InvalidInput(
                f"{text[:40]!r} is not a cursor of the history", hint="pass the cursor unchanged"
            )
        if int(shown) > SHOWN_MAX:
            raise errors.LimitExceeded(
                f"over {SHOWN_MAX:,} rows of one millisecond", hint="narrow the search"
            )
        return cls(int(at_ms), int(shown))


def read_page(
    root: Path, query: search.HistorySearch, limit: int, after: PageCursor | None = None
) -> tuple[pa.Table, PageCursor | None]:
    """At most ``limit`` rows after the cursor, and the cursor of the next page if there are more rows.

    Rows written in the meantime are newer and do not change the pages.
    """
    try:
        return _page(root, query, limit, after)
    except FileNotFoundError:  # a batch was compacted in the meantime
        return _page(root, query, limit, after)


def _page(
    root: Path, query: search.HistorySearch, limit: int, after: PageCursor | None
) -> tuple[pa.Table, PageCursor | None]:
    time = search.KINDS.get(query.kind, "")
    files = sorted(((_end(path, time), path) for path in search.paths(root, query.kind)), reverse=True)
    dataset = search.dataset_of([path for _, path in files])
    if dataset is None:
        return pa.table({}), None
    shown = query.columns or tuple(dataset.schema.names)
    skip = 0
    if after is not None:
        skip = after.shown
        query = replace(query, to_ms=min(after.at_ms + 1, query.to_ms or after.at_ms + 1))
    keys = (time, *TIE_BREAKERS[query.kind])
    narrowed = replace(query, columns=tuple(dict.fromkeys((*shown, *keys))), limit=None)
    page = _gather(files, dataset.schema, narrowed, keys, skip + limit + 1)
    rows = page.slice(skip, limit)
    if page.num_rows <= skip + limit:
        return rows.select(shown), None
    moments = [_ms(moment) for moment in rows.column(time).to_pylist()]
    before = skip if after is not None and moments[-1] == after.at_ms else 0
    return rows.select(shown), PageCursor(moments[-1], before + moments.count(moments[-1]))


def _gather(
    files: list[tuple[datetime.datetime, str]],
    schema: pa.Schema,
    query: search.HistorySearch,
    keys: Any,
    most: int,
) -> pa.Table:
    """The first ``most`` rows in the order of ``keys``; the first key is a time, in descending order."""
    time, *tie_breakers = keys
    order = [(time, "descending"), *((name, "ascending") for name in tie_breakers)]
    best = schema.empty_table().select(query.columns)
    for start in range(0, len(files), FILES_AT_ONCE):
        if best.num_rows == most and files[start][0] < best.column(time)[-1].as_py():
            break
        paths = [path for _, path in files[start : start + FILES_AT_ONCE]]
        for batch in search.scan(ds.dataset(paths, schema=schema, format="parquet"), query):
            rows = pa.Table.from_batches([batch])
            if best.num_rows == most:
                rows = rows.filter(pc.greater_equal(rows.column(time), best.column(time)[-1]))
            if rows.num_rows:
                best = pa.concat_tables([best, rows]).sort_by(order).slice(0, most)
    return best


def _end(path: str, column: str) -> datetime.datetime:
    """The latest time in a file; `EVER` if its footer has no statistics."""
    ends = list(_ends(path, column))
    return max(ends, default=EVER)


def _ends(path: str, column: str) -> Iterator[datetime.datetime]:
    footer = pq.read_metadata(path)
    place = footer.schema.names.index(column)
    for number in range(footer.num_row_groups):
        statistics = footer.row_group(number).column(place).statistics
        yield statistics.max if statistics is not None and statistics.has_min_max else EVER


def _ms(moment: datetime.datetime) -> int:
    return (moment - datetime.datetime.fromtimestamp(0, datetime.UTC)) // datetime.timedelta(milliseconds=1)
