"""Cancels a coroutine at each of its awaits in turn, so that a test sees what a cancellation leaves behind.

    async def check() -> None:
        assert not registry.waiting

    await cancellation.at_each_await(lambda: registry.call(), check)

At each await there are two moments: while it waits, and when the awaited result has arrived but the coroutine
has not run on. At the second moment a result that nobody owns yet is lost: an acquired slot, a subscription.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

AWAITS_MAX = 500
END_S = 30.0  # a cancelled call that takes longer does not end


class _Steps:
    """Passes every suspension of ``work`` on to the event loop, and cancels its task at the ``place``-th."""

    def __init__(self, work: Awaitable[Any], place: int, *, with_result: bool) -> None:
        self._work = work
        self._left = place
        self._with_result = with_result
        self.cancelled_at: str | None = None

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._work.__await__()
        resume: Callable[[], Any] = functools.partial(next, inner)
        while True:
            try:
                awaited = resume()
            except StopIteration as end:
                return end.value
            if self._left == 0:
                self.cancelled_at = _place_of(self._work)
                self._cancel(awaited)
            self._left -= 1
            try:
                result = yield awaited
            except BaseException as error:  # noqa: BLE001 - the inner coroutine handles it
                resume = functools.partial(inner.throw, error)
            else:
                resume = functools.partial(inner.send, result)

    def _cancel(self, awaited: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        if not self._with_result:
            task.cancel()
        elif isinstance(awaited, asyncio.Future):
            awaited.add_done_callback(
                lambda _: task.cancel()
            )  # runs before the callback that resumes the task
        else:
            asyncio.get_running_loop().call_soon(task.cancel)


def _place_of(work: Any) -> str:
    """The function and the line in which ``work`` waits."""
    place = "?"
    while work is not None:
        frame = getattr(work, "cr_frame", None) or getattr(work, "ag_frame", None)
        if frame is not None:
            place = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        work = getattr(work, "cr_await", None) or getattr(work, "ag_await", None)
    return place


async def at_each_await(
    call: Callable[[], Coroutine[Any, Any, Any]],
    check: Callable[[], Awaitable[None]],
    *,
    undo: Callable[[Any], Awaitable[Any]] | None = None,
) -> int:
    """Cancel ``call()`` at its first await, then a new one at its second, and so on; ``check`` after each.

    Ends with calls that are not cancelled, whose results ``undo`` receives. Returns the number of
    cancellations. Fails if a cancelled call returns a result, raises another error, or does not end.
    """
    cancellations = 0
    for with_result in (False, True):
        for place in itertools.count():
            assert place < AWAITS_MAX
            steps = _Steps(call(), place, with_result=with_result)
            task = asyncio.ensure_future(_run(steps))
            done, _ = await asyncio.wait({task}, timeout=END_S)
            about = f"cancelled at await {place} ({steps.cancelled_at}){' with its result' * with_result}"
            assert done, f"{about}: it does not end"
            if steps.cancelled_at is None:
                result = task.result()
                if undo is not None:
                    await undo(result)
                break
            assert task.cancelled(), f"{about}: it ended with {task.exception() or task.result()!r}"
            cancellations += 1
            try:
                await check()
            except AssertionError as error:
                error.add_note(about)
                raise
    return cancellations


async def _run(steps: _Steps) -> Any:
    return await steps
