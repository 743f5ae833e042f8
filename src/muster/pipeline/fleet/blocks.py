"""Reports as arrays: many messages are joined into a block, and processing is arithmetic on arrays.

The source of the query checks messages and divides them into pieces, one for each shard (`ReportPiece`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from muster.core import health
from muster.core.reports import columns
from muster.pipeline.fleet import cells, node_columns
from muster.pipeline.history import tables

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ROWS = 32_768  # of pieces that are joined: a few megabytes, which fit into a cache
EXTRA_MAX = 1024  # metrics that are not standard, of one shard in one micro-batch
_PERIOD_MS_MAX = 2**31 - 1
_PARTIAL = columns.node_schema().get_field_index("partial")
_DROPPED = b"dropped"  # in the metadata of an encoded piece

#: Node reports, with the message in the stream that they came in, and when the broker stored it.
SEQUENCE, STORED = "stream_sequence", "stored_ms"
PIECE_SCHEMA = pa.schema([*columns.node_schema(), (SEQUENCE, pa.int64()), (STORED, pa.int64())])
#: Columns of `PIECE_SCHEMA` that have other names in the table `nodes`.
_IN_HISTORY = {SEQUENCE: tables.SEQUENCE, columns.EXTRA: "metrics"}


class MetricCodes(dict[str, int]):
    """Codes of metrics that are not standard, by name; -1 beyond `EXTRA_MAX` names."""

    dropped = 0  # values without a code

    def add(self, name: str) -> int:
        return self.setdefault(name, len(self)) if name in self or len(self) < EXTRA_MAX else -1

    def valid(self, codes: Ints, values: Floats) -> Bools:
        """Which values can be summed and have a code; those without one are counted."""
        coded = codes >= 0
        self.dropped += len(codes) - int(np.count_nonzero(coded))
        good: Bools = coded & (np.abs(values) <= columns.VALUE_MAX)
        return good


@dataclass(frozen=True, slots=True)
class DecodedMessage:
    """Summaries that came in one message."""

    sequence: int  # of the stream
    stored_ms: int
    batch: pa.RecordBatch  # columns of `columns.summary_schema`
    facts: columns.BatchInfo


@dataclass(frozen=True, slots=True)
class ReportPiece:
    """Reports of one shard from some successive messages of a stream."""

    sequence: int  # of the last message
    batch: pa.RecordBatch  # columns of `PIECE_SCHEMA`
    dropped: list[tuple[int, dict[str, int]]]  # by reason, with a row of the message that reported it

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    @classmethod
    def from_message(
        cls, sequence: int, stored_ms: int, batch: pa.RecordBatch, facts: columns.BatchInfo
    ) -> ReportPiece:
        """All reports of one message."""
        rows = batch.num_rows
        arrays = [*batch.columns, *(pa.repeat(pa.scalar(fact), rows) for fact in (sequence, stored_ms))]
        if facts.partial:
            arrays[_PARTIAL] = pa.repeat(pa.scalar(True), rows)
        extended = pa.RecordBatch.from_arrays(arrays, schema=PIECE_SCHEMA)
        return cls(sequence, extended, [(0, facts.dropped)] if facts.dropped else [])

    @classmethod
    def from_rows(cls, rows: pa.Table) -> ReportPiece:
        """All rows of the table `nodes`, in its `row_schema`; see `rows`."""
        arrays = [
            rows.column(_IN_HISTORY.get(field.name, field.name)).combine_chunks().cast(field.type)
            if field.name != STORED
            else pa.array(np.zeros(rows.num_rows, np.int64))
            for field in PIECE_SCHEMA
        ]
        return cls(0, pa.RecordBatch.from_arrays(arrays, schema=PIECE_SCHEMA), [])

    @classmethod
    def join(cls, pieces: Sequence[ReportPiece]) -> ReportPiece:
        """All reports of successive pieces."""
        if len(pieces) == 1:
            return pieces[0]
        batches = [piece.batch.replace_schema_metadata(None) for piece in pieces]
        (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
        starts = np.cumsum([0, *(piece.batch.num_rows for piece in pieces)]).tolist()
        dropped = [
            (start + row, counts)
            for start, piece in zip(starts, pieces, strict=False)
            for row, counts in piece.dropped
        ]
        return cls(pieces[-1].sequence, batch, dropped)

    def rows(self) -> pa.RecordBatch:
        """As rows of the table `nodes`, without its column ``day``."""
        schema = tables.definition(tables.NODES).row_schema
        own = {name: field for field, name in _IN_HISTORY.items()}
        arrays = [self.batch.column(own.get(field.name, field.name)).cast(field.type) for field in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def encode(self) -> bytes:
        sink = pa.BufferOutputStream()
        self.write(sink)
        data: bytes = sink.getvalue().to_pybytes()
        return data

    def write(self, sink: pa.NativeFile) -> None:
        batch = self.batch.replace_schema_metadata({_DROPPED: msgspec.json.encode(self.dropped)})
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)

    @classmethod
    def read(cls, sequence: int, source: bytes | pa.NativeFile) -> ReportPiece:
        """Without checks: the source of the query encoded it."""
        with pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(use_threads=False)) as reader:
            batch = reader.read_next_batch()
        dropped = msgspec.json.decode(batch.schema.metadata[_DROPPED], type=list[tuple[int, dict[str, int]]])
        return cls(sequence, batch, dropped)


@dataclass(slots=True)
class ReportBlock:
    """A row for each report. ``metrics`` has a row for each metric, and NaN where none was measured."""

    place: Ints  # row of the machine in the shard
    stored_ms: Ints
    reported_ms: Ints
    boot: Ints
    sequence: Ints
    period_ms: Ints
    group: Ints
    zone: Ints
    state: Ints  # indexes of `cells.STATES`
    partial: Bools
    metrics: Floats
    extra_row: Ints  # metrics that are not standard: row, index of ``words``, value
    extra_word: Ints
    extra_value: Floats
    dropped: list[tuple[int, dict[str, int]]]  # with a row of the message that reported it

    def __len__(self) -> int:
        return len(self.stored_ms)

    @classmethod
    def from_piece(
        cls, piece: ReportPiece, place: Ints, known: node_columns.NodeColumns, words: MetricCodes
    ) -> ReportBlock:
        """Raises the errors of pyarrow and numpy for invalid content.

        ``place``: as of `NodeColumns.places`; ``words`` grows by new names of metrics.
        """
        batch = piece.batch
        rows = batch.num_rows
        metrics = np.empty((len(cells.METRICS), rows))
        for row, name in enumerate(cells.METRICS):
            metrics[row] = batch.column(name).to_numpy(zero_copy_only=False)
        states = batch.column("state").dictionary_encode()
        code = [
            cells.STATES.index(word if word in cells.STATES else "other")
            for word in states.dictionary.to_pylist()
        ]
        period_ms = np.nan_to_num(batch.column("period_s").to_numpy() * 1000)
        partial = batch.column("partial").to_numpy(zero_copy_only=False)
        return cls(
            place,
            batch.column(STORED).to_numpy(),
            batch.column("reported_at").cast(pa.int64()).to_numpy() // 1000,
            batch.column("boot").to_numpy(),
            batch.column("sequence").to_numpy(),
            np.clip(period_ms, 0, _PERIOD_MS_MAX).astype(np.int64),
            known.group_codes(batch.column("group")),
            known.zone_codes(batch.column("zone")),
            np.array(code)[states.indices.to_numpy()],
            partial,
            metrics,
            *_joined(_extra(batch.column("extra"), words), _services(batch.column("services"), words)),
            piece.dropped,
        )

    def select_rows(self, rows: Ints) -> ReportBlock:
        """The given rows, in this order."""
        back = np.full(len(self), -1)
        back[rows] = np.arange(len(rows))
        extra_row = back[self.extra_row]
        left = extra_row >= 0
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in (*_NUMBERS, "partial")},
            metrics=self.metrics[:, rows],
            extra_row=extra_row[left],
            extra_word=self.extra_word[left],
            extra_value=self.extra_value[left],
            dropped=[(max(0, int(back[row])), counts) for row, counts in self.dropped],
        )


Extra = tuple[Ints, Ints, Floats]  # rows, words, values
_NOTHING: Extra = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)


def _joined(first: Extra, other: Extra) -> Extra:
    if not len(other[0]):
        return first
    rows, words, values = (np.concatenate(parts) for parts in zip(first, other, strict=True))
    return rows, words, values


def _services(lists: pa.ListArray, words: MetricCodes) -> Extra:
    """The metrics of a service ``shop`` as ``shop_<metric>``, and ``shop_up``, which is 1 or 0."""
    if lists.null_count == len(lists):
        return _NOTHING
    ends = lists.offsets.to_numpy()
    row = np.repeat(np.arange(len(lists)), np.diff(ends))
    name, state, _, metrics = lists.values.slice(ends[0], len(row)).flatten()
    name = name.fill_null("").dictionary_encode()
    services, service = name.dictionary.to_pylist(), name.indices.to_numpy()
    up = np.array([words.add(_plain(f"{service_name}_up")) for service_name in services], np.int64)[service]
    is_up = (np.asarray(state.to_numpy(zero_copy_only=False)) == health.HealthState.UP.value).astype(
        np.float64
    )
    inner = metrics.offsets.to_numpy()
    size = np.diff(inner)
    key = metrics.keys.slice(inner[0], size.sum()).dictionary_encode()
    keys = key.dictionary.to_pylist()
    pair = np.repeat(service, size) * len(keys) + key.indices.to_numpy()
    pairs, which = np.unique(pair, return_inverse=True)
    word = np.array(
        [
            words.add(_plain(f"{services[code // len(keys)]}_{keys[code % len(keys)]}"))
            for code in pairs.tolist()
        ],
        np.int64,
    )[which]
    value = metrics.items.slice(inner[0], size.sum()).to_numpy(zero_copy_only=False).astype(np.float64)
    rows, codes, values = _joined((row, up, is_up), (np.repeat(row, size), word, value))
    good = words.valid(codes, values)
    return rows[good], codes[good], values[good]


def _plain(name: str) -> str:
    """As a name that predicates accept."""
    return re.sub(r"\W", "_", name)


def _extra(maps: pa.MapArray, words: MetricCodes) -> Extra:
    if maps.null_count == len(maps):
        return _NOTHING
    ends = maps.offsets.to_numpy()
    row = np.repeat(np.arange(len(maps)), np.diff(ends))
    # The keys and items of a slice are those of the whole.
    names = maps.keys.slice(ends[0], len(row)).dictionary_encode()
    code = np.array([*(words.add(name) for name in names.dictionary.to_pylist()), -1], np.int64)
    word = code[names.indices.fill_null(-1).to_numpy()]
    value = maps.items.slice(ends[0], len(row)).to_numpy(zero_copy_only=False).astype(np.float64)
    good = words.valid(word, value)
    return row[good], word[good], value[good]


_NUMBERS = ("place", "stored_ms", "reported_ms", "boot", "sequence", "period_ms", "group", "zone", "state")


def concat_pieces(pieces: Iterable[ReportPiece]) -> list[ReportPiece]:
    """Join successive pieces up to `ROWS`: where there are many shards, the source has a few hundred reports
    of one, and each piece costs some milliseconds."""
    runs: list[list[ReportPiece]] = []
    rows = 0
    for piece in pieces:
        if not runs or rows + len(piece) > ROWS:
            runs.append([])
            rows = 0
        runs[-1].append(piece)
        rows += len(piece)
    return list(map(ReportPiece.join, runs))
