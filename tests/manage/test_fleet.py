"""Guarantees for users: order, drift, rollouts, draining, true states, refusals, the activity log."""

from __future__ import annotations

from typing import Any

import pytest

from muster.core import errors, health, messages
from muster.manage import protocol
from muster.testing.eventually import eventually


def memory(name: str, more: str = "", agent: str = "host-a") -> str:
    return f"  - {{name: {name}, type: memory, agent: {agent}{more}}}\n"


def manifest(*entries: str) -> str:
    return "resources:\n" + "".join(entries)


@pytest.fixture
async def small(fleet):
    """One registry, one manager, one agent."""
    fleet.reg = await fleet.registry()
    fleet.man = await fleet.manager()
    fleet.host = await fleet.agent()
    return fleet


async def test_dependencies_come_up_in_order_and_go_in_the_other(small):
    order: list[str] = []
    bus = await small.connect("listener")

    def record_start(message: Any) -> None:
        decoded = messages.decode(message.data, protocol.ResourceStateChange)
        if decoded.state is health.HealthState.UP:
            order.append(decoded.resource)

    async with await bus.subscribe(protocol.STATES, handler=record_start):
        await small.client.apply(
            manifest(
                memory("web", ", depends_on: ['group:data'], group: front"),
                memory("db", ", group: data"),
                memory("cache", ", group: data, depends_on: [db]"),
            )
        )
        await small.client.wait("web", "up")
        await eventually(lambda: len(order) == 3)
    assert order == ["db", "cache", "web"]
    with pytest.raises(errors.Conflict, match="depend"):
        await small.client.delete("db")
    await small.client.delete("db", "cache", "web")
    await small.client.wait_gone("db", "cache", "web")


async def test_a_new_registry_continues_where_the_old_one_stopped(small):
    await small.client.apply(manifest(memory("a"), memory("b", ", depends_on: [a], config: {value: 1}")))
    await small.client.wait("b", "up")
    before = (await small.client.get("b"))[0]
    second = await small.registry("registry-2")
    await small.reg.stop()
    await second.acting.wait()
    after = (await small.client.get("b"))[0]
    assert after.epoch == before.epoch, "its manager lives: nothing was reassigned"
    await small.client.apply(manifest(memory("b", ", depends_on: [a], config: {value: 2}")))
    await eventually(lambda: small.host.hosted["b"].adapter.config.value == 2)


async def test_plan_and_diff_say_what_apply_does(small):
    await small.client.apply(manifest(memory("a", ", config: {value: 1}")))
    lines = await small.client.plan(manifest(memory("a", ", config: {value: 2}"), memory("b")))
    assert [(line.name, line.act) for line in lines] == [("a", "change"), ("b", "create")]
    assert lines[0].changes == {"config.value": (1, 2)}
    assert (await small.client.apply(manifest(memory("a", ", config: {value: 1}")))).changed == []


async def test_drift_is_seen_and_put_right(small):
    await small.client.apply(manifest(memory("a", ", config: {value: 1}")))
    await small.client.wait("a", "up")
    resource = small.host.hosted["a"]
    put = resource.adapter.done.count("put")
    resource.record.digest = "tampered"
    resource.observed = protocol.ObservedState(True, health.HealthState.UP, digest="tampered")
    await eventually(lambda: resource.adapter.done.count("put") > put)
    await eventually(lambda: resource.record.digest != "tampered")

    async def mended():
        return not (await small.client.get("a"))[0].drift

    await eventually(mended)


async def test_what_keeps_falling_is_damped_and_then_given_up(small):
    more = ", restart: {attempts: 3, delay_s: 0.01, delay_s_max: 0.05}"
    await small.client.apply(manifest(memory("a", more)))
    await small.client.wait("a", "up")
    adapter = small.host.hosted["a"].adapter
    for _ in range(4):
        await eventually(lambda: adapter.state is health.HealthState.UP)
        adapter.die("oops")
        await eventually(lambda: adapter.state is health.HealthState.UP or _state(small, "a") == "failed")
    row = await small.client.wait("a", "failed")
    assert "given up after 3 restarts" in row.reason
    await small.client.apply(manifest(memory("a", more + ", config: {value: 7}")))
    await small.client.wait("a", "up")


def _state(fleet: Any, name: str) -> Any:
    return fleet.man.managed[name].runtime.health.state.value


async def test_exec_and_its_refusals(small):
    await small.client.apply(manifest(memory("a"), memory("b", ", config: {fails: [echo]}")))
    await small.client.wait("a", "up")
    await small.client.wait("b", "up")
    answers = await small.client.exec("echo", where="type = 'memory'", arguments={"text": "hello"})
    assert [(answer.resource, answer.outcome, answer.result) for answer in answers] == [
        ("a", "done", "hello"),
        ("b", "failed", None),
    ]
    done = small.host.hosted["a"].adapter.done
    for _ in range(2):
        await small.client.exec("echo", "a", id="once")
    assert done.count("echo") == 2, "the first and the one called once"
    with pytest.raises(errors.NotFound):
        await small.client.exec("echo", "nobody")
    with pytest.raises(errors.InvalidInput):
        await small.client.exec("echo")
    audit = await small.client.decisions()
    whats = [(decision.who, decision.what, decision.outcome.value) for decision in audit]
    assert ("ann", "apply", "done") in whats
    assert ("ann", "exec", "failed") in whats
    assert ("ann", "exec", "refused") in whats


async def test_a_rollout_stops_after_too_many_errors(small):
    bad = ", config: {fails: [echo]}"
    await small.client.apply(manifest(memory("a"), memory("b", bad), memory("c"), memory("d")))
    for name in "abcd":
        await small.client.wait(name, "up")
    begun = await small.client.rollout({"operation": "echo", "batch": "1"}, "a", "b", "c", "d")
    ended = await eventually(lambda: _rollout(small, begun.id))
    assert ended.state == "stopped"
    assert ended.counts == {"done": 1, "failed": 1, "pending": 2}
    begun = await small.client.rollout(
        {"operation": "echo", "batch": "50%", "errors_max": 1, "pause_s": 0.01}, where="type = 'memory'"
    )
    ended = await eventually(lambda: _rollout(small, begun.id))
    assert (ended.state, ended.counts) == ("done", {"done": 3, "failed": 1})


async def _rollout(fleet: Any, id: str) -> Any:
    rollout = (await fleet.client.rollouts(id))[0]
    return rollout if rollout.state != "running" else None


async def test_a_rollout_with_unreachable_resources_stops_and_lists_them(small):
    other = await small.agent("host-b")
    await small.client.apply(manifest(memory("a"), memory("z", agent="host-b")))
    await small.client.wait("a", "up")
    await small.client.wait("z", "up")
    await other.stop()
    begun = await small.client.rollout({"operation": "echo", "batch": "100%"}, "a", "z")
    ended = await eventually(lambda: _rollout(small, begun.id))
    assert (ended.state, ended.reason) == ("stopped", "1 of 2 resources could not be reached")
    assert (ended.counts, ended.unreachable) == ({"done": 1, "unreachable": 1}, ["z"])


async def test_draining_an_agent_stops_its_resources_and_gives_it_no_more(small):
    await small.client.apply(manifest(memory("a")))
    await small.client.wait("a", "up")
    await small.client.drain("host-a")
    await eventually(lambda: small.host.hosted["a"].adapter.state is health.HealthState.DOWN)
    with pytest.raises(errors.Unavailable, match=r"all agents that match .* are drained"):
        await small.client.apply("resources: [{name: b, type: memory, where: \"agent = 'host-a'\"}]")
    await small.client.undrain("host-a")
    await eventually(lambda: small.host.hosted["a"].adapter.state is health.HealthState.UP)


async def test_where_chooses_among_agents_by_labels_and_facts(small):
    await small.agent("host-b", labels={"disk": "ssd"}, zone="east")

    async def known():
        return {agent.name for agent in await small.client.agents()} == {"host-a", "host-b"}

    await eventually(known)
    await small.client.apply("resources: [{name: b, type: memory, where: \"disk = 'ssd' AND os = 'linux'\"}]")
    row = await small.client.wait("b", "up")
    assert row.agent == "host-b"
    assert [entry.name for entry in await small.client.get(where="zone = 'east'")] == ["b"]


async def test_silence_of_one_is_down_and_of_a_whole_zone_is_unknown(small):
    second = await small.agent("host-b", zone="default")
    await small.client.apply(manifest(memory("a"), memory("z", agent="host-b")))
    for name in ("a", "z"):
        await small.client.wait(name, "up")
    await second.stop()
    row = await small.client.wait("z", "down")
    assert "silent while others of its zone are not" in row.reason
    assert {agent.name: agent.state for agent in await small.client.agents()}["host-b"] == "down"
    assert _state(small, "a") == "up"
    await small.host.stop()
    row = await small.client.wait("a", "unknown")
    assert "the zone default has been silent" in row.reason


async def test_a_new_manager_does_not_repeat_operations_of_a_checkpoint(small):
    await small.client.apply(manifest(memory("a")))
    await small.client.wait("a", "up")
    await small.host.stop()
    await small.man.abandon()
    await small.manager("manager-2")
    # It begins with a checkpoint that says: up.
    row = await small.client.wait("a", "unknown", timeout_s=40)
    assert row.manager == "manager-2"
    assert "has not replied" in row.reason
    await small.agent("host-a")
    await small.client.wait("a", "up")


async def test_an_agent_comes_back_and_its_resources_with_it(small):
    await small.client.apply(manifest(memory("a")))
    await small.client.wait("a", "up")
    await small.host.stop()
    await small.client.wait("a", "unknown")
    await small.agent("host-a")
    await small.client.wait("a", "up")


async def test_resources_are_spread_evenly_and_a_leaving_manager_releases_its_own(small):
    names = [f"r{number}" for number in range(20)]
    await small.client.apply(manifest(*map(memory, names)))
    second = await small.manager("manager-2")
    await eventually(lambda: len(second.managed) == 10 and len(small.man.managed) == 10)
    await second.stop()
    await eventually(lambda: len(small.man.managed) == 20)
    rows = await small.client.get()
    assert {row.manager for row in rows} == {"manager-1"}


async def test_while_nothing_can_be_stored_the_registry_keeps_managers_going_and_takes_nothing(small):
    await small.client.apply(manifest(memory("a", ", restart: {delay_s: 0.01}")))
    await small.client.wait("a", "up")

    async def refuse(*_: Any, **options: Any) -> None:
        raise errors.Unavailable("nothing can be stored")

    small.reg.log.write, kept = refuse, small.reg.log.write
    with pytest.raises(errors.Unavailable):
        await small.client.apply(manifest(memory("b")))
    adapter = small.host.hosted["a"].adapter
    before = small.man.renewal.valid_until
    adapter.die("oops")
    await eventually(lambda: adapter.state is health.HealthState.UP)
    await eventually(lambda: small.man.renewal.valid_until > before)
    small.reg.log.write = kept
    await small.client.apply(manifest(memory("b")))
    await small.client.wait("b", "up")

    async def caught_up():
        return (await small.client.get("a"))[0].restarts == 1

    await eventually(caught_up)


async def test_an_operation_begun_by_another_manager_is_recognised_and_an_equal_desired_state_is_fulfilled(
    small,
):
    await small.client.apply(manifest(memory("a", ", config: {value: 1}")))
    await small.client.wait("a", "up")
    managed = small.man.managed["a"]
    managed.runtime.generation = 0  # as in a manager that took over before its predecessor could report
    await small.client.apply(manifest(memory("a", ", config: {value: 1}, labels: {x: y}")))
    row = await small.client.wait("a", "up")
    assert row.applied
    assert small.host.hosted["a"].adapter.done.count("create") == 1


async def test_large_specifications_and_long_reasons_go_in_pages(small):
    """What one message cannot hold goes in several; one that is too large is refused."""
    with pytest.raises(errors.LimitExceeded, match="configuration"):
        await small.client.create(
            {"name": "x", "type": "memory", "agent": "host-a", "config": {"value": "v" * 300_000}}
        )
    names = [f"r{number}" for number in range(12)]
    for name in names:
        await small.client.create(
            {"name": name, "type": "memory", "agent": "host-a", "config": {"value": "v" * 200_000}}
        )
    await eventually(lambda: len(small.man.managed) == len(names), timeout_s=30)
    second = await small.manager("manager-2")  # gets its share in one commit, more than a message holds
    await eventually(lambda: len(second.managed) == len(small.man.managed) == len(names) // 2, timeout_s=30)
    await small.man.abandon()
    await eventually(lambda: len(second.managed) == len(names), timeout_s=30)
    for name in names:
        await small.client.wait(name, "up")
