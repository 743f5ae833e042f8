"""A domain as a process of its own: in front until a signal ends it, or detached.

The first SIGINT, SIGTERM or SIGHUP drains and stops in order; a second one ends the process at once, and
the brokers end with it (each has a guardian that notices).  A detached process tells the one that started it
through a pipe that it is ready; if the pipe closes without a word, it could not start, and its last words are
in a log.
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
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from muster.app import domain, home
from muster.core import errors

FORCED = 130
STOP_S = 15.0
ERRORS_NAME = "domain.err"
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last: the terminal was closed


async def run(
    running: domain.Domain, work: Callable[[], Awaitable[None]], *, stopping: Callable[[], None]
) -> None:
    """Start the domain, do ``work``, stop the domain; sooner if asked to.

    Raises what a vital part failed with, if one does.
    """
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            os._exit(FORCED)
        asked.set()

    async def live() -> None:
        async with running:
            if not asked.is_set():  # something on the way up may have swallowed the cancellation
                await running.guard(work())

    for number in _STOP:
        loop.add_signal_handler(number, on_signal)
    life, wish = asyncio.create_task(live()), asyncio.create_task(asked.wait())
    try:
        await asyncio.wait((life, wish), return_when=asyncio.FIRST_COMPLETED)
        if not life.done():
            stopping()
            life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life
    finally:
        wish.cancel()
        for number in _STOP:
            loop.remove_signal_handler(number)


def detach(arguments: Sequence[str], folder: home.DomainFolder, *, timeout_s: float) -> int:
    """Start ``muster -o json ARGUMENTS --ready-fd N`` in a session of its own; its pid, once it serves.

    `Failed` if it ends before that, with the error it left.
    """
    folder.create()
    last_words = folder.logs / ERRORS_NAME
    near, far = os.pipe()
    with os.fdopen(near, "rb") as ready, os.fdopen(far, "wb") as theirs, last_words.open("wb") as said:
        started = subprocess.Popen(
            [sys.executable, "-m", "muster", "-o", "json", *arguments, "--ready-fd", str(far)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            pass_fds=(far,),
            start_new_session=True,
        )
        theirs.close()
        try:
            return _when_ready(started, ready, last_words, timeout_s)
        except BaseException:
            started.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(STOP_S)
            raise


def _when_ready(started: subprocess.Popen[bytes], ready: BinaryIO, last_words: Path, timeout_s: float) -> int:
    if not select.select([ready], [], [], timeout_s)[0]:
        raise errors.TimedOut(
            f"the domain was not up after {timeout_s:g} s and was stopped", hint=f"see {last_words.parent}"
        )
    if ready.read(1):
        return started.pid
    code = started.wait(timeout=timeout_s)
    raise StartFailed(last_words.read_text(errors="replace").strip(), code)


class StartFailed(errors.MusterError):
    """A detached process ended before it was up. It left its error as JSON, or else some words; ``exit_code``
    is its own."""

    code = "start-failed"

    def __init__(self, words: str, exit_code: int) -> None:
        message, hint = words or f"the domain ended with code {exit_code} and said nothing", None
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
            told = json.loads(words.splitlines()[-1])["error"]
            message, hint, self.code = told["message"], told["hint"], told["code"]
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


def stop(folder: home.DomainFolder, *, timeout_s: float, force: bool = False) -> bool:
    """Ask the process that runs this domain to stop, and wait until it has; False if none runs."""
    pid = folder.holder()
    if pid is None:
        return False
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if folder.holder() != pid:  # it ended, and the number may be somebody else's by now
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL if force else signal.SIGTERM)
        if not select.select([process], [], [], timeout_s)[0]:
            raise errors.TimedOut(
                f"process {pid} has not stopped after {timeout_s:g} s",
                hint="wait longer with --timeout, or end it at once with --force",
            )
        return True
    finally:
        os.close(process)


def notify_ready(descriptor: int) -> None:
    """The other end of `detach`."""
    os.write(descriptor, b".")
    os.close(descriptor)
