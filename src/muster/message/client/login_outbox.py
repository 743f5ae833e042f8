"""The outboxes that all connections of a login share, one for each partition.

Connections with the same login have the same identity and rights. What those of a process send and
acknowledge is stored in common works, so that the cost of a work does not grow with their number: the
clients of a gateway, or the connections of a program. The outboxes are registered with the dispatchers under
a name of their own, which numbers the works. They use the bus connection of one of the connections, and
another one when it is lost or closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Final, TypeAlias

from muster.bus import api
from muster.message.client import outbox, registrant

_Key: TypeAlias = tuple[asyncio.AbstractEventLoop, Hashable]


class LoginOutboxes(registrant.Registrant):
    def __init__(self, bus: api.Bus, key: _Key) -> None:
        super().__init__(bus)
        self._key = key
        self._outboxes: dict[int, outbox.Outbox] = {}
        self._users: dict[api.Bus, int] = {}
        self._end_state_callbacks: dict[api.Bus, Callable[[], None]] = {}

    @property
    def known_partition_count(self) -> int:
        """0: unknown."""
        return self._partition_count

    def outbox(self, partition: int) -> outbox.Outbox:
        shared = self._outboxes.get(partition)
        if shared is None:
            works = outbox.SharedWorks(self.link(partition))
            shared = self._outboxes[partition] = outbox.Outbox(self.spawn, works)
        return shared

    def enter(self, bus: api.Bus) -> None:
        """A connection on this bus connection uses the outboxes, until it calls `leave`."""
        if bus not in self._users:
            self._users[bus] = 0
            self._end_state_callbacks[bus] = bus.on_state(lambda state: self._bus_changed(bus, state))
        self._users[bus] += 1

    async def leave(self, bus: api.Bus) -> None:
        """A connection is closed, perhaps with its bus connection."""
        if bus in self._users:
            self._users[bus] -= 1
            if not self._users[bus]:
                self._forget(bus)
        if not self._users and not self.closed:
            await self.unregister(lost=False)

    def _bus_changed(self, bus: api.Bus, state: api.ConnectionState) -> None:
        if state is api.ConnectionState.CLOSED:
            self._forget(bus)
        else:
            self._move()

    def _forget(self, bus: api.Bus) -> None:
        del self._users[bus]
        self._end_state_callbacks.pop(bus)()
        if self._users:
            self._move()
        else:
            del _by_login[self._key]

    def _move(self) -> None:
        """Use another bus connection if the present one is lost or no longer used. Works without a reply are
        repeated there.
        """
        connected = [bus for bus in self._users if bus.state is api.ConnectionState.CONNECTED]
        if connected and self.bus not in connected:
            self.bus = connected[0]
            for link in self._links.values():
                self.spawn(link.move(self.bus))


_by_login: Final[dict[_Key, LoginOutboxes]] = {}


def join(bus: api.Bus) -> LoginOutboxes:
    """The outboxes for a connection on this bus connection. Every caller has to call `leave` later."""
    key = (asyncio.get_running_loop(), bus.login)
    shared = _by_login.get(key)
    if shared is None:
        shared = _by_login[key] = LoginOutboxes(bus, key)
    shared.enter(bus)
    return shared
