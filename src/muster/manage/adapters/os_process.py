"""Processes by their numbers: wait for the end of one, tell one from another that got its number later."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pathlib

POLL_S = 0.5


async def wait_for_exit(pid: int, born: str = "") -> int | None:
    """Wait until a process has ended. Its exit code (a signal is negative), None if it is not our child.

    Only the kernel's word that there is no such process counts as its end.  Where no pidfd can be had (no
    descriptor or memory left), the process is polled until one can.  ``born`` (see `birth`) tells it from a
    process that gets its number later.
    """
    while True:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return _reap(pid)[1]
        except OSError:
            ended, code = _reap(pid)
            if ended or not _exists(pid):
                return code
            await asyncio.sleep(POLL_S)
            continue
        try:
            with contextlib.suppress(OSError):
                if born and start_time(pid) not in ("", born):
                    return None
            if await _readable(fd):
                return _reap(pid)[1]
        finally:
            os.close(fd)
        await asyncio.sleep(POLL_S)


async def _readable(fd: int) -> bool:
    """Wait until the pidfd says that its process has ended; False where the loop cannot watch it."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        loop.add_reader(fd, ended.set)
    except OSError:
        return False
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
    return True


def _reap(pid: int) -> tuple[bool, int | None]:
    """Whether it was a child of ours that has ended, and its exit code."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return False, None
    return (True, os.waitstatus_to_exitcode(status)) if done == pid else (False, None)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def signal_session(pid: int, number: int) -> None:
    """To the whole session that the process leads; to it alone where it leads none."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def signal_session_members(pid: int, number: int) -> None:
    """To what is left of what a process led that has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def has_session_members(pid: int) -> bool:
    """Whether anything runs of what a process led that has ended."""
    try:
        os.killpg(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return any(_runs_in(path, pid) for path in pathlib.Path("/proc").glob("[0-9]*/stat"))


def _runs_in(path: pathlib.Path, group: int) -> bool:
    try:
        state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return False
    return int(its_group) == group and state not in "ZX"


def start_time(pid: int) -> str:
    """When it was born: the boot and the kernel's ticks since. A number is given again, a birth is not.

    Empty if it is dead; an `OSError` where that cannot be found out now.
    """
    fields = _stat(pid)
    return "" if fields is None or fields[0] == "Z" else f"{_boot()}:{fields[19]}"


def started_at_s(pid: int) -> float | None:
    """When it was started, by today's wall clock; None if it is dead."""
    fields = _stat(pid)
    if fields is None or fields[0] == "Z":
        return None
    lines = pathlib.Path("/proc/stat").read_text().splitlines()
    booted_at_s = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
    return booted_at_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str] | None:
    """What ``/proc/PID/stat`` says after the name; None if there is no such process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


@functools.cache
def _boot() -> str:
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
