"""Has the brokers of machines that joined share the storage, one after the other, on the machine that signs
accounts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from muster.app import certificates
from muster.app.components import component
from muster.app.components import context as context_
from muster.app.machines import membership
from muster.bus.brokers import storage
from muster.core import errors, health

PERIOD_S = 0.5
GROUP_S = 5.0  # between two looks at the storage, when nothing is to be done


class SharedStorage(Protocol):
    async def storage_group(self) -> storage.StorageGroup: ...
    async def strike(self, name: str) -> None: ...


class StorageGrowth:
    name = "machines"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(
        self,
        shared: SharedStorage,
        changed: Callable[[membership.MachineList], Awaitable[None]],
        grown: Callable[[], Awaitable[None]],
    ) -> None:
        """``changed`` is called with a list that differs, ``grown`` when streams can have more replicas."""
        self.replicas = 1  # that each stream can have
        self._shared = shared
        self._changed = changed
        self._grown = grown
        self._known: membership.MachineList | None = None
        self._look_at_s = 0.0
        self._behind: set[str] = set()  # brokers, seen so twice
        self._late: set[str] = set()
        self._context: context_.ComponentContext

    async def start(self, context: context_.ComponentContext) -> None:
        self._context = context
        context.tasks.loop("growth", self._grow)

    async def stop(self) -> None:
        """The domain ends the task."""

    def health(self) -> component.ComponentHealth:
        if self._known is None or len(self._known.machines) == 1:
            return component.ComponentHealth()
        facts = {"machines": self._known.machines}
        if self._behind:
            reason = f"replicas of streams are not current on {', '.join(sorted(self._behind))}"
            return component.ComponentHealth(health.HealthState.LATE, reason, facts)
        return component.ComponentHealth(reason=self._known.unreplicated(), facts=facts)

    async def _grow(self) -> None:
        while True:
            try:
                await self.step(asyncio.get_running_loop().time())
            except errors.Unavailable as error:  # an election, for example
                self._context.log.info("storage-unknown", error=error)
            await asyncio.sleep(PERIOD_S)

    async def step(self, now_s: float) -> None:
        folder = self._context.settings.domain.folder
        machines = await asyncio.to_thread(membership.load, folder)
        if machines is None:
            return
        if machines != self._known:
            await self._changed(machines)
            self._known, self._look_at_s = machines, now_s
        waits = len(machines.brokers) >= membership.REPLICAS and machines.storing != machines.brokers
        if now_s < self._look_at_s and not waits:
            return
        self._look_at_s = now_s + GROUP_S
        pin = await asyncio.to_thread(certificates.pin, self._context.settings)
        if pin not in machines.here.pins[:1]:
            await asyncio.to_thread(
                membership.update, folder, lambda known: known.with_pin(machines.own, pin)
            )
        group = await self._shared.storage_group()
        behind = {name for budget in await self._context.bus.budgets() for name in budget.behind}
        behind |= group.members - group.current
        self._behind, self._late = behind & self._late, behind  # under load, one may be late for a moment
        for name in machines.lost(group.members):
            await self._shared.strike(name)
            self._context.log.info("broker-struck", broker=name)
        if len(group.current) >= membership.REPLICAS > self.replicas:
            self.replicas = membership.REPLICAS
            await self._grown()
        following = machines.next_to_store(group.current)
        if following is not None and group.current == group.members:
            await asyncio.to_thread(membership.update, folder, lambda known: known.with_storing(following))
            self._context.log.info("broker-stores", broker=following.broker)
