"""The fixtures, for tests with pytest-asyncio in either of its modes.

domain          `memory_domain.TestedDomain`: a client of a domain in memory, or of a real one
blocking_domain the same for programs without an event loop
broker          a new broker with durable storage, on free ports, in its own folder
cluster         three brokers in a mesh
start_process   starts child processes; they end with the test, and a failure shows their output
fake_clock      a wall clock under the control of the test
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from muster.bus.brokers import broker as brokers
from muster.bus.brokers import config as broker_config
from muster.bus.brokers import network
from muster.bus.client import client
from muster.bus.memory import network as simulation
from muster.testing import child_process, failure_logs, plugin, virtual_clock

if TYPE_CHECKING:
    from muster.testing import memory_domain

TASK_GRACE_S = 0.25

Connect = Callable[..., Awaitable[client.NatsBus]]
StartProcess = Callable[..., Awaitable[child_process.ChildProcess]]


@pytest_asyncio.fixture
async def broker(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[brokers.Broker]:
    """A new broker with durable storage, which syncs before it acknowledges, as in production."""
    settings = broker_config.BrokerConfig(name="broker", directory=tmp_path / "broker")
    async with brokers.Broker(settings) as started:
        failure_logs.attach_file(request.node, "log of broker", settings.log_path)
        yield started


@pytest_asyncio.fixture
async def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[network.BrokerNetwork]:
    """Three brokers in a mesh, with a leader for their storage."""
    async with network.mesh(3, tmp_path) as mesh:
        for member in mesh.brokers.values():
            failure_logs.attach_file(request.node, f"log of {member.name}", member.config.log_path)
        yield mesh


@pytest_asyncio.fixture
async def connect(broker: brokers.Broker) -> AsyncIterator[Connect]:
    """Connections to ``broker``, or to the given addresses; closed when the test ends."""
    async with contextlib.AsyncExitStack() as connections:

        async def make(identity: str = "test", *servers: str) -> client.NatsBus:
            made = await client.connect(servers or (broker.url,), identity=identity)
            connections.push_async_callback(made.close)
            return made

        yield make


@pytest_asyncio.fixture
async def bus(connect: Connect) -> client.NatsBus:
    """A connection to ``broker``."""
    return await connect()


@pytest.fixture
def simulated_network(request: pytest.FixtureRequest) -> simulation.SimulatedNetwork:
    """The simulated bus. Each test has its own seed; ``--muster-seed`` overrides it."""
    chosen: int | None = request.config.getoption("muster_seed")
    seed = zlib.crc32(request.node.nodeid.encode()) if chosen is None else chosen
    failure_logs.attach(request.node, "simulated network", lambda: f"replay with --muster-seed={seed}")
    return simulation.SimulatedNetwork(seed)


@contextlib.asynccontextmanager
async def _opened(
    config: pytest.Config, net: simulation.SimulatedNetwork, patch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Coroutine[Any, Any, memory_domain.TestedDomain]]]:
    """A function that connects to the domain of a test, also in place of `front.connect`."""
    from muster.client import front
    from muster.testing import memory_domain

    real, connect_really, loop = plugin.real_domain(config), front.connect, asyncio.get_running_loop()

    async def connect(*_: object, **__: object) -> memory_domain.TestedDomain:
        opened = await connect_really(**real)
        return memory_domain.TestedDomain(opened.bus, home=opened.home)

    async with contextlib.AsyncExitStack() as stack:
        if not real:
            if not isinstance(loop, virtual_clock.VirtualLoop):
                pytest.fail("a domain in memory needs pytest-asyncio 1.4 or later, and a loop for each test")
            stack.enter_context(memory_domain.virtual_time(loop))
            connect = (await stack.enter_async_context(memory_domain.MemoryDomain(net).running())).connect
        patch.setattr(front, "connect", connect)
        yield connect


@pytest_asyncio.fixture
async def domain(
    request: pytest.FixtureRequest,
    simulated_network: simulation.SimulatedNetwork,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[memory_domain.TestedDomain]:
    """A client of a domain in memory, in virtual time; with ``--muster-domain`` of a real one. What the test
    calls opens the same domain with `muster.open_async`."""
    async with _opened(request.config, simulated_network, monkeypatch) as connect:
        client = await connect()
        try:
            yield client
        finally:
            await client.close()


@pytest.fixture
def blocking_domain(
    request: pytest.FixtureRequest,
    simulated_network: simulation.SimulatedNetwork,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[memory_domain.BlockingTestedDomain]:
    """As `domain`, for tests that are plain functions; `muster.open` opens the same domain."""
    from muster.client import synchronous
    from muster.testing import memory_domain

    thread = memory_domain.LoopThread(virtual=not plugin.real_domain(request.config))
    ends = contextlib.AsyncExitStack()

    def connect(*_: object, **__: object) -> memory_domain.BlockingTestedDomain:
        return memory_domain.BlockingTestedDomain(thread.wait(made()), thread)

    try:
        opened = _opened(request.config, simulated_network, monkeypatch)
        made = thread.wait(ends.enter_async_context(opened))
        monkeypatch.setattr(synchronous, "open", connect)
        with connect() as client:
            yield client
    finally:
        thread.wait(ends.aclose())
        thread.stop()


@pytest_asyncio.fixture
async def start_process(request: pytest.FixtureRequest) -> AsyncIterator[StartProcess]:
    """`child_process.start`, for processes that end with the test."""
    children: list[child_process.ChildProcess] = []

    async def start(*command: Any, **options: Any) -> child_process.ChildProcess:
        child = await child_process.start(*command, **options)
        children.append(child)
        failure_logs.attach(request.node, f"output of {child.name}", child.tail)
        return child

    yield start
    for child in reversed(children):
        await child.close()


@pytest.fixture
def fake_clock() -> virtual_clock.FakeClock:
    """A wall clock under the control of the test, which also follows virtual time."""
    return virtual_clock.FakeClock()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not plugin.strict(config):
        return
    for item in items:
        # First in, last out: it checks the loop after all other fixtures of the test have ended.
        if pytest_asyncio.is_async_test(item) and "_tidy_loop" not in item.fixturenames:
            item.fixturenames.insert(0, "_tidy_loop")


@pytest_asyncio.fixture
async def _tidy_loop(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fails the test for tasks that outlive it and for errors that only the loop received."""
    ignore = plugin.may_leak(request.node)
    errors: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(_describe_error(context)))
    yield
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, others = await asyncio.wait(others, timeout=TASK_GRACE_S)
    complaints = []
    if others and "tasks" not in ignore:
        complaints += [f"task {task.get_name()}: {task.get_coro()}" for task in others]
    if "loop-errors" not in ignore:
        complaints += errors
    if complaints:
        pytest.fail("this test left in its event loop:\n  " + "\n  ".join(complaints), pytrace=False)


def _describe_error(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context['message']}: {error!r}" if error else str(context["message"])
