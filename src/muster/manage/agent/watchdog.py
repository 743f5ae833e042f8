"""The watchdog: a small program beside an agent that kills what the agent should have stopped.

An agent that is frozen or killed cannot stop the resources that may by now be started on another machine
(`deadlines`). The watchdog can: it reads when the agent last renewed, and kills the processes of each
resource whose deadline has passed, by their mark (`muster.supervision.os_process.MARK`), and those of its
container, by the process that the engine keeps for it.

The agent starts it as ``python -I -S watchdog.py FOLDER``. It uses the standard library only, so that it
starts quickly and needs little memory. It ends when the agent has nothing any more that may move.

Time is that since the machine was started, suspension included.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterable

TICK_S, WAIT_S_MIN = 0.5, 0.02
ROUNDS_MAX = 10
KILL_SHARE = 0.9  # of the time without contact, after which the resource is started elsewhere
FILE, LOCK = ".deadlines", ".watchdog"  # in the agent's folder
MARK = b"MUSTER_RUN="


def elapsed_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read_renewal(folder: pathlib.Path) -> tuple[float, float] | None:
    """When the agent last renewed, and the shortest time of a resource; None: nothing is to be watched."""
    try:
        content = json.loads((folder / FILE).read_bytes())
        if content["boot"] == boot_id():
            return float(content["renewed_at"]), float(content["first_s"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def marked_times(folder: pathlib.Path) -> dict[bytes, float]:
    """By mark, or id of a container: the time without contact after which its processes are killed."""
    times = {}
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            record = json.loads(path.read_bytes())
            if after_s := record.get("stop_after_s"):
                if mark := record.get("mark"):
                    times[MARK + mark.encode()] = after_s * KILL_SHARE
                if container := record.get("runtime", {}).get("container"):
                    times[container.encode()] = after_s * KILL_SHARE
    return times


def kill(marks: set[bytes]) -> int:
    """Kill all processes of the runs with these marks. Returns their number."""
    killed: set[int] = set()
    sessions: set[int] = set()
    for _ in range(ROUNDS_MAX):  # what they start meanwhile is killed too
        if not (alive := processes_of(marks, sessions) - killed):
            break
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed |= alive
    return len(killed)


def processes_of(marks: set[bytes], sessions: set[int]) -> set[int]:
    """Processes with one of the marks; and those without any (``env -i`` and ``sudo`` clear the environment,
    some servers overwrite it) that belong to their sessions, or were started by them. Adds to ``sessions``.

    Of a container, what was started by a process with its id as an argument, as engines keep one for each.
    """
    ours: set[int] = set()
    engines: set[int] = set()
    others: dict[int, tuple[int, int]] = {}  # by process without a mark: its parent and its session
    has_containers = any(not mark.startswith(MARK) for mark in marks)
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name)
            state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            entries: list[bytes] = []
            with contextlib.suppress(PermissionError):  # of another user, or protected
                entries = (folder / "environ").read_bytes().split(b"\0")
            if state in "ZX":
                continue
            if has_containers and not marks.isdisjoint((folder / "cmdline").read_bytes().split(b"\0")):
                engines.add(pid)
            elif not marks.isdisjoint(entries):
                ours.add(pid)
                if session == folder.name:
                    sessions.add(pid)
            elif not any(entry.startswith(MARK) for entry in entries):
                others[pid] = int(parent), int(session)
    before = -1
    while len(ours) != before:
        before = len(ours)
        ours |= {
            pid
            for pid, (parent, session) in others.items()
            if parent in ours or parent in engines or session in sessions
        }
    return ours


def watch(folder: pathlib.Path) -> None:
    while (renewal := read_renewal(folder)) is not None:
        renewed_at, first_s = renewal
        elapsed, times = elapsed_s() - renewed_at, {b"": first_s * KILL_SHARE}
        if elapsed >= first_s * KILL_SHARE:
            times = marked_times(folder)
            if marks := {mark for mark, at in times.items() if elapsed >= at}:
                kill(marks)
        time.sleep(wait_s(times.values(), elapsed))


def wait_s(times: Iterable[float], elapsed: float) -> float:
    """Until the next look: soon after the next of these times, however close it is."""
    return min([TICK_S, *(max(WAIT_S_MIN, at - elapsed) for at in times if at > elapsed)])


def _acquire(lock: int) -> bool:
    """Wait for a predecessor that is being killed."""
    for _ in range(20):
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    with (folder / LOCK).open("a+") as lock:
        if not _acquire(lock.fileno()):
            return  # another one watches
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        with contextlib.suppress(OSError):  # if permitted: a busy machine must not delay it
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        watch(folder)


if __name__ == "__main__":
    main()
