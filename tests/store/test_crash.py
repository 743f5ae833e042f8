"""kill -9 during writes: acknowledged transactions are complete, and no transaction is partial."""

from __future__ import annotations

import asyncio
import os
import pathlib
import sys

import pytest

from tests.store import writer

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("commits", [1, 60, 400])
async def test_nothing_acknowledged_is_lost(place, reopen, commits):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        writer.__name__,
        place.url,
        place.settings.namespace,
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "src"), "STORE_PASSWORD": place.password or ""},
    )
    assert process.stdout is not None
    lines = [await process.stdout.readline() for _ in range(commits)]
    process.kill()
    lines += (await process.stdout.read()).splitlines(keepends=True)
    await process.wait()
    acknowledged = [[int(word) for word in line.split()] for line in lines if line.endswith(b"\n")]
    assert len(acknowledged) >= commits

    store = await reopen()
    await store.put("after", "k", b"")  # whatever the dead process had under way comes before it, or never
    new = {record.key: record for record in await store.scan("new")}
    pairs = {record.key: record for record in await store.scan("pair")}
    for name, number, version in acknowledged:
        assert new[f"{name}-{number}"].version == version
        assert pairs[f"{name}-a"].version >= version
    for name in {name for name, _, _ in acknowledged}:
        pair, other = pairs[f"{name}-a"], pairs[f"{name}-b"]
        assert (pair.value, pair.version) == (other.value, other.version)
    assert len(new) <= len(acknowledged) + writer.WRITERS  # each had at most one commit under way

    feed = (await store.changes(0, limit=1_000_000)).changes
    assert [change.position for change in feed] == list(range(1, await store.version() + 1))
    assert len(feed) == 3 * len(new) + 1
    statistics = await store.statistics()
    assert statistics.history_bytes == sum(len(c.value or b"") for c in feed if c.collection == "pair") - sum(
        len(record.value) for record in pairs.values()
    )
