"""Time under the control of tests: an event loop that never waits, and a settable clock.

`VirtualLoop` is an asyncio event loop whose `time` stands still while anything is ready to run, and jumps to
the next timer otherwise. An hour of heartbeats takes as long as its callbacks, and the order of events
depends on nothing outside the program, so a seeded simulation is reproducible.

Not supported: sockets, pipes and child processes. They use real time, and virtual time would overtake them
(every timeout would fire before the first byte arrived). Threads are supported only through `run_in_executor`
and `asyncio.to_thread`: while one works, time stands still.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

from muster.core import errors

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EPOCH_NS = 1_700_000_000_000_000_000  # where fake clocks begin: a fixed time, so that runs are equal
LOOP_RESOLUTION_S = 1e-9  # asyncio fires a timer this much early


class VirtualTimeDeadlock(errors.MusterError):
    """All tasks wait and no event can occur: in real time this test would hang."""

    code = "stuck"


class _VirtualSelector(selectors.SelectSelector):
    """Advances time where the loop would wait for I/O."""

    # The loop's own wake-up pipe is the only file it may watch; it is registered first.
    _allowed = 1

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.threads_at_work = 0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if len(self.get_map()) >= self._allowed:
            raise errors.InvalidInput(
                "a socket or pipe was opened in virtual time",
                hint="use the simulated network, or leave out the virtual_time marker",
            )
        return super().register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self.threads_at_work:
            return super().select(None)
        if timeout is None:
            raise VirtualTimeDeadlock("deadlock: every task waits, no timer is set, and no thread is running")
        self.now_s += timeout
        if (
            math.ulp(self.now_s) > LOOP_RESOLUTION_S
        ):  # at large times, the loop would not see its timer as due
            self.now_s = math.nextafter(self.now_s, math.inf)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def hold(self) -> None:
        """Time stands still until `release`, as while a thread works."""
        self._virtual.threads_at_work += 1

    def release(self) -> None:
        self._virtual.threads_at_work -= 1

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self.hold()
        future.add_done_callback(lambda _: self.release())
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        self.hold()  # it waits for its own thread
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self.release()


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class FakeClock:
    """A wall clock for code that accepts one.

    Under a `VirtualLoop` it follows the loop; ``advance`` and ``step_back`` move it in addition.
    """

    def __init__(self, start_ns: int = EPOCH_NS) -> None:
        self._offset_ns = start_ns

    def time_ns(self) -> int:
        return self._offset_ns + self._loop_ns()

    def time(self) -> float:
        return self.time_ns() / 1e9

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise errors.InvalidInput("advance needs a positive number", hint="use step_back(seconds)")
        self._offset_ns += round(seconds * 1e9)

    def step_back(self, seconds: float) -> None:
        """As an operator or a faulty time server does."""
        self._offset_ns -= round(seconds * 1e9)

    @staticmethod
    def _loop_ns() -> int:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return 0
        return round(loop.time() * 1e9) if isinstance(loop, VirtualLoop) else 0
