"""A component whose work is done by processes of its own, which the process of the domain supervises.

The domain opens the socket of a server and passes it on, so the address is known at once and stays the same
after a restart, and clients that connect meanwhile wait instead of being refused. Several processes listen on
one port themselves: the kernel distributes the clients among those that live.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.app import settings
from muster.app.components import component
from muster.app.components import context as context_
from muster.app.supervisor import child_component, endpoints
from muster.core import errors, health
from muster.supervision import children

START_S, LOOK_S = 60.0, 0.1


@dataclass(frozen=True, slots=True)
class Supervision:
    """How the processes of a component are run. ``check`` raises what the settings or the installation lack
    before one is started. ``facts``: for ``muster status``, from its URL. ``sharing``: the settings of each
    of several processes that share a port."""

    name: str
    check: Callable[[], None] = lambda: None
    prepare: Callable[[context_.ComponentContext], None] = lambda _: None
    endpoint: endpoints.Endpoint | None = None
    facts: Callable[[str], Mapping[str, Any]] = lambda _: {}
    processes: int = 1
    sharing: Callable[[int], settings.Settings] | None = None
    log_share: int = 8
    stop_s: float = children.STOP_S
    restart_after_success: bool = True
    probe_policy: children.ProbePolicy = field(default=child_component.PROBE_POLICY)


class SupervisedComponent:
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, supervision: Supervision) -> None:
        self.name = supervision.name
        self._supervision = supervision
        self._socket: socket.socket | None = None
        self._children: list[child_component.ChildComponent] = []
        self._missing = ""  # a package

    @property
    def url(self) -> str:
        """Where it serves."""
        endpoint = self._supervision.endpoint
        return "" if endpoint is None or self._socket is None else endpoint.url(self._socket)

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children if child.pid is not None]

    async def start(self, context: context_.ComponentContext) -> None:
        plan = self._supervision
        try:
            await asyncio.to_thread(plan.check)
        except errors.MissingDependency as error:
            if context.in_domain is None:
                raise
            # The rest of the domain works without it.
            self._missing = f"{error.message}: {error.hint}"
            context.log.warning("package-missing", reason=self._missing)
            return
        plan.prepare(context)
        if plan.endpoint is not None:
            open_socket = plan.endpoint.listen if plan.processes == 1 else plan.endpoint.reserve
            self._socket = await asyncio.to_thread(open_socket)
        for number in range(plan.processes):
            name = plan.name if plan.processes == 1 else f"{plan.name}-{number + 1}"
            child = child_component.ChildComponent(
                name,
                log_share=plan.log_share * plan.processes,
                stop_s=plan.stop_s,
                restart_after_success=plan.restart_after_success,
                probe_policy=plan.probe_policy,
            )
            self._children.append(child)
            self._start_child(context, child, name)
        if plan.processes > 1:
            context.metrics.gauge(
                f"{plan.name}_processes", "Number of processes that serve the port."
            ).read_from(lambda: float(self._running))
        if context.in_domain is None:  # as other components that a user runs, it serves from here on
            await self._wait_until_up()

    async def _wait_until_up(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                while not self.health().is_working:
                    if ended := next((child.reason for child in self._children if child.reason), ""):
                        raise errors.Unavailable(f"a process of {self.name} {ended}")
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise errors.TimedOut(f"{self.name} did not start within {START_S:g} s") from error

    def _start_child(
        self,
        context: context_.ComponentContext,
        child: child_component.ChildComponent,
        name: str,
    ) -> None:
        changes: dict[str, Any] = {"process": name}
        fds: tuple[int, ...] = ()
        plan = self._supervision
        if self._socket is not None and plan.processes == 1:
            fds = (self._socket.fileno(),)
            changes["listener"] = fds[0]
        elif self._socket is not None and plan.sharing is not None:
            changes["settings"] = plan.sharing(self._socket.getsockname()[1])
        child.start(context, lambda: context.config(self.name, **changes), pass_fds=fds)

    @property
    def _running(self) -> int:
        return sum(child.state is children.ChildState.RUNNING for child in self._children)

    async def stop(self) -> None:
        await asyncio.gather(*(child.stop() for child in self._children))
        if self._socket is not None:
            self._socket.close()
        self._children, self._socket = [], None

    def health(self) -> component.ComponentHealth:
        if self._missing:
            return component.ComponentHealth(health.HealthState.DOWN, self._missing)
        if not self._children:
            return component.ComponentHealth(health.HealthState.STARTING)
        facts = self._supervision.facts(self.url)
        if all(child.state is children.ChildState.FINISHED for child in self._children):
            return component.ComponentHealth(health.HealthState.DOWN, "stopped on request", facts)
        waits = self._socket is not None and self._supervision.processes == 1
        for child in self._children:
            report = child.health()
            up = {health.HealthState.UP, *([health.HealthState.STARTING] if waits else [])}
            if report.state in up:  # while it starts, connections wait
                continue
            state = report.state
            if self._socket is not None and state is not health.HealthState.STARTING:
                looping = child.is_crash_looping
                state = health.HealthState.FAILED if looping else health.HealthState.LATE
            return component.ComponentHealth(state, report.reason, facts)
        return component.ComponentHealth(facts=facts)
