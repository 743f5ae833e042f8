"""Stored messages as rows of Spark: one form for each value of the option ``payload``.

Values are handled in columns: a message has thousands of reports.  Messages of the pipeline itself, such as
its ticks, are never rows.  A message that cannot be read is skipped; ``payload=unreadable`` has a row for
each of these, and for no others, so that they can be counted by reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from muster.bus import api
from muster.core import errors, messages
from muster.core.reports import columns
from muster.pipeline import protocol

_MACHINE = {"machine": pa.string(), "group": pa.string(), "zone": pa.string()}
_TIME = pa.timestamp("us", tz="UTC")
_STORED = {"stored_at": _TIME, "stream_sequence": pa.int64()}
_METRICS = pa.map_(pa.string(), pa.float64())
_SERVICE = {"name": pa.string(), "state": pa.string(), "reason": pa.string(), "metrics": _METRICS}
_REPORTS = _MACHINE | {
    "boot": pa.int64(),
    "sequence": pa.int64(),
    "reported_at": _TIME,
    "period_s": pa.float64(),
    "state": pa.string(),
    "dropped": pa.int64(),
    "partial": pa.bool_(),
    "metrics": _METRICS,
    "services": pa.list_(pa.struct(list(_SERVICE.items()))),
    **_STORED,
}
#: The columns of each payload.
SCHEMAS: dict[str, dict[str, pa.DataType]] = {
    "reports": _REPORTS,
    "metrics": {
        **_MACHINE,
        "service": pa.string(),  # null: of the machine
        "metric": pa.string(),
        "value": pa.float64(),
        "reported_at": _TIME,
        **_STORED,
    },
    "messages": {
        "sequence": pa.int64(),
        "subject": pa.string(),
        "data": pa.binary(),
        "headers": pa.map_(pa.string(), pa.string()),
        "stored_at": _TIME,
    },
    "unreadable": {"subject": pa.string(), "reason": pa.string(), "detail": pa.string(), **_STORED},
}
#: Columns of reports that only `.schema(…)` selects: they are in ``metrics``, too.
_SELECTED = dict.fromkeys(columns.STANDARD_METRICS, pa.float64())

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Columns = dict[str, Any]


def spark_schema(known: dict[str, pa.DataType]) -> StructType:
    return from_arrow_schema(pa.schema(list(known.items())))


class RowDecoder:
    """Converts messages to rows with a schema: columns of the payload, in any order and number."""

    def __init__(self, payload: str, schema: StructType) -> None:
        self._payload = payload
        self._schema = to_arrow_schema(schema, timezone="UTC")
        known = SCHEMAS[payload] | (_SELECTED if payload == "reports" else {})
        expected = to_arrow_schema(spark_schema(known), timezone="UTC")
        for field in self._schema:
            right = expected.field(field.name).type if field.name in known else None
            if field.type != right:
                right = right or f"one of {', '.join(known)}"
                raise errors.InvalidInput(
                    f"payload={payload}: the column {field.name} {field.type}: expected {right}"
                )

    def decode(self, stored: Iterable[api.StoredMessage]) -> Iterator[pa.RecordBatch]:
        readable = [m for m in stored if not (m.is_copy or protocol.is_internal(m.subject))]
        if self._payload == "messages":
            yield self._batch(
                {
                    "sequence": [m.sequence for m in readable],
                    "subject": [m.subject for m in readable],
                    "data": [m.data for m in readable],
                    "headers": [list(m.headers.items()) for m in readable],
                    "stored_at": [m.stored_at_ns // 1000 for m in readable],
                }
            )
            return
        for message in readable:
            try:
                values = self._values(message)
            except errors.MusterError as error:
                values = self._fault(message, error.code, str(error))
            except Exception as error:  # noqa: BLE001  (whatever a message holds, it must not end the query)
                values = self._fault(
                    message, messages.MalformedMessage.code, f"{type(error).__name__}: {error}"
                )
            if values:
                yield self._batch(values)

    def _values(self, message: api.StoredMessage) -> Columns:
        batch, facts = columns.decode(message.data)
        if facts.schema != columns.NODE_SCHEMA:
            raise columns.ReportSchemaMismatch(f"a batch of {facts.schema}, not of reports")
        if self._payload == "unreadable":
            return {}
        values = _metric_rows(batch) if self._payload == "metrics" else self._report_columns(batch)
        return values | _stored(message, len(values["machine"]))

    def _fault(self, message: api.StoredMessage, reason: str, detail: str) -> Columns:
        if self._payload != "unreadable":
            return {}
        row = {"subject": [message.subject], "reason": [reason], "detail": [detail[:200]]}
        return row | _stored(message, 1)

    def _report_columns(self, batch: pa.RecordBatch) -> Columns:
        taken: Columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        if "metrics" in self._schema.names:  # it takes most of the time
            row, names, value = _metrics(batch)
            ends = np.cumsum(np.bincount(row, minlength=batch.num_rows))
            offsets = pa.array(np.concatenate(([0], ends)), pa.int32())
            taken["metrics"] = pa.MapArray.from_arrays(offsets, names, pa.array(value))
        return taken

    def _batch(self, values: Columns) -> pa.RecordBatch:
        arrays = [
            value.cast(field.type)
            if isinstance(value := values[field.name], pa.Array)
            else pa.array(value, field.type)
            for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _stored(message: api.StoredMessage, rows: int) -> Columns:
    return {
        "stored_at": np.full(rows, message.stored_at_ns // 1000),
        "stream_sequence": np.full(rows, message.sequence),
    }


def _metric_rows(batch: pa.RecordBatch) -> Columns:
    """First the metrics of the machines, then those of their services."""
    row, names, value = _metrics(batch)
    lists = batch.column("services")
    services, owner = lists.flatten(), pc.list_parent_indices(lists).to_numpy()
    at, keys, numbers = _entries(services.field("metrics"))
    service = pa.concat_arrays([pa.nulls(len(row), pa.string()), services.field("name").take(pa.array(at))])
    places = pa.array(np.concatenate((row, owner[at])))
    plain = ("machine", "group", "zone", "reported_at")
    return {
        **{name: batch.column(name).take(places) for name in plain},
        "service": service,
        "metric": pa.concat_arrays([names, keys.cast(pa.string())]),
        "value": np.concatenate((value, numbers)),
    }


def _metrics(batch: pa.RecordBatch) -> tuple[Ints, pa.Array, Floats]:
    """The metrics of machines, in the order of the rows: row, name and value."""
    standard = np.stack(
        [batch.column(name).to_numpy(zero_copy_only=False) for name in columns.STANDARD_METRICS], axis=1
    )
    row, code = np.nonzero(~np.isnan(standard))
    owner, keys, numbers = _entries(batch.column(columns.EXTRA))
    own = np.flatnonzero(~np.isin(keys.indices.to_numpy(), _standard_codes(keys.dictionary)))
    rows = np.concatenate((row, owner[own]))
    order = np.argsort(rows, kind="stable")
    codes = np.concatenate((code, keys.indices.to_numpy()[own] + len(columns.STANDARD_METRICS)))[order]
    names = pa.concat_arrays([pa.array(columns.STANDARD_METRICS), keys.dictionary]).take(pa.array(codes))
    return rows[order], names, np.concatenate((standard[row, code], numbers[own]))[order]


def _standard_codes(names: pa.Array) -> Ints:
    """A key occurs once in a map: those of the columns are left out of the others."""
    standard = pc.is_in(names, value_set=pa.array(columns.STANDARD_METRICS))
    return np.flatnonzero(standard.to_numpy(zero_copy_only=False))


def _entries(maps: pa.MapArray) -> tuple[Ints, pa.Array, Floats]:
    """The entries of maps that have a value: the place of the map, the key and the value."""
    starts = maps.offsets.to_numpy()
    owner = np.repeat(np.arange(len(maps)), np.diff(starts))
    span = (int(starts[0]), len(owner))
    values = maps.items.slice(*span).to_numpy(zero_copy_only=False)
    valid = maps.is_valid().to_numpy(zero_copy_only=False)
    kept = np.flatnonzero(valid[owner] & ~np.isnan(values))
    return owner[kept], maps.keys.slice(*span).take(pa.array(kept)), values[kept]
