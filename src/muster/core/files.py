"""Atomic file replacement: after a crash a file has its complete old or its complete new content.

`write` replaces a file, `create` refuses to: both write to a temporary file in the same folder, set its
mode, sync it, give it its name and sync the folder.  The mode is that of the new file, not of the one
replaced, so a secret that is written over a readable file becomes private.  `locked` serialises the processes
that read a file, change it and write it back.

All of this blocks, and raises `OSError`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

PRIVATE = 0o600
PUBLIC = 0o644


def write(path: Path, data: bytes, *, mode: int = PRIVATE) -> None:
    """Replace ``path``. Of a symbolic link the target is replaced, and the link stays."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    _place(target, data, mode, os.replace)


def create(path: Path, data: bytes, *, mode: int = PRIVATE) -> None:
    """Write a new file; `FileExistsError` if another process created it first."""
    _place(path, data, mode, os.link)


def append_line(path: Path, line: bytes) -> None:
    """Append a line without its end. The rest of a line that was written in part before, by a process that
    ended or on a full disk, becomes a line of its own."""
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n":
            line = b"\n" + line
        file.write(line + b"\n")


def _place(path: Path, data: bytes, mode: int, name_it: Callable[[str, Path], None]) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # made with 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        name_it(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make a name that was just put into the folder as durable as the data it names."""
    _sync(path, os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make the content of a file durable that another library wrote."""
    _sync(path, 0)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``, created if missing. The kernel frees it with the process."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, PRIVATE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
