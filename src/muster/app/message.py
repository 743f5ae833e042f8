"""The dispatcher of the messaging log as a part of a domain."""

from __future__ import annotations

import time
from collections.abc import Sequence

from muster.app import context as context_
from muster.app import team
from muster.core import errors, health, subjects
from muster.message import service
from muster.message import settings as settings_
from muster.trust import keyring, roles

IDENTITY = "message"
PERMISSIONS_KEPT_S = 10.0


class Permissions:
    """Which users' topics an identity may use: what the broker would say, for what we do in its name."""

    def __init__(self, trust: keyring.Trust) -> None:
        self._trust = trust
        self._known: dict[str, tuple[float, keyring.Record | None]] = {}

    def __call__(self, identity: str, action: str, subject: str) -> bool:
        read_at, record = self._known.get(identity, (0.0, None))
        if time.monotonic() - read_at > PERMISSIONS_KEPT_S:
            try:
                record = self._trust.show(identity)
            except errors.MusterError:
                record = None
            self._known[identity] = (time.monotonic(), record)
        if record is None:
            return False
        allowed = record.publish if action == "pub" else record.subscribe
        return any(pattern == subject or subjects.matches(pattern, subject) for pattern in allowed)


class Dispatcher:
    """Keeps the domain's queues and durable subscriptions, or waits to take them over."""

    name = "message"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, settings: settings_.Message) -> None:
        self._settings = settings
        self._service: service.Service | None = None

    async def start(self, context: context_.Context) -> None:
        bus = self._bus = await context.connect(IDENTITY, roles.Role.GATEWAY)
        self._service = service.Service(
            bus,
            self._settings,
            max_bytes=context.settings.retention.messages.max_bytes,
            may=Permissions(context.trust),
            replicas=context.settings.bus.replicas,
        )
        context.spawn(self._service.run())

    async def stop(self) -> None:
        if self._service is not None:
            await self._bus.close()

    def health(self) -> team.Health:
        if self._service is None:
            return team.Health(health.State.STARTING)
        return team.Health(facts={"acting": self._service.acting.is_set()})
