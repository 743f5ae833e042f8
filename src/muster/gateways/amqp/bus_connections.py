"""Connections to the bus: one for each identity that has logged in, shared by all its clients.

Who logs in as the same may do the same, so a message that several of them hear comes to the gateway once,
and is made into AMQP once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from muster.bus import api
from muster.gateways.amqp.links import consumers
from muster.message.client import topic_listeners
from muster.trust.login import passwords

#: A connection to the bus as whoever logged in.
Connect = Callable[[passwords.PasswordLogin], Awaitable[api.Bus]]


class SharedConnection:
    """``bus`` and ``ears`` are there once somebody has joined."""

    def __init__(self, login: passwords.PasswordLogin) -> None:
        self.login = login
        self.users = 0
        self.making = asyncio.Lock()
        self.bus: api.Bus
        self.ears: topic_listeners.TopicListeners[consumers.EncodedTopicMessage] | None = None


class SharedConnections:
    """``on_little`` is called when little has come over one, ``on_lost`` when one is closed for good."""

    def __init__(
        self, connect: Connect, on_little: Callable[[], None], on_lost: Callable[[SharedConnection], None]
    ) -> None:
        self._connect = connect
        self._on_little = on_little
        self._on_lost = on_lost
        self._trunks: dict[passwords.PasswordLogin, SharedConnection] = {}

    async def join(self, login: passwords.PasswordLogin) -> SharedConnection:
        """Whoever joins leaves one day."""
        trunk = self._trunks.get(login)
        if trunk is None:
            trunk = self._trunks[login] = SharedConnection(login)
        trunk.users += 1
        try:
            async with trunk.making:
                if trunk.ears is None:
                    bus = trunk.bus = await self._connect(login)
                    trunk.ears = topic_listeners.TopicListeners(
                        bus, consumers.EncodedTopicMessage, consumers.forward_to_links
                    )
                    bus.on_little(self._on_little)
                    bus.on_state(lambda state: self._changed(trunk, state))
        except BaseException:
            await self.leave(trunk)
            raise
        return trunk

    async def leave(self, trunk: SharedConnection) -> None:
        trunk.users -= 1
        if not trunk.users:
            self._drop(trunk)
            if trunk.ears is not None:
                await trunk.bus.close()

    def _drop(self, trunk: SharedConnection) -> None:
        if self._trunks.get(trunk.login) is trunk:
            del self._trunks[trunk.login]

    def _changed(self, trunk: SharedConnection, state: api.ConnectionState) -> None:
        if state is api.ConnectionState.CLOSED and trunk.users:
            self._drop(trunk)
            self._on_lost(trunk)
