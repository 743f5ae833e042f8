"""Recovery of a domain that has lost the quorum of its storage: from the replicas of one machine.

With two of three machines gone, the brokers that are left elect no leader: nothing can be read or stored. The
machine has a replica of each stream, though. A broker without a cluster reads a copy of them, and they are
restored into the storage of a domain on one machine, whose other machines have lost their credentials and
certificates. Others can join it then.

A replica may lack the last messages: two of three acknowledge one. What the domain's process recorded of the
streams (`muster.app.operations.storage_monitor`) shows what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from muster.app import home, identities
from muster.app import settings as app_settings
from muster.app.machines import membership, roles
from muster.app.operations import backup, storage_monitor
from muster.bus.brokers import broker, config
from muster.bus.client import client
from muster.bus.streams import integrity, replica
from muster.core import errors, files
from muster.core.formats import toml
from muster.trust import keyring, machine_keys

REACH_S = 3.0


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """``lost``: what is known to be missing, by stream. ``newest``: when the newest message was stored.
    ``removed``: machines that have to join again. ``kept``: the former storage."""

    domain: str
    streams: int
    lost: dict[str, str]
    newest: str
    removed: tuple[str, ...]
    kept: str


async def recover(
    place: home.Home,
    settings: app_settings.Settings,
    *,
    source: pathlib.Path | None = None,
    force: bool = False,
    progress: backup.Progress = lambda _, __: None,
) -> Recovery:
    """``source``: a backup of the machine that signed, for one that has no keys to sign with. ``force``:
    although another machine replies. The domain must not run. After a failure everything is as before."""
    folder = home.DomainFolder(settings.domain.folder)
    if folder.holder() is not None:
        raise errors.Conflict("the domain runs on this machine", hint="`muster down` first")
    await asyncio.to_thread(_roll_back, folder)  # what a former command has begun
    machines = await asyncio.to_thread(membership.load, folder.root)
    if machines is None or not machines.here.broker or not machines.here.stores:
        raise errors.Refused(
            "this machine has no replica of the domain's streams", hint="`muster restore` a backup instead"
        )
    trust = await asyncio.to_thread(identities.open_keyring, settings)
    if source is None and not trust.signs:
        raise errors.Refused(
            "this machine joined: it has no keys to sign credentials with",
            hint="name a backup of the first machine with --from; what it stored later is taken from here",
        )
    if not force and (replying := await _replying(machines)):
        raise errors.Refused(
            f"{', '.join(replying)} replies: two domains would go on with the same data",
            hint="stop Muster there, or cut it off; then repeat the command, or force it with --force",
        )
    with tempfile.TemporaryDirectory(prefix=".muster-recover-", dir=place.root.parent) as name:
        work = pathlib.Path(name)
        streams = await _read_replicas(settings, trust, machines, folder, work, progress)
        recorded = await asyncio.to_thread(storage_monitor.load, folder.brokers / storage_monitor.FILE)
        lost = missing(recorded.marks, {stream.name: stream for stream in streams})
        if source is None:
            kept = await _replace_storage(settings, trust, machines, folder, work, streams)
        else:
            replicas = _Replicas(streams, work / backup.STREAMS, settings, place.settings_file, trust)
            kept = await _replace_home(place, source, replicas, progress)
    return Recovery(
        domain=settings.domain.name,
        streams=len(streams),
        lost=lost,
        newest=max((stream.state["last_ts"] for stream in streams), default=""),
        removed=tuple(known.name for known in machines.machines if known is not machines.here),
        kept=str(kept),
    )


def missing(
    marks: Mapping[str, integrity.StreamMark], streams: Mapping[str, backup.StreamBackup]
) -> dict[str, str]:
    """What the streams had when they were last seen, and the replicas have not. Pure."""
    lost: dict[str, str] = {}
    for name, mark in marks.items():
        stream = streams.get(name)
        if stream is None:
            lost[name] = "all messages: there is no replica here"
        elif stream.state["last_seq"] < mark.last:
            first = stream.state["last_seq"] + 1
            lost[name] = f"the last {mark.last + 1 - first:,} messages, {first:,} to {mark.last:,}"
    return lost


async def _replying(machines: membership.MachineList) -> list[str]:
    """The other machines whose brokers accept connections."""

    async def replies(machine: membership.Machine) -> bool:
        try:
            async with asyncio.timeout(REACH_S):
                _, writer = await asyncio.open_connection(machine.address, machine.route_port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    others = [machine for machine in machines.brokers if machine is not machines.here]
    answers = await asyncio.gather(*map(replies, others))
    return [machine.name for machine, answer in zip(others, answers, strict=True) if answer]


async def _read_replicas(
    settings: app_settings.Settings,
    trust: keyring.Keyring,
    machines: membership.MachineList,
    folder: home.DomainFolder,
    work: pathlib.Path,
    progress: backup.Progress,
) -> list[backup.StreamBackup]:
    """Copies of all streams that this machine has, as in a backup."""
    progress("a copy of the replicas", 0.0)
    stored = folder.brokers / machines.here.broker / "store" / "jetstream"
    if not await asyncio.to_thread(stored.is_dir):
        raise errors.NotFound(f"there is no storage in {stored}")
    alone = work / "broker"
    # Without the state of the cluster; the storage itself stays as it is.
    await asyncio.to_thread(
        shutil.copytree, stored, alone / "store" / "jetstream", ignore=shutil.ignore_patterns("_js_")
    )
    await asyncio.to_thread(replica.make_single, alone / "store" / "jetstream")
    streams: list[backup.StreamBackup] = []
    async with _reader(settings, trust, alone) as bus:
        names = await bus.streams()
        (work / backup.STREAMS).mkdir()
        for done, name in enumerate(names, 1):
            progress(f"stream {name}", done / (2 * len(names)))
            streams.append(await backup.snapshot_stream(bus, name, work / backup.STREAMS / name))
    return streams


@contextlib.asynccontextmanager
async def _reader(
    settings: app_settings.Settings, trust: keyring.Keyring, directory: pathlib.Path
) -> AsyncIterator[client.NatsBus]:
    """A broker without a cluster on this storage, for this process only."""
    documents = await asyncio.to_thread(trust.broker)
    made = broker.Broker(
        config.BrokerConfig(
            name="recovery",
            directory=directory,
            storage=config.BrokerStorage(
                file_bytes_max=settings.bus.storage_disk_bytes,
                memory_bytes_max=settings.bus.storage_memory_bytes,
            ),
            trust=config.OperatorTrust(
                operator_jwt=documents.operator_jwt,
                system_account=documents.system_account,
                accounts=documents.accounts,
            ),
            payload_bytes_max=settings.bus.max_payload_bytes,
        ),
        program=pathlib.Path(settings.bus.binary) if settings.bus.binary else None,
    )
    creds = await asyncio.to_thread(trust.credentials, identities.ADMINISTRATOR)
    try:
        await made.start()
        async with await client.connect([made.url], creds=creds) as bus:
            yield bus
    finally:
        await made.stop()


async def _replace_storage(
    settings: app_settings.Settings,
    trust: keyring.Keyring,
    machines: membership.MachineList,
    folder: home.DomainFolder,
    work: pathlib.Path,
    streams: list[backup.StreamBackup],
) -> pathlib.Path:
    """Restore the streams in place of the storage of a cluster. Returns where that is now."""
    kept = folder.brokers.with_name(f"{folder.brokers.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    if kept.exists():  # the clock was set back
        raise errors.AlreadyExists(f"{kept} exists", hint="repeat the command")
    mark = folder.root / membership.RECOVERING
    begun = msgspec.json.encode(_Begun(kept=kept.name, machines=machines))
    await asyncio.to_thread(files.write, mark, begun)
    try:
        if folder.holder() is not None:  # one that starts from now on finds the mark
            raise errors.Conflict("the domain was started on this machine", hint="`muster down` first")
        # By this thread: a cancellation must not return to the former storage meanwhile.
        folder.brokers.rename(kept)
        _begin_alone(settings, machines)
        await backup.restore_streams(settings, streams, work / backup.STREAMS)
    except BaseException:
        await asyncio.to_thread(_roll_back, folder)
        raise
    keys = machine_keys.MachineKeys(trust)
    for known in machines.machines:
        if known is not machines.here:
            await asyncio.to_thread(keys.revoke, known.name)
    await asyncio.to_thread(mark.unlink)
    return kept


class _Begun(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be restored if the recovery is interrupted."""

    kept: str
    machines: membership.MachineList


def _roll_back(folder: home.DomainFolder) -> None:
    """Undo a recovery that was not completed. Blocks."""
    mark = folder.root / membership.RECOVERING
    if not mark.exists():
        return
    begun = msgspec.json.decode(mark.read_bytes(), type=_Begun)
    kept = folder.brokers.with_name(begun.kept)
    if kept.exists():
        shutil.rmtree(folder.brokers, ignore_errors=True)
        kept.rename(folder.brokers)
    membership.store(folder.root, begun.machines)
    mark.unlink()


def _begin_alone(settings: app_settings.Settings, machines: membership.MachineList) -> None:
    """A domain on this machine. Its broker has another name, and admits no other's certificate. Blocks."""
    broker_name = f"{settings.domain.name}-1-{secrets.token_hex(2)}"
    here = msgspec.structs.replace(machines.here, broker=broker_name, stores=True)
    membership.store(settings.domain.folder, msgspec.structs.replace(machines, machines=(here,)))


# A machine that joined takes the place of the one that signed.


@dataclass
class _Replicas:
    """`backup.Replicas` of this machine: its address and its documents, which are newer than the backup."""

    streams: Sequence[backup.StreamBackup]
    folder: pathlib.Path
    settings: app_settings.Settings
    settings_file: pathlib.Path
    trust: keyring.Keyring

    def change_settings(self, file: pathlib.Path) -> None:
        own, values = (_flat(toml.read(path).tree) for path in (self.settings_file, file))
        known = self.settings.domain.name
        if values.get("domain.name", known) != known:
            raise errors.Conflict(f"the backup is of the domain {values['domain.name']}, not of {known}")
        values |= {key: value for key, value in own.items() if key in OF_MACHINE}
        files.write(file, (HEAD + toml.sections(values)).encode(), mode=files.PUBLIC)

    def change_keys(self, settings: app_settings.Settings) -> None:
        signing = identities.open_keyring(settings)
        if not signing.signs:
            raise errors.Refused(
                "the backup is of a machine that joined: it has no keys to sign credentials with",
                hint="name a backup of the first machine",
            )
        keys = machine_keys.MachineKeys(signing)
        keys.take_later(self.trust)
        for name in keys.machines():
            keys.revoke(name)
        own = settings.manage.agent_name
        for identity, role in membership.parts(own, roles.ALL, settings.domain.zone).items():
            if identity not in membership.SHARED:
                signing.issue(identity, role)


OF_MACHINE = (
    *("bus.host", "bus.tls", "bus.names", "bus.port", "bus.route_port"),
    *("domain.zone", "manage.agent_name"),
)
HEAD = "# Settings of a machine that took the place of the first, written by `muster recover`.\n"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in tree.items():
        below = isinstance(value, dict)
        values |= _flat(value, f"{prefix}{key}.") if below else {f"{prefix}{key}": value}
    return values


async def _replace_home(
    place: home.Home, source: pathlib.Path, replicas: _Replicas, progress: backup.Progress
) -> pathlib.Path:
    """Create the home of a first machine in place of this one. Returns where that is now."""
    kept = place.root.with_name(f"{place.root.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    fresh = home.Home(replicas.folder.parent / "place")
    await backup.restore(source, fresh, replicas=replicas, progress=progress)
    place.root.rename(kept)  # by this thread: a cancellation leaves no machine without a home
    try:
        fresh.root.rename(place.root)
    except BaseException:
        kept.rename(place.root)
        raise
    return kept
