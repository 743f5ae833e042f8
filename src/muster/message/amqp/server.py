"""The gateway: listens, and gives each connection a bridge of its own.

A message may be heard by many bridges: what the first of them has to say goes out while the next makes its
own, so that clients read while the others' is made.  What else comes in the same turn of the loop goes out at
its end, one write for each connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine
from typing import Any, Self

from muster.message import desk
from muster.message.amqp import bridge, sasl, trunks


class Gateway:
    """``anonymous``: the identity of those who log in without a name; None: they may not.

    ``may`` says which topics an identity may send to: the broker refuses what it must not, but tells no one.
    Who is silent for ``idle_s`` is taken for gone.  ``quiet`` connects without hearing oneself, for clients
    that do not want what they say themselves: then no copy of it travels to be dropped.
    """

    def __init__(
        self,
        connect: trunks.Connect,
        verifiers: sasl.Verifiers | None,
        *,
        anonymous: str | None = None,
        name: str = "muster",
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        may: desk.May = desk.anything,
        idle_s: float = 30.0,
        quiet: trunks.Connect | None = None,
    ) -> None:
        self.connect = connect
        self.trunks = trunks.Trunks(connect, self._flush_due, self._lost)
        self.quiet = quiet
        self.verifiers = verifiers
        self.anonymous = anonymous
        self.may = may
        self.idle_s = idle_s
        self.name = name
        self.host = host
        self.port = port
        self.bridges: set[bridge.Bridge] = set()
        self._due: list[bridge.Bridge] = []  # those who have something to say
        self._flushed: set[bridge.Bridge] = set()  # in this turn of the loop
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def flush_soon(self, one: bridge.Bridge) -> None:
        """When another has something to say; from the second time on at the end of this turn of the loop."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush_due)
        elif (last := self._due[-1]) not in self._flushed:
            self._flushed.add(last)
            last.flush_due()
        self._due.append(one)

    def _flush_due(self) -> None:
        due, self._due = self._due, []
        self._flushed.clear()
        for one in due:
            one.flush_due()

    def _lost(self, trunk: trunks.Trunk) -> None:
        """Its clients have to log in again."""
        for one in list(self.bridges):
            if one.trunk is trunk:
                one.connection_aborted()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: bridge.Bridge(self), self.host, self.port, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for one in list(self.bridges):
            await one.end(lost=True)
            one.connection_aborted()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
