"""A manager's renewal with the acting registry: membership and assignments.

The manager may act while its renewal is valid. Validity counts from the time of the request, while the
registry counts from its reply, so the manager always stops first.

A reply from an earlier term is rejected while the renewal of the later term is valid. After that it is
accepted: a registry restored from a backup counts its terms from an older value, and agents reject superseded
managers anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable

from muster.bus import api
from muster.bus.rpc import client
from muster.core import errors, messages
from muster.manage import protocol

FIRST_TTL_S = 6.0
REPEAT_S = 0.5  # without a reply: another registry may act by then


class ManagerRenewal:
    """``apply`` receives what the registry grants, page by page."""

    def __init__(self, bus: api.Bus, manager: str, apply: Callable[[protocol.RenewResult], None]) -> None:
        self.boot = secrets.randbits(48)
        self.valid_until = 0.0  # by the loop's clock
        self.leaving = False  # it accepts no more resources and releases its own
        self._bus = bus
        self._manager = manager
        self._apply = apply
        self._term = 0
        self._session = 0
        self._revision = 0
        self._ttl_s = FIRST_TTL_S
        self._wake = asyncio.Event()

    @property
    def is_valid(self) -> bool:
        connected = self._bus.state is api.ConnectionState.CONNECTED
        return connected and asyncio.get_running_loop().time() < self.valid_until

    def renew_soon(self) -> None:
        """Renew now, because something changed."""
        self._wake.set()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            try:
                again = await self.renew(timeout_s=self._ttl_s / 3)
            except errors.MusterError:
                await asyncio.sleep(min(0.5, self._ttl_s / 10))
                continue
            if again:
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ttl_s / 3):
                    await self._wake.wait()

    async def renew(self, *, timeout_s: float) -> bool:
        """Renew once. Returns whether there is another page to request."""
        connection = self._bus.connection
        request = protocol.RenewRequest(
            boot=self.boot,
            term=self._term,
            session=self._session,
            revision=self._revision,
            broker=connection.broker if connection else "",
            connection=connection.number if connection else 0,
            leaving=self.leaving,
        )
        requested_at = asyncio.get_running_loop().time()
        message = await client.exchange_repeated(
            self._bus,
            protocol.renew(self._manager),
            messages.encode(request),
            timeout_s=timeout_s,
            repeat=api.Repetition(REPEAT_S),
        )
        granted = messages.decode(message.data, protocol.RenewResult, max_bytes=64 << 20)
        if granted.term < self._term and asyncio.get_running_loop().time() < self.valid_until:
            raise errors.StaleEpoch(
                "a registry of an earlier term replied", epoch=granted.term, current=self._term
            )
        self._ttl_s = granted.ttl_s
        self.valid_until = max(self.valid_until, requested_at + granted.ttl_s)
        self._apply(granted)
        self._term, self._session, self._revision = granted.term, granted.session, granted.revision
        return granted.more
