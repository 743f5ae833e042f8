"""The first step of the query: the reports of each message, divided by shard.

A machine belongs to the shard that the hash of its name selects (`fleet.state.shards_of`), a row of a summary
to the shard of its group.  A message is decoded and divided here; with a single shard it is passed on as it
is.  Every shard also receives the time of the broker's clock, and one shard the counts of rejected messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from muster.bus import api
from muster.core import errors
from muster.core.reports import columns
from muster.pipeline import protocol
from muster.pipeline.fleet import state as fleet_state

SCHEMA = pa.schema(
    [
        ("shard", pa.int32()),
        ("sequence", pa.int64()),
        ("stored_ms", pa.int64()),
        ("data", pa.binary()),
        ("counts", pa.string()),
    ]
)
COLUMNS = "shard int, sequence bigint, stored_ms bigint, data binary, counts string"

_MESSAGES = 64  # in one batch for Spark: a few megabytes


def with_shard_key(messages: Iterable[api.StoredMessage], keys: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """``keys``: the state key of each shard."""
    waiting: list[tuple[Any, ...]] = []
    counts: dict[str, int] = {}
    clock_ms = 0
    for message in messages:
        stored_ms = message.stored_at_ns // 1_000_000
        clock_ms = max(clock_ms, stored_ms)
        if protocol.is_tick(message.subject):
            continue
        try:
            parts = list(_divided(message.data, len(keys)))
        except errors.MusterError as error:
            counts[error.code] = counts.get(error.code, 0) + 1
            continue
        waiting += [(keys[shard], message.sequence, stored_ms, data, None) for shard, data in parts]
        if len(waiting) >= _MESSAGES:
            yield _rows(waiting)
            waiting = []
    if clock_ms:
        counted = msgspec.json.encode(counts).decode()
        waiting += [
            (key, 0, clock_ms, None, counted if place == 0 else None) for place, key in enumerate(keys)
        ]
    if waiting:
        yield _rows(waiting)


def _divided(data: bytes, shards: int) -> Iterator[tuple[int, bytes]]:
    if shards == 1:
        yield 0, data
        return
    batch, facts = columns.decode(data)
    names = batch.column("machine" if facts.schema == columns.NODE_SCHEMA else "group")
    shard = fleet_state.shards_of(names, shards)
    order = np.argsort(shard, kind="stable")
    ordered = batch.take(pa.array(order))
    ends = np.cumsum(np.bincount(shard, minlength=shards)).tolist()
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end > start:
            yield number, columns.encode(ordered.slice(start, end - start), facts)
            facts = msgspec.structs.replace(facts, dropped={})  # reported once


def _rows(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    arrays = [
        pa.array(column, kind.type) for column, kind in zip(zip(*rows, strict=True), SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def keys(shards: int, partitions: int) -> tuple[int, ...]:
    """A key for each shard, so that each of Spark's partitions has the same number of shards.

    Spark selects the partition by the hash of the key (Murmur3 of a 32-bit integer, seed 42); the first few
    integers would not be distributed evenly.
    """
    chosen: list[int] = []
    candidate = 0
    while len(chosen) < shards:
        if _hash(candidate) % partitions == len(chosen) % partitions:
            chosen.append(candidate)
        candidate += 1
    return tuple(chosen)


def _hash(number: int) -> int:
    mask = 0xFFFFFFFF
    mixed = number * 0xCC9E2D51 & mask
    mixed = (mixed << 15 | mixed >> 17) & mask
    state = 42 ^ (mixed * 0x1B873593 & mask)
    state = (state << 13 | state >> 19) & mask
    state = (state * 5 + 0xE6546B64 & mask) ^ 4
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    state ^= state >> 16
    return state - (1 << 32) if state >> 31 else state  # signed, as Spark's
