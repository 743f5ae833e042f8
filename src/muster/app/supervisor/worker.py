"""A registry endpoint, a manager or an agent as a process, started by the fork server.

It runs until the lifeline is closed: the bootstrap node holds the other end, so no process outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import pathlib
import signal
import ssl
from collections.abc import Callable, Collection, Mapping
from typing import Any, TextIO, cast

from muster.app import enrolment, identities, log_files
from muster.app.components import information_nodes
from muster.app.supervisor import machine_alerts, worker_config
from muster.bus import api
from muster.bus.brokers import config
from muster.bus.client import client
from muster.bus.direct import bus as direct_bus
from muster.bus.direct import dialer, frames, listener
from muster.bus.http import health as http_health
from muster.bus.rpc import admission
from muster.core import errors, health
from muster.core.net import tls as tls_
from muster.core.telemetry import log, metrics
from muster.gateways.uddi import mount
from muster.inform import protocol as inform_protocol
from muster.inform.node import node
from muster.manage import protocol
from muster.manage.adapters import base
from muster.manage.agent import agent, deadlines
from muster.manage.manager import agent_routes, manager
from muster.manage.registry import endpoint
from muster.supervision import tasks
from muster.trust import certificates, credentials, identity_roles, jwt, keyring, peer_admission
from muster.trust.permissions import roles

events = log.EventLog("app")

END_S = 5.0
MAY_CHANGE = (roles.Role.OPERATOR, roles.Role.BOOTSTRAP)
MAY_NOT_REQUEST = (roles.Role.AGENT, roles.Role.LINK)
AGENT_VERBS = (
    "exec",  # a command that a receiver accepted
    protocol.SECRET,
)  # for their own resources only, which the registry checks
REQUIRED_ROLES = {
    protocol.RENEW: roles.Role.MANAGER,
    protocol.HELLO: roles.Role.AGENT,
    **dict.fromkeys((*protocol.ENROLMENT_READS, protocol.ENROLMENT_SET), roles.Role.BOOTSTRAP),
}


async def follow_alerts(
    stack: contextlib.AsyncExitStack, bus: api.Bus
) -> Callable[[], Mapping[str, Collection[str]]]:
    """The rules whose alerts about machines have not ended, by machine."""
    followed, supervisor = machine_alerts.MachineAlerts(bus), tasks.TaskSupervisor("alerts of machines")
    supervisor.loop("alerts", followed.follow)
    stack.push_async_callback(supervisor.close)
    return lambda: followed.rules


async def connect(task: worker_config.WorkerConfig, measure: metrics.Metrics) -> api.Bus:
    creds = await asyncio.to_thread(credentials.Credentials.load, pathlib.Path(task.creds))
    tls = await asyncio.to_thread(ssl.create_default_context, cafile=task.ca) if task.ca else None
    bus = task.settings.bus
    return await client.connect(
        task.servers,
        creds=creds,
        tls=tls,
        measure=measure,
        proxy=bus.proxy or None,
        in_order=bus.on_machines,
    )


async def run(task: worker_config.WorkerConfig, stop: asyncio.Event, ready: Callable[[], None]) -> None:
    settings, keys = task.settings, task.settings.keys_folder
    admission.of_loop(asyncio.get_running_loop()).share = settings.bus.share_per_identity
    measure = metrics.Metrics(process=True)
    conditions: dict[str, Callable[[], http_health.HealthReport]] = dict.fromkeys(
        ("bus", task.component), _starting
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(
            http_health.serve_process(
                settings.health,
                process=task.name,
                conditions=lambda: {name: report() for name, report in conditions.items()},
                metrics=measure,
                folder=task.place.pages,
            )
        )
        bus = await stack.enter_async_context(await connect(task, measure))
        conditions["bus"] = lambda: http_health.bus_health(bus)
        report: Callable[[], http_health.HealthReport] = http_health.HealthReport
        match task.component:
            case "registry":
                member: Any = endpoint.RegistryEndpoint(
                    bus,
                    lease_ttl_s=settings.bus.lease_ttl_s,
                    manager_ttl_s=settings.manage.manager_ttl_s,
                    authorize=RequestAuthorizer(keys),
                    replicas=settings.bus.replicas,
                    max_bytes=settings.retention.registry.max_bytes,
                    open_key=lambda: keyring.Keyring.open(keys).key_of_secrets(),
                    measure=measure,
                    alerts=await follow_alerts(stack, bus),
                )
            case "manager":
                direct = direct_bus.DirectBus(bus, bus.identity, agent_routes.agent_of)
                address = await listen(stack, task, direct, of_roles=(roles.Role.AGENT,))
                await stack.enter_async_context(agent_routes.AgentForwarding(direct))
                member = manager.Manager(direct.as_bus(), direct=address)
            case "agent":
                direct = direct_bus.DirectBus(bus, bus.identity, agent_routes.manager_of)
                member = agent.Agent(
                    direct.as_bus(),
                    pathlib.Path(task.folder),
                    zone=settings.domain.zone,
                    beat_s=settings.manage.beat_s,
                    machine=enrolment.machine_id(),
                    broker_access=lambda: asyncio.to_thread(broker_access, keys),
                    keep_peer=await connect_directly(stack, direct, bus),
                    measure=measure,
                    guard=deadlines.WatchdogProcess(pathlib.Path(task.folder)),
                    sample=measurements(),
                    sensor=task.sensor,
                    on_join=ready,
                )
            case "information-node":
                direct = direct_bus.DirectBus(bus, bus.identity, lambda _: "")
                await listen(stack, task, direct, part=inform_protocol.PART)
                member = await node.start(
                    direct.as_bus(),
                    settings=settings.inform,
                    view=task.place.view(task.identity),
                    max_bytes=settings.retention.contexts.max_bytes,
                    replicas=settings.bus.replicas,
                    role_of=identity_roles.IdentityRoles(keyring.Keyring.open(keys)),
                    zone=settings.domain.zone,
                    mount_backends=mount.BACKENDS,
                )
                report = functools.partial(information_nodes.node_health, member)
            case _:
                raise errors.InvalidInput(f"no process of kind {task.component!r}")
        await stack.enter_async_context(member)
        conditions[task.component] = report
        if task.component != "agent":  # which is ready when it has joined
            ready()
        await stop.wait()


def measurements() -> Callable[[], Mapping[str, float]] | None:
    """Measures the machine for its agent; None without the package that does, which an extra installs."""
    try:
        from muster.monitor.sensor import host_metrics
    except errors.MissingDependency:
        return None
    return host_metrics.HostMetrics().sample


def _starting() -> http_health.HealthReport:
    return http_health.HealthReport(health.HealthState.STARTING)


def broker_access(keys: pathlib.Path) -> base.BrokerAccess:
    """For brokers that an agent on the domain's own machine runs. Blocks."""
    trust = keyring.Keyring.open(keys)
    documents = trust.broker()
    named = {jwt.read(document).name: key for key, document in documents.accounts.items()}
    return base.BrokerAccess(
        trust=config.OperatorTrust(
            operator_jwt=documents.operator_jwt,
            system_account=documents.system_account,
            accounts=documents.accounts,
            resolver=config.AccountResolver.MEMORY,
        ),
        account=named[trust.domain],
        link_credentials=identities.credentials_file(trust, identities.LINK, roles.Role.LINK),
    )


async def listen(
    stack: contextlib.AsyncExitStack,
    task: worker_config.WorkerConfig,
    bus: direct_bus.DirectBus,
    *,
    part: str = "",
    of_roles: tuple[roles.Role, ...] | None = None,
) -> frames.PeerAddress | None:
    """Accept direct connections, if the configuration says so and the network permits it."""
    where, access = task.direct, bus.peer_access
    if where.port is None or access is None:
        return None
    tls = None
    if where.cert:
        tls = await asyncio.to_thread(tls_.for_server, where.cert, where.cert_key)
        served = tls_.RenewableTls(tls, where.cert, where.cert_key)
        supervisor = tasks.TaskSupervisor(f"direct connections to {task.name}")
        supervisor.loop("certificate", functools.partial(certificates.keep_current, served))
        stack.push_async_callback(supervisor.close)
    try:
        listening = listener.DirectListener(
            bus,
            peer_admission.PeerAdmission(
                task.settings.keys_folder,
                brokers=pathlib.Path(where.brokers) if where.brokers else None,
                of_roles=of_roles,
            ),
            access.creds,
            host=where.host,
            port=where.port,
            tls=tls,
            names=where.names,
            part=part,
        )
        return (await stack.enter_async_context(listening)).address
    except (OSError, errors.InvalidInput) as error:  # messages use the brokers
        events.warning("no-direct-connections", process=task.name, error=error)
        return None


async def connect_directly(
    stack: contextlib.AsyncExitStack, direct: direct_bus.DirectBus, bus: api.Bus
) -> Callable[[frames.PeerAddress], None] | None:
    """What connects to a peer whose address is announced; None if this process may not."""
    access = getattr(bus, "peer_access", None)
    if access is None:
        return None
    return (await stack.enter_async_context(dialer.DirectDialer(direct, access))).keep


class RequestAuthorizer:
    """Authorizes requests by the role in the keyring; the broker has authenticated the name."""

    def __init__(self, keys: pathlib.Path) -> None:
        self._keys = keys
        self._role_of: identity_roles.IdentityRoles | None = None

    async def __call__(self, sender: str, verb: str, changes: bool) -> bool:
        """Returns whether the sender is limited to the resources it hosts."""
        role = await asyncio.to_thread(self._role, sender)
        if role is None:
            raise errors.Forbidden(f"{sender!r} is unknown in this domain, or its credentials are not valid")
        if verb in REQUIRED_ROLES:
            if role != REQUIRED_ROLES[verb]:
                raise errors.Forbidden(
                    f"{sender} has the role {role}; only the role {REQUIRED_ROLES[verb]} may {verb}"
                )
            return True
        if role == roles.Role.AGENT and verb in AGENT_VERBS:
            return True
        if changes and role not in MAY_CHANGE:
            raise errors.Forbidden(f"{sender} has the role {role}; only an operator may {verb}")
        if verb == protocol.SHELL and not await asyncio.to_thread(self._may_run_commands, sender):
            raise errors.Forbidden(
                f"{sender} may not run commands inside resources",
                hint=f"`muster creds revoke {sender}`, then `muster creds issue {sender} --role operator "
                "--shell`: the right is part of its credentials",
            )
        if role in MAY_NOT_REQUEST:
            raise errors.Forbidden(
                f"{sender} has the role {role}, which may not send requests to the registry"
            )
        return False

    def _role(self, sender: str) -> str | None:
        if self._role_of is None:
            self._role_of = identity_roles.IdentityRoles(keyring.Keyring.open(self._keys))
        return self._role_of(sender)

    def _may_run_commands(self, sender: str) -> bool:
        return self._role_of is not None and self._role_of.record(sender).may_run_commands


async def run_worker(task: worker_config.WorkerConfig, lifeline: int, ready: Callable[[], None]) -> None:
    """Run the worker until a signal, or until the other end of ``lifeline`` is closed."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def lifeline_closed() -> None:
        loop.remove_reader(lifeline)
        stop.set()

    loop.add_reader(lifeline, lifeline_closed)
    logs = log_files.RotatingFile(
        task.log_file,
        log_files.file_bytes(task.settings, task.log_share),
        task.settings.retention.logs.max_age_s,
    )
    log.configure(cast(TextIO, logs), level=task.settings.log.level, form="json")
    relax_gc()
    working = asyncio.create_task(run(task, stop, ready))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    # A worker that is still connecting to a broker does not react to the event.
    await asyncio.wait((working,), timeout=END_S)
    if working.done():
        working.result()


def relax_gc() -> None:
    """Run full garbage collections rarely.

    A manager holds a million long-lived objects; a full collection takes a third of a second, in which the
    process does not reply. Nearly all of its garbage is freed by reference counting, and young cycles are
    collected as usual.
    """
    gc.freeze()
    gc.set_threshold(20_000, 50, 1_000)
