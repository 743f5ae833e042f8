"""Backup and restore of a domain in one file: settings, keys, certificates, store, streams and pipeline.

A backup works on a running domain, which continues meanwhile, and on a stopped one, whose brokers and store
are started for it without any component.  The pipeline's files, the store and each stream are consistent
snapshots, taken in that order: positions in the checkpoint and in the store are never ahead of a stream.
`CONTENTS` lists what is included.

    manifest.json     description, and the SHA-256 of every other file
    muster.toml       settings
    keys/             as in the domain's folder, also from outside of it
    certs/, web/, …   the entries of the domain's folder that `CONTENTS` includes
    files/KEY         the file that the setting KEY names
    store.jsonl       `muster.store.backup`
    streams/NAME      `muster.bus.streams.snapshots`
    pipeline/         history, checkpoint and alert state (`muster.pipeline.job.state_copy`)

A file that a setting names is included if it is in the home or has rules.  Outside of the home it is restored
only where there is none.  A history or checkpoint that is not restored with the streams may be ahead of them.
The pipeline then starts a new checkpoint, which continues at the end of the restored streams.

The file contains the private keys, so its owner controls the domain.  It is readable by its owner only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pathlib
import shutil
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

import muster
from muster.app import certificates, domain, home, identities
from muster.app import settings as app_settings
from muster.app.components import loop
from muster.app.operations import audit, rule_files
from muster.app.supervisor import domain_tree
from muster.bus.client import client
from muster.bus.streams import snapshots
from muster.core import errors
from muster.core import files as core_files
from muster.core.settings import loader
from muster.core.settings import sections as settings_
from muster.manage import protocol
from muster.manage.registry import registry_log
from muster.pipeline.job import state_copy
from muster.store import backup as store_backup
from muster.store import database
from muster.trust import private_files
from muster.trust.permissions import roles

FORMAT = 1
MANIFEST = "manifest.json"
STORE = "store.jsonl"
STREAMS = "streams"
PIPELINE = "pipeline"
FILES = "files"
PIECE_BYTES = 128 << 10

#: The entries of a domain's folder: included as they are, in another form, or not at all.
AS_IT_IS, OTHERWISE, LEFT_OUT = "as it is", "in another form", "left out"
CONTENTS = {
    "certs": AS_IT_IS,
    "web": AS_IT_IS,  # tokens, the key of logins, ended logins
    audit.FOLDER: AS_IT_IS,
    loop.MARK: AS_IT_IS,
    "keys": OTHERWISE,
    "store.db": OTHERWISE,
    "brokers": OTHERWISE,
    "pipeline": OTHERWISE,
    "history": OTHERWISE,
    "agent": LEFT_OUT,  # the data of resources
    "sensor": LEFT_OUT,  # reports that wait for a channel
    "inform": LEFT_OUT,  # views of the log of contexts
    "logs": LEFT_OUT,
    "run": LEFT_OUT,
    domain_tree.PORT_FILE: LEFT_OUT,
}

Progress = Callable[[str, float], None]  # (current step, completed share)


class StreamBackup(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    config: dict[str, Any]
    state: dict[str, Any]


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    version: str
    domain: str
    made_at_s: float
    records: int
    streams: tuple[StreamBackup, ...]
    files: dict[str, str]  # path: SHA-256
    elsewhere: dict[str, str] = {}  # not included: files, parts of the pipeline, and where they are


async def backup(
    settings: app_settings.Settings,
    place: home.Home,
    file: pathlib.Path,
    *,
    progress: Progress = lambda _, __: None,
) -> BackupManifest:
    """Write the domain of this home to a new file."""
    if await asyncio.to_thread(file.exists):
        raise errors.AlreadyExists(f"{file} already exists", hint="choose a new file")
    if not await asyncio.to_thread(file.parent.is_dir):
        raise errors.NotFound(f"the folder {file.parent} does not exist", hint="create it first")
    with tempfile.TemporaryDirectory(prefix=".muster-backup-", dir=file.parent) as folder:
        work = pathlib.Path(folder)
        progress("the pipeline", 0.0)
        elsewhere = await asyncio.to_thread(
            state_copy.take, settings.pipeline, settings.domain.folder, work / PIPELINE
        )
        async with _connected(settings) as (bus, store):
            names = await bus.streams()
            steps = 2 + len(names)
            progress("the store", 0.5 / steps)
            records = await store_backup.backup(store, work / STORE)
            await asyncio.to_thread((work / STREAMS).mkdir)
            streams = []
            for done, name in enumerate(names, 1):
                progress(f"stream {name}", done / steps)
                streams.append(await _snapshot_stream(bus, name, work / STREAMS / name))
        progress("the archive", (steps - 1) / steps)
        return await asyncio.to_thread(_pack, settings, place, work, file, records, tuple(streams), elsewhere)


async def restore(
    file: pathlib.Path, place: home.Home, *, progress: Progress = lambda _, __: None
) -> tuple[BackupManifest, app_settings.Settings]:
    """Create a home from a backup. It must not exist yet, and does not exist if this fails.

    A store or keys outside of the home must be empty, and are empty if this fails. After a crash, a store
    outside of the home may be partially restored: it cannot be opened, and another restore empties it first.
    """
    if place.root.exists() and any(place.root.iterdir()):
        raise errors.AlreadyExists(f"{place.root} is not empty", hint="choose another folder with --home")
    await asyncio.to_thread(place.root.parent.mkdir, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".muster-restore-", dir=place.root.parent) as folder:
        work = pathlib.Path(folder)
        progress("checking the file", 0.0)
        manifest = await asyncio.to_thread(_unpack, file, work)
        fresh = home.Home(work / "home")
        settings, outside = await asyncio.to_thread(_lay_out, work, fresh, place, manifest)
        steps = 2 + len(manifest.streams)
        progress("the store", 1 / steps)
        in_place = False
        try:
            async with _restored_store(settings, work / STORE, fresh, place):
                other_store = {"store.url": "sqlite::memory:", "store.password": ""}
                async with _started(settings, other_store) as started, await _administrator(started) as bus:
                    for done, stream in enumerate(manifest.streams, 2):
                        progress(f"stream {stream.name}", done / steps)
                        pieces = _pieces(work / STREAMS / stream.name)
                        await snapshots.restore(bus, stream.config, stream.state, pieces)
                    if any(stream.name == protocol.STREAM for stream in manifest.streams):
                        await _mark_registry(started)
                await asyncio.to_thread(_put_in_place, outside, fresh.root, place.root)
                in_place = True
        except BaseException:
            if in_place:  # the final write to the store failed
                await asyncio.to_thread(_remove, place.root, *outside.values())
            raise
    loaded = loader.load(app_settings.Settings, file=place.settings_file)
    return manifest, loaded


@contextlib.asynccontextmanager
async def _connected(settings: app_settings.Settings) -> AsyncIterator[tuple[client.NatsBus, database.Store]]:
    """A bus connection as administrator, and the store: of the running domain, or of one started for this."""
    running = await asyncio.to_thread(home.DomainFolder(settings.domain.folder).running)
    if running is None:
        async with _started(settings, {}) as started, await _administrator(started) as bus:
            yield bus, started.store
        return
    trust = await asyncio.to_thread(identities.open_keyring, settings)
    role = identities.OWN[identities.ADMINISTRATOR]
    creds = await asyncio.to_thread(identities.credentials, trust, identities.ADMINISTRATOR, role)
    tls = await asyncio.to_thread(certificates.client_tls, settings) if running.ca else None
    async with (
        await client.connect(running.servers, creds=creds, tls=tls) as bus,
        await domain.open_store(settings) as store,
    ):
        yield bus, store


def _started(settings: app_settings.Settings, flags: dict[str, Any]) -> domain.Domain:
    """The domain without any component, for this process only."""
    quiet = {"bus.port": 0, "bus.locator": False, "health.enabled": False}
    return domain.Domain(
        loader.load(app_settings.Settings, flags=_flags(settings) | quiet | flags), monitored=False
    )


async def _administrator(started: domain.Domain) -> client.NatsBus:
    bus = await started.connect(identities.ADMINISTRATOR, identities.OWN[identities.ADMINISTRATOR])
    assert isinstance(bus, client.NatsBus)
    return bus


async def _mark_registry(started: domain.Domain) -> None:
    max_bytes = started.settings.retention.registry.max_bytes
    bus = await started.connect("registry-1", roles.Role.REGISTRY)
    async with bus, await registry_log.RegistryLog.open(bus, max_bytes=max_bytes) as log:
        await log.mark_restored()


@contextlib.asynccontextmanager
async def _restored_store(
    settings: app_settings.Settings, file: pathlib.Path, fresh: home.Home, place: home.Home
) -> AsyncIterator[None]:
    """The store is complete when the block ends; if the block fails, it is as before.

    A store in the home is complete at once, because it moves with the home.
    """
    url = settings.store.url
    kind, _, path = url.partition(":")
    if path == ":memory:":
        yield
        return
    if kind != "sqlite":
        password = None
        if settings.store.password:
            password = await asyncio.to_thread(loader.read_secret, settings.store.password, os.environ)
        async with store_backup.restoring(url, file, password=password):
            yield
        return
    there = settings.domain.folder / path
    outside = _outside(there, fresh, place)
    if outside is None:
        await store_backup.restore(f"sqlite:{there}", file)
        yield
        return
    was_there = await asyncio.to_thread(outside.exists)
    try:
        async with store_backup.restoring(f"sqlite:{outside}", file):
            yield
    except BaseException:
        if not was_there:
            for suffix in ("", "-wal", "-shm"):
                outside.with_name(outside.name + suffix).unlink(missing_ok=True)
        raise


def _flags(settings: app_settings.Settings) -> dict[str, Any]:
    return {
        field.key: loader.value_of(settings, field.path) for field in settings_.fields(app_settings.Settings)
    }


async def _snapshot_stream(bus: client.NatsBus, name: str, path: pathlib.Path) -> StreamBackup:
    snapshot = snapshots.StreamSnapshot(bus, name)
    with await asyncio.to_thread(path.open, "wb") as file:
        async for piece in snapshot:
            await asyncio.to_thread(file.write, piece)
    return StreamBackup(name=name, config=snapshot.config, state=snapshot.state)


async def _pieces(path: pathlib.Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(path.open, "rb") as file:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece


# Files: these functions block.


def _pack(
    settings: app_settings.Settings,
    place: home.Home,
    work: pathlib.Path,
    file: pathlib.Path,
    records: int,
    streams: tuple[StreamBackup, ...],
    elsewhere: dict[str, str],
) -> BackupManifest:
    members = {"muster.toml": place.settings_file, STORE: work / STORE}
    for name, entry in (_entries(settings) | {PIPELINE: work / PIPELINE}).items():
        members |= {name: entry} if entry.is_file() else {}
        members |= {f"{name}/{path.relative_to(entry)}": path for path in _files_below(entry)}
    for key, path in _named_files(settings).items():
        if path.is_file() and (key in rule_files.KEYS or path.is_relative_to(place.root)):
            members[f"{FILES}/{key}"] = path
        elif path.is_file():
            elsewhere = elsewhere | {f"file of {key}": str(path)}
    members |= {f"{STREAMS}/{stream.name}": work / STREAMS / stream.name for stream in streams}
    manifest = BackupManifest(
        format=FORMAT,
        version=muster.__version__,
        domain=settings.domain.name,
        made_at_s=time.time(),
        records=records,
        streams=streams,
        files={name: _digest(path) for name, path in members.items()},
        elsewhere=elsewhere,
    )
    (work / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    draft = work / "archive"
    with tarfile.open(draft, "w:gz", compresslevel=3) as archive:
        for name, path in {MANIFEST: work / MANIFEST, **members}.items():
            archive.add(path, name, recursive=False)
    draft.chmod(0o600)
    core_files.sync_file(draft)
    os.link(draft, file)  # not a rename, which would replace a file that was created meanwhile
    core_files.sync_folder(file.parent)
    return manifest


def _files_below(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]


def _named_files(settings: app_settings.Settings) -> dict[str, pathlib.Path]:
    """The paths that settings name, by key; not a program, which is part of the machine."""
    named = {
        field.key: str(loader.value_of(settings, field.path)).removeprefix("file:")
        for field in settings_.fields(app_settings.Settings)
        if field.secret or (field.is_path and field.key != "bus.binary")
    }
    return {key: pathlib.Path(os.path.normpath(path)) for key, path in named.items() if path.startswith("/")}


def _entries(settings: app_settings.Settings) -> dict[str, pathlib.Path]:
    """What is included as it is, by its name in the archive."""
    entries = {name: settings.domain.folder / name for name, how in CONTENTS.items() if how == AS_IT_IS}
    return entries | {"keys": settings.keys_folder}


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(file: pathlib.Path, work: pathlib.Path) -> BackupManifest:
    """Extract all files as the manifest lists them, or fail."""
    try:
        with tarfile.open(file, "r:gz") as archive:
            _extract(archive, work)
        manifest = msgspec.json.decode((work / MANIFEST).read_bytes(), type=BackupManifest)
    except (tarfile.TarError, EOFError, msgspec.MsgspecError, ValueError, OSError, RecursionError) as error:
        if isinstance(error, FileNotFoundError) and error.filename == str(file):
            raise errors.NotFound(f"the file {file} does not exist") from error
        raise errors.InvalidInput(f"{file} is not a backup or is damaged: {error}") from error
    if manifest.format != FORMAT:
        raise errors.InvalidInput(f"{file} has the format {manifest.format}; this version reads {FORMAT}")
    digests = {str(path.relative_to(work)): _digest(path) for path in _files_below(work)}
    digests.pop(MANIFEST)
    if digests != manifest.files:
        wrong = sorted(
            name for name in {*digests, *manifest.files} if digests.get(name) != manifest.files.get(name)
        )
        raise errors.InvalidInput(f"{file} is damaged: wrong digest of {', '.join(wrong[:5])}")
    return manifest


def _extract(archive: tarfile.TarFile, work: pathlib.Path) -> None:
    """Extract plain files below ``work`` only. (The filter of the library requires Python 3.11.4.)"""
    for member in archive:
        path = (work / member.name).resolve()
        content = archive.extractfile(member) if member.isfile() else None
        if content is None or not path.is_relative_to(work.resolve()):
            raise tarfile.ExtractError(f"{member.name[:200]!r} is not allowed in a backup")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            shutil.copyfileobj(content, file)
        path.chmod(member.mode & 0o755)
    for folder in filter(pathlib.Path.is_dir, work.rglob("*")):
        folder.chmod(0o700)


def _outside(path: pathlib.Path, fresh: home.Home, place: home.Home) -> pathlib.Path | None:
    """The final location of ``path`` in the new home, if that is outside of the home."""
    inside = path.is_relative_to(fresh.root)
    final = pathlib.Path(os.path.normpath(place.root / path.relative_to(fresh.root) if inside else path))
    return None if final.is_relative_to(place.root) else final


def _lay_out(
    work: pathlib.Path, fresh: home.Home, place: home.Home, manifest: BackupManifest
) -> tuple[app_settings.Settings, dict[pathlib.Path, pathlib.Path]]:
    """The settings for the restore, and the folders to be copied to locations outside of the home."""
    fresh.root.mkdir(mode=0o700)
    (work / "muster.toml").rename(fresh.settings_file)
    fresh.stamp()
    settings = loader.load(app_settings.Settings, file=fresh.settings_file)
    if _outside(settings.domain.folder, fresh, place) is not None:
        raise errors.Refused(
            f"the settings place the domain's data outside of its home, in {settings.domain.folder}",
            hint='restore manually, or set domain.data_dir = "." in the backup\'s muster.toml',
        )
    home.DomainFolder(settings.domain.folder).create()
    keys_to = _outside(settings.keys_folder, fresh, place)
    if keys_to is not None:
        if keys_to.exists() and any(keys_to.iterdir()):
            raise errors.AlreadyExists(
                f"the settings place the keys in {keys_to}, which is not empty", hint="move it first"
            )
        staged = {"trust.keys_dir": str(work / "keys")}
        settings = loader.load(app_settings.Settings, file=fresh.settings_file, flags=staged)
    for name, entry in _entries(settings).items():
        if (work / name).exists() and entry != work / name:
            entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            (work / name).rename(entry)
        if entry.is_dir():
            entry.chmod(0o700)
    outside = {} if keys_to is None else {work / "keys": keys_to}
    for key, path in _named_files(settings).items():
        staged_file, final = work / FILES / key, _outside(path, fresh, place)
        if not staged_file.is_file():
            continue
        if final is None:
            is_final = path.is_relative_to(place.root)  # an absolute path in the settings
            inside = fresh.root / path.relative_to(place.root) if is_final else path
            inside.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            staged_file.rename(inside)
        elif not final.exists():
            outside[staged_file] = final
    return settings, outside | _lay_out_pipeline(settings, work / PIPELINE, fresh, place, manifest)


def _lay_out_pipeline(
    settings: app_settings.Settings,
    staged: pathlib.Path,
    fresh: home.Home,
    place: home.Home,
    manifest: BackupManifest,
) -> dict[pathlib.Path, pathlib.Path]:
    """As `_lay_out`. Outside of the home only the history is restored, unless it exists."""
    outside: dict[pathlib.Path, pathlib.Path] = {}
    is_complete = True
    for kind, folder in state_copy.places(settings.pipeline, settings.domain.folder).items():
        final = None if folder is None else _outside(folder, fresh, place)
        if folder is not None and final is None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in (staged / kind).glob("*"):
                path.rename(folder / path.name)
        elif kind == state_copy.HISTORY and final is not None and not _is_used(final):
            outside |= {staged / kind: final} if (staged / kind).is_dir() else {}
        else:
            is_complete = False
    if not is_complete:
        last = {stream.name: int(stream.state["last_seq"]) for stream in manifest.streams}
        state_copy.write_restored(settings.domain.folder, last)
    return outside


def _is_used(folder: pathlib.Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _put_in_place(outside: dict[pathlib.Path, pathlib.Path], fresh: pathlib.Path, root: pathlib.Path) -> None:
    """Move the home, and copy the folders outside of it: all or none."""
    _sync(fresh)
    copied: list[pathlib.Path] = []
    try:
        for source, target in outside.items():
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                core_files.create(target, source.read_bytes())
                copied.append(target)
                continue
            with private_files.staged_folder(target) as draft:  # copied, because it may be on another disk
                shutil.copytree(source, draft, dirs_exist_ok=True)
                _sync(draft)
            copied.append(target)
        with contextlib.suppress(FileNotFoundError):
            root.rmdir()
        fresh.rename(root)
        core_files.sync_folder(root.parent)
    except BaseException:
        _remove(*copied)
        raise


def _remove(*paths: pathlib.Path) -> None:
    """Undo `_put_in_place`."""
    for path in paths:
        path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)


def _sync(folder: pathlib.Path) -> None:
    """Everything below the folder is on disk when this returns."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            core_files.sync_folder(path)
        elif path.is_file():
            core_files.sync_file(path)
