"""The eight operations on a resource over the bus: get, put, create, delete, rename, enumerate, subscribe,
execute."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import msgspec
import pytest

from muster.bus.client import received
from muster.bus.rpc import single_flight
from muster.core import errors, health
from muster.manage import client, protocol
from muster.manage.adapters import base
from muster.manage.adapters import memory as memory_
from muster.manage.manager import agent_calls, manager
from muster.manage.registry import operations, views
from muster.testing.eventually import eventually


@pytest.fixture
async def small(fleet):
    fleet.reg = await fleet.registry()
    fleet.man = await fleet.manager()
    fleet.host = await fleet.agent()
    return fleet


def memory(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "memory", "agent": "host-a", **more}


async def test_create_get_put_delete(small):
    made = await small.client.create(memory("a", config={"value": 1}))
    assert (made.name, made.generation) == ("a", 1)
    with pytest.raises(errors.AlreadyExists):
        await small.client.create(memory("a"))
    with pytest.raises(errors.InvalidInput, match="no_such"):
        await small.client.create(memory("b", config={"no_such": 1}))
    await small.client.wait("a", "up")
    seen = await small.client.observe("a")
    assert (seen.exists, seen.state.value) == (True, "up")

    changed = await small.client.put("a", config={"value": 2}, generation=1)
    assert changed.generation == 2
    await eventually(lambda: small.host.hosted["a"].adapter.config.value == 2)
    with pytest.raises(errors.Conflict, match="meanwhile"):
        await small.client.put("a", config={"value": 3}, generation=1)
    with pytest.raises(errors.NotFound):
        await small.client.put("nobody", desired="down")
    await small.client.put("a", desired="down")
    await eventually(lambda: small.host.hosted["a"].adapter.state is health.HealthState.DOWN)

    await small.client.delete("a")
    await small.client.wait_gone("a")
    with pytest.raises(errors.NotFound):
        await small.client.describe("a")


async def test_a_get_observes_once_and_returns_what_it_reports(small, monkeypatch):
    await small.client.create(memory("a"))
    await small.client.wait("a", "up")
    observe, observed = memory_.MemoryAdapter.observe, []

    async def count(adapter: memory_.MemoryAdapter) -> protocol.ObservedState:
        observed.append(adapter.context.name)
        return await observe(adapter)

    monkeypatch.setattr(memory_.MemoryAdapter, "observe", count)
    hosted = small.host.hosted["a"]
    answer = await small.host.execute(
        protocol.Operation(id="1", verb=protocol.Verb.GET, resource="a", epoch=hosted.record.epoch)
    )
    assert observed == ["a"]
    assert answer.observed is not None
    assert answer.result == msgspec.to_builtins(answer.observed)
    assert answer.observed.state is health.HealthState.UP


async def test_execute_returns_the_result_or_the_error(small):
    await small.client.create(memory("a", config={"fails": ["stop"], "hangs": ["restart"]}))
    await small.client.wait("a", "up")
    assert await small.client.execute("a", "echo", {"text": "hi"}) == "hi"
    assert "echo" in await small.client.operations("a")
    with pytest.raises(errors.NotFound, match="dance"):
        await small.client.execute("a", "dance")
    with pytest.raises(errors.Refused, match="as configured"):
        await small.client.execute("a", "stop")
    with pytest.raises(errors.InvalidInput):
        await small.client.execute("a", "echo", {"no_such_argument": 1})
    for verb in ("rename", "create", "delete", "put", "subscribe"):
        with pytest.raises(errors.NotFound, match="no operation"):
            await small.client.execute("a", verb, {"from": "a"})


async def test_an_error_within_an_operation_is_not_the_callers():
    class Faulty(memory_.MemoryAdapter):
        async def do_fail(self, number: int = 1) -> None:
            self.done.append("half")
            raise TypeError("a bug of the adapter")

    adapter = Faulty(base.AdapterContext("a", None, lambda _: None))
    with pytest.raises(TypeError, match="a bug"):
        await adapter.execute("fail", {"number": 2})
    with pytest.raises(errors.InvalidInput, match="unexpected keyword argument 'other'"):
        await adapter.execute("fail", {"other": 2})
    assert adapter.done == ["half"]


async def test_enumerate_goes_page_by_page(small):
    names = [f"r{number:03}" for number in range(7)]
    for name in names:
        await small.client.create(memory(name, labels={"odd": str(int(name[1:]) % 2)}))
    actual, after = [], ""
    while True:
        page = await small.client.enumerate(after=after, limit=3)
        assert len(page.items) <= 3
        actual += [row.name for row in page.items]
        if page.next is None:
            break
        after = page.next
    assert actual == names
    assert await small.client.names(where="odd = '1'") == names[1::2]
    assert [row.name for row in await small.client.get()] == names
    assert (await small.client.enumerate(where="name = 'nobody'")).items == []
    with pytest.raises(errors.InvalidInput):
        await small.client.enumerate(where="name =")


async def test_rename_leaves_the_process_running(small, process_manifest):
    await small.client.apply(process_manifest("old"))
    await small.client.create(memory("web", depends_on=["old"]))
    await small.client.wait("old", "up")
    await small.client.wait("web", "up")
    pid = small.host.hosted["old"].observed.properties["pid"]
    epoch = (await small.client.describe("old")).epoch

    renamed = await small.client.rename("old", "new")
    assert renamed.name == "new"
    row = await small.client.wait("new", "up")
    assert row.epoch > epoch
    assert (await small.client.observe("new")).properties["pid"] == pid, "it was not started anew"
    assert (await small.client.describe("web")).spec.depends_on == ("new",)
    assert await small.client.names() == ["new", "web"]

    # A manager from before cannot bring the former name back.
    late = protocol.Operation(
        id="late", verb=protocol.Verb.CREATE, resource="old", epoch=epoch, type="memory", config={}
    )
    assert (await small.host.execute(late)).code == errors.StaleEpoch.code
    assert not small.host.hosted["old"].observed.exists

    # It is watched under its new name, and lives on through a restart of its agent.
    await small.host.stop()
    small.host = await small.agent()
    await eventually(lambda: small.host.hosted["new"].observed.properties.get("pid") == pid)
    os.kill(pid, signal.SIGKILL)

    async def started_anew():
        return (await small.client.observe("new")).properties["pid"] not in (pid, None)

    await eventually(started_anew)
    # The former name is free again.
    await small.client.create(memory("old"))
    await small.client.wait("old", "up")
    assert small.host.hosted["new"].observed.exists


async def test_a_kill_by_exec_is_one_failure_and_never_shown_up_while_dead(small, process_manifest):
    await small.client.apply(
        process_manifest("web").replace("delay_s: 0.05", "delay_s: 0.05, delay_s_max: 0.05")
    )
    await small.client.wait("web", "up")
    runtime = small.man.managed["web"].runtime
    async with small.client.listening("web") as changes:
        for kills in range(1, 4):
            pid = runtime.observed.properties["pid"]
            await small.client.execute("web", "signal", {"number": 9})
            messages = []
            async for change in changes:
                if isinstance(change, protocol.ResourceStateChange):
                    messages.append(change.state)
                    if change.state is health.HealthState.UP:
                        break
            assert messages[0] is not health.HealthState.UP
            assert messages.count(health.HealthState.DOWN) == 1
            assert len(runtime.failures) == kills, "one kill is one failure"
            assert runtime.observed.properties["pid"] != pid, "what is up is not what was killed"


async def test_rename_is_refused_where_it_cannot_be(small):
    await small.client.create(memory("a"))
    await small.client.create(memory("b"))
    with pytest.raises(errors.AlreadyExists):
        await small.client.rename("a", "b")
    with pytest.raises(errors.NotFound):
        await small.client.rename("nobody", "c")
    with pytest.raises(errors.InvalidInput):
        await small.client.rename("a", "not a name")
    await small.client.apply("topologies: [{name: t, shape: chain, size: 1, agent: host-a}]")
    with pytest.raises(errors.Refused, match="topology"):
        await small.client.rename("t-1", "x")


async def test_subscribe_receives_changes_and_events_of_resources(small):
    changes: list[protocol.ResourceStateChange | protocol.ResourceEvent] = []
    begun = asyncio.Event()

    async def listen(where: str) -> None:
        async for item in small.client.subscribe("a", where=where):
            changes.append(item)
            begun.set()

    await small.client.create(memory("a"))
    await small.client.create(memory("b"))
    await small.client.wait("a", "up")
    await small.client.wait("b", "up")
    task = asyncio.create_task(listen("state = 'down' OR what = 'disk-full'"))
    try:
        adapter = small.host.hosted["a"].adapter

        async def happens():
            adapter.context.report_event("disk-full", path="/data")
            small.host.hosted["b"].adapter.context.report_event("disk-full")
            return begun.is_set()

        await eventually(happens)
        event = changes[0]
        assert isinstance(event, protocol.ResourceEvent)
        assert (event.resource, event.what, event.details) == ("a", "disk-full", {"path": "/data"})
        adapter.die("oops")
        await eventually(
            lambda: any(isinstance(state_change, protocol.ResourceStateChange) for state_change in changes)
        )
        change = next(
            state_change for state_change in changes if isinstance(state_change, protocol.ResourceStateChange)
        )
        assert (change.state, change.was) == (health.HealthState.DOWN, health.HealthState.UP)
        assert all(state_change.resource == "a" for state_change in changes)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_watch_selects_by_the_attributes_of_resources_and_by_fields_of_the_change(small):
    """A label, the group and the zone of the machine, together with the previous state."""
    await small.client.create(memory("a", group="web", labels={"team": "red"}))
    await small.client.create(memory("b", group="web", labels={"team": "blue"}))
    await small.client.wait("a", "up")
    await small.client.wait("b", "up")
    changes: list[protocol.ResourceStateChange] = []
    events: list[protocol.ResourceStateChange | protocol.ResourceEvent] = []

    async def watch() -> None:
        where = "team = 'red' AND group = 'web' AND zone = 'default' AND was = 'up'"
        async for change in small.client.watch(where=where):
            changes.append(change)  # noqa: PERF401  (as they arrive)

    async def listen() -> None:
        async for event in small.client.subscribe(where="team = 'blue' AND what = 'disk-full'"):
            events.append(event)  # noqa: PERF401  (as they arrive)

    tasks = [asyncio.create_task(watch()), asyncio.create_task(listen())]

    async def die() -> bool:
        for name in ("b", "a"):
            if small.host.hosted[name].adapter.state is health.HealthState.UP:
                small.host.hosted[name].adapter.die("oops")
            small.host.hosted[name].adapter.context.report_event("disk-full")
        return bool(changes and events)

    try:
        await eventually(die)
        assert {(change.resource, change.was) for change in changes} == {("a", health.HealthState.UP)}
        assert {event.resource for event in events} == {"b"}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_watch_refuses_an_attribute_that_no_resource_has(small):
    await small.client.create(memory("a", labels={"team": "red"}))
    with pytest.raises(errors.ParseError, match="no resource has an attribute taem") as refused:
        await anext(small.client.watch(where="taem = 'red' AND was = 'up'"))
    assert refused.value.hint == "did you mean team?"


async def test_an_agent_without_resources_is_up_until_it_is_silent(small, monkeypatch):
    async def state() -> str:
        return next((row.state for row in await small.client.agents() if row.name == "host-a"), "")

    async def is_up():
        return await state() == "up"

    await eventually(is_up)
    await small.host.stop()
    monkeypatch.setattr(views, "ABSENT_S", 0.0)
    assert await state() == "down"
    monkeypatch.undo()
    small.reg.presence.forget("host-a")
    assert await state() == "unknown"
    small.host = await small.agent()
    await eventually(is_up)


async def test_a_manager_without_a_renewal_sends_nothing(connect):
    lone = manager.Manager(await connect("lone"))
    operation = protocol.Operation(id="1", verb=protocol.Verb.GET, resource="a", epoch=1)
    answer = await lone._agents.call("host-a", operation)
    assert answer.code == "unavailable"
    assert answer.outcome.value == "failed"


async def test_answers_that_a_dying_broker_lost_are_asked_for_again_soon(small, monkeypatch):
    """Of the agent to the manager, of the manager to the registry, of the registry to the user."""
    await small.client.create(memory("a"))
    await small.client.wait("a", "up")
    for module, name in ((agent_calls, "RESEND_S"), (operations, "RESEND_S"), (client, "EXEC_TRY_S")):
        monkeypatch.setattr(module, name, 0.3)
    lost, respond = [], received.ReceivedMessage.respond

    async def lose_the_first(message: Any, data: bytes, **more: Any) -> None:
        kind = next(
            (word for word in ("operation", "execute", "exec") if word in message.subject.split(".")), ""
        )
        if kind and kind not in lost:
            lost.append(kind)
        else:
            await respond(message, data, **more)

    monkeypatch.setattr(received.ReceivedMessage, "respond", lose_the_first)
    async with asyncio.timeout(10):  # without a repetition it would be 35 s
        assert await small.client.execute("a", "echo", {"text": "hi"}) == "hi"
    assert lost == ["operation", "execute", "exec"]
    assert small.host.hosted["a"].adapter.done.count("echo") == 1


async def test_what_is_asked_again_while_it_is_under_way_is_done_once():
    begun, go_on = [], asyncio.Event()

    async def do() -> int:
        begun.append(1)
        await go_on.wait()
        return len(begun)

    async def fail() -> int:
        await go_on.wait()
        raise errors.Conflict("no")

    under_way = single_flight.SingleFlight[int]()
    requests = [asyncio.create_task(under_way.once("a", do)) for _ in range(3)]
    failing = [asyncio.create_task(under_way.once("b", fail)) for _ in range(2)]
    await eventually(lambda: begun)
    go_on.set()
    assert await asyncio.gather(*requests) == [1, 1, 1]
    assert all(
        isinstance(outcome, errors.Conflict)
        for outcome in await asyncio.gather(*failing, return_exceptions=True)
    )
    assert await under_way.once("a", do) == 2  # what has ended is done again
