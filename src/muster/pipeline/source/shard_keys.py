"""The first step of the query: checks messages, and divides their reports by shard.

A machine belongs to the shard that the hash of its name selects (`fleet.shards`), a row of a summary
to the shard of its group.  Successive messages are joined first, so that a row of Spark has thousands of
reports of one shard.  Every partition also receives the time of the broker's clock and the periods in which
messages were stored, and one of them the counts of rejected messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from muster.bus import api
from muster.core import errors
from muster.core.reports import columns
from muster.pipeline import protocol
from muster.pipeline.fleet import blocks, removal, shards, state
from muster.pipeline.source import piece_files, spark_internals

SCHEMA = pa.schema(
    [
        ("part", pa.int32()),  # the key of a partition of Spark
        ("shard", pa.int32()),  # of ``reports`` and ``summaries``
        ("sequence", pa.int64()),  # the last one in ``data``
        ("stored_ms", pa.int64()),
        ("reports", pa.binary()),  # a `blocks.ReportPiece`
        ("reports_file", pa.string()),  # or a file that has it (`piece_files`)
        ("summaries", pa.binary()),  # a message
        ("counts", pa.string()),
        ("activity", pa.string()),  # the first and last time of each period in which messages were stored
        ("removals", pa.string()),  # of machines, as JSON
    ]
)

LOST = "lost-messages"
MALFORMED = "malformed"
DROPPED = "channel "  # prefix of the counters of what channels dropped, by their reasons
_REASON = re.compile(r"[a-z][a-z-]{0,31}")
ROWS = 16_384  # that are joined: a few megabytes


class CopiedMessage(errors.InvalidInput):
    code = "copied"


Row = tuple[int, int, int, int, bytes | None, str | None, bytes | None, str | None, str | None, str | None]


def with_shard_key(
    messages: Iterable[api.StoredMessage],
    keys: Sequence[int],
    count: int,
    *,
    lost: int = 0,
    removal_subject: str = "",
    folder: str = "",
) -> Iterator[pa.RecordBatch]:
    """``keys``: of the partitions, which have the shards in turn; ``count``: of shards; ``lost``: messages
    that the stream no longer has; ``removal_subject``: of the only identity whose removals of machines are
    accepted; ``folder``: for files with reports, empty: they are in the rows."""
    removals: list[removal.MachineRemoval] = []
    counts = {LOST: lost} if lost else {}
    clock_ms = 0
    activity: list[list[int]] = []
    waiting = _Waiting()
    for message in messages:
        stored_ms = message.stored_at_ns // 1_000_000
        clock_ms = max(clock_ms, stored_ms)
        if activity and stored_ms - activity[-1][1] <= state.OUTAGE_MS:
            activity[-1][1] = clock_ms
        else:
            activity.append([stored_ms, stored_ms])
        if protocol.is_tick(message.subject):
            continue
        try:
            if message.is_copy:  # an identity that may read streams had the broker send it
                raise CopiedMessage("a copy of a stored message")
            if message.subject == removal_subject:
                request = msgspec.json.decode(message.data, type=removal.MachineRemoval)
                request.validate()
                removals.append(msgspec.structs.replace(request, at_ms=stored_ms))
                continue
            batch, facts = columns.decode(message.data)
            _refuse_names(batch, detail=facts.schema == columns.NODE_SCHEMA)
        except errors.MusterError as error:
            counts[error.code] = counts.get(error.code, 0) + 1
            continue
        except Exception:  # noqa: BLE001  (whatever a message holds, it must not end the query)
            counts[MALFORMED] = counts.get(MALFORMED, 0) + 1
            continue
        for reason, number in facts.dropped.items():
            counter = f"{DROPPED}{reason if _REASON.fullmatch(reason) else 'other'}"
            counts[counter] = counts.get(counter, 0) + number
        if facts.schema == columns.NODE_SCHEMA:
            if batch.num_rows:
                waiting.add(message.sequence, stored_ms, batch, facts)
            if waiting.rows >= ROWS:
                yield _rows(waiting.divided(keys, count, folder))
                waiting = _Waiting()
        elif batch.num_rows:
            yield _rows(_divided_summaries(message.sequence, stored_ms, batch, facts, keys, count))
    if waiting.rows:
        yield _rows(waiting.divided(keys, count, folder))
    if clock_ms or counts:
        counted, active = (msgspec.json.encode(value).decode() for value in (counts, activity))
        requested = msgspec.json.encode(removals).decode() if removals else None
        yield _rows(
            (key, 0, 0, clock_ms, None, None, None, counted if place == 0 else None, active, requested)
            for place, key in enumerate(keys)
        )


class _Waiting:
    """Messages to be joined."""

    def __init__(self) -> None:
        self.rows = 0
        self._batches: list[pa.RecordBatch] = []
        self._dropped: list[tuple[int, dict[str, int]]] = []
        self._last = (0, 0)

    def add(self, sequence: int, stored_ms: int, batch: pa.RecordBatch, facts: columns.BatchInfo) -> None:
        piece = blocks.ReportPiece.from_message(sequence, stored_ms, batch, facts)
        self._batches.append(piece.batch)
        self._dropped += [(self.rows + row, counts) for row, counts in piece.dropped]
        self.rows += batch.num_rows
        self._last = sequence, stored_ms

    def divided(self, keys: Sequence[int], count: int, folder: str) -> Iterator[Row]:
        # To join first takes half the time of selecting rows from parts.
        (joined,) = pa.Table.from_batches(self._batches).combine_chunks().to_batches()
        shard = shards.shards_of(joined.column("machine"), count)
        order = np.argsort(shard, kind="stable")
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        ordered = joined.take(pa.array(order))
        ends = np.cumsum(np.bincount(shard, minlength=count)).tolist()
        sequence, stored_ms = self._last
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if end > start:
                dropped = [
                    (int(place[row]) - start, counts) for row, counts in self._dropped if shard[row] == number
                ]
                piece = blocks.ReportPiece(sequence, ordered.slice(start, end - start), dropped)
                data = None if folder else piece.encode()
                file = piece_files.write(folder, piece) if folder else None
                part = keys[number % len(keys)]
                yield part, number, sequence, stored_ms, data, file, None, None, None, None


def _divided_summaries(
    sequence: int,
    stored_ms: int,
    batch: pa.RecordBatch,
    facts: columns.BatchInfo,
    keys: Sequence[int],
    count: int,
) -> Iterator[Row]:
    shard = shards.shards_of(batch.column("group"), count)
    for number in np.unique(shard).tolist():
        rows = batch.filter(pa.array(shard == number))
        data = columns.encode(rows, facts)
        part = keys[number % len(keys)]
        yield part, number, sequence, stored_ms, None, None, data, None, None, None
        facts = msgspec.structs.replace(facts, dropped={})  # reported once


def _refuse_names(batch: pa.RecordBatch, *, detail: bool) -> None:
    """Names become subjects and keys: 1 to 256 characters, as `messages.Name`."""
    for column in ("machine", "group", "zone") if detail else ("group", "zone"):
        lengths = pc.min_max(pc.utf8_length(batch.column(column))).as_py()
        if batch.num_rows and (lengths["min"] < 1 or lengths["max"] > 256):
            raise columns.ReportSchemaMismatch(f"the column {column} has a name that is empty or too long")


def _rows(rows: Iterable[Row]) -> pa.RecordBatch:
    listed = list(rows)
    arrays = [
        pa.array(column, kind.type) for column, kind in zip(zip(*listed, strict=True), SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def keys(partitions: int, count: int = 0) -> tuple[int, ...]:
    """A key for each of Spark's partitions, or the first ``count`` of them.

    Spark selects the partition by a hash of the key: the first few integers would not be distributed evenly.
    """
    chosen: list[int] = []
    candidate = 0
    while len(chosen) < (count or partitions):
        if spark_internals.partition_of(candidate, partitions) == len(chosen):
            chosen.append(candidate)
        candidate += 1
    return tuple(chosen)
