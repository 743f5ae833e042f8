"""Backup and restore, from either engine into either."""

from __future__ import annotations

import asyncio
import hashlib
import json
import pathlib
import secrets
import stat
from typing import Any

import msgspec
import pytest

from muster.core import errors
from muster.store import api, backup, database
from tests.store.conftest import Place

RECORDS = {f"k{i}": bytes([i % 256]) * (i % 50) for i in range(1_200)}


async def fill(store: database.Store) -> None:
    async with store.transaction() as tx:
        tx.put_many("a", RECORDS.items(), epoch=3)
        tx.put("b", "é\0", b"\xff")
        tx.fence("registry", 7)


async def check(store: database.Store) -> None:
    assert {r.key: r.value for r in await store.scan("a")} == RECORDS
    assert [(r.key, r.value) for r in await store.scan("b")] == [("é\0", b"\xff")]
    with pytest.raises(errors.StaleEpoch):
        await store.put("a", "k1", b"", epoch=2)
    async with store.transaction() as tx:
        tx.fence("registry", 7)

    async def stale() -> None:
        async with store.transaction() as tx:
            tx.fence("registry", 6)

    with pytest.raises(errors.StaleEpoch):
        await stale()


@pytest.fixture
def other(place: Place, postgres_server, tmp_path) -> Place:
    """A new store on the other engine."""
    if place.url.startswith("sqlite"):
        settings = api.StoreOptions(namespace=f"t_{secrets.token_hex(6)}")
        return Place(postgres_server.url, postgres_server.password, settings)
    return Place(f"sqlite:{tmp_path}/other.db", None, api.StoreOptions())


async def restore(path: pathlib.Path, place: Place) -> int:
    return await backup.restore(place.url, path, settings=place.settings, password=place.password)


async def opened(place: Place) -> database.Store:
    return await database.open(place.url, settings=place.settings, password=place.password)


async def test_from_each_engine_into_the_other(store, other, tmp_path):
    await fill(store)
    path = tmp_path / "backup.ndjson"
    assert await backup.backup(store, path) == len(RECORDS) + 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list(tmp_path.glob("*.partial"))
    assert all(json.loads(line) for line in path.read_text().splitlines())

    assert await restore(path, other) == len(RECORDS) + 2
    async with await opened(other) as restored:
        assert restored.identity != store.identity
        await check(restored)
        again = tmp_path / "again.ndjson"
        await backup.backup(restored, again)
        assert again.read_text().splitlines()[1:-1] == path.read_text().splitlines()[1:-1]
    with pytest.raises(errors.AlreadyExists, match="not empty"):
        await restore(path, other)


async def test_the_pages_of_a_backup_are_bounded_by_bytes(store, other, tmp_path, monkeypatch):
    sizes = [10, 400, 10, 300, 300, 2_000, 10, 0]
    for number, size in enumerate(sizes):
        await store.put("a", f"k{number}", bytes(size))
    monkeypatch.setattr(backup, "PAGE_BYTES", 500)
    write = backup._Writer.write
    pages: list[int] = []

    def writes(self: backup._Writer, lines: list[msgspec.Struct]) -> None:
        pages.append(sum(len(line.v) for line in lines if isinstance(line, backup._Line)))
        write(self, lines)

    monkeypatch.setattr(backup._Writer, "write", writes)
    assert await backup.backup(store, tmp_path / "backup") == len(sizes)
    assert pages[1:] == [720, 2_300, 10]  # the last of a page may reach beyond
    await restore(tmp_path / "backup", other)
    async with await opened(other) as restored:
        assert [len(record.value) for record in await restored.scan("a")] == sizes


async def test_a_backup_is_of_one_moment(store, tmp_path, monkeypatch):
    await fill(store)
    monkeypatch.setattr(backup, "PAGE_RECORDS", 100)
    write = backup._Writer.write
    written = 0

    async def change_meanwhile() -> None:
        await store.delete("a", "k999")
        await store.put("a", "zzz", b"")

    loop = asyncio.get_running_loop()

    def writes(self: backup._Writer, lines: object) -> None:
        nonlocal written
        written += 1
        if written == 3:
            asyncio.run_coroutine_threadsafe(change_meanwhile(), loop).result(10)
        write(self, lines)  # type: ignore[arg-type]

    monkeypatch.setattr(backup._Writer, "write", writes)
    await backup.backup(store, tmp_path / "backup")
    names = [json.loads(line).get("k") for line in (tmp_path / "backup").read_text().splitlines()]
    assert await store.get("a", "zzz")
    assert "k999" in names
    assert "zzz" not in names


async def test_a_file_that_was_cut_or_changed_is_refused_before_anything_is_stored(store, other, tmp_path):
    await store.put("a", "k", b"value")
    await store.put("a", "l", b"value")
    path = tmp_path / "backup"
    await backup.backup(store, path)
    complete = path.read_bytes()
    lines = complete.splitlines(keepends=True)
    bad = [
        b"",
        b"\xff\xfe",
        b"{}",
        b"[1, 2]\n",
        complete[:-10],
        b"".join(lines[:-1]),
        b"".join(lines[:1]),
        b"".join(lines[:2] + lines[3:]),
        b"".join([lines[0], *lines[2:]]),
        complete.replace(b'"k":"l"', b'"k":"m"'),
        complete.replace(b'{"muster_store":1', b'{"muster_store":2'),
        complete + lines[-1],
    ]
    for content in bad:
        path.write_bytes(content)
        with pytest.raises(api.StoreCorrupt, match="backup"):
            await restore(path, other)
    for line in (
        b'{"c":"_unfinished","k":"x","v":""}',
        b'{"c":"a","k":"","v":""}',
        b'{"c":"a","k":"x","v":"","e":-1}',
        b'{"c":"a","k":"x","v":"%"}',
        b'{"c":"a\\u0000","k":"x","v":""}',
    ):
        forged = lines[0] + line + b"\n"
        last = b'{"records":1,"sha256":"%s"}\n' % hashlib.sha256(forged).hexdigest().encode()
        path.write_bytes(forged + last)
        with pytest.raises((errors.InvalidInput, api.StoreCorrupt)):
            await restore(path, other)
    with pytest.raises(errors.NotFound):
        await restore(tmp_path / "nowhere", other)
    async with await opened(other) as untouched:
        assert await untouched.version() == 0


async def test_a_restore_that_was_interrupted_is_noticed_and_can_be_done_again(
    store, other, tmp_path, monkeypatch
):
    await fill(store)
    path = tmp_path / "backup"
    await backup.backup(store, path)
    tight = msgspec.structs.replace(other.settings, bytes_max=50_000)
    write = database.Store.write

    async def none_afterwards(store: database.Store, writes: Any) -> int:
        try:
            return await write(store, writes)
        except errors.LimitExceeded:
            patch.setattr(database.Store, "write", away)  # as if the process had ended here
            raise

    async def away(*_: object) -> int:
        raise errors.Unavailable("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(database.Store, "write", none_afterwards)
        with pytest.raises(errors.LimitExceeded):
            await backup.restore(other.url, path, settings=tight, password=other.password)
    with pytest.raises(api.StoreCorrupt, match="did not finish"):
        await opened(other)
    monkeypatch.setattr(backup, "PAGE_RECORDS", 100)
    await restore(path, other)
    async with await opened(other) as restored:
        await check(restored)


async def test_a_restore_that_fails_leaves_the_store_empty(store, other, tmp_path):
    await fill(store)
    path = tmp_path / "backup"
    await backup.backup(store, path)

    async def fail() -> None:
        access = {"settings": other.settings, "password": other.password}
        async with backup.restoring(other.url, path, **access) as records:
            assert records == len(RECORDS) + 2
            with pytest.raises(api.StoreCorrupt, match="did not finish"):
                await opened(other)
            raise errors.Refused("something else failed")

    with pytest.raises(errors.Refused, match="something else"):
        await fail()
    async with await opened(other) as emptied:
        assert await emptied.scan("a") == []
    await restore(path, other)
    async with await opened(other) as restored:
        await check(restored)


async def test_a_place_that_cannot_be_written_to(store, tmp_path):
    with pytest.raises(errors.Unavailable, match="cannot be written"):
        await backup.backup(store, tmp_path / "no" / "such" / "folder")
