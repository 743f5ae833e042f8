"""The message dispatcher as a component of a domain."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from muster.app.components import component
from muster.app.components import context as context_
from muster.app.supervisor import child_component, endpoints
from muster.bus import api
from muster.core import errors, health, subjects
from muster.message import settings as settings_
from muster.message.dispatcher import leadership
from muster.trust import credential_records, keyring
from muster.trust.permissions import queue_rights, roles

IDENTITY = "message"
PERMISSIONS_KEPT_S = 10.0
DECISIONS_KEPT = 1000  # for one identity


@dataclass(slots=True)
class _CachedRecord:
    """The credentials of an identity when they were read, and the decisions made with them."""

    read_at: float
    record: credential_records.CredentialRecord | None
    decided: dict[tuple[str, str], bool] = field(default_factory=dict)


class TopicPermissions:
    """Which topics and queues an identity may use; as the dispatcher asks (``May``).

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

    def _read(self, identity: str) -> credential_records.CredentialRecord | None:
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


def _allows(record: credential_records.CredentialRecord, action: str, what: str) -> bool:
    if action == "subscriptions":
        return record.role in _SUBSCRIPTIONS[what]
    if action in set(queue_rights.QueueRight):
        return queue_rights.allows(record.queues, what, action)
    allowed = record.publish if action == "pub" else record.subscribe
    return any(pattern == what or subjects.matches(pattern, what) for pattern in allowed)


class DispatcherComponent:
    """Serves the domain's queues and durable subscriptions, or waits to take them over. With several
    partitions, all such processes have their share of them.
    """

    name = "message"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, settings: settings_.MessageSettings, *, more_processes: bool = False) -> None:
        """``more_processes``: whether it starts those that the settings say."""
        self._settings = settings
        self._bus: api.Bus | None = None
        self._service: leadership.DispatcherLeadership | None = None
        count = settings.process_count(endpoints.usable_cores()) if more_processes else 1
        self._processes = [
            child_component.ChildComponent(f"dispatcher-{number}", log_share=8 * (count - 1))
            for number in range(1, count)
        ]

    async def start(self, context: context_.ComponentContext) -> None:
        self._storage_problem = context.storage_problem
        self._bus = await context.connect(IDENTITY, roles.Role.GATEWAY)
        self._service = leadership.DispatcherLeadership(
            self._bus,
            self._settings,
            max_bytes=context.settings.retention.messages.max_bytes,
            may=TopicPermissions(context.trust),
            replicas=context.settings.bus.replicas,
            lease_ttl_s=context.settings.bus.lease_ttl_s,
            measure=context.metrics,
        )
        context.tasks.loop("leadership", self._service.run)
        for process in self._processes:
            process.start(context, functools.partial(context.config, self.name, process=process.name))

    async def stop(self) -> None:
        for process in self._processes:
            await process.stop()
        if self._bus is not None:
            await self._bus.close()

    def health(self) -> component.ComponentHealth:
        if self._service is None:
            return component.ComponentHealth(health.HealthState.STARTING)
        facts: dict[str, Any] = {"acting": self._service.acting.is_set()}
        if self._settings.partitions > 1:
            facts["partitions"] = sorted(self._service.owned)
        if problem := self._storage_problem():
            return component.ComponentHealth(health.HealthState.DOWN, problem, facts)
        if looping := [process.health().reason for process in self._processes if process.is_crash_looping]:
            return component.ComponentHealth(health.HealthState.FAILED, "; ".join(looping), facts)
        return component.ComponentHealth(reason=self._service.problem, facts=facts)
