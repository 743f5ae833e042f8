"""`eventually` and `throughout`: wait for a state, not for a delay.

A test states what must become true and how long that may take; the polling happens here, so no test sleeps.
The interval starts at a millisecond and grows, so fast conditions are noticed at once and slow ones are not
polled too often. `throughout` checks that something does *not* happen.
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

    A condition that raises AssertionError is not true yet; other exceptions are raised.  After ``timeout_s``
    it fails with the last value or assertion, and with the name ``what``.
    """
    wait_s = FIRST_WAIT_S
    seen = "it never returned"
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
        f"{what or _name(condition)} did not become true within {timeout_s:g} s; {seen[:SHOWN_CHARACTERS]}"
    ) from cause


async def throughout(
    condition: Callable[[], object | Awaitable[object]], *, for_s: float, what: str | None = None
) -> None:
    """Fails as soon as ``condition`` is false; returns after it was true for ``for_s``."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        passed_s = loop.time() - start
        if not value:
            raise AssertionError(
                f"{what or _name(condition)} was no longer true after {passed_s:.3f} s; value: {value!r}"
            )
        if passed_s >= for_s:
            return
        await asyncio.sleep(min(LONGEST_WAIT_S, for_s - passed_s))


def _name(condition: Callable[[], object]) -> str:
    """The source of a one-line lambda, or the function's name."""
    name: str = getattr(condition, "__name__", repr(condition))
    if name != "<lambda>":
        return name
    try:
        source = inspect.getsource(condition).strip()
    except OSError:
        return name
    return source if "\n" not in source else name
