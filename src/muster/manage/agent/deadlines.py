"""Stop deadlines: when an agent that cannot renew has to stop the resources that may move.

A resource with a `protocol.ReschedulePolicy` is started on another machine when the registry has had no
contact with its agent for ``after_s``. The agent counts from when it sent its last renewal that was answered,
the registry from when it received it, so the agent is always earlier:

    renewed                          0.75             0.9        1.0 of ``after_s``
    |---------------------------------|----------------|----------|
                                      the agent        its        the registry starts
                                      stops it         watchdog   it elsewhere
                                                       kills it

After its deadline, the agent starts it only when it has renewed again: the registry refuses that until the
agent has reported all that it hosts, if anything was moved meanwhile.

Both count durations only. The agent's clock includes the time in which its machine is suspended. A machine
that is paused as a whole, as a virtual machine can be, executes what it hosts until the next look of the
watchdog after it continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import math
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Protocol

from muster.manage.agent import watchdog
from muster.supervision import os_process

STOP_SHARE = 0.75
RENEW_SHARE = 1 / 6
RENEW_S_MIN = 0.5  # between two attempts


class ResourceWatchdog(Protocol):
    def renewed_at(self) -> float | None:
        """What it was last given, by an earlier process of this agent. Blocks."""

    def keep(self, renewed_at: float, first_s: float) -> None:
        """Kill what has not been renewed for `watchdog.KILL_SHARE` of its time, of which ``first_s`` is the
        shortest; 0: there is none. Blocks; `OSError` if it cannot."""


class WatchdogProcess:
    """The program `watchdog`. It outlives the agent, as the resources do."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._child: int | None = None  # started by this process of the agent

    def renewed_at(self) -> float | None:
        renewal = watchdog.read_renewal(self._folder)
        return renewal[0] if renewal else None

    def keep(self, renewed_at: float, first_s: float) -> None:
        path = self._folder / watchdog.FILE
        if not first_s:
            path.unlink(missing_ok=True)
            return
        content = {"boot": watchdog.boot_id(), "renewed_at": renewed_at, "first_s": first_s}
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(content))  # not synced: another boot does not need it
        new.replace(path)
        if self._child is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._child, os.WNOHANG)
        running = self._running()
        if running is None or running != self._child or _is_stopped(running):
            if running is not None:  # of another version, or frozen
                with contextlib.suppress(ProcessLookupError):
                    os.kill(running, signal.SIGKILL)
            self._child = self._start()

    def _running(self) -> int | None:
        """The process that holds the lock."""
        with (self._folder / watchdog.LOCK).open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.seek(0)
                text = lock.read()
                return int(text) if text.isdecimal() else None
        return None

    def _start(self) -> int:
        command = [sys.executable, "-I", "-S", watchdog.__file__, str(self._folder)]
        actions = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        environment = {name: value for name, value in os.environ.items() if name != os_process.MARK}
        return os.posix_spawn(sys.executable, command, environment, file_actions=actions, setsid=True)


def _is_stopped(pid: int) -> bool:
    seen = os_process.activity(pid, 0.0)
    return seen is not None and seen.is_stopped


class StopDeadlines:
    """``times``: by resource, its ``after_s``. Nothing is to run before the first renewal."""

    def __init__(
        self,
        times: Callable[[], Mapping[str, float]],
        guard: ResourceWatchdog | None,
        elapsed_s: Callable[[], float] = watchdog.elapsed_s,
    ) -> None:
        self._times = times
        self._guard = guard
        self._elapsed_s = elapsed_s
        self._renewed_at = -math.inf
        self._kept: tuple[float, float] | None = None
        self._has_failed = False
        self._keeping = asyncio.Lock()

    @property
    def has_watchdog(self) -> bool:
        return self._guard is not None

    @property
    def is_enforced(self) -> bool:
        """Whether something stops the resources even if this process cannot."""
        return self._guard is not None and not self._has_failed

    async def load(self) -> None:
        if self._guard is not None and (at := await asyncio.to_thread(self._guard.renewed_at)) is not None:
            self._renewed_at = at

    def now(self) -> float:
        return self._elapsed_s()

    def is_renewal_due(self) -> bool:
        first_s = min(self._times().values(), default=0.0)
        return bool(first_s) and self.now() >= self._renewed_at + first_s * RENEW_SHARE

    def may_run(self, after_s: float) -> bool:
        return self.now() < self._renewed_at + after_s * STOP_SHARE

    def overdue(self) -> list[str]:
        """The resources that have to be stopped now."""
        return [name for name, after_s in self._times().items() if not self.may_run(after_s)]

    async def renewed(self, sent_at: float) -> None:
        """The registry has answered a renewal that was sent at ``sent_at``."""
        await self.keep(max(sent_at, self._renewed_at))

    async def keep(self, renewed_at: float | None = None) -> None:
        """Have the watchdog enforce the present times. Raises `OSError`; then nothing is extended."""
        async with self._keeping:
            at = self._renewed_at if renewed_at is None else renewed_at
            terms = (at, min(self._times().values(), default=0.0))
            if self._guard is not None and terms != self._kept and math.isfinite(at):
                if terms[1] or self._kept:
                    try:
                        await asyncio.to_thread(self._guard.keep, *terms)
                    except OSError:
                        self._has_failed = True
                        raise
                self._has_failed = False
                self._kept = terms if terms[1] else None
            self._renewed_at = at
