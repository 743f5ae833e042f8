"""A domain as a process: in the foreground until a signal ends it, or detached.

The first SIGINT, SIGTERM or SIGHUP drains and stops the domain; a second one ends the process at once, and
the brokers end with it (each has a guardian process). A detached process reports through a pipe that it is
ready. If the pipe closes without a report, the start failed, and the error is in a log file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from muster.app import domain, home, service_manager
from muster.app.machines import program
from muster.core import errors, files

FORCED = 130
STOP_S = 15.0
LOOK_S = 1.0
ERRORS_NAME = "domain.err"
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed


async def run(
    running: domain.Domain, work: Callable[[], Awaitable[None]], *, stopping: Callable[[], None]
) -> None:
    """Start the domain, run ``work``, stop the domain; earlier on a signal. Reports to systemd, if it started
    this process.

    Raises the error of a vital component that failed, or `program.ProgramChanged`.
    """
    loop = asyncio.get_running_loop()
    stop_requested = asyncio.Event()
    manager = service_manager.ServiceManager(os.environ)

    def on_signal() -> None:
        if stop_requested.is_set():
            os._exit(FORCED)
        stop_requested.set()

    async def live() -> None:
        async with manager.reporting(), running:
            if not stop_requested.is_set():  # the start may have swallowed the cancellation
                manager.notify(service_manager.READY)
                try:
                    await running.guard(work())
                finally:
                    if not isinstance(sys.exception(), program.ProgramChanged):
                        manager.notify(service_manager.STOPPING)

    for number in _STOP:
        loop.add_signal_handler(number, on_signal)
    domain_task, stop_wait = asyncio.create_task(live()), asyncio.create_task(stop_requested.wait())
    try:
        await asyncio.wait((domain_task, stop_wait), return_when=asyncio.FIRST_COMPLETED)
        if not domain_task.done():
            stopping()
            domain_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await domain_task
    except program.ProgramChanged:
        manager.hand_over()
        raise
    finally:
        stop_wait.cancel()
        for number in _STOP:
            loop.remove_signal_handler(number)


def detach(arguments: Sequence[str], folder: home.DomainFolder, *, timeout_s: float) -> int:
    """Start ``muster -o json ARGUMENTS --ready-fd N`` in its own session; returns its pid when it is ready.

    Raises `StartFailed` with its error if it ends before that.
    """
    folder.create()
    error_file = folder.logs / ERRORS_NAME
    near, far = os.pipe()
    with (
        os.fdopen(near, "rb") as ready,
        os.fdopen(far, "wb") as theirs,
        files.open_private(error_file, "wb") as output,
    ):
        started = subprocess.Popen(
            [sys.executable, "-m", "muster", "-o", "json", *arguments, "--ready-fd", str(far)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(far,),
            start_new_session=True,
        )
        theirs.close()
        try:
            return _when_ready(started, ready, error_file, timeout_s)
        except BaseException:
            started.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(STOP_S)
            raise


def _when_ready(started: subprocess.Popen[bytes], ready: BinaryIO, error_file: Path, timeout_s: float) -> int:
    if not select.select([ready], [], [], timeout_s)[0]:
        raise errors.TimedOut(
            f"the domain did not start within {timeout_s:g} s and was stopped",
            hint=f"see the logs in {error_file.parent}; on a slow or busy machine, set a longer --timeout",
        )
    if ready.read(1):
        return started.pid
    code = started.wait(timeout=timeout_s)
    raise StartFailed(error_file.read_text(errors="replace").strip(), code)


class StartFailed(errors.MusterError):
    """A detached process ended before it was ready, with an error as JSON or text; ``exit_code`` is
    its own.
    """

    code = "start-failed"

    def __init__(self, output: str, exit_code: int) -> None:
        message, hint = output or f"the domain ended with code {exit_code} without an error message", None
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError, RecursionError):
            error = json.loads(output.splitlines()[-1])["error"]
            message, hint, self.code = error["message"], error["hint"], error["code"]
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


def stop(
    folder: home.DomainFolder,
    *,
    timeout_s: float,
    force: bool = False,
    waits_for: Callable[[], str] = lambda: "",
) -> bool:
    """Request the process of this domain to stop, and wait for its end; False if none runs. ``waits_for`` is
    called every second until then, and returns what the process waits for.
    """
    pid = folder.holder()
    if pid is None:
        return False
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if folder.holder() != pid:  # it ended, and the pid may have been reused
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL if force else signal.SIGTERM)
        deadline, reason = time.monotonic() + timeout_s, ""
        while not select.select([process], [], [], max(0, min(LOOK_S, deadline - time.monotonic())))[0]:
            if time.monotonic() >= deadline:
                raise errors.TimedOut(
                    f"process {pid} did not stop within {timeout_s:g} s" + (f": {reason}" if reason else ""),
                    hint="wait longer with --timeout, or end it at once with --force",
                )
            reason = waits_for() or reason
        return True
    finally:
        os.close(process)


def notify_ready(descriptor: int) -> None:
    """Report to `detach` that the process is ready."""
    os.write(descriptor, b".")
    os.close(descriptor)
