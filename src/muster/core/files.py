"""Atomic file replacement: after a crash a file has its complete old or its complete new content.

`write` replaces a file, `create` refuses to, and a `FileDraft` is written in parts, or by another library.
All write to a temporary file in the same folder, set its mode, sync it, give it its name and sync the folder;
`write` can do without the syncs.
The mode is that of the new file, not of the one replaced, so a secret that is written over a readable file
becomes private.  `locked` serialises the processes that read a file, change it and write it back.
All of these block, and raise `OSError`.

`expanded` is for every path that a person wrote.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from muster.core import errors

PRIVATE = 0o600
PUBLIC = 0o644


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with a home folder in place of ``~`` or ``~USER``; `errors.InvalidInput` if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = Path(path).parts[0]
        hint = "set HOME, or write the whole path" if user == "~" else "write the whole path"
        raise errors.InvalidInput(
            f"{os.fspath(path)!r}: the home folder {user!r} is not known", hint=hint
        ) from error


def requested_mode() -> int:
    """The mode of a file that a user has requested by its name: as the user's umask decides."""
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


def write(path: Path, data: bytes, *, mode: int = PRIVATE, durable: bool = True) -> None:
    """Replace ``path``. Of a symbolic link the target is replaced, and the link stays.

    Without ``durable`` it is not synced: after a power cut it may have its old content, or none. For files
    about processes, which do not survive a power cut either.
    """
    with FileDraft(path, mode=mode, durable=durable) as draft:
        draft.path.write_bytes(data)
        draft.publish()


def create(path: Path, data: bytes, *, mode: int = PRIVATE) -> None:
    """Write a new file; `FileExistsError` if another process created it first."""
    with FileDraft(path, mode=mode, is_new=True) as draft:
        draft.path.write_bytes(data)
        draft.publish()


def open_private(path: Path, mode: str) -> io.FileIO:
    """A file that only its owner may read, also one that exists with another mode."""
    file = io.FileIO(path, mode, opener=lambda name, flags: os.open(name, flags, PRIVATE))
    os.fchmod(file.fileno(), PRIVATE)
    return file


def append_line(path: Path, line: bytes) -> None:
    """Append a line without its end. The rest of a line that was written in part before, by a process that
    ended or on a full disk, becomes a line of its own."""
    with open_private(path, "ab+") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n":
            line = b"\n" + line
        file.write(line + b"\n")


class FileDraft:
    """A file that gets the name ``path`` when it is published: complete, and on disk. Until then, only the
    owner may read it.

    It replaces a regular file; of a symbolic link the target is replaced, and the link stays, unless it
    ``follows`` none: then the link is replaced. ``is_new``: `FileExistsError` if there is anything of that
    name. ``durable``: see `write`.
    """

    def __init__(
        self,
        path: Path,
        *,
        mode: int = PRIVATE,
        is_new: bool = False,
        durable: bool = True,
        follows: bool = True,
    ) -> None:
        self._target = path.resolve() if follows and not is_new else path
        is_link = self._target.is_symlink()
        if not is_new and not is_link and self._target.exists() and not self._target.is_file():
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        self._mode = mode
        self._is_new = is_new
        self._durable = durable
        prefix = f".{self._target.name}."
        descriptor, name = tempfile.mkstemp(dir=self._target.parent, prefix=prefix)  # made with 0600
        os.close(descriptor)
        self.path = Path(name)  # to write to

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def publish(self) -> None:
        """Call this after the file is closed."""
        self.path.chmod(self._mode)
        if self._durable:
            sync_file(self.path)
        if self._is_new:
            os.link(self.path, self._target)
        else:
            os.replace(self.path, self._target)
        if self._durable:
            sync_folder(self._target.parent)

    def discard(self) -> None:
        """Remove the draft, unless it was published."""
        self.path.unlink(missing_ok=True)


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
