"""Returns freed memory to the system, which the C library does only on request.

A process that has read a million records retains the memory it used for them, tens of bytes for each, until
it returns it.
"""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Takes milliseconds; no effect where the C library has no such function."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
