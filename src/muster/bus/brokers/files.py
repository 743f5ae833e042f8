"""The files of a broker: its folders, its configuration, and its log output. All functions block."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
from pathlib import Path

from muster.bus.brokers import config, diagnosis
from muster.core import errors, files

FULL_BYTES = config.MIB  # with less than this, some messages cannot be stored
_ID_DIGITS = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
FREE_BYTES_MIN = 16 * config.MIB  # with less than this a broker is not started


def prepare(settings: config.BrokerConfig) -> None:
    try:
        for folder in filter(None, (settings.directory, settings.store_path)):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            free_bytes = shutil.disk_usage(folder).free
            if free_bytes < FREE_BYTES_MIN:
                raise diagnosis.disk_full(settings.name, folder, free_bytes)
        _found(settings)
    except OSError as error:
        raise diagnosis.unwritable(settings.name, error) from error
    write_config(settings)


def has_single_storage(settings: config.BrokerConfig) -> bool:
    """Whether its store is that of a broker without a cluster, whose streams a cluster would delete."""
    store = settings.store_path
    if store is None or _group_folder(settings, store).exists():
        return False
    return any(store.glob("jetstream/*/streams"))


def _group_folder(settings: config.BrokerConfig, store: Path) -> Path:
    system = settings.trust.system_account if settings.trust else "$SYS"
    return store / "jetstream" / system / "_js_" / "_meta_"


def _found(settings: config.BrokerConfig) -> None:
    """Write the members of the storage group, in the format of the server, for a new store."""
    cluster, store = settings.cluster, settings.store_path
    if cluster is None or store is None or not cluster.founders:
        return
    if has_single_storage(settings):
        raise errors.Conflict(
            f"the store of broker {settings.name} is that of a single broker, and cannot become that of a "
            "cluster",
            hint="`muster backup` with bus.route_port = 0, then `muster restore` into a home with it",
        )
    folder = _group_folder(settings, store)
    if folder.exists():
        return
    peers = b"".join(map(_peer_id, cluster.founders))
    count = len(cluster.founders)
    folder.mkdir(parents=True, mode=0o700)
    files.write(folder / "peers.idx", struct.pack("<II", count, count) + peers + struct.pack("<H", 0))


def _peer_id(name: str) -> bytes:
    """The id that the server gives to a broker of this name."""
    digest = hashlib.sha256(name.encode()).digest()[:8]
    return bytes(_ID_DIGITS[byte % len(_ID_DIGITS)] for byte in digest)


def full_disk(settings: config.BrokerConfig) -> diagnosis.BrokerFailed | None:
    """The error for a disk on which the next message may not fit, or that is gone."""
    try:
        for folder in filter(None, (settings.directory, settings.store_path)):
            free_bytes = shutil.disk_usage(folder).free
            if free_bytes < FULL_BYTES:
                return diagnosis.disk_full(settings.name, folder, free_bytes)
    except OSError as error:
        return diagnosis.unwritable(settings.name, error)
    return None


def has_room(settings: config.BrokerConfig) -> bool:
    """Whether the disk has enough space to start a broker."""
    folders = filter(None, (settings.directory, settings.store_path))
    return all(shutil.disk_usage(folder).free >= FREE_BYTES_MIN for folder in folders)


def write_config(settings: config.BrokerConfig) -> None:
    """Write the file atomically and readable by its owner only: it may contain secrets. Every start writes it
    again."""
    try:
        files.write(settings.config_path, config.render(settings).encode(), durable=False)
    except OSError as error:
        raise diagnosis.unwritable(settings.name, error) from error


def is_written(settings: config.BrokerConfig) -> bool:
    """Whether the file has these settings."""
    try:
        return settings.config_path.read_bytes() == config.render(settings).encode()
    except OSError:
        return False


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def read_from(path: Path, offset: int) -> str:
    """The text after ``offset``, at most 64 KiB; from the start if the file was rotated."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(offset if offset <= end else 0, end - 65_536))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def output(settings: config.BrokerConfig, log_offset: int) -> str:
    """What the server printed, and what it logged from this offset on. Blocks."""
    return read_from(settings.output_path, 0) + read_from(settings.log_path, log_offset)
