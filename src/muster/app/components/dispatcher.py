"""The message dispatcher as a component of a domain."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from muster.app.components import component
from muster.app.components import context as context_
from muster.app.supervisor import module_process, port_workers
from muster.bus import api
from muster.bus.rpc import admission
from muster.core import errors, health, subjects
from muster.core.settings import domain
from muster.core.telemetry import metrics
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


def leadership_of(
    bus: api.Bus,
    message_settings: settings_.MessageSettings,
    trust: keyring.Keyring,
    *,
    max_bytes: int,
    replicas: int,
    lease_ttl_s: float,
    measure: metrics.Metrics,
) -> leadership.DispatcherLeadership:
    return leadership.DispatcherLeadership(
        bus,
        message_settings,
        max_bytes=max_bytes,
        may=TopicPermissions(trust),
        replicas=replicas,
        lease_ttl_s=lease_ttl_s,
        measure=measure,
    )


class DispatcherTask(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a further process for dispatchers."""

    name: str
    settings: settings_.MessageSettings
    root: str  # the domain's folder
    keys: str
    max_bytes: int
    replicas: int
    lease_ttl_s: float
    share_per_identity: float = admission.SHARE
    health: domain.HealthSettings
    log_level: str = "info"


class DispatcherComponent:
    """Serves the domain's queues and durable subscriptions, or waits to take them over. With several
    partitions, further processes have their share of them.
    """

    name = "message"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, settings: settings_.MessageSettings) -> None:
        self._settings = settings
        self._bus: api.Bus | None = None
        self._service: leadership.DispatcherLeadership | None = None
        count = self._settings.process_count(port_workers.usable_cores())
        self._processes = [
            module_process.ModuleProcess(
                f"dispatcher-{number}", "muster.app.supervisor.dispatcher_process", log_share=8 * (count - 1)
            )
            for number in range(1, count)
        ]

    async def start(self, context: context_.ComponentContext) -> None:
        self._storage_problem = context.storage_problem
        bus = self._bus = await context.connect(IDENTITY, roles.Role.GATEWAY)
        max_bytes = context.settings.retention.messages.max_bytes
        replicas, lease_ttl_s = context.settings.bus.replicas, context.settings.bus.lease_ttl_s
        self._service = leadership_of(
            bus,
            self._settings,
            context.trust,
            max_bytes=max_bytes,
            replicas=replicas,
            lease_ttl_s=lease_ttl_s,
            measure=context.metrics,
        )
        context.tasks.loop("leadership", self._service.run)
        for number, process in enumerate(self._processes, 1):
            task = DispatcherTask(
                name=f"dispatcher-{number}",
                settings=self._settings,
                root=str(context.folder.root),
                keys=str(context.settings.keys_folder),
                max_bytes=max_bytes,
                replicas=replicas,
                lease_ttl_s=lease_ttl_s,
                share_per_identity=context.settings.bus.share_per_identity,
                health=msgspec.structs.replace(context.settings.health, port=0),
                log_level=context.settings.log.level,
            )
            process.start(context, config=msgspec.json.encode(task))

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
