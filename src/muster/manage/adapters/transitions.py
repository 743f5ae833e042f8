"""What is started, stopped and checked: the part that processes and containers share.

Starts, stops and restarts of one resource come one at a time, each in a task of its own. So a transition
continues if its operation is cancelled, the next operation waits for it, and a grace period may be longer
than an operation.
"""

from __future__ import annotations

import abc
import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from muster.core import errors, health
from muster.core.telemetry import log
from muster.manage import protocol
from muster.manage.adapters import base, health_checks

events = log.EventLog("manage")


class Transitions:
    def __init__(self, name: str) -> None:
        self._name = name
        self._goal = ""
        self._task: asyncio.Task[None] | None = None

    def is_underway(self, goal: str = "") -> bool:
        """Whether one is under way: any, or one with this goal."""
        return self._task is not None and not self._task.done() and goal in ("", self._goal)

    async def reach(self, goal: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work``, or wait for the current transition if it has the same goal."""
        if not self.is_underway(goal):
            await self.idle()
            self._goal = goal
            self._task = asyncio.create_task(work(), name=f"{goal} {self._name}")
            self._task.add_done_callback(_retrieved)
        assert self._task is not None
        await asyncio.shield(self._task)

    async def idle(self) -> None:
        """Wait for the current transition; its outcome belongs to the operation that started it."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def close(self, *, completes: bool) -> None:
        """End the current transition, or wait until it ``completes``."""
        if self._task is not None:
            if not completes:
                self._task.cancel()
            await asyncio.wait([self._task])


def _retrieved(task: asyncio.Task[None]) -> None:
    """Retrieve the exception of a transition whose operation was cancelled; the state reports it."""
    if not task.cancelled():
        task.exception()


class RunAdapter(base.Adapter):
    """``context.runtime`` contains ``ran``, the generation that the last run was started for."""

    has_hooks = True
    _pid: int | None = None  # of what runs

    def __init__(self, context: base.AdapterContext) -> None:
        super().__init__(context)
        self._transitions = Transitions(context.name)
        self._checking: asyncio.Task[None] | None = None
        self._state = health.HealthState.DOWN
        self._reason = "never started"
        self._exit_code: int | None = None
        self._problem = ""  # why the adapter has just ended it
        self._is_starting = False  # its post_start hook runs

    async def observe(self) -> protocol.ObservedState:
        return self._observed()

    async def do_start(self) -> None:
        await self._transitions.reach("start", self._begin)

    async def do_stop(self) -> None:
        await self._transitions.reach("stop", self._stop)

    async def do_restart(self) -> None:
        await self._transitions.reach("restart", self._restart)

    @abc.abstractmethod
    async def _start(self) -> None: ...

    @abc.abstractmethod
    async def _end(self) -> None:
        """Stop what runs."""

    async def _look(self) -> None:
        """Report its end, if that is not reported as soon as it happens."""

    def _begin_start(self) -> None:
        self._is_starting = bool(self.context.hooks and self.context.hooks.post_start)

    async def _finish_start(self) -> None:
        """It runs: run its hook."""
        if not self._is_starting or self.context.hooks is None:
            return
        problem = await self.run_hook("post_start", self.context.hooks.post_start)
        self._is_starting = False
        await self._look()
        if not self._pid:  # it has ended meanwhile, which is reported
            return
        if problem:
            await self._end()
            self._report(health.HealthState.DOWN, problem)
            raise errors.Refused(f"{self.context.name}: {problem}")
        self._restart_checks()

    async def _stop(self) -> None:
        hooks = self.context.hooks if self._pid else None
        if hooks is not None and (problem := await self.run_hook("pre_stop", hooks.pre_stop)):
            events.warning("hook-failed", resource=self.context.name, problem=problem)
            self.context.report_event("hook-failed", problem=problem)
        await self._end()

    async def _restart(self) -> None:
        await self._stop()
        await self._begin()

    async def _begin(self) -> None:
        try:
            await self._start()
        finally:
            self._is_starting = False

    def _record_generation(self) -> None:
        """The current or next run is for the generation of the last call."""
        self.context.runtime["ran"] = max(self.context.runtime.get("ran", 0), self.context.generation)

    def _report(self, state: health.HealthState, reason: str) -> None:
        if self._is_starting and state is health.HealthState.UP:
            state, reason = health.HealthState.STARTING, "its post_start hook runs"
        self._state, self._reason = state, reason
        self.context.report_state(self._observed())

    def _observed(self) -> protocol.ObservedState:
        properties = self._properties()
        if self._exit_code is not None:
            properties["exit_code"] = self._exit_code
        return protocol.ObservedState(
            self._config is not None,
            self._state,
            self._reason,
            properties=properties,
            ran=self.context.runtime.get("ran", 0),
        )

    @abc.abstractmethod
    def _properties(self) -> dict[str, Any]: ...

    # Checks of a run

    @abc.abstractmethod
    async def _probe(self, check: health_checks.HealthCheck) -> str | None:
        """As `health_checks.find_problem`."""

    @abc.abstractmethod
    def _end_failed(self) -> None:
        """It runs and does not work: end it, so that its manager restarts it."""

    def _running_state(self) -> tuple[health.HealthState, str]:
        """The state of what runs, if no health check is configured."""
        return health.HealthState.UP, ""

    def _stop_checks(self) -> None:
        if self._checking is not None:
            self._checking.cancel()

    def _restart_checks(self) -> None:
        self._stop_checks()
        self._problem = ""
        check: health_checks.HealthCheck = self._require().health
        if check.kind == "exit":
            self._report(*self._running_state())
            return
        self._report(health.HealthState.STARTING, "not checked yet")
        watch = functools.partial(
            health_checks.watch,
            check,
            name=self.context.name,
            probe=functools.partial(self._probe, check),
            state=lambda: (self._state, self._reason),
            report=self._report,
            has_failed=self._has_failed,
        )
        self._checking = self.tasks.loop("check", watch)

    def _has_failed(self, problem: str) -> None:
        self._problem = problem
        self._end_failed()

    def _ending(self, reason: str) -> str:
        """Why it has ended: ``reason``, or the problem for which it was ended."""
        if self._problem:
            reason, self._problem = f"ended because its health check failed: {self._problem}", ""
        return reason

    async def _end_tasks(self) -> None:
        tasks = [task for task in (self._watching, self._checking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watching = self._checking = None
