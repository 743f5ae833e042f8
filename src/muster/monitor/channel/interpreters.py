"""Interpreters: which of the held reports a channel forwards, to which target, and in which form.

The third part of publish, subscribe, interpret.  At the end of each holding time an interpreter receives the
held reports and the subscriptions that use it; it decides which reports each subscription
receives.  Interpreters are pure: they must not block or have side effects.  An exception drops the held
reports (counted), but never stops the channel.

Built in:

``concat``   every row is forwarded in full, as in the paper, but in columns; the ``where`` of a subscription
             (a predicate over the columns) selects rows
``merge``    one row for each group, zone and metric: count, sum, minimum, maximum, quantiles, and number of
             distinct machines; a tree of mergers gives the same result as a single one

A plug-in is an object with `Interpreter.interpret`, named as ``module:attribute`` or by an entry point of the
group ``muster.interpreters``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from muster.core import errors, messages
from muster.core.reports import columns as reports_columns
from muster.core.reports import sketches
from muster.predicates import ast, types
from muster.predicates.analysis import type_check
from muster.predicates.backends import columnar, columns
from muster.predicates.syntax import parser

ENTRY_POINTS = "muster.interpreters"
_TYPES = {
    "string": types.STRING,
    "bool": types.BOOL,
    "int64": types.INT,
    "double": types.FLOAT,
    "timestamp[us, tz=UTC]": types.INT,  # in milliseconds
}
#: The columns of reports that a condition may use: those that are not maps or lists.
MODEL = {
    column.name: _TYPES[str(column.type)]
    for column in reports_columns.node_schema()
    if str(column.type) in _TYPES
}
ALL_REPORTS = ""  # the summary with an empty metric counts reports and distinct machines


@dataclass(frozen=True, slots=True)
class ForwardTarget:
    """A target of forwarding: the first of ``parents`` that is alive."""

    name: str
    parents: tuple[str, ...]
    interpreter: str = "concat"
    where: str = ""
    condition: ast.Condition | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        condition = parser.parse(self.where) if self.where else None
        if condition is not None:
            type_check.require(condition, MODEL, self.where)
        object.__setattr__(self, "condition", condition)


@dataclass(frozen=True, slots=True)
class HeldReports:
    """The reports of one holding time. Tables may be empty."""

    rows: pa.Table  # of reports.node_schema()
    summaries: pa.Table  # of reports.summary_schema()
    from_ms: int
    to_ms: int
    partial: bool


@dataclass(frozen=True, slots=True)
class InterpreterOutput:
    subscription: ForwardTarget
    schema: str  # reports.NODE_SCHEMA or reports.SUMMARY_SCHEMA
    table: pa.Table


class Interpreter(Protocol):
    def interpret(
        self, held: HeldReports, subscriptions: Sequence[ForwardTarget]
    ) -> Iterable[InterpreterOutput]: ...


def load(name: str) -> Interpreter:
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, _, attribute = name.partition(":")
    known = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)
    if not known and not (module and attribute):
        raise errors.InvalidInput(
            f"unknown interpreter {name[:80]!r}: {', '.join(BUILT_IN)}, an entry point of {ENTRY_POINTS}, "
            "or module:attribute"
        )
    try:
        for entry_point in known:
            return _checked(name, entry_point.load())
        return _checked(name, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError, TypeError) as error:  # the last: a module that begins with a dot
        raise errors.MissingDependency(f"the interpreter {name[:80]!r} cannot be loaded: {error}") from error


def _checked(name: str, plugin: object) -> Interpreter:
    if not callable(getattr(plugin, "interpret", None)):
        raise errors.InvalidInput(f"the interpreter {name[:80]!r} has no method interpret")
    return cast(Interpreter, plugin)


def select(rows: pa.Table, condition: ast.Condition | None) -> pa.Table:
    """The rows for which the condition is true."""
    if condition is None or not rows.num_rows:
        return rows
    needed = {name.key for name in ast.names(condition)} & set(rows.schema.names)
    used: dict[str, columns.Column] = {}
    for name in needed:
        array = rows.column(name).combine_chunks()
        if pa.types.is_timestamp(array.type):
            array = pc.divide(array.cast(pa.int64()), 1000)  # milliseconds, as everywhere else
        used[name] = columns.Column.from_arrow(MODEL[name].kind, array)
    table = columns.Table(used, rows=rows.num_rows)
    return rows.filter(pa.array(columnar.evaluate(condition, table)))


class ConcatInterpreter:
    def interpret(
        self, held: HeldReports, subscriptions: Sequence[ForwardTarget]
    ) -> Iterator[InterpreterOutput]:
        for subscription in subscriptions:
            yield InterpreterOutput(
                subscription, reports_columns.NODE_SCHEMA, select(held.rows, subscription.condition)
            )
            yield InterpreterOutput(subscription, reports_columns.SUMMARY_SCHEMA, held.summaries)


class MetricSummary:
    """Mergeable summary of a metric of a group."""

    __slots__ = ("count", "machines", "max", "min", "sketch", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.min = float("inf")
        self.max = float("-inf")
        self.sketch = sketches.QuantileSketch()
        self.machines = sketches.DistinctSketch()

    @classmethod
    def from_values(cls, values: Any) -> MetricSummary:
        summary = cls()
        numbers = np.asarray(values, np.float64)
        numbers = numbers[np.abs(numbers) <= reports_columns.VALUE_MAX]
        if numbers.size:
            summary.count = int(numbers.size)
            summary.sum = float(numbers.sum())
            summary.min, summary.max = float(numbers.min()), float(numbers.max())
            summary.sketch = sketches.QuantileSketch.of(numbers)
        return summary

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> MetricSummary:
        summary = cls()
        summary.count, summary.sum = row["count"], row["sum"]
        summary.min = float("inf") if row["min"] is None else row["min"]
        summary.max = float("-inf") if row["max"] is None else row["max"]
        figures = (row["sum"], row["min"] or 0.0, row["max"] or 0.0)
        is_counted = 0 <= row["count"] <= reports_columns.COUNT_MAX
        if not is_counted or not all(abs(figure) <= reports_columns.SUM_MAX for figure in figures):
            raise messages.MalformedMessage("a summary has figures that are not finite, or too large")
        summary.sketch = sketches.QuantileSketch.from_bytes(row["sketch"])
        summary.machines = sketches.DistinctSketch.from_bytes(row["machines"])
        return summary

    def merge(self, other: MetricSummary) -> None:
        self.count = min(self.count + other.count, reports_columns.COUNT_MAX)
        limit = reports_columns.SUM_MAX  # a reader would refuse a greater one, with all other summaries
        self.sum = min(max(self.sum + other.sum, -limit), limit)
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)
        self.sketch.merge(other.sketch)
        self.machines.merge(other.machines)

    def row(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "sum": self.sum,
            "min": self.min if np.isfinite(self.min) else None,
            "max": self.max if np.isfinite(self.max) else None,
            "sketch": bytes(self.sketch),
            "machines": bytes(self.machines),
        }

    def rollup(self) -> reports_columns.MetricRollup:
        row = self.row()
        return reports_columns.MetricRollup(
            count=self.count,
            sum=self.sum,
            min=row["min"],
            max=row["max"],
            p50=self.quantile(0.50),
            p95=self.quantile(0.95),
            p99=self.quantile(0.99),
        )

    def quantile(self, share: float) -> float | None:
        """The quantile of the sketch, limited to the observed range."""
        value = self.sketch.quantile(share)
        return None if value is None else min(max(value, self.min), self.max)


Key = tuple[str, str, str]  # group, zone, metric


class MergeInterpreter:
    """Forwards summaries instead of node reports: for slow links and readers that need only groups."""

    def interpret(
        self, held: HeldReports, subscriptions: Sequence[ForwardTarget]
    ) -> Iterator[InterpreterOutput]:
        for subscription in subscriptions:
            merged = summarise(select(held.rows, subscription.condition))
            partial = held.partial
            for row in held.summaries.to_pylist():
                partial |= row["partial"]
                merged.setdefault((row["group"], row["zone"], row["metric"]), MetricSummary()).merge(
                    MetricSummary.from_row(row)
                )
            window = {"from": held.from_ms * 1000, "to": held.to_ms * 1000, "partial": partial}
            rows = [
                {"group": group, "zone": zone, "metric": metric, **summary.row(), **window}
                for (group, zone, metric), summary in merged.items()
            ]
            table = pa.Table.from_pylist(rows, schema=reports_columns.summary_schema())
            yield InterpreterOutput(subscription, reports_columns.SUMMARY_SCHEMA, table)


def summarise(rows: pa.Table) -> dict[Key, MetricSummary]:
    """Node reports by group, zone and metric."""
    merged: dict[Key, MetricSummary] = {}
    if not rows.num_rows:
        return merged
    places = rows.select(["group", "zone"]).append_column("row", pa.array(range(rows.num_rows)))
    for place in places.group_by(["group", "zone"]).aggregate([("row", "list")]).to_pylist():
        part = rows.take(pa.array(place["row_list"]))
        group, zone = place["group"], place["zone"]
        total = merged[group, zone, ALL_REPORTS] = MetricSummary()
        total.count = part.num_rows
        total.machines = sketches.DistinctSketch.of(part.column("machine").to_pylist())
        for name in reports_columns.STANDARD_METRICS:
            column = part.column(name)
            if column.null_count < part.num_rows:
                merged[group, zone, name] = MetricSummary.from_values(column.to_numpy())
        for name, values in _extra(part).items():
            # A channel below may send any name there, also that of a standard metric, or an empty one.
            merged.setdefault((group, zone, name), MetricSummary.from_values(values))
    return merged


def _extra(rows: pa.Table) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for pairs in rows.column("extra").drop_null().to_pylist():
        for name, value in pairs:
            values.setdefault(name, []).append(value)
    return values


BUILT_IN: dict[str, Interpreter] = {"concat": ConcatInterpreter(), "merge": MergeInterpreter()}
