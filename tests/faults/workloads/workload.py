"""What workloads have in common: clients on every broker, and operations that end in the history."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar

from muster.bus.client import client as bus_client
from muster.core import errors
from tests.faults import deployment as deployment_
from tests.faults import history
from tests.sim import history as sim_history

Client = bus_client.NatsBus

PACE_S = 0.1
TIMEOUT_S = 15.0
PATIENCE_S = 60.0
UNMEASURED = "background"  # the actor of operations that do not count for the availability


class Workload(abc.ABC):
    """``measured``: the actions whose success shows that the service is available. ``guarantee``: for the
    table."""

    name: ClassVar[str]
    guarantee: ClassVar[str]
    measured: ClassVar[tuple[str, ...]]

    def __init__(self, deployment: deployment_.Deployment, story: history.StoredHistory, tag: str) -> None:
        self.deployment = deployment
        self.history = story
        self.tag = tag  # of the run: names are its own
        self.chance = random.Random(f"{tag}/{self.name}")
        self.stack = contextlib.AsyncExitStack()
        self.stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @abc.abstractmethod
    async def start(self) -> None: ...

    async def finish(self) -> None:  # noqa: B027  (optional)
        """After the load: read what can be read only now."""

    async def stop(self) -> None:
        """End the load: operations that have begun are completed."""
        self.stopping.set()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                self.history.event(self.name, "failure", error=f"{type(outcome).__name__}: {outcome}")
        self._tasks.clear()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.stack.aclose()

    async def connect(self, role: str, number: int) -> Client:
        bus = await self.deployment.connect(f"{role}-{number}", number - 1)
        self.stack.push_async_callback(bus.close)
        return bus

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def repeat(self, attempt: Callable[[], Awaitable[object]], pace_s: float = PACE_S) -> None:
        while not self.stopping.is_set():
            await attempt()
            await asyncio.sleep(pace_s)  # pace

    async def operate(
        self,
        operation: sim_history.Operation,
        work: Awaitable[Any],
        result: Callable[[Any], Any] = lambda _: None,
        *,
        unknown: type[errors.MusterError] = errors.TimedOut,
    ) -> Any:
        """Await ``work`` and record its outcome. None if it failed."""
        try:
            returned = await work
        except unknown as error:
            self.history.end(operation, "unknown", str(error))
        except errors.MusterError as error:
            self.history.end(operation, error.code, str(error))
        else:
            self.history.end(operation, "ok", result(returned))
            return returned
        return None


async def patiently(work: Callable[..., Awaitable[Any]], *arguments: Any, **options: Any) -> Any:
    """Repeat until it succeeds: at the beginning and the end of a run."""
    deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        try:
            return await work(*arguments, **options)
        except errors.MusterError:
            if asyncio.get_running_loop().time() > deadline_s:
                raise
            await asyncio.sleep(PACE_S)  # pace


async def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it became true in that time."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while True:
        if condition():
            return True
        if asyncio.get_running_loop().time() > deadline_s:
            return False
        await asyncio.sleep(PACE_S)  # pace
