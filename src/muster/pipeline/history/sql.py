"""SQL over the history with DuckDB, embedded: one SELECT, limited in time, memory and rows.

The tables of the history with the view `alerts_current`, and those that the caller has in memory, are
registered by name; nothing else can be read.  Access to files and the network is disabled, extensions are not
loaded, and the configuration is locked before the query runs.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import itertools
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from muster.core import errors, units
from muster.pipeline.history import delta, storage, tables

ROWS_AT_ONCE = 2048
NOT_A_SELECT, READ_ONLY = "SQL: only one SELECT statement can be run", "the history is read-only"


@dataclass(frozen=True, slots=True)
class SqlLimits:
    seconds: float = 60.0
    memory_bytes: int = 1 << 30
    rows: int | None = 10_000  # None: all
    threads: int = 2


@dataclass(frozen=True, slots=True)
class SqlResult:
    table: pa.Table
    truncated: bool  # there are more rows


class _SqlScanner:
    """What DuckDB uses of a scanner."""

    def __init__(self, scanner: ds.Scanner) -> None:
        self._scanner = scanner

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self._scanner.projected_schema, self._scanner.to_batches())


class _SqlDataset(ds.UnionDataset):  # type: ignore[misc] # pyarrow has no types
    """A dataset whose scans start without Python's global lock.

    pyarrow's ``Scanner.to_reader`` holds that lock while it starts a scan.  The files of object stores are
    opened by Python code in other threads.  If one of them fails, it holds Arrow's lock of the scan and waits
    for Python's, to describe the error: a deadlock.  ``Scanner.to_batches`` releases Python's lock.
    """

    def __init__(self, dataset: ds.Dataset) -> None:
        super().__init__(dataset.schema, [dataset])

    def scanner(self, columns: list[str] | None = None, filter: ds.Expression | None = None) -> _SqlScanner:
        return _SqlScanner(super().scanner(columns=columns, filter=filter))


def table_names(text: str) -> set[str]:
    """The names of the tables that a query reads, in lower case."""
    _require_select(text)
    try:
        return {name.lower() for name in duckdb.get_table_names(text)}
    except duckdb.Error as error:
        raise errors.InvalidInput(f"SQL: {_message(error)}") from error


def query(
    root: storage.Root | None,
    text: str,
    limits: SqlLimits | None = None,
    *,
    as_of: datetime.datetime | int | None = None,
    more: Mapping[str, pa.Table] | None = None,
) -> SqlResult:
    """The result of a SELECT over the tables of a history, if there is one, and ``more`` tables."""
    limits = limits or SqlLimits()
    _require_select(text)
    batches: list[pa.RecordBatch] = []
    count = 0
    with (
        _translated(limits),
        _connection(root, limits, as_of, more or {}) as database,
        _deadline(database, limits.seconds),
    ):
        reader = database.sql(text).to_arrow_reader(ROWS_AT_ONCE)
        for batch in reader:
            batches.append(batch)
            count += batch.num_rows
            if limits.rows is not None and count > limits.rows:
                break
        table = with_unique_names(pa.Table.from_batches(batches, schema=reader.schema))
    truncated = limits.rows is not None and count > limits.rows
    return SqlResult(table.slice(0, limits.rows) if truncated else table, truncated)


def _require_select(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise errors.InvalidInput("SQL: the query is not valid Unicode text") from None
    try:
        statements = duckdb.extract_statements(text)
    except duckdb.Error as error:
        raise errors.InvalidInput(f"SQL: {_message(error)}") from error
    allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in allowed:
        raise errors.InvalidInput(NOT_A_SELECT, hint=READ_ONLY)


@contextlib.contextmanager
def _connection(
    root: storage.Root | None,
    limits: SqlLimits,
    as_of: datetime.datetime | int | None,
    more: Mapping[str, pa.Table],
) -> Iterator[duckdb.DuckDBPyConnection]:
    settings: dict[str, Any] = {
        "enable_external_access": "false",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "allow_community_extensions": "false",
        "memory_limit": f"{limits.memory_bytes // (1 << 20)}MiB",
        "temp_directory": "",  # no spilling: the memory limit is the limit
        "threads": str(limits.threads),
    }
    with duckdb.connect(config=settings) as database:
        database.execute("SET TimeZone = 'UTC'")
        database.execute("SET python_enable_replacements = false")
        for name, table in more.items():
            database.register(name, table)
        if root is not None:
            _register(database, root, as_of)
        database.execute("SET lock_configuration = true")
        yield database


def _register(
    database: duckdb.DuckDBPyConnection, root: storage.Root, as_of: datetime.datetime | int | None
) -> None:
    existing = 0
    for name, definition in tables.definitions().items():
        try:
            database.register(name, _SqlDataset(delta.Snapshot(root, name, as_of=as_of).dataset()))
            existing += 1
        except errors.NotFound:
            database.register(name, definition.schema.empty_table())
    if not existing:
        raise errors.NotFound(
            f"there is no history in {storage.join(root)}", hint="`muster run pipeline` writes it"
        )
    shown = ", ".join(f'"{column.name}"' for column in tables.definition(tables.ALERTS).columns)
    view = tables.CURRENT_SQL.format(columns=shown, alerts=tables.ALERTS)
    database.execute(f"CREATE VIEW {tables.ALERTS_CURRENT} AS {view}")


@contextlib.contextmanager
def _deadline(database: duckdb.DuckDBPyConnection, seconds: float) -> Iterator[None]:
    done = threading.Event()

    def interrupt() -> None:
        wait_s = min(seconds, threading.TIMEOUT_MAX)
        while not done.wait(wait_s):
            database.interrupt()  # again and again: between two batches it has no effect
            wait_s = 0.1

    timer = threading.Thread(target=interrupt, daemon=True)
    timer.start()
    try:
        yield
    finally:
        done.set()
        timer.join()


@contextlib.contextmanager
def _translated(limits: SqlLimits) -> Iterator[None]:
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError, MemoryError) as error:
        # While results are read, Arrow reports DuckDB's errors as its own: only the text tells the reason.
        if "INTERRUPT Error" in str(error):
            raise errors.TimedOut(
                f"SQL: the query took longer than {units.rounded_duration(limits.seconds)}"
            ) from error
        if storage.is_missing(error):
            raise storage.files_removed() from error
        if isinstance(error, MemoryError) or "Out of Memory" in str(error):
            raise errors.LimitExceeded(
                f"SQL: the query needs more than {units.format_size(limits.memory_bytes)} of memory",
                hint="select fewer columns or days, or aggregate",
            ) from error
        raise errors.InvalidInput(f"SQL: {_message(error)}") from error


def _message(error: Exception) -> str:
    return str(error).strip().split("\n\nLINE ")[0][:1000]


def rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows of plain values: numbers, text, lists and objects."""
    try:
        listed = tables.to_pylist(table)
    except (OverflowError, ValueError) as error:
        raise errors.InvalidInput(
            f"SQL: the result has a date or time that cannot be shown: {error}", hint="cast it to VARCHAR"
        ) from error
    return [{name: plain(value) for name, value in row.items()} for row in listed]


def with_unique_names(table: pa.Table) -> pa.Table:
    """Columns of the same name, as of a join, get numbers: rows are objects with a value for each name."""
    names: dict[str, None] = {}
    for name in table.column_names:
        candidates = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(1)))
        names[next(candidate for candidate in candidates if candidate not in names)] = None
    return table.rename_columns(list(names))


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case decimal.Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case datetime.datetime():
            return value.isoformat(timespec="milliseconds")
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case bytes():
            return value.hex()
        case _:
            return str(value)
