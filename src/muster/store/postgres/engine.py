"""PostgreSQL (13 or later): the same tables in a schema of their own, shared by several processes.

A batch locks the row of `head` before it reads anything, and holds the lock until its commit: batches of all
processes run one after another, and each sees all earlier ones. That lock orders the numbers like the
commits; group commit compensates for its cost. Readers use snapshots and do not block.

A process that stops in the middle of a batch is disconnected by the server
(`idle_in_transaction_session_timeout`), so that it holds up the others for a bounded time only.

A connection lost before COMMIT was sent means that nothing was stored, and the batch is run again on a new
one. If it is lost *during* COMMIT, the outcome is unknown. Each batch writes a random token with its last
change, so the engine searches for that token. (A transaction id would not do: after a crash the server
assigns it to another transaction.) Only if the server does not respond in time, or the feed has been trimmed
past that change, the callers get `api.CommitOutcomeUnknown`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import psycopg
import psycopg.conninfo

from muster.core import errors
from muster.store import api, commit_plan, urls
from muster.store.postgres import connections, statements

T = TypeVar("T")

SERVER_VERSION_MIN = 130_000
RETRY_WAIT_S = 0.1

_log = logging.getLogger(__name__)
_NAMESPACE = re.compile(r"[a-z_][a-z0-9_]{0,39}\Z")


async def open(where: urls.PostgresUrl, settings: api.StoreOptions, password: str | None) -> PostgresEngine:
    if not _NAMESPACE.match(settings.namespace):
        raise errors.InvalidInput(
            f"{settings.namespace[:80]!r} cannot be a namespace: use 1 to 40 of a-z 0-9 _, no digit first"
        )
    try:
        psycopg.conninfo.conninfo_to_dict(where.conninfo)
    except psycopg.ProgrammingError as error:
        raise errors.InvalidInput(f"{where.shown} is not a PostgreSQL address: {error}") from error
    engine = PostgresEngine(connections.PostgresConnections(where, settings, password), settings)
    try:
        await engine.prepare()
    except BaseException:
        await engine.close()
        raise
    return engine


class PostgresEngine:
    name = "postgresql"
    notifies = True

    def __init__(self, reached: connections.PostgresConnections, settings: api.StoreOptions) -> None:
        self.identity = ""
        self.durable = settings.sync == "full"
        self._connections = reached
        self._settings = settings
        self._channel = f"muster_store_{settings.namespace}"

    # -- reading -----------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def snapshot(self) -> AsyncIterator[PostgresReader]:
        async with self._connections.reader() as connection:
            now = await self._connections.answered(connection, statements.begin(connection))
            yield PostgresReader(now.position, self._connections, connection)

    async def get_many(self, collection: str, keys: Sequence[bytes]) -> list[api.StoreRecord]:
        return await self._read(lambda reading: statements.get_many(reading, collection, keys))

    async def scan(
        self, key_range: commit_plan.KeyRange, limit: int | None, reverse: bool
    ) -> list[api.StoreRecord]:
        return await self._read(lambda reading: statements.scan(reading, key_range, limit, reverse))

    async def changes(
        self, after: int, collection: str | None, limit: int
    ) -> tuple[commit_plan.StoreHead, list[api.StoreChange]]:
        return await self._read(lambda reading: statements.changes(reading, after, collection, limit))

    async def head(self) -> commit_plan.StoreHead:
        return await self._read(statements.head)

    async def disk_bytes(self) -> int:
        rows = await self._read(
            lambda reading: statements.rows(
                reading,
                "SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class"
                " WHERE relnamespace = %s::regnamespace AND relkind = 'r'",
                self._settings.namespace,
            )
        )
        return int(rows[0][0])

    async def listen(self, wake: Callable[[], None]) -> None:
        while True:
            with contextlib.suppress(errors.Unavailable, psycopg.Error):
                connection = await self._connections.connect()
                try:
                    with self._connections.deadline(connection):
                        await connection.execute(f"LISTEN {self._channel}")
                    wake()  # for commits before this
                    async for _ in connection.notifies():
                        wake()
                finally:
                    await connection.close()
            await asyncio.sleep(self._settings.poll_s)

    async def _read(self, function: Callable[[statements.Connection], Awaitable[T]]) -> T:
        async with self._connections.reader() as connection:
            return await self._connections.answered(connection, function(connection))

    # -- writing -----------------------------------------------------------------------------------------

    async def commit(self, batch: Sequence[commit_plan.Commit]) -> list[int | errors.MusterError]:
        """Again at once where that cannot do it twice: a dead connection, or the server's own wish."""
        try:
            return await self._commit(batch)
        except (_Lost, psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
            pass
        except psycopg.Error as error:
            raise connections.map_error(error, self._connections.shown) from error
        try:
            return await self._commit(batch)
        except psycopg.Error as error:
            raise connections.map_error(error, self._connections.shown) from error

    async def _commit(self, batch: Sequence[commit_plan.Commit]) -> list[int | errors.MusterError]:
        connection = await self._connections.writer()
        token = secrets.token_bytes(16)
        try:
            with self._connections.deadline(connection):
                now = await statements.begin_batch(connection)
                plan = await statements.plan(connection, batch, now, commit_plan.limits(self._settings))
                if plan.writes:
                    await statements.execute_plan(
                        connection, plan, self._settings.history_bytes_max, self._channel, token
                    )
        except BaseException as error:
            lost = connection.broken
            await self._connections.drop_writer()
            if lost and isinstance(error, psycopg.OperationalError):
                raise _Lost(str(error)) from error
            raise
        try:
            with self._connections.deadline(connection):
                await connection.execute("COMMIT")
        except BaseException as error:
            await self._connections.drop_writer()
            if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | errors.TimedOut):
                raise
            # Without writes nothing can be lost: the rejections of the plan are based on committed rows.
            if plan.writes and not await self._was_committed(plan.head.position, token, error):
                raise
        return plan.outcomes

    async def _was_committed(self, position: int, token: bytes, cause: Exception) -> bool:
        """Whether a batch whose COMMIT has no response is stored."""
        # By then the server has ended a transaction that is still open but whose client is silent.
        deadline = time.monotonic() + 1.5 * connections.SILENT_FACTOR * self._settings.busy_timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(errors.MusterError):  # any other error leaves the outcome unknown
                connection = await self._connections.writer()
                outcome = await self._connections.answered(
                    connection, statements.was_committed(connection, position, token)
                )
                if outcome is not None:
                    return outcome
                break
            await asyncio.sleep(RETRY_WAIT_S)
        raise api.CommitOutcomeUnknown(
            f"the connection to {self._connections.shown} broke while committing",
            hint=api.OUTCOME_HINT,
        ) from cause

    # -- life --------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        connection = await self._connections.writer()
        await self._connections.answered(connection, self._prepare(connection))

    async def _prepare(self, connection: statements.Connection) -> None:
        version = connection.info.server_version
        if version < SERVER_VERSION_MIN:
            raise errors.Refused(
                f"{self._connections.shown} is PostgreSQL {version // 10_000}; "
                f"it must be {SERVER_VERSION_MIN // 10_000} or later"
            )
        ((fsync,),) = await statements.rows(connection, "SELECT current_setting('fsync')")
        if fsync != "on":
            self.durable = False
            _log.warning("%s runs with fsync off: a power cut can lose commits", self._connections.shown)
        await connection.execute("BEGIN")
        await self._migrate(connection)
        await connection.execute("COMMIT")
        ((self.identity,),) = await statements.rows(connection, "SELECT identity FROM head")

    async def _migrate(self, connection: statements.Connection) -> None:
        namespace = self._settings.namespace
        # Processes that open a new store at once must not both make it.
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (self._channel,))
        tables = await statements.rows(
            connection, "SELECT tablename::text FROM pg_tables WHERE schemaname = %s", namespace
        )
        if not tables:
            await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {namespace}")
            for statement in statements.TABLES:
                await connection.execute(statement)
            await connection.execute(
                "INSERT INTO head VALUES (0, 0, 0, 0, %s, %s)",
                (secrets.token_hex(8), statements.SCHEMA_VERSION),
            )
        elif ("head",) not in tables:
            raise api.StoreCorrupt(
                f"the schema {namespace} of {self._connections.shown} holds something else",
                hint="name another namespace",
            )
        ((version,),) = await statements.rows(connection, "SELECT schema_version FROM head")
        if version > statements.SCHEMA_VERSION:
            raise errors.Refused(
                f"{self._connections.shown} was created by a newer Muster (schema {version}; this "
                f"version supports {statements.SCHEMA_VERSION})",
                hint="use that version, or restore a backup",
            )
        for step in range(version, statements.SCHEMA_VERSION):
            for statement in statements.MIGRATIONS[step]:
                await connection.execute(statement)
        await connection.execute("UPDATE head SET schema_version = %s", (statements.SCHEMA_VERSION,))

    async def close(self) -> None:
        await self._connections.close()


class _Lost(psycopg.OperationalError):
    """The connection broke before COMMIT was sent."""


class PostgresReader:
    def __init__(
        self, version: int, reached: connections.PostgresConnections, connection: statements.Connection
    ) -> None:
        self.version = version
        self._connections = reached
        self._connection = connection

    async def get_many(self, collection: str, keys: Sequence[bytes]) -> list[api.StoreRecord]:
        return await self._answered(statements.get_many(self._connection, collection, keys))

    async def scan(
        self, key_range: commit_plan.KeyRange, limit: int | None, reverse: bool
    ) -> list[api.StoreRecord]:
        return await self._answered(statements.scan(self._connection, key_range, limit, reverse))

    async def everything(
        self, after: commit_plan.Place, limit: int, max_bytes: int
    ) -> list[tuple[str, api.StoreRecord]]:
        return await self._answered(statements.scan_all(self._connection, after, limit, max_bytes))

    async def load(self, collection: str, page: int, max_bytes: int) -> AsyncIterator[list[api.StoreRecord]]:
        await self._answered(statements.begin_load(self._connection, collection))
        while sizes := await self._answered(statements.load_sizes(self._connection, page)):
            while sizes:
                before = itertools.accumulate(sizes, initial=0)
                fitting = sum(1 for _ in itertools.takewhile(lambda size: size < max_bytes, before))
                fitting = max(1, min(fitting, len(sizes)))
                yield await self._answered(statements.load(self._connection, fitting))
                sizes = sizes[fitting:]

    async def _answered(self, work: Awaitable[T]) -> T:
        return await self._connections.answered(self._connection, work)
