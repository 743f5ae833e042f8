"""`m.history`: the tables that the pipeline writes, by SQL or by predicates."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.client import location, rows
from muster.core import errors

LIMIT = 10_000
SQL_TIMEOUT_S = 60.0


class AsyncHistory:
    """The history of reports and alerts; as `muster sql` and `muster history`.

    The tables are ``nodes``, ``groups``, ``alerts`` and ``hourly``; ``alerts_current`` is a view.  DuckDB
    reads them in this process:

        busiest = m.history.sql("SELECT machine, avg(cpu_percent) AS cpu FROM nodes GROUP BY 1 ORDER BY 2")
        busiest.to_pandas()

    Of a domain elsewhere, `at` names the folder or the URL of the tables.
    """

    def __init__(self, home: Path | None, root: str | None = None) -> None:
        self._home = home
        self._root = root

    def at(self, root: str | Path) -> AsyncHistory:
        """The history in this folder or at this URL (``s3://…``)."""
        return AsyncHistory(self._home, str(root))

    async def sql(
        self,
        query: str,
        *,
        limit: int | None = LIMIT,
        timeout_s: float = SQL_TIMEOUT_S,
        as_of: datetime.datetime | None = None,
    ) -> rows.Rows[rows.Record]:
        """The result of a SELECT. ``limit``: at most this many rows, None: all. ``as_of``: the tables as they
        were.
        """
        from muster.pipeline.history import sql

        limits = sql.SqlLimits(seconds=timeout_s, rows=limit)
        result = await asyncio.to_thread(sql.query, await self._location(), query, limits, as_of=as_of)
        return rows.Rows(table=result.table, complete=not result.truncated)

    async def search(
        self,
        where: str = "TRUE",
        *,
        table: str = "nodes",
        last_s: float | None = None,
        columns: Sequence[str] = (),
        limit: int | None = LIMIT,
        as_of: datetime.datetime | None = None,
    ) -> rows.Rows[rows.Record]:
        """The rows of a table that match a predicate, of the last ``last_s`` seconds or of all times."""
        from muster.pipeline.history import search

        from_ms = None if last_s is None else int((time.time() - last_s) * 1000)
        query = search.HistorySearch(table, where, from_ms, None, tuple(columns), None, as_of)
        return await asyncio.to_thread(_search, await self._location(), query, limit)

    async def _location(self) -> str:
        if self._root is not None:
            return self._root
        if self._home is None:
            raise errors.InvalidInput(
                "the history of a domain elsewhere has no known location",
                hint="name its folder or URL: m.history.at(LOCATION)",
            )
        settings = await asyncio.to_thread(location.load_settings, self._home)
        return settings.pipeline.history_root(settings.domain.folder)


def _search(root: str, query: Any, limit: int | None) -> rows.Rows[rows.Record]:
    import pyarrow as pa

    from muster.pipeline.history import search

    batches: list[pa.RecordBatch] = []
    count = 0
    for batch in search.search(root, query):
        batches.append(batch)
        count += batch.num_rows
        if limit is not None and count > limit:
            break
    if not batches:
        return rows.Rows()
    table = pa.Table.from_batches(batches)
    return rows.Rows(table=table.slice(0, limit), complete=limit is None or count <= limit)
