"""Servers in separate processes, supervised by the domain.

Load and failures caused by clients affect that process and not the domain's leases, heartbeats and health
pages. The domain opens the socket and passes it on, so the address is known at once and stays the same after
a restart, and clients that connect meanwhile wait instead of being refused.

The process reads its configuration, one line of JSON, from standard input, and ends when the input does: the
domain holds the other end, so the process does not outlive it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator

from muster.app.components import context as context_
from muster.core import errors

STOP_S = 5.0
WAIT_MAX_S = 30.0


def listen(host: str, port: int, *, hint: str, or_any_port: bool = False) -> socket.socket:
    """A listening socket; ``or_any_port``: use a free port if this one is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            if not port or not or_any_port:
                raise errors.Unavailable(
                    f"cannot listen on {host}:{port}: {error.strerror}", hint=hint
                ) from error
            listener.bind((host, 0))
        listener.listen(256)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def url(scheme: str, host: str, listener: socket.socket) -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


class ServerProcess:
    """Keeps ``python -m MODULE`` running; the delay between failures doubles."""

    def __init__(self, name: str, module: str) -> None:
        self._name = name
        self._module = module
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self.reason = ""  # why it last ended

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it runs, or is starting for the first time."""
        return self._process is None or self._process.returncode is None

    def start(self, context: context_.ComponentContext, listener: socket.socket, task: bytes) -> None:
        self._task = context.spawn(self._keep_running(context, listener.fileno(), task))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        process = self._process
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def _keep_running(self, context: context_.ComponentContext, listener: int, task: bytes) -> None:
        wait_s = 0.5
        path = context.folder.logs / f"{self._name}.log"
        while True:
            with path.open("ab") as output:  # not in a thread, in which a cancellation would leave it open
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    self._module,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(listener,),
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            self._process.stdin.write(task + b"\n")
            code = await self._process.wait()
            self.reason = f"ended with code {code}; see {path}"
            context.log.error(f"{self._name}-ended", code=code)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, WAIT_MAX_S)


@contextlib.asynccontextmanager
async def supervised() -> AsyncIterator[tuple[bytes, asyncio.Event]]:
    """In the process itself: its configuration, and an event that is set when it has to stop."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    task = await reader.readline()

    async def wait_for_end() -> None:
        await reader.read()
        stop.set()

    waiting = asyncio.create_task(wait_for_end())
    try:
        yield task, stop
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


def inherited(descriptor: int) -> socket.socket:
    """The listening socket from the domain; not inherited further."""
    listener = socket.socket(fileno=os.dup(descriptor))
    os.close(descriptor)
    return listener
