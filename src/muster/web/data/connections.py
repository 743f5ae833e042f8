"""The bus connections of the web: its own, and one for each active person.

The web process survives restarts of the domain.  A restarted domain may use other ports, so the link looks up
the location again until it is connected.  Operations of people, and their reads of contexts, use their own
identities, so that every service can authorize and record them.  These connections are few and are closed
when they are idle, but not while an operation uses them: its outcome would be in doubt.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import Protocol

from muster.bus import api
from muster.core import errors
from muster.core.telemetry import log
from muster.trust.permissions import roles

IDENTITY = "web"
RETRY_S = 0.5
PEOPLE_MAX = 256
IDLE_S = 300.0

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
        self._used: collections.Counter[api.Bus] = collections.Counter()  # by operations
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
            unused = [
                who for who, (held, _) in self._people.items() if held is not bus and not self._used[held]
            ]
            for oldest in unused[: max(0, len(self._people) - PEOPLE_MAX)]:
                await _close(self._people.pop(oldest)[0])
        return bus

    @contextlib.contextmanager
    def using(self, bus: api.Bus) -> Iterator[None]:
        """Keep a connection of `as_person` open until an operation has ended."""
        self._used[bus] += 1
        try:
            yield
        finally:
            self._used[bus] -= 1
            if not self._used[bus]:
                del self._used[bus]

    async def _forget_idle(self) -> None:
        for who in list(self._people):
            kept = self._people.get(who)  # now: it may have been used while another one was closed
            if kept and time.monotonic() - kept[1] > IDLE_S and not self._used[kept[0]]:
                del self._people[who]
                await _close(kept[0])

    async def _leave(self, bus: api.Bus) -> None:
        people, self._people = self._people, collections.OrderedDict()
        for connected in (*(connected for connected, _ in people.values()), bus):
            await _close(connected)


async def _close(bus: api.Bus) -> None:
    with contextlib.suppress(errors.MusterError, TimeoutError):
        async with asyncio.timeout(2.0):
            await bus.close()
