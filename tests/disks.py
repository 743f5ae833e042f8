"""Disks that are really full."""

from __future__ import annotations

import contextlib
from pathlib import Path


def fill(disk: Path) -> Path:
    """Not a byte more fits there. What to remove to make room again."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    return ballast
