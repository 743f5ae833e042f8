"""Parts: what a domain is made of, and in which order they start and stop.

A part is anything with a life of its own: the budget watch, the locator, each of the services.  It names
what it depends on; parts start in that order and stop in the reverse one.  A part says beforehand whether the
domain can go on without it:

- a **vital** part that fails, at the start or later, takes the domain down in order;
- any other is reported as failed, and so is whatever depends on it; the rest goes on.

Work that goes on after ``start`` belongs in ``context.spawn``: the domain ends it at the stop, and its
failure is the part's failure.  Nothing restarts a part here: that is the business of the supervisors below
(a broker's) and of ``manage`` above.
"""

from __future__ import annotations

import asyncio
import functools
import graphlib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from muster.app.components import context as context_
from muster.core import errors, health


@dataclass(frozen=True, slots=True)
class ComponentHealth:
    """How a part is. ``reason`` says what needs looking at; ``facts`` are lists for ``muster status``."""

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
        """When this returns, the part serves."""
        ...

    async def stop(self) -> None:
        """Drain and end. Called once after a `start` that was begun, also if it failed half-way."""
        ...

    def health(self) -> ComponentHealth: ...


def start_order(needs: Mapping[str, Iterable[str]]) -> list[str]:
    """Names so that each comes after all it needs; alphabetical where there is a choice."""
    for name, needed in needs.items():
        for other in needed:
            if other not in needs:
                raise errors.InvalidInput(f"the part {name!r} depends on {other!r}, which is not there")
    sorter = graphlib.TopologicalSorter({name: sorted(needs[name]) for name in sorted(needs)})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        raise errors.InvalidInput(
            f"parts depend on each other in a circle: {' -> '.join(error.args[1])}"
        ) from error
    order: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order += ready
        sorter.done(*ready)
    return order


class ComponentGroup:
    """Starts parts, watches their tasks, stops them."""

    def __init__(
        self,
        parts: Iterable[Component],
        *,
        context_for: Callable[[Component, context_.Spawn], context_.ComponentContext],
        on_failure: Callable[[Component, BaseException], None],
    ) -> None:
        members = list(parts)
        self._parts = {part.name: part for part in members}
        if len(self._parts) != len(members):
            raise errors.InvalidInput("two parts have the same name")
        self._order = start_order({part.name: part.depends_on for part in members})
        self._context_for = context_for
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._begun: list[str] = []
        self._running: set[str] = set()
        self._failed: dict[str, str] = {}

    async def start(self) -> None:
        """Start all of them; raises what a vital one raised, and the caller then stops the team."""
        for name in self._order:
            try:
                await self._start_one(self._parts[name])
            except Exception as error:  # whatever a part raises is the part's failure
                self._fail(name, error)
                if self._parts[name].vital:
                    raise

    async def _start_one(self, part: Component) -> None:
        broken = [other for other in part.depends_on if other in self._failed]
        if broken:
            raise errors.Unavailable(f"it depends on {', '.join(broken)}, which failed")
        self._begun.append(part.name)
        await part.start(self._context_for(part, functools.partial(self._spawn, part.name)))
        self._running.add(part.name)

    async def stop(self) -> None:
        """Stop what was begun, last first. A part that cannot stop is reported; the others still do."""
        for name in reversed(self._begun):
            mine = [task for task, owner in self._tasks.items() if owner == name]
            for task in mine:
                task.cancel()
            await asyncio.gather(*mine, return_exceptions=True)
            try:
                await self._parts[name].stop()
            except Exception as error:  # noqa: BLE001
                self._on_failure(self._parts[name], error)
        self._begun.clear()
        self._running.clear()

    def health(self) -> dict[str, ComponentHealth]:
        return {name: self._health_of(name) for name in self._order}

    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._tasks)

    def _health_of(self, name: str) -> ComponentHealth:
        if name in self._failed:
            return ComponentHealth(health.HealthState.FAILED, self._failed[name])
        if name in self._running:
            return self._parts[name].health()
        return ComponentHealth(
            health.HealthState.STARTING if name in self._begun else health.HealthState.DOWN
        )

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"part {name}")
        self._tasks[task] = name
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        name = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(name, error)

    def _fail(self, name: str, error: BaseException) -> None:
        self._failed[name] = str(error) or type(error).__name__
        self._on_failure(self._parts[name], error)
