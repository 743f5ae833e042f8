"""What a test left behind: open files and sockets, child processes, threads.

A snapshot before a test's set-up and one after its tear-down; what is new is a leak, and the test that made
it fails, not a later one that runs out of something.  What a fixture of wider scope opened belongs to that
fixture: the plugin adds it to the baseline.  Things that are on their way out get a short grace; only
then is a difference a leak.  (Tasks are judged before their loop closes: see `muster.testing.fixtures`.)

Reading ``/proc/self`` costs some 100 µs; where there is none, files and processes are not checked.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass

GRACE_S = 0.5
_PR_SET_CHILD_SUBREAPER = 36

# Things that live as long as the interpreter once something has used them. Each has its reason.
FILES_ALLOWED = {
    "/dev/null": "the standard library keeps it open for later",
    "/dev/urandom": "the interpreter keeps it open on old kernels",
}
PROCESSES_ALLOWED = {
    "multiprocessing.resource_tracker": "one for each interpreter, by design of multiprocessing",
    "multiprocessing.forkserver": "one for each interpreter, by design of multiprocessing",
}
THREADS_ALLOWED = {
    "pytest_timeout": "the timer of the running test",
}


@dataclass(frozen=True)
class OpenResources:
    files: frozenset[tuple[int, str]]
    processes: frozenset[int]
    threads: frozenset[threading.Thread]

    def minus(self, other: OpenResources) -> OpenResources:
        return OpenResources(
            self.files - other.files, self.processes - other.processes, self.threads - other.threads
        )

    def plus(self, other: OpenResources) -> OpenResources:
        return OpenResources(
            self.files | other.files, self.processes | other.processes, self.threads | other.threads
        )


def adopt_orphans() -> None:
    """Make grandchildren whose parent died children of ours, so that a detached process is seen as well."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def snapshot() -> OpenResources:
    return OpenResources(_files(), _processes(), frozenset(threading.enumerate()))


def leaked(before: OpenResources, *, ignore: frozenset[str] = frozenset()) -> list[str]:
    """One line for each thing there is now that was not there before. Leaked processes are ended."""
    deadline = time.monotonic() + GRACE_S
    wait_s = 0.001
    while new := _findings(snapshot().minus(before), ignore):
        if time.monotonic() > deadline:
            break
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 0.05)
    for _, pid in new:
        if pid:
            _end(pid)
    return [line for line, _ in new]


def _findings(new: OpenResources, ignore: frozenset[str]) -> list[tuple[str, int]]:
    """What is wrong; with the process to end, where it is one."""
    found: list[tuple[str, int]] = []
    if "processes" not in ignore:
        for pid in sorted(new.processes):
            if not _has_ended(pid):
                command = _command(pid)
                if not any(word in command for word in PROCESSES_ALLOWED):
                    found.append((f"process {pid}: {command}", pid))
    if "threads" not in ignore:
        found += [
            (f"thread {thread.name}", 0)
            for thread in new.threads
            if thread.is_alive() and thread.name not in THREADS_ALLOWED
        ]
    if "files" not in ignore:
        found += [
            (f"file descriptor {number}: {target}", 0)
            for number, target in sorted(new.files)
            if target not in FILES_ALLOWED
        ]
    return found


def _files() -> frozenset[tuple[int, str]]:
    try:
        numbers = os.listdir("/proc/self/fd")
    except FileNotFoundError:
        return frozenset()
    found = []
    for number in numbers:
        try:
            found.append((int(number), os.readlink(f"/proc/self/fd/{number}")))
        except OSError:  # the descriptor of the listing itself
            continue
    return frozenset(found)


def _processes() -> frozenset[int]:
    pids: list[int] = []
    try:
        threads = os.listdir("/proc/self/task")
    except FileNotFoundError:
        return frozenset()
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/children") as children:
                pids.extend(int(pid) for pid in children.read().split())
        except OSError:  # the thread has ended, or this kernel does not list children
            continue
    return frozenset(pids)


def _has_ended(pid: int) -> bool:
    """An ended child is no leak, and an adopted one has nobody else to collect it."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            return cmdline.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
