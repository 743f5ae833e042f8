"""The tables of the history and their columns.

Every table is a Delta Lake table, partitioned by ``day``, the UTC date of the event time of a row.  Each
standard metric is a column; the others are keys of the map ``metrics``.  Columns may be added in any version
of Muster: rows that were written before read as NULL (`delta.HistoryTable` adds them to existing tables).
The reference page docs/reference/history.md is generated from these definitions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from muster.core.reports import columns

#: The version of the schema: the first number changes if a column is renamed, removed or gets another type.
VERSION = "1.0"

NODES, GROUPS, ALERTS, HOURLY = "nodes", "groups", "alerts", "hourly"
DAY = "day"
SEQUENCE = "stream_sequence"

STATISTICS = ("count", "mean", "min", "max", "p50", "p95", "p99")  # of a metric over many machines
HOURLY_STATISTICS = ("mean", "min", "max")  # of a metric of one machine

TIME = pa.timestamp("us", tz="UTC")
METRICS = pa.map_(pa.string(), pa.float64())
CODED = pa.map_(pa.dictionary(pa.int32(), pa.string()), pa.float64())

UNITS = {
    "percent": "%",
    "bytes": "byte",
    "bytes_s": "byte/s",
    "s": "s",
}

#: The newest row of each alert that has not ended, for SQL.
ALERTS_CURRENT = "alerts_current"
CURRENT_SQL = (
    "SELECT {columns} FROM (SELECT *, row_number() OVER "
    "(PARTITION BY rule, about ORDER BY changed_at DESC, since DESC) AS recency FROM {alerts}) "
    "WHERE recency = 1 AND state <> 'resolved'"
)


@dataclass(frozen=True, slots=True)
class TableColumn:
    name: str
    type: pa.DataType
    description: str
    unit: str = ""
    nullable: bool = True


@dataclass(frozen=True, slots=True)
class TableDefinition:
    name: str
    description: str
    time: str  # the column with the event time
    keys: tuple[str, ...]  # order of rows with the same time
    columns: tuple[TableColumn, ...]
    indexed: int  # the first columns have statistics in the log, so that readers skip files

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(
            [pa.field(column.name, column.type, nullable=column.nullable) for column in self.columns]
        )

    @property
    def file_schema(self) -> pa.Schema:
        """Partition columns are part of a file's path, not of its content."""
        return pa.schema([field for field in self.schema if field.name != DAY])

    @property
    def row_schema(self) -> pa.Schema:
        """As `file_schema`; names of metrics are codes, which Parquet stores without comparing names."""
        return pa.schema(
            [field.with_type(CODED) if field.type == METRICS else field for field in self.file_schema]
        )

    @property
    def statistics(self) -> tuple[str, ...]:
        """The columns with statistics in the log."""
        return tuple(column.name for column in self.columns[: self.indexed] if column.name != DAY)


@functools.cache
def definitions() -> dict[str, TableDefinition]:
    return {table.name: table for table in (_nodes(), _groups(), _alerts(), _hourly())}


def definition(name: str) -> TableDefinition:
    return definitions()[name]


def unit_of(metric: str) -> str:
    """The unit of a metric is the last part of its name."""
    for suffix in sorted(UNITS, key=len, reverse=True):
        if metric.endswith(f"_{suffix}"):
            return UNITS[suffix]
    return ""


def _required(name: str, type_: pa.DataType, description: str, unit: str = "") -> TableColumn:
    return TableColumn(name, type_, description, unit, nullable=False)


def _day(time: str) -> TableColumn:
    return _required(DAY, pa.date32(), f"UTC date of `{time}`; the partition")


def _nodes() -> TableDefinition:
    services = columns.node_schema().field("services").type
    return TableDefinition(
        NODES,
        "Reports of machines, as they were received: one row for each report. A report that a channel sent "
        "twice has two rows with the same `machine`, `boot` and `sequence`.",
        "reported_at",
        ("machine", "boot", "sequence"),
        (
            _day("reported_at"),
            _required("reported_at", TIME, "Time of the measurement, by the clock of the machine"),
            _required("machine", pa.string(), "Name of the machine"),
            _required("group", pa.string(), "Its group (quote the name in SQL)"),
            _required("zone", pa.string(), "Its zone"),
            _required("state", pa.string(), "The worst state of its services"),
            _required("boot", pa.int64(), "Start of the sensor; sequences begin anew"),
            _required("sequence", pa.int64(), "Number of the report since the start of the sensor"),
            _required("period_s", pa.float64(), "Interval between reports", "s"),
            _required("dropped", pa.int64(), "Reports of this boot that the sensor discarded"),
            _required("partial", pa.bool_(), "The batch of the report was incomplete"),
            *(
                TableColumn(name, pa.float64(), "Standard metric; NULL: not measured", unit_of(name))
                for name in columns.STANDARD_METRICS
            ),
            TableColumn("metrics", METRICS, "Other metrics of the machine"),
            TableColumn("services", services, "State, reason and metrics of each service"),
            _required(SEQUENCE, pa.int64(), "Position of the message in the stream of reports"),
        ),
        5,
    )


def _groups() -> TableDefinition:
    words = {
        "count": "Number of values of `{}`",
        "mean": "Mean of `{}`",
        "min": "Minimum of `{}`",
        "max": "Maximum of `{}`",
        "p50": "Median of `{}`",
        "p95": "95th percentile of `{}`",
        "p99": "99th percentile of `{}`",
    }
    return TableDefinition(
        GROUPS,
        "Reports of groups, zones and the system: one row for each scope and window.",
        "window_start",
        ("scope", "name"),
        (
            _day("window_start"),
            _required("window_start", TIME, "Start of the window"),
            _required("scope", pa.string(), "`group`, `zone` or `system`"),
            _required("name", pa.string(), "Name of the group or zone; empty for the system"),
            _required("window_end", TIME, "End of the window"),
            _required("machines", pa.int64(), "Different machines that reported"),
            _required("reports", pa.int64(), "Reports in the window"),
            _required("known", pa.int64(), "Machines that are known"),
            _required("stale", pa.int64(), "Known machines that were silent for too long"),
            _required("partial", pa.bool_(), "Some reports of the window are missing"),
            *(
                TableColumn(
                    f"{metric}_{statistic}",
                    pa.int64() if statistic == "count" else pa.float64(),
                    words[statistic].format(metric),
                    "" if statistic == "count" else unit_of(metric),
                )
                for metric in columns.STANDARD_METRICS
                for statistic in STATISTICS
            ),
            TableColumn(
                "metrics", METRICS, "Other metrics: `NAME_count`, `NAME_mean`, `NAME_min` and `NAME_max`"
            ),
        ),
        4,
    )


def _alerts() -> TableDefinition:
    return TableDefinition(
        ALERTS,
        "Alerts: one row for each change of state. The view `alerts_current` has the newest row of each "
        "alert that has not ended.",
        "changed_at",
        ("rule", "about", "state"),
        (
            _day("changed_at"),
            _required("changed_at", TIME, "Time of the change"),
            _required("rule", pa.string(), "Name of the rule"),
            _required("about", pa.string(), "Its object: `node:NAME`, `group:NAME`, `zone:NAME`, `system`"),
            _required("severity", pa.string(), "`info`, `warning` or `critical`"),
            _required("state", pa.string(), "`pending`, `firing`, `acknowledged`, `silenced` or `resolved`"),
            _required("since", TIME, "Start of this state"),
            TableColumn("value", pa.float64(), "Value that the rule measures"),
            TableColumn("reason", pa.string(), "Explanation"),
            TableColumn("group", pa.string(), "Group of the machine (quote the name in SQL)"),
        ),
        4,
    )


def _hourly() -> TableDefinition:
    words = {"mean": "Mean of `{}`", "min": "Minimum of `{}`", "max": "Maximum of `{}`"}
    return TableDefinition(
        HOURLY,
        "Machines by the hour: one row for each machine and hour, computed from `nodes` when the hour is "
        "over, and again if reports of that hour arrive later.",
        "hour",
        ("machine",),
        (
            _day("hour"),
            _required("hour", TIME, "Start of the hour"),
            _required("machine", pa.string(), "Name of the machine"),
            _required("group", pa.string(), "Its last group in the hour (quote the name in SQL)"),
            _required("zone", pa.string(), "Its last zone in the hour"),
            _required("reports", pa.int64(), "Reports of the machine in the hour"),
            *(
                TableColumn(
                    f"{metric}_{statistic}",
                    pa.float64(),
                    words[statistic].format(metric),
                    unit_of(metric),
                )
                for metric in columns.STANDARD_METRICS
                for statistic in HOURLY_STATISTICS
            ),
            TableColumn("metrics", METRICS, "Means of the other metrics"),
        ),
        5,
    )


def to_pylist(values: pa.Table | pa.RecordBatch | pa.ChunkedArray) -> list[Any]:
    """Python values; maps are dictionaries unless their keys are lists or objects."""
    try:
        return list(values.to_pylist(maps_as_pydicts="lossy"))
    except TypeError:  # a key that cannot be hashed
        return list(values.to_pylist())
