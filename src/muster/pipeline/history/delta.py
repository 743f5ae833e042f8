"""Delta Lake tables through delta-rs: transactions, schema evolution, and snapshots for readers.

A commit names its transaction: the identity of the checkpoint and the number of the batch.  A batch that is
repeated after a crash finds its number in the table and commits nothing.  The check and the commit use the
same handle without a refresh in between: if another process committed the same transaction meanwhile, the
commit fails.  There is no transaction over several tables.

The pipeline's driver stores its epoch in the same way: a driver claims an epoch that is higher than that of
any before, and a commit with a lower one is refused.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction
from deltalake.transaction import AddAction, RemoveAction

from muster.core import errors, files
from muster.pipeline.history import data_files, storage, tables

HOURS_KEY = "muster.hours"  # in the metadata of a commit: the hours of its rows
VERSION_KEY = "muster.schemaVersion"
LOG_DAYS = 1  # that the log is kept longer than replaced files
PRECISION = datetime.timedelta(milliseconds=1)  # of statistics in the log
DRIVER = "driver"  # application of the transaction whose version is the epoch of the driver
REWRITE = "rewrite"  # application of the transactions that replace files
ATTEMPTS = 5
REPLACE_ATTEMPTS = 20


class SchemaConflict(errors.Conflict):
    """A table has a column of another type than this version of Muster writes."""

    code = "history-schema"


class HistoryTable:
    """A table for writing: created if it does not exist, with the columns of this version."""

    def __init__(self, root: storage.Root, name: str, *, keep_s: float = 7 * 86400.0) -> None:
        self.name = name
        self.root = storage.normalize(root)
        self._definition = tables.definition(name)
        self._url = storage.delta_url(root, name)
        self._folder = storage.local_path(self._url)
        with storage.translated(self._url):
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._table = DeltaTable.create(
                self._url,
                Schema.from_arrow(self._definition.schema),
                mode="ignore",
                partition_by=[tables.DAY],
                name=name,
                description=self._definition.description,
                configuration=self._properties(keep_s),
                raise_if_key_not_exists=False,
            )
            self._table.update_incremental()
            _check_version(self._table, self._url)
            self._evolve()
            self._set_properties(keep_s)

    @property
    def delta(self) -> DeltaTable:
        return self._table

    def version(self) -> int:
        return int(self._table.version())

    def refresh(self) -> None:
        with storage.translated(self._url):
            self._table.update_incremental()

    def transaction_version(self, application: str) -> int | None:
        return self._table.transaction_version(application)

    def has(self, application: str, version: int) -> bool:
        """Whether it has a transaction, or a later one of the same application."""
        self.refresh()
        last = self.transaction_version(application)
        return last is not None and last >= version

    def commit(
        self,
        new_files: Iterable[data_files.DataFile],
        transaction: tuple[str, int],
        positions: Mapping[str, int] | None = None,
        *,
        epoch: int | None = None,
    ) -> bool:
        """Add the files, unless the transaction is in the table already. Whether they were added.

        ``transaction``: its application and version.  ``positions``: further versions, stored with it.
        ``epoch``: of the driver; `errors.StaleEpoch` if a later driver claimed the table.
        """
        listed = list(new_files)
        for attempt in range(ATTEMPTS):
            try:
                return self._commit(listed, transaction, positions or {}, epoch)
            except storage.ConcurrentChange:
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError

    def claim(self, epoch: int) -> None:
        """Refuse the commits of drivers with a lower epoch. `errors.StaleEpoch` if it is not the highest."""
        self.refresh()
        current = self.transaction_version(DRIVER) or 0
        if current >= epoch:
            raise _stale(epoch, current)
        self._write([], [Transaction(DRIVER, epoch)], [])

    def _commit(
        self,
        listed: list[data_files.DataFile],
        transaction: tuple[str, int],
        positions: Mapping[str, int],
        epoch: int | None,
    ) -> bool:
        self.refresh()
        current = self.transaction_version(DRIVER) or 0
        if epoch is not None and current > epoch:
            raise _stale(epoch, current)
        application, version = transaction
        last = self._table.transaction_version(application)
        if last is not None and last >= version:
            return False
        stored = [Transaction(application, version)]
        if epoch is not None:
            stored.append(Transaction(DRIVER, epoch))
        for name, position in positions.items():
            if position != self._table.transaction_version(name):  # lower ones follow restored streams
                stored.append(Transaction(name, position))
        hours = sorted({hour for file in listed for hour in file.hours})
        self._write(_additions(listed), stored, hours)
        return True

    def replace(
        self,
        removed: Iterable[TableFile],
        added: Iterable[data_files.DataFile],
        hours: Iterable[int] = (),
        *,
        changes: bool = True,
    ) -> None:
        """Replace files in one transaction. ``hours``: of rows that are not in the table any more;
        ``changes``: False if the rows are the same, so that those who follow the table pass over them.

        `storage.ConcurrentChange` if another process replaced files since this handle was opened, which must
        be as old as the list of files.  delta-rs accepts the removal of files that a compaction has merged
        meanwhile, so the files are compared before the commit, and the commit must be the next version.
        Its own rewriting operations are not used: they store text in a form that Arrow cannot filter.
        """
        now_ms = _now_ms()
        removals = {
            file.path: RemoveAction(
                file.path,
                changes,
                now_ms,
                size=file.size,
                partition_values={tables.DAY: file.day.isoformat()},
            )
            for file in removed
        }
        additions = _additions(added, changes=changes)
        before = self.transaction_version(REWRITE) or 0
        for attempt in range(REPLACE_ATTEMPTS):
            self.refresh()
            present = {file.path for file in self.snapshot().files}
            if (self.transaction_version(REWRITE) or 0) != before or removals.keys() - present:
                raise storage.ConcurrentChange(f"{self._url}: files were replaced by another process")
            stored = [Transaction(REWRITE, before + 1)]
            try:
                self._write([*removals.values(), *additions], stored, sorted(hours), retries=0)
                return
            except storage.ConcurrentChange:  # such as a batch of the pipeline
                if attempt == REPLACE_ATTEMPTS - 1:
                    raise

    def _write(
        self,
        actions: list[Any],
        stored: list[Transaction],
        hours: Iterable[int],
        *,
        retries: int | None = None,
    ) -> None:
        with storage.translated(self._url):
            self._table.create_write_transaction(
                actions,
                "append",
                self._table.schema(),
                [tables.DAY],
                commit_properties=CommitProperties(
                    app_transactions=stored,
                    custom_metadata={HOURS_KEY: " ".join(map(str, hours))},
                    max_commit_retries=retries,
                ),
            )
            self.sync()

    def snapshot(self) -> Snapshot:
        """The table as this handle knows it."""
        return Snapshot(self.root, self.name, table=self._table)

    def sync(self) -> None:
        """Make the last commits of a local table durable: delta-rs does not sync its log."""
        if self._folder is None:
            return
        log = self._folder / "_delta_log"
        before = self.version()
        self._table.update_incremental()
        for version in range(before + 1, self.version() + 1):
            _sync_file(log / f"{version:020}.json")
        files.sync_folder(log)

    def _evolve(self) -> None:
        """Add the columns that an older version of Muster did not write."""
        stored = pa.schema(self._table.schema().to_arrow())
        missing = []
        for column in self._definition.columns:
            place = stored.get_field_index(column.name)
            if place < 0:
                missing.append(column.name)
            elif not _same_type(stored.field(place).type, column.type):
                raise SchemaConflict(
                    f"the column {column.name} of {self._url} has the type {stored.field(place).type}, "
                    f"this version writes {column.type}",
                    hint="move the table away, or use another history_dir",
                )
        if missing:
            fields = Schema.from_arrow(self._definition.schema).fields
            self._table.alter.add_columns(
                [Field(field.name, field.type, nullable=True) for field in fields if field.name in missing]
            )
            self._table.update_incremental()

    def _properties(self, keep_s: float) -> dict[str, str | None]:
        hours = int(keep_s // 3600) + 24 * LOG_DAYS
        return {
            "delta.logRetentionDuration": f"interval {hours} hours",
            "delta.deletedFileRetentionDuration": f"interval {hours} hours",
            "delta.dataSkippingNumIndexedCols": str(self._definition.indexed),
            VERSION_KEY: tables.VERSION,
        }

    def _set_properties(self, keep_s: float) -> None:
        current = self._table.metadata().configuration
        changed = {
            name: value
            for name, value in self._properties(keep_s).items()
            if value is not None and current.get(name) != value
        }
        if changed:
            self._table.alter.set_table_properties(changed, raise_if_not_exists=False)
            self._table.update_incremental()


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of a snapshot. Times are bounds: a value may be up to a millisecond later than ``until``."""

    path: str
    size: int
    rows: int
    day: datetime.date
    since: datetime.datetime | None
    until: datetime.datetime | None


class Snapshot:
    """A table at one moment, for reading. Later commits do not change it."""

    def __init__(
        self,
        root: storage.Root,
        name: str,
        *,
        as_of: datetime.datetime | int | None = None,
        table: DeltaTable | None = None,
    ) -> None:
        self.root = storage.normalize(root)
        self.name = name
        self._definition = tables.definition(name)
        url = storage.delta_url(root, name)
        with storage.translated(url):
            if table is None and not DeltaTable.is_deltatable(url):
                raise errors.NotFound(
                    f"the history in {storage.join(root)} has no table {name}",
                    hint="the pipeline writes it after the first full hour"
                    if name == tables.HOURLY
                    else "`muster run pipeline` writes it",
                )
            self.delta = table or DeltaTable(url)
            if as_of is not None:
                self.delta.load_as_version(as_of)
            _check_version(self.delta, url)
            self.schema: pa.Schema = pa.schema(self.delta.schema().to_arrow())

    @property
    def time(self) -> str:
        return self._definition.time

    @cached_property
    def files(self) -> list[TableFile]:
        """The files of the snapshot, those with the oldest rows first."""
        adds = pa.table(self.delta.get_add_actions(flatten=True))
        names = ("path", "size_bytes", "num_records", f"partition.{tables.DAY}")
        bounds = (f"min.{self.time}", f"max.{self.time}")
        present = set(adds.column_names)
        listed = [
            adds.column(name).to_pylist() if name in present else [None] * adds.num_rows
            for name in (*names, *bounds)
        ]
        made = [
            TableFile(path, size, rows or 0, day, since, until)
            for path, size, rows, day, since, until in zip(*listed, strict=True)
        ]
        return sorted(made, key=lambda file: (file.day, str(file.since), file.path))

    def files_between(self, from_ms: int | None, to_ms: int | None) -> list[TableFile]:
        """The files that may contain rows of a period."""
        return [
            file
            for file in self.files
            if (from_ms is None or file.until is None or ms_of(file.until + PRECISION) >= from_ms)
            and (to_ms is None or file.since is None or ms_of(file.since) < to_ms)
            and (from_ms is None or ms_of(_end_of(file.day)) > from_ms)
            and (to_ms is None or ms_of(start_of(file.day)) < to_ms)
        ]

    def dataset(self, selected: Sequence[TableFile] | None = None) -> ds.Dataset:
        """A pyarrow dataset of some or all files."""
        form = ds.ParquetFileFormat()
        store = storage.filesystem(self.delta.table_uri)
        fragments = [
            form.make_fragment(file.path, filesystem=store, partition_expression=self._guarantee(file))
            for file in (self.files if selected is None else selected)
        ]
        return ds.FileSystemDataset(fragments, nullable(self.schema), form, store)

    def _guarantee(self, file: TableFile) -> ds.Expression:
        """What holds for all rows of a file: readers skip files by it."""
        holds = ds.field(tables.DAY) == pa.scalar(file.day)
        if file.since is not None and file.until is not None:
            kind = self.schema.field(self.time).type
            holds &= ds.field(self.time) >= pa.scalar(file.since, kind)
            holds &= ds.field(self.time) <= pa.scalar(file.until + PRECISION, kind)
        return holds


def _check_version(table: DeltaTable, url: str) -> None:
    """Columns may be added; a table with another first number has other columns or types."""
    stored = table.metadata().configuration.get(VERSION_KEY) or tables.VERSION
    if stored.partition(".")[0] != tables.VERSION.partition(".")[0]:
        raise SchemaConflict(
            f"the table {url} has the schema version {stored}, this version of Muster uses {tables.VERSION}",
            hint="use the version of Muster that wrote it, or another history_dir",
        )


def _additions(listed: Iterable[data_files.DataFile], *, changes: bool = True) -> list[Any]:
    now_ms = _now_ms()
    return [
        AddAction(file.path, file.size, {tables.DAY: file.day}, now_ms, changes, file.statistics)
        for file in listed
    ]


def _stale(epoch: int, current: int) -> errors.StaleEpoch:
    return errors.StaleEpoch(
        f"the history has commits of a later driver, with the epoch {current}", epoch=epoch, current=current
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def exists(root: storage.Root, name: str) -> bool:
    url = storage.delta_url(root, name)
    with storage.translated(url):
        return bool(DeltaTable.is_deltatable(url))


def position(root: storage.Root, name: str, application: str) -> int | None:
    """The version of a transaction; None if the table has none."""
    if not exists(root, name):
        return None
    url = storage.delta_url(root, name)
    with storage.translated(url):
        return DeltaTable(url).transaction_version(application)


def nullable(schema: pa.Schema) -> pa.Schema:
    """Rows of an evolved table may lack columns that are required in new rows: readers accept NULL."""
    return pa.schema([field.with_nullable(True) for field in schema])


def _same_type(first: pa.DataType, other: pa.DataType) -> bool:
    return str(Schema.from_arrow(pa.schema([("x", first)])).to_json()) == str(
        Schema.from_arrow(pa.schema([("x", other)])).to_json()
    )


def _sync_file(path: Path) -> None:
    try:
        files.sync_file(path)
    except FileNotFoundError:  # the log was cleaned up
        return


def start_of(day: datetime.date) -> datetime.datetime:
    return datetime.datetime.combine(day, datetime.time(), datetime.UTC)


def _end_of(day: datetime.date) -> datetime.datetime:
    return start_of(day) + datetime.timedelta(days=1) if day < datetime.date.max else start_of(day)


def ms_of(moment: datetime.datetime) -> int:
    return (moment - datetime.datetime.fromtimestamp(0, datetime.UTC)) // datetime.timedelta(milliseconds=1)
