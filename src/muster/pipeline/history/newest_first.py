"""Pages of the history, the newest rows first.

The log of a table contains the latest time of each file.  Files are read in that order, a few at a time,
until no other file can contain newer rows: the cost of a page of recent rows does not depend on the size of
the history.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from muster.core import errors
from muster.pipeline.history import delta, search, storage, tables

FILES_AT_ONCE = 16
SHOWN_MAX = 200_000  # rows of one millisecond: all of them are read to find the next page
ROWS_MAX = 1 << 40  # as good as no limit, and Arrow can count so far
EVER = datetime.datetime.max.replace(tzinfo=datetime.UTC)


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
    root: storage.Root, query: search.HistorySearch, limit: int, after: PageCursor | None = None
) -> tuple[pa.Table, PageCursor | None]:
    """At most ``limit`` rows after the cursor, and the cursor of the next page if there are more rows.

    Rows written in the meantime are newer and do not change the pages.
    """
    limit = min(limit, ROWS_MAX)
    snapshot = search.open_snapshot(root, query)
    if snapshot is None:
        return pa.table({}), None
    shown = query.columns or tuple(snapshot.schema.names)
    skip = 0
    if after is not None:
        skip = after.shown
        query = replace(query, to_ms=min(after.at_ms + 1, query.to_ms or after.at_ms + 1))
    keys = (snapshot.time, *tables.definition(query.kind).keys)
    narrowed = replace(query, columns=tuple(dict.fromkeys((*shown, *keys))), limit=None)
    page = _gather(snapshot, narrowed, keys, skip + limit + 1)
    rows = page.slice(skip, limit)
    if page.num_rows <= skip + limit:
        return rows.select(shown), None
    moments = [delta.ms_of(moment) for moment in rows.column(snapshot.time).to_pylist()]
    before = skip if after is not None and moments[-1] == after.at_ms else 0
    return rows.select(shown), PageCursor(moments[-1], before + moments.count(moments[-1]))


def _gather(
    snapshot: delta.Snapshot, query: search.HistorySearch, keys: tuple[str, ...], most: int
) -> pa.Table:
    """The first ``most`` rows in the order of ``keys``; the first key is a time, in descending order."""
    time, *tie_breakers = keys
    order = [(time, "descending"), *((name, "ascending") for name in tie_breakers)]
    files = snapshot.files_between(query.from_ms, query.to_ms)
    files.sort(key=_end, reverse=True)
    best: Any = None
    for start in range(0, len(files), FILES_AT_ONCE):
        if best is not None and best.num_rows == most and _end(files[start]) < best.column(time)[-1].as_py():
            break
        for batch in search.scan(snapshot.dataset(files[start : start + FILES_AT_ONCE]), query):
            rows = pa.Table.from_batches([batch])
            if best is not None and best.num_rows == most:
                rows = rows.filter(pc.greater_equal(rows.column(time), best.column(time)[-1]))
            if rows.num_rows:
                joined = rows if best is None else pa.concat_tables([best, rows])
                best = joined.sort_by(order).slice(0, most)
    if best is None:  # checks the query, too
        empty = list(search.scan(snapshot.dataset([]), query))
        assert not empty
        return snapshot.schema.empty_table().select(query.columns)
    return best


def _end(file: delta.TableFile) -> datetime.datetime:
    """A bound of the times in a file; `EVER` if the log has no statistics of it."""
    return EVER if file.until is None else file.until + delta.PRECISION
