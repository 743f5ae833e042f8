"""What every engine promises."""

from __future__ import annotations

import asyncio

import pytest

from muster.core import errors
from muster.store import api


async def test_what_was_put_is_there_with_the_commit_s_version(store):
    async with store.transaction() as tx:
        tx.put("a", "k", b"1")
        tx.put("a", "l", b"2", epoch=3)
    assert await store.get("a", "k") == api.Record("k", b"1", tx.version, 0)
    assert await store.get("a", "l") == api.Record("l", b"2", tx.version, 3)
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
    assert [isinstance(one, errors.Conflict) for one in outcomes] == [i % 3 == 0 for i in range(30)]
    assert len(await store.scan("a")) == 20
