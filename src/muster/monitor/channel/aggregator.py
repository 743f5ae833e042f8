"""The pure part of a channel: validate, deduplicate, hold and interpret received messages.

Bytes and times in, `ForwardBatch`es out.  There are three kinds of input, each of which may be invalid:
single node reports (buffered, and decoded some thousands at a time), Arrow batches of rows from channels
below, and Arrow batches of summaries.  Rejected rows are counted by reason in `dropped`;
nothing raises.

**Deduplication.**  `known_machines` detects reports that were received before, whatever channels they passed.
A batch of summaries is identified by (channel, boot, sequence), because its rows have no identity.

**Partial.**  An aggregate is marked as partial if a machine that was due did not report, if anything except a
duplicate was dropped here, or if one of its inputs is partial.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from muster.core import duplicates, errors, messages
from muster.core.reports import columns, packed
from muster.monitor import protocol
from muster.monitor.channel import interpreters, known_machines, packed_rows

CHUNK_ROWS = 5000  # that are decoded at once, or fewer of so many bytes: they become about one message
CHUNK_BYTES = 1600 << 10
CHUNK_ROWS_MIN = 500  # of a message: smaller ones are joined
CHANNELS_MAX = 10_000  # below this one, whose batches are tracked; equivalent: about
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
    message_bytes: int = 1400 << 10  # before compression
    machines_max: int = 1_000_000  # tracked; up to half as many are never forgotten
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
        self._packed = packed_rows.PackedReader()
        self._ahead_ms = int(self._limits.ahead_s * 1000)
        self._age_ms = int(self._limits.age_s * 1000)
        self._raw: list[bytes] = []
        self._senders: list[bytes] = []  # of these
        self._raw_bytes = 0
        self._rows: list[pa.RecordBatch] = []
        self._row_count = 0
        self._summaries: list[pa.RecordBatch] = []
        self._summary_count = 0
        self._known = known_machines.KnownMachines(self._limits.machines_max, self.dropped)
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
    def gaps(self) -> int:
        """Reports that were never received, according to the sequences."""
        return self._known.gaps

    @property
    def held(self) -> int:
        """Rows, of reports and of summaries."""
        return self._row_count + len(self._raw) + self._summary_count

    def add_reports(self, senders: Sequence[bytes], reports: Sequence[bytes], now_ms: int) -> None:
        """Add node reports, each with its sender. They are usually only buffered."""
        self.received += len(reports)
        if max(map(len, reports), default=0) > protocol.MAX_REPORT_BYTES:
            small = [len(data) <= protocol.MAX_REPORT_BYTES for data in reports]
            self.dropped["too-large"] += len(small) - sum(small)
            senders, reports = (list(itertools.compress(each, small)) for each in (senders, reports))
        room = max(0, self._limits.rows_max - self._row_count - len(self._raw))
        if len(reports) > room:
            self.dropped["overload"] += len(reports) - room
            senders, reports = senders[:room], reports[:room]
        self._senders += senders
        self._raw += reports
        self._raw_bytes += sum(map(len, reports))
        if len(self._raw) >= CHUNK_ROWS or self._raw_bytes >= CHUNK_BYTES:
            self.decode_pending(now_ms)

    def decode_pending(self, now_ms: int) -> None:
        """Decode the buffered reports."""
        raw, self._raw = self._raw, []
        senders, self._senders = self._senders, []
        self._raw_bytes = 0
        rows, left = self._packed.read(raw)
        if rows is not None:
            self._add_packed(rows, [senders[place] for place in rows.places], now_ms)
        single: list[messages.NodeReport] = []
        for place in left:
            try:
                row = _decode(raw[place])
            except errors.MusterError as error:
                self.dropped[error.code] += 1
                continue
            if self._accepts(senders[place], row, now_ms):
                single.append(row)
        if single:
            self._hold(columns.to_batch(single), now_ms)

    def _add_packed(self, rows: packed_rows.PackedRows, senders: list[bytes], now_ms: int) -> None:
        """Hold the reports that are their sender's own, of about this time, and new; count the others."""
        batch = rows.batch
        own = rows.are_named(senders)
        ahead = own & (rows.at_ms > now_ms + self._ahead_ms)
        old = own & (rows.at_ms < now_ms - self._age_ms)
        machines, boot, sequence, period_s = rows.machines, rows.boot, rows.sequence, rows.period_s
        valid = own & ~ahead & ~old
        if not valid.all():
            for reason, refused in (("forged", ~own), ("from-the-future", ahead), ("too-old", old)):
                if refused.any():
                    self.dropped[reason] += int(np.count_nonzero(refused))
            batch = batch.filter(pa.array(valid))
            machines = [machine for machine, good in zip(machines, valid.tolist(), strict=True) if good]
            boot, sequence, period_s = boot[valid], sequence[valid], period_s[valid]
        new = self._known.observe_all(machines, boot, sequence, period_s, now_ms)
        if not new.all():
            batch = batch.filter(pa.array(new))
        if batch.num_rows:
            self._hold(batch, now_ms)

    def _accepts(self, sender: bytes, row: messages.NodeReport, now_ms: int) -> bool:
        """As `_add_packed`, for one report."""
        machine = row.machine.encode()
        if machine != sender and not machine.startswith(sender + b"."):
            self.dropped["forged"] += 1
        elif row.at_ms > now_ms + self._ahead_ms:
            self.dropped["from-the-future"] += 1
        elif row.at_ms < now_ms - self._age_ms:
            self.dropped["too-old"] += 1
        else:
            return self._known.observe(machine, row.boot, row.sequence, row.period_s * 1000, now_ms)
        return False

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
            self._counted_ms = now_ms
            self.machines, self.missing = self._known.count(now_ms)
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

    def halves(self, forward: ForwardBatch) -> list[ForwardBatch]:
        """The same rows in two messages, for a message that is too large; none of a single row."""
        half = forward.batch.num_rows // 2
        if not half:
            return []
        self._sequence += 1
        rest = msgspec.structs.replace(forward.facts, sequence=self._sequence, dropped={})
        parts = ((forward.batch.slice(0, half), forward.facts), (forward.batch.slice(half), rest))
        return [ForwardBatch(forward.subscription, batch, facts) for batch, facts in parts]

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
        batches = _joined(emission.table.to_batches(), self._limits.rows_per_message)
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
            for row in batch.to_pylist():
                interpreters.MetricSummary.from_row(row)
        except (errors.InvalidInput, OverflowError):  # also of a time that is no date
            self.dropped["malformed"] += batch.num_rows
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
        last_us = (now_ms + self._ahead_ms) * 1000
        first_us = (now_ms - self._age_ms) * 1000
        if bounds["max"] > last_us or bounds["min"] < first_us:
            good = pc.and_(pc.less_equal(at_us, last_us), pc.greater_equal(at_us, first_us))
            ahead = pc.sum(pc.greater(at_us, last_us)).as_py()
            self.dropped["from-the-future"] += ahead
            self.dropped["too-old"] += batch.num_rows - ahead - pc.sum(good).as_py()
            batch = batch.filter(good)
        fresh = self._known.observe_all(
            batch.column("machine").cast(pa.binary()).to_pylist(),
            batch.column("boot").to_numpy(),
            batch.column("sequence").to_numpy(),
            batch.column("period_s").to_numpy(),
            now_ms,
        )
        return batch if fresh.all() else batch.filter(pa.array(fresh))

    def _missing_further_below(self, now_ms: int) -> int:
        """The missing machines that merging channels reported recently."""
        reports = self._missing_below
        for sender in [name for name, (_, at_ms) in reports.items() if now_ms - at_ms > MISSING_VALID_MS]:
            del reports[sender]
        return min(sum(missing for missing, _ in reports.values()), COUNT_MAX)


def _decode(data: bytes) -> messages.NodeReport:
    """A report by itself: one that is unusual, invalid, or not packed."""
    if data.startswith(packed.MAGIC):
        return packed.decode(data)
    return messages.decode(data, messages.NodeReport, max_bytes=len(data))


def _table(batches: list[pa.RecordBatch], schema: pa.Schema, *, partial: bool = False) -> pa.Table:
    table = pa.Table.from_batches(batches, schema=schema)
    if not partial:
        return table
    place = schema.get_field_index("partial")
    return table.set_column(place, schema.field(place), pa.repeat(pa.scalar(True), table.num_rows))


def _joined(batches: list[pa.RecordBatch], rows_max: int) -> list[pa.RecordBatch]:
    """The small ones as few; those that have the size of a message remain as they are."""
    large = [batch for batch in batches if batch.num_rows >= CHUNK_ROWS_MIN]
    small = [batch for batch in batches if batch.num_rows < CHUNK_ROWS_MIN]
    if len(small) > 1:
        small = pa.Table.from_batches(small).combine_chunks().to_batches()
    return [
        batch.slice(start, rows_max)
        for batch in (*large, *small)
        for start in range(0, batch.num_rows, rows_max)
    ]


def _bounded_counts(lost: collections.Counter[str]) -> dict[str, int]:
    """Counts within the bounds of `columns.BatchInfo`, whatever channels below reported."""
    counts = {reason: min(count, COUNT_MAX) for reason, count in lost.most_common(REASONS_MAX)}
    if len(lost) > REASONS_MAX:
        counts["other"] = min(sum(lost.values()) - sum(counts.values()), COUNT_MAX)
    return counts


def _pieces(batch: pa.RecordBatch, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """Split in halves until small enough, because rows differ in size.

    Not by ``nbytes``, which crashes for some valid batches of hostile senders.
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
