"""The gateway: listens, and gives each connection a bridge of its own.

Bridges take turns: in one a bridge gives its listeners a few of the messages that they have to hear, and
writes what it has to say.  Who has more then waits for another turn, of which there is one in each turn of
the loop.  So clients read while the next bridge makes its own, and a connection with few listeners does not
wait until one with many has all.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Coroutine
from typing import Any, Self

from muster.message import desk
from muster.message.amqp import bridge, budget, lulls, sasl, trunks


class Gateway:
    """``anonymous``: the identity of those who log in without a name; None: they may not.

    ``may`` says which topics an identity may send to: the broker refuses what it must not, but tells no one.
    Who is silent for ``idle_s`` is taken for gone.  ``quiet`` connects without hearing oneself, for clients
    that do not want what they say themselves: then no copy of it travels to be dropped.  ``share_port``:
    others that say so too may listen on the same port, and each client comes to one of them.
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
        share_port: bool = False,
        tls: ssl.SSLContext | None = None,
        may: desk.May = desk.anything,
        idle_s: float = 30.0,
        quiet: trunks.Connect | None = None,
        connection_limits: budget.Limits = budget.CONNECTION,
        login_limits: budget.Limits = budget.LOGIN,
    ) -> None:
        self.connect = connect
        self.trunks = trunks.Trunks(connect, self._turns, self._lost)
        self.quiet = quiet
        self.verifiers = verifiers
        self.anonymous = anonymous
        self.may = may
        self.idle_s = idle_s
        self.name = name
        self.host = host
        self.port = port
        self._share_port = share_port
        self.bridges: set[bridge.Bridge] = set()
        self._due: list[bridge.Bridge] = []  # those who have something to say,
        self._behind: deque[bridge.Bridge] = deque()  # and who had their turn, and have more
        self._turning = False  # they are called soon
        self.lulls = lulls.Lulls()
        self._connection_limits = connection_limits
        self._login_limits = login_limits
        self._budgets: dict[str, tuple[budget.Budget, set[budget.Budget]]] = {}  # by login
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def budget_of(self, login: str) -> budget.Budget:
        """For one more connection of this login."""
        if login not in self._budgets:
            self._budgets[login] = (budget.Budget(self._login_limits), set())
        shared, parts = self._budgets[login]

        def on_eased() -> None:
            for part in list(parts):
                part.on_eased()

        shared.on_eased = on_eased
        made = budget.Budget(self._connection_limits, shared)
        parts.add(made)
        return made

    def return_budget(self, login: str, part: budget.Budget) -> None:
        """Its connection is gone."""
        part.close()
        _, parts = self._budgets[login]
        parts.discard(part)
        if not parts:
            del self._budgets[login]

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def flush_soon(self, one: bridge.Bridge) -> None:
        self._due.append(one)
        self._turns_soon()

    def _turns_soon(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turns_came)

    def _turns_came(self) -> None:
        self._turning = False
        self._turns()
        if self._behind:
            one = self._behind.popleft()
            if one.take_turn():
                self._behind.append(one)
            self._turns_soon()

    def _turns(self) -> None:
        due, self._due = self._due, []
        self._behind += [one for one in due if one.take_turn()]
        if self._behind:
            self._turns_soon()

    def _lost(self, trunk: trunks.Trunk) -> None:
        """Its clients have to log in again."""
        for one in list(self.bridges):
            if one.trunk is trunk:
                one.connection_aborted()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: bridge.Bridge(self),
            self.host,
            self.port,
            ssl=self._tls,
            reuse_port=self._share_port or None,
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
