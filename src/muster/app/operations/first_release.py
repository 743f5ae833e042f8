"""The data of Muster 0.1.0, converted once, while the domain does not run.

0.1.0 stored the registry in a database, all other services in streams that are still read. Each service
whose data has another form now has a step in `STEPS`, which reads the former and writes the present one. A
step may be interrupted and run again. A backup of 0.1.0 is converted by its restore, and a home by `muster
convert`:

1. the steps, with the brokers of the domain running and none of its components;
2. ``[store]`` is removed from the settings;
3. the home gets the present format, and the database is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import NamedTuple

import msgspec

from muster.app import domain, home
from muster.app import positions as positions_
from muster.core import errors, files
from muster.core.formats import toml
from muster.manage.registry import registry_log
from muster.trust.permissions import roles

VERSION = "0.1.0"
STORE = "store.jsonl"  # the records in a backup
DATABASE = "sqlite:store.db"
REGISTRY = "registry-1"
PAGE_BYTES = 256 << 10
_META = "manage.meta"
WITH_POSITION = ("responder", "syslog", "otlp_activities")
_CONVERTED = (_META, "converted")
_SECTION = re.compile(r"^\s*\[([^\]]*)\]")


class FormerRecord(NamedTuple):
    collection: str
    key: str
    value: bytes


#: The records of the database; called each time that a step reads them.
FormerRecords = Callable[[], Iterator[FormerRecord]]


async def convert(started: domain.Domain, records: FormerRecords) -> int:
    """Run all steps in a domain without components, unless another machine of the domain has done it. Returns
    the number of records that were converted."""
    async with open_registry(started) as log:
        if log.get(*_CONVERTED) is not None:
            return 0
    count = sum([await step(started, records) for step in STEPS])
    async with open_registry(started) as log:
        await log.own(1)
        await log.write([(*_CONVERTED, VERSION.encode())])
    return count


@contextlib.asynccontextmanager
async def open_registry(started: domain.Domain) -> AsyncIterator[registry_log.RegistryLog]:
    """The log of a domain in which no registry runs."""
    settings = started.settings
    async with (
        await started.connect(REGISTRY, roles.Role.REGISTRY) as bus,
        await registry_log.RegistryLog.open(
            bus, max_bytes=settings.retention.registry.max_bytes, replicas=settings.bus.replicas
        ) as log,
    ):
        yield log


async def _convert_registry(started: domain.Domain, records: FormerRecords) -> int:
    """The registry's database becomes its log."""
    count = 0
    pages = _pages(record for record in records() if _is_of_registry(record))
    async with open_registry(started) as log:
        await log.own(1)
        while page := await asyncio.to_thread(next, pages, None):
            await log.write(page)
            count += len(page)
    return count


def _pages(records: Iterator[FormerRecord]) -> Iterator[list[FormerRecord]]:
    page: list[FormerRecord] = []
    size = 0
    for record in records:
        page.append(record)
        size += len(record.value)
        if size > PAGE_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page


def _is_of_registry(record: FormerRecord) -> bool:
    """Not the requests that it recognises, which are part of the log, nor the views of information nodes."""
    if record.collection == _META:
        return record.key in ("epoch", "lost-epochs")
    return record.collection.startswith("manage.") and record.collection != "manage.requests"


async def _convert_positions(started: domain.Domain, records: FormerRecords) -> int:
    """The positions of the responder and of exports in their streams become files."""
    positions = await asyncio.to_thread(
        lambda: [record for record in records() if record.collection in WITH_POSITION]
    )
    for position in positions:
        name = position.collection
        await positions_.StoredPosition(started.folder.root, name).store(int(position.value))
    return len(positions)


#: In any order. A service whose streams of 0.1.0 are not read any more gets its step here.
STEPS: tuple[Callable[[domain.Domain, FormerRecords], Awaitable[int]], ...] = (
    _convert_registry,
    _convert_positions,
)


# Homes


class FormerSettings(NamedTuple):
    """The settings of 0.1.0 that this version does not have, and the others as text."""

    database: str
    rest: str


def read_settings(path: pathlib.Path) -> FormerSettings:
    """``path``: muster.toml of 0.1.0. Blocks."""
    store = toml.read(path).tree.get("store")
    database = store.get("url") if isinstance(store, dict) else None
    kept: list[str] = []
    section = ""
    for line in path.read_text().splitlines(keepends=True):
        if header := _SECTION.match(line):
            section = header[1].strip()
        if section != "store" and not (section == "" and re.match(r"\s*store\s*[.=]", line)):
            kept.append(line)
    return FormerSettings(database if isinstance(database, str) else DATABASE, "".join(kept))


def _database_file(former: FormerSettings, folder: pathlib.Path) -> pathlib.Path | None:
    """The file of the database; None if it is on a server."""
    kind, _, path = former.database.partition(":")
    return folder / path if kind == "sqlite" else None


def records_of_home(former: FormerSettings, folder: pathlib.Path) -> FormerRecords:
    file = _database_file(former, folder)
    return _unreachable if file is None else records_of_database(file) if file.exists() else lambda: iter(())


def _unreachable() -> Iterator[FormerRecord]:
    raise errors.Refused(
        f"the registry of this home is in a database on a server, which only Muster {VERSION} reads",
        hint=f"with {VERSION}: `muster backup lab.tar.gz`; then `muster convert --from lab.tar.gz`",
    )


def finish(place: home.Home, former: FormerSettings, folder: pathlib.Path) -> None:
    """After all steps: the home has the present format from now on. Blocks."""
    files.write(place.settings_file, former.rest.encode())
    place.stamp()
    if (database := _database_file(former, folder)) is not None:
        for suffix in ("", "-wal", "-shm"):
            database.with_name(database.name + suffix).unlink(missing_ok=True)


# Records


def records_of_database(path: pathlib.Path) -> FormerRecords:
    def read() -> Iterator[FormerRecord]:
        try:
            with contextlib.closing(sqlite3.connect(path, check_same_thread=False)) as database:
                rows = database.execute("SELECT collection, key, value FROM record")
                for collection, key, value in rows:
                    yield FormerRecord(collection, key.decode(), value)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise errors.InvalidInput(f"{path} is not a database of Muster {VERSION}: {error}") from error

    return read


class _Line(msgspec.Struct):
    """A line of a backup; the first and the last one have no record."""

    c: str = ""  # collection
    k: str = ""  # key
    v: bytes = b""  # value


def records_of_backup(path: pathlib.Path) -> FormerRecords:
    """``path``: the file `STORE` of a backup, whose digest has been checked."""

    def read() -> Iterator[FormerRecord]:
        try:
            with path.open("rb") as file:
                for line in file:
                    record = msgspec.json.decode(line, type=_Line)
                    yield FormerRecord(record.c, record.k, record.v)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise errors.InvalidInput(
                f"{path.name} is not from a backup of Muster {VERSION}: {error}"
            ) from error

    return read
