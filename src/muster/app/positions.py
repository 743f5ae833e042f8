"""How far a component has read a stream: a number in a file of the domain's folder, kept at a restart.

A backup copies the files before the streams, so that a position is never ahead of its stream.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from muster.core import errors, files

FOLDER = "positions"


class StoredPosition:
    def __init__(self, folder: Path, name: str) -> None:
        """``folder``: of the domain."""
        self._path = folder / FOLDER / name

    async def load(self) -> int | None:
        """None if none was stored."""
        try:
            return int(await asyncio.to_thread(self._path.read_text))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise errors.Unavailable(f"the position in {self._path} cannot be read: {error}") from error

    async def store(self, position: int) -> None:
        try:
            await asyncio.to_thread(self._write, position)
        except OSError as error:
            raise errors.Unavailable(f"{self._path} cannot be written: {error.strerror}") from error

    def _write(self, position: int) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        files.write(self._path, b"%d" % position)
