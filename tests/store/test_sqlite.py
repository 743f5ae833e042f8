"""SQLite: its file, its locks, a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import sqlite3
import stat

import pytest

from muster.core import errors
from muster.store import api, database
from muster.store.sqlite import engine, statements


async def value(store: database.Store) -> bytes | None:
    record = await store.get("a", "k")
    return record.value if record else None


def writer(store: database.Store) -> sqlite3.Connection:
    opened = store.engine
    assert isinstance(opened, engine.SqliteEngine)
    assert opened._writer is not None
    return opened._writer


async def test_a_new_file_is_its_owner_s_alone_and_folders_are_made(tmp_path):
    async with await database.open("sqlite:new/folder/store.db", folder=tmp_path) as store:
        await store.put("a", "k", b"")
        assert await store.scan("a")
        for name in ("store.db", "store.db-wal"):
            assert stat.S_IMODE((tmp_path / "new" / "folder" / name).stat().st_mode) == 0o600
    assert [file.name for file in (tmp_path / "new" / "folder").iterdir()] == ["store.db"]


async def test_commits_are_synced_unless_configured_otherwise(tmp_path):
    levels = {}
    for sync in ("full", "normal"):
        async with await database.open(
            f"sqlite:{tmp_path}/{sync}.db", settings=api.StoreOptions(sync=sync)
        ) as store:
            (levels[sync],) = writer(store).execute("PRAGMA synchronous").fetchone()
            assert (await store.statistics()).durable == (sync == "full")
    assert levels == {"full": 2, "normal": 1}


async def test_memory_is_private_and_gone_when_closed():
    async with (
        await database.open("sqlite::memory:") as opened_file,
        await database.open("sqlite::memory:") as other,
    ):
        await opened_file.put("a", "k", b"")
        assert await other.get("a", "k") is None
        assert not (await opened_file.statistics()).durable
        opened = opened_file.engine
        assert isinstance(opened, engine.SqliteEngine)
        folder = opened._path.parent
        assert folder.is_dir()
    assert not folder.exists()


async def test_locked_by_another_process(tmp_path):
    path = tmp_path / "store.db"
    settings = api.StoreOptions(busy_timeout_s=0.05)
    async with await database.open(f"sqlite:{path}", settings=settings) as store:
        await store.put("a", "k", b"1")
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(errors.Unavailable, match="locked"):
                await store.put("a", "k", b"2")
            assert await value(store) == b"1"
        await store.put("a", "k", b"3")
        assert (await store.statistics()).failures == 1


async def test_a_full_disk_fails_what_does_not_fit_and_lives_on(tmp_path):
    async with await database.open(f"sqlite:{tmp_path}/store.db") as store:
        await store.put("a", "k", b"1")
        (pages,) = writer(store).execute("PRAGMA page_count").fetchone()
        writer(store).execute(f"PRAGMA max_page_count = {pages + 2}")
        large, small = await asyncio.gather(
            store.put("a", "large", b"x" * 100_000), store.put("a", "small", b""), return_exceptions=True
        )
        assert isinstance(large, api.StoreFull)
        assert "no room" in str(large)
        assert isinstance(small, int)  # a record that fits, in the same batch, is stored
        assert await value(store) == b"1"
        writer(store).execute("PRAGMA max_page_count = 100000")
        await store.put("a", "large", b"x" * 100_000)
        assert [change.key for change in (await store.changes(0)).changes] == ["k", "small", "large"]


@pytest.mark.parametrize("content", [b"not a database" * 1000, b"SQLite format 3\0" + b"\xff" * 8192])
async def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "store.db"
    path.write_bytes(content)
    with pytest.raises(api.StoreCorrupt, match=r"store\.db"):
        await database.open(f"sqlite:{path}")
    assert path.read_bytes() == content


async def test_a_database_of_something_else_is_refused(tmp_path):
    path = tmp_path / "store.db"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (x)")
    with pytest.raises(api.StoreCorrupt, match="something else"):
        await database.open(f"sqlite:{path}")


async def test_damage_in_the_middle_is_named(tmp_path):
    path = tmp_path / "store.db"
    async with await database.open(f"sqlite:{path}") as store, store.transaction() as tx:
        tx.put_many("a", ((f"{i:05}", b"x" * 1_000) for i in range(500)))
    data = bytearray(path.read_bytes())
    data[20 * 4096 : 60 * 4096] = b"\xaa" * (40 * 4096)
    path.write_bytes(data)
    async with await database.open(f"sqlite:{path}") as store:
        with pytest.raises(api.StoreCorrupt, match="damaged"):
            await store.scan("a")


async def test_a_newer_schema_is_refused(tmp_path):
    path = tmp_path / "store.db"
    await (await database.open(f"sqlite:{path}")).close()
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version = {statements.SCHEMA_VERSION + 1}")
    with pytest.raises(errors.Refused, match="newer Muster"):
        await database.open(f"sqlite:{path}")


async def test_an_older_schema_is_migrated_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "store.db"
    async with await database.open(f"sqlite:{path}") as store:
        await store.put("a", "k", b"1")
    monkeypatch.setattr(statements, "SCHEMA_VERSION", statements.SCHEMA_VERSION + 1)
    step = statements.SCHEMA_VERSION - 1
    monkeypatch.setitem(statements.MIGRATIONS, step, "CREATE TABLE more (x); CREATE TABLE broken (")
    with pytest.raises(errors.MusterError):
        await database.open(f"sqlite:{path}")
    monkeypatch.setitem(statements.MIGRATIONS, step, "CREATE TABLE more (x); INSERT INTO more VALUES (1)")
    for _ in range(2):
        async with await database.open(f"sqlite:{path}") as store:
            assert await value(store) == b"1"
    with contextlib.closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT * FROM more").fetchall() == [(1,)]


async def test_places_that_cannot_hold_a_file(tmp_path: pathlib.Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in ("file/store.db", "folder"):
        with pytest.raises(errors.Unavailable, match=path):
            await database.open(f"sqlite:{path}", folder=tmp_path)


async def test_closing_does_not_wait_for_ever_for_a_transaction(tmp_path):
    store = await database.open(f"sqlite:{tmp_path}/store.db", settings=api.StoreOptions(busy_timeout_s=0.05))

    async def reads_on() -> None:
        async with store.transaction() as tx:
            await tx.get("a", "k")
            await store.close()
            await tx.get("a", "other")

    with pytest.raises(errors.NotConnected):
        await reads_on()
