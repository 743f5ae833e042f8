"""Management as a component of a domain: the active bootstrap node.

It runs registry endpoints, managers and this machine's agent as separate processes, restarts those that end,
creates and redeems enrolment tokens, and kills processes on request (for drills), as `bootstrap_client` asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pathlib
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from muster.app import access, certificates, enrolment, identities
from muster.app.brokers import addresses
from muster.app.components import bootstrap_client, component
from muster.app.components import context as context_
from muster.app.machines import admission, membership, program
from muster.app.machines import roles as machine_roles_
from muster.app.supervisor import endpoints, forked_process, manager_count, worker_config
from muster.bus.rpc import server
from muster.core import errors, health
from muster.manage import client, protocol, settings
from muster.supervision import os_process, tasks
from muster.trust.permissions import roles

KIND = bootstrap_client.KIND
ENROL = f"{KIND}.enrol"
DIRECTORY = f"{KIND}.{bootstrap_client.DIRECTORY}"
LOGIN = f"{KIND}.{access.LOGIN}"
REMOVE = f"{KIND}.remove-machine"
FORGOTTEN_LOOK_S = 5.0
ENROLMENT_S = 10.0  # for a request to the registry: others wait meanwhile

_ROLES = {
    "registry": roles.Role.REGISTRY,
    "manager": roles.Role.MANAGER,
    "agent": roles.Role.AGENT,
}


class ManagementComponent:
    name = "manage"
    forks = True
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, manage_settings: settings.ManageSettings, sensor: str = "") -> None:
        """``sensor``: the identity of the sensor of this machine."""
        self._settings = manage_settings
        self._sensor = sensor
        self._context: context_.ComponentContext
        self._children: dict[str, forked_process.ForkedProcess] = {}
        self._server: server.RpcServer | None = None
        self._tasks = tasks.TaskSupervisor("management")
        # A machine that enrols again while its old credentials are about to end keeps the new ones.
        self._credentials = asyncio.Lock()
        self._enrolment: enrolment.EnrolmentService
        self._admission: admission.MachineAdmission
        self._reports: dict[str, tuple[float, membership.MachineReport]] = {}

    async def start(self, context: context_.ComponentContext) -> None:
        self._context = context
        self._admission = admission.MachineAdmission(context.settings, context.trust)
        self._enrolment = enrolment.EnrolmentService(
            client.ManageClient(context.bus, timeout_s=ENROLMENT_S),
            context.trust,
            self._admission,
            lifetime_s=context.settings.trust.agent_lifetime_s,
        )
        for name in _names(self._settings, self._settings.managers):
            self._start_child(name)
        if self._settings.managers:
            self._watch_managers()
        signs = await asyncio.to_thread(lambda: context.trust.signs)
        if signs:
            context.tasks.spawn(
                "old tokens",
                asyncio.to_thread(context.trust.discard_expired, enrolment.PREFIX, roles.Role.JOINING),
            )
        self._server = server.RpcServer(
            context.bus,
            protocol.PART,
            self._operations(),
            authorize=self._authorize,
            at_once=1,
            # On several machines, one of these processes must act: the one whose machine signs accounts.
            serving=lambda: signs,
        )
        await self._server.start()
        if signs:
            self._watch_forgotten()

    def _start_child(self, name: str) -> None:
        configure = functools.partial(_worker_config, self._context, self._settings, name, self._sensor)
        self._children[name] = forked_process.ForkedProcess(self._context, name, configure)
        self._children[name].child.start_soon()

    def _watch_managers(self) -> None:
        self._tasks.loop("managers", self._count_managers)

    async def _count_managers(self) -> None:
        """Start and end managers, as their load requires."""
        managers = self._settings.managers
        counted = manager_count.ManagerCount(managers, managers_most(self._settings))
        while _manager_names(self._settings, counted.count + 1)[-1] in self._children:
            counted.count += 1  # this task failed, and is repeated
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(manager_count.LOOK_S)
            names = _manager_names(self._settings, counted.count)
            pids = [pid for name in names if (pid := self._children[name].child.pid) is not None]
            now_s = loop.time()
            active = await asyncio.to_thread(_active_ns, pids, now_s)
            due = _manager_names(self._settings, counted.look(now_s, active))
            for name in due[len(names) :]:
                self._context.log.info("manager-added", manager=name)
                self._start_child(name)
            for name in names[len(due) :]:
                self._context.log.info("manager-ended", manager=name)
                await self._children[name].child.stop()
                del self._children[name]

    async def stop(self) -> None:
        await self._tasks.close()
        if self._server is not None:
            await self._server.close()
        await asyncio.gather(*(process.child.stop() for process in self._children.values()))

    def health(self) -> component.ComponentHealth:
        facts = {"management": self._processes()}
        problems = {name: problem for name, child in self._children.items() if (problem := child.problem)}
        failed = [known.reason for known in problems.values() if known.state is health.HealthState.FAILED]
        if failed:
            return component.ComponentHealth(health.HealthState.FAILED, "; ".join(failed), facts)
        if problems:
            reason = f"starting or silent: {', '.join(problems)}"
            return component.ComponentHealth(health.HealthState.LATE, reason, facts)
        return component.ComponentHealth(facts=facts)

    def _processes(self) -> list[bootstrap_client.ProcessRow]:
        return [
            bootstrap_client.ProcessRow(
                name=name,
                state=process.child.state.value if process.child.is_responding else "silent",
                pid=process.child.pid,
                starts=process.child.starts,
                reason=process.child.reason,
            )
            for name, process in self._children.items()
        ]

    # Requests

    def _operations(self) -> list[server.RpcOperation]:
        plain = server.RpcOperation.plain
        return [
            plain(f"{KIND}.processes", self._listed, audited=False),
            plain(f"{KIND}.waiting", self._waiting, audited=False),
            plain(f"{KIND}.kill", self._kill),
            plain(f"{KIND}.approve", self._enrolment.approve),
            server.RpcOperation(f"{KIND}.token", self._token, what="enrolment-token"),
            server.RpcOperation(ENROL, self._enrol),
            plain(f"{KIND}.machines", self._machines, audited=False),
            plain(DIRECTORY, self._directory, audited=False),
            plain(LOGIN, self._login, what="login"),
            plain(f"{KIND}.choose-program", self._choose_program, what="program"),
            plain(REMOVE, self._remove_machine, what="machine-removal"),
        ]

    async def _authorize(
        self, call: server.RpcCall, operation: server.RpcOperation, arguments: Mapping[str, Any]
    ) -> None:
        record = await asyncio.to_thread(self._context.trust.show, call.identity)
        verb = operation.name.rpartition(".")[2]
        if operation.name == ENROL:
            if record.role != roles.Role.JOINING:
                raise errors.Forbidden(f"{call.identity} is not the identity of an enrolment token")
        elif operation.name in (DIRECTORY, LOGIN) and record.role == roles.Role.BOOTSTRAP:
            return
        elif record.role != roles.Role.OPERATOR or record.status != "valid":
            raise errors.Forbidden(
                f"{call.identity} ({record.role}, {record.status}) may not {verb}: only an operator may"
            )

    async def _waiting(self, after: str = "") -> dict[str, Any]:
        rows = sorted(await self._enrolment.waiting(), key=lambda row: row.token)
        return server.page(rows, key=lambda row: row.token, after=after)

    async def _listed(self) -> list[bootstrap_client.ProcessRow]:
        return self._processes()

    async def _kill(self, name: str, number: int = signal.SIGKILL) -> bootstrap_client.KilledProcess:
        pid = self._children[name].child.pid if name in self._children else None
        if pid is None:
            known = ", ".join(self._children)
            raise errors.NotFound(f"no process {name!r} runs here", hint=f"running: {known}")
        os.kill(pid, number)
        return bootstrap_client.KilledProcess(killed=name, pid=pid)

    async def _token(
        self,
        call: server.RpcCall,
        name: str,
        approval: bool = False,
        lifetime_s: float = enrolment.LIFETIME_S,
        servers: Sequence[str] = (),
        machine_roles: Sequence[str] = (),
    ) -> bootstrap_client.IssuedEnrolment:
        running = await asyncio.to_thread(self._context.folder.running)
        assert running is not None
        ca = await asyncio.to_thread(pathlib.Path(running.ca).read_text) if running.ca else ""
        chosen = bool(servers)
        locators: tuple[str, ...] = ()
        if not servers:
            bus, urls = self._context.settings.bus, running.own_servers
            own = await asyncio.to_thread(addresses.reachable_urls, bus, urls)
            servers = (*own, *running.remote_servers)
            if running.locator_url:
                urls = (running.locator_url,)
                locators = await asyncio.to_thread(addresses.reachable_urls, bus, urls)
        token = await self._enrolment.make(
            call.identity,
            name,
            tuple(servers),
            ca,
            locator=next(iter(locators), ""),
            approval=approval,
            lifetime_s=lifetime_s,
            machine_roles=machine_roles_.check(machine_roles) if machine_roles else (),
            chosen=chosen,
        )
        return bootstrap_client.IssuedEnrolment(name=name, token=token)

    @property
    def gateways(self) -> list[str]:
        """Of the other machines, for AMQP."""
        since_s = time.monotonic() - membership.SILENT_S
        return [report.amqp for at_s, report in self._reports.values() if report.amqp and at_s > since_s]

    async def _machines(self) -> list[membership.MachineRow]:
        known = await asyncio.to_thread(self._admission.machines)
        now_s = time.monotonic()
        self._reports[known.own] = now_s, self._context.report
        rows = []
        for machine in known.machines:
            at_s, report = self._reports.get(machine.name, (now_s, None))
            facts = msgspec.structs.asdict(machine) | {"report": report, "age_s": round(now_s - at_s, 1)}
            rows.append(membership.MachineRow(**facts))
        return rows

    async def _choose_program(self, machine: str, path: str) -> program.ChosenProgram:
        chosen = await asyncio.to_thread(self._admission.choose_program, machine, path)
        self._reports.pop(machine, None)  # what it says from now on
        return chosen

    async def _directory(
        self,
        machine: str,
        after: int = -1,
        certificate_key: str = "",
        report: dict[str, Any] | None = None,
        logins: str = "",
        proof: str = "",
    ) -> admission.DirectoryPage:
        if not proof:  # an earlier version does not sign its request for logins: it keeps those that it has
            logins = ""
        if certificate_key or logins:
            words = bootstrap_client.DIRECTORY, machine, certificate_key, logins
            await asyncio.to_thread(self._admission.check_signed, machine, proof, *words)
        page = await asyncio.to_thread(self._admission.page, machine, after, certificate_key, logins)
        if report is not None:
            self._reports[machine] = time.monotonic(), msgspec.convert(report, membership.MachineReport)
        return page

    async def _login(
        self, machine: str, identity: str, role: str, public_key: str, proof: str = ""
    ) -> access.LoginDocument:
        words = access.LOGIN, machine, identity, role, public_key
        await asyncio.to_thread(self._admission.check_signed, machine, proof, *words)
        document = await asyncio.to_thread(self._admission.login, machine, identity, role, public_key)
        return access.LoginDocument(jwt=document)

    async def _remove_machine(self, name: str, leaves: bool = False) -> membership.Machine:
        async with self._credentials:
            removed = await asyncio.to_thread(self._admission.remove, name)
        if leaves:  # after the reply: the machine gets none when the brokers know that it is removed
            self._context.tasks.spawn("agent of a machine that left", self._forget_left(name))
        self._context.tasks.loop("revocation", self._publish_revocations)
        return removed

    async def _forget_left(self, name: str) -> None:
        fleet = client.ManageClient(self._context.bus, timeout_s=ENROLMENT_S)
        try:
            if any(agent.name == name and not agent.resources for agent in await fleet.agents()):
                await fleet.forget(name, force=True)
                await fleet.forget(name, is_revoked=True)
        except errors.MusterError as error:
            self._context.log.warning("agent-not-forgotten", agent=name, error=error)

    async def _enrol(
        self,
        call: server.RpcCall,
        public_key: str,
        machine: str = "",
        name: str = "",
        join: dict[str, Any] | None = None,
    ) -> enrolment.EnrolledMachine:
        request = None if join is None else msgspec.convert(join, admission.JoinRequest)
        try:
            async with self._credentials:
                admitted = await self._enrolment.enrol(call.identity, public_key, machine, name, request)
        except errors.Unavailable:  # a machine that waits for approval repeats its request
            call.audited = False
            raise
        if admitted.replaced:
            # Repeated until the brokers have it: they accept the previous key until then.
            self._context.tasks.loop("revocation", self._publish_revocations)
        return admitted

    async def _publish_revocations(self) -> None:
        running = await asyncio.to_thread(self._context.folder.running)
        if running is not None:
            tls = None
            if running.ca:
                tls = await asyncio.to_thread(certificates.client_tls, self._context.settings)
            await identities.publish_accounts(self._context.trust, running.servers, tls=tls)

    # Forgotten agents

    def _watch_forgotten(self) -> None:
        self._tasks.loop("forgotten agents", self._revoke_forever)

    async def _revoke_forever(self) -> None:
        while True:
            await asyncio.sleep(FORGOTTEN_LOOK_S)
            with contextlib.suppress(errors.Unavailable):
                async with self._credentials:
                    await self._revoke_forgotten()

    async def _revoke_forgotten(self) -> None:
        """End the credentials of forgotten agents that have deleted what they hosted. Until then they need
        them, because only a connected agent receives commands."""
        trust, fleet = self._context.trust, client.ManageClient(self._context.bus)
        for agent in await fleet.forgotten():
            try:
                known = await asyncio.to_thread(trust.show, agent.name)
            except errors.NotFound:  # its key was issued elsewhere
                continue
            if agent.is_empty or known.status == "revoked":
                if agent.name != self._settings.agent_name:  # our own agent returns as a new one
                    await asyncio.to_thread(trust.revoke, agent.name)
                    await self._publish_revocations()
                await fleet.forget(agent.name, is_revoked=True)


def managers_most(manage_settings: settings.ManageSettings) -> int:
    """The managers that this machine may run."""
    return max(manage_settings.managers, min(endpoints.usable_cores(), membership.MANAGERS_MAX))


def _active_ns(pids: Sequence[int], now_s: float) -> dict[int, int]:
    """The time that these processes needed since their start. Blocks."""
    seen = {pid: os_process.activity(pid, now_s) for pid in pids}
    return {pid: sum(of.active_ns.values()) for pid, of in seen.items() if of is not None}


def _manager_names(manage_settings: settings.ManageSettings, count: int) -> list[str]:
    return [f"manager{manage_settings.machine_suffix}-{number}" for number in range(1, count + 1)]


def _names(manage_settings: settings.ManageSettings, managers: int) -> list[str]:
    suffix = manage_settings.machine_suffix
    names = [f"registry{suffix}-{number}" for number in range(1, manage_settings.registries + 1)]
    names += _manager_names(manage_settings, managers)
    return [*names, f"agent-{manage_settings.agent_name}"] if manage_settings.agent else names


def _worker_config(
    context: context_.ComponentContext, manage_settings: settings.ManageSettings, name: str, sensor: str
) -> worker_config.WorkerConfig:
    kind, _, rest = name.partition("-")
    direct = worker_config.DirectPort()
    if kind == "manager":
        number = int(rest.rpartition("-")[2])
        direct = worker_config.direct_port(context, manage_settings.direct_ports, number)
    return worker_config.configure(
        context,
        kind,
        rest if kind == "agent" else name,
        _ROLES[kind],
        {"manage": manage_settings},
        process=name,
        folder=str(context.folder.agent),
        sensor=sensor,
        direct=direct,
        log_share=2 * len(_names(manage_settings, managers_most(manage_settings))),
    )
