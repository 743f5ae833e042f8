"""What the pipeline remembers of the fleet: pure, in columns, and small enough for Spark's state.

The groups of the fleet are divided into shards (`shard_of`), and a shard is one value in Spark's state store:
one `Fleet`, read, fed with the messages of a micro-batch, moved to the batch's clock, and written back.  Of
each machine there are a few numbers in columns of its group; of each open window, cells (`cells`).

**Time.**  Two clocks matter.  A report says when it was made (event time), and the broker says when it was
stored (`stored_ms`), which no machine can falsify and which is the same when a batch is replayed.  A report
belongs to the window of its event time; a window closes when the broker's clock has passed its end by the
watermark's delay.  So one machine whose clock is in the future cannot close windows for all others; its
reports are refused (`FUTURE`).  A report for a closed window is `LATE`.

**Once.**  (machine, boot, sequence) names a report.  Of each machine the highest sequence is kept, and which
of the 63 before it were seen; so a repeat is found even if reports overtake each other (`DUPLICATED`).

Nothing here reads a clock or the network: the same messages give the same results.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from muster.core import reports
from muster.pipeline import cells, rules
from muster.predicates import columns, types, vectors

FUTURE = "future"
DUPLICATED = "duplicated"
LATE = "late"
UNUSABLE = "unusable"

_HISTORY_BITS = 64
_EXTRA_MAX = 256  # of metrics beyond the standard ones, in one cell
_ZONES_MAX = 1024  # of one group; further ones are counted with the last

Bools = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

#: Of each machine: the columns of its group.
_COLUMNS: dict[str, tuple[Any, int]] = {
    "boot": (np.int64, 0),
    "sequence": (np.int64, -1),
    "seen": (np.uint64, 0),  # bit i: the sequence i below the highest
    "heard_ms": (np.int64, 0),  # by the broker's clock
    "period_ms": (np.int32, 0),
    "window_ms": (np.int64, -1),  # the last one it was counted in
    "zone": (np.int16, 0),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is fixed while a job runs: plain data, since it travels to the executors."""

    window_s: float = 10.0
    delay_s: float = 10.0  # of the watermark
    skew_s: float = 60.0  # how far ahead of the broker a machine's clock may be
    stale_after: float = 3.0  # periods
    forget_s: float = 86400.0
    top: int = 10
    top_metrics: tuple[str, ...] = ("cpu_percent", "memory_percent")
    rules: tuple[rules.Rule, ...] = ()
    changes_max: int = 1000  # told of one rule by one shard at one time; the rest is counted

    @property
    def window_ms(self) -> int:
        return max(1, int(self.window_s * 1000))


@dataclass(frozen=True, slots=True)
class Arrival:
    """Reports of one group that came in one message."""

    sequence: int  # of the stream
    stored_ms: int
    group: str
    batch: pa.RecordBatch  # columns of `reports.node_schema`
    facts: reports.Facts


class Change(msgspec.Struct, array_like=True, frozen=True):
    """A rule began or ceased to be true of a machine."""

    rule: str
    machine: str
    group: str
    on: bool
    at_ms: int
    value: float | None


class Closed(msgspec.Struct, array_like=True, frozen=True):
    """A window that is over, for one group and zone. ``cell`` is packed."""

    group: str
    zone: str
    from_ms: int
    known: int
    stale: int
    cell: list[Any]


class Output(msgspec.Struct, array_like=True):
    clock_ms: int
    closed: list[Closed] = msgspec.field(default_factory=list)
    changes: list[Change] = msgspec.field(default_factory=list)
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    machines: int = 0

    def count(self, reason: str, number: int) -> None:
        if number:
            self.counts[reason] = self.counts.get(reason, 0) + number


def shard_of(group: str, shards: int) -> int:
    return zlib.crc32(group.encode()) % shards


class Fleet:
    """The groups of one shard."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._groups: dict[str, _Group] = {}
        self._clock_ms = 0
        self._closed_ms = 0  # windows that end here or before are closed

    def feed(self, arrivals: Iterable[Arrival], clock_ms: int) -> Output:
        """All that one micro-batch brought to this shard; ``clock_ms`` is the latest `stored_ms` in it."""
        output = Output(max(clock_ms, self._clock_ms))
        for arrival in sorted(arrivals, key=lambda one: one.sequence):
            group = self._groups.get(arrival.group)
            if group is None:
                group = self._groups[arrival.group] = _Group.new(arrival.group, self._plan)
            try:
                group.take(arrival, self._closed_ms, output)
            except (pa.ArrowException, ValueError, TypeError, LookupError, ArithmeticError):
                # One message that nobody foresaw must not stop the whole fleet's query for good.
                output.count(UNUSABLE, arrival.batch.num_rows)
        self._clock_ms = output.clock_ms
        self._close(output)
        for group in self._groups.values():
            group.look(self._clock_ms, output)
            group.forget(self._clock_ms, output)
        self._groups = {name: group for name, group in self._groups.items() if group.alive}
        _bound_changes(output, self._plan.changes_max)
        output.machines = sum(len(group.names) for group in self._groups.values())
        return output

    def _close(self, output: Output) -> None:
        width = self._plan.window_ms
        closing_ms = (self._clock_ms - int(self._plan.delay_s * 1000)) // width * width
        if closing_ms <= self._closed_ms:
            return
        for group in self._groups.values():
            output.closed += group.close(closing_ms, self._clock_ms, also_empty=self._closed_ms > 0)
        self._closed_ms = closing_ms

    def pack(self) -> bytes:
        groups = [group.pack() for group in self._groups.values()]
        return msgspec.msgpack.encode((self._clock_ms, self._closed_ms, groups))

    @classmethod
    def unpack(cls, data: bytes, plan: Plan) -> Fleet:
        fleet = cls(plan)
        fleet._clock_ms, fleet._closed_ms, groups = msgspec.msgpack.decode(data)
        for packed in groups:
            group = _Group.unpack(packed, plan)
            fleet._groups[group.name] = group
        return fleet


@dataclass(slots=True)
class _Group:
    name: str
    plan: Plan
    names: pa.StringArray
    of: dict[str, Array]  # the columns of `_COLUMNS`, and one of booleans for each node rule
    zones: list[str] = field(default_factory=list)
    open: dict[tuple[int, str], cells.Cell] = field(default_factory=dict)  # by window's start and zone

    @classmethod
    def new(cls, name: str, plan: Plan) -> _Group:
        group = cls(name, plan, pa.array([], pa.string()), {})
        group._grow(pa.array([], pa.string()))
        return group

    @property
    def alive(self) -> bool:
        return bool(len(self.names) or self.open)

    # Taking reports in

    def take(self, arrival: Arrival, closed_ms: int, output: Output) -> None:
        batch = arrival.batch
        reported = batch.column("reported_at").cast(pa.int64()).to_numpy() // 1000
        future = reported > arrival.stored_ms + int(self.plan.skew_s * 1000)
        if future.any():
            output.count(FUTURE, int(future.sum()))
            batch = batch.filter(pa.array(~future))
            reported = reported[~future]
            if not batch.num_rows:
                return
        place = self._places(batch.column("machine"))
        sequence = batch.column("sequence").to_numpy()
        fresh = np.zeros(len(place), np.bool_)
        for rows in _rounds(place, sequence):
            fresh[rows] = self._unseen(place[rows], batch.column("boot").to_numpy()[rows], sequence[rows])
        output.count(DUPLICATED, int(len(fresh) - fresh.sum()))
        self.of["heard_ms"][place] = np.maximum(self.of["heard_ms"][place], arrival.stored_ms)
        period_ms = np.nan_to_num(batch.column("period_s").to_numpy() * 1000)
        self.of["period_ms"][place] = np.clip(period_ms, 0, 2**31 - 1)
        zone = self._zones(batch.column("zone"))
        self.of["zone"][place] = zone
        window = reported // self.plan.window_ms * self.plan.window_ms
        late = fresh & (window + self.plan.window_ms <= closed_ms)
        output.count(LATE, int(late.sum()))
        wanted = fresh & ~late
        if not wanted.all():
            rows = np.flatnonzero(wanted)
            if not len(rows):
                return
            batch = batch.take(pa.array(rows))
            place, reported, window, zone = place[rows], reported[rows], window[rows], zone[rows]
        self._judge(batch, place, reported, arrival.stored_ms, output)
        self._roll_up(batch, place, reported, window, zone, arrival.facts)

    def _places(self, machines: pa.StringArray) -> Array:
        """Where each machine's numbers stand in the columns; new machines get a place."""
        # A channel mostly sends the same machines in the same order: then they stand here in that order too.
        start = pc.index(self.names, machines[0]).as_py() if len(machines) else 0
        if start >= 0 and self.names.slice(start, len(machines)).equals(machines):
            return np.arange(start, start + len(machines))
        found = pc.index_in(machines, value_set=self.names)
        if found.null_count:
            self._grow(pc.unique(machines.filter(found.is_null())))
            found = pc.index_in(machines, value_set=self.names)
        places: Array = found.to_numpy()
        return places

    def _grow(self, names: pa.StringArray) -> None:
        self.names = pa.concat_arrays([self.names, names.cast(pa.string())])
        more = len(names)
        wanted = {**_COLUMNS, **{f"on {rule.name}": (np.bool_, 0) for rule in self._rules()}}
        self.of = {
            name: np.concatenate([self.of.get(name, np.zeros(0, kind)), np.full(more, start, kind)])
            for name, (kind, start) in wanted.items()
        }

    def _rules(self) -> Iterator[rules.Rule]:
        for rule in self.plan.rules:
            if rule.level == "node":
                yield rule

    def _zones(self, zones: pa.StringArray) -> Array:
        encoded = zones.dictionary_encode()
        codes = []
        for zone in encoded.dictionary.to_pylist():
            if zone not in self.zones and len(self.zones) < _ZONES_MAX:
                self.zones.append(zone)
            codes.append(self.zones.index(zone) if zone in self.zones else _ZONES_MAX - 1)
        zones_: Array = np.array(codes, np.int16)[encoded.indices.to_numpy()]
        return zones_

    def _unseen(self, place: Array, boot: Array, sequence: Array) -> Bools:
        """Which of these reports, no two of one machine, are seen for the first time; and remember them."""
        of = self.of
        same_boot = of["boot"][place] == boot
        ahead = sequence - of["sequence"][place]
        seen = of["seen"][place]
        newer = ~same_boot | (ahead > 0)
        # The history moves up by ``ahead`` places; what is new gets its bit.
        shift = np.clip(ahead, 0, _HISTORY_BITS - 1).astype(np.uint64)
        kept = np.where(same_boot & (ahead < _HISTORY_BITS), seen << shift, np.uint64(0))
        back = np.clip(-ahead, 0, _HISTORY_BITS - 1).astype(np.uint64)
        bit = np.where(newer, np.uint64(1), np.uint64(1) << back)
        known = same_boot & (ahead <= 0) & ((-ahead >= _HISTORY_BITS) | ((seen & bit) != 0))
        of["seen"][place] = np.where(known, seen, np.where(newer, kept, seen) | bit)
        of["sequence"][place] = np.where(newer, sequence, of["sequence"][place])
        of["boot"][place] = boot
        unseen: Bools = ~known
        return unseen

    def _roll_up(
        self,
        batch: pa.RecordBatch,
        place: Array,
        reported: Array,
        window: Array,
        zone: Array,
        facts: reports.Facts,
    ) -> None:
        # Rows in the order of their cells: window by window, zone by zone.
        key = window * _ZONES_MAX + zone
        if (key == key[0]).all():
            starts = np.zeros(1, np.int64)
        else:
            order = np.argsort(key, kind="stable")
            batch, key = batch.take(pa.array(order)), key[order]
            place, reported = place[order], reported[order]
            starts = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
        ends = np.r_[starts[1:], len(key)]
        targets = [
            self.open.setdefault((int(one) // _ZONES_MAX, self.zones[int(one) % _ZONES_MAX]), cells.Cell())
            for one in key[starts]
        ]
        values = np.stack(
            [batch.column(name).to_numpy(zero_copy_only=False).astype(np.float64) for name in cells.METRICS]
        )
        values[~np.isfinite(values)] = np.nan  # no sum survives an infinity
        cells.fold(targets, values, starts)
        first = np.zeros(len(place), np.bool_)
        first[np.unique(place, return_index=True)[1]] = True
        start_ms = key // _ZONES_MAX
        new = np.add.reduceat((first & (self.of["window_ms"][place] != start_ms)).astype(np.int64), starts)
        self.of["window_ms"][place] = np.maximum(self.of["window_ms"][place], start_ms)
        oldest = np.minimum.reduceat(reported, starts)
        partial = facts.partial or bool(pc.any(batch.column("partial")).as_py())
        states = batch.column("state").dictionary_encode()
        words = states.dictionary.to_pylist()
        for number, cell in enumerate(targets):
            here = slice(int(starts[number]), int(ends[number]))
            cell.total += here.stop - here.start
            cell.machines += int(new[number])
            cell.oldest_ms = min(int(oldest[number]), cell.oldest_ms or int(oldest[number]))
            cell.partial |= partial
            found = np.bincount(states.indices.to_numpy()[here], minlength=len(words))
            for word, count in zip(words, found.tolist(), strict=True):
                if count:
                    cell.states[word] = cell.states.get(word, 0) + count
        extra = batch.column("extra")
        if extra.null_count < len(extra):
            for number, cell in enumerate(targets):
                self._fold_extra(cell, extra.slice(int(starts[number]), int(ends[number] - starts[number])))
        # Ranks are the system's, and what was dropped is the message's: one cell has them, and the sums.
        self._rank(targets[0], batch)
        for reason, count in facts.dropped.items():
            targets[0].dropped[reason] = targets[0].dropped.get(reason, 0) + count

    def _fold_extra(self, cell: cells.Cell, extra: pa.MapArray) -> None:
        # Taken anew, since the keys and items of a slice are those of the whole.
        there = extra.take(pa.array(np.flatnonzero(extra.is_valid().to_numpy(zero_copy_only=False))))
        names, values = there.keys.dictionary_encode(), there.items
        numbers = values.to_numpy(zero_copy_only=False).astype(np.float64)
        known = np.isfinite(numbers)
        codes = names.indices.to_numpy()
        for code, name in enumerate(names.dictionary.to_pylist()):
            if name in cell.extra or len(cell.extra) < _EXTRA_MAX:
                cell.fold_extra(name, numbers[(codes == code) & known])

    def _rank(self, cell: cells.Cell, part: pa.RecordBatch) -> None:
        most = self.plan.top
        for name in self.plan.top_metrics:
            column = part.column(name)
            found = cell.top.get(name, [])
            if len(found) >= most:  # mostly nothing in a message reaches the ranks any more
                column = pc.if_else(pc.greater(column, found[-1].value), column, None)
            numbers = column.to_numpy(zero_copy_only=False).astype(np.float64)
            rows = np.flatnonzero(np.isfinite(numbers))
            if len(rows) > most:
                rows = rows[np.argpartition(numbers[rows], -most)[-most:]]
            if len(rows):
                machines = part.column("machine").take(pa.array(rows)).to_pylist()
                cell.add_top(name, map(cells.Top, numbers[rows].tolist(), machines), most)

    # Judging

    def _judge(
        self, batch: pa.RecordBatch, place: Array, reported: Array, stored_ms: int, output: Output
    ) -> None:
        for rule in self._rules():
            if rule.names <= rules.ALWAYS_KNOWN:
                continue
            table = _table(batch, rule.names, stored_ms)
            measured = rule.measured
            value = table.columns[measured].values if measured else None
            for rows in _rounds(place, batch.column("sequence").to_numpy()):
                self._compare(rule, table, rows, place[rows], reported[rows], value, output)

    def look(self, clock_ms: int, output: Output) -> None:
        """Rules about silence: of every machine, whether or not it was heard of just now."""
        for rule in self._rules():
            if not rule.names <= rules.ALWAYS_KNOWN or not len(self.names):
                continue
            table = columns.Table(
                {
                    "machine": _strings(self.names) if "machine" in rule.names else _nothing(len(self.names)),
                    "group": columns.Column(
                        types.Kind.STRING, np.ones(len(self.names), np.uint8), (self.name,)
                    ),
                    "zone": columns.Column(types.Kind.STRING, self.of["zone"] + 1, tuple(self.zones)),
                    "period_s": columns.Column(types.Kind.FLOAT, self.of["period_ms"] / 1000),
                    "age_s": columns.Column(types.Kind.FLOAT, (clock_ms - self.of["heard_ms"]) / 1000),
                },
                rows=len(self.names),
            )
            every = np.arange(len(self.names))
            at = np.full(len(self.names), clock_ms)
            self._compare(rule, table, every, every, at, table.columns["age_s"].values, output)

    def _compare(
        self,
        rule: rules.Rule,
        table: columns.Table,
        rows: Array,
        place: Array,
        at_ms: Array,
        value: Array | None,
        output: Output,
    ) -> None:
        on = self.of[f"on {rule.name}"]
        when = vectors.evaluate(rule.condition, table)[rows]
        if not when.any() and not on[place].any():
            return
        now = np.where(on[place], ~vectors.evaluate(rule.release, table)[rows], when)
        for row in np.flatnonzero(now != on[place]):
            measured = (
                float(value[rows[row]]) if value is not None and np.isfinite(value[rows[row]]) else None
            )
            machine = self.names[int(place[row])].as_py()
            if not rule.only or machine in rule.only:
                output.changes.append(
                    Change(rule.name, machine, self.name, bool(now[row]), int(at_ms[row]), measured)
                )
        on[place] = now

    # Closing windows

    def close(self, closing_ms: int, clock_ms: int, *, also_empty: bool) -> list[Closed]:
        """The cells of windows that end by then, oldest first.

        ``also_empty``: for the last window one of every zone, whether or not anything was reported in it.
        """
        last = closing_ms - self.plan.window_ms
        limit = self.of["period_ms"] * self.plan.stale_after
        stale = clock_ms - self.of["heard_ms"] > limit
        found = []
        for code, zone in enumerate(self.zones):
            here = self.of["zone"] == code
            known, silent = int(here.sum()), int((here & stale).sum())
            if known and also_empty:
                self.open.setdefault((last, zone), cells.Cell())
            for start_ms in sorted(start for start, place in self.open if start <= last and place == zone):
                cell = self.open.pop((start_ms, zone))
                found.append(Closed(self.name, zone, start_ms, known, silent, cell.pack()))
        return found

    def forget(self, clock_ms: int, output: Output) -> None:
        gone = clock_ms - self.of["heard_ms"] > self.plan.forget_s * 1000
        if not gone.any():
            return
        for rule in self._rules():
            for row in np.flatnonzero(gone & self.of[f"on {rule.name}"]):
                machine = self.names[int(row)].as_py()
                output.changes.append(Change(rule.name, machine, self.name, False, clock_ms, None))
        self.names = self.names.filter(pa.array(~gone))
        self.of = {name: column[~gone] for name, column in self.of.items()}

    # To bytes and back

    def pack(self) -> list[Any]:
        batch = pa.RecordBatch.from_arrays([self.names], ["names"])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return [
            self.name,
            self.zones,
            bytes(sink.getvalue()),
            {name: column.tobytes() for name, column in self.of.items()},
            [[start_ms, zone, cell.pack()] for (start_ms, zone), cell in self.open.items()],
        ]

    @classmethod
    def unpack(cls, packed: Sequence[Any], plan: Plan) -> _Group:
        name, zones, names, of, open_cells = packed
        with pa.ipc.open_stream(names) as reader:
            found = reader.read_next_batch().column(0)
        group = cls(name, plan, found, {}, zones)
        group._grow(pa.array([], pa.string()))
        for column in group.of:  # a rule that is new has no column yet; one that is gone leaves none
            kind = _COLUMNS.get(column, (np.bool_, 0))[0]
            stored = of.get(column)
            group.of[column] = (
                np.zeros(len(found), kind) if stored is None else np.frombuffer(stored, kind).copy()
            )
        group.open = {(start_ms, zone): cells.Cell.unpack(cell) for start_ms, zone, cell in open_cells}
        return group


def _rounds(place: Array, sequence: Array) -> Iterator[Array]:
    """Rows in rounds, so that no machine occurs twice in one, and each machine's in the order of sequence."""
    if len(place) == 0:
        return
    if len(np.unique(place)) == len(place):
        yield np.arange(len(place))
        return
    order = np.lexsort((sequence, place))
    ordered = place[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    turn = np.arange(len(place)) - np.repeat(starts, np.diff(np.r_[starts, len(place)]))
    for number in range(int(turn.max()) + 1):
        yield order[turn == number]


def _table(batch: pa.RecordBatch, names: Iterable[str], stored_ms: int) -> columns.Table:
    found: dict[str, columns.Column] = {}
    for name in names:
        if name == "age_s":
            reported = batch.column("reported_at").cast(pa.int64()).to_numpy()
            found[name] = columns.Column(types.Kind.FLOAT, stored_ms / 1000 - reported / 1e6)
        elif rules.MODELS["node"][name].kind is types.Kind.STRING:
            found[name] = _strings(batch.column(name))
        else:
            numbers = batch.column(name).to_numpy(zero_copy_only=False).astype(np.float64)
            found[name] = columns.Column(types.Kind.FLOAT, numbers)
    return columns.Table(found, rows=batch.num_rows)


def _strings(words: pa.StringArray) -> columns.Column:
    encoded = words.dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64) + 1
    return columns.Column(types.Kind.STRING, codes, tuple(encoded.dictionary.to_pylist()))


def _nothing(rows: int) -> columns.Column:
    return columns.Column(types.Kind.STRING, np.zeros(rows, np.uint8), ())


def _bound_changes(output: Output, most: int) -> None:
    """A rule that becomes true of half the fleet at once is told of as many machines as anyone can read."""
    seen: dict[str, int] = {}
    kept = []
    for change in output.changes:
        number = seen[change.rule] = seen.get(change.rule, 0) + 1
        if number <= most:
            kept.append(change)
    output.changes = kept
    for rule, number in seen.items():
        output.count(f"untold {rule}", max(0, number - most))
