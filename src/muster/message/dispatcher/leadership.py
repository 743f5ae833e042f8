"""Leadership of the dispatcher: one process of the domain owns the log, the others stand by."""

from __future__ import annotations

import asyncio
from typing import Final

from muster.bus import api, leases
from muster.core import errors
from muster.core.telemetry import log, metrics
from muster.message import protocol, settings
from muster.message.dispatcher import dispatcher, state

events = log.EventLog("message")

RETRY_S: Final = 0.5


class DispatcherLeadership:
    """Acquires the lease of the log, runs the dispatcher while it holds the lease, and starts again."""

    def __init__(
        self,
        bus: api.Bus,
        message_settings: settings.MessageSettings | None = None,
        *,
        max_bytes: int = 1 << 30,
        may: state.May = state.allow_all,
        lease_ttl_s: float = leases.TTL_S,
        replicas: int = 1,
        measure: metrics.Metrics | None = None,
    ) -> None:
        self._bus = bus
        self._settings = message_settings or settings.MessageSettings()
        self._stream = api.StreamSettings(
            protocol.STREAM,
            protocol.LOGS,
            max_bytes=max_bytes,
            max_age_s=0,
            on_full=api.FullPolicy.REFUSE,
            replicas=replicas,
        )
        self._may = may
        self._refused = (measure or metrics.Metrics()).counter(
            "message_refused_connections", "Rejected connections to the dispatcher, by reason.", ("reason",)
        )
        self._lease_ttl_s = lease_ttl_s
        self._replicas = replicas
        self.acting = asyncio.Event()  # set while this process owns the log

    async def run(self) -> None:
        while True:
            try:
                async with await leases.Leases.open(
                    self._bus, ttl_s=self._lease_ttl_s, replicas=self._replicas
                ) as all_leases:
                    while True:
                        async with await all_leases.acquire(protocol.LEASE) as lease:
                            await self._run_dispatcher(lease)
            except errors.Unavailable as error:  # for example brokers without a leader: temporary
                if self._bus.state is api.ConnectionState.CLOSED:
                    raise
                events.warning("dispatcher-waiting", error=error)
            await asyncio.sleep(RETRY_S)

    async def _run_dispatcher(self, lease: leases.Lease) -> None:
        stream = await self._bus.stream(self._stream)
        acting = asyncio.ensure_future(
            dispatcher.Dispatcher(
                self._bus,
                stream,
                lease.epoch,
                self._settings,
                self._may,
                self._stream.max_bytes,
                on_refused=lambda reason: self._refused.add(reason=reason),
            ).run()
        )
        lost = asyncio.ensure_future(lease.lost.wait())
        self.acting.set()
        try:
            await asyncio.wait((acting, lost), return_when=asyncio.FIRST_COMPLETED)
            if acting.done():
                acting.result()
        except errors.MusterError as error:  # after any error, the next dispatcher reads the log again
            events.warning("dispatcher-interrupted", epoch=lease.epoch, error=error)
            if not isinstance(error, errors.Unavailable | errors.Conflict):
                await asyncio.sleep(RETRY_S)
        finally:
            self.acting.clear()
            for task in (acting, lost):
                task.cancel()
            await asyncio.gather(acting, lost, return_exceptions=True)
