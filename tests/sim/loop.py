"""The event loop of a simulation: virtual time, and processes that can be frozen and killed.

Every callback belongs to the process in whose context it was scheduled (`CURRENT`).  The callbacks of a
frozen process wait until it continues, as those of a process after SIGSTOP; timers that became due meanwhile
are then late.  The callbacks of a killed process never run, as after SIGKILL: no ``finally``, no ``except``.

Nothing here depends on addresses or threads.  Tasks and futures have numbers as hashes, so sets of them have
the same order in every run, and work for threads is done by the loop itself, after the delay of the disk.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import math
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

from muster.testing import virtual_clock
from tests.sim import process as process_

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Handle(asyncio.Handle):
    process: process_.Process | None = None

    def _run(self) -> None:
        if not _waits(self, self.process):
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    process: process_.Process | None = None

    def _run(self) -> None:
        if not _waits(self, self.process):
            super()._run()


def _waits(handle: asyncio.Handle, process: process_.Process | None) -> bool:
    if process is None or process.runs:
        return False
    if not process.killed:
        process.waiting.append(handle)
    return True


class _Numbered:
    """Hashed by the order of creation."""

    numbers = itertools.count()
    _number: int

    def __new__(cls, *_: Any, **__: Any) -> Any:
        made = super().__new__(cls)
        made._number = next(_Numbered.numbers)
        return made

    def __hash__(self) -> int:
        return self._number


class _Task(_Numbered, asyncio.Task):  # type: ignore[type-arg]
    pass


class _Future(_Numbered, asyncio.Future):  # type: ignore[type-arg]
    pass


class SimulatedLoop(virtual_clock.VirtualLoop):
    simulates = True  # time, for `entropy`

    def __init__(self) -> None:
        super().__init__()
        _Numbered.numbers = itertools.count()  # a run does not depend on those before it
        self.set_task_factory(self._make_task)
        self._last_work_s: dict[Executor, float] = {}
        self.failures: list[str] = []  # exceptions that no code handled
        self.set_exception_handler(self._on_exception)

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        context = options.get("context")
        task = _Task(work, loop=loop, **options)
        process = process_.CURRENT.get() if context is None else context.get(process_.CURRENT)
        if process is not None:
            process.tasks.add(task)
            task.add_done_callback(process.tasks.discard)
        return task

    def _on_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    def create_future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = _Future(loop=self)
        return future

    # Callbacks belong to processes.

    def _call_soon(
        self, callback: Callable[..., object], args: Any, context: contextvars.Context | None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        handle.process = process_.CURRENT.get() if context is None else context.get(process_.CURRENT)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = _TimerHandle(when, callback, args, self, context)
        timer.process = process_.CURRENT.get() if context is None else context.get(process_.CURRENT)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def freeze(self, process: process_.Process) -> None:
        process.frozen = True

    def thaw(self, process: process_.Process) -> None:
        process.frozen = False
        if not process.killed:
            self._ready.extend(process.waiting)  # type: ignore[attr-defined]
        process.waiting.clear()

    def kill(self, process: process_.Process) -> None:
        process.killed = True
        process.waiting.clear()

    # Threads.

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Call ``func`` after the delay of the disk, in the loop's own thread."""
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as error:  # noqa: BLE001  (passed to the caller)
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        process = process_.CURRENT.get()
        at_s = self.time() + (process.disk_delay_s() if process is not None else 0.0)
        if executor is not None and getattr(executor, "_max_workers", 0) == 1:  # one after another
            at_s = max(at_s, math.nextafter(self._last_work_s.get(executor, 0.0) + 1e-9, math.inf))
            self._last_work_s[executor] = at_s
        self.call_at(at_s, work)
        return future

    # The end.

    def power_off(self) -> None:
        """End all processes at once, and the loop."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.close()
