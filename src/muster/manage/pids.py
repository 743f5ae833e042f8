"""Processes by their numbers: wait for the end of one, tell one from another that got its number later."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib


async def end_of(pid: int) -> int | None:
    """Wait until a process has ended. Its exit code (a signal is negative), None if it is not our child."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return _reap(pid)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return _reap(pid)


def _reap(pid: int) -> int | None:
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if done == pid else None


def signal_session(pid: int, number: int) -> None:
    """To the whole session that the process leads; to it alone where it leads none."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def signal_followers(pid: int, number: int) -> None:
    """To what is left of what a process led that has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def has_followers(pid: int) -> bool:
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


def birth(pid: int) -> str:
    """When it was born, in the kernel's ticks: a number is given again, a birth is not. Empty if dead."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]
