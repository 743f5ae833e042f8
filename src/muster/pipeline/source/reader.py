"""Streams of the bus as a Spark source: ``spark.readStream.format("muster")``.

An offset is the last sequence read from each stream, so a batch can be replayed exactly: nothing is consumed,
the broker stores no position, and Spark's checkpoint is the only state.  A partition is a range of
sequences of one stream.

Options:

``servers``       addresses of brokers, separated by commas
``credentials``   a credentials file (none: no authentication)
``ca``            a file with the authority of the brokers' certificates (none: the system's)
``streams``       names of streams, separated by commas; several are the shards of one
``payload``       ``raw`` (default): one row for each message, with `RAW_SCHEMA`; ``arrow``: message bodies
                  are Arrow record batches, and the rows are theirs, brought to the schema that
                  ``.schema(…)`` gives; ``shards``: reports by shard of the fleet, for the pipeline's own
                  job (see `shard_keys`)
``shards``        with ``payload=shards``: the keys of the shards, separated by commas
``removals``      with ``payload=shards``: the subject of messages that remove machines
``folder``        with ``payload=shards``: for files with reports (see `piece_files`); empty: in the rows
``maxMessages``   bound of one micro-batch (default 10000)
``splits``        partitions for each stream (default 2)
``onLoss``        ``fail`` (default) or ``skip``, when retention removed messages before they were read
``after``         where a new checkpoint starts: after this sequence, one for each stream, separated by
                  commas (default 0: at the first message; -1: at the end)
``until``         where the first batch after ``after`` ends, to repeat a batch exactly (default 0: anywhere)
``missing``       ``fail`` (default) or ``wait``, when a stream does not exist

With ``payload=arrow`` an unreadable message does not fail the query: it becomes one row in which only the
columns `SEQUENCE` and `FAULT` are set, if the schema has them.  Include them, so that invalid messages can be
counted by reason.  If the schema has other columns that are ``NOT NULL``, the message is skipped.

Spark calls the methods of `BusStreamReader` in a separate process on the driver, except ``read``, which runs
in the executors' Python workers.  Each call opens its own connection: that takes milliseconds, and no
connection has to be maintained between calls.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from muster import connection
from muster.bus import api
from muster.bus.client import client
from muster.core import errors
from muster.core.reports import columns
from muster.pipeline.source import shard_keys
from muster.trust import credentials as credentials_

SEQUENCE = "stream_sequence"
FAULT = "fault"

RAW_SCHEMA = "sequence bigint, subject string, data binary, headers map<string,string>, stored_at timestamp"

PATIENCE_S = 20.0
RETRY_S = 0.5
ROWS_MAX = 10_000_000  # of one message: an Arrow header of a few bytes can claim to be followed by terabytes


@dataclass(frozen=True, slots=True)
class StreamAccess:
    """Connection data: plain data, because it is sent to the executors.

    The content of the files of the options is read on the driver and travels with the tasks, so executors
    need no files, and no page of Spark shows them.  Where the file of the credentials exists, it is read for
    each connection, because credentials are renewed.
    """

    servers: tuple[str, ...]
    file: str | None = None  # with the credentials
    credentials: credentials_.Credentials | None = field(default=None, repr=False)
    ca: str | None = field(default=None, repr=False)

    async def connect(self) -> client.NatsBus:
        """Connect with retries: a failed call ends the query, and brokers recover within seconds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await connection.connect(
                    self.servers,
                    creds=self._newest_credentials(),
                    identity=None if self.credentials else "spark",
                    tls=ssl.create_default_context(cadata=self.ca) if self.ca else None,
                )
            except errors.Unavailable:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(RETRY_S)

    def _newest_credentials(self) -> str | credentials_.Credentials | None:
        return self.file if self.file and Path(self.file).is_file() else self.credentials

    @classmethod
    def from_options(cls, options: MutableMapping[str, str]) -> StreamAccess:
        creds, ca = options.get("credentials"), options.get("ca")
        return cls(
            _names(options, "servers"),
            creds,
            credentials_.Credentials.load(Path(creds)) if creds else None,
            Path(ca).read_text() if ca else None,
        )


@dataclass
class SequenceRange(InputPartition):
    stream: str
    first: int
    last: int
    created_ns: int  # of the stream; 0: unknown

    def __init__(self, stream: str, first: int, last: int, created_ns: int = 0) -> None:
        super().__init__(None)
        self.stream, self.first, self.last, self.created_ns = stream, first, last, created_ns


class BusStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: MutableMapping[str, str], schema: StructType) -> None:
        self._access = StreamAccess.from_options(options)
        self._streams = _names(options, "streams")
        self._payload = _choice(options, "payload", "raw", "arrow", "shards")
        self._fail_on_loss = _choice(options, "onLoss", "fail", "skip") == "fail"
        self._wait_for_missing = _choice(options, "missing", "fail", "wait") == "wait"
        self._max_messages = _positive(options, "maxMessages", 10_000)
        self._keys = [int(key) for key in options.get("shards", "0").split(",")]
        self._removals = options.get("removals", "")
        self._folder = options.get("folder", "")
        self._splits = _positive(options, "splits", 2)
        self._after = _positions(options, "after", self._streams)
        self._first_end = _positions(options, "until", self._streams)
        self._schema = to_arrow_schema(schema, timezone="UTC")
        for name, kind in ((SEQUENCE, pa.int64()), (FAULT, pa.string())):
            index = self._schema.get_field_index(name) if self._payload == "arrow" else -1
            if index >= 0 and not (field := self._schema.field(index)).type.equals(kind):
                raise errors.InvalidInput(f"the column {name} is {field.type}: expected {kind}")
        self._until: dict[str, int] | None = None  # fixed for a run with the trigger availableNow
        self._created_ns: dict[str, int] = {}  # by stream, when it was first seen

    def initialOffset(self) -> dict[str, int]:
        """Messages that retention removed after a given position are read as lost, so that they are
        counted."""
        offsets = {}
        for name, state in self._states().items():
            after = self._after[name]
            offsets[name] = min(after, state.last_sequence) if after > 0 else state.first_sequence - 1
            if after < 0:
                offsets[name] = state.last_sequence
        return offsets

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._max_messages)

    def prepareForTriggerAvailableNow(self) -> None:
        self._until = self._last_sequences()

    def reportLatestOffset(self) -> dict[str, int]:
        return self._last_sequences()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        states = self._states()
        available = self._until or {name: state.last_sequence for name, state in states.items()}
        for name, position in start.items():
            if available.get(name, 0) < position:  # or else new messages would be skipped up to the position
                raise errors.Conflict(
                    f"the stream {name} ends at {available.get(name, 0)}, before the position {position} "
                    "of the checkpoint: it was restored from a backup, created again or damaged"
                )
        for name, state in states.items():
            # It may have grown beyond the position by now.
            if self._created_ns.setdefault(name, state.created_ns) != state.created_ns:
                raise _created_again(name)
        ends = {name: end for name, end in self._first_end.items() if end > start.get(name, 0)}
        if ends:
            return {**start, **ends}
        if isinstance(limit, ReadAllAvailable):
            return _batch_end(start, available, None)
        assert isinstance(limit, ReadMaxRows)
        # Messages that retention removed do not count towards the limit.
        readable = {
            name: max(position, states[name].first_sequence - 1) if name in states else position
            for name, position in {**dict.fromkeys(available, 0), **start}.items()
        }
        return _batch_end(readable, available, limit.max_rows)

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[SequenceRange]:
        return [
            part
            for name in sorted(end)
            for part in _split(
                name, start.get(name, 0) + 1, end[name], self._splits, self._created_ns.get(name, 0)
            )
        ]

    def all_ranges(self) -> Sequence[SequenceRange]:
        return [
            part
            for name, state in self._states().items()
            for part in _split(name, state.first_sequence, state.last_sequence, self._parts(state))
        ]

    def _parts(self, state: api.StreamState) -> int:
        """As many that none exceeds the size of a micro-batch."""
        return max(self._splits, -(-state.messages // self._max_messages))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SequenceRange)
        messages = asyncio.run(self._fetch(partition))
        if self._payload == "raw":
            yield _raw_batch(messages, self._schema)
        elif self._payload == "shards":
            expected = partition.last - partition.first + 1
            yield from shard_keys.with_shard_key(
                messages,
                self._keys,
                lost=expected - len(messages),
                removal_subject=self._removals,
                folder=self._folder,
            )
        else:
            for message in messages:
                yield from decode(message, self._schema)

    async def _fetch(self, part: SequenceRange) -> list[api.StoredMessage]:
        async with await self._access.connect() as bus:
            stream = await bus.open_stream(part.stream)
            try:
                messages = [message async for message in stream.read(part.first, part.last)]
            except errors.NotFound:
                if self._fail_on_loss:
                    raise
                messages = [message async for message in _remaining(stream, part)]
            # A stream that was created again meanwhile may already have as many messages.
            if part.created_ns and (await stream.state()).created_ns != part.created_ns:
                raise _created_again(part.stream)
            return messages

    def _last_sequences(self) -> dict[str, int]:
        return {name: state.last_sequence for name, state in self._states().items()}

    def _states(self) -> dict[str, api.StreamState]:
        return asyncio.run(self._query_states())

    async def _query_states(self) -> dict[str, api.StreamState]:
        states: dict[str, api.StreamState] = {}
        async with await self._access.connect() as bus:
            for name in self._streams:
                try:
                    states[name] = await (await bus.open_stream(name)).state()
                except errors.NotFound:
                    if not self._wait_for_missing:
                        raise
        return states


class BusBatchReader(DataSourceReader):
    """``spark.read.format("muster")``: what the streams hold now, with the same options."""

    def __init__(self, options: MutableMapping[str, str], schema: StructType) -> None:
        self._streams = BusStreamReader(options, schema)

    def partitions(self) -> Sequence[InputPartition]:
        return self._streams.all_ranges()

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, SequenceRange):  # Spark passes None for an empty stream
            yield from self._streams.read(partition)


def _created_again(name: str) -> errors.Conflict:
    return errors.Conflict(f"the stream {name} was created again while it was read")


async def _remaining(stream: api.Stream, part: SequenceRange) -> AsyncIterator[api.StoredMessage]:
    first = max(part.first, (await stream.state()).first_sequence)
    if first <= part.last:
        async for message in stream.read(first, part.last, gaps=True):
            yield message


def decode(message: api.StoredMessage, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of one message in exactly ``schema``; or one row with the error."""
    try:
        with pa.ipc.open_stream(message.data) as reader:
            batches = [
                _fit(batch, schema, message.sequence)
                for batch in columns.read_batches(reader, rows_max=ROWS_MAX)
            ]
    except Exception as error:  # noqa: BLE001  (whatever a message holds, it must not end the query)
        batches = _fault_row(schema, message.sequence, f"{type(error).__name__}: {str(error)[:200]}")
    yield from batches


def _fit(batch: pa.RecordBatch, schema: pa.Schema, sequence: int) -> pa.RecordBatch:
    """The columns of the schema, and the sequence."""
    own = [name for name in (SEQUENCE, FAULT) if name in batch.schema.names]
    numbered = batch.drop_columns(own).append_column(
        SEQUENCE, pa.repeat(pa.scalar(sequence, pa.int64()), batch.num_rows)
    )
    return columns.conform_schema(numbered, schema)


def _fault_row(schema: pa.Schema, sequence: int, fault: str) -> list[pa.RecordBatch]:
    known = {SEQUENCE: sequence, FAULT: fault}
    if any(not field.nullable and field.name not in known for field in schema):
        return []  # no row can be without that column
    arrays = [pa.array([known.get(field.name)], field.type) for field in schema]
    return [pa.RecordBatch.from_arrays(arrays, schema=schema)]


def _raw_batch(messages: Sequence[api.StoredMessage], schema: pa.Schema) -> pa.RecordBatch:
    named = {
        "sequence": [m.sequence for m in messages],
        "subject": [m.subject for m in messages],
        "data": [m.data for m in messages],
        "headers": [list(m.headers.items()) for m in messages],
        "stored_at": [m.stored_at_ns // 1000 for m in messages],
    }
    return pa.RecordBatch.from_pydict(named, schema=schema)


def _batch_end(start: dict[str, int], available: dict[str, int], most: int | None) -> dict[str, int]:
    """An end for each stream, ``most`` messages in total; a short stream leaves its share to the others."""
    ends = {name: max(start.get(name, 0), last) for name, last in available.items()}
    if most is None:
        return ends
    waiting = sorted((ends[name] - start.get(name, 0), name) for name in ends)
    left = most
    for position, (behind, name) in enumerate(waiting):
        share = -(-left // (len(waiting) - position))
        taken = min(behind, share)
        ends[name] = start.get(name, 0) + taken
        left -= taken
    return ends


def _split(stream: str, first: int, last: int, parts: int, created_ns: int = 0) -> Iterator[SequenceRange]:
    count = last - first + 1
    for index in range(min(parts, max(0, count))):
        low = first + count * index // min(parts, count)
        high = first + count * (index + 1) // min(parts, count) - 1
        yield SequenceRange(stream, low, high, created_ns)


def _names(options: MutableMapping[str, str], key: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in options.get(key, "").split(",") if part.strip())
    if not names:
        raise errors.InvalidInput(f"the option {key!r} is missing: names, separated by commas")
    return names


def _choice(options: MutableMapping[str, str], key: str, *choices: str) -> str:
    value = options.get(key, choices[0])
    if value not in choices:
        raise errors.InvalidInput(f"the option {key!r} takes {' or '.join(choices)}, not {value!r}")
    return value


def _positive(options: MutableMapping[str, str], key: str, default: int) -> int:
    value = options.get(key, str(default))
    if not value.isdecimal() or int(value) < 1:
        raise errors.InvalidInput(f"the option {key!r} takes a number from 1 on, not {value!r}")
    return int(value)


def _positions(options: MutableMapping[str, str], key: str, streams: Sequence[str]) -> dict[str, int]:
    text = options.get(key, ",".join("0" for _ in streams))
    try:
        positions = dict(zip(streams, map(int, text.split(",")), strict=True))
    except ValueError:
        raise errors.InvalidInput(
            f"the option {key!r} takes a number for each of {len(streams)} streams, not {text!r}"
        ) from None
    return positions
