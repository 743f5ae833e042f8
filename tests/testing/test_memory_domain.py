"""The fixtures `domain` and `blocking_domain`: all services, in memory, in virtual time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import muster
from muster.bus.memory import network
from muster.client import synchronous
from muster.core import errors
from muster.testing import memory_domain, virtual_clock
from tests.testing import test_plugin

WAIT_S = 30.0
START_S = 0.1  # of processor time, when everything is imported


async def test_messages_of_topics_and_queues(domain: memory_domain.TestedDomain):
    @domain.on("prices/*")
    async def price(message: muster.Message) -> str:
        return "17.50"

    assert (await domain.request("prices/chair")).text == "17.50"
    queue = domain.queue("orders")
    began = time.time()
    await queue.send("later", delay_s=300)
    assert (await queue.receive(timeout_s=600)).body() == "later"
    assert 300 <= time.time() - began < 310, "of the clock of the test"


async def test_contexts_with_a_lease_end(domain: memory_domain.TestedDomain):
    await domain.contexts.put("printers/3", "idle", attributes={"floor": 2}, lease_s=60)
    assert [context.key for context in await domain.contexts.find("floor = 2")] == ["printers/3"]
    await domain.advance(30)
    assert (await domain.contexts.get("printers/3", max_staleness_s=0)).text == "idle"
    await domain.advance(40)
    with pytest.raises(errors.NotFound):
        await domain.contexts.get("printers/3", max_staleness_s=0)


async def test_events(domain: memory_domain.TestedDomain):
    await domain.notify.define("WebServer", load=float)
    await domain.notify.define_event("alert", level=int)
    async with await domain.notify.join("web", "WebServer", {"load": 0.9}, policy="level > 2") as web:
        await domain.notify.send("alert", {"level": 4}, to="load > 0.8")
        assert (await web.next(timeout_s=WAIT_S))["level"] == 4


class Lamp(memory_domain.MemoryResource):
    async def do_blink(self, times: int) -> int:
        return times


async def test_resources_of_any_type_and_adapters_of_the_program(domain: memory_domain.TestedDomain):
    await domain.serve_adapter(Lamp, "lamp", agent="lamps")
    lamp = {"name": "lamp-1", "type": "lamp", "agent": "lamps", "config": {"colour": "red"}}
    web = {"name": "web", "type": "process", "agent": "local", "config": {"command": ["serve"]}}
    await domain.fleet.apply({"resources": [lamp, web]}, wait_s=WAIT_S)
    assert [row.state for row in await domain.fleet.resources()] == ["up", "up"]
    assert await domain.fleet.execute("lamp-1", "blink", times=3) == 3
    await domain.fleet.execute("web", "stop")
    await domain.fleet.wait("web", "down", timeout_s=WAIT_S)
    await domain.fleet.delete("web", wait_s=WAIT_S)


async def test_a_program_opens_the_domain_of_its_test(domain: memory_domain.TestedDomain):
    async def program() -> str:
        async with muster.open_async() as m:
            await m.publish("greetings", "hello")
            return m.identity

    async with await domain.subscribe("greetings") as greetings:
        assert await program() not in ("", domain.identity)
        assert (await greetings.next(timeout_s=WAIT_S)).text == "hello"


async def test_threads_of_handlers_work_while_time_stands_still(domain: memory_domain.TestedDomain):
    blocked = threading.Event()

    @domain.on("slow")
    def slow(text: str) -> str:
        blocked.wait(0.2)
        return text

    assert (await domain.request("slow", "x", timeout_s=0.01)).text == "x"


async def test_a_cut_connection_can_be_simulated(
    domain: memory_domain.TestedDomain, simulated_network: network.SimulatedNetwork
):
    simulated_network.unplug(domain.identity)
    with pytest.raises(errors.Unavailable):
        await domain.contexts.get("x", max_staleness_s=0)
    simulated_network.heal()
    with pytest.raises(errors.NotFound):
        await domain.contexts.get("x", max_staleness_s=0)


# Programs without an event loop


def test_blocking_programs_share_virtual_time(blocking_domain: memory_domain.BlockingTestedDomain):
    m, attempts = blocking_domain, []

    @m.on("queue:orders", retry=muster.Retry(delay_s=100, delay_s_max=100))
    def order(text: str) -> None:
        attempts.append(time.time())
        if len(attempts) == 1:
            raise ValueError(text)
        m.publish("done", text)

    with m.subscribe("done") as done:
        m.queue("orders").send("chair")
        assert done.next(timeout_s=300).text == "chair"
    assert 99 <= attempts[1] - attempts[0] < 110
    m.contexts["a"] = "b"
    assert m.contexts["a"].text == "b"
    before = time.time()
    threading.Event().wait(0.05)
    assert time.time() == before, "time stands still while nobody waits for the domain"
    m.advance(60)
    assert 60 <= time.time() - before < 61


def test_a_blocking_program_opens_the_domain_of_its_test(
    blocking_domain: memory_domain.BlockingTestedDomain,
):
    with muster.open() as m:
        m.queue("orders").send("chair")
    assert isinstance(m, synchronous.Muster)
    assert blocking_domain.queue("orders").receive(timeout_s=WAIT_S).body() == "chair"


# Its start, and a real domain


async def _start(net: network.SimulatedNetwork) -> float:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, virtual_clock.VirtualLoop)
    with memory_domain.virtual_time(loop):
        began_s = time.process_time()
        async with memory_domain.MemoryDomain(net).running() as made:
            client = await made.connect()
            took_s = time.process_time() - began_s
            await client.close()
    return took_s


def test_a_domain_starts_quickly():
    runs = [virtual_clock.run_virtual(_start(network.SimulatedNetwork(seed))) for seed in range(4)]
    assert min(runs) < START_S


SUITE = """
async def test_a(domain):
    await domain.queue("tested").send("x")
    await domain.advance(0.01)
    assert (await domain.queue("tested").receive(timeout_s=30)).body() == "x"

def test_b(blocking_domain):
    blocking_domain.contexts["tested"] = "x"
    assert blocking_domain.contexts["tested"].text == "x"
"""


def test_the_same_test_passes_with_a_domain_in_memory(pytester: pytest.Pytester):
    outcomes = test_plugin.run(pytester, SUITE)
    assert (outcomes["test_a"], outcomes["test_b"]) == ("passed", "passed"), outcomes["output"]
