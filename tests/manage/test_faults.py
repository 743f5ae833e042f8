"""Faults of the clock, the network, a manager during a rollout, and an adapter."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import msgspec
import pytest

from muster.bus.memory import network
from muster.bus.rpc import client as rpc
from muster.core import errors, health
from muster.manage import client, protocol, rows
from muster.manage.adapters import base, memory
from muster.manage.agent import agent
from muster.manage.manager import manager, reconciler
from muster.manage.registry import endpoint
from muster.testing import virtual_clock
from muster.testing.eventually import eventually, throughout


def entry(name: str, agent: str = "host-a", **more: Any) -> dict[str, Any]:
    restart = {"delay_s": 0.01, "delay_s_max": 0.05, "attempts": 1000}
    return {"name": name, "type": "memory", "agent": agent, "restart": restart, **more}


@pytest.fixture
async def small(fleet):
    fleet.reg = await fleet.registry()
    fleet.man = await fleet.manager()
    fleet.host = await fleet.agent()
    return fleet


# The clock


async def test_a_clock_that_jumps_moves_nothing(fleet):
    jumps_s = [0.0]

    def wall() -> float:
        return 1_700_000_000 + asyncio.get_running_loop().time() + jumps_s[-1]

    await fleet.registry()
    man = manager.Manager(await fleet.connect("manager-1"), tick_s=0.05, clock=wall)
    await fleet.stack.enter_async_context(man)
    host = await fleet.agent(clock=wall)
    await fleet.client.create(entry("a"))
    row = await fleet.client.wait("a", "up")
    adapter = host.hosted["a"].adapter

    def is_up() -> bool:
        return man.managed["a"].runtime.health.state is health.HealthState.UP

    for jump_s in (-86400.0, 86400.0 * 365):
        await eventually(is_up)
        jumps_s.append(jump_s)
        await throughout(is_up, for_s=1.0)
        adapter.die("oops")
        await eventually(lambda: adapter.state is health.HealthState.UP)
    after = (await fleet.client.get("a"))[0]
    assert after.epoch == row.epoch
    assert adapter.done.count("start") == 3


# The network


def test_managers_cut_off_from_agents_conclude_nothing_and_do_nothing():
    """Two zones, one of them on the far side: there all is unknown and left alone; here the work goes on."""

    async def story() -> None:
        net = network.SimulatedNetwork(7)

        def wall() -> float:
            return 1_700_000_000 + asyncio.get_running_loop().time()

        registry = endpoint.RegistryEndpoint(await net.connect("registry"))
        boss = manager.Manager(await net.connect("manager-1"), clock=wall)
        hosts = {
            name: agent.Agent(await net.connect(name), zone=zone, beat_s=1.0, types=("memory",), clock=wall)
            for name, zone in (("e1", "east"), ("e2", "east"), ("w1", "west"))
        }
        await registry.start()
        await boss.start()
        for host in hosts.values():
            await host.start()
        fleet = client.ManageClient(await net.connect("ann"))
        for name in hosts:
            await fleet.create(entry(f"on-{name}", name))
            await fleet.wait(f"on-{name}", "up")

        def adapter(name: str) -> Any:
            return hosts[name].hosted[f"on-{name}"].adapter

        def done(name: str) -> list[str]:
            return list(adapter(name).done)

        before = {name: done(name) for name in hosts}
        net.cut("e1", "e2")
        rows = [await fleet.wait(f"on-{name}", "unknown") for name in ("e1", "e2")]
        assert all("zone east has been silent" in row.reason for row in rows)
        adapter("w1").die("oops")
        await eventually(lambda: len(done("w1")) > len(before["w1"]))
        await asyncio.sleep(120)
        net.heal()
        for name in hosts:
            await fleet.wait(f"on-{name}", "up")
        assert done("e1") == before["e1"]
        assert done("e2") == before["e2"]
        assert {row.epoch for row in rows} == {row.epoch for row in await fleet.get("on-e1", "on-e2")}
        for host in hosts.values():
            await host.stop()
        await boss.abandon()
        await registry.stop()

    virtual_clock.run_virtual(story())


# In the middle of a rollout


class SlowAdapter(memory.MemoryAdapter):
    """``work`` begins, and ends when the test lets it."""

    type_name = "slow"
    begun: ClassVar[list[str]] = []
    let_go: ClassVar[asyncio.Event]

    async def do_work(self) -> str:
        SlowAdapter.begun.append(self.context.name)
        await SlowAdapter.let_go.wait()
        return "worked"


@pytest.fixture
async def rolling(fleet):
    """Three resources of a kind whose work takes a while, on two agents, with two managers."""
    SlowAdapter.begun, SlowAdapter.let_go = [], asyncio.Event()
    fleet.reg = await fleet.registry(manager_ttl_s=1.0)
    fleet.managers = {name: await fleet.manager(name) for name in ("manager-1", "manager-2")}

    async def host(name: str) -> agent.Agent:
        made: agent.Agent = await fleet.agent(name, adapters=lambda _: SlowAdapter, types=("slow", "memory"))
        return made

    fleet.hosts = {name: await host(name) for name in ("host-a", "host-b")}
    for name, where in (("r1", "host-a"), ("r2", "host-b"), ("r3", "host-a")):
        await fleet.client.create(entry(name, where))
    for name in ("r1", "r2", "r3"):
        await fleet.client.wait(name, "up")
    return fleet


async def ended(fleet: Any, id: str) -> Any:
    rollout = (await fleet.client.rollouts(id))[0]
    return rollout if rollout.state != "running" else None


async def test_a_rollout_continues_after_the_loss_of_its_manager_and_repeats_nothing(rolling):
    owners = {row.name: row.manager for row in await rolling.client.get()}
    began = await rolling.client.rollout(rows.RolloutPlan(operation="work", batch="100%"), "r1", "r2", "r3")
    await eventually(lambda: sorted(SlowAdapter.begun) == ["r1", "r2", "r3"])
    victim = rolling.managers[owners["r1"]]
    await victim.abandon()
    await eventually(
        lambda: all(owner.manager != victim.name for owner in rolling.reg.processor.owners.values())
    )
    SlowAdapter.let_go.set()
    actual = await eventually(lambda: ended(rolling, began.id), timeout_s=30)
    assert (actual.state, actual.counts) == ("done", {"done": 3})
    assert sorted(SlowAdapter.begun) == ["r1", "r2", "r3"], "each was carried out once"


async def test_a_rollout_continues_after_the_loss_of_the_registry_and_repeats_nothing(rolling):
    second = await rolling.registry("registry-2", manager_ttl_s=1.0)
    began = await rolling.client.rollout(rows.RolloutPlan(operation="work", batch="2"), "r1", "r2", "r3")
    await eventually(lambda: sorted(SlowAdapter.begun) == ["r1", "r2"])
    await rolling.reg.stop()
    await second.acting.wait()
    SlowAdapter.let_go.set()
    actual = await eventually(lambda: ended(rolling, began.id), timeout_s=30)
    assert (actual.state, actual.counts) == ("done", {"done": 3})
    assert sorted(SlowAdapter.begun) == ["r1", "r2", "r3"]


async def test_a_rollout_that_is_paused_begins_no_batch_until_it_is_resumed(rolling):
    began = await rolling.client.rollout(rows.RolloutPlan(operation="work", batch="1"), "r1", "r2", "r3")
    await eventually(lambda: SlowAdapter.begun == ["r1"])
    paused = await rolling.client.pause(began.id)
    assert (paused.state, paused.reason) == ("paused", "paused by ann")
    SlowAdapter.let_go.set()

    async def counts() -> Any:
        return (await rolling.client.rollouts(began.id))[0].counts

    async def one_is_done() -> bool:
        return bool(await counts() == {"done": 1, "pending": 2})

    await eventually(one_is_done)  # what was under way is finished
    # A registry that takes over leaves it paused, too.
    second = await rolling.registry("registry-2", manager_ttl_s=1.0)
    await rolling.reg.stop()
    await second.acting.wait()
    await throughout(one_is_done, for_s=0.5)
    assert SlowAdapter.begun == ["r1"]
    assert (await rolling.client.resume(began.id)).state == "running"
    actual = await eventually(lambda: ended(rolling, began.id), timeout_s=30)
    assert (actual.state, actual.counts) == ("done", {"done": 3})
    assert sorted(SlowAdapter.begun) == ["r1", "r2", "r3"]
    with pytest.raises(errors.Conflict, match="is done"):
        await rolling.client.pause(began.id)

    async def is_audited() -> bool:  # that it ended may be written down after it was seen to have
        audit = [
            (decision.who, decision.what, decision.outcome.value)
            for decision in await rolling.client.decisions()
        ]
        matches = [row for row in audit if row[1] in ("rollout", "pause", "resume")]
        assert matches[:3] == [
            ("ann", "rollout", "done"),  # begun
            ("ann", "pause", "done"),
            ("ann", "resume", "done"),
        ]
        return sorted(matches[3:]) == [("ann", "pause", "refused"), ("registry-2", "rollout", "done")]

    await eventually(is_audited, timeout_s=30)


async def test_a_step_whose_agent_died_in_it_is_in_doubt_and_not_repeated(rolling):
    plan = {"operation": "work", "batch": "1", "timeout_s": 5}
    began = await rolling.client.rollout(plan, "r2", "r3")
    await eventually(lambda: SlowAdapter.begun == ["r2"])
    await rolling.hosts["host-b"].stop()  # in the middle of it
    await rolling.agent("host-b", adapters=lambda _: SlowAdapter, types=("slow", "memory"))
    actual = await eventually(lambda: ended(rolling, began.id), timeout_s=30)
    assert actual.state == "stopped", "one in doubt counts as an error"
    assert actual.counts == {"in-doubt": 1, "pending": 1}
    assert SlowAdapter.begun == ["r2"]
    # An operator resumes it: what is in doubt stays in doubt.
    SlowAdapter.let_go.set()
    await rolling.client.resume(began.id)
    actual = await eventually(lambda: ended(rolling, began.id), timeout_s=30)
    assert (actual.state, actual.counts) == ("done", {"in-doubt": 1, "done": 1})
    assert SlowAdapter.begun == ["r2", "r3"]


# Adapters


class Liar(base.Adapter):
    """Reports the given states."""

    type_name = "liar"
    config_type = memory.MemoryConfig
    says: Any = protocol.ObservedState(True, health.HealthState.UP)

    async def create(self, config: Any, *, start: bool) -> None:
        self.context.report_state(await self.observe())

    async def put(self, config: Any) -> None:
        pass

    async def delete(self) -> None:
        pass

    async def resume(self, config: Any) -> None:
        pass

    async def observe(self) -> protocol.ObservedState:
        if isinstance(self.says, Exception):
            raise self.says
        state: protocol.ObservedState = self.says
        return state

    async def do_start(self) -> None:
        pass

    async def do_look(self) -> str:
        return "looked"


async def test_an_adapter_with_false_reports_affects_only_its_own_resource(small, tmp_path):
    host = await small.agent(
        "host-b",
        adapters=lambda name: Liar if name == "liar" else memory.MemoryAdapter,
        types=("liar", "memory"),
    )
    await small.client.create(entry("good", "host-b"))
    subject = protocol.request("ann", "create")
    lying = {**entry("bad", "host-b"), "type": "liar"}
    await rpc.call(small.client._bus, subject, {"entry": lying})
    await small.client.wait("bad", "up")
    adapter = host.hosted["bad"].adapter
    lies = [
        protocol.ObservedState(
            True, health.HealthState.UP, "x" * 1_000_000, properties={"much": "y" * 5_000_000}
        ),
        protocol.ObservedState(True, health.HealthState.UP, properties={"odd": object()}),
        protocol.ObservedState(True, health.HealthState.UP, digest="of something else"),
        RuntimeError("I will not tell"),
        "not even the right type",
    ]
    for lie in lies:
        adapter.says = lie
        await small.client.exec("look", "bad")
        if isinstance(lie, protocol.ObservedState):
            adapter.context.report_state(lie)
        assert await small.client.execute("good", "echo", {"text": "still here"}) == "still here"
    assert len(host.hosted["bad"].observed.reason) <= 1_000
    assert (await small.client.get("good"))[0].state == "up"


async def test_a_hanging_resource_delays_no_other(small):
    await small.client.create(entry("stuck", config={"hangs": ["echo"]}))
    await small.client.create(entry("fine"))
    await small.client.wait("stuck", "up")
    await small.client.wait("fine", "up")
    hanging = asyncio.create_task(small.client.exec("echo", "stuck", timeout_s=2.0))
    await eventually(lambda: "echo" in small.host.hosted["stuck"].adapter.done)
    assert await small.client.execute("fine", "echo", {"text": "x"}) == "x"
    (answer,) = await hanging
    assert answer.outcome == "in-doubt"
    small.host.hosted["fine"].adapter.die("oops")
    await eventually(lambda: small.host.hosted["fine"].adapter.state is health.HealthState.UP)


def test_a_flapping_resource_is_retried_less_often_and_reported():
    spec = protocol.ResourceSpec(
        name="a", type="memory", agent="h", restart=protocol.RestartPolicy(attempts=100)
    )
    assignment = protocol.Assignment(spec=spec, epoch=1, generation=1)
    runtime = reconciler.ResourceRuntime.begin(assignment, 0.0, 0)
    delays, now = [], 0.0
    for _ in range(8):
        up = protocol.ObservedState(True, health.HealthState.UP, digest=spec.digest)
        reconciler.observe(assignment, runtime, up, now, int(now * 1000))
        fallen = msgspec.structs.replace(up, state=health.HealthState.DOWN, reason="oops")
        reconciler.observe(assignment, runtime, fallen, now, int(now * 1000))
        delays.append(runtime.retry_at - now)
        assert reconciler.decide(assignment, runtime, now) is None
        now = runtime.retry_at
        assert reconciler.decide(assignment, runtime, now) is not None
    assert delays == sorted(delays)
    assert delays[0] < 0.5
    assert delays[-1] >= 15
    assert "flapping: failed 8 times" in runtime.health.reason
