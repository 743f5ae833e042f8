"""Processes by pid: wait for the end, and distinguish a process from a later one with the same pid. And the
memory of the own process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import functools
import grp
import os
import pathlib
import pwd
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from muster.core import errors
from muster.supervision import responsiveness

MARK = "MUSTER_RUN"  # the environment variable by which the processes of one run are found
POLL_S = 0.5
# Python ignores some of them, `nohup` others. A child would inherit that, and a shell could not trap them.
DEFAULT_SIGNALS = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTERM),
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGXFSZ),
)
MEMBERS_LOOK_S_MAX = 0.1
PID_FILE_SLACK_S = 2.0  # clock differences: the kernel counts ticks, a file system seconds


async def wait_for_exit(pid: int, started: str = "") -> int | None:
    """Wait until a process has ended. Returns its exit code (a signal is negative), None if it is not a
    child.

    Only the kernel's report that the process does not exist counts as its end. If no pidfd is available (no
    descriptor or memory left), the process is polled until one is. ``started`` (see `start_time`)
    distinguishes the process from a later one with the same pid.
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
                if started and start_time(pid) not in ("", started):
                    return None
            if await _readable(fd):
                return _reap(pid)[1]
        finally:
            os.close(fd)
        await asyncio.sleep(POLL_S)


class ForeignProcess:
    """A process that another one started, by its pid (a `muster.supervision.children.ProcessHandle`)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    async def wait(self) -> int | None:
        return await wait_for_exit(self.pid)

    def send_signal(self, number: int, /) -> None:
        os.kill(self.pid, number)


async def _readable(fd: int) -> bool:
    """Wait until the pidfd reports the end of its process; False if the loop cannot watch it."""
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


def running_by_file(path: pathlib.Path, command: Sequence[str]) -> int | None:
    """The process that wrote the pid file ``path``, if it runs.

    A process that started after the file was written has only reused the pid, unless it has exactly this
    ``command``: the wall clock may have been set meanwhile.
    """
    with contextlib.suppress(OSError, ValueError):
        written_at_s, pid = path.stat().st_mtime, int(path.read_text().strip())
        since_s = started_at_s(pid) if pid > 1 and pid != os.getpid() else None
        if since_s is None:
            return None
        arguments = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
        same_command = arguments == [os.fsencode(word) for word in command]
        return pid if same_command or since_s <= written_at_s + PID_FILE_SLACK_S else None
    return None


@dataclass(frozen=True, slots=True)
class ProcessAccount:
    """The user and group of a process, by number (-1: those of this process), and what they mean to it."""

    user: int = -1
    group: int = -1
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def account(user: str, group: str) -> ProcessAccount:
    """The account of a user and a group, by names or numbers; empty: those of this process. Blocks.

    Raises `errors.Refused` if there is none, or if this process may not start others under it.
    """
    try:
        known = None if not user else pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
        gid = None if not group else int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except (KeyError, OverflowError) as error:
        raise errors.Refused(f"this machine has no such user or group: {error.args[0]}") from error
    if gid is None and known is not None:
        gid = known.pw_gid
    is_own = known is None or known.pw_uid == os.geteuid()
    if is_own and gid in (None, os.getegid()):
        return ProcessAccount()
    if os.geteuid() != 0:
        raise errors.Refused(
            f"this agent runs as user {os.geteuid()}, and may not start processes as another user or group",
            hint="run the agent as root, or leave out `user` and `group`",
        )
    if known is None:
        return ProcessAccount(group=-1 if gid is None else gid)
    words = {"HOME": known.pw_dir, "USER": known.pw_name, "LOGNAME": known.pw_name, "SHELL": known.pw_shell}
    return ProcessAccount(known.pw_uid, known.pw_gid if gid is None else gid, words)


def _reap(pid: int) -> tuple[bool, int | None]:
    """Whether it was a child that has ended, and its exit code."""
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
    """Signal the session that the process leads, or the process alone if it leads none."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def signal_group(group: int, number: int) -> None:
    """Signal the remaining members of a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


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


def members(mark: str, session: int | None = None) -> list[int]:
    """The processes of one run, oldest first, without zombies: those with the ``mark`` in their environment,
    which their children inherit, and those of the session. Blocks.

    A process that leaves the session and overwrites its environment is not found.
    """
    entry = f"{MARK}={mark}".encode() if mark else None
    processes = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            fields = _fields((folder / "stat").read_text())
            in_session = session is not None and int(fields[3]) == session
            if fields[0] not in "ZX" and (
                in_session or (entry and entry in (folder / "environ").read_bytes().split(b"\0"))
            ):
                processes.append((int(fields[19]), int(folder.name)))
    return [pid for _, pid in sorted(processes)]


@dataclass(frozen=True, slots=True)
class RunUsage:
    """What the processes of a run use."""

    processes: int = 0
    cpu_s: float = 0.0
    memory_bytes: int = 0

    def since(self, before: RunUsage) -> RunUsage:
        """The usage now, with a total that has not decreased: the time of an orphan is lost when it ends."""
        return dataclasses.replace(self, cpu_s=max(self.cpu_s, before.cpu_s))


def usage(runs: Mapping[str, str | int]) -> dict[str, RunUsage]:
    """What each run uses, by its name; a run is the mark of its processes, or one process by its pid. Blocks.
    A run without a process is omitted."""
    names = {run: name for name, run in runs.items()}
    prefix, tick_s, page = f"{MARK}=".encode(), 1 / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    used: dict[str, RunUsage] = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            name = names.get(int(folder.name))
            if name is None:
                entries = (folder / "environ").read_bytes().split(b"\0")
                mark = next((entry for entry in entries if entry.startswith(prefix)), b"")
                name = names.get(mark.removeprefix(prefix).decode())
            if name is None:
                continue
            fields = _fields((folder / "stat").read_text())
            so_far = used.get(name, RunUsage())
            used[name] = RunUsage(
                so_far.processes + (fields[0] not in "ZX"),
                so_far.cpu_s + sum(map(int, fields[11:15])) * tick_s,  # with that of children that have ended
                so_far.memory_bytes + int(fields[21]) * page,
            )
    return used


def marks() -> set[str]:
    """The marks of all runs that have a process. Blocks."""
    prefix, runs = f"{MARK}=".encode(), set()
    for file in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError, ValueError):
            entries = file.read_bytes().split(b"\0")
            runs |= {entry[len(prefix) :].decode() for entry in entries if entry.startswith(prefix)}
    return runs


def signal_all(pids: Iterable[int], number: int) -> bool:
    """Signal each process that still runs. Returns whether there was any that we may signal."""
    signalled = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            signalled = True
    return signalled


async def kill_members(mark: str, session: int | None = None, *, patience_s: float = 0.0) -> None:
    """Wait until no process of the run is left; kill those that are left after ``patience_s``."""
    loop = asyncio.get_running_loop()
    until_s, wait_s = loop.time() + patience_s, 0.005
    while pids := await asyncio.to_thread(members, mark, session):
        if loop.time() >= until_s and not signal_all(pids, signal.SIGKILL):
            return
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 2, MEMBERS_LOOK_S_MAX)


def start_time(pid: int) -> str:
    """The start time as boot id and kernel ticks. Pids are reused; this value is not.

    Empty if the process has ended; `OSError` if it cannot be determined now.
    """
    fields = _stat(pid)
    return "" if fields is None or fields[0] == "Z" else f"{_boot()}:{fields[19]}"


def started_at_s(pid: int) -> float | None:
    """The start time by the current wall clock; None if the process has ended."""
    fields = _stat(pid)
    if fields is None or fields[0] == "Z":
        return None
    lines = pathlib.Path("/proc/stat").read_text().splitlines()
    booted_at_s = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
    return booted_at_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def activity(pid: int, now_s: float) -> responsiveness.ProcessActivity | None:
    """The activity of all threads of a process until now; None if it cannot be determined."""
    active_ns: dict[int, int] = {}
    is_runnable = False
    try:
        leader = _stat(pid)
        for folder in pathlib.Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                on_core_ns, waiting_ns, _ = (folder / "schedstat").read_text().split()
                active_ns[int(folder.name)] = int(on_core_ns) + int(waiting_ns)
                is_runnable = is_runnable or _fields((folder / "stat").read_text())[0] == "R"
    except (OSError, ValueError):
        return None
    if leader is None or not active_ns:
        return None
    return responsiveness.ProcessActivity(now_s, active_ns, leader[0] in "Tt", is_runnable)


def _stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` after the name; None if there is no such process."""
    try:
        return _fields(pathlib.Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def _fields(line: str) -> list[str]:
    """The fields of a ``stat`` file after the name, which may contain anything."""
    return line.rpartition(")")[2].split()


@functools.cache
def _boot() -> str:
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def trim_heap() -> None:
    """Return freed memory to the system, which the C library does only on request: a process that has read a
    million records retains tens of bytes for each. Takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
