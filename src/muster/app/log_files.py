"""Log output of processes: to stderr in the foreground, to a file with a size limit when detached.

A log is stored in several pieces: the current one and numbered older ones. Together they never exceed their
share of ``retention.logs``, and older pieces are deleted at the maximum age. Brokers write their own files;
`broker_file_bytes` is their share of the same budget. The output of other processes goes through a pipe to
the domain's process, which writes a file for each (`CapturedProcess`).
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

from muster.core import files
from muster.core.settings import domain
from muster.core.telemetry import log
from muster.supervision import children, tasks

events = log.EventLog("app")

PIECES = 4  # per log: the current and three older ones
CHUNK_BYTES = 64 << 10
WORDS_MAX = 300
LINGER_S = 2.0
_BROKER_PIECES = 4  # the number that a broker keeps, and the current one


def file_bytes(settings: domain.BaseSettings, processes: int = 1) -> int:
    """The size at which a log starts a new piece: a quarter of the budget for the domain's process, and a
    quarter for the ``processes`` it started.
    """
    return settings.retention.logs.max_bytes // 4 // PIECES // processes


def broker_file_bytes(settings: domain.BaseSettings, brokers: int) -> int:
    """The same for each broker, from the other half of the budget."""
    return settings.retention.logs.max_bytes // 2 // (brokers * _BROKER_PIECES)


def configure(settings: domain.BaseSettings, file: Path | None = None) -> Callable[[], None]:
    """Send events to ``file``, or to stderr; the returned function undoes it."""
    stream: TextIO = sys.stderr
    if file is not None:
        stream = cast(TextIO, RotatingFile(file, file_bytes(settings), settings.retention.logs.max_age_s))
    undo = log.configure(stream, level=settings.log.level, form=settings.log.format)
    # Log output of libraries goes the same way, because nothing else limits it.
    handler = logging.getLogger(log.ROOT).handlers[-1]
    logging.getLogger().addHandler(handler)

    def end() -> None:
        logging.getLogger().removeHandler(handler)
        undo()
        if file is not None:
            stream.close()

    return end


def last_words(file: Path) -> str:
    """The last line of a log, if it is no event but an error that ended the process. Blocks."""
    with contextlib.suppress(OSError), file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - CHUNK_BYTES))
        line = opened.read().decode(errors="replace").rstrip().rpartition("\n")[2]
        return "" if line.startswith("{") else line[:WORDS_MAX]
    return ""


class CapturedProcess:
    """A process whose output is written into ``file`` (a `children.ProcessHandle`)."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        file: Path,
        settings: domain.BaseSettings,
        *,
        processes: int,
    ) -> None:
        assert process.stdout is not None
        self._process = process
        self._tasks = tasks.TaskSupervisor(f"log {file.name}")
        self._capture = self._tasks.spawn(
            "capture", _capture_output(process.stdout, file, settings, processes=processes)
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Wait for its end and the rest of its output. Its own children may still hold the pipe."""
        code = await children.exit_code(self._process)
        await asyncio.wait((self._capture,), timeout=LINGER_S)
        await self._tasks.close()
        return code

    def send_signal(self, number: int, /) -> None:
        children.send_signal(self._process, number)


async def _capture_output(
    output: asyncio.StreamReader, file: Path, settings: domain.BaseSettings, *, processes: int
) -> None:
    """Write the output of a process into ``file`` until it ends. It is read in any case: a process whose
    output is not read stops.
    """
    log_file: RotatingFile | None = None
    try:
        log_file = await asyncio.to_thread(
            RotatingFile, file, file_bytes(settings, processes), settings.retention.logs.max_age_s
        )
    except OSError as error:
        events.error("output-lost", file=file.name, error=error)
    try:
        while data := await output.read(CHUNK_BYTES):
            if log_file is not None:
                await asyncio.to_thread(log_file.write, data.decode(errors="replace"))
    finally:
        if log_file is not None:
            log_file.close()


class RotatingFile(io.TextIOBase):
    """A text stream into a file that rotates when full. A full disk loses lines, but never fails the
    process.
    """

    def __init__(self, path: Path, max_bytes: int, max_age_s: float) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._file = files.open_private(path, "ab")
        self._size = path.stat().st_size
        self._remove_old()
        self.lost = 0  # lines that could not be written

    def write(self, text: str) -> int:
        data = text.encode(errors="replace")
        try:
            if self._size and self._size + len(data) > self._max_bytes:
                self._rotate()
            self._size += self._file.write(data)
        except OSError:
            self.lost += 1
        return len(text)

    def isatty(self) -> bool:
        return False

    def close(self) -> None:
        if hasattr(self, "_file"):  # Python closes also what could not be opened
            self._file.close()
        super().close()

    def _piece(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _rotate(self) -> None:
        """Open the new piece first: if that fails, the older ones stay, and only lines are lost."""
        draft = self._path.with_name(f".{self._path.name}.new")
        fresh = files.open_private(draft, "wb")
        try:
            for number in range(PIECES - 1, 0, -1):
                older = self._piece(number - 1) if number > 1 else self._path
                with contextlib.suppress(FileNotFoundError):
                    older.replace(self._piece(number))
            draft.replace(self._path)
        except OSError:
            fresh.close()
            raise
        self._file.close()
        self._file, self._size = fresh, 0
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove older pieces past their age."""
        if not self._max_age_s:
            return
        for number in range(1, PIECES):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - self._piece(number).stat().st_mtime > self._max_age_s:
                    self._piece(number).unlink()
