"""The store: synced commits, one by one and many at once, and loading a large collection.

The peers are the bare drivers, `sqlite3` and `psycopg`, doing the least that stores the same bytes as
durably: one upsert into a plain table, without versions, epochs, a feed or checks.  Where many commit at
once, each of SQLite's is a transaction of its own (it has one writer), and each of PostgreSQL's has a
connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import pathlib
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable, Sequence

import psycopg

from benchmarks import harness, measure
from muster.store import api, database
from tests import postgres

CONTEXT = b"c" * 1_700
CALLERS = 50
POOL = 4  # connections of ours to PostgreSQL

Upsert = Callable[[str, bytes], Awaitable[object]]

_number = itertools.count()


def _value() -> bytes:
    """512 bytes that were never there before: SQLite does not write what has not changed."""
    return f"{next(_number):512}".encode()


def run(quick: bool) -> list[harness.Row]:
    rounds = 2 if quick else 5
    few, many, records = (200, 2_000, 20_000) if quick else (1_000, 10_000, 200_000)
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner() as runner,
        contextlib.closing(_raw_sqlite(pathlib.Path(folder) / "raw.db")) as raw,
        postgres.running() as server,
    ):
        lite = runner.run(database.open(f"sqlite:{folder}/store.db"))
        large = runner.run(database.open(f"sqlite:{folder}/large.db"))
        post = runner.run(
            database.open(server.url, password=server.password, settings=api.StoreOptions(pool=POOL))
        )
        lines = [runner.run(_raw_postgres(server)) for _ in range(CALLERS)]
        runner.run(_fill(large, raw, records))

        def rate(count: int, function: Callable[[], object]) -> Callable[[], float]:
            return lambda: count / measure.seconds(function)

        def ours(store: database.Store, count: int, callers: int) -> Callable[[], float]:
            upsert = functools.partial(store.put, "records")
            return rate(count, lambda: runner.run(_commits(callers * [upsert], count)))

        def psycopg_s(count: int, callers: int) -> Callable[[], float]:
            upserts = [functools.partial(_raw_upsert, line) for line in lines[:callers]]
            return rate(count, lambda: runner.run(_commits(upserts, count)))

        def compare(
            metric: str,
            unit: str,
            peer_name: str,
            mine: Callable[[], float],
            peer: Callable[[], float],
            load: str,
        ) -> harness.Row:
            rates = measure.in_turns({"ours": mine, "peer": peer}, rounds=rounds)
            best = {side: measure.best(values, "higher") for side, values in rates.items()}
            return harness.Row(
                metric=metric,
                ours=best["ours"],
                unit=unit,
                better="higher",
                peer=best["peer"],
                peer_name=peer_name,
                samples=len(rates["ours"]),
                load=f"{load}; both sides in turns, the best of {rounds} rounds each",
            )

        alone = f"{few:,} commits of 512 B, one after the other, each synced"
        together = f"{many:,} commits of 512 B by {CALLERS} callers"
        sqlite_s = rate(few, lambda: _raw_commits(raw, few))
        rows = [
            compare("SQLite, one caller", "commits/s", "sqlite3", ours(lite, few, 1), sqlite_s, alone),
            compare(
                f"SQLite, {CALLERS} callers",
                "commits/s",
                "sqlite3",
                ours(lite, many, CALLERS),
                sqlite_s,
                f"{together}, synced; the peer, which has one writer: {alone}",
            ),
            compare(
                "PostgreSQL, one caller",
                "commits/s",
                "psycopg",
                ours(post, few, 1),
                psycopg_s(few, 1),
                alone,
            ),
            compare(
                f"PostgreSQL, {CALLERS} callers",
                "commits/s",
                "psycopg",
                ours(post, many, CALLERS),
                psycopg_s(many, CALLERS),
                f"{together}, synced; ours over a pool of {POOL}, the peer with a connection for each caller",
            ),
            compare(
                "load of 1.7 kB records",
                "records/s",
                "sqlite3",
                rate(records, lambda: runner.run(_load(large))),
                rate(records, lambda: _raw_load(raw)),
                f"{records:,} records of {len(CONTEXT):,} B from SQLite, in pages of 1,000",
            ),
        ]
        for line in lines:
            runner.run(line.close())
        for store in (lite, large, post):
            runner.run(store.close())
    return rows


async def _commits(upserts: Sequence[Upsert], count: int) -> None:
    """Each caller waits for one commit before it makes the next."""

    async def call(number: int, upsert: Upsert) -> None:
        for turn in range(count // len(upserts)):
            await upsert(f"{number}-{turn}", _value())

    await asyncio.gather(*(call(number, upsert) for number, upsert in enumerate(upserts)))


async def _load(store: database.Store) -> None:
    async with store.snapshot() as moment:
        async for _ in moment.load("contexts"):
            pass


async def _fill(store: database.Store, raw: sqlite3.Connection, records: int) -> None:
    for start in range(0, records, 1_000):
        page = [(f"context/{number}", CONTEXT) for number in range(start, start + 1_000)]
        async with store.transaction() as tx:
            tx.put_many("contexts", page)
        raw.execute("BEGIN")
        raw.executemany("INSERT INTO context VALUES (?, ?)", page)
        raw.execute("COMMIT")


def _raw_sqlite(path: pathlib.Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE record (key TEXT PRIMARY KEY, value BLOB)")
    connection.execute("CREATE TABLE context (key TEXT PRIMARY KEY, value BLOB)")
    return connection


def _raw_commits(connection: sqlite3.Connection, count: int) -> None:
    for turn in range(count):
        connection.execute(
            "INSERT INTO record VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (f"0-{turn}", _value()),
        )


def _raw_load(connection: sqlite3.Connection) -> None:
    cursor = connection.execute("SELECT key, value FROM context ORDER BY rowid")
    while cursor.fetchmany(1_000):
        pass


async def _raw_postgres(server: postgres.PostgresServer) -> psycopg.AsyncConnection:
    connection = await psycopg.AsyncConnection.connect(server.url, password=server.password, autocommit=True)
    await connection.execute("CREATE TABLE IF NOT EXISTS record (key text PRIMARY KEY, value bytea)")
    return connection


async def _raw_upsert(connection: psycopg.AsyncConnection, key: str, value: bytes) -> None:
    await connection.execute(
        "INSERT INTO record VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, value),
    )
