"""The bootstrap tree: a passive node keeps its children running, which are bootstrap nodes themselves.

A child connects to its parent and sends heartbeats; a child that ended, or is silent for too long, is
restarted. A child that lost its parent continues and reconnects until the parent is back: the parent listens
on its previous port. Starting the root starts the complete tree, and stopping it stops the tree.

A child that was started manually sends no heartbeats. It is left alone, and its parent starts it only after
it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import sys
from collections.abc import Sequence

from muster.app import home
from muster.app.components import component
from muster.app.components import context as context_
from muster.core import errors, files, health
from muster.manage import settings
from muster.supervision import children, os_process

BEAT_S = 1.0
SILENT_S = 30.0  # longer than the time to a child's first heartbeat
PAUSE_S = 5.0  # between two probes: this process was paused, maybe together with its children
PORT_FILE = "bootstrap.port"
STOP_S = 15.0
PARENT = "manage.parent="  # in the command line of a child that was started by a parent


class ParentNode:
    """The parent's side."""

    name = "bootstrap"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, manage_settings: settings.ManageSettings) -> None:
        self._homes = [str(files.expanded(child_home).absolute()) for child_home in manage_settings.children]
        self._children: dict[str, children.ChildSupervisor] = {}
        self._last_beat_s: dict[
            str, float
        ] = {}  # of children that send heartbeats, so silence means something
        self._probed_at_s: dict[str, float] = {}
        self._server: asyncio.Server | None = None
        self._port = 0
        self._context: context_.ComponentContext

    async def start(self, context: context_.ComponentContext) -> None:
        self._context = context
        kept = context.folder.root / PORT_FILE
        before = await asyncio.to_thread(_read_int, kept)
        try:
            self._server = await asyncio.start_server(self._receive_heartbeats, "127.0.0.1", before)
        except OSError:
            self._server = await asyncio.start_server(self._receive_heartbeats, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        await asyncio.to_thread(files.write, kept, str(self._port).encode())
        for name in self._homes:
            await self._supervise(name)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*map(self._stop_child, self._homes))

    async def _stop_child(self, name: str) -> None:
        child = self._children.get(name)
        if child is not None and name in self._last_beat_s:
            await child.stop((signal.SIGTERM, STOP_S), kill=False)
        elif child is not None:  # it was started manually
            await child.release()

    def health(self) -> component.ComponentHealth:
        facts = {
            "children": [
                {"home": name, "state": child.state.value, "pid": child.pid, "starts": child.starts}
                for name, child in self._children.items()
            ]
        }
        missing = [
            name for name, child in self._children.items() if child.state is not children.ChildState.RUNNING
        ]
        if looping := [child.describe_loop() for child in self._children.values() if child.is_crash_looping]:
            return component.ComponentHealth(health.HealthState.FAILED, "; ".join(looping), facts)
        if missing:
            return component.ComponentHealth(
                health.HealthState.LATE, f"starting: {', '.join(missing)}", facts
            )
        return component.ComponentHealth(facts=facts)

    async def _supervise(self, name: str) -> None:
        """Keep a child running. One that continued without its parent is adopted instead of started again."""
        child = self._children[name] = children.ChildSupervisor(
            name,
            lambda: self._launch(name),
            probe=lambda: self._is_heard(name),
            probe_policy=children.ProbePolicy(period_s=BEAT_S, failures_max=1, grace_s=SILENT_S, busy_s=0.0),
        )
        pid = await asyncio.to_thread(_pid_of, name)
        if pid is None:
            child.start_soon()
            return
        if await asyncio.to_thread(_was_started_by_parent, pid):
            self._last_beat_s[name] = asyncio.get_running_loop().time()
        child.start_soon(os_process.ForeignProcess(pid))

    async def _launch(self, name: str) -> children.ProcessHandle:
        command = [sys.executable, "-m", "muster", "up", "--log-file", "--home", name]
        command += ["--set", f"{PARENT}127.0.0.1:{self._port}", "--set", f"manage.known_as={name}"]
        error_file = self._context.folder.logs / f"child-{1 + self._homes.index(name)}.err"
        pid = await asyncio.to_thread(_spawn, command, error_file)
        self._last_beat_s[name] = asyncio.get_running_loop().time()
        return os_process.ForeignProcess(pid)

    async def _is_heard(self, name: str) -> bool:
        now_s = asyncio.get_running_loop().time()
        probed_at_s, self._probed_at_s[name] = self._probed_at_s.get(name, now_s), now_s
        if now_s - probed_at_s > PAUSE_S and name in self._last_beat_s:
            self._last_beat_s[name] = now_s  # the silence of that time proves nothing
        return now_s - self._last_beat_s.get(name, now_s) <= SILENT_S

    async def _receive_heartbeats(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The heartbeats of one child: lines with its home."""
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                name = line.decode("utf-8", "replace").strip()
                if name in self._children:
                    self._last_beat_s[name] = asyncio.get_running_loop().time()
        writer.close()


class ChildNode:
    """The child's side: it sends heartbeats, whether or not the parent receives them."""

    name = "parent"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, manage_settings: settings.ManageSettings) -> None:
        self._host, _, port = manage_settings.parent.rpartition(":")
        if not port.isdigit():
            raise errors.InvalidInput(f"manage.parent: {manage_settings.parent!r} is not HOST:PORT")
        self._port = int(port)
        self._known_as = manage_settings.known_as
        self._parent_reachable = False

    async def start(self, context: context_.ComponentContext) -> None:
        context.tasks.loop("heartbeat", self._heartbeat_forever)

    async def stop(self) -> None:
        pass

    def health(self) -> component.ComponentHealth:
        return component.ComponentHealth(
            reason="" if self._parent_reachable else "the parent does not reply; continuing without it"
        )

    async def _heartbeat_forever(self) -> None:
        while True:
            writer: asyncio.StreamWriter | None = None
            try:
                _, writer = await asyncio.open_connection(self._host, self._port)
                while True:
                    writer.write(f"{self._known_as}\n".encode())
                    await writer.drain()
                    self._parent_reachable = True
                    await asyncio.sleep(BEAT_S)
            except OSError:
                self._parent_reachable = False
                await asyncio.sleep(BEAT_S)
            finally:
                if writer is not None:
                    writer.close()


def _read_int(path: pathlib.Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _pid_of(home_: str) -> int | None:
    """The pid of the domain that runs in a home, if any."""
    for lock in pathlib.Path(home_).glob("**/run/lock"):
        pid = home.DomainFolder(lock.parents[1]).holder()
        if pid is not None:
            return pid
    return None


def _was_started_by_parent(pid: int) -> bool:
    """Whether a parent started it, so that it sends heartbeats."""
    try:
        return PARENT.encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _spawn(command: list[str], error_file: pathlib.Path) -> int:
    """Start a child. It has its own log; its other output, of one run, goes to ``error_file``."""
    output = os.open(error_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        return os.posix_spawnp(
            command[0],
            command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
            ],
            setsid=True,
        )
    finally:
        os.close(output)
