"""What callers learn when the engine fails in the middle of a commit."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from muster.core import errors
from muster.store import api, commit_plan, database, engine, group_commit
from muster.store.sqlite import statements

COMMIT = commit_plan.Commit({})


class FailingEngine:
    """``fail`` is called with each batch, before it is stored."""

    def __init__(self, fail: Callable[[int], Any]) -> None:
        self.batches: list[int] = []
        self._fail = fail

    async def commit(self, batch: Sequence[commit_plan.Commit]) -> list[int | errors.MusterError]:
        self.batches.append(len(batch))
        await self._fail(len(batch))
        return list(range(len(batch)))


def committer(fake: FailingEngine) -> group_commit.StoreCommitter:
    return group_commit.StoreCommitter(cast(engine.StorageEngine, fake), 100, lambda: None)


async def test_after_an_unknown_failure_of_the_engine_the_outcome_is_unknown():
    failures = [RuntimeError("a defect")]

    async def fail(_: int) -> None:
        if failures:
            raise failures.pop()

    commits = committer(FailingEngine(fail))
    with pytest.raises(api.CommitOutcomeUnknown, match="a defect") as failure:
        await commits.submit(COMMIT, 1)
    cause = failure.value.__cause__
    assert cause is not None
    assert isinstance(cause.__cause__, RuntimeError)
    assert await commits.submit(COMMIT, 1) == 0  # the committer continues
    await commits.close()


async def test_a_cancelled_commit_is_unknown_and_those_behind_it_were_not_stored():
    begun = asyncio.Event()

    async def hang(_: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    commits = committer(FailingEngine(hang))
    first = asyncio.create_task(commits.submit(COMMIT, 1))
    await begun.wait()
    second = asyncio.create_task(commits.submit(COMMIT, 1))
    closing = asyncio.create_task(commits.close())
    await asyncio.sleep(0)
    closing.cancel()
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(first, second, closing, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [
        api.CommitOutcomeUnknown,
        errors.NotConnected,
        asyncio.CancelledError,
    ]
    with pytest.raises(errors.NotConnected):
        await commits.submit(COMMIT, 1)


async def test_cancelled_while_the_commits_of_a_full_disk_are_tried_one_by_one():
    alone = asyncio.Event()

    async def full(size: int) -> None:
        if size > 1:
            raise api.StoreFull("no room")
        alone.set()
        await asyncio.Event().wait()

    fake = FailingEngine(full)
    commits = committer(fake)
    waiting = [asyncio.create_task(commits.submit(COMMIT, 1)) for _ in range(3)]
    await alone.wait()
    commits._task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await commits._task
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert fake.batches == [3, 1]
    assert [type(outcome) for outcome in outcomes] == [
        api.CommitOutcomeUnknown,
        errors.NotConnected,
        errors.NotConnected,
    ]


async def test_a_sqlite_commit_whose_sync_fails_is_unknown(tmp_path, monkeypatch):
    class Unsynced(sqlite3.Connection):
        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            if sql == "COMMIT":
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
                raise error
            return super().execute(sql, *arguments)

    async with await database.open(f"sqlite:{tmp_path}/store.db") as store:
        await store.put("a", "k", b"1")
        real = statements.commit

        def commit(_: sqlite3.Connection, *arguments: Any) -> list[int | errors.MusterError]:
            path = f"{tmp_path}/store.db"
            with contextlib.closing(sqlite3.connect(path, isolation_level=None, factory=Unsynced)) as other:
                return real(other, *arguments)

        monkeypatch.setattr(statements, "commit", commit)
        with pytest.raises(api.CommitOutcomeUnknown, match="disk I/O error"):
            await store.put("a", "k", b"2")
