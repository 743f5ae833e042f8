"""Waiting for the signals that end a process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable


@contextlib.asynccontextmanager
async def on_signal(act: Callable[[], None]) -> AsyncIterator[None]:
    """Call ``act`` on SIGINT or SIGTERM, in place of what they do by default."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def until_signal() -> AsyncIterator[asyncio.Event]:
    """An event that SIGINT or SIGTERM sets, for a graceful shutdown."""
    stop = asyncio.Event()
    async with on_signal(stop.set):
        yield stop
