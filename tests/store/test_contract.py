"""The contract of transactions and reads, on every engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

import pytest

from muster.core import errors
from muster.store import api, database, transactions


def keys(records: Iterable[api.StoreRecord | api.StoreChange]) -> list[str]:
    return [record.key for record in records]


async def write(store: database.Store, *puts: tuple[str, str, bytes]) -> int:
    async with store.transaction() as tx:
        for collection, key, value in puts:
            tx.put(collection, key, value)
    return tx.version


# -- commits -------------------------------------------------------------------------------------------------


async def test_what_was_put_is_there_with_the_commit_s_version(store):
    async with store.transaction() as tx:
        tx.put("a", "k", b"1")
        tx.put("a", "l", b"2", epoch=3)
    assert await store.get("a", "k") == api.StoreRecord("k", b"1", tx.version, 0)
    assert await store.get("a", "l") == api.StoreRecord("l", b"2", tx.version, 3)
    assert await store.get("b", "k") is None


async def test_a_failed_block_leaves_no_trace(store):
    async def fails() -> None:
        async with store.transaction() as tx:
            tx.put("a", "k", b"1")
            raise KeyError

    before = await store.version()
    with pytest.raises(KeyError):
        await fails()
    assert await store.get("a", "k") is None
    assert await store.version() == before


async def test_it_is_there_after_a_restart(reopen):
    first = await reopen()
    version = await first.put("a", "k", b"\0\xff", epoch=2)
    await first.close()
    second = await reopen()
    assert await second.get("a", "k") == api.StoreRecord("k", b"\0\xff", version, 2)
    assert await second.version() == version
    assert second.identity == first.identity


async def test_compare_and_set(store):
    first = await store.put("a", "k", b"1", expected_version=api.ABSENT)
    with pytest.raises(errors.Conflict) as caught:
        await store.put("a", "k", b"2", expected_version=api.ABSENT)
    assert caught.value.actual == first
    second = await store.put("a", "k", b"2", expected_version=first)
    assert second > first
    with pytest.raises(errors.Conflict):
        await store.delete("a", "k", expected_version=first)
    await store.delete("a", "k", expected_version=second)
    assert await store.get("a", "k") is None
    with pytest.raises(errors.Conflict):
        await store.put("a", "k", b"3", expected_version=second)


async def test_one_refused_write_refuses_the_whole_transaction(store):
    async def is_refused() -> None:
        async with store.transaction() as tx:
            tx.put("a", "new", b"1")
            tx.put("a", "k", b"1", expected_version=7)

    with pytest.raises(errors.Conflict):
        await is_refused()
    assert await store.get("a", "new") is None


async def test_a_refused_commit_does_not_hurt_those_beside_it(store):
    outcomes = await asyncio.gather(
        *(store.put("a", str(i), b"", expected_version=9 if i % 3 == 0 else None) for i in range(30)),
        return_exceptions=True,
    )
    assert [isinstance(outcome, errors.Conflict) for outcome in outcomes] == [i % 3 == 0 for i in range(30)]
    assert len(await store.scan("a")) == 20


async def test_concurrent_commits_share_batches(store):
    await asyncio.gather(*(store.put("a", str(i), b"") for i in range(200)))
    statistics = await store.statistics()
    assert statistics.commits == 200
    assert statistics.batches < 50


async def test_deleting_what_is_not_there_changes_nothing(store):
    before = await store.put("a", "k", b"")
    assert await store.delete("a", "other") == before
    assert (await store.changes(before)).changes == []


# -- epochs --------------------------------------------------------------------------------------------------


async def test_a_lower_epoch_is_refused_and_an_equal_or_higher_one_is_not(store):
    await store.put("a", "k", b"1", epoch=5)
    await store.put("a", "k", b"2", epoch=5)
    await store.put("a", "k", b"3", epoch=7)
    with pytest.raises(errors.StaleEpoch) as caught:
        await store.put("a", "k", b"4", epoch=6)
    assert (caught.value.epoch, caught.value.current) == (6, 7)
    with pytest.raises(errors.StaleEpoch):
        await store.delete("a", "k", epoch=6)
    assert (await store.get("a", "k")).value == b"3"


async def test_a_write_without_an_epoch_keeps_the_mark(store):
    await store.put("a", "k", b"1", epoch=5)
    await store.put("a", "k", b"2")
    with pytest.raises(errors.StaleEpoch):
        await store.put("a", "k", b"3", epoch=4)
    assert await store.get("a", "k") == api.StoreRecord("k", b"2", await store.version(), 5)


async def test_a_fence_protects_what_the_new_holder_never_touched(store):
    async def act(epoch: int, key: str) -> None:
        async with store.transaction() as tx:
            tx.fence("registry", epoch)
            tx.put("a", key, b"")

    await act(1, "one")
    await act(2, "two")
    await act(2, "three")
    with pytest.raises(errors.StaleEpoch):
        await act(1, "four")
    assert keys(await store.scan("a")) == ["one", "three", "two"]


# -- ordered scans -------------------------------------------------------------------------------------------

ODD_KEYS = [
    "\0",
    "\0\0",
    " ",
    "A",
    "Z",
    "a",
    "a\0",
    "ab",
    "a\U0010ffff",
    "é",
    "\uffff",
    "\U00010000",
    "\U0010ffff",
]


async def test_scans_go_by_the_bytes_of_the_keys(store):
    await write(store, *(("a", key, key.encode()) for key in reversed(ODD_KEYS)), ("b", "a", b""))
    expected = sorted(ODD_KEYS, key=str.encode)
    assert keys(await store.scan("a")) == expected
    assert keys(await store.scan("a", reverse=True)) == expected[::-1]
    assert keys(await store.scan("a", limit=3)) == expected[:3]
    assert keys(await store.scan("a", limit=3, reverse=True)) == expected[-1:-4:-1]
    assert keys(await store.scan("a", limit=0)) == []
    for prefix in ODD_KEYS:
        assert keys(await store.scan("a", prefix=prefix)) == [k for k in expected if k.startswith(prefix)]
    assert keys(await store.scan("a", start="a", end="ab")) == ["a", "a\0"]
    assert keys(await store.scan("a", prefix="a", start="a\0", end="b")) == ["a\0", "ab", "a\U0010ffff"]
    assert keys(await store.scan("a", start="b", end="a")) == []


async def test_pages_hold_it_all_in_order(store):
    await write(store, *(("a", f"{i:03}", b"") for i in range(100)))
    pages = [keys(page) async for page in store.pages("a", start="005", page=19)]
    assert [len(page) for page in pages] == [19] * 5
    assert [key for page in pages for key in page] == [f"{i:03}" for i in range(5, 100)]
    assert [page async for page in store.pages("nothing")] == []


async def test_a_snapshot_loads_pages_of_bounded_size(store, monkeypatch):
    """Many large values do not fit in memory, even where that many small ones do."""
    monkeypatch.setattr(database, "PAGE_BYTES", 10_000)
    sizes = [1] * 20 + [4_000] * 10 + [25_000] * 2 + [1] * 20
    await write(store, *(("a", f"{i:02}", b"v" * size) for i, size in enumerate(sizes)))
    async with store.snapshot() as moment:
        pages = [page async for page in moment.load("a", page=15)]
    assert sorted(len(record.value) for page in pages for record in page) == sorted(sizes)
    for page in pages:
        assert len(page) <= 15
        assert sum(len(record.value) for record in page[:-1]) < 10_000


async def test_a_snapshot_loads_all_of_one_moment(store):
    await write(store, *(("a", str(i), b"old") for i in range(100)), ("b", "other", b""))
    await store.delete("a", "5")
    async with store.snapshot() as moment:
        loaded = []
        async for page in moment.load("a", page=30):
            assert len(page) <= 30
            loaded += page
            await write(store, ("a", "5", b"new"), ("a", "99", b"new"), ("a", f"new{len(loaded)}", b"new"))
        assert [page async for page in moment.load("b")] == [[api.StoreRecord("other", b"", 101)]]
        assert [page async for page in moment.load("nothing")] == []
    assert sorted(keys(loaded)) == sorted(str(i) for i in range(100) if i != 5)
    assert {record.value for record in loaded} == {b"old"}
    async with contextlib.aclosing(store.watch(after=moment.version)) as watch:
        assert keys(await anext(watch))[:2] == ["5", "99"]


async def test_a_store_that_closes_as_a_watch_begins_leaves_no_socket(store):
    await write(store, ("a", "1", b"x"))
    async with contextlib.aclosing(store.watch(after=0)) as watch:
        await anext(watch)
    await store.close()  # the listener is connecting; the plugin looks for what is left


async def test_get_many(store):
    await write(store, ("a", "1", b"x"), ("a", "2", b"y"), ("b", "3", b"z"))
    actual = await store.get_many("a", ["2", "1", "3", "2"])
    assert {key: record.value for key, record in actual.items()} == {"1": b"x", "2": b"y"}
    assert await store.get_many("a", []) == {}


# -- what a transaction sees ---------------------------------------------------------------------------------


async def test_a_transaction_sees_its_own_writes(store):
    await write(store, *(("a", key, b"old") for key in "bdfh"))
    async with store.transaction() as tx:
        tx.put("a", "c", b"new")
        tx.put("a", "d", b"new")
        tx.delete("a", "f")
        assert await tx.get("a", "f") is None
        assert (await tx.get("a", "d")).value == b"new"
        assert [(r.key, r.value) for r in await tx.scan("a")] == [
            ("b", b"old"), ("c", b"new"), ("d", b"new"), ("h", b"old")
        ]  # fmt: skip
        assert keys(await tx.scan("a", limit=3)) == ["b", "c", "d"]
        assert keys(await tx.scan("a", limit=2, reverse=True)) == ["h", "d"]
        assert set(await tx.get_many("a", "bcdf")) == set("bcd")
        tx.delete("a", "c")
        assert keys(await tx.scan("a", start="c")) == ["d", "h"]


async def test_all_reads_of_a_transaction_are_of_one_moment(store):
    await write(store, ("a", "x", b"1"), ("a", "y", b"1"))
    async with store.transaction() as tx:
        assert (await tx.get("a", "x")).value == b"1"
        await write(store, ("a", "x", b"2"), ("a", "y", b"2"), ("a", "z", b"2"))
        assert (await tx.get("a", "y")).value == b"1"
        assert keys(await tx.scan("a")) == ["x", "y"]
    assert tx.version < await store.version()  # it only read, so it is not refused


async def overtaken(
    store: database.Store,
    read: Callable[[transactions.Transaction], Awaitable[object]],
    then: Callable[[], Awaitable[object]],
) -> bool:
    async def run() -> None:
        async with store.transaction() as tx:
            await read(tx)
            await then()
            tx.put("out", "k", b"")

    try:
        await run()
    except api.TransactionConflict:
        return True
    return False


async def test_a_transaction_is_refused_if_what_it_read_has_changed(store):
    await write(store, *(("a", key, b"") for key in "bdf"))
    assert await overtaken(store, lambda tx: tx.get("a", "b"), lambda: store.put("a", "b", b"1"))
    assert await overtaken(store, lambda tx: tx.get("a", "b"), lambda: store.delete("a", "b"))
    assert await overtaken(store, lambda tx: tx.get("a", "c"), lambda: store.put("a", "c", b"1"))
    assert await overtaken(store, lambda tx: tx.scan("a"), lambda: store.put("a", "new", b""))
    assert await overtaken(store, lambda tx: tx.scan("a", prefix="d"), lambda: store.delete("a", "d"))
    assert (await store.statistics()).overtaken == 5


async def test_a_transaction_is_not_refused_for_what_it_did_not_read(store):
    await write(store, *(("a", key, b"") for key in "bdf"))
    assert not await overtaken(store, lambda tx: tx.get("a", "b"), lambda: store.put("a", "d", b"1"))
    assert not await overtaken(store, lambda tx: tx.scan("a", end="c"), lambda: store.put("a", "c", b""))
    assert not await overtaken(store, lambda tx: tx.scan("a", limit=1), lambda: store.put("a", "d", b""))
    assert await overtaken(store, lambda tx: tx.scan("a", limit=1), lambda: store.put("a", "a", b""))
    assert not await overtaken(
        store, lambda tx: tx.scan("a", limit=1, reverse=True), lambda: store.put("a", "d", b"")
    )


async def test_nothing_is_lost_when_many_count_at_once_in_two_processes(reopen):
    stores = [await reopen(), await reopen()]

    async def count(store: database.Store) -> None:
        for _ in range(200):
            with contextlib.suppress(api.TransactionConflict):
                async with store.transaction() as tx:
                    record = await tx.get("a", "n")
                    tx.put("a", "n", str(int(record.value if record else 0) + 1).encode())
                return

    await asyncio.gather(*(count(store) for store in stores for _ in range(20)))
    assert (await stores[0].get("a", "n")).value == b"40"


# -- bounds and bad input ------------------------------------------------------------------------------------


async def test_a_bad_key_is_refused(store):
    for key in ("", "\ud800", "x" * 1025, "é" * 513):
        with pytest.raises((errors.InvalidInput, errors.LimitExceeded), match="key"):
            await store.put("a", key, b"")
        with pytest.raises((errors.InvalidInput, errors.LimitExceeded), match="key"):
            await store.get("a", key)


async def test_the_longest_key_is_possible(store):
    longest = ["é" * 512, "é" * 511 + "ê", "z" * 1024]
    await write(store, *(("a", key, b"") for key in longest))
    assert keys(await store.scan("a", prefix="é" * 512)) == ["é" * 512]
    assert [keys(page)[0] async for page in store.pages("a", page=1)] == sorted(longest)


async def test_a_bad_collection_is_refused(store):
    for collection in ("", "_fences", "a b", "x" * 65, "a\n", "ä", "a'; DROP TABLE record; --"):
        with pytest.raises(errors.InvalidInput, match="collection"):
            await store.put(collection, "k", b"")
        with pytest.raises(errors.InvalidInput, match="collection"):
            await store.scan(collection)


async def test_bad_numbers_are_refused(store):
    for number in (-1, 2**63):
        with pytest.raises(errors.InvalidInput):
            await store.put("a", "k", b"", epoch=number)
        with pytest.raises(errors.InvalidInput):
            await store.put("a", "k", b"", expected_version=number)
    with pytest.raises(errors.InvalidInput):
        await store.scan("a", limit=-1)


async def test_a_transaction_works_only_inside_its_block(store):
    tx = store.transaction()
    with pytest.raises(errors.InvalidInput, match="not open"):
        tx.put("a", "k", b"")
    async with tx:
        with pytest.raises(errors.InvalidInput, match="committed"):
            tx.version  # noqa: B018
        tx.put("a", "k", b"")
    with pytest.raises(errors.InvalidInput, match="not open"):
        await tx.get("a", "k")
    with pytest.raises(errors.InvalidInput, match="once"):
        await tx.__aenter__()


async def test_sizes_are_bounded(reopen):
    store = await reopen(value_bytes_max=100, transaction_bytes_max=1_000)
    with pytest.raises(errors.LimitExceeded, match="101 bytes"):
        await store.put("a", "k", b"x" * 101)
    with pytest.raises(errors.LimitExceeded, match="transaction"):
        await write(store, *(("a", str(i), b"x" * 100) for i in range(10)))
    assert await store.scan("a") == []


async def test_a_full_budget_refuses_growth_and_nothing_else(reopen):
    store = await reopen(bytes_max=1_000)
    await store.put("a", "1", b"x" * 400)
    await store.put("a", "2", b"x" * 400)
    with pytest.raises(errors.LimitExceeded, match="budget"):
        await store.put("a", "3", b"x" * 400)
    await store.put("a", "1", b"x" * 300)
    await store.delete("a", "2")
    await store.put("a", "3", b"x" * 400)
    statistics = await store.statistics()
    assert statistics.over_budget == 1
    assert statistics.record_bytes <= 1_000


async def test_too_many_waiting_commits_are_refused(reopen):
    store = await reopen(waiting_max=10)
    outcomes = await asyncio.gather(*(store.put("a", str(i), b"") for i in range(50)), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, errors.Overloaded)]
    assert 0 < len(refused) <= 40
    assert len(await store.scan("a")) == 50 - len(refused)


async def test_an_exhausted_pool_of_readers_is_reported(reopen):
    store = await reopen(pool=1, busy_timeout_s=0.05)
    async with store.transaction() as tx:
        await tx.get("a", "k")
        with pytest.raises(errors.Overloaded, match="readers"):
            await store.get("a", "k")
    assert await store.get("a", "k") is None


async def test_a_cancelled_read_gives_its_reader_back(reopen):
    store = await reopen(pool=1)
    await write(store, *(("a", str(i), b"x" * 100) for i in range(2_000)))
    for _ in range(5):
        task = asyncio.create_task(store.scan("a"))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert len(await store.scan("a")) == 2_000


async def test_a_commit_cancelled_while_it_waits_does_not_happen(store):
    puts = [asyncio.create_task(store.put("a", key, b"")) for key in "xyz"]
    await asyncio.sleep(0)  # all are waiting now, and none has been taken
    puts[1].cancel()
    await asyncio.wait(puts)
    assert keys(await store.scan("a")) == ["x", "z"]


async def test_what_was_handed_in_is_committed_before_closing(reopen):
    store = await reopen()
    puts = [asyncio.create_task(store.put("a", str(i), b"")) for i in range(20)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*puts)
    again = await reopen()
    assert len(await again.scan("a")) == 20


async def test_a_closed_store_raises(store):
    await store.close()
    await store.close()
    with pytest.raises(errors.NotConnected):
        await store.put("a", "k", b"")
    with pytest.raises(errors.NotConnected):
        await store.get("a", "k")
