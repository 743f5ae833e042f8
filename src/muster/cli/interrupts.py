"""Reliable handling of Ctrl-C.

Python raises `KeyboardInterrupt` at an arbitrary point of the program.  Inside an import, a destructor or a
callback of the garbage collector the exception is printed or swallowed, and the program continues.  This
module therefore also records the interrupt and checks the record before a long operation starts.

1. While the first modules are loaded (`muster.__main__`), nothing has started: the signal ends the process.
2. After `listen`, an interrupt raises, and is recorded in case the exception is swallowed.
3. While an event loop runs (`interruptible`), the first interrupt cancels the running task, which then shuts
   down gracefully; the second raises.  SIGTERM and SIGHUP (the terminal was closed) count as interrupts
   there. Long-running commands (`muster up`) install their own handlers.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

_ENDS = (signal.SIGTERM, signal.SIGHUP)

_pressed = False
_running: asyncio.Task[object] | None = None


def listen() -> None:
    signal.signal(signal.SIGINT, _hear)


def is_ignored() -> bool:
    """A shell makes its background processes ignore Ctrl-C; that setting is kept."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def was_pressed() -> bool:
    return _pressed


def _hear(number: int, frame: FrameType | None) -> None:
    global _pressed
    again, _pressed = _pressed, True
    if again or _running is None or _running.done():
        raise KeyboardInterrupt
    _running.cancel()
    _running.get_loop().call_soon_threadsafe(lambda: None)  # wake it


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let an interrupt cancel the current task. An earlier interrupt counts too."""
    global _running
    import asyncio

    if was_pressed():
        raise KeyboardInterrupt
    task = asyncio.current_task()
    _running = task
    in_front = threading.current_thread() is threading.main_thread()
    handled = [ending for ending in _ENDS if in_front and signal.getsignal(ending) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _hear)
    try:
        yield
    except asyncio.CancelledError:
        if task is not None and was_pressed() and task.uncancel() == 0:
            raise KeyboardInterrupt from None
        raise
    finally:
        _running = None
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
