"""Fast conversion of single reports to columns.

The usual report (JSON, standard metrics only) is decoded into a struct with a field for each metric, and a
thousand structs are transposed into columns.  This takes half the time of a dictionary for each report.
Longer reports have other metrics, too: they are decoded into a struct with a dictionary of metrics, and from
the second report of a machine on into a struct with a field for each (`ReportShapes`).  Other reports (fields
of a later version, MessagePack, invalid data) are decoded by `messages.decode`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

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
    """The fields of `messages.NodeReport`, without metrics."""

    machine: messages.Name
    group: messages.Name = "default"
    zone: messages.Name = "default"
    boot: messages.Count = 0
    sequence: messages.Count
    at_ms: messages.TimeMs
    period_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    dropped: messages.Count = 0
    services: Annotated[tuple[messages.ServiceReport, ...], msgspec.Meta(max_length=256)] = ()


class StandardReportRow(ReportRow, frozen=True, kw_only=True, gc=False, tag="node-report/1"):
    """A report with standard metrics only."""

    metrics: Metrics = NO_METRICS  # type: ignore[valid-type]


class WideReportRow(ReportRow, frozen=True, kw_only=True, gc=False, tag="node-report/1"):
    """A report with any metrics."""

    metrics: messages.Metrics = {}

    def named(self) -> tuple[tuple[str, ...], tuple[float, ...]]:
        return tuple(self.metrics), tuple(self.metrics.values())


class ShapedReportRow(ReportRow, frozen=True, kw_only=True, gc=False, tag="node-report/1"):
    """A report whose metrics have known names: each `ReportShapes` derives a class for these names."""

    names: ClassVar[tuple[str, ...]]
    metrics: Any

    def named(self) -> tuple[tuple[str, ...], tuple[float, ...]]:
        return self.names, _astuple(self.metrics)


AnyReport = StandardReportRow | WideReportRow | ShapedReportRow | messages.NodeReport


class _Other(msgspec.Struct, tag_field="kind", tag="other/0"):
    """Makes the decoder require a kind, which it does only for unions."""


_decoder = msgspec.json.Decoder(StandardReportRow | _Other)
_wide_decoder = msgspec.json.Decoder(WideReportRow | _Other)
_astuple = msgspec.structs.astuple
_LONG = 520  # bytes: with standard metrics only, reports are shorter
_HEAD = b'{"kind":"node-report/1","machine":"'  # as `messages.encode` writes it
_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, messages.MalformedMessage)
_STANDARD = {name: number for number, name in enumerate(reports_columns.STANDARD_METRICS)}
SHAPES_MAX = 256
_PLAIN = re.compile(r"[\w.:/-]+", re.ASCII)  # msgspec refuses some other names of fields


class ReportShapes:
    """Decodes reports, and remembers which metrics each machine reports.

    Most machines report the same metrics each time: a struct with a field for each takes a third of the time
    of a dictionary.  A report that does not fit is decoded as any other.  Both tables are bounded.
    """

    def __init__(self, machines_max: int) -> None:
        self._machines_max = machines_max
        self._decoders: dict[tuple[str, ...], msgspec.json.Decoder[Any]] = {}
        self._of_machine: dict[bytes, msgspec.json.Decoder[Any]] = {}

    def decode(self, data: bytes) -> AnyReport:
        """Errors are those of `messages.decode`."""
        if len(data) <= _LONG or not data.startswith(_HEAD):
            return decode(data)
        machine = data[len(_HEAD) : data.find(b'"', len(_HEAD))]
        decoder = self._of_machine.get(machine)
        if decoder is not None:
            try:
                row: ShapedReportRow = decoder.decode(data)
                if math.isfinite(sum(_astuple(row.metrics))):
                    return row
            except _ERRORS:
                pass  # other metrics than before, or rejected below
        any_row = decode(data)
        if isinstance(any_row, WideReportRow):
            self._remember(machine, tuple(any_row.metrics))
        return any_row

    def _remember(self, machine: bytes, names: tuple[str, ...]) -> None:
        if names not in self._decoders:
            if len(self._decoders) >= SHAPES_MAX or not all(map(_PLAIN.fullmatch, names)):
                return
            self._decoders[names] = _shaped_decoder(names)
        if len(self._of_machine) >= self._machines_max:
            self._of_machine.clear()
        self._of_machine[machine] = self._decoders[names]


def _shaped_decoder(names: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    fields = {f"m{number}": name for number, name in enumerate(names)}
    metrics = msgspec.defstruct(
        "ShapedMetrics",
        [(field, float) for field in fields],
        frozen=True,
        gc=False,
        forbid_unknown_fields=True,
        rename=fields,
    )
    row = msgspec.defstruct(
        "ShapedRow",
        [("metrics", metrics)],
        bases=(ShapedReportRow,),
        namespace={"names": names},
        frozen=True,
        kw_only=True,
        gc=False,
        tag="node-report/1",
    )
    return msgspec.json.Decoder(row | _Other)


def decode(data: bytes) -> AnyReport:
    """The report in one of its forms. Errors are those of `messages.decode`."""
    for decoder in (_wide_decoder,) if len(data) > _LONG else (_decoder, _wide_decoder):
        try:
            row = decoder.decode(data)
        except _ERRORS:
            continue  # decoded or rejected below
        if isinstance(row, StandardReportRow):
            return row
        # An infinity remains one in the sum.
        if isinstance(row, WideReportRow) and math.isfinite(sum(row.metrics.values())):
            return row
    return messages.decode(data, messages.NodeReport, max_bytes=len(data))


def to_batch(rows: Sequence[StandardReportRow]) -> pa.RecordBatch:
    """As `columns.to_batch`, for rows in the fast form."""
    columns = _transposed(rows, StandardReportRow)
    columns |= zip(
        reports_columns.STANDARD_METRICS, zip(*map(_astuple, columns["metrics"]), strict=True), strict=True
    )
    columns["extra"] = pa.nulls(len(rows), reports_columns.node_schema().field("extra").type)
    return _batch(columns, len(rows))


def wide_to_batch(rows: Sequence[WideReportRow | ShapedReportRow]) -> pa.RecordBatch:
    """The same, with any metrics. Rows with the same metrics are processed together."""
    columns = _transposed(rows, ReportRow)
    by_names: dict[tuple[str, ...], tuple[list[int], list[tuple[float, ...]]]] = {}
    for number, row in enumerate(rows):
        names, values = row.named()
        numbers, matrix = by_names.setdefault(names, ([], []))
        numbers.append(number)
        matrix.append(values)
    standard = np.full((len(_STANDARD), len(rows)), np.nan)
    sizes = np.zeros(len(rows), np.int64)
    words: dict[str, int] = {}
    others = []
    for names, (numbers, matrix) in by_names.items():
        figures = np.array(matrix, np.float64)
        extra = []
        for place, name in enumerate(names):
            if name in _STANDARD:
                standard[_STANDARD[name], numbers] = figures[:, place]
            else:
                extra.append(place)
        if extra:
            codes = np.array([words.setdefault(names[place], len(words)) for place in extra])
            sizes[numbers] = len(extra)
            others.append((np.array(numbers), codes, figures[:, extra]))
    ends = np.cumsum(sizes)
    code, value = np.zeros(sizes.sum(), np.int64), np.zeros(sizes.sum())
    for at, codes, figures in others:
        places = (ends - sizes)[at, None] + np.arange(len(codes))
        code[places], value[places] = codes, figures
    for name, place in _STANDARD.items():
        columns[name] = pa.array(standard[place], from_pandas=True)  # NaN, which no report contains, is null
    offsets = pa.array(np.r_[0, ends].astype(np.int32), mask=np.r_[sizes == 0, False])
    columns["extra"] = pa.MapArray.from_arrays(
        offsets,
        pa.DictionaryArray.from_arrays(pa.array(code, pa.int32()), pa.array(list(words), pa.string())),
        pa.array(value),
    )
    return _batch(columns, len(rows))


def _transposed(rows: Sequence[Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields of this class; those of derived classes follow them."""
    return dict(zip(kind.__struct_fields__, zip(*map(_astuple, rows), strict=True), strict=False))


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
