"""`eventually` and `throughout`: wait for a state, not for a delay.

A test says what must come true and how long that may take; the small waits in between are this file's
business, so no test sleeps.  The wait begins at a millisecond and grows, so that quick things are noticed at
once and slow ones are not polled to death.  For what must *not* happen there is `throughout`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")

FIRST_WAIT_S = 0.001
LONGEST_WAIT_S = 0.05
SHOWN_CHARACTERS = 1000


@overload
async def eventually(
    condition: Callable[[], Awaitable[T]], *, timeout_s: float = ..., what: str | None = ...
) -> T: ...
@overload
async def eventually(condition: Callable[[], T], *, timeout_s: float = ..., what: str | None = ...) -> T: ...
async def eventually(
    condition: Callable[[], Any], *, timeout_s: float = 30.0, what: str | None = None
) -> Any:
    """The first true value of ``condition``, which may be a coroutine function.

    A condition that raises AssertionError is not true yet; any other error of it passes through.  When
    ``timeout_s`` has passed, fails with the last value or the last assertion, under the name ``what``.
    """
    wait_s = FIRST_WAIT_S
    seen = "it never answered"
    cause: AssertionError | None = None
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            while True:
                try:
                    value = condition()
                    if inspect.isawaitable(value):
                        value = await value
                    if value:
                        return value
                    seen, cause = f"last value: {value!r}", None
                except AssertionError as not_yet:
                    seen, cause = f"last failure: {not_yet}", not_yet
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 1.5, LONGEST_WAIT_S)
    except TimeoutError:
        if not limit.expired():
            raise
    raise AssertionError(
        f"{what or _name(condition)} did not come true in {timeout_s:g} s; {seen[:SHOWN_CHARACTERS]}"
    ) from cause


async def throughout(
    condition: Callable[[], object | Awaitable[object]], *, for_s: float, what: str | None = None
) -> None:
    """Fails as soon as ``condition`` is not true; returns when it was true for ``for_s``."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        passed_s = loop.time() - start
        if not value:
            raise AssertionError(
                f"{what or _name(condition)} was not true any more after {passed_s:.3f} s; value: {value!r}"
            )
        if passed_s >= for_s:
            return
        await asyncio.sleep(min(LONGEST_WAIT_S, for_s - passed_s))


def _name(condition: Callable[[], object]) -> str:
    """The text of a one-line lambda, or the function's name."""
    name: str = getattr(condition, "__name__", repr(condition))
    if name != "<lambda>":
        return name
    try:
        source = inspect.getsource(condition).strip()
    except OSError:
        return name
    return source if "\n" not in source else name
