"""A domain built from settings: its brokers, identities and components.

    async with domain.Domain(settings) as running:
        bus = await running.connect("alice", roles.Role.USER)

Before any component starts, and until the last one has stopped, the following exist: the lock on the folder,
the health pages, the keys, the brokers (own ones, unless the settings name others), and the domain's own
connection. Several domains can run in one process; each has its own folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import os
import time
from collections.abc import Awaitable, Iterable
from typing import Any, Self, TypeVar, cast

import muster
from muster.app import access, certificates, home, identities
from muster.app import settings as app_settings
from muster.app.brokers import broker_set
from muster.app.components import component as component_
from muster.app.components import context, locator
from muster.app.machines import follower, growth, membership, program
from muster.app.operations import audit, control, retention, storage_monitor
from muster.app.supervisor import component_config, fork_server
from muster.bus import api
from muster.bus.brokers import control as broker_control
from muster.bus.http import health, server, telemetry_export
from muster.bus.rpc import admission
from muster.core import errors, messages
from muster.core.formats import complete
from muster.core.settings import domain
from muster.core.telemetry import log, metrics
from muster.supervision import tasks
from muster.trust import keyring
from muster.trust.permissions import roles

P = TypeVar("P")

OUTLIVE_S = 30.0  # brokers wait for the restart of the domain
PROCESS = "domain"  # the process name of its health pages


class DomainState(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Domain:
    def __init__(
        self,
        settings: domain.BaseSettings,
        *,
        components: Iterable[component_.Component] = (),
        monitored: bool = True,
        restarted: bool = False,
        programs: program.ProgramChoice | None = None,
    ) -> None:
        """``monitored``: whether it checks its storage and writes the activity log; not while a backup is
        restored into it.
        ``restarted``: whether it is started again after a crash; its brokers run meanwhile. ``programs``: of
        a home; without it, the machine cannot change to another program."""
        self.settings = settings
        self.folder = home.DomainFolder(settings.domain.folder.absolute())
        self.state = DomainState.STOPPED
        self.machines = membership.at_start(settings, self.folder.root)
        self._monitored = monitored
        self._programs = programs
        self._refusal = program.ProgramRecord() if programs is None else programs.load()
        self.metrics = metrics.Metrics(process=True)
        self.brokers = (
            None
            if settings.bus.servers
            else broker_set.BrokerSet(
                settings, self.folder, machines=self.machines, outlive_s=OUTLIVE_S if restarted else 0.0
            )
        )
        self.trust: keyring.Keyring
        self.bus: api.Bus
        self._locator = (
            locator.LocatorComponent(self._located, self._gateways) if settings.bus.locator else None
        )
        self._log = log.EventLog("app", domain=settings.domain.name)
        self._growth: growth.StorageGrowth | None = None
        self._budgets = retention.RetentionMonitor(replicas=self._replicas_at_least)
        self._storage = storage_monitor.StorageMonitor(self.brokers)
        self._integrity = storage_monitor.IntegrityMonitor(self.brokers)
        self._components = (*self._own_components(monitored), *components)
        self._group: component_.ComponentGroup
        self.fork_server: fork_server.ForkServer
        self._access: access.DomainAccess
        self._stack = contextlib.AsyncExitStack()
        self._failure: asyncio.Future[None]
        self._pages: server.HttpServer | None = None
        self._started_at_s = 0.0

    def _own_components(self, monitored: bool) -> list[component_.Component]:
        own: list[component_.Component] = [self._budgets]
        if monitored:
            own += [audit.AuditComponent(), self._storage, self._integrity]
        if self._locator is not None:
            own.append(self._locator)
        verbs: dict[str, control.Verb] = {}
        is_first = self.machines is None or self.machines.is_first
        if self.brokers is not None:
            verbs |= self.brokers.verbs()
            if self.settings.bus.uses_tls:
                own.append(certificates.CertificateRenewer(self.brokers.reload))
        if is_first:  # of several machines, one replies
            own.append(control.ControlServer({**verbs, **self._verbs()}))
        if self.machines is not None and is_first and self.brokers is not None:
            self._growth = growth.StorageGrowth(self.brokers, self._follow, self._budgets.check)
            own.append(self._growth)
        if self.machines is not None and not is_first:
            own.append(follower.MachineFollower(self.machines, self._follow, self._reload_brokers))
        return own

    def _replicas_at_least(self) -> int:
        """Of each stream, in a domain on several machines; 0: as in the settings."""
        return self._growth.replicas if self._growth is not None else 0 if self.machines is None else 1

    async def _follow(self, machines: membership.MachineList) -> None:
        """Machines have joined or left."""
        self.machines = machines
        if self.brokers is not None:
            await self.brokers.follow(machines)
        if self.state is DomainState.RUNNING:
            await self._announce()
        chosen = machines.here.program
        if self._programs is not None and chosen is not None:
            if await asyncio.to_thread(self._programs.check, chosen):
                self._fail(program.ProgramChanged(chosen))
            self._refusal = await asyncio.to_thread(self._programs.load)

    async def _reload_brokers(self) -> None:
        if self.brokers is not None:
            await self.brokers.reload()

    def _verbs(self) -> dict[str, control.Verb]:
        return {"alerts": self._open_alerts, "components": self._component_rows}

    async def _component_rows(self) -> list[broker_control.ComponentRow]:
        return [
            broker_control.ComponentRow(name=name, state=own.state.value, reason=own.reason)
            for name, own in self._group.health().items()
        ]

    async def _open_alerts(self) -> list[messages.Alert]:
        return [*self._budgets.open_alerts(), *self._integrity.open_alerts()]

    # Lifecycle

    async def start(self) -> None:
        """Start the domain; it serves when this returns. A failed start is undone."""
        if self.state is not DomainState.STOPPED:
            raise errors.Conflict(f"the domain {self.settings.domain.name} is already {self.state.value}")
        self.state = DomainState.STARTING
        self._started_at_s = time.time()
        admission.of_loop(asyncio.get_running_loop()).share = self.settings.bus.share_per_identity
        self._failure = asyncio.get_running_loop().create_future()
        self._group = component_.ComponentGroup(
            self._components, context_for=self._context, on_failure=self._component_failed
        )
        try:
            await asyncio.to_thread(self.folder.create)
            await self._hold_folder()
            if self._monitored:
                await asyncio.to_thread(membership.check_whole, self.folder.root)
            await asyncio.to_thread(self.folder.end_former_children)
            await self._serve_pages()
            self.fork_server = fork_server.ForkServer()
            self._stack.push_async_callback(self.fork_server.close)
            if any(getattr(member, "forks", False) for member in self._components):
                await self.fork_server.prepare()
            self.trust = await asyncio.to_thread(identities.open_or_create, self.settings)
            self._access = access.DomainAccess(
                self._locate,
                keys=self.trust,
                measure=self.metrics,
                connect_timeout_s=self.settings.bus.connect_timeout_s,
            )
            if self.brokers is not None:
                self._stack.push_async_callback(self.brokers.stop)
                await self.brokers.start(self.trust, measure=self.metrics, on_failure=self._fail)
            self.bus = await self.connect(identities.SELF, identities.OWN[identities.SELF])
            self._stack.push_async_callback(self.bus.close)
            self._stack.push_async_callback(self._group.stop)
            await self._group.start()
            self.state = DomainState.RUNNING
            await self._announce()
            self._group.retry_failed(on_start=self._announce)
        except BaseException:
            await self.stop()
            raise
        took_s = time.time() - self._started_at_s
        self._log.info("domain-started", servers=", ".join(self.servers), took_s=round(took_s, 3))

    async def stop(self) -> None:
        """Drain and stop, in reverse order of the start."""
        if self.state is DomainState.STOPPED:
            return
        was_running = self.state is DomainState.RUNNING
        self.state = DomainState.STOPPING
        await self._stack.aclose()
        self._failure.cancel()
        self.state = DomainState.STOPPED
        if was_running:
            self._log.info("domain-stopped")

    async def guard(self, work: Awaitable[None]) -> None:
        """Await ``work``; raises the error of a vital component that fails meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._failure), return_when=asyncio.FIRST_COMPLETED)
            await (self._failure if self._failure.done() else task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def wait(self) -> None:
        """Wait until a vital component fails; raises its error."""
        await self.guard(asyncio.get_running_loop().create_future())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # Status

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses for services; clients that store nothing may also use leaves."""
        if self.brokers is not None:
            return self.brokers.root_urls
        follows = self.machines is not None and self.settings.bus.follow_machines
        return (self.machines.remote_urls if self.machines and follows else ()) or self.settings.bus.servers

    def _gateways(self) -> tuple[str, ...]:
        """For AMQP: that of this machine and, where machines report, those of the others."""
        of_others = (member.gateways for member in self._components if hasattr(member, "gateways"))
        return tuple(url for url in (self.url_of("amqp"), *itertools.chain(*of_others)) if url)

    def _located(self) -> tuple[str, ...]:
        return self.servers if self.brokers is None else (*self.brokers.urls, *self.brokers.remote_urls)

    @property
    def ready(self) -> bool:
        """Whether it is running and connected, and all vital components work."""
        if self.state is not DomainState.RUNNING or self.bus.state is not api.ConnectionState.CONNECTED:
            return False
        health_by_name = self._group.health()
        return all(health_by_name[member.name].is_working for member in self._components if member.vital)

    def works(self, component: str) -> bool:
        """Whether a component works, if the domain has one of this name."""
        reported = self._group.health().get(component)
        return reported is None or reported.is_working

    @property
    def running(self) -> home.RunningDomain:
        return home.RunningDomain(
            domain=self.settings.domain.name,
            pid=os.getpid(),
            started_at_s=self._started_at_s,
            version=muster.__version__,
            servers=self.servers,
            ca=self._ca or None,
            remote_servers=() if self.machines is None else self.machines.remote_urls,
            locator_url=self._locator.url if self._locator is not None else None,
            health_url=self._pages.url if self._pages is not None else None,
            web_url=self.url_of("web") or None,
        )

    @property
    def report(self) -> membership.MachineReport:
        """For the other machines."""
        problems = [
            f"{name}: {own.reason}" for name, own in self._group.health().items() if not own.is_working
        ]
        if self.state is not DomainState.RUNNING:
            problems = [self.state.value]
        return membership.MachineReport(
            version=muster.__version__,
            program=program.current(),
            problem="; ".join(problems),
            amqp=self.url_of("amqp"),
            refused=self._refusal.refused,
            refused_reason=self._refusal.reason,
        )

    async def status(self) -> dict[str, Any]:
        """The complete status as plain values."""
        if self.state is DomainState.STOPPING:  # components cannot be asked any more
            waits_for = self._group.last_begun or "brokers"
            return {"state": self.state.value, "ready": False, "reason": f"it waits for {waits_for}"}
        health_by_name = self._group.health()
        status: dict[str, Any] = {
            "state": self.state.value,
            "ready": self.ready,
            "brokers": [] if self.brokers is None else await self.brokers.describe(),
            "components": await self._component_rows(),
            "pages": await asyncio.to_thread(self._health_endpoints),
        }
        for component_health in health_by_name.values():
            status |= component_health.facts
        plain: dict[str, Any] = complete.builtins(status)
        return plain

    def component(self, kind: type[P]) -> P:
        """The component of this type, for programs that embed the domain."""
        match = next((member for member in self._components if isinstance(member, kind)), None)
        if match is None:
            raise errors.NotFound(f"this domain has no {kind.__name__}")
        return match

    def url_of(self, name: str) -> str:
        """Where the component of this name serves; empty if it does not."""
        return next((getattr(member, "url", "") for member in self._components if member.name == name), "")

    async def connect(self, identity: str, role: roles.Role) -> api.Bus:
        """A connection as ``identity``; credentials are issued if it has none."""
        return await self._access.connect(identity, role)

    # Internals

    @property
    def _ca(self) -> str:
        return certificates.ca_file(self.settings)

    async def _locate(self) -> access.DomainAddress:
        bus = self.settings.bus
        return access.DomainAddress(self.servers, self._ca, proxy=bus.proxy, in_order=bus.on_machines)

    def _template(self) -> component_config.ComponentConfig:
        settings = cast(app_settings.Settings, self.settings)
        return component_config.ComponentConfig(
            component="", settings=settings, servers=self.servers, ca=self._ca
        )

    def _context(
        self, member: component_.Component, supervisor: tasks.TaskSupervisor
    ) -> context.ComponentContext:
        return context.ComponentContext(
            settings=self.settings,
            folder=self.folder,
            access=self._access,
            metrics=self.metrics,
            log=self._log.bind(in_component=member.name),
            tasks=supervisor,
            template=self._template,
            in_domain=self,
            watch_folder=self._budgets.watch_folder,
            storage_problem=self._storage.problem,
        )

    def _component_failed(self, member: component_.Component, error: BaseException) -> None:
        self._log.error("component-failed", failed=member.name, vital=member.vital, error=error)
        self.metrics.counter("part_failures", "Parts that failed.", ("failed",)).add(failed=member.name)
        if member.vital:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # mark it as retrieved, in case no task awaits it

    async def _announce(self) -> None:
        await asyncio.to_thread(self.folder.announce, self.running)

    async def _hold_folder(self) -> None:
        lock = self.folder.hold()
        await asyncio.to_thread(lock.__enter__)
        self._stack.push_async_callback(asyncio.to_thread, lock.__exit__, None, None, None)

    async def _serve_pages(self) -> None:
        await self._stack.enter_async_context(
            telemetry_export.export_telemetry(self.settings.health, PROCESS, self.metrics)
        )
        self._pages = await health.serve(
            self.settings.health,
            ready=lambda: self.ready,
            conditions=self._group.health,
            metrics=self.metrics,
            more_routes={
                "/status": self._status_page,
                health.MACHINE: health.machine_page(self.folder.pages),
            },
        )
        if self._pages is not None:
            self._stack.push_async_callback(self._pages.close)
            page_file = await asyncio.to_thread(health.advertise, self.folder.pages, PROCESS, self._pages)
            self._stack.push_async_callback(asyncio.to_thread, page_file.unlink, missing_ok=True)

    async def _status_page(self, _: server.HttpRequest) -> server.HttpResponse:
        return server.json_response(await self.status())

    def _health_endpoints(self) -> list[dict[str, Any]]:
        return [
            {"process": endpoint.process, "pid": endpoint.pid, "url": endpoint.url}
            for endpoint in health.advertised(self.folder.pages)
        ]
