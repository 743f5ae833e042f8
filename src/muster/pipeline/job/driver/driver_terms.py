"""The terms of drivers in a checkpoint, and where the next driver continues.

    <checkpoint>/muster-checkpoint.json           the label (`checkpoint_label`)
    <checkpoint>/drivers/00000007/driver.json     a term: where it started
    <checkpoint>/drivers/00000007/spark/          Spark's checkpoint of this term

Each driver has a folder of its own, named by its epoch, and writes to no other.  So a former driver that
wakes up cannot damage the checkpoint of its successor.  On a file system its successor replaces the folder
of its Spark by a file, so that it cannot write there either.  And the number of shards, partitions and splits
is free at each start: Spark fixes them for a checkpoint, and every term begins a new one.  Its state is
copied from the term before, as of the last batch that Spark committed there (`state_transfer`).

The batch after that may have been interrupted after its results were committed to the history.  It is
repeated with exactly the same messages and the same number, so the history refuses what it has already.
Numbers of batches continue over all terms: a batch of Spark has ``first`` added to its number.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from muster.core import files
from muster.pipeline.history import storage
from muster.pipeline.job import checkpoint_label
from muster.pipeline.source import spark_internals

FOLDER = "drivers"
RECORD = "driver.json"
SPARK = "spark"
FENCED = 16  # terms before this one whose drivers may be paused and wake up again

Offsets = dict[str, int]  # the last sequence read, by stream


class StatePosition(msgspec.Struct, frozen=True):
    """The state after a batch of Spark in a term."""

    epoch: int
    batch: int


class DriverTerm(msgspec.Struct, frozen=True, kw_only=True):
    """Where a driver started."""

    epoch: int
    run: str = ""  # identifies the checkpoint; a term of another one is not continued
    first: int = 0  # number of its first batch, over all terms
    state: StatePosition | None = None
    after: Offsets = {}  # what was read before
    until: Offsets = {}  # the end of its first batch, if another driver has begun it


@dataclass(frozen=True, slots=True)
class TermProgress:
    """A term, the last batch that Spark committed in it, and the ends of that batch and the next."""

    term: DriverTerm
    committed: int | None = None
    end: Offsets | None = None
    planned: Offsets | None = None


def next_term(epoch: int, run: str, last: TermProgress | None, stored: Offsets) -> DriverTerm:
    """Where a driver continues after the last term. ``stored``: what the history has, if there is none."""
    if last is None:
        return DriverTerm(epoch=epoch, run=run, after=stored)
    term = last.term
    if last.committed is None:
        # Its state was not stored: begin where it began. A batch that it planned may be in the history.
        return msgspec.structs.replace(term, epoch=epoch, until=last.planned or term.until)
    return DriverTerm(
        epoch=epoch,
        run=run,
        first=term.first + last.committed + 1,
        state=StatePosition(term.epoch, last.committed),
        after=last.end or {},
        until=last.planned or {},
    )


def folder_of(checkpoint: str, epoch: int) -> str:
    return f"{checkpoint}/{FOLDER}/{epoch:08}"


def spark_folder(checkpoint: str, epoch: int) -> str:
    """Spark's checkpoint of a term, as a URL."""
    return storage.spark_url(checkpoint, FOLDER, f"{epoch:08}", SPARK)


def epochs(checkpoint: str) -> list[int]:
    """The epochs of stored terms, the oldest first."""
    store = storage.filesystem(checkpoint)
    return sorted(int(name) for name in storage.names(store, FOLDER) if name.isdecimal())


def read_last(checkpoint: str, run: str) -> TermProgress | None:
    """The newest term of a checkpoint that began."""
    with storage.translated(checkpoint):
        store = storage.filesystem(checkpoint)
        for epoch in reversed(epochs(checkpoint)):
            content = storage.read_file(store, f"{FOLDER}/{epoch:08}/{RECORD}")
            term = None if content is None else msgspec.json.decode(content, type=DriverTerm)
            if term is not None and term.run == run:
                return _progress(store, term)
    return None


def begin(checkpoint: str, term: DriverTerm) -> None:
    """Store the record of a new term."""
    storage.replace_file(folder_of(checkpoint, term.epoch), RECORD, msgspec.json.encode(term))


def relocate(checkpoint: str, epoch: int) -> None:
    """Correct the absolute paths that Spark stores in a local checkpoint, if its folder was moved.

    They are in the metadata of its operators: the files with the schema of the state.
    """
    local = storage.local_path(checkpoint)
    if local is None:
        return
    spark = Path(folder_of(str(local), epoch)) / SPARK
    for path in spark.glob("state/*/_metadata/**/*"):
        if path.is_file() and not path.name.startswith("."):
            content = path.read_text()
            corrected = spark_internals.with_folder(content, spark)
            if corrected != content:
                path.with_name(f".{path.name}.crc").unlink(missing_ok=True)  # its checksum
                files.write(path, corrected.encode(), mode=files.PUBLIC)


def remove_before(checkpoint: str, epoch: int) -> None:
    """Remove the folders of earlier terms: nothing reads them once this term has a committed batch."""
    local = storage.local_path(checkpoint)
    with storage.translated(checkpoint):
        store = storage.filesystem(checkpoint)
        earlier = [other for other in epochs(checkpoint) if other < epoch]
        for other in earlier:
            if local is None or other in earlier[:-FENCED]:
                store.delete_dir(f"{FOLDER}/{other:08}")
            else:
                _replace_by_file(Path(folder_of(str(local), other)))


def _replace_by_file(term: Path) -> None:
    """Remove what a term has stored, and let its driver, which may be paused, store nothing more."""
    spark, former = term / SPARK, term / f"{SPARK}.former"
    if spark.is_dir():
        spark.rename(former)
    spark.touch()
    (term / RECORD).unlink(missing_ok=True)
    if former.exists():
        shutil.rmtree(former)


def _progress(store: Any, term: DriverTerm) -> TermProgress:
    root = f"{FOLDER}/{term.epoch:08}/{SPARK}"
    commits = [int(name) for name in storage.names(store, f"{root}/commits") if name.isdecimal()]
    committed = max(commits, default=None)
    following = 0 if committed is None else committed + 1
    return TermProgress(
        term,
        committed,
        None if committed is None else _offsets(storage.read_file(store, f"{root}/offsets/{committed}")),
        _offsets(storage.read_file(store, f"{root}/offsets/{following}")),
    )


def _offsets(content: bytes | None) -> Offsets | None:
    return None if content is None else parse_offsets(content)


def parse_offsets(content: bytes) -> Offsets:
    try:
        return spark_internals.offsets_of(content)
    except (LookupError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise checkpoint_label.CheckpointUnusable(f"Spark's offsets cannot be read: {error}") from error
