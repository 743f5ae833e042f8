"""Several processes that serve one port: the kernel distributes the connections among them (SO_REUSEPORT).

Each process is replaced when it ends or stops responding. All end with the process that started them, however
that ends: it holds the other end of their standard input.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from muster.bus.http import health as http_health
from muster.core import errors
from muster.supervision import children, tasks

START_S = 60.0
# A frozen process is replaced after at most 6 s: it keeps new connections until then. A worker that is ready
# has published its health page, so it needs no grace.
PROBE_POLICY = children.ProbePolicy(period_s=1.0, timeout_s=2.0, failures_max=2, grace_s=0.0)


def usable_cores() -> int:
    """The number of processes that are useful on this machine; one where ports cannot be shared."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


class PortWorkers:
    """``command`` starts a worker, which gets the option ``--port`` in addition. A worker listens with
    SO_REUSEPORT, prints a line when it is ready, and ends when its standard input is closed.

    ``port`` 0: a free one. ``share_port``: processes of other users of this class may serve it too.
    ``pages``: the folder where workers publish the addresses of their health pages before they are ready;
    without it, a worker that does not respond is not noticed.
    """

    def __init__(
        self,
        command: Sequence[str],
        host: str,
        port: int,
        count: int,
        *,
        share_port: bool = False,
        pages: Path | None = None,
    ) -> None:
        self._command = command
        self._host = host
        self.port = port
        self._share_port = share_port
        self._reserved: socket.socket | None = None
        self._tasks = tasks.TaskSupervisor("output of workers")
        self._workers = [self._supervisor(number, pages) for number in range(count)]

    async def __aenter__(self) -> Self:
        self._reserved = self._reserve()
        self.port = self._reserved.getsockname()[1]
        starts = [asyncio.ensure_future(worker.start()) for worker in self._workers]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:  # one that failed does not end the others
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        await self._tasks.close()
        if self._reserved is not None:
            self._reserved.close()

    @property
    def running(self) -> int:
        return sum(worker.state is children.ChildState.RUNNING for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def _supervisor(self, number: int, pages: Path | None) -> children.ChildSupervisor:
        async def responds() -> bool:
            assert pages is not None
            return await http_health.reported(pages, worker.pid) is not None

        worker = children.ChildSupervisor(
            f"worker {number}",
            self._launch,
            probe=None if pages is None else responds,
            probe_policy=PROBE_POLICY,
        )
        return worker

    def _reserve(self) -> socket.socket:
        """Bind the port without listening, so that it remains ours while no worker listens."""
        family, _, _, _, address = socket.getaddrinfo(self._host, self.port, type=socket.SOCK_STREAM)[0]
        try:
            if not self._share_port:  # fails if another process serves it, even one that shares it
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
            reserved = socket.socket(family, socket.SOCK_STREAM)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise errors.Unavailable(f"port {self.port} of {self._host} is in use") from error
            raise errors.Unavailable(f"port {self.port} of {self._host} cannot be used: {error}") from error
        return reserved

    async def _launch(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            "--port",
            str(self.port),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C of the terminal is for this process only
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                if not await process.stdout.readline():
                    code = await process.wait()
                    raise errors.Unavailable(f"a process for port {self.port} ended with code {code}")
        except TimeoutError as error:
            await children.end_process(process)
            raise errors.TimedOut(
                f"a process for port {self.port} was not ready within {START_S:g} s"
            ) from error
        except BaseException:
            await children.end_process(process)
            raise
        self._tasks.spawn("output", _discard(process.stdout))
        return process


async def _discard(output: asyncio.StreamReader) -> None:
    while await output.read(1 << 16):
        pass
