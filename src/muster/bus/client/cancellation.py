"""Cancellations that a library swallows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def cancellable() -> Iterator[None]:
    """Raise a cancellation again that was swallowed: nats-py does that while it flushes, and in Python 3.11
    `asyncio.wait_for` does if its future completes at the same time. A timeout would have no effect."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    yield
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
