"""Group commit: the commits that wait together share one sync.

While the engine writes a batch, the next commits are queued; so a single caller pays for a complete sync, and
a thousand concurrent ones share it. Each call returns only after the commit of the engine.

If the engine fails on a batch for lack of space, its commits are tried one by one: a large one must not fail
the small ones of the same batch.

A commit that the engine did not begin was not stored. If it began one and neither stored nor refused it, the
caller gets `api.CommitOutcomeUnknown`.
"""

from __future__ import annotations

import asyncio
import collections
import copy
from collections.abc import Callable

import msgspec

from muster.core import errors
from muster.store import api, commit_plan, engine
from muster.supervision import tasks

BATCH_COMMITS_MAX = 1_000
BATCH_BYTES_MAX = 16 << 20


class CommitCounters(msgspec.Struct):
    commits: int = 0
    batches: int = 0
    overtaken: int = 0
    conflicts: int = 0
    stale_epochs: int = 0
    over_budget: int = 0
    failures: int = 0


class _Waiting(msgspec.Struct, frozen=True):
    commit: commit_plan.Commit
    bytes: int
    answer: asyncio.Future[int]


class StoreCommitter:
    """Owns the task that passes batches to the engine. ``committed`` is called after each."""

    def __init__(self, target: engine.StorageEngine, waiting_max: int, committed: Callable[[], None]) -> None:
        self.counters = CommitCounters()
        self._target = target
        self._waiting_max = waiting_max
        self._committed = committed
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._single = 0  # commits at the front of the queue that are tried one by one
        self._task = tasks.TaskSupervisor("store").loop("commits", self._run)
        self._task.add_done_callback(lambda _: self._end())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def submit(self, commit: commit_plan.Commit, size_bytes: int) -> int:
        """Returns its version when it is on disk. The commit of a cancelled caller may have been stored."""
        if self._closing:
            raise errors.NotConnected("the store is closed")
        if len(self._waiting) >= self._waiting_max:
            self.counters.failures += 1
            raise errors.Overloaded(
                f"{self._waiting_max} commits are waiting for the disk already", retry_after_s=0.1
            )
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(commit, size_bytes, answer))
        self._wake.set()
        return await answer

    async def close(self) -> None:
        """Submitted commits are still completed."""
        self._closing = True
        self._wake.set()
        await self._task

    async def _run(self) -> None:
        while self._waiting or not self._closing:
            if self._waiting:
                await self._commit(self._take())
            else:
                self._wake.clear()
                await self._wake.wait()

    def _end(self) -> None:
        """Answer the commits that a cancelled task left in the queue."""
        self._closing = True
        waiting, self._waiting = list(self._waiting), collections.deque()
        self._fail(waiting, errors.NotConnected("the store was closed before the commit began"))

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size_bytes = 0
        commits_max = 1 if self._single else BATCH_COMMITS_MAX
        self._single = max(0, self._single - 1)
        while self._waiting and len(batch) < commits_max:
            size_bytes += self._waiting[0].bytes
            if batch and size_bytes > BATCH_BYTES_MAX:
                break
            waiting = self._waiting.popleft()
            if not waiting.answer.cancelled():
                batch.append(waiting)
        return batch

    async def _commit(self, batch: list[_Waiting]) -> None:
        if not batch:
            return
        try:
            outcomes = await self._target.commit([waiting.commit for waiting in batch])
        except api.StoreFull as error:
            if len(batch) == 1:
                self._fail(batch, error)
            else:
                self._waiting.extendleft(reversed(batch))
                self._single = len(batch)
            return
        except errors.MusterError as error:
            self._fail(batch, error)
            return
        except asyncio.CancelledError as error:
            self._fail(batch, _unknown("the commit was interrupted", error))
            raise
        except Exception as error:  # noqa: BLE001  (any error is passed to the callers, and the task continues)
            self._fail(batch, _unknown(f"the store's engine failed in an unknown way: {error!r}", error))
            return
        self.counters.batches += 1
        for waiting, outcome in zip(batch, outcomes, strict=True):
            self._answer(waiting, outcome)
        self._committed()

    def _fail(self, batch: list[_Waiting], error: errors.MusterError) -> None:
        for waiting in batch:
            own = copy.copy(error)  # raised by one caller only
            own.__cause__ = error
            self._answer(waiting, own)

    def _answer(self, waiting: _Waiting, outcome: int | errors.MusterError) -> None:
        counters = self.counters
        match outcome:
            case int():
                counters.commits += 1
            case api.TransactionConflict():
                counters.overtaken += 1
            case errors.Conflict():
                counters.conflicts += 1
            case errors.StaleEpoch():
                counters.stale_epochs += 1
            case errors.LimitExceeded():
                counters.over_budget += 1
            case _:
                counters.failures += 1
        if waiting.answer.done():
            return
        if isinstance(outcome, int):
            waiting.answer.set_result(outcome)
        else:
            waiting.answer.set_exception(outcome)


def _unknown(why: str, cause: BaseException) -> api.CommitOutcomeUnknown:
    error = api.CommitOutcomeUnknown(why, hint=api.OUTCOME_HINT)
    error.__cause__ = cause
    return error
