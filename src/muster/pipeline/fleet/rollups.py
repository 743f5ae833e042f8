"""Reports of groups, zones and the system, and the rules about them. Pure.

All shards close a window in the same batch, because they receive the same clock.  So a group is the sum of
the shares of all shards in one batch, and the system is the sum of the groups.  Only the baselines of anomaly
detection are kept between batches.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from muster.core.reports import columns
from muster.pipeline import protocol
from muster.pipeline.alerts import rules, tracker
from muster.pipeline.fleet import cells, group_messages, node_rules, state
from muster.predicates.backends import python

ALL = "*"  # the group of a zone's report: every group
GROUPS_LISTED = 1000  # in a system report
METRICS_LISTED = ("cpu_percent", "memory_percent", "disk_percent", "load_1m")  # of each of them, in short

#: Scales the median of absolute deviations to the standard deviation of a normal distribution.
_MAD_TO_SIGMA = 1.4826
_LEAST_SPREAD = 0.01  # of the median: without it any change of a constant value has an infinite score


@dataclass(slots=True)
class ScopeTotals:
    """The totals of a scope over one window."""

    scope: str
    name: str
    from_ms: int
    width_ms: int = 10_000
    cell: cells.WindowCell = field(default_factory=cells.WindowCell)
    known: int = 0
    stale: int = 0
    gone: bool = False  # all of its machines were removed

    @property
    def to_ms(self) -> int:
        return self.from_ms + self.width_ms

    @property
    def about(self) -> str:
        return self.scope if self.scope == "system" else f"{self.scope}:{self.name}"

    @property
    def top(self) -> dict[str, list[tuple[float, str]]]:
        """The highest values of ranked metrics, and their machines."""
        return self.cell.table.ranking(self.cell.row)

    @property
    def figures(self) -> cells.Floats:
        return self.cell.figures()


def scope_totals(closed: Iterable[state.ClosedWindow], top: int = 10) -> list[ScopeTotals]:
    """Totals of groups, zones and the system, for each window."""
    shares: dict[tuple[int, int, str], list[state.ClosedWindow]] = {}
    for share in closed:
        shares.setdefault((share.from_ms, share.width_ms, share.scope), []).append(share)
    totals: list[ScopeTotals] = []
    latest: dict[str, tuple[dict[str, int], cells.Ints]] = {}  # by scope: names and figures
    for (from_ms, width_ms, scope), parts in sorted(shares.items(), reverse=True):
        names, table, figures = added_up(parts)
        # Only the last of several windows has the shares of shards without reports.
        newest, counted = latest.setdefault(scope, (names, figures))
        if newest is not names and scope in state.SCOPES:  # shares of the system are sums already
            places = np.array([newest.get(name, -1) for name in names], np.int64)
            figures[:2, places >= 0] = counted[:2, places[places >= 0]]
        totals += _listed(scope, (from_ms, width_ms), list(names), table, figures, top)
        if scope == "group":
            system = cells.CellTable(1)
            system.add(table, np.zeros(len(table), np.int64))
            figures = figures.sum(axis=1, keepdims=True)
            figures[2] = 1  # an empty system has a report, too
            totals += _listed("system", (from_ms, width_ms), [""], system, figures, top)
    return sorted(totals, key=lambda many: (many.from_ms, many.scope, many.name))


def added_up(
    parts: Sequence[state.ClosedWindow],
) -> tuple[dict[str, int], cells.CellTable, cells.Ints]:
    """The shares of a window: names and their rows, the table, and for each name the machines that are known,
    those that are stale, and the shares that have not gone."""
    names: dict[str, int] = {}
    for part in parts:
        for name in part.names:
            names.setdefault(name, len(names))
    table = cells.CellTable(len(names))
    figures = np.zeros((3, len(names)), np.int64)
    for part in parts:
        rows = np.array([names[name] for name in part.names], np.int64)
        table.add(part.table(), rows)
        figures[:, rows] += np.array([part.known, part.stale, [not part.gone] * len(rows)], np.int64)
    return names, table, figures


def by_table(totals: Sequence[ScopeTotals]) -> list[tuple[cells.CellTable, cells.Ints, cells.Ints]]:
    """Each table with cells of these totals: with the positions of its totals, and their rows."""
    members: dict[int, tuple[cells.CellTable, list[int], list[int]]] = {}
    for position, many in enumerate(totals):
        cell = many.cell
        _, positions, rows = members.setdefault(id(cell.table), (cell.table, [], []))
        positions.append(position)
        rows.append(cell.row)
    return [
        (table, np.array(positions, np.int64), np.array(rows, np.int64))
        for table, positions, rows in members.values()
    ]


def _listed(
    scope: str,
    span_ms: tuple[int, int],
    names: list[str],
    table: cells.CellTable,
    figures: cells.Ints,
    top: int,
) -> list[ScopeTotals]:
    table.compact(top)
    table.name_machines()
    table.figures()  # several threads read them later
    return [
        ScopeTotals(scope, name, *span_ms, cells.WindowCell(table, row), known, stale, gone=not remaining)
        for row, (name, known, stale, remaining) in enumerate(zip(names, *figures.tolist(), strict=True))
    ]


class Baselines:
    """The recent means of each metric, for each group, zone and the system.

    The robust z-score of a value is its distance from the median, in units of the median absolute deviation:
    a few outliers in the history do not change it.
    """

    def __init__(self, length: int = 120, least: int = 20) -> None:
        self._length = length
        self._least = least  # stored values before scores are computed
        self._kept: dict[tuple[str, str], collections.deque[tuple[int, cells.Floats]]] = {}

    def scores(self, scope: str, name: str, at_ms: int, means: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The score of each of ``means``, which are then stored. NaN where there is too little history.

        A repeated batch has the same scores, although its windows are stored already.
        """
        kept = self._kept.setdefault((scope, name), collections.deque(maxlen=self._length + 1))
        earlier = [values for before_ms, values in kept if before_ms < at_ms][-self._length :]
        scores = np.full(len(means), np.nan)
        if len(earlier) >= self._least:
            past = np.stack(earlier)
            known = (~np.isnan(past)).sum(axis=0) >= self._least
            if known.any():
                middle = np.nanmedian(past[:, known], axis=0)
                spread = np.nanmedian(np.abs(past[:, known] - middle), axis=0) * _MAD_TO_SIGMA
                floor = np.maximum(np.abs(middle) * _LEAST_SPREAD, 1e-9)
                scores[known] = (means[known] - middle) / np.maximum(spread, floor)
        if not kept or at_ms > kept[-1][0]:
            kept.append((at_ms, means))
        return scores


def facts(many: ScopeTotals, scores: np.ndarray[Any, Any] | None = None) -> dict[str, Any]:
    """The attributes of a scope, as declared in `rules.MODELS`."""
    cell = many.cell
    attributes: dict[str, Any] = {
        "name": many.name or many.scope,
        "machines": cell.machine_count(),
        "reports": cell.total,
        "known": many.known,
        "stale": many.stale,
        "stale_share": many.stale / many.known if many.known else 0.0,
        "dropped": sum(cell.dropped.values()),
        "partial": cell.partial,
    }
    of = many.figures.tolist()
    for at, name in enumerate(cells.METRICS):
        if of[0][at]:
            attributes[f"{name}_mean"] = of[1][at] / of[0][at]
            attributes |= {
                f"{name}_{part}": of[row][at]
                for row, part in enumerate(cells.FIGURES)
                if row > 1 and of[row][at] == of[row][at]
            }
    for name, metric in cell.extra.items():
        if metric.count:
            mean = metric.sum / metric.count
            attributes |= {
                f"{rules.OWN}.{name}_{part}": value
                for part, value in (("mean", mean), ("min", metric.min), ("max", metric.max))
            }
    if scores is not None:
        attributes |= {
            f"{name}{rules.Z}": float(score)
            for name, score in zip(cells.METRICS, scores, strict=True)
            if not np.isnan(score)
        }
    return attributes


def means(cell: cells.WindowCell) -> np.ndarray[Any, Any]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(cell.count > 0, cell.sum / cell.count, np.nan)


class ScopeRuleEvaluator:
    """Evaluates the rules about groups, zones and the system."""

    def __init__(self, known: Sequence[rules.AlertRule], baselines: Baselines) -> None:
        self._rules = [
            (rule, python.compile(rule.condition), python.compile(rule.release))
            for rule in known
            if rule.scope != "node"
        ]
        self.scored = {  # scopes for which a rule needs scores
            rule.scope for rule, _, _ in self._rules if any(name.endswith(rules.Z) for name in rule.names)
        }
        self._baselines = baselines

    def evaluate(
        self, totals: Sequence[ScopeTotals], on_before: Set[tuple[str, str]]
    ) -> list[tracker.RuleVerdict]:
        """``on_before``: the pairs of rule and object for which the rule was true before."""
        verdicts: list[tracker.RuleVerdict] = []
        is_on = dict.fromkeys(on_before, True)
        for many in self._expected(totals):
            applying = [compiled for compiled in self._rules if _applies(compiled[0], many)]
            if not applying:
                continue
            scores = None
            if many.scope in self.scored:
                scores = self._baselines.scores(many.scope, many.name, many.from_ms, means(many.cell))
            known = facts(many, scores)
            for rule, when, until in applying:
                key = (rule.name, many.about)
                if many.gone and many.name not in rule.only:
                    on = False
                else:
                    on = not until(known.get) if is_on.get(key) else when(known.get)
                is_on[key] = on
                value = known.get(rule.measured) if rule.measured else None
                verdicts.append(
                    tracker.RuleVerdict(
                        rule.name,
                        many.about,
                        on,
                        many.to_ms,
                        float(value) if value is not None and np.isfinite(value) else None,
                        many.name if many.scope == "group" else "",
                    )
                )
        return verdicts

    def _expected(self, totals: Sequence[ScopeTotals]) -> list[ScopeTotals]:
        """Including scopes that rules name in `only` and that did not report."""
        there = {(many.scope, many.name, many.from_ms, many.width_ms) for many in totals}
        windows = {(many.from_ms, many.width_ms) for many in totals}
        missing = {
            (rule.scope, name, *span_ms)
            for rule, _, _ in self._rules
            for name in rule.only
            for span_ms in windows
        } - there
        return sorted(
            [*totals, *(ScopeTotals(*absent) for absent in missing)],
            key=lambda many: (many.from_ms, many.scope, many.name),
        )


def _applies(rule: rules.AlertRule, many: ScopeTotals) -> bool:
    return rule.scope == many.scope and (not rule.only or many.name in rule.only)


def node_verdicts(changes: Iterable[node_rules.NodeRuleChange]) -> list[tracker.RuleVerdict]:
    return [
        tracker.RuleVerdict(
            change.rule, f"node:{change.machine}", change.on, change.at_ms, change.value, change.group
        )
        for change in changes
    ]


def group_report(many: ScopeTotals) -> columns.GroupReport:
    (head,) = _heads([many], many.cell.table, np.array([many.cell.row]))
    return msgspec.structs.replace(head, metrics=many.cell.rollups(), top=_ranked(many))


def encoded_reports(totals: Sequence[ScopeTotals]) -> list[bytes]:
    """The same as `group_report` for each group or zone, in MessagePack: in columns, because there are
    thousands."""
    encoded = [b""] * len(totals)
    for table, positions, rows in by_table(totals):
        heads = _heads([totals[position] for position in positions.tolist()], table, rows)
        for position, data in zip(positions.tolist(), group_messages.encode(heads, table, rows), strict=True):
            encoded[position] = data
    return encoded


def _heads(
    totals: Sequence[ScopeTotals], table: cells.CellTable, rows: cells.Ints
) -> list[columns.GroupReport]:
    """As `group_report`, without metrics and rankings; ``rows``: those of the totals in the table."""
    figures = (
        table.total[rows].tolist(),
        table.machines[rows].tolist(),
        table.oldest_ms[rows].tolist(),
        table.partial[rows].tolist(),
        table.states.T[rows].tolist(),
        rows.tolist(),
    )
    heads = []
    for many, reports, machines, oldest_ms, partial, states, row in zip(totals, *figures, strict=True):
        is_zone = many.scope == "zone"
        heads.append(
            columns.GroupReport(
                group=ALL if is_zone else many.name,
                zone=many.name if is_zone else None,
                from_ms=many.from_ms,
                to_ms=many.from_ms + many.width_ms,
                machines=many.cell.machine_count() if row in table.merged else machines,
                reports=reports,
                stale=many.stale,
                states={name: count for name, count in zip(cells.STATES, states, strict=True) if count},
                oldest_ms=None if oldest_ms == cells.NEVER else oldest_ms,
                dropped=table.dropped.get(row, {}),
                partial=partial,
            )
        )
    return heads


def system_report(many: ScopeTotals, groups: Iterable[ScopeTotals]) -> columns.SystemReport:
    """With a summary of each group: the rest of its metrics is in its own report."""
    listed = tuple(
        columns.GroupReport(
            group=group.name,
            from_ms=group.from_ms,
            to_ms=group.to_ms,
            machines=group.cell.machine_count(),
            reports=group.cell.total,
            stale=group.stale,
            states=group.cell.states,
            metrics=_in_short(group),
        )
        for group in list(groups)[:GROUPS_LISTED]
    )
    whole = group_report(many)
    shared = {
        name: getattr(whole, name) for name in columns.SystemReport.__struct_fields__ if name != "groups"
    }
    return columns.SystemReport(groups=listed, **shared)


def _in_short(many: ScopeTotals) -> dict[str, columns.MetricRollup]:
    metrics = {}
    for name in METRICS_LISTED:
        count, total, *_, p95, _ = many.figures[:, cells.METRICS.index(name)].tolist()
        if count:
            p95 = None if p95 != p95 else round(p95, 4)
            metrics[name] = columns.MetricRollup(count=int(count), sum=round(total, 4), p95=p95)
    return metrics


def top_nodes(many: ScopeTotals) -> protocol.TopNodes:
    return protocol.TopNodes(
        from_ms=many.from_ms,
        to_ms=many.to_ms,
        metrics={name: list(ranked) for name, ranked in _ranked(many).items()},
    )


def _ranked(many: ScopeTotals) -> dict[str, tuple[columns.RankedNode, ...]]:
    return {
        name: tuple(columns.RankedNode(machine, value) for value, machine in ranked)
        for name, ranked in many.top.items()
    }
