"""Files with secrets: private from their first byte, complete or absent, one writer at a time."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from muster.core import errors, files

PRIVATE = files.PRIVATE
PUBLIC = files.PUBLIC


@contextlib.contextmanager
def map_os_errors(path: pathlib.Path) -> Iterator[None]:
    """Map errors of the operating system to Muster errors, with the path."""
    try:
        yield
    except FileNotFoundError as error:
        raise errors.NotFound(f"{path} is missing", hint="`muster init` makes it") from error
    except OSError as error:
        hint = "run as the user who made it" if isinstance(error, PermissionError) else None
        raise errors.Refused(f"{path}: {error.strerror or error}", hint=hint) from error


def make_folder(path: pathlib.Path) -> None:
    """Create ``path`` and its missing parents, for the owner only."""
    with map_os_errors(path):
        for folder in (*reversed(path.parents), path):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)


def replace_file(path: pathlib.Path, data: bytes, *, mode: int = PRIVATE) -> None:
    """Replace the file: a reader, or a crash at any time, finds the complete old or new content."""
    make_folder(path.parent)
    with map_os_errors(path):
        files.write(path, data, mode=mode)


@contextlib.contextmanager
def staged_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to fill, which becomes ``folder`` at the end: all of it appears at once, or none."""
    make_folder(folder.parent)
    with map_os_errors(folder):
        made = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            yield made
            os.rename(made, folder)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        files.sync_folder(folder.parent)


def read(path: pathlib.Path, what: str, *, size_max: int = 1 << 20) -> bytes:
    """The bytes of the file; the error names ``what`` and that it is missing."""
    with map_os_errors(path):
        try:
            with path.open("rb") as file:
                data = file.read(size_max + 1)
        except FileNotFoundError:
            raise errors.NotFound(
                f"{what} is missing: {path}", hint="restore the file from a backup"
            ) from None
    if len(data) > size_max:
        raise errors.LimitExceeded(f"{what} is over {size_max} bytes: {path}")
    return data


def read_text(path: pathlib.Path, what: str) -> str:
    try:
        return read(path, what).decode("ascii").strip()
    except UnicodeDecodeError:
        raise errors.InvalidInput(
            f"{what} is damaged: {path}", hint="restore the file from a backup"
        ) from None


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """One process at a time changes the folder. The lock ends with the process."""
    with contextlib.ExitStack() as stack:
        with map_os_errors(folder):
            stack.enter_context(files.locked(folder / "lock"))
        yield
