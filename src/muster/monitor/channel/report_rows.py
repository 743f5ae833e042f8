"""Fast conversion of single reports to columns.

The usual report (JSON, standard metrics only) is decoded into a struct with a field for each metric, and a
thousand structs are transposed into columns.  This takes half the time of a dictionary for each
report.  Other reports (additional metrics, fields of a later version, MessagePack, invalid data) are decoded
by `messages.decode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from muster.core import messages
from muster.core.reports import columns as reports_columns

# Not tracked by the garbage collector, because they cannot be part of a reference cycle.
Metrics = msgspec.defstruct(
    "Metrics",
    [(name, float | None, None) for name in reports_columns.STANDARD_METRICS],
    frozen=True,
    gc=False,
    forbid_unknown_fields=True,
)
NO_METRICS = Metrics()


class ReportRow(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    gc=False,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="node-report/1",
):
    """A node report with standard metrics only. The fields are those of `messages.NodeReport`."""

    machine: messages.Name
    group: messages.Name = "default"
    zone: messages.Name = "default"
    boot: messages.Count = 0
    sequence: messages.Count
    at_ms: messages.TimeMs
    period_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    dropped: messages.Count = 0
    metrics: Metrics = NO_METRICS  # type: ignore[valid-type]
    services: Annotated[tuple[messages.ServiceReport, ...], msgspec.Meta(max_length=256)] = ()


class _Other(msgspec.Struct, tag_field="kind", tag="other/0"):
    """Makes the decoder require a kind, which it does only for unions."""


_decoder = msgspec.json.Decoder(ReportRow | _Other)
_astuple = msgspec.structs.astuple


def decode(data: bytes) -> ReportRow | messages.NodeReport:
    """The report in either form. Errors are those of `messages.decode`."""
    try:
        row = _decoder.decode(data)
        if isinstance(row, ReportRow):
            return row
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, messages.MalformedMessage):
        pass  # decoded or rejected below
    return messages.decode(data, messages.NodeReport, max_bytes=len(data))


def to_batch(rows: Sequence[ReportRow]) -> pa.RecordBatch:
    """As `columns.to_batch`, for rows in the fast form."""
    names = ReportRow.__struct_fields__
    columns: dict[str, Any] = dict(zip(names, zip(*map(_astuple, rows), strict=True), strict=True))
    columns |= zip(
        reports_columns.STANDARD_METRICS, zip(*map(_astuple, columns["metrics"]), strict=True), strict=True
    )
    services = columns["services"]
    columns["reported_at"] = pc.multiply(pa.array(columns["at_ms"], pa.int64()), 1000)
    if any(services):
        columns["state"] = [reports_columns.worst_state(row_services) for row_services in services]
        columns["services"] = [reports_columns.service_rows(row_services) for row_services in services]
    else:
        columns["state"] = pa.repeat("up", len(rows))
        columns["services"] = pa.nulls(len(rows), reports_columns.node_schema().field("services").type)
    columns["partial"] = pa.repeat(pa.scalar(False), len(rows))
    columns["extra"] = pa.nulls(len(rows), reports_columns.node_schema().field("extra").type)
    arrays = [
        column.cast(field.type)
        if isinstance(column := columns[field.name], pa.Array)
        else pa.array(column, field.type)
        for field in reports_columns.node_schema()
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=reports_columns.node_schema())
