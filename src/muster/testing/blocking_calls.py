"""Muster's code may not block the event loop: a test in which it does fails.

Built on blockbuster, where that is installed.  Forbidden in a coroutine or a callback of Muster's: sleeping,
blocking sockets, SQL, waiting for a lock that another thread holds, waiting for a child process, syncing a
file.  Not forbidden: reading and writing small files.  That takes microseconds from the page cache, and a
detour through a thread would cost more than it saves; what blocks is the sync.  A test's own coroutine may
block, also by calling a plain function of Muster's: whoever holds the loop answers for it.
"""

from __future__ import annotations

import asyncio.events
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockbuster import BlockBuster

_HARMLESS = ("os.", "io.")
_ALSO = ("os.fsync", "os.fdatasync", "subprocess.Popen.wait", "subprocess.Popen.communicate")

_TESTING = str(Path(__file__).parent)
_MUSTER = str(Path(__file__).parents[1])
_HOLDS_THE_LOOP = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE

_active: BlockBuster | None = None


def forbid() -> Callable[[], None]:
    """From now on, in this process. Returns the function that ends it."""
    global _active
    try:
        import blockbuster
    except ImportError:
        return lambda: None
    guard = blockbuster.BlockBuster()
    for name in [name for name in guard.functions if name.startswith(_HARMLESS)]:
        del guard.functions[name]
    for name in _ALSO:
        guard.functions[name] = blockbuster.BlockBusterFunction(None, name)
    for function in guard.functions.values():
        function.can_block_predicate = _unless_ours(function.can_block_predicate)
    guard.activate()
    _active = guard

    def end() -> None:
        global _active
        guard.deactivate()
        _active = None

    return end


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    guard = _active
    if guard is None:
        yield
        return
    guard.deactivate()
    try:
        yield
    finally:
        guard.activate()


def _unless_ours(does_not_block: Callable[..., bool]) -> Callable[..., bool]:
    def may(*args: Any, **kwargs: Any) -> bool:
        return does_not_block(*args, **kwargs) or not _is_ours(sys._getframe(1))

    return may


def _is_ours(frame: FrameType | None) -> bool:
    """Whether a coroutine of Muster's, or a callback that runs through its code, holds the loop."""
    through_ours = False
    while frame is not None:
        file = frame.f_code.co_filename
        ours = file.startswith(_MUSTER) and not file.startswith(_TESTING)
        if frame.f_code.co_flags & _HOLDS_THE_LOOP:
            return ours
        through_ours = through_ours or ours
        if file == asyncio.events.__file__:
            return through_ours
        frame = frame.f_back
    return through_ours
