"""Real child processes in tests: start one, wait for its output, kill it as a power failure would.

    async with await process.start(sys.executable, "-m", "http.server", "0") as child:
        port = (await child.line(r"port (\\d+)"))[1]
        await child.kill()

A child leads its own process group, which ends with the `async with`.  Standard output and error are one
text, stored up to a limit; a failed expectation shows the end of it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Self

import muster

LINES_MAX = 10_000
LINES_SHOWN = 60
LINE_BYTES_MAX = 1 << 20


class ChildProcess:
    """Created by `start`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.lines: collections.deque[str] = collections.deque(maxlen=LINES_MAX)
        self._process = process
        self._lines_read = 0  # lines read in total
        self._lines_matched = 0  # of them, lines up to the last match of `line`
        self._news = asyncio.Condition()
        self._ended = False
        self._reader = asyncio.create_task(self._read(), name=f"output of {name}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        return self._process.returncode

    async def write_line(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        await self._process.stdin.drain()

    async def line(self, pattern: str, *, timeout_s: float = 30.0) -> re.Match[str]:
        """The next line after the last match that contains ``pattern``."""
        try:
            async with asyncio.timeout(timeout_s), self._news:
                while True:
                    for text in list(self.lines)[
                        -(self._lines_read - self._lines_matched) or len(self.lines) :
                    ]:
                        self._lines_matched += 1
                        if match := re.search(pattern, text):
                            return match
                    if self._ended:
                        raise AssertionError(f"{self.name} ended without printing {pattern!r}; {self.tail()}")
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(
                f"{self.name} did not print {pattern!r} within {timeout_s:g} s; {self.tail()}"
            ) from None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def wait(self, *, timeout_s: float = 30.0) -> int:
        """The exit code, after all output has been read."""
        if not await self.ends_within(timeout_s):
            raise AssertionError(f"{self.name} did not end within {timeout_s:g} s; {self.tail()}")
        assert self.exit_code is not None
        return self.exit_code

    async def ends_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
                await asyncio.shield(self._reader)
        except TimeoutError:
            return False
        return True

    async def terminate(self, *, timeout_s: float = 30.0) -> int:
        """Send SIGTERM and wait for the end."""
        if self.exit_code is None:
            self.signal(signal.SIGTERM)
        return await self.wait(timeout_s=timeout_s)

    async def kill(self) -> None:
        """``kill -9`` of this process only, not of its children."""
        if self.exit_code is None:
            self.signal(signal.SIGKILL)
        await self._process.wait()

    async def close(self) -> None:
        """End the complete process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._reader

    def tail(self) -> str:
        lines = list(self.lines)[-LINES_SHOWN:]
        return f"its last {len(lines)} lines:\n" + "\n".join(f"  | {line}" for line in lines)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in _lines(self._process.stdout):
            async with self._news:
                self.lines.append(line)
                self._lines_read += 1
                self._news.notify_all()
        async with self._news:
            self._ended = True
            self._news.notify_all()


async def start(
    *command: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    name: str | None = None,
) -> ChildProcess:
    """Start a program. ``env`` is added to the environment; Python programs import the same Muster."""
    source_root = str(Path(muster.__file__).parents[1])
    path = os.pathsep.join(filter(None, (source_root, os.environ.get("PYTHONPATH"))))
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(env or {})},
        cwd=cwd,
        start_new_session=True,
        limit=LINE_BYTES_MAX,
    )
    return ChildProcess(name or Path(command[0]).name, process)


async def start_muster(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> ChildProcess:
    """The ``muster`` command, from the same code as the tests."""
    name = " ".join(("muster", *arguments))
    return await start(sys.executable, "-m", "muster", *arguments, env=env, cwd=cwd, name=name)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    while raw := await stream.readline():
        yield raw.decode(errors="replace").rstrip("\r\n")
