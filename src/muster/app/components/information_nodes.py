"""Information nodes as a component of a domain, each in a process of its own or in that of the domain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from muster.app import access
from muster.app.components import component
from muster.app.components import context as context_
from muster.app.supervisor import forked_process, worker_config
from muster.bus.http import health as http_health
from muster.core import health, units
from muster.core.settings import domain
from muster.inform import settings
from muster.trust import identity_roles
from muster.trust.permissions import roles

if TYPE_CHECKING:
    from muster.inform.node import access as context_access
    from muster.inform.node import node as node_node

PREFIX = "inform-"
START_S = 30.0  # then the others start without it


class InformationNodesComponent:
    name = "inform"
    depends_on: Sequence[str] = ()
    vital = False  # contexts remain in their log, and other nodes have replicas

    def __init__(self, settings_: settings.InformSettings, suffix: str = "", identity: str = "") -> None:
        """``suffix`` distinguishes the identities of nodes from those of other machines in the same zone.

        ``identity``: run one node, in this process.
        """
        self._identity = identity
        self._settings = msgspec.structs.replace(settings_, processes=False) if identity else settings_
        self._suffix = suffix
        self.forks = self._settings.processes
        self._stack = contextlib.AsyncExitStack()
        self.nodes: list[node_node.InformationNode] = []  # of this process
        self.processes: list[forked_process.ForkedProcess] = []

    async def start(self, context: context_.ComponentContext) -> None:
        self._storage_problem = context.storage_problem
        if self._identity:
            await self._begin_here(context, self._identity)
            return
        begin = self._begin_process if self._settings.processes else self._begin_here
        for number in range(1, self._settings.nodes + 1):
            await begin(context, f"{PREFIX}{context.settings.domain.zone}{self._suffix}-{number}")

    async def _begin_here(self, context: context_.ComponentContext, identity: str) -> None:
        from muster.inform.node import node as node_node

        bus = await context.connect(identity, roles.Role.INFORMATION_NODE)
        self._stack.push_async_callback(bus.close)
        arguments = node_arguments(context.settings, context.access)
        view = context.folder.view(identity)
        node = await node_node.start(bus, name=identity, settings=self._settings, view=view, **arguments)
        self._stack.push_async_callback(node.close)
        self.nodes.append(node)

    async def _begin_process(self, context: context_.ComponentContext, identity: str) -> None:
        configure = functools.partial(_config, context, self._settings, identity)
        process = forked_process.ForkedProcess(context, identity, configure)
        self._stack.push_async_callback(process.child.stop)
        self.processes.append(process)
        process.child.start_soon()
        try:
            async with asyncio.timeout(START_S):
                await process.ready.wait()
        except TimeoutError:
            context.log.warning("information-node-late", node=identity, reason=process.child.reason)

    async def stop(self) -> None:
        await self._stack.aclose()
        self.nodes.clear()
        self.processes.clear()

    def health(self) -> component.ComponentHealth:
        if (self.nodes or self.processes) and (problem := self._storage_problem()):
            return component.ComponentHealth(health.HealthState.LATE, f"writes wait: {problem}")
        reports = [node_health(node) for node in self.nodes]
        for report in (*reports, *(process.health() for process in self.processes)):
            if report.state is not health.HealthState.UP:
                return component.ComponentHealth(report.state, report.reason)
        return component.ComponentHealth()


def _config(
    context: context_.ComponentContext, settings_: settings.InformSettings, identity: str
) -> worker_config.WorkerConfig:
    """Blocks."""
    return worker_config.configure(
        context,
        "information-node",
        identity,
        roles.Role.INFORMATION_NODE,
        {"inform": settings_},
        direct=worker_config.direct_port(context, settings_.direct_ports, int(identity.rpartition("-")[2])),
        log_share=8 * settings_.nodes,
    )


def node_arguments(settings_: domain.BaseSettings, access_: access.DomainAccess) -> dict[str, Any]:
    """The arguments of every node of a domain: its log and the roles of callers. A node that has no keys of
    the domain leaves the log as it is, and knows no roles.
    """
    from muster.gateways.uddi import mount

    role_of: context_access.RoleResolver | None = None
    if access_.has_keys:
        role_of = identity_roles.IdentityRoles(access_.keys)
    elif access_.has_credentials:
        role_of = _unknown
    return {
        "max_bytes": settings_.retention.contexts.max_bytes,
        "replicas": settings_.bus.replicas,
        "joins": not access_.has_keys,
        "role_of": role_of,
        "zone": settings_.domain.zone,
        "mount_backends": mount.BACKENDS,
    }


def _unknown(identity: str) -> None:
    return None


def node_health(of: node_node.InformationNode) -> http_health.HealthReport:
    failure = of.failure()
    if failure is not None:
        return http_health.HealthReport(health.HealthState.FAILED, failure)
    if of.view_failure is not None:
        return http_health.HealthReport(health.HealthState.LATE, f"{of.name} cannot store: {of.view_failure}")
    age_s = of.freshness.now_s() - of.freshness.fresh_at_s
    if age_s > 3 * of.settings.timeout_s:
        late = f"{of.name} has not received the log for {units.rounded_duration(round(age_s))}"
        return http_health.HealthReport(health.HealthState.LATE, late)
    return http_health.HealthReport()
