"""The files of a broker: its folders, its configuration, and its log output. All functions block."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from muster.bus.brokers import config, diagnosis
from muster.core import files

FULL_BYTES = config.MIB  # with less than this, some messages cannot be stored
FREE_BYTES_MIN = 16 * config.MIB  # with less than this a broker is not started


def prepare(settings: config.BrokerConfig) -> None:
    try:
        for folder in filter(None, (settings.directory, settings.store_path)):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            free_bytes = shutil.disk_usage(folder).free
            if free_bytes < FREE_BYTES_MIN:
                raise diagnosis.disk_full(settings.name, folder, free_bytes)
    except OSError as error:
        raise diagnosis.unwritable(settings.name, error) from error
    write_config(settings)


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
