"""A command inside a resource, for its user: input, output and exit code, over the bus.

    async with fleet.run_inside("web-1", "cat", "/etc/hostname") as session:
        async for stream, data in session.output():
            ...
    print(session.exit_code)

Output is asked for again and again; a request that is lost is repeated, and what it exchanges counts once. So
a session survives the loss of a broker, a manager or the registry. It ends with the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from muster.core import errors, lifecycle
from muster.manage import protocol

PATIENCE_S = 15.0  # without an answer; shorter than that of the agent
RETRY_S = 0.2
FULL_S, FULL_S_MAX = 0.02, 0.5  # while the command does not read its input
END_S = 3.0

#: (verb, type of the result, time for one attempt, arguments)
Request = Callable[..., Awaitable[Any]]


class CommandSession(lifecycle.ServiceContext):
    """``exit_code`` is set when `output` has ended; a signal is negative."""

    def __init__(self, request: Request, resource: str, command: protocol.ShellCommand) -> None:
        self.exit_code: int | None = None
        self._request = request
        self._resource = resource
        self._command = command
        self._id = ""
        self._received = self._sent = 0

    async def start(self) -> None:
        self._id = await self._request(str, protocol.SHELL, name=self._resource, command=self._command)

    async def stop(self) -> None:
        """End the command, if it still runs."""
        if self._id:
            with contextlib.suppress(errors.Unavailable, errors.NotFound, TimeoutError):
                async with asyncio.timeout(END_S):
                    end = {"id": self._id, "exit_code": self.exit_code}
                    await self._request(None, protocol.SHELL_END, name=self._resource, **end)

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        """The parts of its output (1) and its errors (2) until it ends. With a terminal, all is output."""
        while self.exit_code is None:
            page = await self._exchange(wait_s=protocol.SHELL_WAIT_S)
            for number, data in page.chunks[max(0, self._received - page.first) :]:
                self._received += 1
                yield number, data
            self.exit_code = page.exit_code

    async def write(self, data: bytes) -> None:
        """Send input. Returns when the command has read it, or its terminal has taken it."""
        wait_s = FULL_S
        while data and self.exit_code is None:
            page = await self._exchange(data=data[: protocol.SHELL_BYTES_MAX])
            taken, self._sent = page.taken - self._sent, page.taken
            data = data[taken:]
            wait_s = FULL_S if taken else min(FULL_S_MAX, wait_s * 2)
            if not taken:
                await asyncio.sleep(wait_s)

    async def end_input(self) -> None:
        await self._exchange(is_end=True)

    async def resize(self, rows: int, columns: int) -> None:
        if rows and columns:
            await self._exchange(rows=rows, columns=columns)

    async def _exchange(self, **fields: Any) -> protocol.ShellOutput:
        exchange = protocol.ShellExchange(received=self._received, sent=self._sent, **fields)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + PATIENCE_S
        while True:
            try:
                arguments = {"name": self._resource, "id": self._id, "exchange": exchange}
                page: protocol.ShellOutput = await self._request(
                    protocol.ShellOutput, protocol.SHELL_EXCHANGE, **arguments
                )
                return page
            except errors.Unavailable:
                if loop.time() > until_s:
                    raise
                await asyncio.sleep(RETRY_S)
