"""The state of the fleet in columns, compact enough for Spark's state store. Pure.

The machines of the fleet are divided into shards by a hash of their names (`shards`), so that shards are
of equal size whatever the groups are, and a machine stays in its shard when it moves to another group or
zone.  A shard is one key of Spark's state store: one `FleetState` that is read, updated with the messages of
a micro-batch, advanced to the clock of the batch, and written back.  Each machine has a few numbers
(`node_columns`); each open window has a cell for each group and each zone (`cells`).  The cells
of all shards are added up later (`merged`).

**Time.**  There are two clocks.  A report has the time at which it was made (event time), and the broker
records when it was stored (`stored_ms`).  A machine cannot falsify the latter, and it does not change when a
batch is replayed.  A report belongs to the window of its event time; a window closes when the broker's clock
has passed its end by the watermark delay.  So a machine whose clock is ahead cannot close windows for the
others; its reports are rejected (`FUTURE`).  A report for a closed window is `LATE`, a duplicate
`DUPLICATED`.

**Outages.**  While the domain itself is down, nothing is stored, not even the pipeline's own ticks.  That
time does not count as silence of the machines, and windows in it are not reported as empty: after an outage
or a restore from a backup, machines have as long to report as usual.

**Summaries.**  Channels that merge send summaries instead of node reports.  They are added to the cells with
the same figures, except those of single machines (ranks, staleness, rules about nodes).

Nothing here reads a clock or the network: the same messages give the same results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from muster.core import duplicates, errors
from muster.pipeline.alerts import rules
from muster.pipeline.fleet import (
    blocks,
    cell_arrays,
    cells,
    node_columns,
    node_rules,
    removal,
    summaries,
    window_grid,
)
from muster.pipeline.history import data_files

FUTURE = "future"
DUPLICATED = "duplicated"
LATE = "late"
UNUSABLE = "unusable"
UNGROUPED = "too-many-groups"  # reports of groups beyond `node_columns.GROUPS_MAX`
TRUNCATED = "metrics-truncated"  # values of metrics beyond `blocks.EXTRA_MAX` names

OUTAGE_MS = 15_000  # a longer time without any message is an outage: ticks are stored every second
LAYOUT = 6  # of the data of `FleetState.pack`
UNREADABLE = (
    "the state of the fleet in Spark's checkpoint cannot be read"  # identifies the error in Spark's message
)

CHANNELS_MAX = 10_000  # that send summaries, tracked by one shard

Ints = npt.NDArray[np.int64]
SCOPES = ("group", "zone")


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
    memory: tuple[tuple[str, float], ...] = ()  # columns of a user's steps, and their initial values
    changes_max: int = 1000  # new alerts of one rule by one shard in one batch; the rest is deferred

    @property
    def window_ms(self) -> int:
        return max(1, int(self.window_s * 1000))

    @property
    def column_schema(self) -> dict[str, tuple[Any, float]]:
        """The columns of machines that the rules and steps need."""
        memory = {name: (np.float64, start) for name, start in self.memory}
        return {**node_rules.NodeRuleEvaluator(self.rules).column_schema, **memory}


class ClosedWindow(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """This shard's share of a closed window: its groups, or its zones."""

    scope: str
    from_ms: int
    width_ms: int
    names: list[str]
    known: list[int]  # machines, for each name
    stale: list[int]
    cells: Any  # a `cells.CellTable` with a row for each name, or one that is packed
    gone: bool = False  # the last machines of these names left this shard: no further reports will follow

    def table(self) -> cells.CellTable:
        """Of which nothing else keeps a reference."""
        return self.cells if isinstance(self.cells, cells.CellTable) else cells.CellTable.unpack(self.cells)


class ShardOutput(msgspec.Struct, array_like=True):
    clock_ms: int
    closed: list[ClosedWindow] = msgspec.field(default_factory=list)
    changes: list[node_rules.NodeRuleChange] = msgspec.field(default_factory=list)
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    machines: int = 0
    summaries: int = 0  # the last sequence read from their stream
    reports: int = 0  # the last sequence read from the stream of reports
    files: list[data_files.DataFile] = msgspec.field(default_factory=list)  # written, not committed
    removed: list[str] = msgspec.field(default_factory=list)  # machines that a user removed
    faults: dict[str, str] = msgspec.field(default_factory=dict)  # of a user's steps
    state_bytes: int = 0  # of the shard, if it is in a file; without the names of machines

    def count(self, reason: str, number: int) -> None:
        if number:
            self.counts[reason] = self.counts.get(reason, 0) + number


class StateUnreadable(errors.Conflict):
    """State that another version wrote, although the checkpoint label has this version."""

    code = "state-unreadable"


class FleetState:
    """The machines of one shard."""

    def __init__(self, plan: FleetStatePlan, known: node_columns.NodeColumns | None = None) -> None:
        self.plan = plan
        self._evaluator = node_rules.NodeRuleEvaluator(plan.rules)
        self.nodes = node_columns.NodeColumns(plan.column_schema) if known is None else known
        self.clock_ms = 0
        self.closed_ms = 0  # windows that end here or before are closed
        self.grid = window_grid.WindowGrid.of_width(plan.window_ms)
        # By number and scope; the row of a cell is the code of its group or zone.
        self.open_cells: dict[tuple[int, str], cells.CellTable] = {}
        self.resumed_ms = 0  # the end of the last outage
        self.populated: dict[str, set[str]] = {scope: set() for scope in SCOPES}  # names with machines
        self.seen_messages = duplicates.DuplicateWindows(CHANNELS_MAX)  # messages of channels that merge

    def feed(
        self,
        pieces: Iterable[blocks.ReportPiece],
        clock_ms: int,
        *,
        summaries: Iterable[blocks.DecodedMessage] = (),
        activity: Iterable[tuple[int, int]] = (),
        removals: Iterable[removal.MachineRemoval] = (),
        into: ShardOutput | None = None,
    ) -> ShardOutput:
        """Process the messages of a micro-batch; ``clock_ms`` is the latest `stored_ms` in it.

        ``activity``: periods in which messages of any kind were stored; not known if empty. ``into``: the
        output of other shards in the same batch.
        """
        output = into or ShardOutput(clock_ms)
        output.clock_ms = max(output.clock_ms, clock_ms, self.clock_ms)
        changes = node_rules.Changes(self.plan.changes_max)
        words = blocks.MetricCodes()
        evaluated_ms = self.clock_ms
        for block in self._decoded_blocks(pieces, words, output):
            self._ingest(block, list(words), output, changes, evaluated_ms)
            evaluated_ms = max(evaluated_ms, int(block.stored_ms.max()))
        output.count(TRUNCATED, words.dropped)
        for summary in sorted(summaries, key=lambda summary: summary.sequence):
            self._ingest_summaries(summary, output)
        self._excuse_outages(activity)
        self.clock_ms = output.clock_ms
        for request in removals:
            gone = request.selects(self.nodes)
            output.removed += self.nodes.names.array.filter(pa.array(gone)).to_pylist()
            self._remove(gone, changes)
        self._close(output, changes)
        self._evaluator.evaluate_silence(self.nodes, self.clock_ms, changes)
        output.changes += changes.reported
        for rule, number in changes.deferred.items():
            output.count(f"deferred {rule}", number)
        output.machines += len(self.nodes)
        return output

    # Reports

    def _decoded_blocks(
        self, pieces: Iterable[blocks.ReportPiece], words: blocks.MetricCodes, output: ShardOutput
    ) -> Iterator[blocks.ReportBlock]:
        ordered = sorted(pieces, key=lambda piece: piece.sequence)
        places = self.nodes.places([piece.batch.column("machine") for piece in ordered])
        for piece, place in zip(ordered, places, strict=True):
            try:
                yield blocks.ReportBlock.from_piece(piece, place, self.nodes, words)
            except (pa.ArrowException, ValueError, TypeError, LookupError, ArithmeticError):
                # An unexpected message must not stop the query of the whole fleet permanently.
                output.count(UNUSABLE, piece.batch.num_rows)

    def _ingest(
        self,
        block: blocks.ReportBlock,
        words: Sequence[str],
        output: ShardOutput,
        changes: node_rules.Changes,
        evaluated_ms: int,
    ) -> None:
        if (block.group < 0).any():
            rows = np.flatnonzero(block.group >= 0)
            output.count(UNGROUPED, len(block) - len(rows))
            block = block.select_rows(rows)
        skew_ms = int(self.plan.skew_s * 1000)
        future = block.reported_ms > block.stored_ms + skew_ms
        if future.any():
            output.count(FUTURE, int(future.sum()))
            block = block.select_rows(np.flatnonzero(~future))
        window = self.grid.numbers(block.reported_ms)
        late = window < self.grid.number(self.closed_ms)
        fresh = np.ones(len(block), np.bool_)
        new = np.zeros(len(block), np.bool_)  # the first report of its machine in its window
        data = self.nodes.data
        for row_set in node_columns.split_rounds(block.place, block.sequence):
            at = block.place[row_set]
            fresh[row_set] = self.nodes.unseen(at, block.boot[row_set], block.sequence[row_set])
            counted = fresh[row_set] & ~late[row_set]
            new[row_set] = self.nodes.first_in_window(at, window[row_set], counted)
            data["received_ms"][at] = np.maximum(data["received_ms"][at], block.stored_ms[row_set])
            data["period_ms"][at] = block.period_ms[row_set]
            data["zone"][at] = block.zone[row_set]
            data["group"][at] = block.group[row_set]
        output.count(DUPLICATED, int(len(fresh) - fresh.sum()))
        output.count(LATE, int((fresh & late).sum()))
        kept = fresh & ~late
        if not kept.all():
            rows = np.flatnonzero(kept)
            block, window, new = block.select_rows(rows), window[rows], new[rows]
        if len(block):
            self._evaluator.evaluate_reports(self.nodes, block, words, changes, evaluated_ms=evaluated_ms)
            for scope, code in (("group", block.group), ("zone", block.zone)):
                self._roll_up(scope, block, code, window, new, words)

    def _roll_up(
        self,
        scope: str,
        block: blocks.ReportBlock,
        code: Ints,
        window: Ints,
        new: npt.NDArray[np.bool_],
        words: Sequence[str],
    ) -> None:
        """Add reports to the cells of a scope."""
        rows = int(code.max()) + 1
        numbers, order = np.unique(window, return_inverse=True)
        if len(block.extra_row):
            # Of all windows at once: the cells of a window follow those of the window before.
            cell = (order * rows + code)[block.extra_row]
            row, word, figures = cell_arrays.extra_figures(cell, block.extra_word, block.extra_value)
            ends = np.searchsorted(row, (np.arange(len(numbers)) + 1) * rows).tolist()
            for at, (number, start, end) in enumerate(zip(numbers.tolist(), [0, *ends], ends, strict=False)):
                self._table(number, scope, rows).add_figures(
                    row[start:end] - at * rows, word[start:end], figures[:, start:end], words
                )
        for number in numbers.tolist():
            table = self._table(number, scope, rows)
            inside = window == number
            selected: Any = np.flatnonzero(inside)
            if len(selected) == len(block):
                selected = slice(None)  # without copies
            table.add_reports(
                code[selected],
                block.metrics[:, selected],
                block.reported_ms[selected],
                block.state[selected],
                block.partial[selected],
                new[selected],
            )
            if scope == "group" and self.plan.top:
                for name in self.plan.top_metrics:
                    values = block.metrics[cells.METRICS.index(name), selected]
                    table.add_ranks(name, code[selected], values, block.place[selected], self.plan.top)
        for report, counts in block.dropped:
            table = self._table(int(window[report]), scope, rows)
            cells.add_counts(table.dropped.setdefault(int(code[report]), {}), counts)

    def _table(self, number: int, scope: str, rows: int) -> cells.CellTable:
        table = self.open_cells.setdefault((number, scope), cells.CellTable())
        table.grow(rows)
        return table

    # Summaries

    def _ingest_summaries(self, arrival: blocks.DecodedMessage, output: ShardOutput) -> None:
        facts = arrival.facts
        verdict = self.seen_messages.observe(facts.channel, facts.boot, facts.sequence)
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
        except Exception:  # noqa: BLE001  (whatever a channel sent, it must not end the query)
            output.count(UNUSABLE, arrival.batch.num_rows)
            return
        lost = dict(facts.dropped)
        for row, group_code, zone_code in zip(rows, group, zone, strict=True):
            window = self.grid.number(row.from_ms)
            if group_code < 0:
                output.count(UNGROUPED, 1)
            elif row.from_ms > arrival.stored_ms + int(self.plan.skew_s * 1000):
                output.count(FUTURE, 1)
            elif window < self.grid.number(self.closed_ms):
                output.count(LATE, 1)
            else:
                output.count("summaries", 1)
                for scope, code in (("group", group_code), ("zone", zone_code)):
                    table = self._table(window, scope, code + 1)
                    truncated = not row.add_to(table, code)
                    if truncated and scope == "group":
                        output.count(TRUNCATED, 1)
                    table.partial[code] |= facts.partial
                    if lost:
                        cells.add_counts(table.dropped.setdefault(code, {}), lost)
                lost = {}  # reported once

    def _excuse_outages(self, activity: Iterable[tuple[int, int]]) -> None:
        """Do not count the time of outages as silence."""
        active_ms = self.clock_ms
        received_ms = self.nodes.data["received_ms"]
        for start_ms, end_ms in sorted(activity):
            if active_ms and start_ms - active_ms > OUTAGE_MS:
                received_ms[received_ms <= active_ms] += start_ms - active_ms
                self.resumed_ms = start_ms
            active_ms = max(active_ms, end_ms)

    # Closing windows

    def _close(self, output: ShardOutput, changes: node_rules.Changes) -> None:
        closing_ms = self.grid.floor_ms(self.clock_ms - int(self.plan.delay_s * 1000))
        if closing_ms <= self.closed_ms:
            return
        last = self.grid.number(closing_ms) - 1
        self._forget(changes)
        data = self.nodes.data
        stale = self.clock_ms - data["received_ms"] > data["period_ms"] * self.plan.stale_after
        for scope, words in (("group", self.nodes.groups), ("zone", self.nodes.zones)):
            known = np.bincount(data[scope], minlength=len(words))
            silent = np.bincount(data[scope][stale], minlength=len(words))
            numbers = {number for number, scope_ in self.open_cells if scope_ == scope and number <= last}
            # The last window is closed even without reports, except just after an outage.
            is_due = (
                self.closed_ms > 0
                and bool(known.any())
                and self.grid.start_ms(last) >= self.resumed_ms + OUTAGE_MS
            )
            names = np.array(list(words), object)
            populated = set(names[known > 0].tolist())
            for number in sorted({*numbers, last} if is_due else numbers):
                table = self._table(number, scope, len(names))
                del self.open_cells[number, scope]
                rows = np.flatnonzero(table.present() | (known > 0) if number == last else table.present())
                reporting = set(names[table.machines > 0].tolist())
                if number == last:
                    populated |= reporting
                else:
                    self.populated[scope] |= reporting
                table.compact(self.plan.top)
                table = table.select(rows)
                table.name_machines(self.nodes.names.array)
                output.closed.append(
                    ClosedWindow(
                        scope=scope,
                        from_ms=self.grid.start_ms(number),
                        width_ms=self.grid.width_of(number),
                        names=names[rows].tolist(),
                        known=known[rows].tolist(),
                        stale=silent[rows].tolist(),
                        cells=table,
                    )
                )
            gone = sorted(self.populated[scope] - populated)
            if gone:
                nothing = [0] * len(gone)
                output.closed.append(
                    ClosedWindow(
                        scope=scope,
                        from_ms=self.grid.start_ms(last),
                        width_ms=self.grid.width_of(last),
                        names=gone,
                        known=nothing,
                        stale=nothing,
                        cells=cells.CellTable(len(gone)),
                        gone=True,
                    )
                )
            self.populated[scope] = populated
        self._renumber()
        self.closed_ms = closing_ms
        self.grid = self.grid.pruned(closing_ms)

    def _forget(self, changes: node_rules.Changes) -> None:
        """Remove silent machines."""
        silent_ms = self.clock_ms - self.nodes.data["received_ms"]
        self._remove(silent_ms > self.plan.forget_s * 1000, changes)

    def _remove(self, gone: npt.NDArray[np.bool_], changes: node_rules.Changes) -> None:
        if gone.any():
            self._evaluator.forget(self.nodes, gone, self.clock_ms, changes)
            moved = self.nodes.keep(~gone)
            for table in self.open_cells.values():
                table.renumber_machines(moved)

    def _renumber(self) -> None:
        """Remove the names of empty groups and zones, and reassign codes."""
        for scope, words in (("group", self.nodes.groups), ("zone", self.nodes.zones)):
            tables = {key: table for key, table in self.open_cells.items() if key[1] == scope}
            is_used = np.zeros(len(words), np.bool_)
            is_used[self.nodes.data[scope]] = True
            for table in tables.values():
                is_used[: len(table)] |= table.present()
            if is_used.all():
                continue
            names = list(words)
            used = np.flatnonzero(is_used)
            words.clear()
            words.update((names[old], code) for code, old in enumerate(used.tolist()))
            codes = np.cumsum(is_used) - 1
            self.nodes.data[scope] = codes[self.nodes.data[scope]].astype(np.int32)
            for key, table in tables.items():
                self.open_cells[key] = table.select(used[used < len(table)])

    # Serialization

    def pack(self) -> bytes:
        """Everything except the names of machines (`node_columns.NodeNames`)."""
        open_cells = []
        for key, table in self.open_cells.items():
            table.compact(self.plan.top)
            open_cells.append([*key, table.pack()])
        return msgspec.msgpack.encode(
            (
                LAYOUT,
                self.grid.pack(),
                self.clock_ms,
                self.closed_ms,
                self.seen_messages.remembered(),
                self.nodes.pack(),
                open_cells,
                self.populated,
                self.resumed_ms,
            )
        )

    @classmethod
    def unpack(
        cls, data: bytes | memoryview, plan: FleetStatePlan, names: node_columns.NodeNames
    ) -> FleetState:
        try:
            return cls._unpacked(msgspec.msgpack.decode(data), plan, names)
        except (
            *(msgspec.MsgspecError, pa.ArrowException, OSError),  # Arrow's own error is also an OSError
            *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError),
        ) as error:
            raise StateUnreadable(f"{UNREADABLE}: {error}") from error

    @classmethod
    def _unpacked(
        cls, fields: Sequence[Any], plan: FleetStatePlan, names: node_columns.NodeNames
    ) -> FleetState:
        if fields[0] != LAYOUT:
            raise ValueError(f"its layout is {fields[0]!r:.20}, expected {LAYOUT}")
        _, grid, clock_ms, closed_ms, seen, packed, open_cells, populated, resumed_ms = fields
        fleet = cls(
            plan,
            node_columns.NodeColumns.unpack(packed, names, plan.column_schema),
        )
        fleet.clock_ms, fleet.closed_ms, fleet.resumed_ms = clock_ms, closed_ms, resumed_ms
        fleet.grid = window_grid.WindowGrid.unpack(grid)
        if fleet.grid.width_ms != plan.window_ms:
            # No window with reports may change: reports are at most ``skew_s`` ahead of the clock.
            fleet.grid = fleet.grid.changed(plan.window_ms, clock_ms + int(plan.skew_s * 1000))
        fleet.seen_messages = duplicates.DuplicateWindows(
            CHANNELS_MAX, {name: [tuple(seen) for seen in boots] for name, boots in seen.items()}
        )
        fleet.open_cells = {
            (number, scope): cells.CellTable.unpack(table) for number, scope, table in open_cells
        }
        fleet.populated = {scope: set(names) for scope, names in populated.items()}
        return fleet
