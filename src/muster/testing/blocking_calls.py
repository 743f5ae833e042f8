"""Fails tests in which Muster's code blocks the event loop.

Uses blockbuster, if it is installed. Forbidden in coroutines and callbacks of Muster: sleeping, blocking
sockets, SQL, waiting for a lock of another thread, waiting for a child process, syncing a file. Allowed:
reading and writing small files, because that takes microseconds from the page cache and a thread would cost
more; only the sync blocks. A test's own coroutine may block, also by calling a plain function of Muster: the
coroutine that runs on the loop is responsible.
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

_ALLOWED = ("os.", "io.")
_ALSO = ("os.fsync", "os.fdatasync", "subprocess.Popen.wait", "subprocess.Popen.communicate")

_TESTING = str(Path(__file__).parent)
_MUSTER = str(Path(__file__).parents[1])
_HOLDS_THE_LOOP = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE

_active: BlockBuster | None = None


def forbid() -> Callable[[], None]:
    """Forbid blocking calls in this process. Returns the function that ends it."""
    global _active
    try:
        import blockbuster
    except ImportError:
        return lambda: None
    guard = blockbuster.BlockBuster()
    for name in [name for name in guard.functions if name.startswith(_ALLOWED)]:
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
    """Whether the running coroutine or callback belongs to Muster."""
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
