"""The state of the fleet in columns, compact enough for Spark's state store. Pure.

The groups of the fleet are divided into shards (`shard_of`).  A shard is one key of Spark's state store: one
`FleetState` that is read, updated with the messages of a micro-batch, advanced to the clock of the batch, and
written back.  Each machine has a few numbers (`node_columns`); each open window has a cell for each group and
each zone (`cells`).

**Time.**  There are two clocks.  A report has the time at which it was made (event time), and the broker
records when it was stored (`stored_ms`).  A machine cannot falsify the latter, and it does not change when a
batch is replayed.  A report belongs to the window of its event time; a window closes when the broker's clock
has passed its end by the watermark delay.  So a machine whose clock is ahead cannot close windows for the
others; its reports are rejected (`FUTURE`).  A report for a closed window is `LATE`, a duplicate
`DUPLICATED`.

**Summaries.**  Channels that merge send summaries instead of node reports.  They are added to the cells with
the same figures, except those of single machines (ranks, staleness, rules about nodes).

Nothing here reads a clock or the network: the same messages give the same results.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from muster.core import duplicates, errors, messages
from muster.pipeline.alerts import rules
from muster.pipeline.fleet import blocks, cells, node_columns, node_rules, summaries
from muster.pipeline.history import data_files

FUTURE = "future"
DUPLICATED = "duplicated"
LATE = "late"
UNUSABLE = "unusable"
TRUNCATED = "metrics-truncated"  # values of metrics beyond `blocks.EXTRA_MAX` names

LAYOUT = 2  # of the data of `FleetState.pack`
UNREADABLE = (
    "the state of the fleet in Spark's checkpoint cannot be read"  # identifies the error in Spark's message
)

_CHANNELS_MAX = 10_000  # that send summaries, tracked by one shard

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Arrival = blocks.DecodedMessage


@dataclass(frozen=True, slots=True)
class FleetStatePlan:
    """The constants of a job: plain data, because it is sent to the executors."""

    window_s: float = 10.0
    delay_s: float = 10.0  # of the watermark
    skew_s: float = 60.0  # how far ahead of the broker a machine's clock may be
    stale_after: float = 3.0  # periods
    forget_s: float = 86400.0
    top: int = 10
    top_metrics: tuple[str, ...] = ("cpu_percent", "memory_percent")
    rules: tuple[rules.AlertRule, ...] = ()
    changes_max: int = 1000  # new alerts of one rule by one shard in one batch; the rest is deferred

    @property
    def window_ms(self) -> int:
        return max(1, int(self.window_s * 1000))


class ClosedWindow(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A closed window: of a group, or this shard's share of a zone or the system."""

    scope: str
    name: str
    from_ms: int
    known: int
    stale: int
    cell: list[Any]  # packed
    top: dict[str, list[tuple[float, str]]] = {}
    gone: bool = False  # its last machine here was removed: no further reports will follow


class ShardOutput(msgspec.Struct, array_like=True):
    clock_ms: int
    closed: list[ClosedWindow] = msgspec.field(default_factory=list)
    changes: list[node_rules.NodeRuleChange] = msgspec.field(default_factory=list)
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    machines: int = 0
    summaries: int = 0  # the last sequence read from their stream
    reports: int = 0  # the last sequence read from the stream of reports
    files: list[data_files.DataFile] = msgspec.field(default_factory=list)  # written, not committed

    def count(self, reason: str, number: int) -> None:
        if number:
            self.counts[reason] = self.counts.get(reason, 0) + number


class StateUnreadable(errors.Conflict):
    """State that another version wrote, although the checkpoint label has this version."""

    code = "state-unreadable"


def shard_of(group: str, shards: int) -> int:
    return zlib.crc32(group.encode()) % shards


class FleetState:
    """The groups of one shard."""

    def __init__(self, plan: FleetStatePlan, known: node_columns.NodeColumns | None = None) -> None:
        self._plan = plan
        self._evaluator = node_rules.NodeRuleEvaluator(plan.rules)
        self.nodes = node_columns.NodeColumns(self._evaluator.column_schema) if known is None else known
        self._clock_ms = 0
        self._closed_ms = 0  # windows that end here or before are closed
        self._open: dict[
            tuple[int, str, int], cells.WindowCell
        ] = {}  # by window's start, scope, code in the roll
        self._seen_messages = duplicates.DuplicateWindows(_CHANNELS_MAX)  # messages of channels that merge

    def feed(
        self, arrivals: Iterable[Arrival], clock_ms: int, *, summaries: Iterable[Arrival] = ()
    ) -> ShardOutput:
        """Process the messages of a micro-batch; ``clock_ms`` is the latest `stored_ms` in it."""
        output = ShardOutput(max(clock_ms, self._clock_ms))
        changes = node_rules.Changes(self._plan.changes_max)
        words = blocks.MetricCodes()
        evaluated_ms = self._clock_ms
        for block in blocks.concat_blocks(self._decoded_blocks(arrivals, words, output)):
            self._ingest(block, list(words), output, changes, evaluated_ms)
            evaluated_ms = max(evaluated_ms, int(block.stored_ms.max()))
        output.count(TRUNCATED, words.dropped)
        for summary in sorted(summaries, key=lambda summary: summary.sequence):
            self._ingest_summaries(summary, output)
        self._clock_ms = output.clock_ms
        self._close(output, changes)
        self._evaluator.evaluate_silence(self.nodes, self._clock_ms, changes)
        output.changes = changes.reported
        for rule, number in changes.deferred.items():
            output.count(f"deferred {rule}", number)
        output.machines = len(self.nodes)
        return output

    # Reports

    def _decoded_blocks(
        self, arrivals: Iterable[Arrival], words: blocks.MetricCodes, output: ShardOutput
    ) -> Iterator[blocks.ReportBlock]:
        for arrival in sorted(arrivals, key=lambda message: message.sequence):
            try:
                yield blocks.ReportBlock.from_message(arrival, self.nodes, words)
            except (pa.ArrowException, ValueError, TypeError, LookupError, ArithmeticError):
                # An unexpected message must not stop the query of the whole fleet permanently.
                output.count(UNUSABLE, arrival.batch.num_rows)

    def _ingest(
        self,
        block: blocks.ReportBlock,
        words: Sequence[str],
        output: ShardOutput,
        changes: node_rules.Changes,
        evaluated_ms: int,
    ) -> None:
        place = self.nodes.places(block.machines)
        skew_ms = int(self._plan.skew_s * 1000)
        future = block.reported_ms > block.stored_ms + skew_ms
        if future.any():
            output.count(FUTURE, int(future.sum()))
            rows = np.flatnonzero(~future)
            block, place = block.select_rows(rows), place[rows]
        window = block.reported_ms // self._plan.window_ms * self._plan.window_ms
        late = window + self._plan.window_ms <= self._closed_ms
        fresh = np.ones(len(block), np.bool_)
        new = np.zeros(len(block), np.bool_)  # the first report of its machine in its window
        data = self.nodes.data
        for row_set in node_columns.split_rounds(place, block.sequence):
            at = place[row_set]
            fresh[row_set] = self.nodes.unseen(at, block.boot[row_set], block.sequence[row_set])
            counted = fresh[row_set] & ~late[row_set]
            new[row_set] = self.nodes.first_in_window(at, window[row_set], counted, self._plan.window_ms)
            data["received_ms"][at] = np.maximum(data["received_ms"][at], block.stored_ms[row_set])
            data["period_ms"][at] = block.period_ms[row_set]
            data["zone"][at] = block.zone[row_set]
            data["group"][at] = block.group[row_set]
        output.count(DUPLICATED, int(len(fresh) - fresh.sum()))
        output.count(LATE, int((fresh & late).sum()))
        kept = fresh & ~late
        if not kept.all():
            rows = np.flatnonzero(kept)
            block, place, window, new = block.select_rows(rows), place[rows], window[rows], new[rows]
        if len(block):
            self._evaluator.evaluate_reports(
                self.nodes, block, place, words, changes, evaluated_ms=evaluated_ms
            )
            for scope, code in (("group", block.group), ("zone", block.zone)):
                self._roll_up(scope, block, code, window, place, new, words)

    def _roll_up(
        self,
        scope: str,
        block: blocks.ReportBlock,
        code: Ints,
        window: Ints,
        place: Ints,
        new: npt.NDArray[np.bool_],
        words: Sequence[str],
    ) -> None:
        """Add reports to the cells of a scope: rows in the order of their cells, then all cells at once."""
        stride = int(code.max()) + 1
        key = window * stride + code
        metrics, reported, state, partial = block.metrics, block.reported_ms, block.state, block.partial
        order = None
        if (np.diff(key) < 0).any():
            order = np.argsort(key, kind="stable")
            key, place, new, metrics = key[order], place[order], new[order], metrics[:, order]
            reported, state, partial = reported[order], state[order], partial[order]
        starts = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
        targets = [
            self._open.setdefault((code_ // stride, scope, code_ % stride), cells.WindowCell())
            for code_ in key[starts].tolist()
        ]
        cells.aggregate(targets, metrics, starts)
        sizes = np.diff(starts, append=len(key))
        cell_of = np.repeat(np.arange(len(starts)), sizes)
        stated = np.bincount(
            cell_of * (len(blocks.STATES) + 1) + state, minlength=len(starts) * (len(blocks.STATES) + 1)
        ).reshape(len(starts), -1)  # equivalent: numpy takes any negative size for the one that is left
        for target, total, machines_, oldest, is_partial, counts in zip(
            targets,
            sizes.tolist(),
            np.add.reduceat(new, starts, dtype=np.int64).tolist(),
            np.minimum.reduceat(reported, starts).tolist(),
            np.logical_or.reduceat(partial, starts).tolist(),
            stated.tolist(),
            strict=True,  # equivalent: of equal length
        ):
            target.total += total
            target.machines += machines_
            target.oldest_ms = min(oldest, target.oldest_ms or oldest)
            target.partial |= is_partial
            cells.add_counts(
                target.states,
                {word: count for word, count in zip((*blocks.STATES, "other"), counts, strict=True) if count},
            )
        if len(block.extra_row):
            row = block.extra_row if order is None else np.argsort(order)[block.extra_row]
            _fold_extra(targets, cell_of[row], block.extra_word, block.extra_value, words)
        if scope == "group" and self._plan.top:
            self._rank(targets, metrics, cell_of, place)
        for first, facts in block.dropped:
            at = first if order is None else int(np.flatnonzero(order == first)[0])
            cells.add_counts(targets[cell_of[at]].dropped, facts.dropped)

    def _rank(
        self, targets: Sequence[cells.WindowCell], metrics: cells.Floats, cell_of: Ints, place: Ints
    ) -> None:
        most = self._plan.top
        for name in self._plan.top_metrics:
            values = metrics[cells.METRICS.index(name)]
            least = np.array([_least(target, name, most) for target in targets])
            rows = np.flatnonzero(values > least[cell_of])  # usually only a few are ranked
            here = cell_of[rows]
            starts = np.flatnonzero(np.r_[True, here[1:] != here[:-1]]) if len(here) else here
            for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(here)], strict=False):
                ranked = rows[start:end]
                if len(ranked) > most:
                    ranked = ranked[np.argpartition(values[ranked], -most)[-most:]]
                targets[here[start]].rank(name, values[ranked], place[ranked], most)

    # Summaries

    def _ingest_summaries(self, arrival: Arrival, output: ShardOutput) -> None:
        facts = arrival.facts
        verdict = self._seen_messages.observe(facts.channel, facts.boot, facts.sequence)
        if verdict is not duplicates.DuplicateVerdict.NEW:
            reason = LATE if verdict is duplicates.DuplicateVerdict.LATE else DUPLICATED
            output.count(reason, arrival.batch.num_rows)
            return
        try:
            group, zone = (
                codes(arrival.batch.column(name)).tolist()
                for name, codes in (("group", self.nodes.group_codes), ("zone", self.nodes.zone_codes))
            )
            rows = [summaries.ChannelSummary.from_row(row) for row in arrival.batch.to_pylist()]
        except (messages.MalformedMessage, pa.ArrowException, ValueError, TypeError, LookupError):
            output.count(UNUSABLE, arrival.batch.num_rows)
            return
        lost = dict(facts.dropped)
        for row, group_code, zone_code in zip(rows, group, zone, strict=True):  # equivalent: of equal length
            window = row.from_ms // self._plan.window_ms * self._plan.window_ms
            if row.from_ms > arrival.stored_ms + int(self._plan.skew_s * 1000):
                output.count(FUTURE, 1)
            elif window + self._plan.window_ms <= self._closed_ms:
                output.count(LATE, 1)
            else:
                output.count("summaries", 1)
                for scope, code in (("group", group_code), ("zone", zone_code)):
                    cell = self._open.setdefault((window, scope, code), cells.WindowCell())
                    if not row.add_to(cell) and scope == "group":
                        output.count(TRUNCATED, 1)
                    cell.partial |= facts.partial
                    cells.add_counts(cell.dropped, lost)
                lost = {}  # reported once

    # Closing windows

    def _close(self, output: ShardOutput, changes: node_rules.Changes) -> None:
        width = self._plan.window_ms
        closing_ms = (self._clock_ms - int(self._plan.delay_s * 1000)) // width * width
        if closing_ms <= self._closed_ms:
            return
        last = closing_ms - width
        gone = self._forget(changes)
        data = self.nodes.data
        stale = self._clock_ms - data["received_ms"] > data["period_ms"] * self._plan.stale_after
        for scope, words in (("group", self.nodes.groups), ("zone", self.nodes.zones)):
            names = list(words)
            known = np.bincount(data[scope], minlength=len(names))
            silent = np.bincount(data[scope][stale], minlength=len(names))
            # The last window is closed even without reports.
            if self._closed_ms > 0:  # equivalent: above 0 or 1: times are far beyond both
                for code in np.flatnonzero(known).tolist():
                    self._open.setdefault((last, scope, code), cells.WindowCell())
            ready = sorted(key for key in self._open if key[0] <= last and key[1] == scope)
            system: dict[int, _SystemShare] = {}
            for key in ready:
                cell = self._open.pop(key)
                start_ms, _, code = key
                top = self._named(cell)
                counts = (int(known[code]), int(silent[code]))
                if scope == "group":
                    system.setdefault(start_ms, _SystemShare()).add(cell, counts, top, self._plan.top)
                output.closed.append(_closed(scope, names[code], start_ms, counts, cell, top))
            for name in gone[scope]:
                output.closed.append(_closed(scope, name, last, (0, 0), cells.WindowCell(), {}, gone=True))
            if scope == "group" and gone[scope]:
                system.setdefault(last, _SystemShare())  # an empty system has a report, too
            for start_ms, share in system.items():
                counts = (
                    (len(self.nodes), int(stale.sum())) if start_ms == last else (share.known, share.stale)
                )
                output.closed.append(_closed("system", "", start_ms, counts, share.cell, share.top))
        self._closed_ms = closing_ms

    def _named(self, cell: cells.WindowCell) -> dict[str, list[tuple[float, str]]]:
        """The ranks of a cell, with the names of the machines."""
        ranks = {
            name: [
                (value, self.nodes.names[at])
                for value, at in zip(values.tolist(), places.tolist(), strict=True)  # equivalent: as many
            ]
            for name, (values, places) in cell.ranks.items()
        }
        cell.ranks = {}
        return ranks

    def _forget(self, changes: node_rules.Changes) -> dict[str, list[str]]:
        """Remove silent machines. Returns the names of groups and zones that became empty, by scope."""
        gone = self._clock_ms - self.nodes.data["received_ms"] > self._plan.forget_s * 1000
        if not gone.any():
            return {"group": [], "zone": []}
        self._evaluator.forget(self.nodes, gone, self._clock_ms, changes)
        left = {scope: np.unique(self.nodes.data[scope][gone]).tolist() for scope in ("group", "zone")}
        names = {
            scope: [list(words)[code] for code in left[scope]]
            for scope, words in (("group", self.nodes.groups), ("zone", self.nodes.zones))
        }
        moved = self.nodes.keep(~gone)
        for cell in self._open.values():
            for name, (values, at) in cell.ranks.items():
                here = moved[at] >= 0
                cell.ranks[name] = values[here], moved[at][here]
        self._renumber()
        return {
            "group": [name for name in names["group"] if name not in self.nodes.groups],
            "zone": [name for name in names["zone"] if name not in self.nodes.zones],
        }

    def _renumber(self) -> None:
        """Reassign codes after groups or zones became empty."""
        for scope, words in (("group", self.nodes.groups), ("zone", self.nodes.zones)):
            used = sorted(
                {
                    *np.unique(self.nodes.data[scope]).tolist(),
                    *(key[2] for key in self._open if key[1] == scope),
                }
            )
            names = list(words)
            words.clear()
            words.update((names[old], code) for code, old in enumerate(used))
            table = np.zeros(len(names) + 1, np.int32)
            table[used] = np.arange(len(used))
            self.nodes.data[scope] = table[self.nodes.data[scope]]
            self._open = {
                (start, kind, int(table[code]) if kind == scope else code): cell
                for (start, kind, code), cell in self._open.items()
            }

    # Serialization

    def pack(self) -> bytes:
        """Everything except the names of machines (`node_columns.NodeNames`)."""
        open_cells = [[*key, cell.pack()] for key, cell in self._open.items()]
        return msgspec.msgpack.encode(
            (
                LAYOUT,
                self._clock_ms,
                self._closed_ms,
                self._seen_messages.remembered(),
                self.nodes.pack(),
                open_cells,
            )
        )

    @classmethod
    def unpack(cls, data: bytes, plan: FleetStatePlan, names: node_columns.NodeNames) -> FleetState:
        try:
            return cls._unpacked(msgspec.msgpack.decode(data), plan, names)
        except (msgspec.MsgspecError, pa.ArrowException, ValueError, TypeError, LookupError) as error:
            raise StateUnreadable(f"{UNREADABLE}: {error}") from error

    @classmethod
    def _unpacked(
        cls, fields: Sequence[Any], plan: FleetStatePlan, names: node_columns.NodeNames
    ) -> FleetState:
        if fields[0] != LAYOUT:
            raise ValueError(f"its layout is {fields[0]!r:.20}, expected {LAYOUT}")
        _, clock_ms, closed_ms, seen, packed, open_cells = fields
        fleet = cls(
            plan,
            node_columns.NodeColumns.unpack(
                packed, names, node_rules.NodeRuleEvaluator(plan.rules).column_schema
            ),
        )
        fleet._clock_ms, fleet._closed_ms = clock_ms, closed_ms
        fleet._seen_messages = duplicates.DuplicateWindows(
            _CHANNELS_MAX, {name: [tuple(seen) for seen in boots] for name, boots in seen.items()}
        )
        fleet._open = {
            (start, scope, code): cells.WindowCell.unpack(cell) for start, scope, code, cell in open_cells
        }
        return fleet


class _SystemShare:
    """This shard's share of the system: the sum of its groups."""

    def __init__(self) -> None:
        self.cell = cells.WindowCell()
        self.known = self.stale = 0
        self.top: dict[str, list[tuple[float, str]]] = {}

    def add(
        self,
        cell: cells.WindowCell,
        counts: tuple[int, int],
        top: Mapping[str, list[tuple[float, str]]],
        most: int,
    ) -> None:
        self.cell.add(cell)
        self.known += counts[0]
        self.stale += counts[1]
        for name, ranked in top.items():
            self.top[name] = sorted([*self.top.get(name, ()), *ranked], reverse=True)[:most]


def _closed(
    scope: str,
    name: str,
    start_ms: int,
    counts: tuple[int, int],
    cell: cells.WindowCell,
    top: dict[str, list[tuple[float, str]]],
    *,
    gone: bool = False,
) -> ClosedWindow:
    known, stale = counts
    return ClosedWindow(
        scope=scope,
        name=name,
        from_ms=start_ms,
        known=known,
        stale=stale,
        cell=cell.pack(),
        top=top,
        gone=gone,
    )


def _least(cell: cells.WindowCell, name: str, most: int) -> float:
    """The value that a new value must exceed to be ranked."""
    ranked = cell.ranks.get(name)
    return float(ranked[0][-1]) if ranked is not None and len(ranked[0]) >= most else -np.inf


def _fold_extra(
    targets: Sequence[cells.WindowCell], cell_of: Ints, word: Ints, value: cells.Floats, words: Sequence[str]
) -> None:
    key = cell_of * len(words) + word
    order = np.argsort(key, kind="stable")
    key, value = key[order], value[order]
    starts = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    counts = np.diff(starts, append=len(key))
    parts = (
        np.add.reduceat(value, starts),
        np.minimum.reduceat(value, starts),
        np.maximum.reduceat(value, starts),
    )
    for pair, count, total, least, most in zip(
        key[starts].tolist(),
        counts.tolist(),
        *(part.tolist() for part in parts),
        strict=True,  # equivalent: of equal length
    ):
        targets[pair // len(words)].fold_extra(
            words[pair % len(words)], cells.ExtraMetric(count, total, least, most)
        )
