"""The persistent view of a node, in a local SQLite file: the records of all contexts, and a position in the
log.

It has the values that memory does not hold, the contexts of which this node has no replica, and the versions
that are kept.  It is never the truth: acknowledged writes are in the log, and a node whose view is damaged,
of another node, log or format discards it and reads the log from its beginning.  So commits are not synced,
only checkpoints, which keeps the file consistent after a power failure.  A file that is no view is moved
aside.  The view may be behind the log: after a crash the node continues from the position of the view.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from muster.core import errors
from muster.inform import protocol
from muster.inform.node.log import context_log
from muster.inform.node.log import fences as fences_

T = TypeVar("T")

PAGE = 2_000
MEASURED = 10_000  # records in one step
BUSY_S = 5.0
WAL_BYTES_MAX = 64 << 20
APPLICATION_ID = 0x6D757376
FORMAT = 3
SCHEMA = (
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {FORMAT}",
    "CREATE TABLE facts (node TEXT NOT NULL, log TEXT NOT NULL, position INTEGER NOT NULL, fences BLOB,"
    " saves INTEGER NOT NULL)",
    "CREATE TABLE records (id INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, position INTEGER, record BLOB)",
    "CREATE INDEX by_position ON records (position)",
    "CREATE TABLE versions (key TEXT, position INTEGER, record BLOB, PRIMARY KEY (key, position))"
    " WITHOUT ROWID",
    "CREATE INDEX versions_by_position ON versions (position)",
)
SAVE = """
    INSERT INTO records (key, position, record) VALUES (?, ?, ?)
    ON CONFLICT (key) DO UPDATE SET position = excluded.position, record = excluded.record
"""
KEEP = (
    "INSERT OR REPLACE INTO versions SELECT key, position, record FROM records WHERE key = ? AND position < ?"
)
TRIM = """
    DELETE FROM versions WHERE key = ?1 AND position <=
    (SELECT position FROM versions WHERE key = ?1 ORDER BY position DESC LIMIT 1 OFFSET ?2)
"""


class ViewFacts(NamedTuple):
    """``log``: its identity; ``position``: the last sequence of it in the view."""

    log: str
    position: int
    fences: list[fences_.NodeFence]


class ReplicaView:
    """One thread uses the file, one call at a time. Without a ``path`` it is in memory."""

    def __init__(self, path: pathlib.Path | None, node: str, history: int = 16) -> None:
        self._path = path
        self._node = node
        self._history = history
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="view")
        self._opened: sqlite3.Connection | None = None
        self._saves = 0  # of all processes, when this one read or wrote the file

    async def facts(self) -> ViewFacts:
        def read(db: sqlite3.Connection) -> ViewFacts:
            log, position, fences = db.execute("SELECT log, position, fences FROM facts").fetchone()
            return ViewFacts(log, position, protocol.decode(fences, list[fences_.NodeFence]))

        return await self._run(read)

    async def load(self) -> AsyncIterator[list[context_log.ContextLogEntry]]:
        """The current records, in pages."""
        query = f"SELECT id, record, position FROM records WHERE id > ? ORDER BY id LIMIT {PAGE}"
        last = 0

        def page(db: sqlite3.Connection) -> list[tuple[int, bytes, int]]:
            return db.execute(query, (last,)).fetchall()

        while rows := await self._run(page):
            last = rows[-1][0]
            yield [_entry(record, position) for _, record, position in rows]

    async def value(self, key: str) -> context_log.ContextLogEntry | None:
        query = "SELECT record, position FROM records WHERE key = ?"
        row = await self._run(lambda db: db.execute(query, (key,)).fetchone())
        return None if row is None else _entry(*row)

    async def versions(
        self, key: str, since: int = 0, bytes_max: float = float("inf")
    ) -> list[context_log.ContextLogEntry]:
        """The records of a key from a position on, oldest first, until they have so many bytes."""
        query = """
            SELECT record, position FROM versions WHERE key = ?1 AND position >= ?2 UNION
            SELECT record, position FROM records WHERE key = ?1 AND position >= ?2 ORDER BY position
        """
        return await self._entries(query, (key, since), bytes_max)

    async def after(self, position: int, count: int, bytes_max: int) -> list[context_log.ContextLogEntry]:
        """The records after a position, in order, until they are so many or have so many bytes."""
        places = " UNION ".join(
            f"SELECT * FROM (SELECT position, key FROM {table} WHERE position > ?1"
            " ORDER BY position LIMIT ?2)"
            for table in ("versions", "records")
        )
        query = f"""
            SELECT coalesce(
                (SELECT record FROM versions WHERE key = place.key AND position = place.position),
                (SELECT record FROM records WHERE key = place.key AND position = place.position)
            ), position FROM ({places} ORDER BY position LIMIT ?2) AS place
        """
        return await self._entries(query, (position, count), bytes_max)

    async def count(self, key: str) -> int:
        query = "SELECT count(*) FROM versions WHERE key = ?"
        return await self._run(lambda db: int(db.execute(query, (key,)).fetchone()[0]))

    async def oldest(self, count: int, bytes_max: int) -> list[context_log.ContextLogEntry]:
        """The current records with the lowest positions, until they have so many bytes."""
        query = "SELECT record, position FROM records ORDER BY position LIMIT ?"
        return await self._entries(query, (count,), bytes_max)

    async def _entries(
        self, query: str, parameters: tuple[Any, ...], bytes_max: float
    ) -> list[context_log.ContextLogEntry]:
        def read(db: sqlite3.Connection) -> list[tuple[bytes, int]]:
            rows, size = [], 0
            for row in db.execute(query, parameters):
                rows.append(row)
                size += len(row[0])
                if size > bytes_max:
                    break
            return rows

        return [_entry(*row) for row in await self._run(read)]

    async def live_bytes(self) -> int:
        """The size of the current records. Of a million it takes a second, in which others read, too."""
        last = await self._run(lambda db: db.execute("SELECT max(id) FROM records").fetchone()[0] or 0)
        query = "SELECT coalesce(sum(length(record)), 0) FROM records WHERE id BETWEEN ? AND ?"
        size = 0
        for first in range(1, last + 1, MEASURED):
            part = first, first + MEASURED - 1
            size += await self._run(lambda db, part=part: db.execute(query, part).fetchone()[0])  # type: ignore[misc]
        return size

    async def save(
        self, changes: Mapping[str, Sequence[context_log.ContextLogEntry]], facts: ViewFacts
    ) -> None:
        """Write in one transaction."""
        forgotten: list[tuple[str]] = []
        older: list[tuple[str, int, bytes]] = []
        current: list[tuple[str, int, bytes]] = []
        for key, entries in changes.items():
            if entries and entries[0].record.reason == "forget":
                forgotten.append((key,))
                entries = entries[1:]
            rows = [(key, entry.position, protocol.encode(entry.record)) for entry in entries]
            states = [place for place, entry in enumerate(entries) if entry.record.reason != "refuse"]
            if states:
                current.append(rows.pop(states[-1]))
            older += rows

        def write(db: sqlite3.Connection) -> None:
            db.execute("BEGIN IMMEDIATE")
            try:
                for table in ("records", "versions"):
                    db.executemany(f"DELETE FROM {table} WHERE key = ?", forgotten)
                if self._history > 1:
                    db.executemany(KEEP, ((key, position) for key, position, _ in current))
                    db.executemany("INSERT OR REPLACE INTO versions VALUES (?, ?, ?)", older)
                    db.executemany(TRIM, ((key, self._history - 1) for key in changes))
                db.executemany(SAVE, current)
                row = facts.log, facts.position, protocol.encode(facts.fences), self._saves
                set_facts = "UPDATE facts SET log = ?, position = ?, fences = ?, saves = saves + 1"
                if not db.execute(f"{set_facts} WHERE saves = ?", row).rowcount:
                    raise errors.Unavailable(f"another process writes {self._path}", hint="end one of them")
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            self._saves += 1

        await self._run(write)

    async def clear(self) -> None:
        """Discard the file and begin an empty one."""
        await self._run(lambda _: None, discards=True)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[sqlite3.Connection], T], *, discards: bool = False) -> T:
        """`errors.InvalidInput` if the file is damaged or no view of this node."""

        def run() -> T:
            if discards:
                self._close()
                if self._path is not None:
                    _discard(self._path)
            if self._opened is None:
                self._opened = self._open()
            return work(self._opened)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
                raise errors.InvalidInput(f"{self._path} is damaged: {error}") from error
            raise errors.Unavailable(
                f"{self._path}: {error}", hint="check its permissions and the free space of its disk"
            ) from error
        except OSError as error:
            raise errors.Unavailable(f"{self._path}: {error.strerror}") from error

    def _open(self) -> sqlite3.Connection:
        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))  # contexts may be confidential
        db = sqlite3.connect(self._path or ":memory:", timeout=BUSY_S, isolation_level=None)
        try:
            if not db.execute("PRAGMA schema_version").fetchone()[0]:
                db.execute("BEGIN")
                for statement in SCHEMA:
                    db.execute(statement)
                db.execute("INSERT INTO facts VALUES (?, '', 0, ?, 0)", (self._node, protocol.encode([])))
                db.execute("COMMIT")
            own = [(APPLICATION_ID,), (FORMAT,), (self._node,)]
            queries = ("PRAGMA application_id", "PRAGMA user_version", "SELECT node FROM facts")
            if any(db.execute(query).fetchone() != fact for query, fact in zip(queries, own, strict=True)):
                raise errors.InvalidInput(f"{self._path} is not the view of {self._node}")
            (self._saves,) = db.execute("SELECT saves FROM facts").fetchone()
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_MAX}")
        except BaseException:
            db.close()
            raise
        return db

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def _discard(path: pathlib.Path) -> None:
    """Remove a view; move another file aside."""
    if not path.exists():
        return
    with path.open("rb") as file:
        head = file.read(100)
    if head[68:72] == APPLICATION_ID.to_bytes(4, "big"):
        path.unlink()
    else:
        path.replace(path.with_name(f"{path.name}.discarded"))
    for suffix in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _entry(record: bytes, position: int) -> context_log.ContextLogEntry:
    return context_log.ContextLogEntry(protocol.decode(record, protocol.ContextRecord), position)
