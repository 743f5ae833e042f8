"""Connections to PostgreSQL: one that writes, a few that read, and the mapping of their errors."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator
from typing import Any, Self, TypeVar

import psycopg
import psycopg.abc
from psycopg import pq, waiting

from muster.core import errors
from muster.store import api, urls
from muster.store.postgres import statements

T = TypeVar("T")

#: The server ends a transaction that is silent for this many times as long as others wait for its lock.
SILENT_FACTOR = 2

_PASSWORD = re.compile(r"authentication failed|no password supplied")
_DATABASE = re.compile(r'database ".*" does not exist')


#: Of the task that connects: its attempts, each with a socket.
_attempts: contextvars.ContextVar[list[Generator[Any, Any, Any]]] = contextvars.ContextVar("attempts")


class _Connection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """Closes the connection when the caller is cancelled. (The driver would request a cancellation of the
    statement, and wait ten seconds for a server that does not respond; while it connects, it would leave the
    socket to the garbage collector.)"""

    @classmethod
    def _connect_gen(cls, conninfo: str = "") -> psycopg.abc.PQGenConn[Self]:
        attempt = super()._connect_gen(conninfo)
        _attempts.get().append(attempt)
        return attempt

    async def wait(self, gen: psycopg.abc.PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        try:
            return await waiting.wait_async(gen, self.pgconn.socket, interval=interval, timeout=timeout)
        except asyncio.CancelledError:
            self.pgconn.finish()
            raise


class PostgresConnections:
    def __init__(self, where: urls.PostgresUrl, settings: api.StoreOptions, password: str | None) -> None:
        self.shown = where.shown
        self._where = where
        self._settings = settings
        self._password = password
        self._writer: statements.Connection | None = None
        self._idle: list[statements.Connection] = []
        self._free = asyncio.Semaphore(settings.pool)
        self._closed = False

    async def connect(self) -> statements.Connection:
        durability = "on" if self._settings.sync == "full" else "off"
        lock_ms = max(1, round(1_000 * self._settings.busy_timeout_s))
        options = {"password": self._password} if self._password is not None else {}
        attempts: list[Generator[Any, Any, Any]] = []
        _attempts.set(attempts)
        try:
            connection = await _Connection.connect(
                self._where.conninfo,
                autocommit=True,
                connect_timeout=max(2, round(self._settings.busy_timeout_s)),
                application_name="muster",
                client_encoding="UTF8",
                **options,  # type: ignore[arg-type]
            )
            async with self._closed_on_failure(connection):
                await connection.execute(
                    "SELECT set_config('search_path', %s, false),"
                    " set_config('synchronous_commit', %s, false),"
                    " set_config('lock_timeout', %s, false),"
                    " set_config('idle_in_transaction_session_timeout', %s, false)",
                    (self._settings.namespace, durability, str(lock_ms), str(SILENT_FACTOR * lock_ms)),
                )
        except psycopg.Error as error:
            raise map_error(error, self.shown) from error
        finally:
            for attempt in attempts:
                attempt.close()
        return connection

    async def writer(self) -> statements.Connection:
        """Used by one task at a time."""
        if self._writer is None or self._writer.closed:
            self._writer = await self.connect()
        return self._writer

    async def drop_writer(self) -> None:
        """Whatever it was doing is undone by the server."""
        if self._writer is not None:
            await self._writer.close()
            self._writer = None

    @contextlib.asynccontextmanager
    async def reader(self) -> AsyncIterator[statements.Connection]:
        try:
            async with asyncio.timeout(self._settings.busy_timeout_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise errors.Overloaded(
                f"all {self._settings.pool} readers of {self.shown} are held by open transactions",
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

    async def _usable(self) -> statements.Connection:
        while self._idle:
            connection = self._idle.pop()
            with contextlib.suppress(psycopg.Error):
                async with self._closed_on_failure(connection):
                    await connection.execute("")  # a restarted server has left dead connections behind
                    return connection
        return await self.connect()

    async def _give_back(self, connection: statements.Connection) -> None:
        if connection.info.transaction_status != pq.TransactionStatus.IDLE:
            with contextlib.suppress(psycopg.Error, errors.TimedOut), self.deadline(connection):
                await connection.rollback()
        if connection.info.transaction_status == pq.TransactionStatus.IDLE and not self._closed:
            self._idle.append(connection)
        else:
            await connection.close()

    async def answered(self, connection: statements.Connection, work: Awaitable[T]) -> T:
        """The result of work on this connection, or a Muster error, within the timeout."""
        try:
            with self.deadline(connection):
                return await work
        except psycopg.Error as error:
            raise map_error(error, self.shown) from error

    @contextlib.contextmanager
    def deadline(self, connection: statements.Connection) -> Iterator[None]:
        """Close the connection when the server takes too long. Every statement has a timeout."""
        late = False

        def hang_up() -> None:
            nonlocal late
            late = True
            with (
                contextlib.suppress(OSError, psycopg.Error),
                socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as line,
            ):
                line.shutdown(socket.SHUT_RDWR)

        timeout_s = self._settings.answer_timeout_s
        timer = asyncio.get_running_loop().call_later(timeout_s, hang_up)
        try:
            yield
        except psycopg.OperationalError as error:
            if late:
                raise errors.TimedOut(f"{self.shown} did not respond within {timeout_s:g} s") from error
            raise
        finally:
            timer.cancel()

    @contextlib.asynccontextmanager
    async def _closed_on_failure(self, connection: statements.Connection) -> AsyncIterator[None]:
        try:
            with self.deadline(connection):
                yield
        except BaseException:
            await connection.close()
            raise

    async def close(self) -> None:
        self._closed = True
        await self.drop_writer()
        while self._idle:
            await self._idle.pop().close()


def map_error(error: psycopg.Error, shown: str) -> errors.MusterError:
    match error:
        case psycopg.errors.DiskFull():
            return api.StoreFull(
                f"the disk of {shown} is full: {error}", hint="free disk space, then try again"
            )
        case psycopg.errors.LockNotAvailable():
            return errors.Unavailable(f"another process holds the lock of {shown}", retry_after_s=1.0)
        case psycopg.errors.IdleInTransactionSessionTimeout():  # we were paused, or cut off, in the middle
            return errors.TimedOut(f"{shown} ended an idle transaction", retry_after_s=1.0)
        case psycopg.errors.QueryCanceled():
            return errors.TimedOut(f"{shown} gave up on a statement: {error}")
        case psycopg.errors.TooManyConnections():
            return errors.Overloaded(f"{shown} accepts no more connections", hint="raise its max_connections")
        case psycopg.errors.DataCorrupted() | psycopg.errors.IndexCorrupted():
            return api.StoreCorrupt(f"{shown} reports damaged data: {error}", hint="restore a backup")
        case psycopg.errors.InsufficientPrivilege():
            return errors.Forbidden(
                f"{shown} denies access to this user: {error}", hint="GRANT the missing privilege"
            )
        case psycopg.errors.InvalidPassword() | psycopg.errors.InvalidAuthorizationSpecification():
            return errors.Unauthorized(f"{shown} refuses the user or password: {error}")
        case psycopg.OperationalError() if _PASSWORD.search(str(error)):  # refused connections carry no code
            return errors.Unauthorized(f"{shown} refuses the user or password: {error}")
        case psycopg.OperationalError() if _DATABASE.search(str(error)):
            return errors.NotFound(f"{error}", hint="create it, or name another in the address")
        case psycopg.OperationalError() | psycopg.InterfaceError():
            return errors.NotConnected(f"{shown} cannot be reached: {error}", retry_after_s=1.0)
    return errors.InvariantViolation(
        f"PostgreSQL rejected a statement: {error}", story=[type(error).__name__]
    )
