"""A consistent copy of the history, the checkpoint and the alert state, taken while the pipeline runs.

The three belong together: the history refuses a batch that it has, and the alert state does not change twice
for the same batch.  A copy of them has to look like a pipeline that was killed during a batch, because that
is what the pipeline recovers from.  The alert state names its batch, and everything else is copied as of the
same batch:

    alert state    as it is: after batch N
    checkpoint     offsets of the batches up to N, commits of those up to N - 1, all state of the shards,
                   in the folder of the driver's term (`driver_terms`)
    history        commits up to N

So batch N is repeated after a restore, with the same messages; the tables have it already.  Messages after it
are read from the streams, which must be copied later than this.

The files are never changed in place, so hard links suffice where the file system allows them.  Storage that
is not local is not copied: the object store has its own versions and replicas.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from muster.core import errors, files
from muster.pipeline import settings as settings_
from muster.pipeline.history import storage
from muster.pipeline.job import checkpoint_label, commit_state
from muster.pipeline.job.driver import driver_terms, state_files

HISTORY, CHECKPOINT, STATE = "history", "checkpoint", "state"  # folders of the copy
RESTORED_NAME = "restored.json"
ATTEMPTS = 5  # the pipeline may delete files while they are copied

_LOG = "_delta_log"
_VERSION = re.compile(r"(\d{20})\.")
_TEMPORARY = re.compile(r"\..*|.*\.tmp|scratch|warehouse")


class RestoredStreams(msgspec.Struct, frozen=True):
    """Streams were restored, but not the history or not the checkpoint: these may have later batches."""

    streams: dict[str, int]  # the last sequence of each


class _Batch(msgspec.Struct, frozen=True):
    """The part of `commit_state.CommitState` that is needed here."""

    batch: tuple[str, int] | None = None


class _Transaction(msgspec.Struct, frozen=True, rename="camel"):
    app_id: str
    version: int


class _LogAction(msgspec.Struct, frozen=True):
    txn: _Transaction | None = None


_ACTIONS = msgspec.json.Decoder(_LogAction)


def take(settings: settings_.PipelineSettings, folder: Path, target: Path) -> dict[str, str]:
    """Copy to the new folder ``target``. What is not local: its kind and URL."""
    roots = {HISTORY: settings.history_root(folder), CHECKPOINT: settings.checkpoint_root(folder)}
    parts = places(settings, folder)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _take(parts, target)
            return {kind: root for kind, root in roots.items() if parts[kind] is None}
        except (FileNotFoundError, NotADirectoryError) as error:  # a successor replaces folders by files
            shutil.rmtree(target, ignore_errors=True)
            if attempt == ATTEMPTS:
                raise errors.Unavailable(
                    f"the pipeline deleted {error.filename} while it was copied",
                    hint="repeat the backup, or stop the pipeline during it",
                ) from error
    raise AssertionError


def _take(parts: dict[str, Path | None], target: Path) -> None:
    state = parts[STATE]
    assert state is not None
    names = commit_state.state_names(path.name for path in state.glob("*"))
    run, last = "", -1
    if names:
        _copy(state / names[-1], target / STATE / names[-1])
        run, last = _last_batch(target / STATE / names[-1])
    checkpoint = parts[CHECKPOINT]
    if checkpoint is not None and (checkpoint / checkpoint_label.LABEL).is_file():
        label = _copy_checkpoint(checkpoint, target / CHECKPOINT, run, last)
        if label.run != run:  # its first batch is not complete
            run, last = label.run, -1
    history = parts[HISTORY]
    if history is not None and history.is_dir():
        for log in sorted(history.glob(f"*/{_LOG}")):
            _copy_table(log.parent, target / HISTORY / log.parent.name, run, last)


def _last_batch(path: Path) -> tuple[str, int]:
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Batch)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.Conflict(f"the alert state cannot be read: {error}") from error
    return stored.batch or ("", -1)


def _copy_checkpoint(source: Path, target: Path, run: str, last: int) -> checkpoint_label.CheckpointLabel:
    content = (source / checkpoint_label.LABEL).read_bytes()
    label = msgspec.json.decode(content, type=checkpoint_label.CheckpointLabel)
    _place(target / checkpoint_label.LABEL, content)
    if label.run != run or last < 0:
        return label
    terms = [
        term
        for path in sorted(source.glob(f"{driver_terms.FOLDER}/*/{driver_terms.RECORD}"))
        if (term := msgspec.json.decode(path.read_bytes(), type=driver_terms.DriverTerm)).run == run
        and term.first <= last
    ]
    for term in terms:
        _copy_term(source, target, term, last - term.first)
    if terms:
        _require_complete(source, target, terms[-1], last - terms[-1].first)
    return label


def _copy_term(source: Path, target: Path, term: driver_terms.DriverTerm, batch: int) -> None:
    """``batch``: the last one that is copied, as Spark counts."""
    folder = Path(driver_terms.folder_of(str(source), term.epoch))
    copied = target / folder.relative_to(source)
    _copy(folder / driver_terms.RECORD, copied / driver_terms.RECORD)
    spark = folder / driver_terms.SPARK
    if not spark.is_dir():
        return
    # After its first batch a term has the state of its own, and the former term may be gone.
    limits = {"offsets": batch, "commits": max(0, batch - 1)}
    # The state of shards first: it is removed soonest. The files that a snapshot of RocksDB lists are older
    # than the list: the lists are copied before them.
    for path in sorted(
        _files_below(spark),
        key=lambda path: (state_files.FOLDER not in path.parts, "SSTs" in path.parts),
    ):
        kind, *names = path.relative_to(spark).parts
        number = int(names[-1]) if names and names[-1].isdigit() else -1
        if number <= limits.get(kind, number):
            _copy(path, copied / driver_terms.SPARK / path.relative_to(spark))


def _require_complete(source: Path, target: Path, term: driver_terms.DriverTerm, batch: int) -> None:
    """A file is missing if the pipeline deleted it before it was copied."""
    folder = driver_terms.folder_of(str(target), term.epoch)
    needed = [Path(folder, driver_terms.SPARK, "offsets", str(batch))]
    commit = Path(folder, driver_terms.SPARK, "commits", str(max(0, batch - 1)))
    if batch:
        needed.append(commit)
    elif term.state is not None and not commit.exists():
        needed.append(Path(driver_terms.folder_of(str(target), term.state.epoch)))
    shards = Path(folder, driver_terms.SPARK, state_files.FOLDER)
    if commit.exists() and shards.exists():
        last = int(commit.name)  # or an earlier one, if it had no messages
        needed.append(shards / str(max((n for n in state_files.batches(shards) if n <= last), default=last)))
    for path in needed:
        original = source / path.relative_to(target)
        if not path.exists() or (path.parent == shards and not original.exists()):
            raise FileNotFoundError(errno.ENOENT, "", str(original))


def _copy_table(source: Path, target: Path, run: str, last: int) -> None:
    """The commits of a table up to those of batch ``last`` of ``run``, and all files of the table."""
    until, later = -1, False
    for path in sorted((source / _LOG).glob("*.json")):
        match = _VERSION.match(path.name)
        if match is None:
            continue
        later = later or any(
            action.txn is not None and action.txn.app_id == run and action.txn.version > last
            for action in _ACTIONS.decode_lines(path.read_bytes())
        )
        if later:
            break
        _copy(path, target / _LOG / path.name)
        until = int(match[1])
    if until < 0:
        return
    for path in _files_below(source):
        relative = path.relative_to(source)
        match = _VERSION.match(path.name)  # of the log, whose commits are copied already
        is_older = match is not None and path.suffix != ".json" and int(match[1]) <= until
        if relative.parts[0] != _LOG or is_older:
            _copy(path, target / relative)


def places(settings: settings_.PipelineSettings, folder: Path) -> dict[str, Path | None]:
    """The folder of each part of a copy; None if it is not local."""
    return {
        HISTORY: storage.local_path(settings.history_root(folder)),
        CHECKPOINT: storage.local_path(settings.checkpoint_root(folder)),
        STATE: settings.state_folder(folder),
    }


def write_restored(folder: Path, streams: dict[str, int]) -> None:
    """Record in a domain folder that its streams were restored without everything that follows them."""
    _place(folder / "pipeline" / RESTORED_NAME, msgspec.json.encode(RestoredStreams(streams)))


def read_restored(folder: Path) -> RestoredStreams | None:
    path = folder / "pipeline" / RESTORED_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=RestoredStreams)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.Conflict(f"{path} cannot be read: {error}") from error


def forget_restored(folder: Path) -> None:
    (folder / "pipeline" / RESTORED_NAME).unlink(missing_ok=True)


def _files_below(folder: Path) -> Iterator[Path]:
    """Without temporary files and checksums, which are written again."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if _TEMPORARY.fullmatch(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)


def _place(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.write(path, data)
