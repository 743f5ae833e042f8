"""The bus connections of the web: its own, and one for each active person.

The web process survives restarts of the domain.  A restarted domain may use other ports, so the link looks up
the location again until it is connected.  Operations of people, and their reads of contexts, use their own
identities, so that every service can authorize and record them.  These connections are few and are closed
when they are idle.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Protocol

from muster.bus import api
from muster.core import errors
from muster.core.telemetry import log
from muster.trust.permissions import roles

IDENTITY = "web"
RETRY_S = 0.5
PEOPLE_MAX = 256
IDLE_S = 900.0  # longer than the longest operation, which would otherwise lose its connection

events = log.EventLog("web")


class DomainLocation(Protocol):
    """The location of the domain; `muster.app` provides one."""

    async def connect(self, identity: str, role: roles.Role) -> api.Bus: ...
    async def place(self) -> Hashable:
        """The current location. It changes when the domain restarts; None if it does not run."""
        ...


Setup = Callable[[api.Bus], Awaitable[None]]


class BusConnections:
    def __init__(self, location: DomainLocation, *, on_connected: Setup, on_lost: Callable[[], None]) -> None:
        self._location = location
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._bus: api.Bus | None = None
        self._people: collections.OrderedDict[tuple[str, roles.Role], tuple[api.Bus, float]] = (
            collections.OrderedDict()
        )
        self._joining = asyncio.Lock()
        self.reason = "connecting to the domain"

    @property
    def is_up(self) -> bool:
        return self._bus is not None and self._bus.state is api.ConnectionState.CONNECTED

    @property
    def bus(self) -> api.Bus:
        if self._bus is None or not self.is_up:
            raise errors.NotConnected(
                f"the domain is not available: {self.reason}",
                retry_after_s=2.0,
                hint="start it with `muster up`; this page reconnects automatically",
            )
        return self._bus

    async def run(self) -> None:
        """Keep the connection open until cancelled."""
        while True:
            try:
                place = await self._location.place()
                bus = await self._location.connect(IDENTITY, roles.Role.WEB)
            except (errors.MusterError, OSError) as error:
                self.reason = str(error) or type(error).__name__
                await asyncio.sleep(RETRY_S)
                continue
            try:
                self._bus = bus
                await self._on_connected(bus)
                events.info("connected", broker=bus.broker)
                await self._while_there(bus, place)
            except errors.MusterError as error:
                self.reason = error.message
                events.warning("not-connected", error=error)
                await asyncio.sleep(RETRY_S)
            finally:
                self._bus = None
                self._on_lost()
                await self._leave(bus)

    async def _while_there(self, bus: api.Bus, place: Hashable) -> None:
        while bus.state is not api.ConnectionState.CLOSED:
            await asyncio.sleep(RETRY_S)
            if bus.state is not api.ConnectionState.CONNECTED:
                self.reason = "the connection was lost; reconnecting"
                if await self._location.place() != place:
                    return
            await self._forget_idle()

    async def as_person(self, name: str, role: roles.Role) -> api.Bus:
        """A connection with the person's own identity."""
        _ = self.bus  # raises if the domain is not available
        async with self._joining:
            kept = self._people.pop((name, role), None)
            bus = kept[0] if kept else None
            if bus is None or bus.state is api.ConnectionState.CLOSED:
                bus = await self._location.connect(name, role)
            self._people[name, role] = (bus, time.monotonic())
            while len(self._people) > PEOPLE_MAX:
                _, (oldest, _) = self._people.popitem(last=False)
                await _close(oldest)
        return bus

    async def _forget_idle(self) -> None:
        for who, (bus, used_s) in list(self._people.items()):
            if time.monotonic() - used_s > IDLE_S:
                del self._people[who]
                await _close(bus)

    async def _leave(self, bus: api.Bus) -> None:
        people, self._people = self._people, collections.OrderedDict()
        for connected in (*(connected for connected, _ in people.values()), bus):
            await _close(connected)


async def _close(bus: api.Bus) -> None:
    with contextlib.suppress(errors.MusterError, TimeoutError):
        async with asyncio.timeout(2.0):
            await bus.close()
