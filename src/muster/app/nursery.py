"""Where management's processes come from: one process that has imported everything, and forks.

A registry endpoint, a manager or an agent is then a matter of milliseconds, and they share the memory of the
program.  The nursery reads a task a line and answers with the number of the process that has it; that process
says when it is ready.  It does nothing else, and has no threads: forking is safe.

What it bore lives on without it, and ends with the bootstrap node: all of them hold the reading end of a pipe
(the leash), whose other end the bootstrap node has.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from typing import Any

import msgspec

from muster.core import errors

START_S = 20.0


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line from the nursery (``pid``) or from one that it bore (``ready``)."""

    name: str
    pid: int = 0
    ready: bool = False


class Nursery:
    """The bootstrap node's side."""

    def __init__(self, on_ready: Any) -> None:
        self._on_ready = on_ready
        self._process: asyncio.subprocess.Process | None = None
        self._listening: set[asyncio.Task[None]] = set()
        self._born: dict[str, asyncio.Future[int]] = {}
        self._leash = os.pipe()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def bear(self, name: str, task: msgspec.Struct) -> int:
        """The number of the process that has this task. A nursery that has died is replaced."""
        if self._process is None or self._process.returncode is not None:
            await self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        born: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._born[name] = born
        self._process.stdin.write(msgspec.json.encode(task) + b"\n")
        ended = asyncio.ensure_future(self._process.wait())
        try:
            async with asyncio.timeout(START_S):
                await asyncio.wait([born, ended], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise errors.TimedOut(f"{name} was not started in {START_S:g} s") from None
        finally:
            ended.cancel()
            del self._born[name]
        if not born.done():
            raise errors.Unavailable(f"the nursery ended while {name} was being started")
        return born.result()

    async def close(self) -> None:
        """Let go of the leash: everything that was born here ends."""
        os.close(self._leash[1])
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()
        for task in self._listening:
            task.cancel()
        await asyncio.gather(*self._listening, return_exceptions=True)
        os.close(self._leash[0])

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            str(self._leash[0]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(self._leash[0],),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        # What an earlier one bore still speaks by that one's pipe, until it ends.
        task = asyncio.create_task(self._listen(self._process.stdout))
        self._listening.add(task)
        task.add_done_callback(self._listening.discard)

    async def _listen(self, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            said = msgspec.json.decode(line, type=Said)
            if said.ready:
                self._on_ready(said.name)
            elif (born := self._born.get(said.name)) is not None and not born.done():
                born.set_result(said.pid)


def _say(said: Said) -> None:
    with contextlib.suppress(OSError):
        os.write(1, msgspec.json.encode(said) + b"\n")  # short: it arrives whole, whoever else writes


def main() -> None:
    from muster.app import managing
    from muster.store.sqlite import engine  # noqa: F401  (a registry opens it)

    leash = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are others' to wait for
    gc.freeze()
    for line in sys.stdin.buffer:
        task = msgspec.json.decode(line, type=managing.Task)
        pid = os.fork()
        if pid == 0:
            _live(task, leash)
        _say(Said(task.known_as, pid=pid))


def _live(task: Any, leash: int) -> None:
    """The rest of a process's life."""
    from muster.app import managing

    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for path, fd, how in (
            (os.devnull, 0, os.O_RDONLY),
            (task.log_file, 2, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        ):
            opened = os.open(path, how, 0o600)
            os.dup2(opened, fd)
            os.close(opened)
        asyncio.run(managing.live(task, leash, lambda: _say(Said(task.known_as, ready=True))))
        code = 0
    except BaseException:  # noqa: BLE001  (whatever it was: it is written down, and the process ends)
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
