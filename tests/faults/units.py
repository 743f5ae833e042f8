"""Processes that are started again, as systemd does with the shipped units: after their end, and when they do
not report in time (``WatchdogSec``). Other processes of a domain are not killed (``KillMode=process``)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from muster.app.operations import systemd_unit
from muster.supervision import os_process

MARK = "MUSTER_FAULTS_UNIT"  # in the environment of all processes of a unit, as a control group has them
RESTART_S = 0.5
WATCHDOG_S = float(systemd_unit.WATCHDOG_S)
PACE_S = 0.1


class Unit:
    """``command`` is kept running. ``watched``: it reports to systemd, and is killed if it stops to.
    ``kill_all``: what is left of it is killed, too (``KillMode=mixed``)."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: dict[str, str],
        log: Path,
        *,
        watched: bool = False,
        kill_all: bool = False,
    ) -> None:
        self.name = name
        self.environment = environment
        self.starts = 0
        self.masked = False  # it stays down
        self._command = list(command)
        self._log = log
        self._id = f"{os.getpid()}-{name}"
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None
        self._watched = watched
        self._kill_all = kill_all
        self._ready = asyncio.Event()
        self._reported_s = 0.0
        self._watchdog_s = WATCHDOG_S

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, timeout_s: float = 120.0) -> None:
        if self._watched:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._socket.bind(str(self._log.with_suffix(".socket")))
        self._launch()
        self._task = asyncio.create_task(self._supervise(), name=self.name)
        if self._watched:
            try:
                await asyncio.wait_for(self._ready.wait(), timeout_s)
            except TimeoutError:
                output = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.name} is not ready after {timeout_s:g} s: {output}") from None

    async def restart(self, timeout_s: float = 240.0) -> None:
        """As ``systemctl restart``: it stops in order."""
        self._ready.clear()
        os.kill(self.pid, signal.SIGTERM)
        await asyncio.wait_for(self._ready.wait(), timeout_s)

    def _launch(self) -> None:
        environment = {**os.environ, **self.environment, MARK: self._id}
        if self._watched:
            environment |= {
                "NOTIFY_SOCKET": str(self._log.with_suffix(".socket")),
                "WATCHDOG_USEC": f"{WATCHDOG_S * 1e6:.0f}",
            }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.starts += 1
        self._watchdog_s = WATCHDOG_S
        self._ready.clear()

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(PACE_S)  # pace
            assert self._process is not None
            self._read_reports()
            silent_s = time.monotonic() - self._reported_s
            if self._watched and self._ready.is_set() and silent_s > self._watchdog_s:
                self._process.kill()
            if self._process.poll() is None or self.masked:
                continue
            if self._kill_all:
                self.kill()
            await asyncio.sleep(RESTART_S)  # pace
            if not self.masked:
                self._launch()

    def _read_reports(self) -> None:
        while self._socket is not None:
            try:
                report = self._socket.recv(4096)
            except BlockingIOError:
                return
            self._reported_s = time.monotonic()
            if report.startswith(b"WATCHDOG_USEC="):
                self._watchdog_s = int(report.partition(b"=")[2]) / 1e6
            if b"READY=1" in report:
                self._ready.set()

    def pids(self) -> list[int]:
        return [pid for pid, variables in _environments() if f"{MARK}={self._id}" in variables]

    def own_pids(self) -> list[int]:
        """Without the processes that it manages: a frozen one is not restarted with its domain."""
        managed = {
            pid
            for pid, variables in _environments()
            if any(v.startswith(f"{os_process.MARK}=") for v in variables)
        }
        return [pid for pid in self.pids() if pid not in managed and os.getsid(pid) not in managed]

    def kill(self) -> None:
        """All of its processes."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self.pids():
            self.kill()
            await asyncio.sleep(PACE_S)  # pace
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
        if self._socket is not None:
            self._socket.close()


def _environments() -> Iterator[tuple[int, list[str]]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    text = (folder / "environ").read_bytes().decode(errors="replace")
                    yield int(folder.name), text.split("\0")
