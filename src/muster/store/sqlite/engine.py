"""SQLite: one file, one writer, several readers, in threads of their own.

The file is in WAL mode: readers continue while a batch is written. With ``synchronous=FULL`` the log is
synced before a commit returns, so acknowledged commits survive kill -9 and a power failure. The writer is one
connection, used by one batch at a time; readers come from a small pool, and a transaction that reads occupies
one. Other processes may open the same file: the locks of SQLite separate them, and a process that waits
longer than ``busy_timeout_s`` gets `errors.Unavailable`.

``sqlite::memory:`` is a file too, in a private folder that is removed on close, and never synced: it behaves
the same in everything except durability.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from muster.core import errors, files
from muster.store import api, commit_plan, urls
from muster.store.sqlite import statements

T = TypeVar("T")

WAL_BYTES_MAX = 64 << 20  # after a burst the log file is truncated to this size


async def open(where: urls.SqliteUrl, settings: api.StoreOptions) -> SqliteEngine:
    temporary = None
    if where.path is None:
        temporary = await asyncio.to_thread(tempfile.mkdtemp, prefix="muster-store-")
    engine = SqliteEngine(where.path or pathlib.Path(temporary or "") / "store.db", temporary, settings)
    try:
        await engine.prepare()
    except BaseException:
        await engine.close()
        raise
    return engine


class SqliteEngine:
    name = "sqlite"
    notifies = False

    def __init__(self, path: pathlib.Path, temporary: str | None, settings: api.StoreOptions) -> None:
        self.identity = ""
        self.durable = temporary is None and settings.sync == "full"
        self._path = path
        self._temporary = temporary
        self._settings = settings
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._reading = ThreadPoolExecutor(settings.pool, thread_name_prefix="store-reader")
        self._writer: sqlite3.Connection | None = None
        self._all: list[sqlite3.Connection] = []
        self._idle: list[sqlite3.Connection] = []
        self._free = asyncio.Semaphore(settings.pool)
        self._closed = False

    async def prepare(self) -> None:
        self._writer, self.identity = await self._hop(self._writing, self._prepare)

    def _prepare(self) -> tuple[sqlite3.Connection, str]:
        _create(self._path)
        connection = self._connect()
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_MAX}")
        level = "FULL" if self.durable else "NORMAL" if self._temporary is None else "OFF"
        connection.execute(f"PRAGMA synchronous = {level}")
        return connection, statements.prepare(connection, self._path)

    # -- interface of an engine --------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def snapshot(self) -> AsyncIterator[SqliteReader]:
        async with self._reader() as connection:
            try:
                now = await self._read(connection, statements.begin)
                yield SqliteReader(now.position, self, connection)
            finally:
                with contextlib.suppress(errors.NotConnected):  # the store was closed in the meantime
                    await self._read(connection, statements.end)

    async def get_many(self, collection: str, keys: Sequence[bytes]) -> list[api.StoreRecord]:
        return await self._read_once(lambda reading: statements.get_many(reading, collection, keys))

    async def scan(
        self, key_range: commit_plan.KeyRange, limit: int | None, reverse: bool
    ) -> list[api.StoreRecord]:
        return await self._read_once(lambda reading: statements.scan(reading, key_range, limit, reverse))

    async def changes(
        self, after: int, collection: str | None, limit: int
    ) -> tuple[commit_plan.StoreHead, list[api.StoreChange]]:
        return await self._read_once(lambda reading: statements.changes(reading, after, collection, limit))

    async def head(self) -> commit_plan.StoreHead:
        return await self._read_once(statements.head)

    async def disk_bytes(self) -> int:
        def sizes() -> int:
            files = [self._path, *(self._path.with_name(self._path.name + end) for end in ("-wal", "-shm"))]
            return sum(file.stat().st_size for file in files if file.exists())

        return await self._hop(self._reading, sizes)

    async def listen(self, wake: Callable[[], None]) -> None:
        """SQLite has no notifications."""

    async def commit(self, batch: Sequence[commit_plan.Commit]) -> list[int | errors.MusterError]:
        writer = self._writer
        assert writer is not None
        return await self._hop(self._writing, lambda: statements.commit(writer, batch, self._settings))

    async def close(self) -> None:
        """Transactions that still read get as long as a reader may be waited for; then they fail."""
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.busy_timeout_s):
                for _ in range(self._settings.pool):
                    await self._free.acquire()

        def close_all() -> None:
            for connection in held:
                connection.interrupt()
            held.clear()
            self._reading.shutdown()  # from here on no thread uses a connection
            while self._all:
                self._all.pop().close()
            if self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)

        # SQLite puts its log away when the last connection is closed: when nothing refers to it any more, and
        # unless it was interrupted.
        held = [connection for connection in self._all if connection not in (self._writer, *self._idle)]
        self._idle.clear()
        self._writer = None
        await self._hop(self._writing, close_all)
        self._writing.shutdown(wait=False)

    # -- threads and connections -------------------------------------------------------------------------

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=self._settings.busy_timeout_s, isolation_level=None, check_same_thread=False
        )
        self._all.append(connection)
        return connection

    def _connect_reader(self) -> sqlite3.Connection:
        connection = self._connect()
        connection.execute("PRAGMA query_only = 1")
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
            connection = (
                self._idle.pop() if self._idle else await self._hop(self._reading, self._connect_reader)
            )
            try:
                yield connection
            finally:
                self._idle.append(connection)
        finally:
            self._free.release()

    async def _read(self, connection: sqlite3.Connection, function: Callable[[sqlite3.Connection], T]) -> T:
        return await self._hop(self._reading, lambda: function(connection), interrupt=connection)

    async def _read_once(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Several statements, one snapshot, one call to a thread."""

        def read(connection: sqlite3.Connection) -> T:
            try:
                statements.begin(connection)
                return function(connection)
            finally:
                statements.end(connection)

        async with self._reader() as connection:
            return await self._read(connection, read)

    async def _hop(
        self, pool: ThreadPoolExecutor, function: Callable[[], T], interrupt: sqlite3.Connection | None = None
    ) -> T:
        """Run it in a thread, and never return before it is done: a connection has one user at a time."""
        try:
            future = asyncio.get_running_loop().run_in_executor(pool, function)
        except RuntimeError as error:  # the pool has been shut down
            raise errors.NotConnected(f"{self._path} has been closed") from error
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if interrupt is not None:
                interrupt.interrupt()
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # its caller was cancelled: no other code would return it
            raise
        except sqlite3.Error as error:
            raise _translated(error, self._path) from error


class SqliteReader:
    def __init__(self, version: int, engine: SqliteEngine, connection: sqlite3.Connection) -> None:
        self.version = version
        self._engine = engine
        self._connection = connection

    async def get_many(self, collection: str, keys: Sequence[bytes]) -> list[api.StoreRecord]:
        return await self._read(lambda reading: statements.get_many(reading, collection, keys))

    async def scan(
        self, key_range: commit_plan.KeyRange, limit: int | None, reverse: bool
    ) -> list[api.StoreRecord]:
        return await self._read(lambda reading: statements.scan(reading, key_range, limit, reverse))

    async def everything(
        self, after: commit_plan.Place, limit: int, max_bytes: int
    ) -> list[tuple[str, api.StoreRecord]]:
        return await self._read(lambda reading: statements.scan_all(reading, after, limit, max_bytes))

    async def load(self, collection: str, page: int, max_bytes: int) -> AsyncIterator[list[api.StoreRecord]]:
        def read(reading: sqlite3.Connection) -> tuple[int, list[api.StoreRecord]]:
            return statements.load(reading, collection, row, page, max_bytes)

        row = -(2**63)
        while True:
            row, records = await self._read(read)
            if not records:
                return
            yield records

    async def _read(self, function: Callable[[sqlite3.Connection], T]) -> T:
        return await self._engine._read(self._connection, function)


def _create(path: pathlib.Path) -> None:
    """The file, if there is none yet, for its owner only: it may hold verifiers of passwords."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        files.sync_folder(path.parent)
    except FileExistsError:
        return
    except OSError as error:
        raise errors.Unavailable(
            f"{path} cannot be made: {error.strerror}", hint="name a file in a folder that can be written to"
        ) from error


def _translated(error: sqlite3.Error, path: pathlib.Path) -> errors.MusterError:
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:  # the rest of the code is the location in SQLite
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return errors.Unavailable(
                f"{path} is locked by another process",
                retry_after_s=1.0,
                hint="try again, or find the process that holds it",
            )
        case sqlite3.SQLITE_FULL:
            return api.StoreFull(f"no room for {path}: {error}", hint="free disk space, then try again")
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return api.StoreCorrupt(f"{path} is damaged or no database: {error}", hint="restore a backup")
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return errors.Unavailable(
                f"{path} cannot be opened for writing: {error}",
                hint="check the permissions of the file and of its folder",
            )
        case sqlite3.SQLITE_INTERRUPT:
            return errors.NotConnected(f"{path} has been closed")
        case sqlite3.SQLITE_IOERR:
            return errors.Unavailable(
                f"reading or writing {path} failed: {error}", hint="see the system's log"
            )
    return errors.InvariantViolation(f"SQLite rejected a statement: {error}", story=[type(error).__name__])
