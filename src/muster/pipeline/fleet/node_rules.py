"""Evaluation of rules about single machines, with running statistics: columns in, changes out. Pure.

The truth of a rule for every machine is one of the node columns; only changes are reported.  Rules that use
only `rules.ALWAYS_KNOWN` are evaluated for all machines in every batch, the others for the machines that
reported.

**Running statistics.**  The history of a million machines does not fit into memory.  So for each metric that
some rule uses as ``<metric>_z``, each machine has two running figures: a mean and a mean deviation.  Both
move towards each new value by a small step (larger at first, so that they settle quickly).  An outlier moves
them no further than a value at the edge of the usual range: a few outliers do not change the baseline, but a
lasting change does.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from muster.core.reports import columns as reports_columns
from muster.pipeline.alerts import rules
from muster.pipeline.fleet import blocks, cells, node_columns
from muster.predicates import types
from muster.predicates.backends import columnar, columns

Array = npt.NDArray[Any]

_MEMORY = 120  # reports: the weight of older reports decreases
_LEAST = 20  # reports of a machine before scores are computed
_EDGE = 3.0  # standard deviations: the maximum influence of a value
_TO_SIGMA = 1.2533  # from the mean absolute deviation, of a normal distribution
_LEAST_SPREAD = 0.01  # of the mean: without it any change of a constant value has an infinite score


class NodeRuleChange(msgspec.Struct, array_like=True, frozen=True):
    """A rule became true or false for a machine."""

    rule: str
    machine: str
    group: str
    on: bool
    at_ms: int
    value: float | None


class Changes:
    """The changes of a batch.  At most ``most`` beginnings of each rule are reported; the others are deferred
    to
    the next batch.  Ends are never deferred."""

    def __init__(self, most: int) -> None:
        self.reported: list[NodeRuleChange] = []
        self.deferred: collections.Counter[str] = collections.Counter()  # by rule
        self._most = most
        self._begun: collections.Counter[str] = collections.Counter()

    def admit(self, rule: str, beginnings: Array) -> Array:
        """The rows whose beginning may be reported now."""
        admitted = beginnings[: max(0, self._most - self._begun[rule])]
        self._begun[rule] += len(admitted)
        if len(admitted) < len(beginnings):
            self.deferred[rule] += len(beginnings) - len(admitted)
        return admitted


class NodeRuleEvaluator:
    def __init__(self, known: Iterable[rules.AlertRule]) -> None:
        self._rules = [rule for rule in known if rule.scope == "node"]
        self._about_silence = [rule for rule in self._rules if rule.names <= rules.ALWAYS_KNOWN]
        self._about_reports = [rule for rule in self._rules if not rule.names <= rules.ALWAYS_KNOWN]
        self._scored = sorted(
            {
                name[: -len(rules.Z)]
                for rule in self._rules
                for name in rule.names
                if name.endswith(rules.Z) and not name.startswith(f"{rules.OWN}.")
            }
        )

    @property
    def column_schema(self) -> Mapping[str, tuple[Any, float]]:
        """The columns that these rules need."""
        return {
            **node_columns.COLUMNS,
            **{f"on {rule.name}": (np.bool_, 0) for rule in self._rules},
            **{
                f"{what} {name}": kind
                for name in self._scored
                for what, kind in (
                    ("mean", (np.float32, 0.0)),
                    ("spread", (np.float32, 0.0)),
                    ("samples", (np.uint8, 0)),
                )
            },
        }

    def evaluate_reports(
        self,
        known: node_columns.NodeColumns,
        block: blocks.ReportBlock,
        words: Sequence[str],
        changes: Changes,
        *,
        evaluated_ms: int,
    ) -> None:
        """``words`` are the names of the metrics that are not standard.

        Judged by the broker's clock, which a machine cannot set back; never earlier than ``evaluated_ms``,
        when the reports before these were judged, nor than an earlier report of the same machine.
        """
        if not self._about_reports:
            return
        place = block.place
        rounds = list(node_columns.split_rounds(place, block.sequence))
        at_ms = np.maximum(block.stored_ms, evaluated_ms)
        if len(rounds) > 1:
            latest_ms = np.full(len(known), evaluated_ms)
            for rows in rounds:
                at_ms[rows] = latest_ms[place[rows]] = np.maximum(at_ms[rows], latest_ms[place[rows]])
        table = self._table(known, block, words, rounds)
        for rule in self._about_reports:
            value = table.columns[rule.measured].values if rule.measured else None
            for rows in rounds:
                self._compare(known, rule, table, rows, place[rows], at_ms, value, changes)

    def evaluate_silence(self, known: node_columns.NodeColumns, clock_ms: int, changes: Changes) -> None:
        """Evaluate rules about silence for every machine, whether or not it reported in this batch."""
        rows = len(known)
        if not rows or not self._about_silence:
            return
        with_names = any("machine" in rule.names for rule in self._about_silence)
        table = known_facts(known, clock_ms, with_names=with_names)
        every = np.arange(rows)
        for rule in self._about_silence:
            value = table.columns[rule.measured].values if rule.measured else None
            at_ms = np.full(rows, clock_ms)
            self._compare(known, rule, table, slice(None), every, at_ms, value, changes)

    def forget(self, known: node_columns.NodeColumns, gone: Array, clock_ms: int, changes: Changes) -> None:
        """End all rules for machines that are removed."""
        groups = list(known.groups)
        for rule in self._rules:
            for at in np.flatnonzero(gone & known.data[f"on {rule.name}"]).tolist():
                group = groups[int(known.data["group"][at])]
                changes.reported.append(
                    NodeRuleChange(rule.name, known.names[at], group, False, clock_ms, None)
                )

    def _table(
        self,
        known: node_columns.NodeColumns,
        block: blocks.ReportBlock,
        words: Sequence[str],
        rounds: list[Any],
    ) -> columns.Table:
        names = {name for rule in self._about_reports for name in rule.names}
        inputs: dict[str, columns.Column] = {}
        for name in names:
            match name:
                case "age_s":
                    values: Array = (block.stored_ms - block.reported_ms) / 1000
                    inputs[name] = columns.Column(types.ValueKind.FLOAT, values)
                case "period_s":
                    inputs[name] = columns.Column(types.ValueKind.FLOAT, block.period_ms / 1000)
                case "machine":
                    machines = known.names.array.take(pa.array(block.place))
                    inputs[name] = columns.Column.from_arrow(types.ValueKind.STRING, machines)
                case "group" | "zone":
                    inputs[name] = _coded(
                        getattr(block, name), known.groups if name == "group" else known.zones
                    )
                case "state":
                    inputs[name] = columns.Column(types.ValueKind.STRING, block.state + 1, cells.STATES)
                case _ if name.startswith(f"{rules.OWN}."):
                    own = _own(block, words, name.removeprefix(f"{rules.OWN}."))
                    inputs[name] = columns.Column(types.ValueKind.FLOAT, own)
                case _ if name.endswith(rules.Z):
                    metric = name[: -len(rules.Z)]
                    scores = self._scores(known, metric, block, rounds)
                    inputs[name] = columns.Column(types.ValueKind.FLOAT, scores)
                case _:
                    inputs[name] = columns.Column(
                        types.ValueKind.FLOAT, block.metrics[cells.METRICS.index(name)]
                    )
        return columns.Table(inputs, rows=len(block))

    def _scores(
        self,
        known: node_columns.NodeColumns,
        metric: str,
        block: blocks.ReportBlock,
        rounds: list[Any],
    ) -> Array:
        """The distance of each value from the running mean, in standard deviations; updates the figures."""
        values = block.metrics[cells.METRICS.index(metric)]
        scores = np.full(len(values), np.nan)
        mean, spread, samples = (known.data[f"{what} {metric}"] for what in ("mean", "spread", "samples"))
        for rows in rounds:
            value, at = values[rows], block.place[rows]
            good = np.abs(value) <= reports_columns.VALUE_MAX
            value, at = value[good].astype(np.float32), at[good]
            times = samples[at].astype(np.float32)
            away = value - mean[at]
            floor = np.maximum(np.abs(mean[at]) * _LEAST_SPREAD, 1e-6)
            sigma = np.maximum(spread[at] * _TO_SIGMA, floor)
            settled = times >= _LEAST
            here = np.full(len(good), np.nan)
            here[good] = np.where(settled, away / sigma, np.nan)
            scores[rows] = here
            away = np.where(settled, np.clip(away, -_EDGE * sigma, _EDGE * sigma), away)
            pull = np.maximum(1 / (times + 1), np.float32(1 / _MEMORY))
            mean[at] += pull * away
            spread[at] += np.where(times > 0, pull * (np.abs(away) - spread[at]), 0)
            samples[at] = np.minimum(times + 1, _MEMORY)
        return scores

    def _compare(
        self,
        known: node_columns.NodeColumns,
        rule: rules.AlertRule,
        table: columns.Table,
        rows: Any,
        place: Array,
        at_ms: Array,
        value: Array | None,
        changes: Changes,
    ) -> None:
        on = known.data[f"on {rule.name}"]
        when = columnar.evaluate(rule.condition, table)[rows]
        was = on[place]
        if not when.any() and not was.any():
            return
        now = np.where(was, ~columnar.evaluate(rule.release, table)[rows], when)
        if rule.only:  # the rule does not apply, or no longer, to other machines
            true = np.flatnonzero(now)
            names = known.names.array.take(pa.array(place[true]))
            now[true] = pc.is_in(names, value_set=pa.array(rule.only, pa.string())).to_numpy(False)
        beginnings = np.flatnonzero(now & ~was)
        now[beginnings] = False
        now[changes.admit(rule.name, beginnings)] = True
        changed = np.flatnonzero(now != was)
        on[place] = now
        if not len(changed):
            return
        at_ms = at_ms[rows]
        measured = None if value is None else value[rows]
        groups = list(known.groups)
        for row in changed.tolist():
            at = int(place[row])
            figure = None if measured is None or not np.isfinite(measured[row]) else float(measured[row])
            group = groups[int(known.data["group"][at])]
            changes.reported.append(
                NodeRuleChange(rule.name, known.names[at], group, bool(now[row]), int(at_ms[row]), figure)
            )


def known_facts(known: node_columns.NodeColumns, clock_ms: int, *, with_names: bool) -> columns.Table:
    """What is known of every machine, whether or not it reported: the columns of `rules.ALWAYS_KNOWN`."""
    data = known.data
    inputs = {
        "group": _coded(data["group"], known.groups),
        "zone": _coded(data["zone"], known.zones),
        "period_s": columns.Column(types.ValueKind.FLOAT, data["period_ms"] / 1000),
        "age_s": columns.Column(types.ValueKind.FLOAT, (clock_ms - data["received_ms"]) / 1000),
    }
    if with_names:
        inputs["machine"] = columns.Column.from_arrow(types.ValueKind.STRING, known.names.array)
    return columns.Table(inputs, rows=len(known))


def _coded(codes: Array, words: Mapping[str, int]) -> columns.Column:
    return columns.Column(types.ValueKind.STRING, codes + 1, tuple(words))


def _own(block: blocks.ReportBlock, words: Sequence[str], name: str) -> Array:
    """The values of a metric that is not standard; NaN where a report has none."""
    values = np.full(len(block), np.nan)
    if name in words:
        those = block.extra_word == words.index(name)
        values[block.extra_row[those]] = block.extra_value[those]
    return values
