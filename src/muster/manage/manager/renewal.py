"""A manager's renewal with the acting registry: that it lives, and what is assigned to it.

It may act while its renewal holds.  That is counted from when it was asked for, so that the registry, which
counts from when it answered, never counts less.

An answer of an earlier term is refused while the renewal of the later one holds.  Afterwards it is accepted:
a registry that was restored from a backup counts its terms anew, and whoever is superseded is refused by
agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable

from muster.bus import api
from muster.core import errors, messages
from muster.core.telemetry import log
from muster.manage import protocol

events = log.EventLog("manage")

FIRST_TTL_S = 15.0


class ManagerRenewal:
    """``take`` is given what the registry grants, page by page."""

    def __init__(self, bus: api.Bus, manager: str, take: Callable[[protocol.RenewResult], None]) -> None:
        self.boot = secrets.randbits(48)
        self.held_until = 0.0  # of the loop's clock
        self.failed = 0  # renewals, for an internal error
        self.leaving = False  # it takes nothing more, and hands back what it has
        self._bus = bus
        self._manager = manager
        self._take = take
        self._term = 0
        self._session = 0
        self._revision = 0
        self._ttl_s = FIRST_TTL_S
        self._poked = asyncio.Event()

    @property
    def holds(self) -> bool:
        connected = self._bus.state is api.ConnectionState.CONNECTED
        return connected and asyncio.get_running_loop().time() < self.held_until

    def soon(self) -> None:
        """Something changed: ask now."""
        self._poked.set()

    async def run(self) -> None:
        while True:
            self._poked.clear()
            try:
                again = await self.ask(timeout_s=self._ttl_s / 3)
            except Exception as error:  # noqa: BLE001  (without renewals all that it manages is lost)
                if not isinstance(error, errors.MusterError):
                    self.failed += 1
                    events.error("renewal-failed", manager=self._manager, failed=self.failed, error=error)
                await asyncio.sleep(min(0.5, self._ttl_s / 10))
                continue
            if again:
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ttl_s / 3):
                    await self._poked.wait()

    async def ask(self, *, timeout_s: float) -> bool:
        """Whether there is another page to ask for."""
        connection = self._bus.connection
        said = protocol.RenewRequest(
            boot=self.boot,
            term=self._term,
            session=self._session,
            revision=self._revision,
            broker=connection.broker if connection else "",
            connection=connection.number if connection else 0,
            leaving=self.leaving,
        )
        asked_at = asyncio.get_running_loop().time()
        message = await self._bus.request(
            protocol.renew(self._manager), messages.encode(said), timeout_s=timeout_s
        )
        granted = messages.decode(message.data, protocol.RenewResult, max_bytes=64 << 20)
        if granted.term < self._term and asyncio.get_running_loop().time() < self.held_until:
            raise errors.StaleEpoch("an earlier registry answered", epoch=granted.term, current=self._term)
        self._ttl_s = granted.ttl_s
        self.held_until = max(self.held_until, asked_at + granted.ttl_s)
        self._take(granted)
        self._term, self._session, self._revision = granted.term, granted.session, granted.revision
        return granted.more
