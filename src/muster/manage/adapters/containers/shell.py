"""Commands that users run inside a container, through the connection that the engine keeps for each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
from collections.abc import AsyncIterator, Sequence
from typing import Any

from muster.core import errors
from muster.manage import protocol
from muster.manage.adapters import shell
from muster.manage.adapters.containers import engine

INPUT_BYTES_MAX = 64 << 10  # that the engine has not read
POLL_S, POLLS = 0.1, 100  # for the exit code, after the end of the output


class ContainerShell(shell.Shell):
    """``leader`` is the process of the container."""

    def __init__(
        self,
        engine_: engine.ContainerEngine,
        id: str,
        leader: int,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        *,
        has_terminal: bool,
    ) -> None:
        self._engine = engine_
        self._path = f"/exec/{id}"
        self._leader = leader
        self._reader, self._writer = streams
        self._has_terminal = has_terminal
        self._is_over = asyncio.Event()

    @classmethod
    async def start(
        cls, engine_: engine.ContainerEngine, container: str, leader: int, words: protocol.ShellCommand
    ) -> ContainerShell:
        has_terminal = bool(words.terminal)
        definition: dict[str, Any] = {"Cmd": list(words.command), "Tty": has_terminal}
        definition |= {f"Attach{stream}": True for stream in ("Stdin", "Stdout", "Stderr")}
        if has_terminal:
            definition["Env"] = [f"TERM={words.terminal}"]
        id = (await engine_.json("POST", f"/containers/{container}/exec", definition))["Id"]
        start: dict[str, Any] = {"Detach": False, "Tty": has_terminal}
        if has_terminal:  # the size, for Podman and for Docker
            start |= {"h": words.rows, "w": words.columns, "ConsoleSize": [words.rows, words.columns]}
        made = cls(
            engine_,
            id,
            leader,
            await engine_.attach(f"/exec/{id}/start", start),
            has_terminal=has_terminal,
        )
        await made.resize(words.rows, words.columns)  # for a Docker of before 23
        return made

    def outputs(self) -> Sequence[AsyncIterator[tuple[int, bytes]]]:
        return [self._output()]

    async def _output(self) -> AsyncIterator[tuple[int, bytes]]:
        try:
            if self._has_terminal:
                async for chunk in shell.read(shell.OUTPUT, self._reader):
                    yield chunk
                return
            while frame := await engine.read_frame(self._reader):
                number, data = frame
                for first in range(0, len(data), shell.READ_BYTES):
                    yield number, data[first : first + shell.READ_BYTES]
        finally:
            self._is_over.set()

    def write(self, data: bytes) -> int:
        waiting = self._writer.transport.get_write_buffer_size()
        taken = data[: max(0, INPUT_BYTES_MAX - waiting)]
        with contextlib.suppress(OSError, RuntimeError):  # it does not read any more
            self._writer.write(taken)
        return len(taken)

    def end_input(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write_eof()

    async def resize(self, rows: int, columns: int) -> None:
        if self._has_terminal:
            with contextlib.suppress(errors.MusterError):  # it may have ended
                await self._engine.send("POST", f"{self._path}/resize", h=rows, w=columns)

    async def wait(self) -> int:
        await self._is_over.wait()
        for _ in range(POLLS):
            state = await self._engine.json("GET", f"{self._path}/json")
            if not state.get("Running"):
                return int(state["ExitCode"])
            await asyncio.sleep(POLL_S)
        raise errors.TimedOut(f"{self._engine.socket} does not report the end of a command")

    async def close(self) -> None:
        """An engine ends no command; a process that is visible here, and in the container, can be ended."""
        with contextlib.suppress(errors.MusterError):
            state = await self._engine.json("GET", f"{self._path}/json")
            pid = int(state.get("Pid") or 0) if state.get("Running") else 0
            if pid > 1 and pid != self._leader and _space(pid) == _space(self._leader) != "":
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def end_output(self) -> None:
        self._writer.close()


def _space(pid: int) -> str:
    """The space of process numbers in which it runs; empty: unknown."""
    try:
        return os.readlink(pathlib.Path(f"/proc/{pid}/ns/pid"))
    except OSError:
        return ""
