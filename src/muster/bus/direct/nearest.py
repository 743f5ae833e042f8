"""Direct connections to a service any of whose processes serves a client.

A client that sends many requests asks over the bus for the address of a process (`listener.OPERATION`): only
processes of the service may answer. It keeps a link to that process, and asks again when the link ends. All
users of one connection to the brokers share the link.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable

import msgspec

from muster.bus import api
from muster.bus.client import credential_source
from muster.bus.direct import bus as direct_bus
from muster.bus.direct import dialer, frames, link, listener
from muster.bus.rpc import client
from muster.core import errors, subjects
from muster.supervision import tasks

REQUESTS_MIN = 16  # a program that sends fewer needs no link
ASK_TIMEOUT_S = 5.0
PAUSE_S, PAUSE_S_MAX = 0.5, 60.0


class NearestBus(direct_bus.DirectBus):
    """A bus with a link to a process of ``part``, after some requests. It ends with the connection to the
    brokers."""

    def __init__(
        self, bus: api.Bus, part: str, peer_of: Callable[[str], str], access: credential_source.PeerAccess
    ) -> None:
        super().__init__(bus, bus.identity, peer_of)
        self._connected = bus
        self._part = part
        self._requests = 0
        self._dialer = dialer.DirectDialer(self, access)
        self._tasks = tasks.TaskSupervisor(f"link of {bus.identity} to {part}")
        bus.on_state(self._state_changed)

    def _state_changed(self, state: api.ConnectionState) -> None:
        if state is api.ConnectionState.CLOSED:
            self._tasks.cancel()
            _of.pop(self._connected, None)

    def _link_for(self, subject: str) -> link.DirectLink | None:
        if not self.links and self.state is not api.ConnectionState.CLOSED:
            self._requests += 1
            if self._requests == REQUESTS_MIN:
                self._tasks.loop("link", self._link_always)
        return super()._link_for(subject)

    async def _link_always(self) -> None:
        subject = subjects.from_identity(self._part, self.identity, listener.OPERATION)
        pause_s = PAUSE_S
        while True:
            try:
                answer = await client.call(self._connected, subject, timeout_s=ASK_TIMEOUT_S, waits=False)
                peer = msgspec.convert(answer, frames.PeerAddress)
                await self._dialer.use(peer)
                pause_s = PAUSE_S
            except (errors.MusterError, msgspec.ValidationError):  # none, or an address that does not work
                pause_s = min(PAUSE_S_MAX, 2 * pause_s)
            await asyncio.sleep(pause_s * (0.5 + random.random() / 2))


_of: dict[api.Bus, dict[str, NearestBus]] = {}  # of those that are not closed


def of(bus: api.Bus, part: str, peer_of: Callable[[str], str]) -> api.Bus:
    """``bus`` with direct connections to the service, where it may have them."""
    access: credential_source.PeerAccess | None = getattr(bus, "peer_access", None)
    if access is None or bus.state is api.ConnectionState.CLOSED:
        return bus
    of_bus = _of.setdefault(bus, {})
    made = of_bus.get(part)
    if made is None:
        made = of_bus[part] = NearestBus(bus, part, functools.lru_cache(1024)(peer_of), access)
    return made.as_bus()
