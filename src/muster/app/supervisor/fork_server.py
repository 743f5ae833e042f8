"""Where management's processes come from: one process that has imported everything, and forks.

A registry endpoint, a manager or an agent is then a matter of milliseconds, and they share the memory of the
program.  The nursery reads a task a line; the process that has it says its number, and when it is ready.  The
nursery does nothing else, and has no threads: forking is safe.

What it bore lives on without it, and ends with the bootstrap node: all of them hold the reading end of a pipe
(the leash), whose other end the bootstrap node has.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import sys
from typing import Any

import msgspec

from muster.core import errors

START_S = 20.0


class ForkServerMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line from a process that the nursery bore: first its ``pid``, later that it is ``ready``."""

    number: int  # of the request
    pid: int = 0
    ready: bool = False


class Request(msgspec.Struct, frozen=True):
    number: int
    task: msgspec.Raw


class ForkServer:
    """The bootstrap node's side."""

    def __init__(self, on_ready: Any) -> None:
        self._on_ready = on_ready
        self._process: asyncio.subprocess.Process | None = None
        self._listening: set[asyncio.Task[None]] = set()
        self._requests = itertools.count(1)
        # By the number of the request: those that are waited for, and the names of those not ready yet.
        self._born: dict[int, asyncio.Future[int]] = {}
        self._names: dict[int, str] = {}
        self._leash = os.pipe()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def bear(self, name: str, task: msgspec.Struct) -> int:
        """The number of the process that has this task. A nursery that has died is replaced.

        A process that is born after its request was given up is ended: another one has its task by then.
        """
        if self._process is None or self._process.returncode is not None:
            await self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        born: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        number = next(self._requests)
        self._born[number] = born
        self._names = {other: known for other, known in self._names.items() if known != name} | {number: name}
        request = Request(number, msgspec.Raw(msgspec.json.encode(task)))
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        ended = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait([born, ended], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if born.done():
                return born.result()
        finally:
            del self._born[number]
            ended.cancel()
        self._names.pop(number, None)
        if ended.done():
            raise errors.Unavailable(f"the nursery ended while {name} was being started")
        raise errors.TimedOut(f"{name} was not started in {START_S:g} s")

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
            said = msgspec.json.decode(line, type=ForkServerMessage)
            born = self._born.get(said.number)
            if said.ready:
                if (name := self._names.pop(said.number, None)) is not None:
                    self._on_ready(name)
            elif born is not None and not born.done():
                born.set_result(said.pid)
            else:  # too late
                with contextlib.suppress(ProcessLookupError):
                    os.kill(said.pid, signal.SIGKILL)


def _say(said: ForkServerMessage) -> None:
    with contextlib.suppress(OSError):
        os.write(1, msgspec.json.encode(said) + b"\n")  # short: it arrives whole, whoever else writes


def main() -> None:
    from muster.app.supervisor import worker
    from muster.store.sqlite import engine  # noqa: F401  (a registry opens it)

    leash = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are others' to wait for
    gc.freeze()
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        task = msgspec.json.decode(request.task, type=worker.WorkerConfig)
        if os.fork() == 0:
            _live(request.number, task, leash)


def _live(number: int, task: Any, leash: int) -> None:
    """The rest of a process's life. It says itself that it lives: the nursery may end at any moment."""
    from muster.app.supervisor import worker

    code = 1
    _say(ForkServerMessage(number, pid=os.getpid()))
    try:
        for signal_number in (signal.SIGINT, signal.SIGCHLD):
            signal.signal(signal_number, signal.SIG_DFL)
        for path, fd, how in (
            (os.devnull, 0, os.O_RDONLY),
            (task.log_file, 2, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        ):
            opened = os.open(path, how, 0o600)
            os.dup2(opened, fd)
            os.close(opened)
        asyncio.run(worker.run_worker(task, leash, lambda: _say(ForkServerMessage(number, ready=True))))
        code = 0
    except BaseException:  # noqa: BLE001  (whatever it was: it is written down, and the process ends)
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
