"""SQLite: one file, one writer, several readers, in threads of their own.

The file is in WAL mode: readers go on while a batch is written.  With ``synchronous=FULL`` the log is
synced before a commit returns, so what was acknowledged survives kill -9 and a power cut.  The writer is
one connection, used by one batch at a time; readers come from a small pool, and a transaction that reads
holds one. Other processes may open the same file: SQLite's own locks keep them apart, and whoever waits
longer than ``busy_timeout_s`` gets `errors.Unavailable`.

``sqlite::memory:`` is a file too, in a private folder that is removed on close, and never synced: it
behaves like the real thing in everything but surviving.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pathlib
import secrets
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from muster.core import errors
from muster.store import api, commits, urls

T = TypeVar("T")

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
    deleted INTEGER NOT NULL, epoch INTEGER NOT NULL, value BLOB);
"""

#: From the schema version that is the key to the next one.
_MIGRATIONS: dict[int, str] = {}

_CHANGES = """
SELECT c.position, c.version, c.collection, c.key, coalesce(c.value, r.value), c.epoch
FROM change c LEFT JOIN record r
  ON NOT c.deleted AND c.value IS NULL AND r.collection = c.collection AND r.key = c.key
WHERE c.position > :after {and_collection} ORDER BY c.position LIMIT :limit
"""


async def open(where: urls.SQLite, settings: api.Settings) -> Engine:
    folder = None
    if where.path is None:
        folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="muster-store-")
    path = pathlib.Path(folder) / "store.db" if folder else where.path
    assert path is not None
    engine = Engine(path, settings, durable=folder is None, temporary=folder)
    try:
        await engine.prepare()
    except BaseException:
        await engine.close()
        raise
    return engine


class Engine:
    name = "sqlite"
    identity = ""
    tells = False

    def __init__(
        self, path: pathlib.Path, settings: api.Settings, *, durable: bool, temporary: str | None
    ) -> None:
        self._path = path
        self._settings = settings
        self._durable = durable
        self._temporary = temporary
        self._limits = commits.Limits(settings.bytes_max, settings.history_changes_max)
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._reading = ThreadPoolExecutor(settings.pool, thread_name_prefix="store-reader")
        self._writer: sqlite3.Connection | None = None
        self._idle: list[sqlite3.Connection] = []
        self._all: list[sqlite3.Connection] = []
        self._free = asyncio.Semaphore(settings.pool)
        self._closed = False

    async def prepare(self) -> None:
        await self._hop(self._writing, self._prepare)

    # -- reading ---------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Reader]:
        async with self._reader() as connection:
            try:
                head = await self._read(connection, _begin)
                yield Reader(head.position, functools.partial(self._read, connection))
            finally:
                await self._read(connection, sqlite3.Connection.rollback)

    async def get_many(self, collection: str, keys: Sequence[bytes]) -> list[api.Record]:
        return await self._read_once(lambda connection: _get_many(connection, collection, keys))

    async def scan(self, wanted: commits.Range, limit: int | None, reverse: bool) -> list[api.Record]:
        return await self._read_once(lambda connection: _scan(connection, wanted, limit, reverse))

    async def changes(
        self, after: int, collection: str | None, limit: int
    ) -> tuple[commits.Head, list[api.Change]]:
        return await self._read_once(lambda connection: _changes(connection, after, collection, limit))

    async def head(self) -> commits.Head:
        return await self._read_once(_head)

    async def disk_bytes(self) -> int:
        def sizes() -> int:
            files = [self._path, *(self._path.with_name(self._path.name + end) for end in ("-wal", "-shm"))]
            return sum(file.stat().st_size for file in files if file.exists())

        return await asyncio.to_thread(sizes)

    async def listen(self, wake: Callable[[], None]) -> None:
        """Commits of other processes are found by polling: SQLite has no one to tell."""

    # -- writing ---------------------------------------------------------------------------------------------

    async def commit(self, batch: Sequence[commits.Commit]) -> list[int | errors.MusterError]:
        return await self._hop(self._writing, lambda: self._commit(batch))

    def _commit(self, batch: Sequence[commits.Commit]) -> list[int | errors.MusterError]:
        connection = self._writer
        assert connection is not None
        connection.execute("BEGIN IMMEDIATE")
        try:
            plan = self._plan(connection, batch)
            if plan.writes:
                self._carry_out(connection, plan)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return plan.outcomes

    def _plan(self, connection: sqlite3.Connection, batch: Sequence[commits.Commit]) -> commits.Plan:
        head = _head(connection)
        stored: dict[commits.Place, commits.Stored] = {}
        for place in commits.touched(batch):
            row = connection.execute(
                "SELECT version, position, epoch, length(value) FROM record WHERE collection = ? AND key = ?",
                place,
            ).fetchone()
            if row is not None:
                stored[place] = commits.Stored(*row)
        recent: Iterator[tuple[int, commits.Place]] = iter(())
        oldest = commits.oldest_snapshot(batch)
        if oldest is not None and oldest < head.position:
            rows = connection.execute(
                "SELECT position, collection, key FROM change WHERE position > ? ORDER BY position", (oldest,)
            )
            recent = ((position, (collection, key)) for position, collection, key in rows)
        return commits.plan(batch, head=head, stored=stored, recent=recent, limits=self._limits)

    def _carry_out(self, connection: sqlite3.Connection, plan: commits.Plan) -> None:
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
        head = plan.head
        head = _trimmed(connection, head, head.trimmed)
        while (further := commits.trim_to(head, self._settings.history_bytes_max)) > head.trimmed:
            head = _trimmed(connection, head, further)
        connection.execute(
            "UPDATE head SET position = ?, trimmed = ?, record_bytes = ?, history_bytes = ?",
            msgspec.structs.astuple(head),
        )

    # -- connections -----------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        _create(self._path)
        self._writer = connection = self._connect()
        connection.execute("PRAGMA journal_mode = WAL")
        level = "OFF" if not self._durable else "FULL" if self._settings.sync == "full" else "NORMAL"
        connection.execute(f"PRAGMA synchronous = {level}")
        connection.execute("BEGIN IMMEDIATE")
        self._migrate(connection)
        connection.execute("COMMIT")
        (self.identity,) = connection.execute("SELECT identity FROM head").fetchone()

    def _migrate(self, connection: sqlite3.Connection) -> None:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if (application, found) == (0, 0):
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if tables:
                raise api.Corrupt(f"{self._path} is a database of something else", hint="name another file")
            _execute_each(connection, _TABLES)
            connection.execute("INSERT INTO head VALUES (0, 0, 0, 0, ?)", (secrets.token_hex(8),))
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            return
        if application != APPLICATION_ID:
            raise api.Corrupt(f"{self._path} is a database of something else", hint="name another file")
        if found > SCHEMA_VERSION:
            raise errors.Refused(
                f"{self._path} is of a newer Muster (schema {found}; this one knows {SCHEMA_VERSION})",
                hint="use that version, or restore a backup",
            )
        for step in range(found, SCHEMA_VERSION):
            _execute_each(connection, _MIGRATIONS[step])
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=self._settings.busy_timeout_s, isolation_level=None, check_same_thread=False
        )
        self._all.append(connection)
        return connection

    @contextlib.asynccontextmanager
    async def _reader(self) -> AsyncIterator[sqlite3.Connection]:
        try:
            async with asyncio.timeout(self._settings.busy_timeout_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise errors.Overloaded(
                f"all {self._settings.pool} readers of {self._path} are held by open transactions",
                hint="end transactions sooner, or raise the pool",
            ) from error
        try:
            if self._closed:
                raise errors.NotConnected("the store is closed")
            if self._idle:
                connection = self._idle.pop()
            else:
                connection = await self._hop(self._reading, self._connect_reader)
            try:
                yield connection
            finally:
                self._idle.append(connection)
        finally:
            self._free.release()

    def _connect_reader(self) -> sqlite3.Connection:
        connection = self._connect()
        connection.execute("PRAGMA query_only = 1")
        return connection

    async def _read(self, connection: sqlite3.Connection, function: Callable[[sqlite3.Connection], T]) -> T:
        return await self._hop(self._reading, lambda: function(connection), interrupt=connection)

    async def _read_once(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Several statements, one moment, one trip to a thread."""

        def read(connection: sqlite3.Connection) -> T:
            _begin(connection)
            try:
                return function(connection)
            finally:
                connection.rollback()

        async with self._reader() as connection:
            return await self._read(connection, read)

    async def _hop(
        self, pool: ThreadPoolExecutor, function: Callable[[], T], interrupt: sqlite3.Connection | None = None
    ) -> T:
        """Run it in a thread, and not return before it is done: a connection has one user at a time."""
        future = asyncio.get_running_loop().run_in_executor(pool, function)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if interrupt is not None:
                interrupt.interrupt()
            await asyncio.wait([future])
            raise
        except sqlite3.Error as error:
            raise _translated(error, self._path) from error

    async def close(self) -> None:
        """Transactions that still read get as long as a reader may be waited for; then they fail."""
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.busy_timeout_s):
                for _ in range(self._settings.pool):
                    await self._free.acquire()

        def close_all() -> None:
            for connection in self._all:
                connection.close()
            if self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)

        await self._hop(self._writing, close_all)
        self._writing.shutdown(wait=False)
        self._reading.shutdown(wait=False)


class Reader:
    def __init__(
        self,
        version: int,
        read: Callable[[Callable[[sqlite3.Connection], list[api.Record]]], Awaitable[list[api.Record]]],
    ) -> None:
        self.version = version
        self._read = read

    async def get_many(self, collection: str, keys: Sequence[bytes]) -> list[api.Record]:
        return await self._read(lambda connection: _get_many(connection, collection, keys))

    async def scan(self, wanted: commits.Range, limit: int | None, reverse: bool) -> list[api.Record]:
        return await self._read(lambda connection: _scan(connection, wanted, limit, reverse))


def _create(path: pathlib.Path) -> None:
    """The file, if there is none yet, for its owner only: it may hold verifiers of passwords."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileExistsError:
        return
    except OSError as error:
        raise errors.Unavailable(
            f"{path} cannot be made: {error.strerror}", hint="name a file in a folder that can be written to"
        ) from error


def _begin(connection: sqlite3.Connection) -> commits.Head:
    connection.execute("BEGIN")
    return _head(connection)  # the first read fixes the moment


def _head(connection: sqlite3.Connection) -> commits.Head:
    row = connection.execute("SELECT position, trimmed, record_bytes, history_bytes FROM head").fetchone()
    return commits.Head(*row)


def _get_many(connection: sqlite3.Connection, collection: str, keys: Sequence[bytes]) -> list[api.Record]:
    found = []
    for key in keys:
        row = connection.execute(
            "SELECT key, value, version, epoch FROM record WHERE collection = ? AND key = ?",
            (collection, key),
        ).fetchone()
        if row is not None:
            found.append(_record(row))
    return found


def _scan(
    connection: sqlite3.Connection, wanted: commits.Range, limit: int | None, reverse: bool
) -> list[api.Record]:
    below = "" if wanted.high is None else "AND key < :high"
    order = "DESC" if reverse else "ASC"
    rows = connection.execute(
        "SELECT key, value, version, epoch FROM record"
        f" WHERE collection = :collection AND key >= :low {below} ORDER BY key {order} LIMIT :limit",
        {
            "collection": wanted.collection,
            "low": wanted.low,
            "high": wanted.high,
            "limit": -1 if limit is None else limit,
        },
    )
    return [_record(row) for row in rows]


def _record(row: tuple[bytes, bytes, int, int]) -> api.Record:
    key, value, version, epoch = row
    return api.Record(key.decode(), value, version, epoch)


def _changes(
    connection: sqlite3.Connection, after: int, collection: str | None, limit: int
) -> tuple[commits.Head, list[api.Change]]:
    rows = connection.execute(
        _CHANGES.format(and_collection="" if collection is None else "AND c.collection = :collection"),
        {"after": after, "collection": collection, "limit": limit},
    )
    found = [
        api.Change(position, version, name, key.decode(), value, epoch)
        for position, version, name, key, value, epoch in rows
    ]
    return _head(connection), found


def _trimmed(connection: sqlite3.Connection, head: commits.Head, upto: int) -> commits.Head:
    rows = connection.execute(
        "DELETE FROM change WHERE position <= ? RETURNING coalesce(length(value), 0)", (upto,)
    )
    freed_bytes = sum(size for (size,) in rows)
    return msgspec.structs.replace(head, trimmed=upto, history_bytes=head.history_bytes - freed_bytes)


def _execute_each(connection: sqlite3.Connection, script: str) -> None:
    """As executescript, which would commit the open transaction first."""
    for statement in script.split(";"):
        if statement.strip():
            connection.execute(statement)


def _translated(error: sqlite3.Error, path: pathlib.Path) -> errors.MusterError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    match code:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return errors.Unavailable(
                f"{path} is locked by another process",
                retry_after_s=1.0,
                hint="try again, or see who holds it",
            )
        case sqlite3.SQLITE_FULL:
            return api.Full(f"no room for {path}: {error}", hint="free disk space, then try again")
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return api.Corrupt(f"{path} is damaged or no database: {error}", hint="restore a backup")
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return errors.Unavailable(
                f"{path} cannot be opened for writing: {error}",
                hint="see its folder's existence and permissions",
            )
        case sqlite3.SQLITE_IOERR:
            return errors.Unavailable(
                f"reading or writing {path} failed: {error}", hint="see the system's log"
            )
    return errors.InvariantBroken(
        f"SQLite refused a statement of ours: {error}", story=[type(error).__name__]
    )
