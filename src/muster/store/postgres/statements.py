"""The tables, and the SQL on a connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, LiteralString

import msgspec
import psycopg
import psycopg.sql

from muster.store import api, commit_plan

Connection = psycopg.AsyncConnection[tuple[Any, ...]]

SCHEMA_VERSION = 2

TABLES: tuple[LiteralString, ...] = (
    "CREATE TABLE head (position bigint NOT NULL, trimmed bigint NOT NULL, record_bytes bigint NOT NULL,"
    " history_bytes bigint NOT NULL, identity text NOT NULL, schema_version integer NOT NULL)",
    'CREATE TABLE record (collection text COLLATE "C" NOT NULL, key bytea NOT NULL, value bytea NOT NULL,'
    " version bigint NOT NULL, position bigint NOT NULL, epoch bigint NOT NULL,"
    " PRIMARY KEY (collection, key))",
    "CREATE TABLE change (position bigint PRIMARY KEY, version bigint NOT NULL,"
    ' collection text COLLATE "C" NOT NULL,'
    " key bytea NOT NULL, deleted boolean NOT NULL, epoch bigint NOT NULL, value bytea, batch bytea)",
)

#: From the schema version that is the key to the next one.
MIGRATIONS: dict[int, tuple[LiteralString, ...]] = {1: ("ALTER TABLE change ADD COLUMN batch bytea",)}

_STORED: LiteralString = """
SELECT r.collection, r.key, r.version, r.position, r.epoch, octet_length(r.value)
FROM unnest(%b::text[], %b::bytea[]) AS t (collection, key)
JOIN record r ON r.collection = t.collection AND r.key = t.key
"""
#: A complete plan in one round trip. The parts of one statement do not see each other's effects, and need
#: not: they touch different rows, and ``superseded`` needs the values from before.
_CARRY_OUT: LiteralString = """
WITH superseded AS (
    UPDATE change c SET value = r.value
    FROM unnest(%b::text[], %b::bytea[], %b::bigint[]) AS t (collection, key, position)
    JOIN record r ON r.collection = t.collection AND r.key = t.key
    WHERE c.position = t.position
), puts AS (
    INSERT INTO record (collection, key, value, version, position, epoch)
    SELECT * FROM unnest(%b::text[], %b::bytea[], %b::bytea[], %b::bigint[], %b::bigint[], %b::bigint[])
    ON CONFLICT (collection, key) DO UPDATE SET value = excluded.value, version = excluded.version,
        position = excluded.position, epoch = excluded.epoch
), deletes AS (
    DELETE FROM record r USING unnest(%b::text[], %b::bytea[]) AS t (collection, key)
    WHERE r.collection = t.collection AND r.key = t.key
), changes AS (
    INSERT INTO change (position, version, collection, key, deleted, epoch, value, batch)
    SELECT *, CASE t.position WHEN %s THEN %b::bytea END FROM unnest(
        %b::bigint[], %b::bigint[], %b::text[], %b::bytea[], %b::boolean[], %b::bigint[], %b::bytea[]
    ) AS t (position)
), gone AS (
    DELETE FROM change WHERE position <= %s RETURNING octet_length(value) AS bytes
), notified AS (
    SELECT pg_notify(%s, '')
)
UPDATE head SET position = %s, trimmed = %s, record_bytes = %s,
    history_bytes = %s - (SELECT coalesce(sum(bytes), 0) FROM gone)
FROM notified RETURNING position, trimmed, record_bytes, history_bytes
"""
_TRIM: LiteralString = """
WITH gone AS (DELETE FROM change WHERE position <= %s RETURNING octet_length(value) AS bytes)
UPDATE head SET trimmed = %s, history_bytes = history_bytes - (SELECT coalesce(sum(bytes), 0) FROM gone)
RETURNING position, trimmed, record_bytes, history_bytes
"""
_CHANGES: LiteralString = """
SELECT c.position, c.version, c.collection, c.key, coalesce(c.value, r.value), c.epoch
FROM change c LEFT JOIN record r
  ON NOT c.deleted AND c.value IS NULL AND r.collection = c.collection AND r.key = c.key
WHERE c.position > %s AND (%s::text IS NULL OR c.collection = %s) ORDER BY c.position LIMIT %s
"""


async def rows(
    connection: Connection, statement: LiteralString | psycopg.sql.Composed, *values: object
) -> list[tuple[Any, ...]]:
    async with connection.cursor(binary=True) as cursor:
        await cursor.execute(statement, values)
        return await cursor.fetchall()


# -- reading ---------------------------------------------------------------------------------------------


async def begin(connection: Connection) -> commit_plan.StoreHead:
    await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    return await head(connection)  # the first read fixes the snapshot


async def head(connection: Connection) -> commit_plan.StoreHead:
    (row,) = await rows(connection, "SELECT position, trimmed, record_bytes, history_bytes FROM head")
    return commit_plan.StoreHead(*row)


async def get_many(connection: Connection, collection: str, keys: Sequence[bytes]) -> list[api.StoreRecord]:
    records = await rows(
        connection,
        "SELECT key, value, version, epoch FROM record WHERE collection = %s AND key = ANY(%b::bytea[])",
        collection,
        list(keys),
    )
    return [_record(*row) for row in records]


async def scan(
    connection: Connection, key_range: commit_plan.KeyRange, limit: int | None, reverse: bool
) -> list[api.StoreRecord]:
    bounds = (key_range.low,) if key_range.high is None else (key_range.low, key_range.high)
    records = await rows(
        connection,
        "SELECT key, value, version, epoch FROM record WHERE collection = %s AND key >= %b"
        + ("" if key_range.high is None else " AND key < %b")
        + (" ORDER BY key DESC" if reverse else " ORDER BY key")
        + " LIMIT %s",
        key_range.collection,
        *bounds,
        limit,
    )
    return [_record(*row) for row in records]


async def scan_all(
    connection: Connection, after: commit_plan.Place, limit: int, max_bytes: int
) -> list[tuple[str, api.StoreRecord]]:
    # Sizes first, and then only the values that fit: a page may hold many of the largest.
    records = await rows(
        connection,
        "WITH sized AS (SELECT collection, key, octet_length(value) AS size FROM record"
        " WHERE (collection, key) > (%s, %b) ORDER BY collection, key LIMIT %s),"
        " placed AS (SELECT collection, key, sum(size) OVER (ORDER BY collection, key) - size AS before"
        " FROM sized)"
        " SELECT collection, key, value, version, epoch FROM placed JOIN record USING (collection, key)"
        " WHERE before < %s ORDER BY collection, key",
        *after,
        limit,
        max_bytes,
    )
    return [(collection, _record(*row)) for collection, *row in records]


async def begin_load(connection: Connection, collection: str) -> None:
    # All of it will be read, so that going through the table is better than through the index.
    await connection.execute("SET LOCAL cursor_tuple_fraction = 1")
    # Two cursors over the same rows in the same order: the sizes first, and then the values that fit.
    await connection.execute("SET LOCAL synchronize_seqscans = off")
    await connection.execute("CLOSE ALL")
    for name, columns in ((_SIZES, "octet_length(value)"), (_RECORDS, "key, value, version, epoch")):
        declare = psycopg.sql.SQL(
            "DECLARE {} NO SCROLL CURSOR FOR SELECT {} FROM record WHERE collection = %s"
        )
        await connection.execute(declare.format(name, psycopg.sql.SQL(columns)), (collection,))


async def load_sizes(connection: Connection, limit: int) -> list[int]:
    return [size for (size,) in await _fetch(connection, _SIZES, limit)]


async def load(connection: Connection, limit: int) -> list[api.StoreRecord]:
    return [_record(*row) for row in await _fetch(connection, _RECORDS, limit)]


_SIZES, _RECORDS = psycopg.sql.Identifier("load_sizes"), psycopg.sql.Identifier("load_records")


async def _fetch(connection: Connection, cursor: psycopg.sql.Identifier, limit: int) -> list[Any]:
    # FETCH does not support parameters.
    return await rows(connection, psycopg.sql.SQL("FETCH {} FROM {}").format(limit, cursor))


async def changes(
    connection: Connection, after: int, collection: str | None, limit: int
) -> tuple[commit_plan.StoreHead, list[api.StoreChange]]:
    now = await begin(connection)
    changed = await rows(connection, _CHANGES, after, collection, collection, limit)
    return now, [
        api.StoreChange(position, version, name, key.decode(), value, epoch)
        for position, version, name, key, value, epoch in changed
    ]


def _record(key: bytes, value: bytes, version: int, epoch: int) -> api.StoreRecord:
    return api.StoreRecord(key.decode(), value, version, epoch)


# -- writing ---------------------------------------------------------------------------------------------


async def begin_batch(connection: Connection) -> commit_plan.StoreHead:
    """Locks the store."""
    async with connection.cursor() as cursor:
        # In one round trip. (Not with the pipeline of the driver: after one, PostgreSQL 15 and 16 do not
        # disconnect a client that is silent in a transaction.)
        await cursor.execute(
            "BEGIN; SELECT position, trimmed, record_bytes, history_bytes FROM head FOR UPDATE"
        )
        cursor.nextset()
        (row,) = await cursor.fetchall()
    return commit_plan.StoreHead(*row)


async def plan(
    connection: Connection,
    batch: Sequence[commit_plan.Commit],
    now: commit_plan.StoreHead,
    limits: commit_plan.CommitLimits,
) -> commit_plan.CommitPlan:
    stored: dict[commit_plan.Place, commit_plan.RecordVersion] = {}
    if places := list(commit_plan.touched(batch)):
        for collection, key, *known in await rows(connection, _STORED, *_columns(2, places)):
            stored[collection, key] = commit_plan.RecordVersion(*known)
    recent: Iterator[tuple[int, commit_plan.Place]] = iter(())
    oldest = commit_plan.oldest_snapshot(batch)
    if oldest is not None and oldest < now.position:
        changed = await rows(
            connection, "SELECT position, collection, key FROM change WHERE position > %s ORDER BY 1", oldest
        )
        recent = ((position, (collection, key)) for position, collection, key in changed)
    return commit_plan.plan(batch, head=now, stored=stored, recent=recent, limits=limits)


async def execute_plan(
    connection: Connection, plan: commit_plan.CommitPlan, history_bytes_max: int, channel: str, batch: bytes
) -> None:
    """``batch`` is a random token. It is stored with the last change of the batch, for `was_committed`."""
    (row,) = await rows(
        connection,
        _CARRY_OUT,
        *_columns(3, [(*place, position) for place, position in plan.superseded.items()]),
        *_columns(6, [(*at, p.value, p.version, p.position, p.epoch) for at, p in plan.puts.items()]),
        *_columns(2, list(plan.deletes)),
        plan.head.position,
        batch,
        *_columns(7, [(c.position, c.version, *c.place, c.deleted, c.epoch, c.value) for c in plan.changes]),
        plan.head.trimmed,
        channel,
        *msgspec.structs.astuple(plan.head),
    )
    now = commit_plan.StoreHead(*row)
    while (further := commit_plan.trim_to(now, history_bytes_max)) > now.trimmed:
        (row,) = await rows(connection, _TRIM, further, further)
        now = commit_plan.StoreHead(*row)


async def was_committed(connection: Connection, position: int, batch: bytes) -> bool | None:
    """Whether the batch that was to end at ``position`` was committed; None: the feed no longer shows it.

    A batch holds the lock of `head` until it ends, so its outcome is final once the lock is acquired here.
    Another batch may have the same position since; the token distinguishes them.
    """
    await connection.execute("SELECT FROM head FOR UPDATE")
    ((reached, trimmed, stored_batch),) = await rows(
        connection,
        "SELECT h.position, h.trimmed, c.batch FROM head h LEFT JOIN change c ON c.position = %s",
        position,
    )
    if reached < position:
        return False
    return None if trimmed >= position else bool(stored_batch == batch)


def _columns(width: int, values: Sequence[tuple[object, ...]]) -> list[list[object] | None]:
    """PostgreSQL accepts many rows fastest as one array for each column."""
    return [list(column) for column in zip(*values, strict=True)] if values else [None] * width
