"""The persistent view of a node: its permanent replicas and a position in the log, in a local SQLite file.

The view is never the truth: acknowledged writes are in the log, and a node whose view is damaged, of another
node or of another format discards it and reads the log from its beginning.  So commits are not synced, only
checkpoints, which keeps the file consistent after a power failure.  A file that is no view is moved aside.

The view may be behind the log: after a crash the node continues from the position of the view.  The log
records up to which sequence deletions have been purged.  A view with an earlier position is discarded,
because the purged deletions left no trace.  No clock is involved.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from muster.core import errors
from muster.inform import protocol
from muster.inform.node.log import context_log

T = TypeVar("T")

PAGE = 2_000
BUSY_S = 5.0
WAL_BYTES_MAX = 64 << 20
APPLICATION_ID = 0x6D757376
FORMAT = 1
SCHEMA = (
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {FORMAT}",
    "CREATE TABLE facts (node TEXT NOT NULL, position INTEGER NOT NULL)",
    "CREATE TABLE records (id INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, sequence INTEGER, record BLOB)",
)
SAVE = """
    INSERT INTO records (key, sequence, record) VALUES (?, ?, ?)
    ON CONFLICT (key) DO UPDATE SET sequence = excluded.sequence, record = excluded.record
"""


class ReplicaView:
    """One thread uses the file, one call at a time."""

    def __init__(self, path: pathlib.Path, node: str) -> None:
        self._path = path
        self._node = node
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="view")
        self._opened: sqlite3.Connection | None = None

    async def position(self) -> int:
        """Return the last sequence in the view; 0: it is empty."""
        return await self._run(lambda db: int(db.execute("SELECT position FROM facts").fetchone()[0]))

    async def load(self) -> AsyncIterator[list[context_log.ContextLogEntry]]:
        query = f"SELECT id, record, sequence FROM records WHERE id > ? ORDER BY id LIMIT {PAGE}"
        last = 0

        def page(db: sqlite3.Connection) -> list[tuple[int, bytes, int]]:
            return db.execute(query, (last,)).fetchall()

        while rows := await self._run(page):
            last = rows[-1][0]
            yield [_entry(record, sequence) for _, record, sequence in rows]

    async def value(self, key: str) -> context_log.ContextLogEntry | None:
        query = "SELECT record, sequence FROM records WHERE key = ?"
        row = await self._run(lambda db: db.execute(query, (key,)).fetchone())
        return None if row is None else _entry(*row)

    async def save(self, entries: Mapping[str, context_log.ContextLogEntry | None], position: int) -> None:
        """Write in one transaction. None: the replica was dropped."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("BEGIN IMMEDIATE")
            try:
                dropped = [(key,) for key, entry in entries.items() if entry is None]
                db.executemany("DELETE FROM records WHERE key = ?", dropped)
                saved = (
                    (key, entry.sequence, protocol.encode(entry.record))
                    for key, entry in entries.items()
                    if entry is not None
                )
                db.executemany(SAVE, saved)
                db.execute("UPDATE facts SET position = ?", (position,))
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

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
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))  # contexts may be confidential
        db = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        try:
            if not db.execute("PRAGMA schema_version").fetchone()[0]:
                db.execute("BEGIN")
                for statement in SCHEMA:
                    db.execute(statement)
                db.execute("INSERT INTO facts VALUES (?, 0)", (self._node,))
                db.execute("COMMIT")
            own = [(APPLICATION_ID,), (FORMAT,), (self._node,)]
            queries = ("PRAGMA application_id", "PRAGMA user_version", "SELECT node FROM facts")
            if any(db.execute(query).fetchone() != fact for query, fact in zip(queries, own, strict=True)):
                raise errors.InvalidInput(f"{self._path} is not the view of {self._node}")
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


def _entry(record: bytes, sequence: int) -> context_log.ContextLogEntry:
    return context_log.ContextLogEntry(protocol.decode_record(record), sequence)
