"""Maintenance of the tables: compaction, hourly rows, retention, and vacuum.

Each step is a transaction of its own, so the pipeline and readers continue meanwhile.  Every step can be
repeated: after a crash the next run continues.

**Compaction** merges the small files of a day.  **Hourly rows** are computed from `nodes` when an hour is
over, and replace earlier rows of that hour; hours that received late rows are computed again.  The table
`hourly` stores its progress: the version of `nodes` it includes, and the first hour that was not over.
**Retention** deletes rows that are too old, and the oldest rows if the history exceeds its budget.
**Vacuum** removes files that no table refers to: replaced ones after ``keep_s``, which is how far `--as-of`
reaches back, and those of batches that were never committed.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from muster.core.reports import columns
from muster.pipeline.history import data_files, delta, storage, tables

ROWS_OF_FILE = 250_000
GRACE_S = 300.0  # after the end of an hour, for reports on their way
SMALL_BYTES = 64 << 20
MERGED_BYTES = 192 << 20  # of the files that become one, which is half as large then
FILES_OPEN_DAY = 100  # small files of the current day before they are merged
VACUUM_LEAST_S = 3600.0  # a file may be written that long before it is committed
MEMORY = "1GB"  # of the aggregation by hour; larger groups are spilled to disk
ATTEMPTS = 5  # if another process changes the same rows
HOURLY_RUN, NODES_VERSION, OPEN_HOUR = "hourly-run", "nodes-version", "open-hour"

HOUR_S = 3600
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class MaintenanceLimits:
    max_bytes: int = 0  # 0: no limit
    max_age_s: float = 0.0
    keep_s: float = 7 * 86400.0


UNLIMITED = MaintenanceLimits()


def run(
    root: storage.Root,
    now_s: float,
    limits: MaintenanceLimits = UNLIMITED,
    *,
    with_vacuum: bool = True,
    check: Callable[[], None] = lambda: None,
) -> dict[str, int]:
    """All steps once. What was done, in numbers. ``check`` is called before each step and may raise."""
    existing = [name for name in tables.definitions() if delta.exists(root, name)]
    done: collections.Counter[str] = collections.Counter(hours=0, compacted=0, deleted=0)
    check()
    if tables.NODES in existing:
        done["hours"] = update_hourly(root, now_s, limits.keep_s)
    for name in existing:
        check()
        done["compacted"] += compact(root, name, now_s, check)
    check()
    done["deleted"] = enforce_retention(root, now_s, limits)
    if with_vacuum:
        done["removed"] = 0
    for name in existing if with_vacuum else ():
        check()
        done["removed"] += vacuum(root, name, limits.keep_s)
    return dict(done)


def compact(
    root: storage.Root,
    name: str,
    now_s: float,
    check: Callable[[], None] = lambda: None,
    merge_all: Callable[[str, Sequence[list[delta.TableFile]]], Iterable[data_files.DataFile]] | None = None,
) -> int:
    """Merge small files of a day, some at a time. The number of files that were merged.

    Files are written one after the other, each synced: delta-rs, which writes all of a day at once, would
    delay those of the pipeline for as long as the disk takes.
    """
    merged = 0
    groups = _mergeable(delta.Snapshot(root, name), now_s)
    made = merge_all(name, groups) if merge_all and groups else (merge(root, name, group) for group in groups)
    try:
        for group, file in zip(groups, made, strict=True):
            check()
            delta.HistoryTable(root, name).replace(group, [file], changes=False)
            merged += len(group)
    except (storage.ConcurrentChange, storage.FilesRemoved):  # the next run merges what is left
        pass
    return merged


def merge(root: storage.Root, name: str, files: list[delta.TableFile]) -> data_files.DataFile:
    """Write the rows of these files of a day to one."""
    rows = delta.Snapshot(root, name).dataset(files)
    return data_files.merge(root, name, rows, files[0].day.isoformat())


def _mergeable(snapshot: delta.Snapshot, now_s: float) -> list[list[delta.TableFile]]:
    """Successive small files of one day that become one."""
    today = datetime.datetime.fromtimestamp(now_s, datetime.UTC).date()
    days: dict[datetime.date, list[delta.TableFile]] = {}
    for file in snapshot.files:
        if file.size < SMALL_BYTES:
            days.setdefault(file.day, []).append(file)
    groups: list[list[delta.TableFile]] = []
    for day, small in days.items():
        left = 0
        for file in small if len(small) >= (FILES_OPEN_DAY if day >= today else 2) else ():
            if file.size > left:
                groups.append([])
                left = MERGED_BYTES
            groups[-1].append(file)
            left -= file.size
    return [group for group in groups if len(group) > 1]


# Hourly rows


def update_hourly(
    root: storage.Root,
    now_s: float,
    keep_s: float = 7 * 86400.0,
    hour_files: Callable[[int], list[data_files.DataFile]] | None = None,
) -> int:
    """Compute the hours that are over, and those that received late rows. How many. ``hour_files`` writes the
    rows of an hour."""
    hourly = delta.HistoryTable(root, tables.HOURLY, keep_s=keep_s)
    nodes = delta.Snapshot(root, tables.NODES)
    open_hour = int(now_s - GRACE_S) // HOUR_S
    before = hourly.transaction_version(OPEN_HOUR)
    if before == open_hour:  # late rows wait for the end of an hour
        return 0
    dirty = _changed_hours(nodes, hourly.transaction_version(NODES_VERSION))
    if before is not None:
        dirty |= set(range(before, open_hour)) & _hours_between(nodes, before, open_hour)
    made = 0
    while ready := sorted(hour for hour in dirty if hour < open_hour):
        for hour in ready:
            _replace_hour(root, hour, hour_files)
        made += len(ready)
        # Rows that were deleted or added meanwhile: those of a forgotten machine must not return.
        version, nodes = int(nodes.delta.version()), delta.Snapshot(root, tables.NODES)
        dirty = _changed_hours(nodes, version)
    run = (hourly.transaction_version(HOURLY_RUN) or 0) + 1
    # The open hour is not the transaction itself: it goes back if the clock was ahead.
    hourly.commit([], (HOURLY_RUN, run), {OPEN_HOUR: open_hour, NODES_VERSION: nodes.delta.version()})
    return made


def _changed_hours(nodes: delta.Snapshot, since: int | None) -> set[int]:
    """The hours of rows that were added after a version; all hours if the log does not tell."""
    newest = int(nodes.delta.version())
    if since == newest:
        return set()
    if since is not None:
        entries = [entry for entry in nodes.delta.history(newest - since) if entry["version"] > since]
        added = [entry for entry in entries if entry["operation"] == "WRITE"]
        if len(entries) == newest - since and all(delta.HOURS_KEY in entry for entry in added):
            return {int(hour) for entry in added for hour in entry[delta.HOURS_KEY].split()}
    return _hours_between(nodes, None, None)


def _hours_between(nodes: delta.Snapshot, start: int | None, end: int | None) -> set[int]:
    """Hours of which a file may contain rows."""
    hours: set[int] = set()
    bounds_ms = (None if hour is None else hour * HOUR_S * 1000 for hour in (start, end))
    for file in nodes.files_between(*bounds_ms):
        first = int(delta.start_of(file.day).timestamp()) // HOUR_S
        since = first if file.since is None else int(file.since.timestamp()) // HOUR_S
        until = first + 23 if file.until is None else int(file.until.timestamp()) // HOUR_S
        hours |= set(range(max(first, since), min(first + 23, until) + 1))
    return hours


def _replace_hour(
    root: storage.Root, hour: int, hour_files: Callable[[int], list[data_files.DataFile]] | None
) -> None:
    """Compute the rows of an hour and replace the former ones, in one transaction.

    The table is opened before the reports are read: if another process computed hours meanwhile, perhaps from
    other reports, the commit fails and the hour is computed again.
    """
    start = _EPOCH + datetime.timedelta(hours=hour)

    def covers(file: delta.TableFile) -> bool:
        return (
            file.day == start.date()
            and (file.since is None or file.since <= start)
            and (file.until is None or file.until + delta.PRECISION >= start)
        )

    def compute() -> list[data_files.DataFile]:
        if hour_files is not None:
            return hour_files(hour)
        with _aggregated(delta.Snapshot(root, tables.NODES), hour) as batches:
            return [
                file
                for batch in batches
                for file in data_files.write(
                    root, tables.HOURLY, pa.Table.from_batches([batch]), "hour"
                ).files
            ]

    _rewrite(root, tables.HOURLY, covers, ds.field("hour") != pa.scalar(start, tables.TIME), compute)


def _rewrite(
    root: storage.Root,
    name: str,
    selects: Callable[[delta.TableFile], bool],
    keep: ds.Expression | None = None,
    compute: Callable[[], list[data_files.DataFile]] = list,
) -> int:
    """Replace the selected files by their rows that ``keep`` accepts and new ones, in one transaction.
    Without ``keep`` the files are removed unread, and the hours of their rows are not computed again.

    The number of rows that were not kept.  It starts again if another process rewrote rows meanwhile.
    """
    for attempt in range(ATTEMPTS):
        table = delta.HistoryTable(root, name)
        snapshot = table.snapshot()
        removed, fresh, deleted = [], compute(), 0
        hours: set[int] = set()
        for file in filter(selects, snapshot.files):
            if keep is None:
                removed.append(file)
                deleted += file.rows
                continue
            rows = snapshot.dataset([file])
            kept = rows.count_rows(filter=keep)
            if kept == file.rows:
                continue
            removed.append(file)
            deleted += file.rows - kept
            times = rows.to_table(columns=[snapshot.time], filter=~keep).column(0).cast(pa.int64()).to_numpy()
            hours |= set(np.unique(times // data_files.HOUR_US).tolist())
            if kept:
                left = rows.to_table(filter=keep).drop_columns([tables.DAY]).cast(_file_schema(snapshot))
                fresh += data_files.write(root, name, left, "kept").files
        if not removed and not fresh:
            return 0
        try:
            table.replace(removed, fresh, hours)
            return deleted
        except storage.ConcurrentChange:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _file_schema(snapshot: delta.Snapshot) -> pa.Schema:
    return pa.schema([field for field in snapshot.schema if field.name != tables.DAY])


@contextlib.contextmanager
def _aggregated(nodes: delta.Snapshot, hour: int) -> Iterator[Iterator[pa.RecordBatch]]:
    """The hourly rows of one hour, in batches."""
    import duckdb

    from_ms = hour * HOUR_S * 1000
    dataset = nodes.dataset(nodes.files_between(from_ms, from_ms + HOUR_S * 1000))
    schema = tables.definition(tables.HOURLY).file_schema
    with (
        tempfile.TemporaryDirectory() as scratch,
        duckdb.connect(config={"memory_limit": MEMORY, "temp_directory": scratch}) as database,
    ):
        database.execute("SET TimeZone = 'UTC'")
        database.register("nodes", dataset)
        made = database.sql(hour_sql(from_ms, _DUCKDB_SQL)).to_arrow_reader(ROWS_OF_FILE)
        yield (columns.conform_schema(batch, schema) for batch in made)


#: What is said differently: a column, a time, the entries of a map, and a map of names and means.
_DUCKDB_SQL = (
    '"group"',
    "TIMESTAMPTZ",
    "unnest(map_entries(metrics))",
    "map(list(name ORDER BY name), list(mean ORDER BY name))",
)
SPARK_SQL = (
    "`group`",
    "TIMESTAMP",
    "explode(map_entries(metrics))",
    "map_from_entries(array_sort(collect_list(struct(name, mean))))",
)


def hour_sql(from_ms: int, dialect: tuple[str, str, str, str]) -> str:
    """The hourly rows of the view ``nodes``."""
    group, time, entries, means = dialect
    start = (_EPOCH + datetime.timedelta(milliseconds=from_ms)).isoformat()
    end = (_EPOCH + datetime.timedelta(milliseconds=from_ms + HOUR_S * 1000)).isoformat()
    functions = {"mean": "avg", "min": "min", "max": "max"}
    metrics = ", ".join(
        f"{functions[statistic]}({metric}) AS {metric}_{statistic}"
        for metric in columns.STANDARD_METRICS
        for statistic in tables.HOURLY_STATISTICS
    )
    return f"""
        WITH reports AS (
            SELECT * FROM nodes
            WHERE reported_at >= {time} '{start}' AND reported_at < {time} '{end}'
        ), entries AS (
            SELECT machine, {entries} AS entry FROM reports WHERE cardinality(metrics) > 0
        ), means AS (
            SELECT machine, entry.key AS name, avg(entry.value) AS mean FROM entries GROUP BY ALL
        ), others AS (
            SELECT machine, {means} AS metrics FROM means GROUP BY machine
        ), machines AS (
            SELECT machine, max_by({group}, reported_at) AS {group}, max_by(zone, reported_at) AS zone,
                   count(*) AS reports, {metrics}
            FROM reports GROUP BY machine
        )
        SELECT {time} '{start}' AS hour, machines.*, others.metrics
        FROM machines LEFT JOIN others USING (machine) ORDER BY machine
    """


# Retention


def enforce_retention(root: storage.Root, now_s: float, limits: MaintenanceLimits) -> int:
    """Delete days that are too old, and the oldest files while the history exceeds its budget.

    The number of deleted rows.  Files that were replaced count: they are removed earlier if space is needed.
    """
    existing = [name for name in tables.definitions() if delta.exists(root, name)]
    deleted = 0
    if limits.max_age_s:
        first = datetime.datetime.fromtimestamp(now_s - limits.max_age_s, datetime.UTC).date()
        deleted += sum(_rewrite(root, name, lambda file: file.day < first) for name in existing)
    if not limits.max_bytes or stored_bytes(root) <= limits.max_bytes:
        return deleted
    for name in existing:
        vacuum(root, name, VACUUM_LEAST_S)
    live = sorted(
        (file.until or delta.start_of(file.day), file.path, file.size, name)
        for name in existing
        for file in delta.Snapshot(root, name).files
    )
    excess = sum(size for _, _, size, _ in live) - limits.max_bytes
    doomed: dict[str, set[str]] = {}
    for _, path, size, name in live:
        if excess <= 0:
            break
        doomed.setdefault(name, set()).add(path)
        excess -= size
    for name, paths in doomed.items():
        deleted += _rewrite(root, name, lambda file, paths=paths: file.path in paths)  # type: ignore[misc]
        purge(root, name)
    return deleted


def stored_bytes(root: storage.Root) -> int:
    """The size of all files, including replaced ones."""
    from pyarrow import fs

    listed = storage.filesystem(root).get_file_info(fs.FileSelector("", recursive=True, allow_not_found=True))
    return sum(info.size or 0 for info in listed if info.is_file)


def delete_rows(root: storage.Root, name: str, column: str, value: str) -> int:
    """Delete the rows with a value, those that are added meanwhile included. The number of rows."""
    total = 0
    while deleted := _rewrite(root, name, lambda _: True, ds.field(column) != value):
        total += deleted
    return total


def vacuum(root: storage.Root, name: str, keep_s: float) -> int:
    """Remove files that the table did not refer to for ``keep_s``. The number of files."""
    table = delta.Snapshot(root, name).delta
    with storage.translated(storage.join(root, name)):
        removed = table.vacuum(
            retention_hours=int(max(keep_s, VACUUM_LEAST_S) // 3600),
            dry_run=False,
            enforce_retention_duration=False,
            full=True,
        )
    return len(removed)


def purge(root: storage.Root, name: str) -> int:
    """Remove the files that were replaced or deleted, whatever their age. The number of files.

    Files that the table never referred to stay: they may belong to a batch that is about to be committed.
    """
    table = delta.Snapshot(root, name).delta
    with storage.translated(storage.join(root, name)):
        removed = table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    return len(removed)
