"""Reports in columns: the Arrow schema that channels write and the pipeline reads, and what rolls them up.

A sensor publishes one `messages.NodeReport`; from the first channel on, many of them form one Arrow record
batch of `node_schema`, with a column for each standard metric. Both forms have the same content: `to_batch`
and `from_batch` are inverse to each other. Properties of a batch (its producer, missing and dropped reports)
are its `BatchInfo`, which is stored as JSON in the metadata of the Arrow schema.

The schema has a version. Within a version, columns are only added at the end; a reader selects columns by
name, fills a missing one with null and ignores unknown ones. A metric that is not standard needs no schema
change: it is a key of ``extra``, which is a code in a dictionary of the batch (a reader also accepts plain
names). A standard metric that was not measured is null, never zero.

`GroupReport` and `SystemReport` are the upper two levels; the pipeline makes them, others read them.

pyarrow is imported when it is first needed, so that a sensor does not carry it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from muster.core import errors, health, messages, subjects, topics

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1
NODE_SCHEMA = f"node-reports/{VERSION}"
SUMMARY_SCHEMA = f"summaries/{VERSION}"
METADATA_KEY = b"muster"  # in the Arrow schema: the `BatchInfo` in JSON

MAX_BATCH_BYTES = 8 << 20  # of one message on the bus; it may decompress to eight times that
MAX_BATCH_ROWS = 100_000
LEVELS_MAX = 64
# A greater value of a metric counts as not measured where reports are summed up: no sum may become infinite,
# because an infinity is in no JSON, and a report with one could not be read.
VALUE_MAX = 1e30
SUM_MAX = 1e300
COUNT_MAX = 1 << 53  # of a summary: counts are summed up, too

#: Metrics that every sensor provides, in the order of their columns.
STANDARD_METRICS = (
    "cpu_percent",
    "load_1m",
    "memory_percent",
    "memory_used_bytes",
    "swap_percent",
    "disk_percent",
    "disk_read_bytes_s",
    "disk_write_bytes_s",
    "network_in_bytes_s",
    "network_out_bytes_s",
    "processes",
    "uptime_s",
)
EXTRA = "extra"  # the column of all other metrics
_STANDARD = frozenset(STANDARD_METRICS)
_PLAIN = ("machine", "group", "zone", "boot", "sequence", "period_s", "dropped")

# Destination of the batches of channels without a parent, which the pipeline reads.
REPORTS_STREAM = "reports"
REPORTS_SUBJECTS = subjects.from_identity("monitor", "*", "batch", "root", "*")
SUMMARIES_STREAM = "summaries"
SUMMARIES_SUBJECTS = subjects.from_identity("monitor", "*", "summary", "root", "*")

# Results of the pipeline; the latest message of each subject is current.
SYSTEM_STREAM = "system"

Counts = Annotated[dict[messages.Name, messages.Count], msgspec.Meta(max_length=256)]


class ReportSchemaMismatch(errors.InvalidInput):
    code = "wrong-schema"


class ReportVersionMismatch(errors.InvalidInput):
    code = "wrong-version"


class BatchInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Properties of a batch. ``(channel, boot, sequence)`` identifies it."""

    schema: str = NODE_SCHEMA
    channel: messages.Name = "unknown"
    boot: messages.Count = 0
    sequence: messages.Count = 0
    interpreter: messages.Name = "concat"
    level: Annotated[int, msgspec.Meta(ge=1, le=LEVELS_MAX)] = (
        1  # 1: of sensors' rows; else one above the highest
    )
    held_from_ms: messages.TimeMs = 0  # the holding time: what arrived between these is in here
    held_to_ms: messages.TimeMs = 0
    machines: messages.Count = 0
    missing: messages.Count = 0  # machines that were due and did not report
    dropped: Counts = msgspec.field(default_factory=dict)  # by reason, since the batch before
    partial: bool = False  # something that belongs in here is not: see ``missing`` and ``dropped``


class MetricRollup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One metric over many machines. Quantiles are missing if only the sum is known."""

    count: messages.Count
    sum: float = 0.0
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


Rollups = Annotated[dict[messages.Name, MetricRollup], msgspec.Meta(max_length=1024)]


class RankedNode(msgspec.Struct, frozen=True, gc=False):
    machine: messages.Name
    value: float


Top = Annotated[dict[messages.Name, tuple[RankedNode, ...]], msgspec.Meta(max_length=1024)]


class GroupReport(messages.WireMessage, frozen=True, kw_only=True, tag="group-report/1", omit_defaults=True):
    """A group of machines over one window. ``nodes`` is filled only if detail was requested."""

    group: messages.Name
    zone: messages.Name | None = None  # None: over all zones
    from_ms: messages.TimeMs
    to_ms: messages.TimeMs
    machines: messages.Count  # different ones that reported
    reports: messages.Count = 0
    stale: messages.Count = 0  # known machines that are silent for longer than they should be
    states: Counts = msgspec.field(default_factory=dict)
    metrics: Rollups = msgspec.field(default_factory=dict)
    oldest_ms: messages.TimeMs | None = None  # the oldest report in here: staleness is measured from it
    dropped: Counts = msgspec.field(default_factory=dict)
    partial: bool = False
    top: Top = msgspec.field(default_factory=dict)  # for some metrics the machines with the highest values
    nodes: tuple[messages.NodeReport, ...] = ()


class SystemReport(
    messages.WireMessage, frozen=True, kw_only=True, tag="system-report/1", omit_defaults=True
):
    """The complete fleet over one window."""

    from_ms: messages.TimeMs
    to_ms: messages.TimeMs
    machines: messages.Count
    reports: messages.Count = 0
    stale: messages.Count = 0
    states: Counts = msgspec.field(default_factory=dict)
    metrics: Rollups = msgspec.field(default_factory=dict)
    oldest_ms: messages.TimeMs | None = None
    dropped: Counts = msgspec.field(default_factory=dict)
    partial: bool = False
    groups: tuple[GroupReport, ...] = ()


@functools.cache
def node_schema() -> pa.Schema:
    """A row is a node report."""
    import pyarrow as pa

    metrics_map = pa.map_(pa.string(), pa.float64())
    # Most machines report the same few dozen names: as codes they are sorted and copied ten times as fast.
    coded_map = pa.map_(pa.dictionary(pa.int32(), pa.string()), pa.float64())
    service = pa.struct(
        [
            pa.field("name", pa.string(), nullable=False),
            pa.field("state", pa.string(), nullable=False),
            pa.field("reason", pa.string(), nullable=False),
            pa.field("metrics", metrics_map),
        ]
    )
    return pa.schema(
        [
            pa.field("machine", pa.string(), nullable=False),
            pa.field("group", pa.string(), nullable=False),
            pa.field("zone", pa.string(), nullable=False),
            pa.field("boot", pa.int64(), nullable=False),
            pa.field("sequence", pa.int64(), nullable=False),
            pa.field("reported_at", pa.timestamp("us", tz="UTC"), nullable=False),
            pa.field("period_s", pa.float64(), nullable=False),
            pa.field("state", pa.string(), nullable=False),  # the worst of its services
            pa.field("dropped", pa.int64(), nullable=False),  # reports of this boot the sensor gave up
            pa.field("partial", pa.bool_(), nullable=False),  # of its original batch: see `BatchInfo`
            *(pa.field(name, pa.float64()) for name in STANDARD_METRICS),
            pa.field(EXTRA, coded_map),
            pa.field("services", pa.list_(pa.field("item", service))),
        ]
    )


@functools.cache
def summary_schema() -> pa.Schema:
    """A row is one metric of one group over one holding time: the result of merging node reports."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("group", pa.string(), nullable=False),
            pa.field("zone", pa.string(), nullable=False),
            pa.field("metric", pa.string(), nullable=False),
            pa.field("from", pa.timestamp("us", tz="UTC"), nullable=False),
            pa.field("to", pa.timestamp("us", tz="UTC"), nullable=False),
            pa.field("count", pa.int64(), nullable=False),
            pa.field("sum", pa.float64(), nullable=False),
            pa.field("min", pa.float64()),
            pa.field("max", pa.float64()),
            pa.field("sketch", pa.binary(), nullable=False),  # quantiles, mergeable
            pa.field("machines", pa.binary(), nullable=False),  # distinct machines, mergeable
            pa.field("partial", pa.bool_(), nullable=False),
        ]
    )


def result_subject(pipeline: str, scope: str, name: str = "") -> str:
    """The subject of the latest report of a scope (``system``, ``group``, ``zone``, ``node``)."""
    prefix = subjects.from_identity("pipeline", pipeline, "report", scope)
    # A group may have any name; as the one level of a topic it becomes one token.
    return f"{prefix}.{topics.Topic((name,)).subject.partition('.')[2]}" if name else prefix


def worst_state(services: Sequence[messages.ServiceReport]) -> str:
    """A machine that reports is up, unless one of its services is in a worse state."""
    return health.worst([health.HealthState.UP, *(service.state for service in services)]).value


def to_batch(rows: Sequence[messages.NodeReport], *, partial: bool = False) -> pa.RecordBatch:
    import pyarrow as pa

    schema = node_schema()
    metrics = [row.metrics for row in rows]
    columns: dict[str, Any] = {
        "machine": [row.machine for row in rows],
        "group": [row.group for row in rows],
        "zone": [row.zone for row in rows],
        "boot": [row.boot for row in rows],
        "sequence": [row.sequence for row in rows],
        "reported_at": [row.at_ms * 1000 for row in rows],
        "period_s": [row.period_s for row in rows],
        "state": [worst_state(row.services) if row.services else "up" for row in rows],
        "dropped": [row.dropped for row in rows],
        "partial": [partial] * len(rows),
        **{name: [values.get(name) for values in metrics] for name in STANDARD_METRICS},
        "extra": [
            None
            if values.keys() <= _STANDARD
            else [item for item in values.items() if item[0] not in _STANDARD]
            for values in metrics
        ],
        "services": [service_rows(row.services) for row in rows],
    }
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[field.name], field.type) for field in schema], schema=schema
    )


def from_batch(batch: pa.RecordBatch) -> list[messages.NodeReport]:
    """The rows as messages; `ReportSchemaMismatch` where they do not hold together."""
    batch = conform_schema(batch, node_schema())
    columns = {name: batch.column(name).to_pylist() for name in _PLAIN}
    metrics = [dict(extra or ()) for extra in batch.column("extra").to_pylist()]
    for name in STANDARD_METRICS:
        for values, value in zip(metrics, batch.column(name).to_pylist(), strict=True):
            if value is not None:
                values[name] = value
    columns["metrics"] = metrics
    columns["at_ms"] = [at_us // 1000 for at_us in batch.column("reported_at").cast("int64").to_pylist()]
    columns["services"] = [
        [{**service, "metrics": dict(service["metrics"] or ())} for service in services or ()]
        for services in batch.column("services").to_pylist()
    ]
    names = tuple(columns)
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    try:
        return msgspec.convert(rows, list[messages.NodeReport])
    except msgspec.ValidationError as error:
        raise ReportSchemaMismatch(f"rows that are no node reports: {str(error)[:200]}") from error


def encode(batch: pa.RecordBatch, facts: BatchInfo, *, compression: str | None = None) -> bytes:
    """Encode a batch as one message: an Arrow IPC stream of one record batch. ``compression``: lz4, zstd or
    None."""
    import pyarrow as pa

    schema = batch.schema.with_metadata({METADATA_KEY: msgspec.json.encode(facts)})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    data: bytes = sink.getvalue().to_pybytes()
    if len(data) > MAX_BATCH_BYTES:
        raise messages.MessageTooLarge(f"a batch of {len(data)} bytes is over {MAX_BATCH_BYTES}")
    return data


def decode(data: bytes) -> tuple[pa.RecordBatch, BatchInfo]:
    """A batch of node reports or of summaries, all of its columns there and of the right type.

    Invalid data raises an error with a reason in ``code``: too-large, malformed, wrong-version, wrong-schema.
    """
    import pyarrow as pa

    if len(data) > MAX_BATCH_BYTES:
        raise messages.MessageTooLarge(f"a batch of {len(data)} bytes is over {MAX_BATCH_BYTES}")
    try:
        # A message is small: to spread its columns over threads costs more than it saves.
        options = pa.ipc.IpcReadOptions(use_threads=False)
        with pa.ipc.open_stream(data, options=options) as reader:
            facts = batch_info(reader.schema.metadata)
            batches = read_batches(reader, rows_max=MAX_BATCH_ROWS)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise messages.MalformedMessage(f"not an Arrow stream: {str(error)[:200]}") from error
    if not any(batch.num_rows for batch in batches):
        raise messages.MalformedMessage("an Arrow stream without rows")
    expected = node_schema() if facts.schema == NODE_SCHEMA else summary_schema()
    fitted = [conform_schema(batch, expected) for batch in batches]
    if len(fitted) == 1:
        return fitted[0], facts
    return pa.Table.from_batches(fitted, schema=expected).combine_chunks().to_batches()[0], facts


def without_unused_names(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows; the dictionary of ``extra`` has only the names that occur in them.

    A part of a batch has the dictionary of the whole, which may be larger than its rows.
    """
    import numpy as np
    import pyarrow as pa

    place = batch.schema.get_field_index(EXTRA)
    extra = batch.column(place)
    ends = extra.offsets.to_numpy()
    span = (int(ends[0]), int(ends[-1] - ends[0]))
    names = extra.keys.slice(*span)
    codes, used = np.unique(names.indices.to_numpy(), return_inverse=True)
    coded = pa.MapArray.from_arrays(
        pa.array(ends - ends[0], mask=np.append(extra.is_null().to_numpy(zero_copy_only=False), False)),
        pa.DictionaryArray.from_arrays(pa.array(used, pa.int32()), names.dictionary.take(pa.array(codes))),
        extra.items.slice(*span),
    )
    return batch.set_column(place, batch.schema.field(place), coded)


def names_bytes(batch: pa.RecordBatch) -> int:
    """The size of the dictionary of ``extra``, which is part of a message."""
    size: int = batch.column(EXTRA).keys.dictionary.get_total_buffer_size()
    return size


def batch_info(metadata: Mapping[bytes, bytes] | None) -> BatchInfo:
    try:
        facts = msgspec.json.decode((metadata or {})[METADATA_KEY], type=BatchInfo)
    except KeyError:
        raise ReportSchemaMismatch("an Arrow stream without the facts of a batch in its schema") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ReportSchemaMismatch(f"the facts of a batch cannot be read: {str(error)[:200]}") from error
    if facts.schema not in (NODE_SCHEMA, SUMMARY_SCHEMA):
        raise ReportVersionMismatch(
            f"a batch of {facts.schema[:60]!r}: this reads {NODE_SCHEMA} and {SUMMARY_SCHEMA}"
        )
    return facts


def conform_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Columns by name: a missing one is null, a new one is passed over, an unlike one is cast or refused."""
    import pyarrow as pa

    if batch.schema.equals(schema, check_metadata=False):
        columns = batch.columns
    else:
        columns = []
        for field in schema:
            index = batch.schema.get_field_index(field.name)
            if index < 0:
                columns.append(pa.nulls(batch.num_rows, field.type))
                continue
            try:
                columns.append(batch.column(index).cast(field.type))
            except pa.ArrowException as error:
                raise ReportSchemaMismatch(f"the column {field.name}: {str(error)[:200]}") from error
    for field, column in zip(schema, columns, strict=True):
        if not field.nullable and column.null_count:
            raise ReportSchemaMismatch(f"the column {field.name} is missing, or empty in some rows")
        if pa.types.is_map(field.type):
            names = column.keys.dictionary if pa.types.is_dictionary(field.type.key_type) else column.keys
            if names.null_count:
                raise ReportSchemaMismatch(f"a key without a name in the column {field.name}")
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def read_batches(reader: Any, *, rows_max: int) -> list[pa.RecordBatch]:
    """The batches of an Arrow stream from an untrusted sender, checked and bounded."""
    batches: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in reader:
        # The sender controls the offsets in the data: unchecked, they could point anywhere.
        batch.validate(full=True)
        rows += batch.num_rows
        # Not `nbytes`: it crashes for some batches that `validate` accepts.
        size += batch.get_total_buffer_size()
        if rows > rows_max or size > 8 * MAX_BATCH_BYTES:
            raise messages.MessageTooLarge(f"a batch of more than {rows_max} rows, or far too many bytes")
        batches.append(batch)
    return batches


def service_rows(services: Sequence[messages.ServiceReport]) -> list[dict[str, Any]] | None:
    """The value of the column ``services``."""
    return [
        {
            "name": service.name,
            "state": service.state.value,
            "reason": service.reason,
            "metrics": list(service.metrics.items()) or None,
        }
        for service in services
    ] or None
