"""Memory budgets of a connection, and of a login over all its connections. Pure.

The number of connections of a login is limited as well (`gateway.AmqpGateway`).

A client can increase four things: its links, the bytes of messages that it has not finished, the messages it
has not settled, and the messages in open transactions. A budget counts each of them at two levels: the budget
of a connection belongs to that of its login, and both must allow an increase.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    links: int
    unfinished_bytes: int
    unsettled_bytes: int
    transaction_bytes: int = 64 << 20


CONNECTION = GatewayLimits(links=4_096, unfinished_bytes=16 << 20, unsettled_bytes=128 << 20)
LOGIN = GatewayLimits(
    links=16_384, unfinished_bytes=64 << 20, unsettled_bytes=256 << 20, transaction_bytes=256 << 20
)


@dataclass(slots=True, eq=False, repr=False)
class ConnectionBudget:
    """``on_room`` is called when enough was settled for deliveries to resume."""

    _limits: GatewayLimits
    _parent: ConnectionBudget | None = None
    links: int = 0
    unfinished_bytes: int = 0
    unsettled_bytes: int = 0
    transaction_bytes: int = 0
    over_limit: bool = False  # too much is unsettled: no deliveries until half of it is settled
    on_room: Callable[[], None] = lambda: None

    @property
    def may_deliver(self) -> bool:
        return not self.over_limit and (self._parent is None or self._parent.may_deliver)

    def add_link(self) -> bool:
        """False: the limit is reached, and the link is not counted."""
        if self.links >= self._limits.links or (self._parent is not None and not self._parent.add_link()):
            return False
        self.links += 1
        return True

    def remove_links(self, count: int) -> None:
        self.links -= count
        if self._parent is not None:
            self._parent.remove_links(count)

    def add_unfinished(self, size: int) -> bool:
        """False: the limit is exceeded; the bytes are counted until they are removed."""
        self.unfinished_bytes += size
        fits = self.unfinished_bytes <= self._limits.unfinished_bytes
        return (self._parent is None or self._parent.add_unfinished(size)) and fits

    def remove_unfinished(self, size: int) -> None:
        self.unfinished_bytes -= size
        if self._parent is not None:
            self._parent.remove_unfinished(size)

    def add_unsettled(self, size: int) -> None:
        self.unsettled_bytes += size
        if self.unsettled_bytes > self._limits.unsettled_bytes:
            self.over_limit = True
        if self._parent is not None:
            self._parent.add_unsettled(size)

    def remove_unsettled(self, size: int) -> None:
        self.unsettled_bytes -= size
        if self._parent is not None:
            self._parent.remove_unsettled(size)
        if self.over_limit and self.unsettled_bytes <= self._limits.unsettled_bytes // 2:
            self.over_limit = False
            self.on_room()

    def add_to_transaction(self, size: int) -> bool:
        """False: the limit would be exceeded, and the bytes are not counted."""
        if self.transaction_bytes + size > self._limits.transaction_bytes:
            return False
        if self._parent is not None and not self._parent.add_to_transaction(size):
            return False
        self.transaction_bytes += size
        return True

    def end_transaction(self, size: int) -> None:
        self.transaction_bytes -= size
        if self._parent is not None:
            self._parent.end_transaction(size)

    def close(self) -> None:
        """Release everything that the closed connection held."""
        self.end_transaction(self.transaction_bytes)
        self.remove_links(self.links)
        self.remove_unfinished(self.unfinished_bytes)
        self.on_room = lambda: None
        self.remove_unsettled(self.unsettled_bytes)
