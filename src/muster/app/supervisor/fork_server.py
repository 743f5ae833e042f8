"""Forks the processes of management and information nodes: one process that has imported everything, and
forks on request.

A registry endpoint, a manager, an agent or a node then starts within milliseconds, and they share the memory
of the program. The fork server reads one task per line; the process of a task reports its pid, and later that
it is ready. The fork server does nothing else and has no threads, so forking is safe.

Its children survive it, and end with the bootstrap node: all of them hold the reading end of a pipe (the
lifeline), whose other end belongs to the bootstrap node.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from muster.core import errors
from muster.supervision import children, tasks

START_S = 20.0

OnReady = Callable[[str], None]


class ForkServerMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line from a child of the fork server: first its ``pid``, later that it is ``ready``."""

    number: int  # number of the request
    pid: int = 0
    ready: bool = False


class Request(msgspec.Struct, frozen=True):
    number: int
    task: msgspec.Raw


class ForkServer:
    """The client side, in the domain."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._begin = asyncio.Lock()
        self._listening = tasks.TaskSupervisor("fork server")
        self._requests = itertools.count(1)
        # By request number: processes that are awaited, and the names of those not ready yet.
        self._starting: dict[int, asyncio.Future[int]] = {}
        self._names: dict[int, tuple[str, OnReady]] = {}
        self._lifeline = os.pipe()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def prepare(self) -> None:
        """Start it, so that it has imported the program when the first process is needed."""
        async with self._begin:
            if self._process is None or self._process.returncode is not None:
                await self._start()

    async def spawn(self, name: str, task: msgspec.Struct, on_ready: OnReady = lambda _: None) -> int:
        """The pid of the process for this task; ``on_ready`` is called with its name later.

        A fork server that has ended or does not reply is replaced.

        A process that starts after its request was abandoned is killed, because another one has its task by
        then.
        """
        await self.prepare()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        number = next(self._requests)
        self._starting[number] = started
        others = {other: known for other, known in self._names.items() if known[0] != name}
        self._names = others | {number: (name, on_ready)}
        request = Request(number, msgspec.Raw(msgspec.json.encode(task)))
        process.stdin.write(msgspec.json.encode(request) + b"\n")
        ended = asyncio.ensure_future(children.exit_code(process))
        try:
            await asyncio.wait([started, ended], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                return started.result()
        finally:
            del self._starting[number]
            ended.cancel()
        self._names.pop(number, None)
        if ended.done():
            raise errors.Unavailable(f"the fork server ended while {name} was starting")
        await _kill(process)  # it is frozen or hangs; its children survive it
        raise errors.TimedOut(f"{name} did not start within {START_S:g} s")

    async def close(self) -> None:
        """Close the lifeline: all children end."""
        os.close(self._lifeline[1])
        if self._process is not None:
            await _kill(self._process)
        await self._listening.wait_idle(children.STOP_S)  # until all children have ended
        await self._listening.close()
        os.close(self._lifeline[0])

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            str(self._lifeline[0]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(self._lifeline[0],),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        # Children of a previous fork server still write to its pipe until they end.
        self._listening.spawn("messages", self._listen(self._process.stdout))

    async def _listen(self, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            message = msgspec.json.decode(line, type=ForkServerMessage)
            started = self._starting.get(message.number)
            if message.ready:
                if (waiting := self._names.pop(message.number, None)) is not None:
                    name, on_ready = waiting
                    on_ready(name)
            elif started is not None and not started.done():
                started.set_result(message.pid)
            else:  # too late
                with contextlib.suppress(ProcessLookupError):
                    os.kill(message.pid, signal.SIGKILL)


async def _kill(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await children.exit_code(process)


def _send(message: ForkServerMessage, to: int = 1) -> None:
    with contextlib.suppress(OSError):
        os.write(to, msgspec.json.encode(message) + b"\n")  # short, so the write is atomic


def main() -> None:
    from muster.app.supervisor import worker, worker_config  # noqa: F401  (the children run worker)

    lifeline = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are awaited elsewhere
    gc.freeze()
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        task = msgspec.json.decode(request.task, type=worker_config.WorkerConfig)
        if os.fork() == 0:
            _run_child(request.number, task, lifeline)


def _run_child(number: int, task: Any, lifeline: int) -> None:
    """Run the child process. It reports its pid itself, because the fork server may end at any time."""
    from muster.app.supervisor import worker

    code = 1
    _send(ForkServerMessage(number, pid=os.getpid()))
    try:
        for signal_number in (signal.SIGINT, signal.SIGCHLD):
            signal.signal(signal_number, signal.SIG_DFL)
        messages = os.dup(1)  # what an adapter or its child prints must not be read as a message
        for path, fds, how in (
            (os.devnull, (0,), os.O_RDONLY),
            (task.log_file, (1, 2), os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        ):
            opened = os.open(path, how, 0o600)
            for fd in fds:
                os.dup2(opened, fd)
            os.close(opened)
        ready = functools.partial(_send, ForkServerMessage(number, ready=True), messages)
        asyncio.run(worker.run_worker(task, lifeline, ready))
        code = 0
    except BaseException:  # noqa: BLE001  (any error is logged, and the process ends)
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
