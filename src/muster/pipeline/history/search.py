"""Search of the history: a predicate over the tables, without Spark.

The files are read in batches of columns, and the predicate is evaluated over columns
(`muster.predicates.backends.columnar`).  So a search costs about as much as reading these columns.  Files
outside the requested period are skipped: the log of the table contains their times.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from muster.core import errors
from muster.pipeline.history import delta, storage, tables
from muster.predicates import ast, types
from muster.predicates.analysis import type_check
from muster.predicates.backends import columnar, columns
from muster.predicates.syntax import parser

STATISTICS = ("count", "mean", "min", "max")
TIME_MS_MAX = (1 << 63) // 1000 - 1  # columns have microseconds


@dataclass(frozen=True, slots=True)
class HistorySearch:
    kind: str = tables.NODES
    where: str = "TRUE"
    from_ms: int | None = None
    to_ms: int | None = None
    columns: tuple[str, ...] = ()  # empty: all
    limit: int | None = None
    as_of: datetime.datetime | int | None = None  # the table at that time, or its version; None: now


def search(root: storage.Root, query: HistorySearch) -> Iterator[pa.RecordBatch]:
    """The rows where the predicate is true, in no particular order."""
    snapshot = open_snapshot(root, query)
    if snapshot is not None:
        files = snapshot.files_between(query.from_ms, query.to_ms)
        yield from scan(snapshot.dataset(files), query)


def open_snapshot(root: storage.Root, query: HistorySearch) -> delta.Snapshot | None:
    """The table of a query; None if nothing was ever written to it."""
    if query.kind not in tables.definitions():
        known = ", ".join(tables.definitions())
        raise errors.InvalidInput(f"the history has no table {query.kind!r}, only {known}")
    try:
        return delta.Snapshot(root, query.kind, as_of=query.as_of)
    except errors.NotFound:
        return None


def scan(dataset: ds.Dataset, query: HistorySearch) -> Iterator[pa.RecordBatch]:
    model = _model(dataset.schema)
    condition = parser.parse(query.where)
    type_check.require(condition, model, query.where)
    for name in query.columns:
        if name not in dataset.schema.names:
            hint = type_check.closest_name(name, dataset.schema.names)
            raise errors.InvalidInput(f"{query.kind} have no column {name!r}", hint=hint)
    needed = {name.key for name in ast.names(condition)}
    shown = query.columns or tuple(dataset.schema.names)
    scanner = dataset.scanner(
        columns=list(dict.fromkeys((*shown, *sorted(needed)))), filter=_period(query, dataset.schema)
    )
    left = query.limit
    with storage.translated(query.kind):
        for batch in scanner.to_batches():
            if not batch.num_rows:
                continue
            used = {name: columns.Column.from_arrow(model[name].kind, batch.column(name)) for name in needed}
            mask = columnar.evaluate(condition, columns.Table(used, rows=batch.num_rows))
            rows = batch.filter(pa.array(mask)).select(list(shown))
            if left is not None:
                rows = rows.slice(0, left)
                left -= rows.num_rows
            if rows.num_rows:
                yield rows
            if left == 0:
                return


def summarise(root: storage.Root, query: HistorySearch, *, of: str, by: Sequence[str]) -> pa.Table:
    """Count, mean, minimum and maximum of ``of`` for each combination of ``by``, highest mean first."""
    by = tuple(dict.fromkeys(by))
    needed = tuple(dict.fromkeys((*by, of)))
    narrowed = replace(query, columns=needed, limit=None)
    parts = []
    for batch in search(root, narrowed):
        _require_summable(batch.schema, of, by)
        part = pa.Table.from_batches([batch])
        parts.append(
            part.group_by(list(by)).aggregate([(of, "count"), (of, "sum"), (of, "min"), (of, "max")])
        )
    if not parts:
        return pa.table({name: [] for name in (*by, *STATISTICS)})
    summed = (
        pa.concat_tables(parts)
        .group_by(list(by))
        .aggregate(
            [
                (f"{of}_count", "sum"),
                (f"{of}_sum", "sum"),
                (f"{of}_min", "min"),
                (f"{of}_max", "max"),
            ]
        )
    )
    count, total = summed.column(f"{of}_count_sum"), summed.column(f"{of}_sum_sum")
    made = pa.table(
        {
            **{name: summed.column(name) for name in by},
            "count": count,
            "mean": pc.divide(total.cast(pa.float64()), pc.if_else(pc.equal(count, 0), None, count)),
            "min": summed.column(f"{of}_min_min"),
            "max": summed.column(f"{of}_max_max"),
        }
    ).sort_by([("mean", "descending")])
    return made.slice(0, query.limit)


def _require_summable(schema: pa.Schema, of: str, by: Sequence[str]) -> None:
    kind = schema.field(of).type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise errors.InvalidInput(f"the column {of!r} has no numbers to summarise")
    for name in by:
        if pa.types.is_nested(schema.field(name).type):
            raise errors.InvalidInput(f"rows cannot be grouped by {name!r}, which has lists or maps")


def _period(query: HistorySearch, schema: pa.Schema) -> Any:
    name = tables.definition(query.kind).time
    kind = schema.field(name).type
    bounds = None
    for bound, compare in ((query.from_ms, "__ge__"), (query.to_ms, "__lt__")):
        if bound is not None:
            bound_ms = max(-TIME_MS_MAX, min(bound, TIME_MS_MAX))
            value = pa.scalar(bound_ms, pa.timestamp("ms", tz="UTC")).cast(kind)
            bound_ = getattr(ds.field(name), compare)(value)
            bounds = bound_ if bounds is None else bounds & bound_
    return bounds


def _model(schema: pa.Schema) -> dict[str, types.AttributeType]:
    """The columns that a predicate can use; lists and maps are excluded."""
    known: dict[str, types.AttributeType] = {}
    for field in schema:
        kind = field.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
            known[field.name] = types.parse_type("string")
        elif pa.types.is_floating(kind):
            known[field.name] = types.parse_type("float")
        elif pa.types.is_integer(kind):
            known[field.name] = types.parse_type("int")
        elif pa.types.is_boolean(kind):
            known[field.name] = types.parse_type("bool")
    return known
