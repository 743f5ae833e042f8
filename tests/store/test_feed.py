"""The contract of the feed: every change, in the order of commits, without gaps."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from muster.core import errors
from muster.store import api, database


async def test_every_change_with_its_value_even_if_overwritten_or_deleted_since(store):
    async with store.transaction() as first:
        first.put("a", "k", b"1", epoch=4)
        first.put("b", "l", b"2")
    second = await store.put("a", "k", b"3")
    third = await store.delete("a", "k")
    fourth = await store.put("a", "k", b"5")
    page = await store.changes(0)
    assert page.position == fourth
    assert page.changes == [
        api.StoreChange(1, first.version, "a", "k", b"1", 4),
        api.StoreChange(2, first.version, "b", "l", b"2", 0),
        api.StoreChange(second, second, "a", "k", b"3", 4),
        api.StoreChange(third, third, "a", "k", None, 4),
        api.StoreChange(fourth, fourth, "a", "k", b"5", 0),
    ]
    assert (await store.changes(second)).changes == page.changes[3:]
    assert (await store.changes(fourth)) == api.ChangePage([], fourth)


async def test_values_overwritten_within_one_batch_are_kept(store):
    await asyncio.gather(*(store.put("a", "k", str(i).encode()) for i in range(20)))
    changes = (await store.changes(0)).changes
    assert [change.value for change in changes] == [str(i).encode() for i in range(20)]
    assert (await store.statistics()).history_bytes == sum(len(str(i)) for i in range(19))


async def test_pages_of_one_collection_go_on_where_they_ended(store):
    for i in range(10):
        await store.put("a" if i % 2 else "b", str(i), b"")
    seen, position = [], 0
    while True:
        page = await store.changes(position, collection="a", limit=2)
        seen += [change.key for change in page.changes]
        if page.position == position:
            break
        position = page.position
    assert seen == ["1", "3", "5", "7", "9"]
    assert position == 10


async def test_a_reader_behind_the_feed_learns_of_it(reopen):
    store = await reopen(history_changes_max=10)
    for i in range(15):
        await store.put("a", str(i), b"")
    with pytest.raises(api.FeedTrimmed) as caught:
        await store.changes(4)
    assert caught.value.version == 15
    assert [change.key for change in (await store.changes(5)).changes] == [str(i) for i in range(5, 15)]
    async with store.transaction() as tx:  # more at once than are kept
        tx.put_many("b", ((str(i), b"") for i in range(30)))
    assert len((await store.changes(35)).changes) == 10


async def test_old_values_are_trimmed_by_their_bytes(reopen):
    store = await reopen(history_bytes_max=5_000)
    for _ in range(40):
        await store.put("a", "k", b"x" * 1_000)
    statistics = await store.statistics()
    assert statistics.history_bytes <= 5_000
    with pytest.raises(api.FeedTrimmed):
        await store.changes(0)
    assert (await store.changes(39)).changes[0].value == b"x" * 1_000


async def test_a_transaction_slower_than_the_history_is_overtaken(reopen):
    store = await reopen(history_changes_max=5)

    async def slow() -> None:
        async with store.transaction() as tx:
            await tx.get("a", "k")
            for i in range(10):
                await store.put("b", str(i), b"")
            tx.put("a", "k", b"")

    with pytest.raises(api.TransactionConflict):
        await slow()


async def test_a_position_of_the_future_is_refused(store):
    with pytest.raises(errors.InvalidInput, match="not been reached"):
        await store.changes(1)
    with pytest.raises(errors.InvalidInput):
        await store.changes(0, limit=0)


async def test_a_watch_wakes_on_commits_of_this_process(reopen):
    store = await reopen(poll_s=60)
    await store.put("a", "before", b"")
    watch = store.watch()
    coming = asyncio.ensure_future(anext(watch))
    await asyncio.wait([coming], timeout=0.1)
    await store.put("a", "k", b"1")
    async with asyncio.timeout(30):
        assert [change.key for change in await coming] == ["k"]
    await watch.aclose()


async def test_a_watch_wakes_on_commits_of_another_process(place, reopen):
    # PostgreSQL sends notifications, so polling every twenty minutes is enough; SQLite has to be polled.
    store = await reopen(poll_s=0.02 if place.url.startswith("sqlite") else 60)
    other = await reopen()
    seen: list[str] = []

    async def follow() -> None:
        async for changes in store.watch(after=0, collection="a"):
            seen.extend(change.key for change in changes)
            if seen[-1] == "last":
                return

    task = asyncio.create_task(follow())
    for i in range(5):
        await other.put("a", str(i), b"")
        await other.put("b", str(i), b"")
    await other.put("a", "last", b"")
    async with asyncio.timeout(30):
        await task
    assert seen == ["0", "1", "2", "3", "4", "last"]


async def test_a_watch_ends_when_the_store_is_closed(store):
    task = asyncio.create_task(anext(store.watch()))
    await asyncio.wait([task], timeout=0.05)
    await store.close()
    async with asyncio.timeout(30):
        with contextlib.suppress(StopAsyncIteration):
            await task
    assert task.done()


async def test_a_polling_reader_misses_nothing_while_several_processes_write(reopen):
    stores = [await reopen() for _ in range(3)]
    reader = await reopen()
    written: set[str] = set()

    async def write(store: database.Store, name: str) -> None:
        for i in range(25):
            async with store.transaction() as tx:
                tx.put("a", f"{name}-{i}", b"")
                tx.put("a", f"{name}-{i}-too", b"")
            written.update((f"{name}-{i}", f"{name}-{i}-too"))

    done = asyncio.gather(*(write(store, f"{i}-{j}") for i, store in enumerate(stores) for j in range(2)))
    seen: list[api.StoreChange] = []
    position = 0
    while not done.done() or position < await reader.version():
        page = await reader.changes(position, limit=7)
        seen += page.changes
        position = page.position
    await done
    assert [change.position for change in seen] == list(range(1, len(seen) + 1))
    assert {change.key for change in seen} == written
    commits = [change.version for change in seen]
    assert commits == sorted(commits)
    assert all(commits.count(version) == 2 for version in set(commits))
