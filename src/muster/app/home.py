"""A home: a folder with the settings of a domain and its data on this machine.

    muster.toml      settings
    format.json      the format of the home, and the version of Muster that wrote it last
    NAME/            the domain's folder (`domain.data_dir` may move it)
      keys/          seeds and credentials, readable by their owner only (`trust.keys_dir` may move it)
      certs/         the domain's certificate authority and the certificates it issued
      brokers/       data of the brokers
      agent/         records and data of this machine's resources
      positions/     how far components have read streams
      inform/        views of information nodes: they can be rebuilt
      logs/          output of detached processes
      run/           exists only while the domain runs: the lock, its addresses, in pages/ the address of
                     each process's health pages, and in children/ the processes that belong to it

The kernel holds the lock in ``run/`` for the process that runs the domain, so it cannot become stale: after
``kill -9`` it is free.  The pid in it is only informational.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

import muster
from muster.core import errors, files
from muster.supervision import os_process

FOLDER_NAME = ".muster"
SETTINGS_NAME = "muster.toml"
FORMAT_NAME = "format.json"
#: The format of homes that this version reads and writes, and the one that `muster convert` makes into it.
FORMAT, FORMER_FORMAT = 2, 1


class HomeFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``format.json``."""

    format: int
    version: str  # of Muster


class RunningDomain(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a running domain in ``run/domain.json``."""

    domain: str
    pid: int
    started_at_s: float
    version: str
    servers: tuple[str, ...]
    ca: str | None = None  # certificates to verify the brokers with, if they use TLS
    remote_servers: tuple[str, ...] = ()  # those of `servers` that are on other machines
    locator_url: str | None = None
    health_url: str | None = None
    web_url: str | None = None

    @property
    def own_servers(self) -> tuple[str, ...]:
        return tuple(url for url in self.servers if url not in self.remote_servers)


@dataclass(frozen=True, slots=True)
class Home:
    root: Path

    @classmethod
    def find(cls, chosen: Path | None = None) -> Home:
        """The chosen folder, or ``.muster`` in the current folder if it is a home, or ``.muster`` in the
        user's folder.
        """
        if chosen is not None:
            return cls(files.expanded(chosen).absolute())
        here = cls(Path.cwd() / FOLDER_NAME)
        return here if here.settings_file.is_file() else cls(files.expanded("~") / FOLDER_NAME)

    @property
    def settings_file(self) -> Path:
        return self.root / SETTINGS_NAME

    def expect(self) -> Home:
        """This home, if `muster init` has created it, and this version can use it."""
        self.require()
        self.check()
        return self

    def require(self) -> None:
        """`errors.NotFound` if `muster init` has not created it."""
        if not self.settings_file.is_file():
            raise errors.NotFound(
                f"{self.root} is not a home: there is no {self.settings_file.name}",
                hint=f"create one with `muster init --home {self.root}`, or choose another with --home",
            )

    def check(self) -> HomeFormat:
        """The format of this home; `errors.Refused` if this version of Muster cannot use it.

        A home with settings only is new, and gets the present format.
        """
        stored = self.stored_format()
        if stored.format < FORMAT:
            raise errors.Refused(
                f"the home {self.root} has format {stored.format}, that of Muster 0.1.0; this version uses "
                f"format {FORMAT}",
                hint=f"convert it once: `muster convert --home {self.root}` (docs/guides/upgrade.md)",
            )
        return stored

    def stored_format(self) -> HomeFormat:
        """As `check`, of a home that can be converted too."""
        path = self.root / FORMAT_NAME
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=HomeFormat)
        except FileNotFoundError:
            if not self._has_data():
                with contextlib.suppress(OSError):  # such as read-only settings of a container
                    self.stamp()
                return HomeFormat(format=FORMAT, version=muster.__version__)
            raise errors.Refused(
                f"the home {self.root} was created before Muster 0.1.0: there is no {FORMAT_NAME}",
                hint="its data cannot be read; create another home with `muster init --home`",
            ) from None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise errors.Refused(
                f"the format of the home {self.root} cannot be read: {path.name}: {error}",
                hint="restore the file from a backup",
            ) from error
        if stored.format > FORMAT:
            raise errors.Refused(
                f"the home {self.root} was written by Muster {stored.version} (format {stored.format}); "
                f"this is Muster {muster.__version__} (format {FORMAT})",
                hint="use that version, or restore a backup that was made before the upgrade",
            )
        return stored

    def _has_data(self) -> bool:
        return any(
            (folder / name).exists() for folder in self.root.glob("*/") for name in ("keys", "brokers")
        )

    def stamp(self) -> None:
        """Record the format and this version of Muster."""
        stored = HomeFormat(format=FORMAT, version=muster.__version__)
        files.write(self.root / FORMAT_NAME, msgspec.json.encode(stored) + b"\n", mode=files.PUBLIC)


@dataclass(frozen=True, slots=True)
class DomainFolder:
    """The paths in a domain's folder, and the process that runs the domain."""

    root: Path

    @property
    def brokers(self) -> Path:
        return self.root / "brokers"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def agent(self) -> Path:
        return self.root / "agent"

    def view(self, node: str) -> Path:
        """The file of an information node's view."""
        return self.root / "inform" / f"{node}.db"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def pages(self) -> Path:
        """Where each process publishes the address of its health pages (`muster.bus.http.health`)."""
        return self.run / "pages"

    @property
    def children(self) -> Path:
        return self.run / "children"

    @property
    def lock_file(self) -> Path:
        return self.run / "lock"

    @property
    def running_file(self) -> Path:
        return self.run / "domain.json"

    def create(self) -> None:
        """Create the folders, readable by their owner only; existing ones are unchanged."""
        for folder in (self.root, self.brokers, self.logs, self.run):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Lock the folder for this process; `errors.AlreadyExists` while another process runs the domain."""
        self.run.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _lock(descriptor, fcntl.LOCK_EX):
                raise errors.AlreadyExists(
                    f"the domain in {self.root} is already running (pid {self._written_pid()})",
                    hint="`muster status` shows it, `muster down` stops it",
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            self.running_file.unlink(missing_ok=True)  # left by a killed process
            try:
                yield
            finally:
                self.running_file.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def record_child(self, name: str, pid: int) -> None:
        """Record a process that belongs to the domain's process. Blocks."""
        with contextlib.suppress(OSError):  # a full disk, for example
            self.children.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = f"{pid} {os_process.start_time(pid)}"
            files.write(self.children / f"{name}.pid", content.encode())

    def end_former_children(self) -> None:
        """Kill what a former process of this domain has left. Its children end by themselves, unless they are
        frozen: then they would act again some time later. Blocks."""
        for file in self.children.glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):
                pid, _, started = file.read_text().partition(" ")
                if started and os_process.start_time(int(pid)) == started:
                    os.kill(int(pid), signal.SIGKILL)
                file.unlink()

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
        """Write the description of the running domain atomically."""
        files.write(self.running_file, msgspec.json.format(msgspec.json.encode(running)))

    def running(self) -> RunningDomain | None:
        """The description of the running domain; None if it does not run or is not up yet."""
        if self.holder() is None:
            return None
        try:
            return msgspec.json.decode(self.running_file.read_bytes(), type=RunningDomain)
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def _written_pid(self) -> int | None:
        try:
            return int(self.lock_file.read_text())
        except (OSError, ValueError):
            return None


def _lock(descriptor: int, kind: int, *, tries: int = 5) -> bool:
    """Whether the lock was acquired. Readers hold it for microseconds, hence the retries."""
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
