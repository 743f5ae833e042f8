"""Resources of lost and of drained machines are started on other machines, and never run twice.

In virtual time, with the real registry, manager and agents. `test_watchdog` has the watchdog of an agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from muster.bus.memory import network
from muster.core import errors, health
from muster.manage import client, protocol, rows
from muster.manage.adapters import memory
from muster.manage.agent import agent, deadlines
from muster.manage.manager import manager
from muster.manage.registry import moves, records, views
from muster.testing import virtual_clock
from tests.manage import assignment_cases
from tests.manage.test_registry import RegistryWorld, until

UP = health.HealthState.UP
AFTER_S = 20.0


class PresentAgent(deadlines.ResourceWatchdog):
    """These agents are never frozen, so nothing has to watch them."""

    def renewed_at(self) -> float | None:
        return None

    def keep(self, renewed_at: float, first_s: float) -> None:
        pass


class MovingWorld(RegistryWorld):
    """Three machines: a, b and c. While it lives, it checks that nothing runs twice."""

    hosts: dict[str, agent.Agent]

    async def start_all(self) -> None:
        self.hosts = {}
        for name in "abc":
            await self.start_agent(name)
        self.registry = await self.start_registry("registry-1")
        boss = manager.Manager(await self.net.connect("manager-1"), tick_s=0.1)
        self.manager = await self.stack.enter_async_context(boss)
        await self.registry.acting.wait()
        self.client = client.ManageClient(await self.net.connect("ann"))
        await until(
            lambda: len(self.state.agents) == 3 and all(a.has_deadlines for a in self.state.agents.values())
        )
        self.stack.push_async_callback(self._end, asyncio.ensure_future(self._check_forever()))

    async def start_agent(self, name: str, **options: Any) -> agent.Agent:
        clock = asyncio.get_running_loop().time
        made = agent.Agent(
            await self.net.connect(name),
            None,
            beat_s=1.0,
            clock=clock,
            guard=PresentAgent(),
            elapsed_s=clock,
            zone=f"zone-{name}",
            **options,
        )
        self.hosts[name] = made
        return await self.stack.enter_async_context(made)

    @property
    def state(self) -> Any:
        return self.registry.processor

    def runs_on(self, name: str) -> str:
        hosts = [
            agent
            for agent, host in self.hosts.items()
            if name in host.hosted
            and isinstance(adapter := host.hosted[name].adapter, memory.MemoryAdapter)
            and host.hosted[name].record.config is not None
            and adapter.state is UP
        ]
        assert len(hosts) < 2, f"{name} runs on {hosts}"
        return "".join(hosts)

    async def _check_forever(self) -> None:
        while True:
            for name in {name for host in self.hosts.values() for name in host.hosted}:
                self.runs_on(name)
            await asyncio.sleep(0.05)

    async def _end(self, task: asyncio.Future[None]) -> None:
        if task.done():
            task.result()
        task.cancel()

    async def run(self, *names: str, **fields: Any) -> None:
        """Apply resources that may move, which begin on the machine a."""
        entry = {"type": "memory", "placement": {}, "reschedule": {"after_s": AFTER_S}, **fields}
        for other in "bc":
            await self.client.drain(other)
        await self.client.apply(json.dumps({"resources": [{"name": name, **entry} for name in names]}))
        for name in names:
            await self.client.wait(name, "up", timeout_s=60)
            assert self.runs_on(name) == "a"
        for other in "bc":
            await self.client.undrain(other)

    async def moves_within(self, name: str, seconds: float) -> float:
        """How long it takes until it runs on another machine than a."""
        began = asyncio.get_running_loop().time()
        await until(lambda: self.runs_on(name) in ("b", "c"), within_s=seconds)
        return asyncio.get_running_loop().time() - began


def play(scenario: Callable[[MovingWorld], Awaitable[None]]) -> None:
    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            world = MovingWorld(network.SimulatedNetwork(1), stack)
            await world.start_all()
            await scenario(world)

    virtual_clock.run_virtual(run())


def test_resources_of_a_lost_machine_are_started_elsewhere():
    async def scenario(world: MovingWorld) -> None:
        await world.run("web", "db")
        await world.run("bound", reschedule=None)
        world.net.cut("a")
        await asyncio.sleep(AFTER_S * 0.7)
        assert world.runs_on("web") == "a", "its machine is merely unknown"
        assert await world.moves_within("web", 15.0) > AFTER_S * 0.2
        await world.moves_within("db", 2.0)
        assert {world.runs_on("web"), world.runs_on("db")} == {"b", "c"}, "they are spread"
        row = await world.client.describe("web")
        assert row.spec.agent in ("b", "c")
        assert world.runs_on("bound") == "a"
        later = {"name": "later", "type": "memory", "count": 3}
        await world.client.apply(json.dumps({"resources": [later]}))
        assert {world.state.resources[f"later-{n}"].spec.agent for n in (1, 2, 3)} == {"b", "c"}
        await world.client.delete("bound", force=True)
        states = {agent.name: agent.state for agent in await world.client.agents()}
        assert states == {"a": "unknown", "b": "up", "c": "up"}
        world.net.heal()
        await until(lambda: not {"web", "db"} & _there(world.hosts["a"]), within_s=10)
        await until(lambda: not world.state.agents["a"].must_report)
        assert not world.runs_on("bound")
        assert [row.state for row in await world.client.agents()] == ["up"] * 3

    play(scenario)


def _there(host: agent.Agent) -> set[str]:
    return {name for name, hosted in host.hosted.items() if hosted.record.config is not None}


def test_an_agent_that_cannot_renew_stops_what_may_move_and_starts_it_when_it_can():
    async def scenario(world: MovingWorld) -> None:
        await world.run("web")
        await world.run("bound", reschedule=None)
        world.net.cut("a")
        await asyncio.sleep(AFTER_S * 0.6)
        assert world.runs_on("web") == "a"
        await asyncio.sleep(AFTER_S * 0.25)
        assert world.runs_on("web") == ""
        assert world.runs_on("bound") == "a"
        hosted = world.hosts["a"].hosted["web"]
        start = protocol.Operation(
            id="late",
            verb=protocol.Verb.EXECUTE,
            resource="web",
            epoch=hosted.record.epoch,
            operation="start",
        )
        assert (await world.hosts["a"].execute(start)).code == "unavailable", "an operation that arrives late"
        world.net.heal()  # in time
        await until(lambda: world.runs_on("web") == "a", within_s=10)
        assert (await world.client.describe("web")).spec.agent == "a"

    play(scenario)


def test_without_a_registry_nothing_moves_and_a_new_one_counts_anew():
    async def scenario(world: MovingWorld) -> None:
        standby = await world.start_registry("registry-2")
        await world.run("web")
        world.net.cut("a")
        await asyncio.sleep(AFTER_S * 0.7)
        await world.registry.stop()
        await standby.acting.wait()
        world.registry = standby
        assert await world.moves_within("web", 40.0) > AFTER_S - 1

    play(scenario)


def test_a_machine_that_kills_its_resources_gets_no_more_after_some_attempts():
    async def scenario(world: MovingWorld) -> None:
        await world.run("web", reschedule={"after_s": 5, "attempts": 1})
        world.net.cut("a")
        await world.moves_within("web", 15.0)
        world.net.cut("b", "c")
        world.net.heal()
        there = world.runs_on("web")
        await asyncio.sleep(1.0)
        world.net.cut(there)
        await asyncio.sleep(30.0)
        assert world.state.resources["web"].spec.agent == there
        row = await world.client.describe("web")
        assert row.reason == "it was moved 1 times within 3600 s"

    play(scenario)


def test_moves_by_a_clock_that_was_ahead_do_not_count_for_ever():
    state, presence, now = _lost_machine(1)
    record = state.resources["r0"]
    year_ms = 366 * 86_400_000
    state.accept(
        records.RegistryChanges(
            resources={"r0": msgspec.structs.replace(record, moves_ms=tuple(range(year_ms, year_ms + 5)))}
        )
    )
    assert moves.plan(state, presence, now, 1_000).moved == {"a": ["r0"]}


def test_without_a_suitable_machine_it_waits_and_says_why():
    async def scenario(world: MovingWorld) -> None:
        await world.run("web", where="zone = 'zone-a'", placement=None)
        world.net.cut("a")
        await asyncio.sleep(AFTER_S * 1.5)
        row = await world.client.describe("web")
        assert row.spec.agent == "a"
        assert row.reason.startswith("no other machine: 'web': all agents that match"), row.reason
        world.net.heal()
        await until(lambda: world.runs_on("web") == "a")

    play(scenario)


def test_resources_of_a_drained_machine_move_after_they_were_stopped():
    async def scenario(world: MovingWorld) -> None:
        await world.run("web", "db")
        await world.run("bound", reschedule=None)
        await world.client.drain("a")
        await world.moves_within("web", 20.0)
        await world.moves_within("db", 20.0)
        assert not {"web", "db"} & _there(world.hosts["a"])
        row = await world.client.describe("bound")
        assert (row.state, row.spec.agent) == ("down", "a")
        assert not world.state.resources["web"].moves_ms, "that was on request"

    play(scenario)


def test_a_drained_machine_without_another_keeps_its_resources():
    async def scenario(world: MovingWorld) -> None:
        await world.run("web", where="zone = 'zone-a'", placement=None)
        await world.client.drain("a")
        await asyncio.sleep(10.0)
        row = await world.client.describe("web")
        assert (row.state, row.spec.agent) == ("down", "a")
        assert row.reason.startswith("drained; no other machine"), row.reason
        await world.client.undrain("a")
        await until(lambda: world.runs_on("web") == "a")

    play(scenario)


def test_a_machine_that_had_no_reason_to_renew_is_not_lost_at_once():
    """An agent announces itself every half minute; what may move counts from when it got there."""

    async def scenario(world: MovingWorld) -> None:
        now = asyncio.get_running_loop().time

        def are_silent() -> bool:
            return all(now() - world.registry.presence.contact_at(name) > 7.0 for name in "bc")

        await until(are_silent, within_s=200)
        entry = {"name": "web", "type": "memory", "where": "zone <> 'zone-a'", "reschedule": {"after_s": 6}}
        await world.client.apply(json.dumps({"resources": [entry]}), wait_s=60)
        assert world.state.resources["web"].moves_ms == ()

    play(scenario)


def test_a_changed_entry_moves_what_may_move():
    async def scenario(world: MovingWorld) -> None:
        await world.run("web")
        entry = {
            "name": "web",
            "type": "memory",
            "where": "zone = 'zone-c'",
            "reschedule": {"after_s": AFTER_S},
        }
        await world.client.apply(json.dumps({"resources": [entry]}))
        await until(lambda: world.runs_on("web") == "c")
        await world.client.wait("web", "up")
        await world.run("bound", reschedule=None)
        with pytest.raises(errors.Conflict, match="cannot move"):
            await world.client.apply(
                json.dumps({"resources": [entry | {"name": "bound", "reschedule": None}]})
            )

    play(scenario)


def test_what_has_moved_stays_there_when_an_update_is_undone():
    async def scenario(world: MovingWorld) -> None:
        await world.run("web", group="shop")
        entry = {"type": "memory", "placement": {}, "reschedule": {"after_s": AFTER_S}, "group": "shop"}
        changed = {"name": "web", **entry, "config": {"value": 2}}
        await world.client.apply(json.dumps({"resources": [changed]}), wait_s=60)
        assert world.runs_on("web") == "a"
        world.net.cut("a")
        await world.moves_within("web", 60.0)
        there = world.runs_on("web")
        world.net.heal()
        await until(lambda: not world.state.agents["a"].must_report)
        undone = await world.client.undo("shop")
        assert (await world.client.wait_rollout(undone.id, timeout_s=60)).state == "done"
        assert world.state.resources["web"].spec.config == {}
        assert world.runs_on("web") == there
        assert not (await world.client.revisions("shop"))[-1].changes.keys() & {"agent"}

    play(scenario)


def test_an_operation_that_arrives_after_a_move_begins_nothing():
    async def scenario(world: MovingWorld) -> None:
        await world.run("web")
        for other in "bc":
            await world.client.drain(other)
        world.net.cut("a")
        entry = {"name": "new", "type": "memory", "placement": {}, "reschedule": {"after_s": AFTER_S}}
        await world.client.apply(json.dumps({"resources": [entry]}))
        former = dict(world.state.owners)
        for other in "bc":
            await world.client.undrain(other)
        await world.moves_within("web", 60.0)
        await world.moves_within("new", 2.0)
        late = {
            name: protocol.Operation(
                id=name,
                verb=verb,
                resource=name,
                epoch=former[name].epoch,
                type="memory",
                operation="start",
                stop_after_s=AFTER_S,
            )
            for name, verb in (("web", protocol.Verb.EXECUTE), ("new", protocol.Verb.CREATE))
        }
        host = world.hosts["a"]
        world.net.heal()
        while host.deadlines.overdue() or not host.deadlines.may_run(AFTER_S):  # also while it renews
            for name, operation in late.items():
                again = msgspec.structs.replace(operation, id=f"{name}-{host.deadlines.now()}")
                assert (await host.execute(again)).code in ("unavailable", "stale-epoch")
        await until(lambda: not world.state.agents["a"].must_report)
        for operation in late.values():
            assert (await host.execute(operation)).code == "stale-epoch"
        assert not _there(host)

    play(scenario)


def test_a_deletion_ends_without_its_machine():
    async def scenario(world: MovingWorld) -> None:
        await world.run("web")
        await world.run("bound", reschedule=None)
        world.net.cut("a")
        await world.client.delete("bound", "web")
        await asyncio.sleep(moves.DELETE_LOST_S * 0.8)
        assert {"bound", "web"} <= world.state.resources.keys()
        await world.client.wait_gone("bound", "web", timeout_s=60)
        assert world.runs_on("bound") == "a"
        world.net.heal()
        await until(lambda: not _there(world.hosts["a"]), within_s=15)

    play(scenario)


def test_a_silent_machine_gets_something_new_only_if_no_other_can_have_it():
    async def scenario(world: MovingWorld) -> None:
        world.net.cut("a")
        await asyncio.sleep(1.5 * protocol.HELLO_S + 1)
        entries = [
            {"name": "spread", "type": "memory", "count": 2},
            {"name": "free", "type": "memory", "where": "zone <> 'x'"},
            {"name": "bound", "type": "memory", "where": "zone = 'zone-a'"},
        ]
        text = json.dumps({"resources": entries})
        assert all(step.act == "create" for step in await world.client.plan(text))
        await world.client.apply(text)
        agents = {row.name: row.agent for row in await world.client.get()}
        assert sorted([agents["spread-1"], agents["spread-2"]]) == ["b", "c"]
        assert (agents["free"] in "bc", agents["bound"]) == (True, "a")

    play(scenario)


def test_a_changed_policy_counts_when_the_agent_enforces_it():
    async def scenario(world: MovingWorld) -> None:
        await world.run("web")

        async def change(after_s: float | None) -> None:
            reschedule = {"after_s": after_s} if after_s else None
            entry = {"name": "web", "type": "memory", "placement": {}, "reschedule": reschedule}
            await world.client.apply(json.dumps({"resources": [entry]}))

        def certain() -> tuple[float, float]:
            enforced = world.hosts["a"].hosted["web"].record.stop_after_s
            stored = world.state.resources["web"].stop_after_s
            assert not stored or stored >= enforced
            return stored, enforced

        assert certain() == (20.0, 20.0)
        await change(40.0)
        assert certain() == (40.0, 20.0), "at once, because the agent may enforce it from now on"
        await until(lambda: certain() == (40.0, 40.0), within_s=60)
        await change(10.0)
        assert certain() == (40.0, 40.0), "until the agent enforces it"
        await until(lambda: certain() == (10.0, 10.0), within_s=60)
        await change(None)
        assert certain() == (0.0, 10.0)
        await until(lambda: certain() == (0.0, 0.0), within_s=60)
        await change(30.0)
        assert certain() == (0.0, 0.0)
        await until(lambda: certain() == (30.0, 30.0), within_s=60)

    play(scenario)


def test_an_agent_without_deadlines_loses_nothing():
    async def scenario(world: MovingWorld) -> None:
        await world.run("web")
        host = world.hosts["a"]
        host.deadlines._guard = None  # as an earlier version, or one that has no folder
        host._announce_now.set()
        await until(lambda: not world.state.resources["web"].stop_after_s)
        world.net.cut("a")
        await asyncio.sleep(60.0)
        assert world.state.resources["web"].spec.agent == "a"

    play(scenario)


def test_an_agent_whose_watchdog_cannot_be_kept_loses_nothing(monkeypatch):
    """Nothing would kill what it runs, if it were frozen."""

    async def scenario(world: MovingWorld) -> None:
        await world.run("web")
        host = world.hosts["a"]

        def refuse(renewed_at: float, first_s: float) -> None:
            raise OSError("no space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(host.deadlines._guard, "keep", refuse)
            await until(lambda: not world.state.resources["web"].stop_after_s)
        await until(lambda: world.state.resources["web"].stop_after_s == 20.0, within_s=60)
        assert host.hosted["web"].record.stop_after_s == 20.0

    play(scenario)


def test_values_of_its_machine_are_replaced_anew():
    async def scenario(world: MovingWorld) -> None:
        await world.run("web", where="zone = 'zone-a'")
        entry = {
            "name": "w",
            "type": "memory",
            "count": 1,
            "where": "zone <> 'zone-b'",
            "config": {"value": "{zone}/{agent}/{name}/{8000+index}"},
            "reschedule": {"after_s": AFTER_S},
        }
        await world.client.drain("c")
        await world.client.apply(json.dumps({"resources": [entry]}))
        await world.client.wait("w-1", "up")
        await world.client.undrain("c")
        assert (await world.client.describe("w-1")).spec.config == {"value": "zone-a/a/w-1/8001"}
        world.net.cut("a")
        await until(lambda: world.runs_on("w-1") == "c")
        assert (await world.client.describe("w-1")).spec.config == {"value": "zone-c/c/w-1/8001"}
        result = await world.client.apply(json.dumps({"resources": [entry]}))
        assert result.changed_count == 0, "the manifest says the same"

    play(scenario)


def test_instances_are_rebalanced_on_request_and_one_after_the_other():
    async def scenario(world: MovingWorld) -> None:
        update = {"max_parallel": 1, "min_healthy_time_s": 1.0}
        entry = {
            "name": "w",
            "type": "memory",
            "count": 4,
            "reschedule": {"after_s": AFTER_S},
            "update": update,
        }
        names = [f"w-{number}" for number in range(1, 5)]
        for other in "bc":
            await world.client.drain(other)
        await world.client.apply(json.dumps({"resources": [entry]}), wait_s=60)
        assert await world.client.rebalance_plan() == []
        for other in "bc":
            await world.client.undrain(other)
        planned = await world.client.rebalance_plan()
        assert [(row.name, row.agent, row.to) for row in planned] == [("w-1", "a", "b"), ("w-2", "a", "c")]
        assert {row.reason for row in planned} == {"its zone has more of its instances"}
        assert await world.client.rebalance_plan("name = 'w-4'") == [
            rows.MoveRow(name="w-4", type="memory", group="w", agent="a", to="b", reason=planned[0].reason)
        ]
        begun = await world.client.rebalance()
        least = len(names)
        while (row := (await world.client.rollouts(begun.id))[0]).state == "running":
            least = min(least, sum(bool(world.runs_on(name)) for name in names))
            await asyncio.sleep(0.1)
        assert (row.state, row.counts, least) == ("done", {"done": 2}, 3)
        assert sorted(map(world.runs_on, names)) == ["a", "a", "b", "c"]
        assert await world.client.rebalance_plan() == []
        with pytest.raises(errors.Conflict, match="nothing has to be moved"):
            await world.client.rebalance()
        assert (await world.client.apply(json.dumps({"resources": [entry]}))).changed_count == 0

    play(scenario)


def test_a_plan_of_moves_balances_whatever_can_move():
    state, presence, now = _lost_machine(9)
    presence.announced("a", now)
    planned = moves.rebalance(state, presence, now, "")
    assert [row.to for row in planned.values()].count("b") == 3
    assert [row.to for row in planned.values()].count("c") == 3
    assert {row.reason for row in planned.values()} == {"its agent has more resources"}
    state.accept(state.set_desired("c", protocol.DesiredState.DRAINED, "ann"))
    assert {row.to for row in moves.rebalance(state, presence, now, "").values()} == {"b"}


def test_a_rebalancing_respects_anti_affinity_and_requests():
    state, presence, now = _lost_machine(0)
    presence.announced("a", now)
    agents = {
        name: records.AgentRecord(types=("memory",), has_deadlines=True, facts={"cpus": cpus})
        for name, cpus in {"a": 8, "b": 1, "c": 8}.items()
    }
    state.accept(records.RegistryChanges(agents=dict(agents)))
    placement = protocol.Placement(anti_affinity="group = 'web'", cpu=2.0)
    specs = [
        protocol.ResourceSpec(
            name=name,
            type="memory",
            agent="a",
            group="web",
            reschedule=protocol.ReschedulePolicy(after_s=AFTER_S),
            placement=placement,
        )
        for name in ("r1", "r2", "r3")
    ]
    state.accept(state.apply(specs, "ann"))
    planned = moves.rebalance(state, presence, now, "")
    assert [(row.name, row.to, row.reason) for row in planned.values()] == [
        ("r1", "c", "a does not match any more")
    ], "b has too few cores, and then c and a have one each that others must not join"


def test_a_thousand_resources_are_moved_in_parts():
    state, presence, now = _lost_machine(1_200)
    decided = moves.plan(state, presence, now, 0)
    assert decided.size == moves.MOVES_MAX
    state.accept(decided.changes)
    assignment_cases.check(state)
    while decided.size:
        decided = moves.plan(state, presence, now, 0)
        state.accept(decided.changes)
    counts = {agent: len(state.hosted(agent)) for agent in state.agents}
    assert counts == {"a": 0, "b": 600, "c": 600}


def _lost_machine(count: int) -> tuple[Any, views.AgentPresence, float]:
    state = assignment_cases.having()
    agents = {name: records.AgentRecord(zone=name, types=("memory",), has_deadlines=True) for name in "abc"}
    specs = [
        protocol.ResourceSpec(
            name=f"r{number}", type="memory", agent="a", reschedule=protocol.ReschedulePolicy(after_s=AFTER_S)
        )
        for number in range(count)
    ]
    state.accept(records.RegistryChanges(agents=dict(agents)))
    state.accept(state.apply(specs, "ann"))
    presence = views.AgentPresence(0.0)
    moves.note_arrivals(state, presence, 0.0)
    for name, at in (("a", 0.0), ("b", AFTER_S), ("c", AFTER_S)):
        presence.announced(name, at)
    return state, presence, AFTER_S + 0.1


def test_nothing_moves_before_its_time():
    state, presence, _ = _lost_machine(3)
    assert not moves.plan(state, presence, AFTER_S, 0).size
    assert moves.plan(state, presence, AFTER_S + 0.01, 0).size == 3
    presence.since = 5.0  # the registry became active later
    assert not moves.plan(state, presence, AFTER_S + 5.0, 0).size


def test_what_has_ended_or_is_to_be_down_stays():
    state, presence, now = _lost_machine(3)
    done = protocol.ResourceStatus(state=health.HealthState.COMPLETED, generation=1)
    state.accept(records.RegistryChanges(statuses={"r0": done}))
    state.accept(state.set_desired("r1", protocol.DesiredState.DRAINED, "ann"))
    assert set(moves.plan(state, presence, now, 0).changes.resources) == {"r2"}


def test_the_agent_that_is_chosen_has_room_for_what_moves():
    state, presence, now = _lost_machine(0)
    agents = {
        name: records.AgentRecord(types=("memory",), has_deadlines=True, facts={"cpus": 2}) for name in "abc"
    }
    state.accept(records.RegistryChanges(agents=dict(agents)))
    specs = [
        protocol.ResourceSpec(
            name=f"r{number}",
            type="memory",
            agent="a",
            reschedule=protocol.ReschedulePolicy(after_s=AFTER_S),
            placement=protocol.Placement(cpu=1.0),
        )
        for number in range(5)
    ]
    state.accept(state.apply(specs, "ann"))
    moves.note_arrivals(state, presence, 0.0)
    decided = moves.plan(state, presence, now, 0)
    assert decided.size == 4
    assert "none of 2 agents is suitable" in decided.waiting["r4"]
