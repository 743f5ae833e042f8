"""A TCP proxy that delays: messages of different connections overtake each other, those of one do not."""

from __future__ import annotations

import asyncio
import contextlib
import random

CHUNK = 65_536


class DelayProxy:
    def __init__(self, host: str, port: int, to: tuple[str, int], chance: random.Random) -> None:
        self._listen = host, port
        self._to = to
        self._chance = chance
        self.delay_s_max = 0.0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, *self._listen)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.wait_for(asyncio.open_connection(*self._to), 2.0)
        except OSError:
            writer.close()
            return
        for source, target in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._copy(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        now_s = asyncio.get_running_loop().time

        async def deliver() -> None:
            while True:
                due_s, data = await queue.get()
                await asyncio.sleep(max(0.0, due_s - now_s()))  # pace
                target.write(data)
                if not data:
                    return
                await target.drain()

        delivery = asyncio.create_task(deliver())
        try:
            while data := await source.read(CHUNK):
                delay_s = self._chance.uniform(0.0, self.delay_s_max)
                await queue.put((now_s() + delay_s, data))
        except OSError:
            pass
        finally:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                if not delivery.done():
                    await queue.put((0.0, b""))
                    await asyncio.wait_for(delivery, 5.0)
            delivery.cancel()
            target.close()
