"""The watchdog: a small program beside an agent that kills what the agent should have stopped.

An agent that is frozen or killed cannot stop the resources that may by now be started on another machine
(`deadlines`). The watchdog can: it reads when the agent last renewed, and kills the processes of each
resource whose deadline has passed, by their mark (`muster.supervision.os_process.MARK`).

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
    """By mark: the time without contact after which its processes are killed."""
    times = {}
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            record = json.loads(path.read_bytes())
            after_s, mark = record.get("stop_after_s"), record.get("mark")
            if after_s and mark:
                times[MARK + mark.encode()] = after_s * KILL_SHARE
    return times


def kill(marks: set[bytes]) -> int:
    """Kill all processes with one of the marks. Returns their number."""
    count = 0
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if not marks.isdisjoint((folder / "environ").read_bytes().split(b"\0")):
                os.kill(int(folder.name), signal.SIGKILL)
                count += 1
    return count


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
        watch(folder)


if __name__ == "__main__":
    main()
