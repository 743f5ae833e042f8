"""Rows of Spark from the shards to the driver: what a shard did, and closed windows to be added up.

A shard gives a row of the kind `SHARD`, and one of the kind `WINDOW` for each closed window, scope and part
of the names of groups.  Few windows are added up by the driver.  Of many, Spark groups the rows by part, and
executors merge them (`merge_parts`): they write the rows of `groups` to data files, encode the reports, and
give the driver one row of the kind `PART`.  Only the driver makes any of that visible: it commits the files
and publishes the reports, with its epoch (decision 50).

The cells of a row are packed arrays: a column for each of their hundreds of numbers would take Java longer
than all other work on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from muster.core import errors
from muster.pipeline import steps
from muster.pipeline.fleet import merged, state
from muster.pipeline.history import data_files, rollup_rows, storage, tables
from muster.pipeline.source import piece_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SHARD, WINDOW, PART = "shard", "window", "part"
#: Figures of a shard for those who watch the query.
SUMMED = ("reports", "late", "repeated", "future", "machines")
#: ``part``: the key of one of Spark's groups; ``data``: cells of a window, a `state.ShardOutput` or a
#: `merged.MergedPart`, or ``file``, which has it.
SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("part", pa.int32()),
        ("shard", pa.int32()),
        ("scope", pa.string()),
        ("from_ms", pa.int64()),
        ("width_ms", pa.int64()),
        ("gone", pa.bool_()),
        ("names", pa.list_(pa.string())),
        ("known", pa.list_(pa.int64())),
        ("stale", pa.list_(pa.int64())),
        ("data", pa.binary()),
        ("file", pa.string()),
        *((name, pa.int64()) for name in (*SUMMED, "lag_ms")),
    ]
)
#: Columns that are fields of a window.
_TYPED = [name for name in state.ClosedWindow.__struct_fields__ if name != "cells"]
MERGED_BY_DRIVER = 5000  # shares of groups in a batch: for fewer, a further step of Spark costs too much
NOT_STORED = "rollups-not-in-history"  # counter: rows
HISTORY_FULL, HISTORY_FAILED = "history-full", "history-failed"  # times


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The constants of merging: plain data, because it is sent to the executors."""

    parts: tuple[int, ...] = (0,)  # keys of the parts
    top: int = 10
    steps: tuple[steps.StepCode, ...] = ()
    history: str = ""
    folder: str = ""  # for files that pass rows by Java; see `piece_files`

    def is_by_executors(self, shares: int) -> bool:
        """``shares``: of groups, in the last batch that closed windows; 0: not known yet. Rows that do not
        pass by Java may be too many for the driver in the first batch already."""
        return not self.folder or shares > MERGED_BY_DRIVER


def explain_failure(error: Exception) -> str:
    """The counter of a failed write to the history."""
    return HISTORY_FULL if isinstance(error, storage.HistoryFull) else HISTORY_FAILED


def content(folder: str, data: bytes) -> dict[str, Any]:
    """The columns with the content of a row."""
    return {"data": None, "file": piece_files.write_bytes(folder, data)} if folder else {"data": data}


def of_windows(closed: Iterable[state.ClosedWindow], shard: int, plan: MergePlan) -> list[dict[str, Any]]:
    encode = msgspec.msgpack.encode
    return [
        {
            "kind": WINDOW,
            "part": plan.parts[number],
            "shard": shard,
            **{name: getattr(window, name) for name in _TYPED},
            **content(plan.folder, encode(window.table().pack())),
        }
        for number, window in merged.divided(closed, len(plan.parts))
    ]


def read_window(row: Any) -> state.ClosedWindow:
    cells = msgspec.msgpack.decode(read_content(row))
    return state.ClosedWindow(cells=cells, **{name: row[name] for name in _TYPED})


def read_content(row: Any) -> bytes:
    return piece_files.take_bytes(row["file"]) if row["file"] else bytes(row["data"])


def merge(closed: Iterable[state.ClosedWindow], plan: MergePlan) -> tuple[merged.MergedPart, pa.Table | None]:
    """Add up the windows of a part, and run the user's steps for groups. With the rows of `groups`."""
    totals, part = merged.merge(closed, plan.top)
    remaining = [many for many in totals if not many.gone]
    part.faults = dict(steps.extend_groups(plan.steps, remaining))
    part.windows = merged.described(totals)
    return part, rollup_rows.rows(remaining) if remaining else None


def merge_parts(frame: DataFrame, plan: MergePlan, stem: str) -> DataFrame:
    """The rows with windows merged by the executors; all others as they are."""
    return frame.groupBy("part").applyInArrow(merger(plan, stem), frame.schema)


def merger(plan: MergePlan, stem: str) -> Callable[[tuple[pa.Scalar, ...], pa.Table], pa.Table]:
    def merge_part(key: tuple[pa.Scalar, ...], rows: pa.Table) -> pa.Table:
        listed = rows.to_pylist()
        windows = [read_window(row) for row in listed if row["kind"] == WINDOW]
        others = [row for row in listed if row["kind"] != WINDOW]
        if windows:
            number = key[0].as_py()
            made, written = merge(windows, plan)
            if written is not None:
                _write(made, written, plan.history, f"{stem}-{number}")
            data = msgspec.msgpack.encode(made)
            others.append({"kind": PART, "part": number, **content(plan.folder, data)})
        return pa.Table.from_pylist(others, schema=SCHEMA)

    return merge_part


def _write(part: merged.MergedPart, rows: pa.Table, root: str, stem: str) -> None:
    try:
        part.files = data_files.write(root, tables.GROUPS, rows, stem).files
    except (errors.MusterError, OSError) as error:
        part.counts = {NOT_STORED: rows.num_rows, explain_failure(error): 1}


@dataclass(slots=True)
class BatchRows:
    """What the driver receives of a batch."""

    outputs: list[state.ShardOutput]
    parts: list[merged.MergedPart] = field(default_factory=list)
    rows: pa.Table | None = None  # of `groups`, if the driver merged the windows

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for reasons in (*(made.counts for made in self.outputs), *(part.counts for part in self.parts)):
            for reason, count in reasons.items():
                counts[reason] = counts.get(reason, 0) + count
        return counts

    def faults(self) -> dict[str, str]:
        """Of a user's steps."""
        known: dict[str, str] = {}
        for faults in (*(made.faults for made in self.outputs), *(part.faults for part in self.parts)):
            known |= faults
        return known

    def shares(self) -> int:
        """At most so many shares of groups were merged."""
        names = sum(len(window.names) for part in self.parts for window in part.windows)
        return names * len(self.outputs)


def read(rows: Sequence[Any], plan: MergePlan) -> BatchRows:
    """Rows of a batch; windows that no executor has merged are merged here."""
    outputs, parts, windows = [], [], []
    for row in rows:
        match row["kind"]:
            case kind if kind == WINDOW:
                windows.append(read_window(row))
            case kind if kind == PART:
                parts.append(msgspec.msgpack.decode(read_content(row), type=merged.MergedPart))
            case _:
                outputs.append(msgspec.msgpack.decode(read_content(row), type=state.ShardOutput))
    stored = None
    if windows:
        part, stored = merge(windows, plan)
        parts.append(part)
    return BatchRows(outputs, parts, stored)
