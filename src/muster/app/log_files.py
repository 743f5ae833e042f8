"""Where a process's events go: to stderr in front, to a file with a budget when detached.

The file is kept in a few pieces: the current one and older ones with a number.  Together they never exceed
their share of ``retention.logs``, and older pieces go when they are past its age.  Brokers write their own
files; `broker_file_bytes` is their share of the same budget.  What other processes of the domain say,
whatever it is, goes through a pipe to the domain's process, which keeps it in such a file for each (`keep`).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, cast

from muster.core.settings import domain
from muster.core.telemetry import log

PIECES = 4  # of one log: the current and three older ones
CHUNK_BYTES = 64 << 10
LINGER_S = 2.0
_BROKER_PIECES = 4  # as many as the engine is told to keep, and the current one


def file_bytes(settings: domain.BaseSettings, processes: int = 1) -> int:
    """The size at which a log turns to a new piece: a quarter of the budget is the domain's own process's,
    and a quarter that of the ``processes`` it started."""
    return settings.retention.logs.max_bytes // 4 // PIECES // processes


def broker_file_bytes(settings: domain.BaseSettings, brokers: int) -> int:
    """The same for each broker: the other half is theirs."""
    return settings.retention.logs.max_bytes // 2 // (brokers * _BROKER_PIECES)


def configure(settings: domain.BaseSettings, file: Path | None = None) -> Callable[[], None]:
    """Send events to ``file``, or to stderr; the returned function ends that."""
    stream: TextIO = sys.stderr
    if file is not None:
        stream = cast(TextIO, RotatingFile(file, file_bytes(settings), settings.retention.logs.max_age_s))
    undo = log.configure(stream, level=settings.log.level, form=settings.log.format)
    # What libraries complain of goes the same way: nothing else bounds it.
    handler = logging.getLogger(log.ROOT).handlers[-1]
    logging.getLogger().addHandler(handler)

    def end() -> None:
        logging.getLogger().removeHandler(handler)
        undo()
        if file is not None:
            stream.close()

    return end


async def capture_output(
    said: asyncio.StreamReader, file: Path, settings: domain.BaseSettings, *, processes: int
) -> None:
    """Write what a process says into ``file``, until it says no more."""
    kept = await asyncio.to_thread(
        RotatingFile, file, file_bytes(settings, processes), settings.retention.logs.max_age_s
    )
    try:
        while data := await said.read(CHUNK_BYTES):
            await asyncio.to_thread(kept.write, data.decode(errors="replace"))
    finally:
        kept.close()


async def end_captures(*keeping: asyncio.Task[None]) -> None:
    """End tasks of `keep` whose processes have ended. What those started may still hold the pipe."""
    if keeping:
        await asyncio.wait(keeping, timeout=LINGER_S)
    for task in keeping:
        task.cancel()
    await asyncio.gather(*keeping, return_exceptions=True)


class RotatingFile(io.TextIOBase):
    """A text stream into a file that starts anew when full. A full disk costs lines, never the process."""

    def __init__(self, path: Path, max_bytes: int, max_age_s: float) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._forget()
        self.lost = 0  # lines that could not be written

    def write(self, text: str) -> int:
        data = text.encode(errors="replace")
        try:
            if self._size and self._size + len(data) > self._max_bytes:
                self._turn()
            self._size += self._file.write(data)
        except OSError:
            self.lost += 1
        return len(text)

    def isatty(self) -> bool:
        return False

    def close(self) -> None:
        self._file.close()
        super().close()

    def _piece(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _turn(self) -> None:
        """The new piece is opened first: where that fails, the older ones stay, and only lines are lost."""
        beside = self._path.with_name(f".{self._path.name}.new")
        fresh = beside.open("wb", buffering=0)
        try:
            for number in range(PIECES - 1, 0, -1):
                older = self._piece(number - 1) if number > 1 else self._path
                with contextlib.suppress(FileNotFoundError):
                    older.replace(self._piece(number))
            beside.replace(self._path)
        except OSError:
            fresh.close()
            raise
        self._file.close()
        self._file, self._size = fresh, 0
        self._forget()

    def _forget(self) -> None:
        """Remove older pieces past their age."""
        if not self._max_age_s:
            return
        for number in range(1, PIECES):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - self._piece(number).stat().st_mtime > self._max_age_s:
                    self._piece(number).unlink()
