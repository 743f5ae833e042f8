"""The output of a process: a bounded file that readers follow by a cursor.

A process writes to ``output`` in the folder of its resource itself, so its output does not depend on the
agent. A file that exceeds the limit loses its first half. A cursor (``ID:POSITION``) counts the bytes since
the log began; it stays valid when the file is cut, the agent or the process is restarted, or the resource is
renamed. A reader that was too slow is told how many bytes it has missed. On another machine the log is
another one: its reader begins at its start.

``output.index`` beside it holds the id, the position of the file's first byte, and samples of time and
position: what was written after a time begins at the last sample before it, so ``since`` is accurate to the
interval of the samples, and never omits a line. Not promised: that lines written during a cut survive.
"""

from __future__ import annotations

import bisect
import codecs
import contextlib
import os
import pathlib
import secrets
import threading
from collections.abc import Callable

import msgspec

from muster.manage import protocol

BYTES_MAX = 8 << 20
SAMPLES_MAX = 2_000  # then every second one of the older half is dropped
TAIL_BYTES_MAX = 1 << 20  # in which the last lines are searched


class LogIndex(msgspec.Struct):
    """``first``: the position of the first byte in the file. ``samples``: times and positions, ascending."""

    id: str
    first: int = 0
    samples: list[tuple[int, int]] = []

    def add(self, at_ms: int, position: int) -> bool:
        """Note how far the log reaches. Returns whether that is new."""
        if self.samples and (position <= self.samples[-1][1] or at_ms <= self.samples[-1][0]):
            return False
        self.samples.append((at_ms, position))
        if len(self.samples) > SAMPLES_MAX:
            half = SAMPLES_MAX // 2
            self.samples[:half] = self.samples[:half:2]
        return True

    def since(self, at_ms: int) -> int:
        """A position before which nothing was written after that time."""
        number = bisect.bisect_right(self.samples, at_ms, key=lambda sample: sample[0])
        return max(self.first, self.samples[number - 1][1] if number else 0)

    def begin(self, cursor: str) -> int | None:
        """The position of a cursor; None if it belongs to another log."""
        id, _, position = cursor.partition(":")
        return int(position) if id == self.id and position.isdecimal() else None

    def cursor(self, position: int) -> str:
        return f"{self.id}:{position}"


class OutputLog:
    """``folder`` returns the folder of the resource, which may move; None: nothing is kept. All methods but
    `path` block."""

    def __init__(self, folder: Callable[[], pathlib.Path | None]) -> None:
        self._folder = folder
        self._index: LogIndex | None = None
        self._lock = threading.Lock()

    @property
    def path(self) -> pathlib.Path:
        folder = self._folder()
        return pathlib.Path(os.devnull) if folder is None else folder / "output"

    def open(self) -> int:
        """A descriptor for a process to write to."""
        if (folder := self._folder()) is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def look(self, now_ms: int) -> None:
        """Note what was written, and cut the file if it is too long; to be called again and again."""
        with self._lock, contextlib.suppress(OSError):
            size = self.path.stat().st_size
            if self._folder() is None or not size:
                return
            index = self._load()
            changed = index.add(now_ms, index.first + size)
            if size > BYTES_MAX:
                index.first += _cut(self.path, BYTES_MAX // 2)
                changed = True
            if changed:
                self._store(index)

    def page(self, query: protocol.LogQuery, now_ms: int) -> protocol.LogPage:
        """What follows the cursor; without one, the last lines, what was written since a time, or all."""
        with self._lock:
            index = self._load()
            try:
                end = index.first + self.path.stat().st_size
            except OSError:
                end = index.first
            return self._page(index, query, now_ms, end)

    def _page(self, index: LogIndex, query: protocol.LogQuery, now_ms: int, end: int) -> protocol.LogPage:
        position, dropped = index.begin(query.cursor), 0
        if position is not None:
            dropped = max(0, index.first - position)
            begin = min(max(position, index.first), end)
        else:
            begin = index.first
            if query.since_s is not None and not query.cursor:
                begin = min(end, index.since(now_ms - int(query.since_s * 1000)))
            if query.lines is not None and not query.cursor:
                begin = max(begin, self._last_lines(index, query.lines, end))
        until = index.begin(query.until)
        stop = end if until is None else min(end, until)
        data = _read(self.path, begin - index.first, max(0, min(query.bytes_max, stop - begin)))
        text, used, held = _fit(data, query.bytes_max)
        return protocol.LogPage(
            text=text,
            cursor=index.cursor(begin + used),
            end=index.cursor(end),
            is_last=begin + used + held >= stop,
            dropped=dropped,
        )

    def _last_lines(self, index: LogIndex, lines: int, end: int) -> int:
        """The position of the last ``lines`` lines."""
        if not lines:
            return end
        size = min(TAIL_BYTES_MAX, end - index.first)
        data = _read(self.path, end - index.first - size, size)
        at = len(data) - data.endswith(b"\n")
        for _ in range(lines):
            at = data.rfind(b"\n", 0, at)
            if at < 0:
                return end - size
        return end - len(data) + at + 1

    def _load(self) -> LogIndex:
        if self._index is None:
            try:
                self._index = msgspec.json.decode(self._index_path().read_bytes(), type=LogIndex)
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._index = LogIndex(secrets.token_hex(4))
                with contextlib.suppress(OSError):  # nothing was written yet: there is no folder
                    self._store(self._index)
        return self._index

    def _store(self, index: LogIndex) -> None:
        """Not synced: after a crash of the machine, samples are missing at most."""
        path = self._index_path()
        if self._folder() is not None:
            temporary = path.with_suffix(".new")
            temporary.write_bytes(msgspec.json.encode(index))
            temporary.replace(path)

    def _index_path(self) -> pathlib.Path:
        return self.path.with_suffix(".index")


def _read(path: pathlib.Path, offset: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except OSError:
        return b""


def _fit(data: bytes, bytes_max: int) -> tuple[str, int, int]:
    """As much of the text as fits in JSON, the number of its bytes, and the number of those of an incomplete
    character at the end."""
    while True:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        held = len(decoder.getstate()[0])
        if len(msgspec.json.encode(text)) <= bytes_max or len(data) < 2:
            return text, len(data) - held, held
        data = data[: len(data) // 2]


def _cut(path: pathlib.Path, kept: int) -> int:
    """Remove the beginning of a file, and return the number of removed bytes; its writer appends."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        removed = max(0, os.fstat(descriptor).st_size - kept)
        data = bytearray()
        while len(data) < 2 * kept and (more := os.pread(descriptor, kept, removed + len(data))):
            data += more  # also what is written meanwhile
        os.ftruncate(descriptor, 0)
        os.write(descriptor, data)
        return removed
    finally:
        os.close(descriptor)
