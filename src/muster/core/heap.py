"""Memory that was taken for a while: free again, but the system's only if the C library is asked to.

A process that has read a million records keeps the room they passed through, tens of bytes for each, unless
it gives it back.
"""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Takes milliseconds, and nothing where the C library knows no such thing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
