"""A real PostgreSQL server for tests: its own data folder, a free loopback port, a random password.

The programs come from the first of: the folder in ``MUSTER_POSTGRES_BIN``, the wheel `pgserver`, Debian's
packages, ``PATH``.  PostgreSQL refuses to run as root, so root runs it as ``nobody``, from a copy if
``nobody`` cannot access the programs.

    with postgres.running() as server:
        store = await database.open(server.url, password=server.password)
        server.stop(); server.start()      # a restart, as clients see it
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import TypedDict

import pytest

from muster.core import errors
from muster.testing import plugin

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0
_POLL_S = 0.02
_OPTIONS = (
    "--listen_addresses=127.0.0.1",
    "--unix_socket_directories=",
    "--max_connections=60",
    "--shared_buffers=32MB",
)
_PROGRAMS = ("initdb", "postgres", "pg_isready")


class PostgresServer:
    """Started by `running`. ``password`` is that of the superuser in ``url``."""

    def __init__(
        self, programs: pathlib.Path, folder: pathlib.Path, account: pwd.struct_passwd | None
    ) -> None:
        self.password = secrets.token_urlsafe(12)
        self.port = 0
        self._programs = programs
        self._data = folder / "data"
        self._log = folder / "log"
        self._account = account
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise errors.NotConnected("this PostgreSQL is not running")
        return self._process.pid

    def initialise(self) -> None:
        secret = self._data.parent / "password"
        secret.write_text(self.password)
        if self._account is not None:
            os.chown(secret, self._account.pw_uid, self._account.pw_gid)
        owner = ("--username", "postgres", "--auth", "scram-sha-256", "--pwfile", secret)
        made = subprocess.run(
            [
                self._programs / "initdb",
                "--no-sync",
                "--encoding",
                "UTF8",
                "--locale",
                "C",
                *owner,
                "--pgdata",
                self._data,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=START_TIMEOUT_S * 2,
            check=False,
            text=True,
            cwd="/",
            **_as(self._account),
        )
        if made.returncode != 0:
            raise errors.MissingDependency(f"initdb failed: {made.stdout.strip()[-500:]}")

    def start(self) -> None:
        """Uses the previous port, if any. Returns when it accepts connections."""
        self.port = self.port or _free_port()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, "-p", str(self.port), *_OPTIONS],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,  # Ctrl-C goes to the tests, which then stop the server
                **_as(self._account),
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._accepts():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop(signal.SIGQUIT)
                raise errors.Unavailable(f"PostgreSQL did not start: {self._log_tail()}")
            time.sleep(_POLL_S)  # pace of looking

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: an orderly stop without waiting for clients. SIGQUIT: as a crash, recovered at the next
        start.
        """
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)

    def _accepts(self) -> bool:
        probe = subprocess.run(
            [self._programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port), "-t", "1"],
            stdin=subprocess.DEVNULL,
            check=False,
            cwd="/",
        )
        return probe.returncode == 0

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace").strip()[-500:] if self._log.exists() else "(no log)"


@contextlib.contextmanager
def running() -> Iterator[PostgresServer]:
    """A separate server, removed afterwards. `errors.MissingDependency` if PostgreSQL is not installed."""
    account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="muster-postgres-", ignore_cleanup_errors=True) as name:
        folder = pathlib.Path(name)
        if account is not None:
            os.chown(folder, account.pw_uid, account.pw_gid)
        server = PostgresServer(_reachable(_find_programs(), folder, account), folder, account)
        server.initialise()
        server.start()
        try:
            yield server
        finally:
            server.stop(signal.SIGQUIT)  # unwritten data is not needed


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """Skips with a reason if PostgreSQL cannot be started; in CI that is an error."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(running())
        except errors.MusterError as error:
            plugin.require_part("PostgreSQL", False, hint=str(error))
            raise
        yield server


def _find_programs() -> pathlib.Path:
    folders = [pathlib.Path(named)] if (named := os.environ.get("MUSTER_POSTGRES_BIN")) else []
    wheel = importlib.util.find_spec("pgserver")
    places = (wheel.submodule_search_locations or []) if wheel else []
    folders += [pathlib.Path(place) / "pginstall" / "bin" for place in places]
    folders += sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    folders += [pathlib.Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]
    for folder in folders:
        if all(os.access(folder / program, os.X_OK) for program in _PROGRAMS):
            return folder
    raise errors.MissingDependency(
        "no PostgreSQL server was found", hint="pip install pgserver, or apt-get install postgresql"
    )


def _reachable(
    programs: pathlib.Path, folder: pathlib.Path, account: pwd.struct_passwd | None
) -> pathlib.Path:
    """``programs``, or a copy that the account can execute."""
    if account is None or _runs(programs, account):
        return programs
    shutil.copytree(programs.parent, folder / "install", symlinks=True)
    if _runs(folder / "install" / programs.name, account):
        return folder / "install" / programs.name
    raise errors.MissingDependency(f"{account.pw_name} cannot run {programs}/postgres, and root may not")


def _runs(programs: pathlib.Path, account: pwd.struct_passwd) -> bool:
    try:
        tried = subprocess.run(
            [programs / "postgres", "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            cwd="/",
            **_as(account),
        )
    except OSError:
        return False
    return tried.returncode == 0


class _As(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


def _as(account: pwd.struct_passwd | None) -> _As:
    if account is None:
        return {}
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
