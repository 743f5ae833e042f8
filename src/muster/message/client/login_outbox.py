"""The outboxes that all connections of a login share, one for each partition.

Connections that share a bus connection have the same identity and rights. What they send and acknowledge is
stored in common works, so that the cost of a work does not grow with the number of connections: those of the
clients of a gateway, or of a program. The outboxes are registered with the dispatchers under a name of their
own, which numbers the works.
"""

from __future__ import annotations

from muster.bus import api
from muster.message.client import outbox, registrant


class LoginOutboxes(registrant.Registrant):
    def __init__(self, bus: api.Bus) -> None:
        super().__init__(bus)
        self.users = 0
        self._outboxes: dict[int, outbox.Outbox] = {}

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

    async def leave(self) -> None:
        """A connection is closed; with the last one, the outboxes end."""
        self.users -= 1
        if not self.users:
            del _by_bus[self.bus]
            await self.unregister(lost=False)


_by_bus: dict[api.Bus, LoginOutboxes] = {}


def join(bus: api.Bus) -> LoginOutboxes:
    """The outboxes for a connection on this bus connection. Every caller has to call `leave` later."""
    shared = _by_bus.get(bus)
    if shared is None:
        shared = _by_bus[bus] = LoginOutboxes(bus)
    shared.users += 1
    return shared
