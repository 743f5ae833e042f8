"""The user's end of ``muster exec NAME -- COMMAND``: keys, size and screen of the terminal; the exit code.

On a terminal, all keys go to the command, Ctrl-C too, until it ends. Otherwise standard input, output and
errors are those of the command.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from muster.cli import command
from muster.core import errors
from muster.supervision import tasks

if TYPE_CHECKING:
    from muster.manage import client, command_session

READ_BYTES = 16 << 10
_STREAMS = {1: "output", 2: "errors"}


async def run(
    invocation: command.Invocation, fleet: client.ManageClient, resource: str, words: tuple[str, ...]
) -> int:
    """Run the command and return its exit code, as a shell reports it."""
    is_terminal = invocation.printer.for_people and sys.stdin.isatty() and sys.stdout.isatty()
    # The size of this terminal, whatever COLUMNS and LINES are.
    columns, rows = os.get_terminal_size(sys.stdin.fileno()) if is_terminal else (80, 24)
    kind = (os.environ.get("TERM") or "dumb") if is_terminal else ""
    async with fleet.run_inside(resource, *words, terminal=kind, rows=rows, columns=columns) as session:
        running = tasks.TaskSupervisor("input of a command")
        try:
            with _raw(sys.stdin.fileno()) if is_terminal else contextlib.nullcontext():
                running.spawn("input", _send_input(session, sys.stdin.fileno(), is_terminal=is_terminal))
                if is_terminal:
                    running.spawn("size", _send_sizes(session))
                await _show_output(invocation, session)
        finally:
            await running.close()
    code = session.exit_code or 0
    if not invocation.printer.for_people:
        invocation.printer.item({"exit_code": code}, "")
    return 128 - code if code < 0 else code


async def _show_output(invocation: command.Invocation, session: command_session.CommandSession) -> None:
    decoders = {number: codecs.getincrementaldecoder("utf-8")("replace") for number in _STREAMS}
    async for number, data in session.output():
        if invocation.printer.for_people:
            stream = sys.stderr.buffer if number == 2 else sys.stdout.buffer
            stream.write(data)
            stream.flush()
        elif text := decoders[number].decode(data):
            invocation.printer.item({_STREAMS[number]: text}, "")


async def _send_input(session: command_session.CommandSession, descriptor: int, *, is_terminal: bool) -> None:
    with contextlib.suppress(errors.NotFound):  # it has ended
        async for data in _chunks(descriptor):
            await session.write(data)
        if not is_terminal:
            await session.end_input()


async def _chunks(descriptor: int) -> AsyncIterator[bytes]:
    while True:
        with contextlib.suppress(PermissionError):  # a file, which is always readable
            await _readable(descriptor)
        try:
            data = os.read(descriptor, READ_BYTES)
        except OSError:  # the terminal was closed
            return
        if not data:
            return
        yield data


async def _readable(descriptor: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


async def _send_sizes(session: command_session.CommandSession) -> None:
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    try:
        while True:
            await changed.wait()
            changed.clear()
            size = os.get_terminal_size(sys.stdin.fileno())
            with contextlib.suppress(errors.NotFound):
                await session.resize(size.lines, size.columns)
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


@contextlib.contextmanager
def _raw(descriptor: int) -> Iterator[None]:
    """Pass on every key, and restore the terminal at the end."""
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
