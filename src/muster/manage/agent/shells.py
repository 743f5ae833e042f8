"""Commands that users run inside the resources of an agent: their sessions, bounded in number and time.

A user asks for output again and again (`protocol.ShellExchange`), so a session whose user is gone is known by
its silence, and ended. Requests may be repeated: input is taken once, by its position, and output is kept
until the user has confirmed it. A session ends with its agent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from muster.bus.rpc import single_flight
from muster.core import errors
from muster.core.telemetry import log
from muster.manage import protocol
from muster.manage.adapters import base, shell
from muster.supervision import tasks

events = log.EventLog("manage")

SHELLS_MAX, OF_ONE_MAX = 32, 8  # sessions of an agent, and of one identity
SILENT_S = 20.0  # longer than a take-over of registry and manager
KEPT_BYTES_MAX = 256 << 10  # output that the user has not confirmed
UNKNOWN_CODE = 255
LAST_OUTPUT_S = 1.0  # after the end of the command: something that it left behind may hold its output


class ShellSession:
    def __init__(self, resource: str, process: shell.Shell) -> None:
        self.resource = resource
        self.asked_at = asyncio.get_running_loop().time()
        self._process = process
        self._chunks: deque[tuple[int, bytes]] = deque()
        self._first = self._kept = 0  # the number of the first chunk, and bytes of all
        self._taken = 0
        self._exit_code: int | None = None
        self._news, self._room = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Read its output until it has ended."""
        readers = [asyncio.ensure_future(self._read(output)) for output in self._process.outputs()]
        try:
            try:
                code = await self._process.wait()
            except errors.MusterError as error:  # of a container engine
                code = UNKNOWN_CODE
                events.warning("exit-code-not-read", resource=self.resource, error=error)
            await self._process.close()
            deadline = asyncio.get_running_loop().time() + LAST_OUTPUT_S
            while any(not reader.done() for reader in readers):
                # While its user is reading, there is time; what only waits holds the stream.
                left_s = deadline - asyncio.get_running_loop().time()
                if left_s <= 0 and not self._is_full():
                    break
                await asyncio.wait(readers, timeout=max(0.05, left_s))
            self._exit_code = code
        finally:
            self._exit_code = UNKNOWN_CODE if self._exit_code is None else self._exit_code
            self._news.set()
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            self._process.end_output()
            await self._process.close()

    def _is_full(self) -> bool:
        return self._kept >= KEPT_BYTES_MAX

    async def _read(self, output: AsyncIterator[tuple[int, bytes]]) -> None:
        async for chunk in output:
            self._chunks.append(chunk)
            self._kept += len(chunk[1])
            self._news.set()
            while self._is_full():
                self._room.clear()
                await self._room.wait()

    async def exchange(self, request: protocol.ShellExchange) -> protocol.ShellOutput:
        self.asked_at = asyncio.get_running_loop().time()
        while self._first < request.received and self._chunks:
            self._kept -= len(self._chunks.popleft()[1])
            self._first += 1
        self._room.set()
        if request.rows and request.columns:
            await self._process.resize(request.rows, request.columns)
        if request.sent <= self._taken:
            self._taken += self._process.write(request.data[self._taken - request.sent :])
        if request.is_end and self._taken == request.sent + len(request.data):
            self._process.end_input()
        if request.wait_s and not self._chunks and self._exit_code is None:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(request.wait_s):
                    await self._news.wait()
        return self._output(asks=request.wait_s > 0)

    def _output(self, *, asks: bool) -> protocol.ShellOutput:
        size, chunks = 0, []
        for number, data in self._chunks if asks else ():
            if size + len(data) > protocol.SHELL_BYTES_MAX:
                break
            size += len(data)
            chunks.append((number, data))
        is_all = len(chunks) == len(self._chunks)
        return protocol.ShellOutput(
            chunks=tuple(chunks),
            first=self._first,
            taken=self._taken,
            exit_code=self._exit_code if is_all else None,
        )


class ShellSessions:
    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._sessions: dict[str, ShellSession] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._begun = single_flight.SingleFlight[None]()
        self._tasks = tasks.TaskSupervisor(f"commands of users on {agent}")

    async def begin(self, id: str, adapter: base.Adapter, command: protocol.ShellCommand) -> None:
        """``id``: the identity of the user, a slash and a name. A repetition begins nothing."""
        if id not in self._sessions:
            await self._begun.once(id, lambda: self._begin(id, adapter, command))

    async def _begin(self, id: str, adapter: base.Adapter, command: protocol.ShellCommand) -> None:
        user = id.partition("/")[0]
        of_user = sum(known.partition("/")[0] == user for known in self._sessions)
        if len(self._sessions) >= SHELLS_MAX or of_user >= OF_ONE_MAX:
            raise errors.LimitExceeded(
                f"{self._agent} runs {len(self._sessions)} commands of users, {of_user} of them of {user}; "
                f"at most {SHELLS_MAX}, and {OF_ONE_MAX} of one"
            )
        name = adapter.context.name
        session = self._sessions[id] = ShellSession(name, await adapter.open_shell(command))
        self._running[id] = self._tasks.spawn("command", self._run(id, session))
        events.info("command-begun", resource=name, user=user, command=" ".join(command.command)[:200])

    async def _run(self, id: str, session: ShellSession) -> None:
        running = self._tasks.spawn("output", session.run())
        try:
            loop = asyncio.get_running_loop()
            left_s = SILENT_S
            while left_s > 0:
                await asyncio.sleep(left_s)
                left_s = session.asked_at + SILENT_S - loop.time()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            del self._sessions[id], self._running[id]
            events.info("command-ended", resource=session.resource, user=id.partition("/")[0])

    async def exchange(self, id: str, request: protocol.ShellExchange) -> protocol.ShellOutput:
        session = self._sessions.get(id)
        if session is None:
            if request.closes:
                return protocol.ShellOutput()
            raise errors.NotFound(
                "the command has ended: its agent was restarted, or did not hear of its user for "
                f"{SILENT_S:g} s"
            )
        output = await session.exchange(request)
        if request.closes:
            await self._end([id])
        return output

    async def end_all(self, resource: str = "") -> None:
        """End the commands in a resource, or in all."""
        await self._end([id for id, known in self._sessions.items() if resource in ("", known.resource)])

    async def _end(self, ids: list[str]) -> None:
        ended = [self._running[id] for id in ids if id in self._running]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)

    async def close(self) -> None:
        await self.end_all()
        await self._tasks.close()
