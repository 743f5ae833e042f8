"""Group and system reports from recent node reports, without Spark. Pure.

The pipeline computes these reports for fleets of any size and with history.  This module serves small fleets
and domains without a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from muster.core import messages
from muster.core.reports import columns
from muster.monitor.channel import interpreters

STALE_AFTER_PERIODS = 2.5


def latest(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """The last report of each machine.

    Batches are in the order of the stream.  For each machine the boot that appears last is used, and its
    highest sequence.  Boot numbers are not compared, because the clock of a machine may have been corrected.
    """
    table = pa.Table.from_batches(list(batches), schema=columns.node_schema())
    if not table.num_rows:
        return table
    table = table.combine_chunks()
    machine = table.column("machine").combine_chunks().dictionary_encode().indices.to_numpy()
    boot, sequence = (table.column(name).to_numpy() for name in ("boot", "sequence"))
    _, first_row, run = np.unique(np.stack([machine, boot]), axis=1, return_index=True, return_inverse=True)
    order = np.lexsort((sequence, first_row[run.ravel()], machine))
    is_last = np.r_[machine[order][:-1] != machine[order][1:], True]
    return table.take(order[is_last])


def group_reports(nodes: pa.Table, *, from_ms: int, to_ms: int) -> list[columns.GroupReport]:
    """Reports of all groups, from the latest report of each machine. Stale machines are only counted."""
    reports = []
    for group in sorted(pc.unique(nodes.column("group")).to_pylist()):
        members = nodes.filter(pc.equal(nodes.column("group"), group))
        reports.append(columns.GroupReport(group=group, **_rolled(members, from_ms, to_ms)))
    return reports


def system_report(nodes: pa.Table, *, from_ms: int, to_ms: int) -> columns.SystemReport:
    groups = tuple(group_reports(nodes, from_ms=from_ms, to_ms=to_ms))
    return columns.SystemReport(groups=groups, **_rolled(nodes, from_ms, to_ms))


def _rolled(nodes: pa.Table, from_ms: int, to_ms: int) -> dict[str, Any]:
    reported_ms = pc.divide(nodes.column("reported_at").cast(pa.int64()), 1000)
    age_s = pc.divide(pc.subtract(pa.scalar(to_ms), reported_ms).cast(pa.float64()), 1000.0)
    is_stale = pc.greater(age_s, pc.multiply(nodes.column("period_s"), STALE_AFTER_PERIODS))
    fresh = nodes.filter(pc.invert(is_stale))
    merged: dict[str, interpreters.MetricSummary] = {}
    for (_, _, metric), summary in interpreters.summarise(fresh).items():
        merged.setdefault(metric, interpreters.MetricSummary()).merge(summary)
    states = pc.value_counts(fresh.column("state")).to_pylist() if fresh.num_rows else []
    return {
        "from_ms": from_ms,
        "to_ms": to_ms,
        "machines": nodes.num_rows,
        "reports": nodes.num_rows,
        "stale": nodes.num_rows - fresh.num_rows,
        "states": {entry["values"]: entry["counts"] for entry in states},
        "metrics": {
            name: summary.rollup() for name, summary in merged.items() if name != interpreters.ALL_REPORTS
        },
        "oldest_ms": pc.min(reported_ms).as_py(),
        "partial": bool(pc.any(nodes.column("partial")).as_py()),
    }


def node(nodes: pa.Table, machine: str) -> messages.NodeReport | None:
    rows = nodes.filter(pc.equal(nodes.column("machine"), machine))
    return columns.from_batch(rows.combine_chunks().to_batches()[0])[-1] if rows.num_rows else None
