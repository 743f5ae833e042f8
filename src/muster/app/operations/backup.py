"""Backup and restore of a domain in one file: settings, keys, certificates, streams and pipeline.

A backup works on a running domain, which continues meanwhile, and on a stopped one, whose brokers are started
for it without any component.  The pipeline's files and each stream are consistent snapshots, taken in that
order: positions in the checkpoint and in files are never ahead of a stream.  The leases are last, so that no
log has an epoch that they have not reached.  `CONTENTS` lists what is included.

A restored registry continues with higher epochs than any that were assigned after the backup
(`muster.manage.registry.registry_log`).  A backup of 0.1.0 is converted (`first_release`).

    manifest.json     description, and the SHA-256 of every other file
    muster.toml       settings
    keys/             as in the domain's folder, also from outside of it
    certs/, web/, …   the entries of the domain's folder that `CONTENTS` includes
    files/KEY         the file that the setting KEY names
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
import glob
import hashlib
import os
import pathlib
import shutil
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import msgspec

import muster
from muster.app import certificates, domain, home, identities, positions
from muster.app import settings as app_settings
from muster.app.components import loop
from muster.app.machines import membership, program
from muster.app.operations import audit, first_release, rule_files
from muster.bus import leases
from muster.bus.client import client
from muster.bus.streams import snapshots
from muster.core import errors
from muster.core import files as core_files
from muster.core.settings import loader, sections
from muster.manage import protocol
from muster.pipeline.job import state_copy
from muster.trust import private_files

FORMAT, FORMER_FORMAT = 2, 1
JOB = "backup"
SUFFIX = ".tar.gz"
MANIFEST = "manifest.json"
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
    positions.FOLDER: AS_IT_IS,
    "keys": OTHERWISE,
    "brokers": OTHERWISE,
    "pipeline": OTHERWISE,
    "history": OTHERWISE,
    "agent": LEFT_OUT,  # the data of resources
    "sensor": LEFT_OUT,  # reports that wait for a channel
    "inform": LEFT_OUT,  # views of the log of contexts
    "logs": LEFT_OUT,
    "run": LEFT_OUT,
    membership.FILE: LEFT_OUT,  # the other machines join again
    membership.RECOVERING: LEFT_OUT,
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
    streams: tuple[StreamBackup, ...]
    files: dict[str, str]  # path: SHA-256
    elsewhere: dict[str, str] = {}  # not included: files, parts of the pipeline, and where they are


class Replicas(Protocol):
    """What `muster.app.machines.recovery` puts in place of a part of a backup. The functions block."""

    streams: Sequence[StreamBackup]
    folder: pathlib.Path

    def change_settings(self, file: pathlib.Path) -> None: ...
    def change_keys(self, settings: app_settings.Settings) -> None: ...


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
        with contextlib.suppress(FileNotFoundError):  # copied before the streams, and packed after them
            await asyncio.to_thread(
                shutil.copytree, settings.domain.folder / positions.FOLDER, work / positions.FOLDER
            )
        async with _connected(settings) as bus:
            names = sorted(await bus.streams(), key=lambda name: name == f"KV_{leases.BUCKET}")
            steps = 2 + len(names)
            await asyncio.to_thread((work / STREAMS).mkdir)
            streams = []
            for done, name in enumerate(names, 1):
                progress(f"stream {name}", done / steps)
                streams.append(await snapshot_stream(bus, name, work / STREAMS / name))
        progress("the archive", (steps - 1) / steps)
        return await asyncio.to_thread(_pack, settings, place, work, file, tuple(streams), elsewhere)


async def restore(
    file: pathlib.Path,
    place: home.Home,
    *,
    replicas: Replicas | None = None,
    progress: Progress = lambda _, __: None,
) -> tuple[BackupManifest, app_settings.Settings]:
    """Create a home from a backup. It must not exist yet, and does not exist if this fails.

    Keys outside of the home must not exist yet either. ``replicas``: streams in place of those of the backup.
    """
    if place.root.exists() and any(place.root.iterdir()):
        raise errors.AlreadyExists(f"{place.root} is not empty", hint="choose another folder with --home")
    await asyncio.to_thread(place.root.parent.mkdir, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".muster-restore-", dir=place.root.parent) as folder:
        work = pathlib.Path(folder)
        progress("checking the file", 0.0)
        manifest = await asyncio.to_thread(_unpack, file, work)
        fresh = home.Home(work / "home")
        if replicas is not None:
            manifest = msgspec.structs.replace(manifest, streams=tuple(replicas.streams))
            await asyncio.to_thread(replicas.change_settings, work / "muster.toml")
        settings, outside = await asyncio.to_thread(_lay_out, work, fresh, place, manifest)
        if replicas is not None:
            await asyncio.to_thread(replicas.change_keys, settings)
        former = work / first_release.STORE if manifest.format == FORMER_FORMAT else None
        streams = work / STREAMS if replicas is None else replicas.folder
        await restore_streams(settings, manifest.streams, streams, former=former, progress=progress)
        await asyncio.to_thread(_put_in_place, outside, fresh.root, place.root)
    loaded = loader.load(app_settings.Settings, file=place.settings_file)
    return manifest, loaded


async def verify(file: pathlib.Path, *, progress: Progress = lambda _, __: None) -> BackupManifest:
    """Restore a backup completely, beside the file, and remove that. Raises what a restore would."""
    with tempfile.TemporaryDirectory(prefix=".muster-verify-", dir=file.parent) as folder:
        work = pathlib.Path(folder)
        progress("checking the file", 0.0)
        manifest = await asyncio.to_thread(_unpack, file, work)
        fresh = home.Home(work / "home")
        # Within the folder, and on no port that the domain uses.
        settings, _ = await asyncio.to_thread(_lay_out, work, fresh, fresh, manifest, is_trial=True)
        former = work / first_release.STORE if manifest.format == FORMER_FORMAT else None
        await restore_streams(settings, manifest.streams, work / STREAMS, former=former, progress=progress)
        return manifest


def dated(folder: pathlib.Path, domain_name: str) -> pathlib.Path:
    """A new file for a backup."""
    return folder / f"{domain_name}-{time.strftime('%Y%m%d-%H%M%S')}{SUFFIX}"


def set_aside(file: pathlib.Path, domain_name: str) -> pathlib.Path:
    """Rename a file of `dated` that could not be verified. It does not count as a backup, and replaces the
    former one, so that failures do not fill the disk. Blocks."""
    return file.replace(file.with_name(f"{domain_name}-unverified{SUFFIX}"))


def remove_older(folder: pathlib.Path, domain_name: str, keep: int) -> list[pathlib.Path]:
    """Delete all but the newest files of `dated`. Blocks."""
    older = sorted(folder.glob(f"{glob.escape(domain_name)}-{8 * '[0-9]'}-{6 * '[0-9]'}{SUFFIX}"))[:-keep]
    for path in older:
        path.unlink(missing_ok=True)
    return older


def job(
    settings: app_settings.Settings, place: home.Home, folder: pathlib.Path, cron: str, keep: int | None
) -> str:
    """A manifest: this machine writes a verified backup to the folder regularly."""
    words = [program.current(), "--home", str(place.root), "backup", str(folder), "--verify"]
    entry = {
        "name": JOB,
        "type": "process",
        "agent": settings.manage.agent_name,
        "schedule": {"cron": cron, "missed": "last"},
        "config": {"command": [*words, *(["--keep", str(keep)] if keep else [])]},
    }
    return msgspec.json.encode({"resources": [entry]}).decode()


async def restore_streams(
    settings: app_settings.Settings,
    streams: Sequence[StreamBackup],
    folder: pathlib.Path,
    *,
    former: pathlib.Path | None = None,
    progress: Progress = lambda _, __: None,
) -> None:
    """Into the empty storage of a domain. ``former``: the database of 0.1.0."""
    async with _started(settings) as started:
        async with await _administrator(started) as bus:
            for done, stream in enumerate(streams, 1):
                progress(f"stream {stream.name}", 0.5 + done / (2 * len(streams) + 2))
                # The brokers of other machines are not here: replicas are added when they join.
                replicas = min(stream.config["num_replicas"], settings.bus.replicas)
                config = stream.config | {"num_replicas": replicas}
                await snapshots.restore(bus, config, stream.state, _pieces(folder / stream.name))
        if former is not None:
            await first_release.convert(started, first_release.records_of_backup(former))
        if protocol.STREAM in await started.bus.streams():
            async with first_release.open_registry(started) as log:
                await log.mark_restored()


async def convert(place: home.Home, *, source: pathlib.Path | None = None) -> int:
    """Convert a home of 0.1.0 in place; returns the number of records of its database.

    ``source``: a backup of it, made by 0.1.0, if its database is on a server.
    """
    place.require()
    if place.stored_format().format != home.FORMER_FORMAT:
        raise errors.Refused(f"the home {place.root} has the present format already")
    with tempfile.TemporaryDirectory(prefix=".muster-convert-", dir=place.root) as folder:
        work = pathlib.Path(folder)
        former = await asyncio.to_thread(first_release.read_settings, place.settings_file)
        draft = place.settings_file.with_suffix(".draft.toml")  # paths in it are relative to its folder
        try:
            await asyncio.to_thread(core_files.write, draft, former.rest.encode())
            settings = loader.load(app_settings.Settings, file=draft)
        finally:
            draft.unlink(missing_ok=True)
        if source is not None:
            await asyncio.to_thread(_unpack, source, work / "backup")
            records = first_release.records_of_backup(work / "backup" / first_release.STORE)
        else:
            records = first_release.records_of_home(former, settings.domain.folder)
        async with _started(settings) as started:
            count = await first_release.convert(started, records)
    await asyncio.to_thread(first_release.finish, place, former, settings.domain.folder)
    return count


@contextlib.asynccontextmanager
async def _connected(settings: app_settings.Settings) -> AsyncIterator[client.NatsBus]:
    """A bus connection as administrator: of the running domain, or of one started for this."""
    running = await asyncio.to_thread(home.DomainFolder(settings.domain.folder).running)
    if running is None:
        async with _started(settings) as started, await _administrator(started) as bus:
            yield bus
        return
    trust = await asyncio.to_thread(identities.open_keyring, settings)
    role = identities.OWN[identities.ADMINISTRATOR]
    creds = await asyncio.to_thread(identities.credentials, trust, identities.ADMINISTRATOR, role)
    tls = await asyncio.to_thread(certificates.client_tls, settings) if running.ca else None
    async with await client.connect(running.servers, creds=creds, tls=tls) as bus:
        yield bus


def _started(settings: app_settings.Settings) -> domain.Domain:
    """The domain without any component, for this process only."""
    quiet = {"bus.port": 0, "bus.locator": False, "health.enabled": False}
    return domain.Domain(loader.load(app_settings.Settings, flags=_flags(settings) | quiet), monitored=False)


async def _administrator(started: domain.Domain) -> client.NatsBus:
    bus = await started.connect(identities.ADMINISTRATOR, identities.OWN[identities.ADMINISTRATOR])
    assert isinstance(bus, client.NatsBus)
    return bus


def _flags(settings: app_settings.Settings) -> dict[str, Any]:
    return {
        field.key: loader.value_of(settings, field.path) for field in sections.fields(app_settings.Settings)
    }


async def snapshot_stream(bus: client.NatsBus, name: str, path: pathlib.Path) -> StreamBackup:
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
    streams: tuple[StreamBackup, ...],
    elsewhere: dict[str, str],
) -> BackupManifest:
    members = {"muster.toml": place.settings_file}
    copied = {name: work / name for name in (PIPELINE, positions.FOLDER)}
    for name, entry in (_entries(settings) | copied).items():
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
        for field in sections.fields(app_settings.Settings)
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
    if manifest.format not in (FORMER_FORMAT, FORMAT):
        raise errors.InvalidInput(
            f"{file} has the format {manifest.format}; this version reads {FORMER_FORMAT} and {FORMAT}"
        )
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
    work: pathlib.Path,
    fresh: home.Home,
    place: home.Home,
    manifest: BackupManifest,
    *,
    is_trial: bool = False,
) -> tuple[app_settings.Settings, dict[pathlib.Path, pathlib.Path]]:
    """The settings for the restore, and the folders to be copied to locations outside of the home.
    ``is_trial``: what is restored is not used."""
    fresh.root.mkdir(mode=0o700)
    settings_text = (work / "muster.toml").read_bytes()
    if manifest.format == FORMER_FORMAT:
        settings_text = first_release.read_settings(work / "muster.toml").rest.encode()
    core_files.write(fresh.settings_file, settings_text)
    fresh.stamp()
    trial = {"bus.host": "127.0.0.1", "bus.tls": "auto", "bus.route_port": 0, "bus.names": []}
    settings = loader.load(app_settings.Settings, file=fresh.settings_file, flags=trial if is_trial else {})
    if _outside(settings.domain.folder, fresh, place) is not None:
        raise errors.Refused(
            f"the settings place the domain's data outside of its home, in {settings.domain.folder}",
            hint='restore manually, or set domain.data_dir = "." in the backup\'s muster.toml',
        )
    home.DomainFolder(settings.domain.folder).create()
    keys_to = _outside(settings.keys_folder, fresh, place)
    if keys_to is not None:
        if not is_trial and keys_to.exists() and any(keys_to.iterdir()):
            raise errors.AlreadyExists(
                f"the settings place the keys in {keys_to}, which is not empty", hint="move it first"
            )
        staged = {"trust.keys_dir": str(work / "keys"), **(trial if is_trial else {})}
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
