"""The gateway: listens, and gives each connection a bridge of its own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self

from muster.bus import api
from muster.message import desk
from muster.message.amqp import bridge, sasl
from muster.trust import passwords

#: A connection to the bus as whoever logged in.
Connect = Callable[[passwords.Login], Awaitable[api.Bus]]


class Gateway:
    """``anonymous``: the identity of those who log in without a name; None: they may not.

    ``may`` says which topics an identity may send to: the broker refuses what it must not, but tells no one.
    Who is silent for ``idle_s`` is taken for gone.  ``quiet`` connects without hearing oneself, for clients
    that do not want what they say themselves: then no copy of it travels to be dropped.
    """

    def __init__(
        self,
        connect: Connect,
        verifiers: sasl.Verifiers | None,
        *,
        anonymous: str | None = None,
        name: str = "muster",
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        may: desk.May = desk.anything,
        idle_s: float = 30.0,
        quiet: Connect | None = None,
    ) -> None:
        self.connect = connect
        self.quiet = quiet
        self.verifiers = verifiers
        self.anonymous = anonymous
        self.may = may
        self.idle_s = idle_s
        self.name = name
        self.host = host
        self.port = port
        self.bridges: set[bridge.Bridge] = set()
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
