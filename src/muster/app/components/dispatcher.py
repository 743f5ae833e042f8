"""The message dispatcher as a component of a domain."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from muster.app.components import component
from muster.app.components import context as context_
from muster.core import errors, health, subjects
from muster.message import settings as settings_
from muster.message.dispatcher import leadership
from muster.trust import keyring
from muster.trust.permissions import queue_rights, roles

IDENTITY = "message"
PERMISSIONS_KEPT_S = 10.0
DECISIONS_KEPT = 1000  # for one identity


@dataclass(slots=True)
class _CachedRecord:
    """The credentials of an identity when they were read, and the decisions made with them."""

    read_at: float
    record: keyring.CredentialRecord | None
    decided: dict[tuple[str, str], bool] = field(default_factory=dict)


class TopicPermissions:
    """Which topics and queues an identity may use; see `May` of the dispatcher.

    For topics, this is the decision the broker would make. Queues are checked only by the dispatcher.
    """

    def __init__(self, trust: keyring.Keyring) -> None:
        self._trust = trust
        self._known: dict[str, _CachedRecord] = {}

    def __call__(self, identity: str, action: str, what: str) -> bool:
        known = self._known.get(identity)
        if known is None or time.monotonic() - known.read_at > PERMISSIONS_KEPT_S:
            known = self._known[identity] = _CachedRecord(time.monotonic(), self._read(identity))
        decision = known.decided.get((action, what))
        if decision is None:
            decision = known.record is not None and _allows(known.record, action, what)
            if len(known.decided) < DECISIONS_KEPT:
                known.decided[action, what] = decision
        return decision

    def _read(self, identity: str) -> keyring.CredentialRecord | None:
        try:
            record = self._trust.show(identity)
        except errors.MusterError:
            return None
        return record if record.status == "valid" else None


#: Roles that may act on durable subscriptions of other identities.
_SUBSCRIPTIONS: Final = {
    "list": (roles.Role.OPERATOR, roles.Role.GATEWAY, roles.Role.WEB, roles.Role.VIEWER),
    "end": (roles.Role.OPERATOR,),
}


def _allows(record: keyring.CredentialRecord, action: str, what: str) -> bool:
    if action == "subscriptions":
        return record.role in _SUBSCRIPTIONS[what]
    if action in set(queue_rights.QueueRight):
        return queue_rights.allows(record.queues, what, action)
    allowed = record.publish if action == "pub" else record.subscribe
    return any(pattern == what or subjects.matches(pattern, what) for pattern in allowed)


class DispatcherComponent:
    """Serves the domain's queues and durable subscriptions, or waits to take them over."""

    name = "message"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, settings: settings_.MessageSettings) -> None:
        self._settings = settings
        self._service: leadership.DispatcherLeadership | None = None

    async def start(self, context: context_.ComponentContext) -> None:
        self._storage_problem = context.storage_problem
        bus = self._bus = await context.connect(IDENTITY, roles.Role.GATEWAY)
        self._service = leadership.DispatcherLeadership(
            bus,
            self._settings,
            max_bytes=context.settings.retention.messages.max_bytes,
            may=TopicPermissions(context.trust),
            replicas=context.settings.bus.replicas,
            measure=context.metrics,
        )
        context.tasks.loop("leadership", self._service.run)

    async def stop(self) -> None:
        if self._service is not None:
            await self._bus.close()

    def health(self) -> component.ComponentHealth:
        if self._service is None:
            return component.ComponentHealth(health.HealthState.STARTING)
        facts = {"acting": self._service.acting.is_set()}
        if problem := self._storage_problem():
            return component.ComponentHealth(health.HealthState.DOWN, problem, facts)
        return component.ComponentHealth(facts=facts)
