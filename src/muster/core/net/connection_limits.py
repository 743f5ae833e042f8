"""The connections that a server holds, counted in all and for each client address.

A single client can then not use all connections of a server. An IPv6 client is counted by its network, since
it has all addresses of it. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from muster.core.net import hosts


class ConnectionLimits:
    """``of_address_max``: None behind a proxy, where all connections have the proxy's address."""

    def __init__(self, connections_max: int, of_address_max: int | None) -> None:
        self._max = connections_max
        self._of_address_max = of_address_max
        self._open: dict[Hashable, str] = {}
        self._of_address: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()  # by the limit that was reached: "connections", "address"

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Hashable, address: str) -> bool:
        """Whether the server may accept it; if so, `discard` it when it ends."""
        client = hosts.network(address)
        if len(self._open) >= self._max:
            self.refused["connections"] += 1
            return False
        if self._of_address_max is not None and self._of_address[client] >= self._of_address_max:
            self.refused["address"] += 1
            return False
        self._open[connection] = client
        self._of_address[client] += 1
        return True

    def discard(self, connection: Hashable) -> None:
        client = self._open.pop(connection, None)
        if client is not None:
            self._of_address[client] -= 1
            if not self._of_address[client]:
                del self._of_address[client]
