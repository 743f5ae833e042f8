"""The history: Parquet files, written exactly once.

    nodes/run=<run>/batch=<n>/part-<p>.parquet     node reports, as received
    rollups/run=<run>/batch=<n>/part-0.parquet     group, zone and system reports, one row for each metric
    alerts/run=<run>/batch=<n>/part-0.parquet      alert changes
    rollups/turn=<n>/day=<date>/…, alerts/turn=…   the same for finished hours and days, joined
    hours/turn=<n>/day=<date>/hour=<hh>/….parquet  node reports of finished hours, deduplicated and sorted
    days/turn=<n>/day=<date>/….parquet             machines by the hour: count, mean, minimum, maximum
    compacted.json                                 inputs and outputs of compaction

A run is the life of one checkpoint, and a batch is one of Spark's micro-batches.  A file appears under its
name atomically, and a batch that is repeated after a crash writes the same rows under the same names.  So
whenever the driver is killed, no row is missing or duplicated.  Compaction lists its inputs before it removes
them, and readers skip listed inputs.

The shards of a batch write at different times.  When all have written, the marker of the run (`BatchMarker`)
names the batch: only then may it be compacted, and a new checkpoint continues only after such batches
(`settle`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from muster.core import errors
from muster.core.reports import columns

NODES, ROLLUPS, ALERTS, HOURS, DAYS = "nodes", "rollups", "alerts", "hours", "days"
SEQUENCE = "stream_sequence"

_DONE = "_done"  # in the folder of a run of node reports; readers of Parquet skip names that begin with _
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BATCH = re.compile(r"run=([^/]+)/batch=(\d+)\Z")


class HistoryFull(errors.LimitExceeded):
    """There is no disk space for the history. The pipeline continues without it, and counts."""

    code = "history-full"


class BatchInventory(msgspec.Struct):
    """Compacted batches of a table that still exist, and the files made from them."""

    batches: list[str] = msgspec.field(default_factory=list)
    files: list[str] = msgspec.field(default_factory=list)


class CompactedFiles(msgspec.Struct):
    version: int = 1
    turns: int = 0
    sequence: int = 0  # the highest stream sequence that was compacted
    batches: list[str] = msgspec.field(default_factory=list)  # run=…/batch=…: compacted, but not removed yet
    hours: list[str] = msgspec.field(default_factory=list)  # files, relative to the history's folder
    days: list[str] = msgspec.field(default_factory=list)
    rollups: BatchInventory = msgspec.field(default_factory=BatchInventory)
    alerts: BatchInventory = msgspec.field(default_factory=BatchInventory)

    def kept(self, kind: str) -> BatchInventory:
        return self.rollups if kind == ROLLUPS else self.alerts


def node_schema() -> pa.Schema:
    return columns.node_schema().append(pa.field(SEQUENCE, pa.int64(), nullable=False))


def batch_folder(root: Path, kind: str, run: str, batch: int) -> Path:
    return root / kind / f"run={run}" / f"batch={batch}"


def write(table: pa.Table, path: Path) -> None:
    """Write ``table`` to ``path`` atomically; `HistoryFull` without disk space.

    Optimized for speed: LZ4, and dictionaries for strings only.  Compaction reduces the size.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh.open("wb") as file:
            words = [field.name for field in table.schema if pa.types.is_string(field.type)]
            pq.write_table(table, file, compression="lz4", use_dictionary=words)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        if error.errno in _FULL or "No space left" in str(error):
            raise HistoryFull(f"no disk space for the history in {path.parent}: {error}") from error
        raise


def compacted(root: Path) -> CompactedFiles:
    try:
        return msgspec.json.decode((root / "compacted.json").read_bytes(), type=CompactedFiles)
    except (FileNotFoundError, NotADirectoryError):
        return CompactedFiles()


def save_compacted(root: Path, inventory: CompactedFiles) -> None:
    fresh = root / f".compacted.json.{os.getpid()}"
    with fresh.open("wb") as file:
        file.write(msgspec.json.encode(inventory))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(root / "compacted.json")


def batches(root: Path, kind: str) -> Iterator[tuple[str, Path]]:
    """The folders of batches, each with its name in `CompactedFiles`."""
    for folder in sorted((root / kind).glob("run=*/batch=*")):
        if match := _BATCH.search(folder.as_posix()):
            yield match[0], folder


class BatchMarker(msgspec.Struct, frozen=True):
    """The last complete batch of a run: its part of the history is final."""

    batch: int  # -1: none yet
    summaries: int  # the last sequence read from the stream of summaries; -1: unknown


def mark_done(root: Path, run: str, marker: BatchMarker) -> None:
    folder = root / NODES / f"run={run}"
    fresh = folder / f".{_DONE}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(marker))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(folder / _DONE)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def done(root: Path, run: str) -> BatchMarker | None:
    """The marker of a run; None if there is none."""
    try:
        return msgspec.json.decode((root / NODES / f"run={run}" / _DONE).read_bytes(), type=BatchMarker)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None


def complete_batches(root: Path, kind: str) -> Iterator[tuple[str, Path]]:
    """Batches that will not be written again: all except the last one of the current run."""
    listed = [(name, folder, *_place(folder)) for name, folder in batches(root, kind)]
    runs = sorted({run for _, _, run, _ in listed})
    marks = {run: done(root, run) for run in runs}
    for name, folder, run, number in listed:
        mark = marks[run]
        if mark is None or number < mark.batch or (number == mark.batch and run != runs[-1]):
            yield name, folder


def settle(root: Path, *, first: int) -> tuple[int, int]:
    """The sequences of reports and summaries after which a new checkpoint has to read.

    An incomplete batch of an ended run is removed, because it is read again, unless the stream of reports,
    which begins at ``first``, no longer contains its messages.  -1: unknown.
    """
    marks = [done(root, path.name.partition("=")[2]) for path in (root / NODES).glob("run=*")]
    for _, folder in list(batches(root, NODES)):
        run, number = _place(folder)
        mark = done(root, run)
        if mark is None or number <= mark.batch:
            continue
        lowest = min((low for path in _parts(folder) for low, _ in _sequences(path)), default=first)
        if lowest >= first:
            shutil.rmtree(folder)
    last = last_sequence(root)
    return last, max((mark.summaries for mark in marks if mark is not None), default=-1 if last else 0)


def files(root: Path, kind: str) -> list[Path]:
    """The files that a reader of this table reads: every row once."""
    done = compacted(root)
    if kind == DAYS:
        return [root / path for path in done.days]
    taken, made = (
        (done.batches, done.hours) if kind == NODES else (done.kept(kind).batches, done.kept(kind).files)
    )
    gone = set(taken)
    fresh = [path for name, folder in batches(root, kind) if name not in gone for path in _parts(folder)]
    return [*(root / path for path in made), *fresh]


def prune(root: Path, *, max_bytes: int, max_age_s: float, now_s: float) -> int:
    """Enforce a budget (0: none) by removing the oldest files. The number of removed files."""
    done = compacted(root)
    listed = [root / path for path in (*done.hours, *done.days, *done.rollups.files, *done.alerts.files)]
    loose = [
        path
        for kind in (NODES, ROLLUPS, ALERTS)
        for _, folder in batches(root, kind)
        for path in _parts(folder)
    ]
    files_ = sorted(
        (stat.st_mtime, stat.st_size, path)
        for path in (*listed, *loose)
        if path.exists() and (stat := path.stat())
    )
    too_much = sum(size for _, size, _ in files_) - max_bytes if max_bytes else 0
    gone: list[Path] = []
    for made_s, size, path in files_:
        if too_much > 0 or (max_age_s and now_s - made_s > max_age_s):
            gone.append(path)
            too_much -= size
    if not gone:
        return 0
    names = {path.relative_to(root).as_posix() for path in gone}
    done.sequence = max(done.sequence, highest(gone))
    done.hours = [path for path in done.hours if path not in names]
    done.days = [path for path in done.days if path not in names]
    for kind in (ROLLUPS, ALERTS):
        done.kept(kind).files = [path for path in done.kept(kind).files if path not in names]
    save_compacted(root, done)  # before they are removed, so that no reader opens them
    for path in gone:
        path.unlink(missing_ok=True)
    return len(gone)


def last_sequence(root: Path) -> int:
    """The highest stream sequence in the node history; 0 if it is empty."""
    return max(compacted(root).sequence, highest(files(root, NODES)))


def highest(paths: Iterable[Path]) -> int:
    return max((high for path in paths for _, high in _sequences(path)), default=0)


def _sequences(path: Path) -> Iterator[tuple[int, int]]:
    """The lowest and the highest stream sequence of each row group."""
    with pq.ParquetFile(path) as file:
        if file.schema_arrow.get_field_index(SEQUENCE) < 0:
            return
        for number in range(file.metadata.num_row_groups):
            # Statistics are stored by leaf; the last leaf is the last column, the sequence.
            group = file.metadata.row_group(number)
            statistics = group.column(group.num_columns - 1).statistics
            if statistics is not None and statistics.has_min_max:
                yield int(statistics.min), int(statistics.max)


def _place(folder: Path) -> tuple[str, int]:
    """The run and the number of a batch's folder."""
    return folder.parent.name.partition("=")[2], int(folder.name.partition("=")[2])


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))
