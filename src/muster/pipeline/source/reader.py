"""Streams of the bus as a Spark source: ``spark.readStream.format("muster")``.

An offset is the last sequence read from each stream, so a batch can be replayed exactly: nothing is consumed,
the broker stores no position, and Spark's checkpoint is the only state.  It also has the time at which each
stream was created: a stream that was created again is noticed even after a restart.  A partition is a range
of sequences of one stream.

docs/guides/pipeline-spark.md lists the options.
The pipeline's own job has ``payload=shards``: reports by shard of the fleet (`shard_keys`), with ``parts``,
the keys of partitions; ``shards``, their number; ``removals``, the subject of messages that remove machines;
and ``folder``, for files with reports (`piece_files`).

Spark calls the methods of `BusStreamReader` in a separate process on the driver, except ``read``, which runs
in the executors' Python workers.  Each call opens its own connection: that takes milliseconds, and no
connection has to be maintained between calls.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from muster import connection
from muster.bus import api
from muster.core import errors
from muster.core.reports import columns
from muster.pipeline.source import rows, shard_keys
from muster.trust import credentials as credentials_

PATIENCE_S = 20.0
RETRY_S = 0.5
FETCHED = 200  # messages that are held at once: some 100 MB with thousands of reports each
REPORTS, SHARDS = "reports", "shards"  # payloads
T = TypeVar("T")
CREATED = " created"  # ends the key of a stream's creation time in an offset


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

    async def call(self, work: Callable[[api.Bus], Awaitable[T]]) -> T:
        """The result of ``work`` with a connection of its own, which is repeated for some time if the brokers
        are not available: a failed call ends the query, and brokers recover within seconds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                async with await connection.connect(
                    self.servers or None,
                    creds=self._newest_credentials(),
                    identity=None if self.credentials else "spark",
                    tls=ssl.create_default_context(cadata=self.ca) if self.ca else None,
                ) as bus:
                    return await work(bus)
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
            _names(options, "servers") if options.get("servers") else (),
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
        self._streams = _names(options, "streams", columns.REPORTS_STREAM)
        payload = _choice(options, "payload", *rows.SCHEMAS, SHARDS)
        self._is_pipeline = payload == SHARDS  # which follows streams that are created again
        self._decoder = None if payload == SHARDS else rows.RowDecoder(payload, schema)
        self._fail_on_loss = _choice(options, "onLoss", "fail", "skip") == "fail"
        self._wait_for_missing = _choice(options, "missing", "fail", "wait") == "wait"
        self._max_messages = _positive(options, "maxMessages", 1000)
        self._keys = [int(key) for key in options.get("parts", "0").split(",")]
        self._shards = _positive(options, "shards", len(self._keys))
        self._removals = options.get("removals", "")
        self._folder = options.get("folder", "")
        self._splits = _positive(options, "splits", 2)
        self._after = _positions(options, "after", self._streams)
        self._first_end = _positions(options, "until", self._streams)
        self._until: dict[str, int] | None = None  # fixed for a run with the trigger availableNow
        self._created_ns: dict[str, int] = {}  # by stream, when it was first seen

    def initialOffset(self) -> dict[str, int]:
        """Messages that retention removed after a given position are read as lost, so that they are
        counted."""
        states = self._states()
        offsets = {}
        for name, state in states.items():
            after = self._after[name]
            offsets[name] = min(after, state.last_sequence) if after > 0 else state.first_sequence - 1
            if after < 0:
                offsets[name] = state.last_sequence
        return offsets | self._created(states)

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._max_messages)

    def prepareForTriggerAvailableNow(self) -> None:
        self._until = self._last_sequences()

    def reportLatestOffset(self) -> dict[str, int]:
        return self._last_sequences()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        states = self._states()
        created = self._created(states)
        known = {name: position for name, position in start.items() if name.endswith(CREATED)}
        start = {name: position for name, position in start.items() if name not in known}
        available = self._until or {name: state.last_sequence for name, state in states.items()}
        for name, position in start.items():
            if available.get(name, 0) < position:  # or else new messages would be skipped up to the position
                raise errors.Conflict(
                    f"the stream {name} ends at {available.get(name, 0)}, before the position {position} "
                    "of the checkpoint: it was restored from a backup, created again or damaged"
                )
        for name, state in states.items():
            # It may have grown beyond the position by now.
            before = known.get(f"{name}{CREATED}") or self._created_ns.setdefault(name, state.created_ns)
            if before != state.created_ns:
                raise _created_again(name)
        ends = {name: end for name, end in self._first_end.items() if end > start.get(name, 0)}
        if ends:
            return {**start, **ends, **created}
        if isinstance(limit, ReadAllAvailable):
            return _batch_end(start, available, None) | created
        assert isinstance(limit, ReadMaxRows)
        # Messages that retention removed do not count towards the limit.
        readable = {
            name: max(position, states[name].first_sequence - 1) if name in states else position
            for name, position in {**dict.fromkeys(available, 0), **start}.items()
        }
        return _batch_end(readable, available, limit.max_rows) | created

    def _created(self, states: dict[str, api.StreamState]) -> dict[str, int]:
        """When the streams were created, as a part of an offset."""
        if self._is_pipeline:
            return {}
        return {f"{name}{CREATED}": state.created_ns for name, state in states.items()}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[SequenceRange]:
        return [
            part
            for name in sorted(end)
            if not name.endswith(CREATED)
            for part in _split(
                name,
                start.get(name, 0) + 1,
                end[name],
                self._splits,
                end.get(f"{name}{CREATED}") or self._created_ns.get(name, 0),
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
        if self._decoder is not None:
            name, first, last = partition.stream, partition.first, partition.last
            for part in _split(name, first, last, -(-(last - first + 1) // FETCHED), partition.created_ns):
                yield from self._decoder.decode(
                    asyncio.run(self._access.call(functools.partial(self._fetch, part)))
                )
            return
        messages = asyncio.run(self._access.call(functools.partial(self._fetch, partition)))
        yield from shard_keys.with_shard_key(
            messages,
            self._keys,
            self._shards,
            lost=partition.last - partition.first + 1 - len(messages),
            removal_subject=self._removals,
            folder=self._folder,
        )

    async def _fetch(self, part: SequenceRange, bus: api.Bus) -> list[api.StoredMessage]:
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
        return asyncio.run(self._access.call(self._query_states))

    async def _query_states(self, bus: api.Bus) -> dict[str, api.StreamState]:
        states: dict[str, api.StreamState] = {}
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


def _names(options: MutableMapping[str, str], key: str, default: str = "") -> tuple[str, ...]:
    names = tuple(part.strip() for part in options.get(key, default).split(",") if part.strip())
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
