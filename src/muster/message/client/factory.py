"""How a program connects: from the addresses of brokers or locators to a JMS connection."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from muster import connection as muster_connection
from muster.bus import api as bus_api
from muster.message.client import api

_LOCATOR: Final = ("http://", "https://")


class ConnectionFactory:
    """Creates connections to ``servers``, or to the server that a ``locator`` selects; see `muster.connect`.

    An address among ``servers`` that begins with ``http`` is the address of a locator.
    """

    def __init__(
        self,
        servers: str | Iterable[str] | None = None,
        *,
        locator: str | Iterable[str] | None = None,
        **options: Any,
    ) -> None:
        addresses = [servers] if isinstance(servers, str) else list(servers or ())
        locators = [locator] if isinstance(locator, str) else list(locator or ())
        self._locators = locators + [address for address in addresses if address.startswith(_LOCATOR)]
        self._servers = [address for address in addresses if not address.startswith(_LOCATOR)]
        self._options = options

    async def connect(self, *, client_id: str | None = None) -> api.Connection:
        return api.Connection(
            await self._connect_bus(),
            client_id=client_id,
            owns_bus=True,
            connect_without_echo=lambda: self._connect_bus(echo=False),
        )

    async def _connect_bus(self, *, echo: bool = True) -> bus_api.Bus:
        return await muster_connection.connect(
            self._servers, locator=self._locators or None, echo=echo, **self._options
        )

    async def context(
        self, mode: api.AcknowledgeMode = api.AcknowledgeMode.AUTO, *, client_id: str | None = None
    ) -> api.JmsContext:
        """A connection with one session; see `api.JmsContext`."""
        return api.JmsContext(await self.connect(client_id=client_id), mode, owns_connection=True)
