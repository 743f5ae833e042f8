"""The pure part of a channel: validate, deduplicate, hold and interpret received messages.

Bytes and times in, `ForwardBatch`es out.  There are three kinds of input, each of which may be invalid:
single node reports as JSON (the fast path: buffered, and decoded a thousand at a time), Arrow batches of rows
from channels below, and Arrow batches of summaries.  Rejected rows are counted by reason in `dropped`;
nothing raises.

**Deduplication.**  A report is identified by (machine, boot, sequence); `core.duplicates` detects duplicates,
whatever channels they passed and in whatever order.  A report that is too old to decide is dropped as
``late``.  The memory is bounded: above ``machines_max`` the machines that were silent for longest are
removed.  A batch of summaries is identified by (channel, boot, sequence), because its rows have no identity.

**Partial.**  An aggregate is marked as partial if a machine that was due did not report, if anything except a
duplicate was dropped here, or if one of its inputs is partial.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from muster.core import duplicates, errors, messages
from muster.core.reports import columns
from muster.monitor import protocol
from muster.monitor.channel import interpreters, report_rows

CHUNK_ROWS = 1000
_BITS = (1 << duplicates.KEPT) - 1  # equivalent: without its last bit, which is set anyway
CHANNELS_MAX = 10_000  # below this one, whose batches are tracked; equivalent: about
MISSING_AFTER_PERIODS = 2
GONE_AFTER_PERIODS = 6
RECOUNT_MS = 2000
MISSING_VALID_MS = 60_000
REASONS_MAX = 64
NAMES_BYTES = 16 << 10  # of metrics in a message: those that do not occur in it may be among them
COUNT_MAX = (1 << 63) - 1
LOSSLESS = frozenset({"duplicate", "duplicate-batch"})


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    rows_max: int = 1_000_000  # held at once
    rows_per_message: int = 5_000
    message_bytes: int = 700 << 10  # before compression; the default limit of a broker is 1 MiB
    machines_max: int = 400_000  # tracked
    ahead_s: float = 60.0  # a report from further in the future is rejected
    age_s: float = 7 * 86400.0  # an older report is rejected


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A message to forward."""

    subscription: interpreters.ForwardTarget
    batch: pa.RecordBatch
    facts: columns.BatchInfo

    def encode(self, compression: str | None = None) -> bytes:
        return columns.encode(self.batch, self.facts, compression=compression)


# boot, highest sequence, bitmap of the sequences below it, time of the last report, its period in ms
_Known = tuple[int, int, int, int, float]


class Aggregator:
    def __init__(
        self,
        name: str,
        boot: int,
        subscriptions: Sequence[interpreters.ForwardTarget],
        *,
        limits: ChannelLimits | None = None,
        load: Callable[[str], interpreters.Interpreter] = interpreters.load,
    ) -> None:
        self.dropped: collections.Counter[str] = collections.Counter()  # rows, by reason, since the start
        self.received = 0  # rows, valid and invalid
        self.gaps = 0  # reports that were never received, according to the sequences
        self.groups: set[str] = set()  # of the last holding time
        self.level = 1
        self.machines = 0  # active machines
        self.missing = 0  # active machines whose report is overdue
        self._name, self._boot = name, boot
        self._limits = limits or ChannelLimits()
        self._interpreters = [
            (label, load(label), [target for target in subscriptions if target.interpreter == label])
            for label in dict.fromkeys(target.interpreter for target in subscriptions)
        ]
        self._shapes = report_rows.ReportShapes(self._limits.machines_max)
        self._raw: list[tuple[str, bytes]] = []
        self._rows: list[pa.RecordBatch] = []
        self._row_count = 0
        self._summaries: list[pa.RecordBatch] = []
        self._summary_count = 0
        self._young: dict[str, _Known] = {}
        self._old: dict[str, _Known] = {}
        self._former: dict[str, duplicates.Seen] = {}  # by machine: the previous boot
        self._batches = duplicates.DuplicateWindows(CHANNELS_MAX)
        self._reported_drops = collections.Counter[str]()  # drops that were already forwarded
        self._below = collections.Counter[str]()
        self._partial_below = False
        self._levels_below = 0
        self._missing_below: dict[str, tuple[int, int]] = {}
        self._from_ms: int | None = None
        self._sequence = 0
        self._counted_ms = -RECOUNT_MS

    @property
    def held(self) -> int:
        """Rows, of reports and of summaries."""
        return self._row_count + len(self._raw) + self._summary_count

    def add_report(self, sender: str, data: bytes, now_ms: int) -> None:
        """Add a node report. It is usually only buffered."""
        self.received += 1
        if len(data) > protocol.MAX_REPORT_BYTES:
            self.dropped["too-large"] += 1
        elif self._row_count + len(self._raw) >= self._limits.rows_max:
            self.dropped["overload"] += 1
        else:
            self._raw.append((sender, data))
            if len(self._raw) >= CHUNK_ROWS:
                self.decode_pending(now_ms)

    def decode_pending(self, now_ms: int) -> None:
        """Decode the buffered reports."""
        raw, self._raw = self._raw, []
        quick: list[report_rows.StandardReportRow] = []
        wide: list[report_rows.WideReportRow | report_rows.ShapedReportRow] = []
        others: list[messages.NodeReport] = []
        dropped, decode, is_new = self.dropped, self._shapes.decode, self._is_new
        first_ms = now_ms - int(self._limits.age_s * 1000)
        last_ms = now_ms + int(self._limits.ahead_s * 1000)
        for sender, data in raw:
            try:
                row = decode(data)
            except errors.MusterError as error:
                dropped[error.code] += 1
                continue
            machine = row.machine
            if machine != sender and not machine.startswith(f"{sender}."):
                dropped["forged"] += 1
            elif not first_ms <= row.at_ms <= last_ms:
                is_ahead = row.at_ms > last_ms  # equivalent (Gt -> GtE): at the limit it is accepted
                dropped["from-the-future" if is_ahead else "too-old"] += 1
            elif is_new(machine, row.boot, row.sequence, now_ms, row.period_s * 1000):
                if isinstance(row, report_rows.StandardReportRow):
                    quick.append(row)
                elif isinstance(row, report_rows.WideReportRow | report_rows.ShapedReportRow):
                    wide.append(row)
                else:
                    others.append(row)
        if quick:
            self._hold(report_rows.to_batch(quick), now_ms)
        if wide:
            self._hold(report_rows.wide_to_batch(wide), now_ms)
        if others:
            self._hold(columns.to_batch(others), now_ms)

    def add_batch(self, sender: str, data: bytes, now_ms: int) -> None:
        """Add rows or summaries from a channel below."""
        try:
            batch, facts = columns.decode(data)
        except errors.MusterError as error:
            self.received += 1
            self.dropped[error.code] += 1
            return
        self.received += batch.num_rows
        if facts.channel != sender:
            self.dropped["forged"] += batch.num_rows
            return
        verdict = self._batches.observe(sender, facts.boot, facts.sequence)
        if verdict is not duplicates.DuplicateVerdict.NEW:
            self.dropped[f"{verdict.value}-batch"] += batch.num_rows
            return
        if self.held + batch.num_rows > self._limits.rows_max:
            self.dropped["overload"] += batch.num_rows
            return
        self._below.update(facts.dropped)
        self._partial_below |= facts.partial
        self._levels_below = max(self._levels_below, facts.level)
        if facts.schema == columns.SUMMARY_SCHEMA:
            self._missing_below[sender] = (facts.missing, now_ms)  # its machines are not known here
            self._add_summaries(batch, now_ms)
        elif (fresh := self._fresh_rows(batch, now_ms)).num_rows:
            self._hold(fresh, now_ms)

    def flush(self, now_ms: int) -> list[ForwardBatch]:
        """The messages to forward at the end of the holding time."""
        self.decode_pending(now_ms)
        if not self._rows and not self._summaries:
            return []
        if now_ms - self._counted_ms >= RECOUNT_MS:
            self._count_missing(now_ms)
        missing = self.missing + self._missing_further_below(now_ms)
        lost = self.dropped + self._below - self._reported_drops
        partial = bool(missing or self._partial_below or any(reason not in LOSSLESS for reason in lost))
        held = interpreters.HeldReports(
            rows=_table(self._rows, columns.node_schema(), partial=partial),
            summaries=_table(self._summaries, columns.summary_schema()),
            from_ms=self._from_ms or now_ms,
            to_ms=now_ms,
            partial=partial,
        )
        self.groups = {
            group for table in (held.rows, held.summaries) for group in pc.unique(table["group"]).to_pylist()
        }
        self.level = min(self._levels_below + 1, columns.LEVELS_MAX)
        forwards: list[ForwardBatch] = []
        notified_parents: set[tuple[str, ...]] = set()  # parents that receive the counts of drops
        for label, interpreter, subscriptions in self._interpreters:
            for emission in self._interpreted(interpreter, held, subscriptions):
                parents = emission.subscription.parents
                dropped = {} if parents in notified_parents else _bounded_counts(lost)
                notified_parents.add(parents)
                forwards += self._messages(label, emission, held, dropped, missing)
        self._reported_drops += lost
        self._rows, self._summaries = [], []
        self._row_count = self._summary_count = 0
        self._from_ms, self._partial_below = None, False
        return forwards

    def _interpreted(
        self,
        interpreter: interpreters.Interpreter,
        held: interpreters.HeldReports,
        subscriptions: Sequence[interpreters.ForwardTarget],
    ) -> Iterable[interpreters.InterpreterOutput]:
        try:
            return [output for output in interpreter.interpret(held, subscriptions) if output.table.num_rows]
        except Exception:  # noqa: BLE001  (an error of a plug-in drops the held reports, but never stops the channel)
            self.dropped["interpreter-failed"] += held.rows.num_rows + held.summaries.num_rows
            return []

    def _messages(
        self,
        label: str,
        emission: interpreters.InterpreterOutput,
        held: interpreters.HeldReports,
        lost: dict[str, int],
        missing: int,
    ) -> Iterable[ForwardBatch]:
        batches = emission.table.combine_chunks().to_batches(max_chunksize=self._limits.rows_per_message)
        for batch in (piece for chunk in batches for piece in _pieces(chunk, self._limits.message_bytes)):
            self._sequence += 1
            facts = columns.BatchInfo(
                schema=emission.schema,
                channel=self._name,
                boot=self._boot,
                sequence=self._sequence,
                interpreter=label,
                level=self.level,
                held_from_ms=held.from_ms,
                held_to_ms=held.to_ms,
                machines=self.machines,
                missing=missing,
                dropped=lost,
                partial=held.partial,
            )
            lost = {}  # reported once
            yield ForwardBatch(emission.subscription, batch, facts)

    def _hold(self, batch: pa.RecordBatch, now_ms: int) -> None:
        self._rows.append(batch)
        self._row_count += batch.num_rows
        if self._from_ms is None:
            self._from_ms = now_ms

    def _add_summaries(self, batch: pa.RecordBatch, now_ms: int) -> None:
        try:
            for row in batch.select(["count", "sum", "min", "max", "sketch", "machines"]).to_pylist():
                interpreters.MetricSummary.from_row(row)
        except errors.MusterError as error:
            self.dropped[error.code] += batch.num_rows
            return
        self._summaries.append(batch)
        self._summary_count += batch.num_rows
        if self._from_ms is None:
            self._from_ms = now_ms

    def _fresh_rows(self, batch: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
        if not _all_finite(batch):
            self.dropped["malformed"] += batch.num_rows
            return batch.slice(0, 0)
        at_us = batch.column("reported_at").cast(pa.int64())
        bounds = pc.min_max(at_us).as_py()
        last_us = (now_ms + int(self._limits.ahead_s * 1000)) * 1000
        first_us = (now_ms - int(self._limits.age_s * 1000)) * 1000
        if bounds["max"] > last_us or bounds["min"] < first_us:
            good = pc.and_(pc.less_equal(at_us, last_us), pc.greater_equal(at_us, first_us))
            ahead = pc.sum(pc.greater(at_us, last_us)).as_py()
            self.dropped["from-the-future"] += ahead
            self.dropped["too-old"] += batch.num_rows - ahead - pc.sum(good).as_py()
            batch = batch.filter(good)
        known, is_new = self._young, self._is_new
        fresh = []
        for machine, boot, sequence, period_s in zip(
            batch.column("machine").to_pylist(),
            batch.column("boot").to_pylist(),
            batch.column("sequence").to_pylist(),
            batch.column("period_s").to_pylist(),
            strict=True,  # equivalent: of equal length
        ):
            before = known.get(machine)
            if before is not None and before[1] + 1 == sequence and before[0] == boot:  # the usual case
                known[machine] = (boot, sequence, before[2] << 1 & _BITS | 1, now_ms, period_s * 1000)
                fresh.append(True)
            else:
                fresh.append(is_new(machine, boot, sequence, now_ms, period_s * 1000))
                known = self._young  # which may have been replaced
        return batch if all(fresh) else batch.filter(pa.array(fresh, pa.bool_()))

    def _is_new(self, machine: str, boot: int, sequence: int, now_ms: int, period_ms: float) -> bool:
        known = self._young.get(machine)
        if known is None:
            known = self._old.get(machine)
            if len(self._young) * 2 >= self._limits.machines_max:
                self._old, self._young = self._young, {}
            # Also for a duplicate: its machine is active and must not be removed with the others.
            self._young[machine] = known or (boot, sequence, 1, now_ms, period_ms)
        if known is None:
            return True
        if boot == known[0]:
            verdict, high, bits = self._observe(known[1], known[2], sequence)
            if verdict:
                self._young[machine] = (boot, high, bits, now_ms, period_ms)
            return verdict
        former = self._former.get(machine)
        if former is not None and boot == former[0]:  # sent before the restart
            verdict, high, bits = self._observe(former[1], former[2], sequence)
            self._former[machine] = (boot, high, bits)
            return verdict
        if former is None and len(self._former) >= self._limits.machines_max:
            del self._former[next(iter(self._former))]
        self._former[machine] = known[:3]  # equivalent: more would not be read
        self._young[machine] = (boot, sequence, 1, now_ms, period_ms)
        return True

    def _observe(self, high: int, bits: int, sequence: int) -> tuple[bool, int, int]:
        """As `duplicates.observe`, with counters."""
        verdict, highest, bits = duplicates.observe(high, bits, sequence)
        if verdict is not duplicates.DuplicateVerdict.NEW:
            self.dropped[verdict.value] += 1
            return False, highest, bits
        is_highest = sequence > high  # equivalent (Gt -> GtE): the same one is not new
        self.gaps += sequence - high - 1 if is_highest else -1
        return True, highest, bits

    def _missing_further_below(self, now_ms: int) -> int:
        """The missing machines that merging channels reported recently."""
        reports = self._missing_below
        for sender in [name for name, (_, at_ms) in reports.items() if now_ms - at_ms > MISSING_VALID_MS]:
            del reports[sender]
        return min(sum(missing for missing, _ in reports.values()), COUNT_MAX)

    def _count_missing(self, now_ms: int) -> None:
        """Count active and missing machines. One that is silent for long is no longer expected."""
        self._counted_ms = now_ms
        living = missing = 0
        young = self._young
        for known in (young, self._old):
            for machine, (_, _, _, received_ms, period_ms) in known.items():
                if known is not young and machine in young:
                    continue
                silent_ms = now_ms - received_ms
                living += silent_ms <= GONE_AFTER_PERIODS * period_ms
                missing += MISSING_AFTER_PERIODS * period_ms < silent_ms <= GONE_AFTER_PERIODS * period_ms
        self.machines, self.missing = living, missing


def _table(batches: list[pa.RecordBatch], schema: pa.Schema, *, partial: bool = False) -> pa.Table:
    table = pa.Table.from_batches(batches, schema=schema)
    if not partial:
        return table
    place = schema.get_field_index("partial")
    return table.set_column(place, schema.field(place), pa.repeat(pa.scalar(True), table.num_rows))


def _bounded_counts(lost: collections.Counter[str]) -> dict[str, int]:
    """Counts within the bounds of `columns.BatchInfo`, whatever channels below reported."""
    counts = {reason: min(count, COUNT_MAX) for reason, count in lost.most_common(REASONS_MAX)}
    if len(lost) > REASONS_MAX:
        counts["other"] = min(sum(lost.values()) - sum(counts.values()), COUNT_MAX)
    return counts


def _pieces(batch: pa.RecordBatch, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """Split in halves until small enough, because rows differ in size.

    Not by `nbytes`, which crashes for some valid batches of hostile senders.
    """
    size = pa.ipc.get_record_batch_size(batch)
    if columns.EXTRA in batch.schema.names and columns.names_bytes(batch) > NAMES_BYTES:
        batch = columns.without_unused_names(batch)
        size += columns.names_bytes(batch)
    if batch.num_rows < 2 or size <= bytes_max:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _pieces(batch.slice(0, half), bytes_max)
    yield from _pieces(batch.slice(half), bytes_max)


def _all_finite(batch: pa.RecordBatch) -> bool:
    services = batch.column("services").flatten()
    figures = [batch.column(name) for name in columns.STANDARD_METRICS]
    figures += [batch.column("extra").items, services.field("metrics").items]
    return all(pc.all(pc.is_finite(column)).as_py() is not False for column in figures)
