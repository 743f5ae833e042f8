"""Servers in separate processes (`muster.app.supervisor.module_process`): their socket and configuration.

The domain opens the socket and passes it on, so the address is known at once and stays the same after a
restart, and clients that connect meanwhile wait instead of being refused. The process reads its
configuration, one line of JSON, from standard input, and ends when the input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator

from muster.core import errors
from muster.supervision import tasks


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

    supervisor = tasks.TaskSupervisor("lifeline")
    supervisor.loop("input", wait_for_end)
    try:
        yield task, stop
    finally:
        await supervisor.close()


def inherited(descriptor: int) -> socket.socket:
    """The listening socket from the domain; not inherited further."""
    listener = socket.socket(fileno=os.dup(descriptor))
    os.close(descriptor)
    return listener
