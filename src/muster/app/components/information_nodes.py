"""Information nodes as a component of a domain."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from muster.app.components import component
from muster.app.components import context as context_
from muster.core import health, units
from muster.core.settings import domain
from muster.gateways.uddi import mount
from muster.inform import settings
from muster.inform.node import node as node_node
from muster.trust import identity_roles, keyring
from muster.trust.permissions import roles

PREFIX = "inform-"


class InformationNodesComponent:
    name = "inform"
    depends_on: Sequence[str] = ()
    vital = False  # contexts remain in their log, and other nodes have replicas

    def __init__(self, settings_: settings.InformSettings, suffix: str = "") -> None:
        """``suffix`` distinguishes the identities of nodes from those of other machines in the same zone."""
        self._settings = settings_
        self._suffix = suffix
        self._stack = contextlib.AsyncExitStack()
        self.nodes: list[node_node.InformationNode] = []

    async def start(self, context: context_.ComponentContext) -> None:
        self._storage_problem = context.storage_problem
        for number in range(1, self._settings.nodes + 1):
            bus = await context.connect(
                f"{PREFIX}{context.settings.domain.zone}{self._suffix}-{number}", roles.Role.INFORMATION_NODE
            )
            self._stack.push_async_callback(bus.close)
            node = await node_node.start(
                bus,
                settings=self._settings,
                store=context.store,
                **node_arguments(context.settings, context.trust),
            )
            self._stack.push_async_callback(node.close)
            self.nodes.append(node)

    async def stop(self) -> None:
        await self._stack.aclose()
        self.nodes.clear()

    def health(self) -> component.ComponentHealth:
        if self.nodes and (problem := self._storage_problem()):
            return component.ComponentHealth(health.HealthState.LATE, f"writes wait: {problem}")
        for node in self.nodes:
            failure = node.failure()
            if failure is not None:
                return component.ComponentHealth(health.HealthState.FAILED, failure)
            if node.view_failure is not None:
                return component.ComponentHealth(
                    health.HealthState.LATE, f"{node.name} cannot store: {node.view_failure}"
                )
            age_s = node.state.now_s() - node.state.fresh_at_s
            if age_s > 3 * self._settings.timeout_s:
                return component.ComponentHealth(
                    health.HealthState.LATE,
                    f"{node.name} has not received the log for {units.rounded_duration(round(age_s))}",
                )
        writers = self.nodes[0].state.replicas.stored.largest() if self.nodes else []
        return component.ComponentHealth(facts={"context_writers": writers})


def node_arguments(settings: domain.BaseSettings, trust: keyring.Keyring) -> dict[str, Any]:
    """The arguments of every node of a domain, in any process: its log and the roles of callers."""
    return {
        "max_bytes": settings.retention.contexts.max_bytes,
        "replicas": settings.bus.replicas,
        "role_of": identity_roles.IdentityRoles(trust),
        "zone": settings.domain.zone,
        "mount_backends": mount.BACKENDS,
    }
