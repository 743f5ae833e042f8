"""Fast conversion of single reports to columns.

The usual report (JSON, standard metrics only) is decoded into a struct with a field for each metric, and a
thousand structs are transposed into columns.  This takes half the time of a dictionary for each report.
Longer reports have other metrics, too: they are decoded into a struct with a dictionary of metrics, and the
metrics of all of them are transposed together.  Other reports (fields of a later version, MessagePack,
invalid data) are decoded by `messages.decode`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
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


class WideReportRow(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    gc=False,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="node-report/1",
):
    """The same with any metrics."""

    machine: messages.Name
    group: messages.Name = "default"
    zone: messages.Name = "default"
    boot: messages.Count = 0
    sequence: messages.Count
    at_ms: messages.TimeMs
    period_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    dropped: messages.Count = 0
    metrics: messages.Metrics = {}
    services: Annotated[tuple[messages.ServiceReport, ...], msgspec.Meta(max_length=256)] = ()


class _Other(msgspec.Struct, tag_field="kind", tag="other/0"):
    """Makes the decoder require a kind, which it does only for unions."""


_decoder = msgspec.json.Decoder(ReportRow | _Other)
_wide_decoder = msgspec.json.Decoder(WideReportRow | _Other)
_astuple = msgspec.structs.astuple
_LONG = 520  # bytes: with standard metrics only, reports are shorter
_STANDARD = {name: number for number, name in enumerate(reports_columns.STANDARD_METRICS)}


def decode(data: bytes) -> ReportRow | WideReportRow | messages.NodeReport:
    """The report in one of its forms. Errors are those of `messages.decode`."""
    for decoder in (_wide_decoder,) if len(data) > _LONG else (_decoder, _wide_decoder):
        try:
            row = decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, messages.MalformedMessage):
            continue  # decoded or rejected below
        if isinstance(row, ReportRow):
            return row
        # An infinity remains one in the sum.
        if isinstance(row, WideReportRow) and math.isfinite(sum(row.metrics.values())):
            return row
    return messages.decode(data, messages.NodeReport, max_bytes=len(data))


def to_batch(rows: Sequence[ReportRow]) -> pa.RecordBatch:
    """As `columns.to_batch`, for rows in the fast form."""
    columns = _transposed(rows, ReportRow)
    columns |= zip(
        reports_columns.STANDARD_METRICS, zip(*map(_astuple, columns["metrics"]), strict=True), strict=True
    )
    columns["extra"] = pa.nulls(len(rows), reports_columns.node_schema().field("extra").type)
    return _batch(columns, len(rows))


def wide_to_batch(rows: Sequence[WideReportRow]) -> pa.RecordBatch:
    """The same, with any metrics."""
    columns = _transposed(rows, WideReportRow)
    metrics: tuple[dict[str, float], ...] = columns["metrics"]
    row = np.repeat(np.arange(len(rows)), [len(values) for values in metrics])
    names = pa.array(list(itertools.chain.from_iterable(metrics)), pa.string()).dictionary_encode()
    values = np.array(list(itertools.chain.from_iterable(map(dict.values, metrics))), np.float64)
    number = np.array([_STANDARD.get(name, -1) for name in names.dictionary.to_pylist()], np.int64)
    standard = number[names.indices.to_numpy()]
    for place, name in enumerate(reports_columns.STANDARD_METRICS):
        at = np.flatnonzero(standard == place)
        column, unknown = np.zeros(len(rows)), np.ones(len(rows), np.bool_)
        column[row[at]], unknown[row[at]] = values[at], False
        columns[name] = pa.array(column, mask=unknown)
    other = np.flatnonzero(standard < 0)
    sizes = np.bincount(row[other], minlength=len(rows))
    offsets = pa.array(np.r_[0, np.cumsum(sizes)].astype(np.int32), mask=np.r_[sizes == 0, False])
    columns["extra"] = pa.MapArray.from_arrays(
        offsets, names.take(pa.array(other)).dictionary_decode(), pa.array(values[other])
    )
    return _batch(columns, len(rows))


def _transposed(rows: Sequence[Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    names = kind.__struct_fields__
    return dict(zip(names, zip(*map(_astuple, rows), strict=True), strict=True))


def _batch(columns: dict[str, Any], rows: int) -> pa.RecordBatch:
    services = columns["services"]
    columns["reported_at"] = pc.multiply(pa.array(columns["at_ms"], pa.int64()), 1000)
    if any(services):
        columns["state"] = [reports_columns.worst_state(row_services) for row_services in services]
        columns["services"] = [reports_columns.service_rows(row_services) for row_services in services]
    else:
        columns["state"] = pa.repeat("up", rows)
        columns["services"] = pa.nulls(rows, reports_columns.node_schema().field("services").type)
    columns["partial"] = pa.repeat(pa.scalar(False), rows)
    arrays = [
        column.cast(field.type)
        if isinstance(column := columns[field.name], pa.Array)
        else pa.array(column, field.type)
        for field in reports_columns.node_schema()
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=reports_columns.node_schema())
