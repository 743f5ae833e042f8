"""The state of shards in files, so that it does not pass through Java.

The state of a shard has megabytes, and every batch reads and writes it.  In Spark's state store it would go
from Python to Java, into RocksDB, its log of changes and its snapshots, and back.  So where the checkpoint is
on a file system, a task writes the state of its shards to a new file, and Spark's state has only its name:

    <checkpoint>/drivers/00000007/spark/fleet/12/3-6f1c…     of the partition with key 3, after batch 12

Spark commits the name with the batch.  So a batch that is repeated reads the same file as before, and a file
of an attempt that failed is never read.  The files are in the folder of Spark's checkpoint, so a driver that
was replaced cannot write them (`driver_terms`), and a backup contains them (`state_copy`).

In other storage the state itself is in Spark's state.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

FOLDER = "fleet"
KEPT = 10  # batches; only the last one is read, except by a backup
_URL = "file://"  # of `storage.spark_url`, which escapes nothing


def folder_of(checkpoint: str) -> Path | None:
    """The folder of the files beside Spark's checkpoint, a URL; None if it is not on a file system."""
    return Path(checkpoint.removeprefix(_URL)) / FOLDER if checkpoint.startswith(_URL) else None


def write(folder: Path, batch: int, part: int, data: Iterable[bytes]) -> str:
    """The name of a new file. ``batch``: as Spark counts; ``part``: of Spark's partitions."""
    # Without parents: the folder of Spark's checkpoint must not appear again when a successor removed it.
    for made in (folder, folder / str(batch)):
        with contextlib.suppress(FileExistsError):
            made.mkdir(mode=0o700)
    name = f"{batch}/{part}-{uuid.uuid4().hex}"
    try:
        with (folder / name).open("wb") as file:
            file.writelines(data)
    except BaseException:  # a part of a file would only use up a disk that is full
        with contextlib.suppress(OSError):
            (folder / name).unlink()
        raise
    return name


def read(folder: Path | None, name: str) -> bytes:
    if folder is None:
        raise FileNotFoundError(f"the state is in the file {name}, but the checkpoint is not a folder")
    return (folder / name).read_bytes()


def batches(folder: Path) -> list[int]:
    """The numbers of the batches that a folder has entries of, the oldest first."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def remove_uncommitted(folder: Path) -> None:
    """Remove the files of batches that Spark has not committed, before a query starts: nothing reads them.

    Otherwise a batch that fails again and again would add a copy of the state each time.
    """
    committed = max(batches(folder.parent / "commits"), default=-1)
    for number in batches(folder):
        if number > committed:
            shutil.rmtree(folder / str(number), ignore_errors=True)


def remove_former(folder: Path) -> None:
    """Remove the files of all batches but the last `KEPT` that have any.

    A batch writes all shards or, without messages, none: then the next one reads the files of an earlier
    batch, however many numbers lie between them.
    """
    for number in batches(folder)[:-KEPT]:
        # All files of a batch disappear at once: a backup sees that they were removed.
        with contextlib.suppress(OSError):
            (folder / str(number)).rename(folder / f".{number}")
    for path in folder.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)
