"""The tables and their operations: plain functions on a connection, run in a thread."""

from __future__ import annotations

import contextlib
import pathlib
import secrets
import sqlite3
from collections.abc import Iterator, Sequence

import msgspec

from muster.core import errors
from muster.store import api, commit_plan

APPLICATION_ID = 0x4D557374
SCHEMA_VERSION = 1

_TABLES = """
CREATE TABLE head (
    position INTEGER NOT NULL, trimmed INTEGER NOT NULL,
    record_bytes INTEGER NOT NULL, history_bytes INTEGER NOT NULL, identity TEXT NOT NULL);
CREATE TABLE record (
    collection TEXT NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL,
    version INTEGER NOT NULL, position INTEGER NOT NULL, epoch INTEGER NOT NULL);
CREATE UNIQUE INDEX record_place ON record (collection, key);
CREATE TABLE change (
    position INTEGER PRIMARY KEY, version INTEGER NOT NULL, collection TEXT NOT NULL, key BLOB NOT NULL,
    deleted INTEGER NOT NULL, epoch INTEGER NOT NULL, value BLOB)
"""

#: Statements, separated by semicolons, from the schema version that is the key to the next one.
MIGRATIONS: dict[int, str] = {}

_CHANGES = """
SELECT c.position, c.version, c.collection, c.key, coalesce(c.value, r.value), c.epoch
FROM change c LEFT JOIN record r
  ON NOT c.deleted AND c.value IS NULL AND r.collection = c.collection AND r.key = c.key
WHERE c.position > :after AND (:collection IS NULL OR c.collection = :collection)
ORDER BY c.position LIMIT :limit
"""


def prepare(connection: sqlite3.Connection, path: pathlib.Path) -> str:
    """Create or migrate the tables. Returns the identity of the store."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        _migrate(connection, path)
        connection.execute("COMMIT")
    finally:
        connection.rollback()
    return str(connection.execute("SELECT identity FROM head").fetchone()[0])


def _migrate(connection: sqlite3.Connection, path: pathlib.Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if (application, version, tables) == (0, 0, 0):
        _execute_each(connection, _TABLES)
        connection.execute("INSERT INTO head VALUES (0, 0, 0, 0, ?)", (secrets.token_hex(8),))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        version = SCHEMA_VERSION
    elif application != APPLICATION_ID:
        raise api.StoreCorrupt(f"{path} is a database of something else", hint="name another file")
    if version > SCHEMA_VERSION:
        raise errors.Refused(
            f"{path} was created by a newer Muster (schema {version}; this version supports "
            f"{SCHEMA_VERSION})",
            hint="use that version, or restore a backup",
        )
    for step in range(version, SCHEMA_VERSION):
        _execute_each(connection, MIGRATIONS[step])
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _execute_each(connection: sqlite3.Connection, script: str) -> None:
    """Like executescript, which would commit the open transaction first."""
    for statement in script.split(";"):
        connection.execute(statement)


# -- reading ---------------------------------------------------------------------------------------------


def begin(connection: sqlite3.Connection) -> commit_plan.StoreHead:
    connection.execute("BEGIN")
    return head(connection)  # the first read fixes the snapshot


def end(connection: sqlite3.Connection) -> None:
    """A cancelled caller interrupts the connection in any state, also at the end of a read."""
    for _ in range(2):
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.OperationalError):
                connection.rollback()


def head(connection: sqlite3.Connection) -> commit_plan.StoreHead:
    row = connection.execute("SELECT position, trimmed, record_bytes, history_bytes FROM head").fetchone()
    return commit_plan.StoreHead(*row)


def get_many(connection: sqlite3.Connection, collection: str, keys: Sequence[bytes]) -> list[api.StoreRecord]:
    rows = (
        connection.execute(
            "SELECT key, value, version, epoch FROM record WHERE collection = ? AND key = ?",
            (collection, key),
        ).fetchone()
        for key in keys
    )
    return [_record(*row) for row in rows if row is not None]


def scan(
    connection: sqlite3.Connection, key_range: commit_plan.KeyRange, limit: int | None, reverse: bool
) -> list[api.StoreRecord]:
    below = "" if key_range.high is None else "AND key < :high"
    rows = connection.execute(
        "SELECT key, value, version, epoch FROM record WHERE collection = :collection AND key >= :low"
        f" {below} ORDER BY key {'DESC' if reverse else 'ASC'} LIMIT :limit",
        {**msgspec.structs.asdict(key_range), "limit": -1 if limit is None else limit},
    )
    return [_record(*row) for row in rows]


def scan_all(
    connection: sqlite3.Connection, after: commit_plan.Place, limit: int, max_bytes: int
) -> list[tuple[str, api.StoreRecord]]:
    # Sizes first, and then only the values that fit: a page may hold many of the largest.
    rows = connection.execute(
        "WITH sized AS (SELECT collection, key, length(value) AS size FROM record"
        " WHERE (collection, key) > (?, ?) ORDER BY collection, key LIMIT ?),"
        " placed AS (SELECT collection, key, sum(size) OVER (ORDER BY collection, key) - size AS before"
        " FROM sized)"
        " SELECT collection, key, value, version, epoch FROM placed JOIN record USING (collection, key)"
        " WHERE before < ? ORDER BY collection, key",
        (*after, limit, max_bytes),
    )
    return [(collection, _record(*row)) for collection, *row in rows]


def load(
    connection: sqlite3.Connection, collection: str, after: int, limit: int, max_bytes: int
) -> tuple[int, list[api.StoreRecord]]:
    """Records in the order of the file, after that row, and the last one's row."""
    records: list[api.StoreRecord] = []
    rows = connection.execute(
        "SELECT rowid, key, value, version, epoch FROM record NOT INDEXED"
        " WHERE rowid > ? AND collection = ? ORDER BY rowid LIMIT ?",
        (after, collection, limit),
    )
    with contextlib.closing(rows):
        for rowid, *row in rows:
            after = rowid
            records.append(_record(*row))
            max_bytes -= len(records[-1].value)
            if max_bytes <= 0:
                break
    return after, records


def changes(
    connection: sqlite3.Connection, after: int, collection: str | None, limit: int
) -> tuple[commit_plan.StoreHead, list[api.StoreChange]]:
    rows = connection.execute(_CHANGES, {"after": after, "collection": collection, "limit": limit})
    return head(connection), [
        api.StoreChange(position, version, name, key.decode(), value, epoch)
        for position, version, name, key, value, epoch in rows
    ]


def _record(key: bytes, value: bytes, version: int, epoch: int) -> api.StoreRecord:
    return api.StoreRecord(key.decode(), value, version, epoch)


# -- writing ---------------------------------------------------------------------------------------------


def commit(
    connection: sqlite3.Connection, batch: Sequence[commit_plan.Commit], settings: api.StoreOptions
) -> list[int | errors.MusterError]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        plan = _plan(connection, batch, commit_plan.limits(settings))
        if plan.writes:
            _carry_out(connection, plan, settings.history_bytes_max)
        _end_commit(connection)
    finally:
        connection.rollback()  # does nothing after the commit
    return plan.outcomes


def _end_commit(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_IOERR:
            raise
        # The log may contain the whole transaction although it was not synced: a recovery would apply it.
        raise api.CommitOutcomeUnknown(
            f"writing a commit to the disk failed: {error}", hint=api.OUTCOME_HINT
        ) from error


def _plan(
    connection: sqlite3.Connection, batch: Sequence[commit_plan.Commit], limits: commit_plan.CommitLimits
) -> commit_plan.CommitPlan:
    now = head(connection)
    stored: dict[commit_plan.Place, commit_plan.RecordVersion] = {}
    for place in commit_plan.touched(batch):
        row = connection.execute(
            "SELECT version, position, epoch, length(value) FROM record WHERE collection = ? AND key = ?",
            place,
        ).fetchone()
        if row is not None:
            stored[place] = commit_plan.RecordVersion(*row)
    recent: Iterator[tuple[int, commit_plan.Place]] = iter(())
    oldest = commit_plan.oldest_snapshot(batch)
    if oldest is not None and oldest < now.position:
        rows = connection.execute(
            "SELECT position, collection, key FROM change WHERE position > ? ORDER BY position", (oldest,)
        )
        recent = ((position, (collection, key)) for position, collection, key in rows)
    return commit_plan.plan(batch, head=now, stored=stored, recent=recent, limits=limits)


def _carry_out(connection: sqlite3.Connection, plan: commit_plan.CommitPlan, history_bytes_max: int) -> None:
    connection.executemany(
        "UPDATE change SET value = (SELECT value FROM record WHERE collection = ? AND key = ?)"
        " WHERE position = ?",
        [(*place, position) for place, position in plan.superseded.items()],
    )
    connection.executemany(
        "INSERT INTO record (collection, key, value, version, position, epoch) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (collection, key) DO UPDATE SET value = excluded.value, version = excluded.version,"
        " position = excluded.position, epoch = excluded.epoch",
        [(*place, put.value, put.version, put.position, put.epoch) for place, put in plan.puts.items()],
    )
    connection.executemany("DELETE FROM record WHERE collection = ? AND key = ?", list(plan.deletes))
    connection.executemany(
        "INSERT INTO change (position, version, collection, key, deleted, epoch, value)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(c.position, c.version, *c.place, c.deleted, c.epoch, c.value) for c in plan.changes],
    )
    now = _trimmed(connection, plan.head, plan.head.trimmed)
    while (further := commit_plan.trim_to(now, history_bytes_max)) > now.trimmed:
        now = _trimmed(connection, now, further)
    connection.execute(
        "UPDATE head SET position = ?, trimmed = ?, record_bytes = ?, history_bytes = ?",
        msgspec.structs.astuple(now),
    )


def _trimmed(connection: sqlite3.Connection, now: commit_plan.StoreHead, upto: int) -> commit_plan.StoreHead:
    rows = connection.execute(
        "DELETE FROM change WHERE position <= ? RETURNING coalesce(length(value), 0)", (upto,)
    )
    return msgspec.structs.replace(
        now, trimmed=upto, history_bytes=now.history_bytes - sum(size for (size,) in rows)
    )
