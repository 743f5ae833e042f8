"""Components of a domain, and the order in which they start and stop.

A component has its own lifecycle: the retention monitor, the locator, each of the services. It names its
dependencies; components start in that order and stop in the reverse order. A component declares whether the
domain can work without it:

- If a **vital** component fails, at the start or later, the domain stops.
- Any other component is reported as failed, and so are its dependants; the rest continues. One that failed at
  its start is started again, with growing delays.

A component whose attribute ``forks`` is true starts processes with the fork server of the domain.

Work that continues after ``start`` belongs in ``context.tasks``: the domain ends it at the stop. A failed
loop is restarted, and the component is late meanwhile; a failure that is declared fatal is the failure of the
component, which nothing restarts here.
"""

from __future__ import annotations

import asyncio
import functools
import graphlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from muster.app.components import context as context_
from muster.core import errors, health
from muster.supervision import tasks

RETRY_S, RETRY_S_MAX = 1.0, 60.0  # until a failed start is repeated; doubled each time


@dataclass(frozen=True, slots=True)
class ComponentHealth:
    """The health of a component. ``reason`` names what needs attention; ``facts`` are lists for ``muster
    status``.
    """

    state: health.HealthState = health.HealthState.UP
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_working(self) -> bool:
        return self.state is health.HealthState.UP


class Component(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def depends_on(self) -> Sequence[str]: ...
    @property
    def vital(self) -> bool: ...
    async def start(self, context: context_.ComponentContext) -> None:
        """The component serves when this returns."""
        ...

    async def stop(self) -> None:
        """Drain and stop. Called once after a `start` that was begun, also if it failed half-way; another
        `start` may follow."""
        ...

    def health(self) -> ComponentHealth: ...


def start_order(needs: Mapping[str, Iterable[str]]) -> list[str]:
    """Names so that each follows its dependencies; alphabetical where there is a choice."""
    for name, needed in needs.items():
        for other in needed:
            if other not in needs:
                raise errors.InvalidInput(
                    f"the component {name!r} depends on {other!r}, which does not exist"
                )
    sorter = graphlib.TopologicalSorter({name: sorted(needs[name]) for name in sorted(needs)})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        raise errors.InvalidInput(
            f"the dependencies of components form a cycle: {' -> '.join(error.args[1])}"
        ) from error
    order: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order += ready
        sorter.done(*ready)
    return order


class ComponentGroup:
    """Starts components, monitors their tasks, stops them."""

    def __init__(
        self,
        components: Iterable[Component],
        *,
        context_for: Callable[[Component, tasks.TaskSupervisor], context_.ComponentContext],
        on_failure: Callable[[Component, BaseException], None],
    ) -> None:
        members = list(components)
        self._members = {member.name: member for member in members}
        if len(self._members) != len(members):
            raise errors.InvalidInput("two components have the same name")
        self._order = start_order({member.name: member.depends_on for member in members})
        self._context_for = context_for
        self._on_failure = on_failure
        self._tasks = {
            name: tasks.TaskSupervisor(f"component {name}", on_fatal=functools.partial(self._fatal, name))
            for name in self._members
        }
        self._begun: list[str] = []
        self._running: set[str] = set()
        self._failed: dict[str, str] = {}
        self._retries = tasks.TaskSupervisor("failed components")

    async def start(self) -> None:
        """Start all components; raises the error of a vital one, and the caller then stops the group."""
        for name in self._order:
            try:
                await self._start_one(self._members[name])
            except Exception as error:  # any exception is the failure of the component
                self._fail(name, error)
                if self._members[name].vital:
                    raise

    def retry_failed(self, on_start: Callable[[], Awaitable[None]]) -> None:
        """Repeat failed starts in the background until all components run. ``on_start`` is called after each
        that succeeds."""
        if self._failed:
            self._retries.loop("starts", functools.partial(self._retry, on_start))

    async def _retry(self, on_start: Callable[[], Awaitable[None]]) -> None:
        wait_s = RETRY_S
        while waiting := [name for name in self._order if name not in self._running]:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_S_MAX)
            for name in waiting:  # in the order of the start, so a dependant follows at once
                await self._stop_one(name)
                try:
                    await self._start_one(self._members[name])
                except Exception as error:  # noqa: BLE001
                    self._fail(name, error)
                else:
                    del self._failed[name]
                    await on_start()

    async def _start_one(self, component: Component) -> None:
        broken = [other for other in component.depends_on if other in self._failed]
        if broken:
            raise errors.Unavailable(f"depends on {', '.join(broken)}, which failed")
        self._begun.append(component.name)
        await component.start(self._context_for(component, self._tasks[component.name]))
        self._running.add(component.name)

    async def stop(self) -> None:
        """Stop in reverse order. A component that cannot stop is reported; the others still stop."""
        await self._retries.close()
        for name in reversed(list(self._begun)):
            await self._stop_one(name)
        self._running.clear()

    async def _stop_one(self, name: str) -> None:
        if name not in self._begun:
            return
        await self._tasks[name].close()
        try:
            await self._members[name].stop()
        except Exception as error:  # noqa: BLE001
            self._on_failure(self._members[name], error)
        self._begun.remove(name)

    @property
    def last_begun(self) -> str:
        """The component that a stop of the group waits for; empty after the last one."""
        return self._begun[-1] if self._begun else ""

    def health(self) -> dict[str, ComponentHealth]:
        return {name: self._health_of(name) for name in self._order}

    def _health_of(self, name: str) -> ComponentHealth:
        if name in self._failed:
            return ComponentHealth(health.HealthState.FAILED, self._failed[name])
        if name in self._running:
            reported, problem = self._members[name].health(), self._tasks[name].problem()
            if problem is not None and reported.is_working:
                return ComponentHealth(health.HealthState.LATE, problem, reported.facts)
            return reported
        return ComponentHealth(
            health.HealthState.STARTING if name in self._begun else health.HealthState.DOWN
        )

    def _fatal(self, name: str, error: Exception) -> None:
        self._tasks[name].fatal = None  # shown as the failure of the component
        self._fail(name, error)

    def _fail(self, name: str, error: BaseException) -> None:
        reason = str(error) or type(error).__name__
        if self._failed.get(name) != reason:  # a start that fails again is reported once
            self._failed[name] = reason
            self._on_failure(self._members[name], error)
