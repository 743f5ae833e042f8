"""The notifier as a component of a domain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from muster.app.components import component
from muster.app.components import context as context_
from muster.bus import api
from muster.core import health
from muster.notify import settings as settings_
from muster.notify.notifier import notifier
from muster.trust.permissions import roles

IDENTITY = "notifier"
SERVING_TIMEOUT_S = 5.0  # after this, another notifier holds some of the shards


class NotifierComponent:
    """Serves the domain's receivers, or its share of them if there are more notifiers."""

    name = "notify"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, settings: settings_.NotifySettings, suffix: str = "", *, identity: str = "") -> None:
        """``suffix`` distinguishes its default name from that of other machines: notifiers with the same name
        do not forward events to each other."""
        self._settings = settings
        self._identity = identity or f"{IDENTITY}{suffix}"
        self._bus: api.Bus | None = None
        self._notifier: notifier.Notifier | None = None

    async def start(self, context: context_.ComponentContext) -> None:
        self._storage_problem = context.storage_problem
        retention = context.settings.retention
        settings = msgspec.structs.replace(
            self._settings, stream_bytes=min(self._settings.stream_bytes, retention.events.max_bytes)
        )
        self._bus = await context.connect(self._identity, roles.Role.NOTIFIER)
        self._notifier = notifier.Notifier(
            self._bus,
            settings,
            root=await asyncio.to_thread(context.trust.root_of_grants),
            domain=context.settings.domain.name,
            grant_lifetime_s=context.settings.trust.grant_lifetime_s,
            replicas=context.settings.bus.replicas,
            measure=context.metrics,
        )
        await self._notifier.start()
        try:
            async with asyncio.timeout(SERVING_TIMEOUT_S):
                await self._notifier.serving()
        except TimeoutError:
            context.log.info("shards-elsewhere", held=len(self._notifier.held))

    async def stop(self) -> None:
        if self._notifier is not None:
            await self._notifier.stop()
            self._notifier = None
        if self._bus is not None:
            await self._bus.close()

    def health(self) -> component.ComponentHealth:
        if self._notifier is None:
            return component.ComponentHealth(health.HealthState.STARTING)
        facts = {"shards": len(self._notifier.held), "receivers": len(self._notifier.engine)}
        if problem := self._storage_problem():
            return component.ComponentHealth(health.HealthState.LATE, problem, facts)
        return component.ComponentHealth(facts=facts)
