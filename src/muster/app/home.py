"""A home: a folder with the settings of one domain, and below it all that the domain keeps on this machine.

    muster.toml      settings
    NAME/            the domain's folder (`domain.data_dir` may put it elsewhere)
      keys/          seeds and credentials (nobody else may read them; `trust.keys_dir` may put it elsewhere)
      certs/         the domain's certificate authority and what it issued
      brokers/       what the brokers keep
      store.db       system state
      logs/          what processes say when they run detached
      run/           what is true only while the domain runs: the lock, where its doors are, and in pages/
                     where each of its processes says how it is

The lock in ``run/`` is held by the kernel for the process that runs the domain, so it cannot go stale: after
``kill -9`` it is free.  The pid written into it is only for telling people.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from muster.core import errors, files

FOLDER_NAME = ".muster"
SETTINGS_NAME = "muster.toml"


class RunningDomain(msgspec.Struct, frozen=True, kw_only=True):
    """What a running domain says about itself in ``run/domain.json``."""

    domain: str
    pid: int
    started_at_s: float
    version: str
    servers: tuple[str, ...]
    ca: str | None = None  # what to verify the brokers against, where they use TLS
    locator_url: str | None = None
    health_url: str | None = None
    web_url: str | None = None


@dataclass(frozen=True, slots=True)
class Home:
    root: Path

    @classmethod
    def find(cls, chosen: Path | None = None) -> Home:
        """The one chosen; else ``.muster`` here if it is a home; else ``.muster`` in the user's folder."""
        if chosen is not None:
            return cls(chosen.expanduser().absolute())
        here = cls(Path.cwd() / FOLDER_NAME)
        return here if here.settings_file.is_file() else cls(Path.home() / FOLDER_NAME)

    @property
    def settings_file(self) -> Path:
        return self.root / SETTINGS_NAME

    def expect(self) -> Home:
        """Itself, if `muster init` has been here."""
        if not self.settings_file.is_file():
            raise errors.NotFound(
                f"{self.root} is not a home: it has no {self.settings_file.name}",
                hint=f"make one with `muster init --home {self.root}`, or name another with --home",
            )
        return self


@dataclass(frozen=True, slots=True)
class DomainFolder:
    """The domain's folder: what lies where, and who runs it."""

    root: Path

    @property
    def brokers(self) -> Path:
        return self.root / "brokers"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def pages(self) -> Path:
        """Where each process tells at which address it says how it is (`muster.bus.http.health`)."""
        return self.run / "pages"

    @property
    def lock_file(self) -> Path:
        return self.run / "lock"

    @property
    def running_file(self) -> Path:
        return self.run / "domain.json"

    def create(self) -> None:
        """Make the folders, readable by their owner only; those that are there stay as they are."""
        for folder in (self.root, self.brokers, self.logs, self.run):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Be the one process that runs this domain; refused while another does."""
        self.run.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _lock(descriptor, fcntl.LOCK_EX):
                raise errors.AlreadyExists(
                    f"the domain in {self.root} is running already (pid {self._written_pid()})",
                    hint="`muster status` shows it, `muster down` stops it",
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            self.running_file.unlink(missing_ok=True)  # of one that was killed
            try:
                yield
            finally:
                self.running_file.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def holder(self) -> int | None:
        """The pid of the process that runs this domain, or None."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return None if _lock(descriptor, fcntl.LOCK_SH, tries=1) else self._written_pid()
        finally:
            os.close(descriptor)

    def announce(self, running: RunningDomain) -> None:
        """Write where the doors are, all at once or not at all."""
        files.write(self.running_file, msgspec.json.format(msgspec.json.encode(running)))

    def running(self) -> RunningDomain | None:
        """What the running domain says of itself; None when none runs or it is not up yet."""
        if self.holder() is None:
            return None
        try:
            return msgspec.json.decode(self.running_file.read_bytes(), type=RunningDomain)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _written_pid(self) -> int | None:
        try:
            return int(self.lock_file.read_text())
        except (OSError, ValueError):
            return None


def _lock(descriptor: int, kind: int, *, tries: int = 5) -> bool:
    """Whether it could be had. Somebody who only looks holds it for microseconds, hence the tries."""
    for attempt in range(tries):
        if attempt:
            time.sleep(0.01)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
    return False
