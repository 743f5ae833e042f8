"""Supervised background tasks: none ends unnoticed.

    tasks = TaskSupervisor(f"manager {name}", on_fatal=self._stop_because)
    tasks.loop("renewal", self._renew_always)                      # restarted after an exception
    tasks.loop("query", self._run_query, on_failure=OnFailure.FATAL)
    tasks.spawn("reply", self._reply(message))                     # ends by itself
    ...
    await tasks.close()

Every exception is logged and counted (`failures`).  A loop is declared `RESTART` or `FATAL`.  A restarted
loop waits longer after each failure (`muster.core.backoff`), and `problem` names it until it has
run for the policy's window without another failure.  A fatal failure stays in `problem` and is passed to
``on_fatal``, which ends the service or its process.  A task of `spawn` that fails is over: it is logged and
counted only.

`problems` lists the problems of all supervisors of the process.  `muster.bus.http.health` shows them in
``/readyz`` and the counts of `failures` in ``/metrics``.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from muster.core import backoff, errors
from muster.core.telemetry import log

events = log.EventLog("tasks")

T = TypeVar("T")

#: A loop is restarted without limit: its owner decides whether the service can work without it.
POLICY = backoff.BackoffPolicy(crashes_max=None)
CANCEL_AGAIN_S = 0.1
CLEANUP_S = 30.0  # for the cleanup of a cancelled task

_supervisors: weakref.WeakSet[TaskSupervisor] = weakref.WeakSet()
_failures: Counter[tuple[str, ...]] = Counter()


class OnFailure(enum.Enum):
    RESTART = "restart"
    FATAL = "fatal"


class TaskSupervisor:
    """``owner`` names the service in logs. ``on_fatal`` is called once, with the first fatal error.
    ``handles`` is called with the error of a task; True: the owner has handled it, so it does not count as a
    failure, and the task or loop has ended."""

    def __init__(
        self,
        owner: str,
        *,
        on_fatal: Callable[[Exception], None] | None = None,
        handles: Callable[[BaseException], bool] | None = None,
        policy: backoff.BackoffPolicy = POLICY,
    ) -> None:
        self.owner = owner
        self.failures: Counter[str] = Counter()  # by the name of the task
        self.fatal: Exception | None = None
        self._on_fatal = on_fatal
        self._handles = handles
        self._policy = policy
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in the order in which they began
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}  # loops that run at the moment
        self._injected: dict[asyncio.Task[None], Exception] = {}
        self._problems: dict[str, tuple[str, float]] = {}  # by loop: the last failure and its time
        self._is_listed = False  # in `_supervisors`

    def loop(
        self,
        name: str,
        run: Callable[[], Awaitable[None]],
        *,
        on_failure: OnFailure = OnFailure.RESTART,
    ) -> asyncio.Task[None]:
        """Run ``run`` until `close`, with restarts. A ``run`` that returns has finished its work and is not
        restarted."""
        task = asyncio.get_running_loop().create_task(
            self._supervise(name, run, on_failure), name=f"{self.owner}: {name}"
        )
        self._loops[name] = task
        self._add(task, functools.partial(self._forget, name))
        return task

    def spawn(
        self, name: str, work: Coroutine[Any, Any, T], *, on_failure: OnFailure | None = None
    ) -> asyncio.Task[T]:
        """Run ``work`` once. Its failure is fatal if so declared; it is never restarted."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.owner}: {name}")
        fatal = on_failure is OnFailure.FATAL
        self._add(task, self._report_fatal if fatal else self._report)
        return task

    @property
    def loops(self) -> tuple[str, ...]:
        """Names of the loops that are running or waiting to be restarted."""
        return tuple(self._loops)

    @property
    def pending(self) -> int:
        """Tasks that have not ended, loops included."""
        return len(self._tasks)

    def problem(self) -> str | None:
        """The current problem, for health pages; None while all loops run."""
        if self.fatal is not None:
            return f"{self.owner}: {_text(self.fatal)}"
        now = asyncio.get_running_loop().time()
        for name, (reason, at) in list(self._problems.items()):
            if now - at > self._policy.window_s and name in self._runs:
                del self._problems[name]
            else:
                return f"{self.owner}: {name} failed: {reason}"
        return None

    def record_failure(self, name: str, error: Exception) -> None:
        """Log, count and show an error that a loop handled: one failed iteration of a loop that continues."""
        self._count_failure(name)
        events.error("task-failed", owner=self.owner, task=name, error=error)
        self._problems[name] = (_text(error), asyncio.get_running_loop().time())

    def inject(self, name: str, error: Exception) -> None:
        """Fail the current run of a loop with ``error``, as drills and tests do."""
        task = self._runs[name]
        self._injected[task] = error
        task.cancel()

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancel all tasks without waiting for their end; returns them."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            if not task.cancelling():  # a second cancellation would interrupt its cleanup
                task.cancel()
        return tasks

    async def wait_idle(self, timeout_s: float | None = None) -> None:
        """Wait until all tasks have ended by themselves."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Cancel all tasks and wait for their end.

        A cancellation can be lost: a time-out that expires at the same moment takes it for its own, and
        `asyncio.wait_for` returns a result that arrives at the same moment. Tasks that continue are therefore
        cancelled again: at once if they show no cancellation, otherwise after `CLEANUP_S`.
        """
        left, again_in_s = set(self.cancel()), CLEANUP_S
        while left:
            _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
            again_in_s -= CANCEL_AGAIN_S
            for task in left:
                if not task.cancelling() or again_in_s <= 0:
                    task.cancel()
        self._problems.clear()
        _supervisors.discard(self)
        self._is_listed = False

    def _add(self, task: asyncio.Task[Any], on_end: Callable[[asyncio.Task[Any]], None]) -> None:
        """``on_end`` is the only callback of the task: a service spawns one for each message, and each
        callback is an entry in the queue of the event loop."""
        if not self._is_listed:
            _supervisors.add(self)
            self._is_listed = True
        self._tasks[task] = None
        task.add_done_callback(on_end)

    def _forget(self, name: str, ended: asyncio.Task[None]) -> None:
        self._tasks.pop(ended, None)
        if self._loops.get(name) is ended:
            del self._loops[name]
            self._problems.pop(name, None)

    async def _supervise(self, name: str, run: Callable[[], Awaitable[None]], on_failure: OnFailure) -> None:
        clock = asyncio.get_running_loop().time
        crashes = backoff.CrashHistory(self._policy)
        while True:
            crashes.started(clock())
            error = await self._run_once(name, run)
            if error is None or (self._handles is not None and self._handles(error)):
                return
            self._count_failure(name)
            if on_failure is OnFailure.FATAL:
                events.error("task-failed", owner=self.owner, task=name, fatal=True, error=error)
                self._fail(error)
                return
            delay_s = crashes.crashed(clock()) or 0.0
            events.error("task-failed", owner=self.owner, task=name, restart_s=delay_s, error=error)
            self._problems[name] = (_text(error), clock())
            await asyncio.sleep(delay_s)

    async def _run_once(self, name: str, run: Callable[[], Awaitable[None]]) -> Exception | None:
        """The error of a run. It is part of the task of the loop: a cancelled loop does nothing further."""
        task = asyncio.current_task()
        assert task is not None
        self._runs[name] = task
        try:
            await run()
        except asyncio.CancelledError:
            injected = self._injected.pop(task, None)
            if injected is not None:
                task.uncancel()
                return injected
            if task.cancelling():
                raise
            return _foreign_cancellation()
        except Exception as error:  # noqa: BLE001  (every exception is logged, counted and shown)
            return error
        finally:
            if self._runs.get(name) is task:
                del self._runs[name]
        return None

    def _report_fatal(self, ended: asyncio.Task[Any]) -> None:
        self._report(ended, is_fatal=True)

    def _report(self, ended: asyncio.Task[Any], *, is_fatal: bool = False) -> None:
        self._tasks.pop(ended, None)
        error: BaseException | None
        if not ended.cancelled():
            error = ended.exception()
        else:
            error = None if ended.cancelling() else _foreign_cancellation()
        if error is None:
            return
        if self._handles is not None and self._handles(error):
            return
        name = ended.get_name().removeprefix(f"{self.owner}: ")
        self._count_failure(name)
        events.error("task-failed", owner=self.owner, task=name, error=error)
        if is_fatal and isinstance(error, Exception):
            self._fail(error)

    def _count_failure(self, name: str) -> None:
        self.failures[name] += 1
        _failures[self.owner, name] += 1

    def _fail(self, error: Exception) -> None:
        if self.fatal is None:
            self.fatal = error
            if self._on_fatal is not None:
                self._on_fatal(error)


def _foreign_cancellation() -> errors.MusterError:
    """A task ended with the cancellation of something it awaited: a failure, since it was not cancelled."""
    return errors.InvariantViolation("something that this task awaited was cancelled, but not the task")


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which runs to its end even if the caller is cancelled: a clean-up that must be
    complete. The cancellation takes effect afterwards, and a failure is only logged then."""
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is None:
        return task.result()
    if not task.cancelled() and (failure := task.exception()) is not None:
        events.error("failed-after-cancellation", error=failure)
    raise cancellation


def problems() -> list[str]:
    """The problems of all supervisors of this process, for its health page."""
    reports = (supervisor.problem() for supervisor in list(_supervisors))
    return sorted(problem for problem in reports if problem is not None)


def failures() -> Counter[tuple[str, ...]]:
    """Failures since the start of this process, by owner and task; those of closed supervisors too."""
    return _failures.copy()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
