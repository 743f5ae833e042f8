"""Commands that users run inside resources: what an adapter starts for `base.Adapter.open_shell`.

A command has a terminal (a pseudo-terminal of its own, whose session it leads), or pipes for its input, its
output and its errors. Nothing is queued: input that the command does not read is not taken, and output that
is not read blocks the command, as on a terminal.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import signal
import termios
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.manage import protocol
from muster.manage.adapters import shim
from muster.supervision import os_process

OUTPUT, ERRORS = 1, 2
READ_BYTES = 8 << 10
HANGUP_S = 1.0  # between SIGHUP and SIGKILL, for what is left when it is closed


class Shell(abc.ABC):
    """A command that runs inside a resource."""

    @abc.abstractmethod
    def outputs(self) -> Sequence[AsyncIterator[tuple[int, bytes]]]:
        """What it writes: the stream and some bytes."""

    @abc.abstractmethod
    def write(self, data: bytes) -> int:
        """The number of bytes of the input that were taken; the others may be offered again later."""

    @abc.abstractmethod
    def end_input(self) -> None: ...

    @abc.abstractmethod
    async def resize(self, rows: int, columns: int) -> None: ...

    @abc.abstractmethod
    async def wait(self) -> int:
        """The exit code of the command; a signal is negative."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End the command, if it still runs, and what it started."""

    @abc.abstractmethod
    def end_output(self) -> None:
        """Nothing reads its output any more."""


class LocalShell(Shell):
    """A command on this machine."""

    def __init__(self, pid: int, input_: int, outputs: Mapping[int, _Output]) -> None:
        self._outputs = outputs
        self._pid = pid
        self._input: int | None = input_
        self._ended = asyncio.ensure_future(os_process.wait_for_exit(pid))
        self._is_closed = False

    @classmethod
    async def start(
        cls, words: protocol.ShellCommand, environment: Mapping[str, str], options: shim.RunOptions
    ) -> LocalShell:
        """`OSError` if it cannot be started."""
        command = options.beside(words.command)
        async with contextlib.AsyncExitStack() as failed, contextlib.AsyncExitStack() as inner:
            if words.terminal:
                environment = {**environment, "TERM": words.terminal}
                master, slave = _descriptors(inner, os.openpty())
                termios.tcsetwinsize(slave, (words.rows, words.columns))
                if options.user >= 0:
                    os.fchown(slave, options.user, -1)
                input_, sources = os.dup(master), {OUTPUT: os.dup(master)}
                # The leader of a session gets the first terminal that it opens as its own.
                files: list[Any] = [(os.POSIX_SPAWN_OPEN, 0, os.ttyname(slave), os.O_RDWR, 0)]
                files += [(os.POSIX_SPAWN_DUP2, 0, to) for to in (OUTPUT, ERRORS)]
            else:
                pairs = [os.pipe() for _ in range(3)]
                _descriptors(inner, (pairs[0][0], pairs[1][1], pairs[2][1]))
                input_, sources = pairs[0][1], {OUTPUT: pairs[1][0], ERRORS: pairs[2][0]}
                files = [(os.POSIX_SPAWN_DUP2, pairs[0][0], 0)]
                files += [(os.POSIX_SPAWN_DUP2, pairs[to][1], to) for to in (OUTPUT, ERRORS)]
            failed.callback(os.close, input_)
            os.set_blocking(input_, False)
            outputs = {}
            for number, source in sources.items():
                outputs[number] = await _Output.of(source)
                failed.callback(outputs[number].transport.close)
            # Nothing is awaited from here on, so that no command is lost.
            pid = _spawn(command, environment, files)
            failed.pop_all()
            return cls(pid, input_, outputs)

    def outputs(self) -> Sequence[AsyncIterator[tuple[int, bytes]]]:
        return [read(number, output.reader) for number, output in self._outputs.items()]

    def write(self, data: bytes) -> int:
        if self._input is None:
            return len(data)
        try:
            return os.write(self._input, data) if data else 0
        except BlockingIOError:
            return 0
        except OSError:  # it does not read any more
            return len(data)

    def end_input(self) -> None:
        if self._input is not None:
            os.close(self._input)
            self._input = None

    async def resize(self, rows: int, columns: int) -> None:
        if self._input is not None:
            with contextlib.suppress(OSError, termios.error):  # it has no terminal
                termios.tcsetwinsize(self._input, (rows, columns))  # its processes get SIGWINCH

    async def wait(self) -> int:
        code = await asyncio.shield(self._ended)
        return 255 if code is None else code

    async def close(self) -> None:
        if self._is_closed:  # another session may have its pid by now
            return
        self._is_closed = True
        self.end_input()
        os_process.signal_all(await asyncio.to_thread(os_process.members, "", self._pid), signal.SIGHUP)
        await os_process.kill_members("", self._pid, patience_s=HANGUP_S)
        await self._ended

    def end_output(self) -> None:
        for output in self._outputs.values():
            output.transport.close()


async def read(number: int, reader: asyncio.StreamReader) -> AsyncIterator[tuple[int, bytes]]:
    with contextlib.suppress(OSError):  # a terminal whose last process has ended
        while data := await reader.read(READ_BYTES):
            yield number, data


@dataclass(frozen=True, slots=True)
class _Output:
    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport

    @classmethod
    async def of(cls, descriptor: int) -> _Output:
        """Of a descriptor, which it closes at its end."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
        )
        return cls(reader, transport)


def _spawn(command: list[str], environment: Mapping[str, str], files: list[Any]) -> int:
    return os.posix_spawn(
        command[0],
        command,
        environment,
        file_actions=files,
        setsid=True,
        setsigdef=os_process.DEFAULT_SIGNALS,
        setsigmask=(),
    )


def _descriptors(stack: contextlib.AsyncExitStack, descriptors: tuple[int, ...]) -> tuple[int, ...]:
    """Close them when the command has them."""
    for each in descriptors:
        stack.callback(os.close, each)
    return descriptors
