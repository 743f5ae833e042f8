"""The right to be the driver: one process has it, standbys wait for it.

The lease (`muster.bus.leases`) selects the driver.  A lease alone cannot stop a process that was paused and
wakes up later, so each effect of a driver is fenced by its *epoch*, which grows with every driver:

- Spark's checkpoint and the alert state: each driver writes files of its own (`driver_terms`,
  `commit_state`), which its successor reads only before its own first batch;
- the history: the epoch is part of each commit, and a table refuses a lower one (`history.delta`);
- reports and alerts on the bus: each publication names the last sequence of its stream, and a new driver
  advances it first (`fenced_stream`);
- notifications, answers to requests, ticks and maintenance of the history: the lease is checked before each.
  A process that is paused between the check and the effect may still execute the last one.

The epoch is claimed in the history (`HistoryTable.claim`), so that two processes never have the same one,
even if the brokers lost their storage.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from muster.bus import api, leases
from muster.core import errors
from muster.core.telemetry import log
from muster.pipeline import protocol
from muster.supervision import tasks

ANNOUNCE_S = 2.0
STARTING = " (starting)"  # a standby whose Spark is not ready


class DriverAuthority(Protocol):
    """Permission to act as the driver."""

    @property
    def epoch(self) -> int: ...

    def check(self) -> None:
        """Raises `errors.StaleEpoch` or `errors.Unavailable` unless the lease is held now."""

    async def confirm(self) -> None:
        """The same, by the record that the brokers store."""


class DriverLease:
    """Acquires the lease of the driver, keeps it, and knows the standbys."""

    def __init__(self, bus: api.Bus, all_leases: leases.Leases) -> None:
        self.process = f"{socket.gethostname()}:{os.getpid()}"
        self.standbys: tuple[str, ...] = ()
        self.epoch = 0  # of the term; set when it begins
        self.superseded = asyncio.Event()
        self.prepared = False  # whether this process, a standby, could begin at once
        self._was_standby = False
        self._name = protocol.driver_lease(bus.identity)
        self._leases = all_leases
        self._lease: leases.Lease | None = None
        self._log = log.EventLog("pipeline", pipeline=bus.identity, process=self.process)
        self._tasks = tasks.TaskSupervisor(f"driver lease of {bus.identity}")

    @property
    def lease_epoch(self) -> int:
        return self._lease.epoch if self._lease is not None else 0

    async def try_acquire(self) -> bool:
        """Whether this process is the driver now."""
        self._lease = await self._leases.try_acquire(self._name)
        return self._lease is not None

    async def acquire(self) -> None:
        """Wait until this process is the driver; meanwhile it is a standby."""
        self._log.info("standby")
        self._was_standby = True
        announcing = self._tasks.loop("announce", self._announce)
        try:
            self._lease = await self._leases.acquire(self._name)
        finally:
            announcing.cancel()

    def keep(self, is_current: Callable[[], Awaitable[bool]]) -> None:
        """Keep the lease until `close`. ``is_current``: whether no later driver has begun, by the storage."""
        self._tasks.loop("keep", lambda: self._keep(is_current))
        self._tasks.loop("standbys", self._list_standbys)

    async def close(self) -> None:
        await self._tasks.close()
        if self._lease is not None:
            await self._lease.release()

    # Authority

    def check(self) -> None:
        if self.superseded.is_set():
            raise self._stale()
        if self._lease is None or not self._lease.held:
            raise errors.Unavailable("the lease of the driver is not confirmed by the brokers now")

    async def confirm(self) -> None:
        self.check()
        holder = await self._leases.holder(self._name)
        if holder is None or self._lease is None or holder[1] != self._lease.epoch:
            raise self._stale()

    def _stale(self) -> errors.StaleEpoch:
        return errors.StaleEpoch(
            "another process is the driver of the pipeline", epoch=self.epoch, current=self.epoch + 1
        )

    async def _keep(self, is_current: Callable[[], Awaitable[bool]]) -> None:
        """Acquire a lost lease again, unless there is another driver."""
        while True:
            assert self._lease is not None
            await self._lease.lost.wait()
            self._log.warning("lease-lost", reason=self._lease.lost_because)
            lease: leases.Lease | None = None
            try:
                lease = await self._leases.try_acquire(self._name)
                if lease is None or not await is_current():
                    self.superseded.set()
                    return
                self._lease = lease
            except BaseException as error:
                if lease is not None:  # otherwise the next attempt would take it for that of another driver
                    await lease.release()
                if not isinstance(error, errors.Unavailable):
                    raise  # the supervisor logs it and starts this again
                await asyncio.sleep(1.0)

    # Standbys

    async def _announce(self) -> None:
        key = f"{self._name}.standby.{secrets.token_hex(8)}"
        while True:
            with contextlib.suppress(errors.Unavailable):
                await self._leases.announce(key, f"{self.process}{'' if self.prepared else STARTING}")
            await asyncio.sleep(ANNOUNCE_S)

    async def _list_standbys(self) -> None:
        while True:
            with contextlib.suppress(errors.Unavailable):
                listed = await self._leases.announced(f"{self._name}.standby.>")
                if self._was_standby:  # what this process announced expires some seconds later
                    listed = [text for text in listed if text.removesuffix(STARTING) != self.process]
                self.standbys = tuple(sorted(listed))
            await asyncio.sleep(ANNOUNCE_S)
