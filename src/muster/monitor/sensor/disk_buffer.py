"""A bounded buffer on disk for reports that could not be sent, in order.

Lines (base64) in segment files; the oldest segment is removed when the buffer is full, and its reports are
counted.  Writes are not synced.  After a crash some reports may be sent twice, which channels detect; an
incomplete line is skipped.

Blocking; the sensor calls it in a thread.  A buffer belongs to one process.
"""

from __future__ import annotations

import binascii
import contextlib
from pathlib import Path

SEGMENTS = 16  # removed one at a time


class ReportBuffer:
    def __init__(self, folder: Path, *, bytes_max: int = 16 << 20) -> None:
        self._folder = folder
        self._segment_bytes = max(1, bytes_max // SEGMENTS)
        folder.mkdir(parents=True, exist_ok=True)
        self._counts = {number: self._count(number) for number in self._numbers()}
        self._read = 0  # processed lines of the first segment
        self.dropped = 0  # reports that were removed unsent

    def __len__(self) -> int:
        return sum(self._counts.values()) - self._read

    def append(self, report: bytes) -> None:
        line = binascii.b2a_base64(report)
        last = max(self._counts, default=0)
        if not last or self._size(last) + len(line) > self._segment_bytes:
            last += 1
            self._counts[last] = 0
            while len(self._counts) > SEGMENTS:
                self._drop_first()
        with self._path(last).open("ab") as file:
            file.write(line)
        self._counts[last] += 1

    def peek(self, most: int) -> list[bytes]:
        """The oldest reports, at most ``most``. They remain until `done`."""
        if not self._counts:
            return []
        first = min(self._counts)
        lines = self._path(first).read_bytes().split(b"\n")[:-1] if self._path(first).exists() else []
        return [_report(line) for line in lines[self._read : self._read + most]]

    def done(self, count: int) -> None:
        """Remove the first ``count`` reports of `peek`."""
        self._read += count
        first = min(self._counts)
        if self._read >= self._counts[first]:
            self._remove(first)

    def _drop_first(self) -> None:
        first = min(self._counts)
        self.dropped += self._counts[first] - self._read
        self._remove(first)

    def _remove(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path(number).unlink()
        del self._counts[number]
        self._read = 0

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012}.reports"

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*.reports") if path.stem.isdecimal())

    def _size(self, number: int) -> int:
        try:
            return self._path(number).stat().st_size
        except FileNotFoundError:
            return 0

    def _count(self, number: int) -> int:
        """The number of complete lines; an incomplete last line is removed."""
        path = self._path(number)
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            path.write_bytes(data[: data.rfind(b"\n") + 1])
        return data.count(b"\n")


def _report(line: bytes) -> bytes:
    """A damaged line is returned as it is: a channel refuses and counts it."""
    try:
        return binascii.a2b_base64(line, strict_mode=True)
    except binascii.Error:
        return line
