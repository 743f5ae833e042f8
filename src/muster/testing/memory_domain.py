"""A domain in memory, for tests of applications: the services themselves, in virtual time.

Its message dispatcher, information node, notifier, registry and manager are those of a real domain. Simulated
are its brokers, and the resources of its agent ``local``. There are no permissions, no pipeline (alerts,
reports, history) and no gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from muster import blocking_connection as blocking
from muster.bus import api
from muster.bus.memory import network
from muster.client import front, synchronous
from muster.inform import settings as inform_settings
from muster.inform.node import node as information_node
from muster.manage import client
from muster.manage.adapters import base, memory
from muster.manage.agent import agent as agent_
from muster.manage.manager import manager
from muster.manage.registry import endpoint
from muster.message.dispatcher import leadership
from muster.notify import settings as notify_settings
from muster.notify.matcher import kernels_numpy
from muster.notify.notifier import notifier
from muster.supervision import tasks
from muster.testing import eventually, virtual_clock

T = TypeVar("T")
PROGRAM = "test"  # the identity of the test's own connection
AGENT = "local"
LEASE_S = 600.0  # no process competes for a lease; renewals cost real time when a test advances
REFRESH_S = 60.0


class MemoryResource(memory.MemoryAdapter):
    """A resource of any type: it is as it was declared."""

    config_type = dict  # type: ignore[assignment]

    async def _do(self, what: str) -> None:
        """It never fails."""


def _memory_type(name: str) -> type[base.Adapter]:
    return type("MemoryResource", (MemoryResource,), {"type_name": name})


class TestedDomain(front.AsyncMuster):
    """The client of a test. In a domain in memory, time passes when all tasks wait."""

    __test__ = False  # for pytest: a class to test with

    def __init__(
        self, bus: api.Bus, *, home: Path | None = None, net: network.SimulatedNetwork | None = None
    ):
        super().__init__(bus, home=home)
        self._net = net

    async def advance(self, seconds: float) -> None:
        """Let this time pass; in a domain in memory, at once."""
        await asyncio.sleep(seconds)

    async def _connect_agent(self, name: str) -> api.Bus:
        if self._net is None:
            return await super()._connect_agent(name)
        bus = await self._net.connect(name)
        self._stack.push_async_callback(bus.close)
        return bus


class BlockingTestedDomain(synchronous.Muster):
    """`TestedDomain` for programs without an event loop. Time passes while a call waits."""

    __test__ = False
    advance = blocking.sync(TestedDomain.advance)

    def close(self) -> None:
        """Stop its handlers and close the connection. The domain goes on."""
        if not self._loop.is_stopped:
            self._loop.wait(self._async.close())


class MemoryDomain:
    """``net``: the simulated network, on which a test can connect more clients, and cut them off."""

    def __init__(self, net: network.SimulatedNetwork) -> None:
        self.net = net
        self._programs = 0

    async def connect(self, *_: object, **__: object) -> TestedDomain:
        """As `front.connect`, for programs that open the domain themselves."""
        self._programs += 1
        name = PROGRAM if self._programs == 1 else f"{PROGRAM}-{self._programs}"
        return TestedDomain(await self.net.connect(name), net=self.net)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[MemoryDomain]:
        connect = self.net.connect
        async with contextlib.AsyncExitStack() as stack:
            dispatchers = leadership.DispatcherLeadership(await connect("dispatcher"), lease_ttl_s=LEASE_S)
            background = tasks.TaskSupervisor("domain in memory")
            stack.push_async_callback(background.close)
            background.spawn("dispatcher", dispatchers.run())
            node = await information_node.start(
                await connect("inform-1"), settings=_INFORM, now_ns=lambda: time.time_ns()
            )
            stack.push_async_callback(node.close)
            notifiers = notifier.Notifier(await connect("notifier"), _NOTIFY, kernels=kernels_numpy)
            await stack.enter_async_context(notifiers)
            registry = endpoint.RegistryEndpoint(
                await connect("registry"), lease_ttl_s=LEASE_S, manager_ttl_s=LEASE_S
            )
            await stack.enter_async_context(registry)
            await stack.enter_async_context(
                manager.Manager(await connect("manager"), clock=lambda: time.time())
            )
            agent = agent_.Agent(
                await connect(AGENT), adapters=_memory_type, types=(), clock=lambda: time.time()
            )
            await stack.enter_async_context(agent)
            await dispatchers.acting.wait()
            await notifiers.serving()
            await registry.acting.wait()
            resources = client.ManageClient(await connect("probe"))
            await eventually.eventually(resources.agents)
            yield self


class LoopThread(blocking.EventLoopThread):
    """The loop of programs that have none. If it is virtual, time stands still unless they wait for it."""

    def __init__(self, *, virtual: bool) -> None:
        self._virtual = virtual_clock.VirtualLoop() if virtual else None
        if self._virtual is not None:
            self._virtual.hold()
        super().__init__(self._virtual)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return super().wait(work if self._virtual is None else self._passing(self._virtual, work))

    async def _passing(self, loop: virtual_clock.VirtualLoop, work: Coroutine[Any, Any, T]) -> T:
        loop.release()
        try:
            return await work
        finally:
            loop.hold()


@contextlib.contextmanager
def virtual_time(loop: virtual_clock.VirtualLoop) -> Iterator[None]:
    """The clocks of the module `time` follow the loop; monotonic ones only inside it."""

    def wall_s() -> float:
        return wall_ns() / 1e9

    def monotonic_s() -> float:
        return loop.time() if asyncio._get_running_loop() is loop else real_s()

    def wall_ns() -> int:
        return virtual_clock.EPOCH_NS + round(loop.time() * 1e9)

    real_s = time.monotonic
    with mock.patch.multiple(time, time=wall_s, time_ns=wall_ns, monotonic=monotonic_s):
        yield


_INFORM = inform_settings.InformSettings(refresh_s=REFRESH_S, lost_after_s=LEASE_S)
_NOTIFY = notify_settings.NotifySettings(lease_s=LEASE_S, beat_s=REFRESH_S)
