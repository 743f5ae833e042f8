"""Muster's code may not block the event loop: a test in which it does fails.

Built on blockbuster, where that is installed.  Forbidden on a running loop, when one of Muster's own files
is among the callers: sleeping, blocking sockets, SQL, waiting for a lock that another thread holds, waiting
for a child process, syncing a file.  Not forbidden: reading and writing small files.  That takes
microseconds from the page cache, and a detour through a thread would cost more than it saves; what blocks is
the sync.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockbuster import BlockBuster

_HARMLESS = ("os.", "io.")
_ALSO = ("os.fsync", "os.fdatasync", "subprocess.Popen.wait", "subprocess.Popen.communicate")

_active: BlockBuster | None = None


def forbid() -> Callable[[], None]:
    """From now on, in this process. Returns the function that ends it."""
    global _active
    try:
        import blockbuster
    except ImportError:
        return lambda: None
    guard = blockbuster.BlockBuster(["muster"], excluded_modules=["muster.testing"])
    for name in [name for name in guard.functions if name.startswith(_HARMLESS)]:
        del guard.functions[name]
    for name in _ALSO:
        guard.functions[name] = blockbuster.BlockBusterFunction(
            None, name, scanned_modules=["muster"], excluded_modules=["muster.testing"]
        )
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
