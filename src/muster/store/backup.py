"""A backup format for both engines: lines of JSON, a consistent snapshot, with a checksum.

The first line identifies the format, each further one is a record (its value in base64), and the last one has
the number of records and the SHA-256 of everything before it: a truncated or changed file is rejected before
anything is stored. A restored store has the records and their epochs, but its own versions and identity:
positions of the old feed are not valid in it.

A restore takes many commits. A marker in the store shows that it has begun, and is removed by the last one; a
store with the marker is not opened (`database.open`), and another restore begins by emptying it. Code that
must succeed together with a restore runs within `restoring`: if it fails, the store is emptied.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import pathlib
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from typing import Annotated, TypeVar

import msgspec

from muster.core import errors, files
from muster.store import api, commit_plan, database, transactions

FORMAT = 1
PAGE_RECORDS = 500
PAGE_BYTES = 4 << 20
LINE_BYTES_MAX = 256 << 20

L = TypeVar("L", bound=msgspec.Struct)

_HINT = "name a file that `backup` wrote"


class _First(msgspec.Struct, forbid_unknown_fields=True):
    muster_store: int
    identity: str
    version: int


class _Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    c: str  # collection
    k: str  # key
    v: bytes  # value
    e: Annotated[int, msgspec.Meta(ge=0, le=api.INTEGER_MAX)] = 0  # epoch

    @property
    def place(self) -> commit_plan.Place:
        """…validated: the file may not be a backup of Muster."""
        name = self.c if self.c == commit_plan.FENCES else transactions.check_collection(self.c)
        return name, transactions.encode_key(self.k)


class _Last(msgspec.Struct, forbid_unknown_fields=True):
    records: int
    sha256: str


async def backup(store: database.Store, path: pathlib.Path) -> int:
    """Write all of the store, as it is now, to a new file. Returns the number of records."""
    writer = await asyncio.to_thread(_Writer, path)
    try:
        async with store.engine.snapshot() as reader:
            first = _First(FORMAT, store.identity, reader.version)
            await asyncio.to_thread(writer.write, [first])
            after: commit_plan.Place = ("", b"")
            while page := await reader.everything(after, PAGE_RECORDS, PAGE_BYTES):
                await asyncio.to_thread(
                    writer.write,
                    [_Line(name, record.key, record.value, record.epoch) for name, record in page],
                )
                name, record = page[-1]
                after = (name, record.key.encode())
        return await asyncio.to_thread(writer.finish)
    finally:
        await asyncio.to_thread(writer.close)


async def restore(
    url: str,
    path: pathlib.Path,
    *,
    settings: api.StoreOptions | None = None,
    password: str | None = None,
    folder: pathlib.Path | None = None,
) -> int:
    """Fill a store that is empty, or was left half restored, from a backup. Returns the number of records."""
    async with restoring(url, path, settings=settings, password=password, folder=folder) as records:
        return records


@contextlib.asynccontextmanager
async def restoring(
    url: str,
    path: pathlib.Path,
    *,
    settings: api.StoreOptions | None = None,
    password: str | None = None,
    folder: pathlib.Path | None = None,
) -> AsyncIterator[int]:
    """Like `restore`; complete if the block ends without an error, and emptied if it does not.

    If the store cannot be reached for that, it keeps its marker.
    """
    records = await asyncio.to_thread(_verify, path)
    async with await database.open(
        url, settings=settings, password=password, folder=folder, unfinished=True
    ) as store:
        await _empty(store)
        begun, ended = (
            {database.UNFINISHED: commit_plan.RecordWrite(b"")},
            {database.UNFINISHED: commit_plan.RecordWrite(None)},
        )
        await store.write(begun)
        try:
            with contextlib.closing(_read(path)) as lines:
                while page := await asyncio.to_thread(_page, lines):
                    await store.write(
                        {record.place: commit_plan.RecordWrite(record.v, None, record.e) for record in page}
                    )
            yield records
            await store.write(ended)
        except BaseException:
            with contextlib.suppress(errors.MusterError):
                await store.write(begun)  # again: the last write may have been stored
                await _empty(store)
                await store.write(ended)
            raise


async def _empty(store: database.Store) -> None:
    """Remove the records of an earlier restore; a store in use is rejected."""
    while True:
        async with store.engine.snapshot() as reader:
            page = await reader.everything(("", b""), PAGE_RECORDS, PAGE_BYTES)
        places = {(name, record.key.encode()) for name, record in page} - {database.UNFINISHED}
        if not places:
            return
        if not await store.is_unfinished():
            raise errors.AlreadyExists("the store to restore into is not empty", hint="name a new one")
        await store.write({place: commit_plan.RecordWrite(None) for place in places})


class _Writer:
    """Write a temporary file and rename it when it is on disk: a backup is complete or does not exist."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._hash = hashlib.sha256()
        self._records = -1  # the first line is none
        try:
            self._draft = files.FileDraft(path)
            self._file = self._draft.path.open("wb")
        except OSError as error:
            raise errors.Unavailable(f"{path} cannot be written: {error.strerror}") from error

    def write(self, lines: Iterable[msgspec.Struct]) -> None:
        encoded = [msgspec.json.encode(line) for line in lines]
        self._records += len(encoded)
        data = b"\n".join(encoded) + b"\n"
        self._hash.update(data)
        self._put(data)

    def finish(self) -> int:
        self._put(msgspec.json.encode(_Last(self._records, self._hash.hexdigest())) + b"\n")
        try:
            self._file.close()
            self._draft.publish()
        except OSError as error:
            raise errors.Unavailable(f"{self._path} cannot be written: {error.strerror}") from error
        return self._records

    def _put(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise errors.Unavailable(f"{self._path} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._draft.discard()


def _read(path: pathlib.Path) -> Generator[_Line]:
    """Its records; after the last of them, an error if they are not all of those that were written."""
    try:
        with path.open("rb") as file:
            line = file.readline(LINE_BYTES_MAX)
            if _decoded(line, _First, path).muster_store != FORMAT:
                raise api.StoreCorrupt(f"{path} has a format that this version does not support", hint=_HINT)
            seen = hashlib.sha256(line)
            records = 0
            held = file.readline(LINE_BYTES_MAX)
            while following := file.readline(LINE_BYTES_MAX):
                seen.update(held)
                records += 1
                yield _decoded(held, _Line, path)
                held = following
    except OSError as error:
        raise errors.NotFound(f"{path} cannot be read: {error.strerror}") from error
    if _decoded(held, _Last, path) != _Last(records, seen.hexdigest()):
        raise api.StoreCorrupt(f"{path} has been changed since it was written", hint=_HINT)


def _decoded(line: bytes, kind: type[L], path: pathlib.Path) -> L:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise api.StoreCorrupt(f"{path} is not a backup, or is incomplete: {error}", hint=_HINT) from error


def _page(lines: Iterator[_Line]) -> list[_Line]:
    page: list[_Line] = []
    size_bytes = 0
    for line in lines:
        page.append(line)
        size_bytes += len(line.v)
        if len(page) == PAGE_RECORDS or size_bytes > PAGE_BYTES:
            break
    return page


def _verify(path: pathlib.Path) -> int:
    return sum(bool(line.place) for line in _read(path))
