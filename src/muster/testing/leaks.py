"""Detects what a test left behind: open files and sockets, child processes, threads.

Compares a snapshot from before the set-up of a test with one from after its tear-down; new items are leaks
and fail this test, not a later one that runs out of resources. Items opened by a fixture of a wider scope
belong to that fixture: the plugin adds them to the baseline. Items that are being closed have a short grace
period. (Tasks are checked before their loop closes: see `muster.testing.fixtures`.)

Reading ``/proc/self`` takes about 100 µs; without it, files and processes are not checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass

GRACE_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36

# Items that exist until the interpreter ends once they are used, with the reason.
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
    """Adopt orphaned grandchildren, so that detached processes are detected too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def snapshot() -> OpenResources:
    return OpenResources(_files(), _processes(), frozenset(threading.enumerate()))


def leaked(before: OpenResources, *, ignore: frozenset[str] = frozenset()) -> list[str]:
    """A line for each new item. Leaked processes are killed."""
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
    """Leaks, each with the pid to kill if it is a process."""
    findings: list[tuple[str, int]] = []
    if "processes" not in ignore:
        for pid in sorted(new.processes):
            if not _has_ended(pid):
                command = _command(pid)
                if not any(word in command for word in PROCESSES_ALLOWED):
                    findings.append((f"process {pid}: {command}", pid))
    if "threads" not in ignore:
        findings += [
            (f"thread {thread.name}", 0)
            for thread in new.threads
            if thread.is_alive() and thread.name not in THREADS_ALLOWED
        ]
    if "files" not in ignore:
        findings += [
            (f"file descriptor {number}: {target}", 0)
            for number, target in sorted(new.files)
            if target not in FILES_ALLOWED
        ]
    return findings


def _files() -> frozenset[tuple[int, str]]:
    try:
        numbers = os.listdir("/proc/self/fd")
    except FileNotFoundError:
        return frozenset()
    descriptors = []
    for number in numbers:
        try:
            descriptors.append((int(number), os.readlink(f"/proc/self/fd/{number}")))
        except OSError:  # the descriptor of the directory listing
            continue
    return frozenset(descriptors)


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
    """An ended child is not a leak; an adopted one has to be reaped here."""
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
    with contextlib.suppress(ChildProcessError):  # a child watcher of an event loop was first
        os.waitpid(pid, 0)
