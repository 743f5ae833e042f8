"""Ctrl-C, which is never lost: whatever the command is doing when it comes.

Python raises `KeyboardInterrupt` wherever the program happens to be.  Inside an import, a destructor or a
callback of the garbage collector that is printed or swallowed, and the program goes on as if nobody had
pressed anything.  So the press is also remembered, and looked at before anything is started that lasts.

1. While the first modules are loaded (`muster.__main__`) nothing has been begun: the signal ends the process.
2. From `listen` on, a press raises, and is remembered should the exception be swallowed.
3. While an event loop runs (`heeding`), the first press cancels what runs, which then ends in order; the
   second raises.  A command that stays (`muster up`) takes the signal over from there.  Being told to end
   (SIGTERM), or the terminal that is closed (SIGHUP), is a press there too.
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
    """A shell has what it starts in the background ignore Ctrl-C: that is its wish, and ours to respect."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def was_pressed() -> bool:
    return _pressed


def _hear(number: int, frame: FrameType | None) -> None:
    global _pressed
    again, _pressed = _pressed, True
    if again or _running is None or _running.done():
        raise KeyboardInterrupt
    _running.cancel()
    _running.get_loop().call_soon_threadsafe(lambda: None)  # should it be asleep


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Around the work of the running task. A press that came earlier counts."""
    global _running
    import asyncio

    if was_pressed():
        raise KeyboardInterrupt
    task = asyncio.current_task()
    _running = task
    in_front = threading.current_thread() is threading.main_thread()
    heard = [one for one in _ENDS if in_front and signal.getsignal(one) is signal.SIG_DFL]
    for number in heard:
        signal.signal(number, _hear)
    try:
        yield
    except asyncio.CancelledError:
        if task is not None and was_pressed() and task.uncancel() == 0:
            raise KeyboardInterrupt from None
        raise
    finally:
        _running = None
        for number in heard:
            signal.signal(number, signal.SIG_DFL)
