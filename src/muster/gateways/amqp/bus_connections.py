"""Bus connections: one for each login, shared by all its clients.

Clients with the same login have the same permissions, so a message for several of them is received and
converted to AMQP once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from muster.bus import api
from muster.gateways.amqp.links import topics
from muster.message.client import topic_listeners
from muster.trust.login import passwords

#: Opens a bus connection with the permissions of a login.
Connect = Callable[[passwords.PasswordLogin], Awaitable[api.Bus]]


class SharedConnection:
    """``bus`` and ``listeners`` are set once a client has joined."""

    def __init__(self, login: passwords.PasswordLogin) -> None:
        self.login = login
        self.users = 0
        self.connecting = asyncio.Lock()
        self.bus: api.Bus
        self.listeners: topic_listeners.TopicListeners[topics.EncodedTopicMessage] | None = None


class SharedConnections:
    """``on_little`` is called when little data has arrived on one, ``on_lost`` when one was closed."""

    def __init__(
        self, connect: Connect, on_little: Callable[[], None], on_lost: Callable[[SharedConnection], None]
    ) -> None:
        self._connect = connect
        self._on_little = on_little
        self._on_lost = on_lost
        self._by_login: dict[passwords.PasswordLogin, SharedConnection] = {}

    async def join(self, login: passwords.PasswordLogin) -> SharedConnection:
        """Every caller has to call `leave` later."""
        shared_connection = self._by_login.get(login)
        if shared_connection is None:
            shared_connection = self._by_login[login] = SharedConnection(login)
        shared_connection.users += 1
        try:
            async with shared_connection.connecting:
                if shared_connection.listeners is None:
                    bus = shared_connection.bus = await self._connect(login)
                    shared_connection.listeners = topic_listeners.TopicListeners(
                        bus, topics.EncodedTopicMessage, topics.forward_to_links
                    )
                    bus.on_little(self._on_little)
                    bus.on_state(lambda state: self._changed(shared_connection, state))
        except BaseException:
            await self.leave(shared_connection)
            raise
        return shared_connection

    async def leave(self, shared_connection: SharedConnection) -> None:
        shared_connection.users -= 1
        if not shared_connection.users:
            self._drop(shared_connection)
            if shared_connection.listeners is not None:
                await shared_connection.bus.close()

    def _drop(self, shared_connection: SharedConnection) -> None:
        if self._by_login.get(shared_connection.login) is shared_connection:
            del self._by_login[shared_connection.login]

    def _changed(self, shared_connection: SharedConnection, state: api.ConnectionState) -> None:
        if state is api.ConnectionState.CLOSED and shared_connection.users:
            self._drop(shared_connection)
            self._on_lost(shared_connection)
