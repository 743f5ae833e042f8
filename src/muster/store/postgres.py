"""PostgreSQL (13 or later): the same tables in a schema of their own, shared by several processes.

A batch locks the row of `head` before it reads anything, and holds it until its commit: batches of all
processes go one after another, and each sees all earlier ones.  That lock is what orders the numbers like
the commits; what it costs, group commit gives back.  Readers take snapshots and are never in the way.

A process that stops in the middle of a batch is disconnected by the server
(`idle_in_transaction_session_timeout`), so that it holds up the others for a bounded time only.

A connection lost before COMMIT was sent means that nothing was stored, and the batch is run again on a new
one. One lost *during* COMMIT leaves the question whether it happened; the server is asked what became of
that transaction, and only if it cannot be asked in time the callers get `api.OutcomeUnknown`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, LiteralString, TypeVar

import msgspec
import psycopg
import psycopg.conninfo
from psycopg import pq

from muster.core import errors
from muster.store import api, commits, urls

T = TypeVar("T")
Connection = psycopg.AsyncConnection[tuple[Any, ...]]

SCHEMA_VERSION = 1
SERVER_VERSION_MIN = 130_000
RETRY_WAIT_S = 0.1

_log = logging.getLogger(__name__)
_PASSWORD = re.compile(r"authentication failed|no password supplied")
_NAMESPACE = re.compile(r"[a-z_][a-z0-9_]{0,39}\Z")

_TABLES: tuple[LiteralString, ...] = (
    "CREATE TABLE head (position bigint NOT NULL, trimmed bigint NOT NULL, record_bytes bigint NOT NULL,"
    " history_bytes bigint NOT NULL, identity text NOT NULL, schema_version integer NOT NULL)",
    'CREATE TABLE record (collection text COLLATE "C" NOT NULL, key bytea NOT NULL, value bytea NOT NULL,'
    " version bigint NOT NULL, position bigint NOT NULL, epoch bigint NOT NULL,"
    " PRIMARY KEY (collection, key))",
    "CREATE TABLE change (position bigint PRIMARY KEY, version bigint NOT NULL,"
    ' collection text COLLATE "C" NOT NULL,'
    " key bytea NOT NULL, deleted boolean NOT NULL, epoch bigint NOT NULL, value bytea)",
)

#: From the schema version that is the key to the next one.
_MIGRATIONS: dict[int, tuple[LiteralString, ...]] = {}

_HEAD: LiteralString = "SELECT position, trimmed, record_bytes, history_bytes FROM head"

_STORED: LiteralString = """
SELECT r.collection, r.key, r.version, r.position, r.epoch, octet_length(r.value)
FROM unnest(%b::text[], %b::bytea[]) AS t (collection, key)
JOIN record r ON r.collection = t.collection AND r.key = t.key
"""
_SUPERSEDE: LiteralString = """
UPDATE change c SET value = r.value
FROM unnest(%b::text[], %b::bytea[], %b::bigint[]) AS t (collection, key, position)
JOIN record r ON r.collection = t.collection AND r.key = t.key
WHERE c.position = t.position
"""
_PUT: LiteralString = """
INSERT INTO record (collection, key, value, version, position, epoch)
SELECT * FROM unnest(%b::text[], %b::bytea[], %b::bytea[], %b::bigint[], %b::bigint[], %b::bigint[])
ON CONFLICT (collection, key) DO UPDATE SET value = excluded.value, version = excluded.version,
    position = excluded.position, epoch = excluded.epoch
"""
_DELETE: LiteralString = """
DELETE FROM record r USING unnest(%b::text[], %b::bytea[]) AS t (collection, key)
WHERE r.collection = t.collection AND r.key = t.key
"""
_CHANGE: LiteralString = """
INSERT INTO change (position, version, collection, key, deleted, epoch, value)
SELECT * FROM unnest(
    %b::bigint[], %b::bigint[], %b::text[], %b::bytea[], %b::boolean[], %b::bigint[], %b::bytea[])
"""
_TRIM: LiteralString = """
WITH gone AS (DELETE FROM change WHERE position <= %s RETURNING octet_length(value) AS bytes)
SELECT coalesce(sum(bytes), 0)::bigint FROM gone
"""
_CHANGES: LiteralString = """
SELECT c.position, c.version, c.collection, c.key, coalesce(c.value, r.value), c.epoch
FROM change c LEFT JOIN record r
  ON NOT c.deleted AND c.value IS NULL AND r.collection = c.collection AND r.key = c.key
WHERE c.position > %s AND (%s::text IS NULL OR c.collection = %s) ORDER BY c.position LIMIT %s
"""


async def open(where: urls.PostgreSQL, settings: api.Settings, password: str | None) -> Engine:
    if not _NAMESPACE.match(settings.namespace):
        raise errors.InvalidInput(
            f"{settings.namespace[:80]!r} cannot be a namespace: use 1 to 40 of a-z 0-9 _, no digit first"
        )
    try:
        psycopg.conninfo.conninfo_to_dict(where.conninfo)
    except psycopg.ProgrammingError as error:
        raise errors.InvalidInput(f"{where.shown} is not a PostgreSQL address: {error}") from error
    engine = Engine(where, settings, password)
    try:
        await engine.prepare()
    except BaseException:
        await engine.close()
        raise
    return engine


class Engine:
    name = "postgresql"
    identity = ""
    tells = True

    def __init__(self, where: urls.PostgreSQL, settings: api.Settings, password: str | None) -> None:
        self._where = where
        self._settings = settings
        self._password = password
        self._limits = commits.Limits(settings.bytes_max, settings.history_changes_max)
        self._channel = f"muster_store_{settings.namespace}"
        self._writer: Connection | None = None
        self._idle: list[Connection] = []
        self._free = asyncio.Semaphore(settings.pool)
        self._closed = False

    # -- reading ---------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Reader]:
        async with self._reader() as connection:
            head = await self._translating(_begin(connection))
            yield Reader(head.position, self, connection)

    async def get_many(self, collection: str, keys: Sequence[bytes]) -> list[api.Record]:
        return await self._read(lambda connection: _get_many(connection, collection, keys))

    async def scan(self, wanted: commits.Range, limit: int | None, reverse: bool) -> list[api.Record]:
        return await self._read(lambda connection: _scan(connection, wanted, limit, reverse))

    async def changes(
        self, after: int, collection: str | None, limit: int
    ) -> tuple[commits.Head, list[api.Change]]:
        async def read(connection: Connection) -> tuple[commits.Head, list[api.Change]]:
            head = await _begin(connection)
            rows = await _all(connection, _CHANGES, after, collection, collection, limit)
            return head, [
                api.Change(position, version, name, key.decode(), value, epoch)
                for position, version, name, key, value, epoch in rows
            ]

        return await self._read(read)

    async def head(self) -> commits.Head:
        return await self._read(_head)

    async def disk_bytes(self) -> int:
        async def read(connection: Connection) -> int:
            rows = await _all(
                connection,
                "SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class"
                " WHERE relnamespace = %s::regnamespace AND relkind = 'r'",
                self._settings.namespace,
            )
            return int(rows[0][0])

        return await self._read(read)

    async def listen(self, wake: Callable[[], None]) -> None:
        while True:
            with contextlib.suppress(errors.Unavailable, psycopg.Error):
                connection = await self._connect()
                try:
                    await connection.execute(f"LISTEN {self._channel}")
                    wake()  # for what was committed before this
                    async for _ in connection.notifies():
                        wake()
                finally:
                    await connection.close()
            await asyncio.sleep(self._settings.poll_s)

    # -- writing ---------------------------------------------------------------------------------------------

    async def commit(self, batch: Sequence[commits.Commit]) -> list[int | errors.MusterError]:
        try:
            async with asyncio.timeout(self._settings.commit_timeout_s):
                return await self._commit_again(batch)
        except TimeoutError as error:
            await self._drop_writer()
            raise api.OutcomeUnknown(
                f"{self._where.shown} has not answered for {self._settings.commit_timeout_s} s",
                hint="read before trying again: it may have been stored",
            ) from error

    async def _commit_again(self, batch: Sequence[commits.Commit]) -> list[int | errors.MusterError]:
        """Again at once where that cannot do it twice: a dead connection, or the server's own wish."""
        try:
            return await self._commit(batch)
        except (_Lost, psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
            return await self._translating(self._commit(batch))
        except psycopg.Error as error:
            raise self._translated(error) from error

    async def _commit(self, batch: Sequence[commits.Commit]) -> list[int | errors.MusterError]:
        connection = await self._connected_writer()
        try:
            await connection.execute("BEGIN")
            ((*numbers, xid),) = await _all(
                connection,
                "SELECT position, trimmed, record_bytes, history_bytes, pg_current_xact_id()::text"
                " FROM head FOR UPDATE",
            )
            plan = await self._plan(connection, batch, commits.Head(*numbers))
            await self._carry_out(connection, plan)
        except BaseException as error:
            lost = connection.broken
            await self._drop_writer()  # which also undoes what it began
            if lost and isinstance(error, psycopg.OperationalError):
                raise _Lost(str(error)) from error
            raise
        try:
            await connection.execute("COMMIT")
        except psycopg.OperationalError as error:
            await self._drop_writer()
            if not await self._was_committed(xid, error):
                raise
        except BaseException:
            await self._drop_writer()
            raise
        return plan.outcomes

    async def _plan(
        self, connection: Connection, batch: Sequence[commits.Commit], head: commits.Head
    ) -> commits.Plan:
        stored: dict[commits.Place, commits.Stored] = {}
        if places := list(commits.touched(batch)):
            for collection, key, *known in await _all(connection, _STORED, *_columns(places)):
                stored[collection, key] = commits.Stored(*known)
        recent: Iterator[tuple[int, commits.Place]] = iter(())
        oldest = commits.oldest_snapshot(batch)
        if oldest is not None and oldest < head.position:
            rows = await _all(
                connection,
                "SELECT position, collection, key FROM change WHERE position > %s ORDER BY 1",
                oldest,
            )
            recent = ((position, (collection, key)) for position, collection, key in rows)
        return commits.plan(batch, head=head, stored=stored, recent=recent, limits=self._limits)

    async def _carry_out(self, connection: Connection, plan: commits.Plan) -> None:
        if not plan.writes:
            return
        for statement, rows in (
            (_SUPERSEDE, [(*place, position) for place, position in plan.superseded.items()]),
            (
                _PUT,
                [
                    (*place, put.value, put.version, put.position, put.epoch)
                    for place, put in plan.puts.items()
                ],
            ),
            (_DELETE, list(plan.deletes)),
            (_CHANGE, [(c.position, c.version, *c.place, c.deleted, c.epoch, c.value) for c in plan.changes]),
        ):
            if rows:
                await connection.execute(statement, _columns(rows))
        head = await _trimmed(connection, plan.head, plan.head.trimmed)
        while (further := commits.trim_to(head, self._settings.history_bytes_max)) > head.trimmed:
            head = await _trimmed(connection, head, further)
        await connection.execute(
            "UPDATE head SET position = %s, trimmed = %s, record_bytes = %s, history_bytes = %s",
            msgspec.structs.astuple(head),
        )
        await connection.execute("SELECT pg_notify(%s, '')", (self._channel,))

    async def _was_committed(self, xid: str, cause: psycopg.Error) -> bool:
        """What the server says of a transaction whose COMMIT was not answered."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.busy_timeout_s):
                while True:
                    with contextlib.suppress(errors.Unavailable, psycopg.Error):
                        connection = await self._connected_writer()
                        ((status,),) = await _all(connection, "SELECT pg_xact_status(%s::xid8)", xid)
                        if status in ("committed", "aborted"):
                            return bool(status == "committed")
                    await asyncio.sleep(RETRY_WAIT_S)
        raise api.OutcomeUnknown(
            f"the connection to {self._where.shown} broke while committing",
            hint="read before trying again: it may have been stored",
        ) from cause

    # -- connections -----------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        await self._translating(self._prepare())

    async def _prepare(self) -> None:
        connection = await self._connected_writer()
        if connection.info.server_version < SERVER_VERSION_MIN:
            raise errors.Refused(
                f"{self._where.shown} is PostgreSQL {connection.info.server_version // 10_000}; "
                f"it must be {SERVER_VERSION_MIN // 10_000} or later"
            )
        ((synced,),) = await _all(connection, "SELECT current_setting('fsync')")
        if synced != "on":
            _log.warning("%s runs with fsync off: a power cut can lose commits", self._where.shown)
        await connection.execute("BEGIN")
        await self._migrate(connection)
        await connection.execute("COMMIT")
        ((self.identity,),) = await _all(connection, "SELECT identity FROM head")

    async def _migrate(self, connection: Connection) -> None:
        namespace = self._settings.namespace
        # Processes that open a new store at once must not both make it.
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (self._channel,))
        tables = await _all(connection, "SELECT tablename FROM pg_tables WHERE schemaname = %s", namespace)
        if ("head",) not in tables:
            if tables:
                raise api.Corrupt(f"the schema {namespace} of {self._where.shown} holds something else")
            await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {namespace}")
            for statement in _TABLES:
                await connection.execute(statement)
            await connection.execute(
                "INSERT INTO head VALUES (0, 0, 0, 0, %s, %s)", (secrets.token_hex(8), SCHEMA_VERSION)
            )
        ((found,),) = await _all(connection, "SELECT schema_version FROM head")
        if found > SCHEMA_VERSION:
            raise errors.Refused(
                f"{self._where.shown} is of a newer Muster (schema {found}; this one knows {SCHEMA_VERSION})",
                hint="use that version, or restore a backup",
            )
        for step in range(found, SCHEMA_VERSION):
            for statement in _MIGRATIONS[step]:
                await connection.execute(statement)
        await connection.execute("UPDATE head SET schema_version = %s", (SCHEMA_VERSION,))

    async def _connect(self) -> Connection:
        durability = "on" if self._settings.sync == "full" else "off"
        limit_ms, idle_ms = (str(max(1, round(n * self._settings.busy_timeout_s))) for n in (1_000, 2_000))
        given = {"password": self._password} if self._password is not None else {}
        connection = None
        try:
            connection = await psycopg.AsyncConnection.connect(
                self._where.conninfo,
                autocommit=True,
                connect_timeout=max(2, round(self._settings.busy_timeout_s)),
                application_name="muster",
                client_encoding="UTF8",
                **given,  # type: ignore[arg-type]
            )
            await connection.execute(
                "SELECT set_config('search_path', %s, false), set_config('synchronous_commit', %s, false),"
                " set_config('lock_timeout', %s, false),"
                " set_config('idle_in_transaction_session_timeout', %s, false)",
                (self._settings.namespace, durability, limit_ms, idle_ms),
            )
        except psycopg.Error as error:
            if connection is not None:
                await connection.close()
            raise self._translated(error) from error
        return connection

    async def _connected_writer(self) -> Connection:
        if self._writer is None or self._writer.closed:
            self._writer = await self._connect()
        return self._writer

    async def _drop_writer(self) -> None:
        if self._writer is not None:
            await self._writer.close()
            self._writer = None

    @contextlib.asynccontextmanager
    async def _reader(self) -> AsyncIterator[Connection]:
        try:
            async with asyncio.timeout(self._settings.busy_timeout_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise errors.Overloaded(
                f"all {self._settings.pool} readers of {self._where.shown} are held by open transactions",
                hint="end transactions sooner, or raise the pool",
            ) from error
        try:
            connection = await self._usable()
            try:
                yield connection
            finally:
                await self._give_back(connection)
        finally:
            self._free.release()

    async def _usable(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            with contextlib.suppress(psycopg.Error):
                await connection.execute("")  # a restarted server has left dead connections behind
                return connection
            await connection.close()
        return await self._connect()

    async def _give_back(self, connection: Connection) -> None:
        if connection.info.transaction_status != pq.TransactionStatus.IDLE:
            with contextlib.suppress(psycopg.Error):
                await connection.rollback()
        if connection.info.transaction_status == pq.TransactionStatus.IDLE and not self._closed:
            self._idle.append(connection)
        else:
            await connection.close()

    async def _read(self, function: Callable[[Connection], Awaitable[T]]) -> T:
        async with self._reader() as connection:
            return await self._translating(function(connection))

    async def _translating(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except psycopg.Error as error:
            raise self._translated(error) from error

    def _translated(self, error: psycopg.Error) -> errors.MusterError:
        return translated(error, self._where.shown)

    async def close(self) -> None:
        self._closed = True
        await self._drop_writer()
        while self._idle:
            await self._idle.pop().close()


class _Lost(psycopg.OperationalError):
    """The connection broke before COMMIT was sent."""


class Reader:
    def __init__(self, version: int, engine: Engine, connection: Connection) -> None:
        self.version = version
        self._engine = engine
        self._connection = connection

    async def get_many(self, collection: str, keys: Sequence[bytes]) -> list[api.Record]:
        return await self._engine._translating(_get_many(self._connection, collection, keys))

    async def scan(self, wanted: commits.Range, limit: int | None, reverse: bool) -> list[api.Record]:
        return await self._engine._translating(_scan(self._connection, wanted, limit, reverse))


async def _all(connection: Connection, statement: LiteralString, *values: object) -> list[tuple[Any, ...]]:
    async with connection.cursor(binary=True) as cursor:
        await cursor.execute(statement, values)
        return await cursor.fetchall()


async def _head(connection: Connection) -> commits.Head:
    (row,) = await _all(connection, _HEAD)
    return commits.Head(*row)


async def _begin(connection: Connection) -> commits.Head:
    await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    return await _head(connection)  # the first read fixes the moment


async def _get_many(connection: Connection, collection: str, keys: Sequence[bytes]) -> list[api.Record]:
    rows = await _all(
        connection,
        "SELECT key, value, version, epoch FROM record WHERE collection = %s AND key = ANY(%b)",
        collection,
        list(keys),
    )
    return [api.Record(key.decode(), value, version, epoch) for key, value, version, epoch in rows]


async def _scan(
    connection: Connection, wanted: commits.Range, limit: int | None, reverse: bool
) -> list[api.Record]:
    statement: LiteralString = (
        "SELECT key, value, version, epoch FROM record WHERE collection = %s AND key >= %b"
        + ("" if wanted.high is None else " AND key < %b")
        + (" ORDER BY key DESC" if reverse else " ORDER BY key")
        + " LIMIT %s"
    )
    bounds = (wanted.low,) if wanted.high is None else (wanted.low, wanted.high)
    rows = await _all(connection, statement, wanted.collection, *bounds, limit)
    return [api.Record(key.decode(), value, version, epoch) for key, value, version, epoch in rows]


async def _trimmed(connection: Connection, head: commits.Head, upto: int) -> commits.Head:
    ((freed_bytes,),) = await _all(connection, _TRIM, upto)
    return msgspec.structs.replace(head, trimmed=upto, history_bytes=head.history_bytes - freed_bytes)


def _columns(rows: Sequence[tuple[object, ...]]) -> list[list[object]]:
    return [list(column) for column in zip(*rows, strict=True)]


def translated(error: psycopg.Error, shown: str) -> errors.MusterError:
    match error:
        case psycopg.errors.DiskFull():
            return api.Full(f"the disk of {shown} is full: {error}", hint="free disk space, then try again")
        case psycopg.errors.LockNotAvailable():
            return errors.Unavailable(f"another process holds the lock of {shown}", retry_after_s=1.0)
        case psycopg.errors.QueryCanceled():
            return errors.TimedOut(f"{shown} gave up on a statement: {error}")
        case psycopg.errors.TooManyConnections():
            return errors.Overloaded(f"{shown} takes no more connections", hint="raise its max_connections")
        case psycopg.errors.DataCorrupted() | psycopg.errors.IndexCorrupted():
            return api.Corrupt(f"{shown} says that its data are damaged: {error}", hint="restore a backup")
        case psycopg.errors.InsufficientPrivilege():
            return errors.Forbidden(
                f"{shown} does not let this user in: {error}", hint="GRANT what is missing"
            )
        case psycopg.errors.InvalidPassword() | psycopg.errors.InvalidAuthorizationSpecification():
            return errors.Unauthorized(f"{shown} refuses the user or password: {error}")
        case psycopg.OperationalError() if _PASSWORD.search(str(error)):  # refused connections carry no code
            return errors.Unauthorized(f"{shown} refuses the user or password: {error}")
        case psycopg.OperationalError() if re.search(r'database ".*" does not exist', str(error)):
            return errors.NotFound(f"{error}", hint="create it, or name another in the address")
        case psycopg.OperationalError() | psycopg.InterfaceError():
            return errors.NotConnected(f"{shown} cannot be reached: {error}", retry_after_s=1.0)
    return errors.InvariantBroken(
        f"PostgreSQL refused a statement of ours: {error}", story=[type(error).__name__]
    )
