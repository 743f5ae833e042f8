"""Agents report what they host; what does not belong there is listed and deleted. No resource runs twice.

In virtual time (`run_virtual`), with the real registry, manager and agents.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from muster.bus.memory import network
from muster.bus.rpc import client
from muster.core import errors, health, messages
from muster.manage import protocol, rows
from muster.manage.adapters import memory
from muster.manage.agent import agent
from muster.manage.registry import inventory, records
from muster.testing.eventually import eventually
from tests.manage import log_copies
from tests.manage.assignment_cases import own, renew, two
from tests.manage.test_registry import RegistryWorld, play, until

UP = health.HealthState.UP


def reported(*names: str, epoch: int = 1) -> list[protocol.ReportedResource]:
    return [protocol.ReportedResource(name, epoch, UP, 1, 77) for name in names]


# Decisions


def test_what_was_deleted_or_moved_is_an_orphan():
    core = two()  # web on agent a, db on b, alone on c
    orphans = inventory.find_orphans(core, "a", reported("web", "db", "gone"))
    assert [(row.name, row.reason, row.is_deleted, row.pid) for row in orphans] == [
        ("db", "it belongs to b", True, 77),
        ("gone", "it was deleted", True, 77),
    ]


def test_what_is_being_renamed_or_deleted_is_no_orphan():
    core = two()
    core.accept(core.rename("web", "www", "ann"))
    assert inventory.find_orphans(core, "a", reported("web", "www")) == []
    core.accept(core.delete(["www"], "ann"))
    assert inventory.find_orphans(core, "a", reported("web", "www")) == []


def test_what_this_registry_cannot_know_is_listed_only():
    core = two()
    core.epoch, core.lost_epochs = 100, [(10, 100)]
    rows = {
        epoch: inventory.find_orphans(core, "a", reported("gone", epoch=epoch))[0]
        for epoch in (10, 11, 100, 101)
    }
    assert {epoch: row.is_deleted for epoch, row in rows.items()} == {
        10: True,
        11: False,
        100: False,
        101: False,
    }
    assert rows[11].reason == inventory.RESTORED
    (row,) = inventory.find_orphans(core, "a", reported("db", epoch=50))
    assert row.is_deleted, "it runs elsewhere"


def test_each_page_replaces_its_part_of_the_inventory():
    core = two()
    kept = inventory.AgentInventories()

    def report(*names: str, after: str = "", until: str = "") -> list[str]:
        hosted = tuple(reported(*names))
        hello = protocol.AgentHello(boot=1, hosted=hosted, after=after, until=until)
        return [row.name for row in kept.record("a", hello, inventory.find_orphans(core, "a", hosted))]

    def listed() -> list[str]:
        return sorted(row.name for row in kept.rows())

    assert report("a1", "a2", until="a2") == ["a1", "a2"]
    assert report("b1", after="a2") == ["b1"]
    assert listed() == ["a1", "a2", "b1"]
    assert report("a2", until="a2") == []
    assert listed() == ["a2", "b1"]
    assert not kept.is_empty("a")
    kept.record("a", protocol.AgentHello(boot=1), [])
    assert listed() == ["a2", "b1"], "an earlier version of the agent, which reports nothing"
    report()
    assert (listed(), kept.count("a"), kept.is_empty("a")) == ([], 0, True)
    kept.expect_report("a")
    assert not kept.is_empty("a")


def test_only_so_many_orphans_are_listed(monkeypatch):
    monkeypatch.setattr(inventory, "ORPHANS_MAX", 3)
    kept, hosted = inventory.AgentInventories(), tuple(reported(*(f"x{number}" for number in range(5))))
    hello = protocol.AgentHello(boot=1, hosted=hosted)
    kept.record("a", hello, inventory.find_orphans(two(), "a", hosted))
    assert kept.count("a") == 3


def test_nothing_is_placed_on_a_forgotten_agent():
    core = two()
    renew(core, "m")
    own(core, {"web": "m"})
    core.accept(records.RegistryChanges(agents={"a": records.AgentRecord(types=("memory",))}))
    core.accept(core.forget("a"))

    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        await world.client.forget("host-a", force=True)
        with pytest.raises(errors.Conflict, match="was forgotten"):
            await world.apply("other")

    play(scenario)


# Partitions


async def second_agent(world: RegistryWorld) -> agent.Agent:
    made = agent.Agent(await world.net.connect("host-b"), None, beat_s=1.0)
    await world.stack.enter_async_context(made)
    await until(lambda: "host-b" in world.registry.processor.agents)
    return made


async def state_of(world: RegistryWorld, name: str) -> str:
    return next((row.state for row in await world.client.agents() if row.name == name), "")


def running(host: agent.Agent) -> set[str]:
    return {
        name
        for name, hosted in host.hosted.items()
        if hosted.record.config is not None and hosted.observed.state is UP
    }


def test_a_machine_that_returns_deletes_what_runs_elsewhere_now():
    async def scenario(world: RegistryWorld) -> None:
        other = await second_agent(world)
        await world.apply("web", "db", "own")
        with pytest.raises(errors.Conflict, match="is live"):
            await world.client.forget("host-a")
        world.net.cut("host-a")
        await until(lambda: world.registry.processor.statuses["web"].state is not UP)

        async def is_silent() -> bool:
            return await state_of(world, "host-a") != "up"

        await eventually(is_silent, timeout_s=120)
        assert (await world.client.forget("host-a")).resources == ["db", "own", "web"]
        assert await state_of(world, "host-a") == "forgotten"
        await world.apply("web", "db", agent="host-b")
        assert running(world.host) == {"web", "db", "own"}, "nobody can reach it"
        assert await world.client.forgotten() == [rows.ForgottenAgent(name="host-a")]
        world.net.heal()
        await until(lambda: not running(world.host), within_s=10.0)
        assert running(other) == {"web", "db"}
        await until(lambda: world.registry.presence.inventories.is_empty("host-a"))
        assert await world.client.orphans() == []
        assert [row.is_empty for row in await world.client.forgotten()] == [True]
        await world.client.forget("host-a", is_revoked=True)
        assert await state_of(world, "host-a") == ""

    play(scenario)


def test_a_report_from_before_an_agent_was_forgotten_does_not_count():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        world.net.cut("host-a")
        assert world.registry.presence.inventories.is_empty("host-a"), "its report is older than the resource"
        await world.client.delete("web", force=True)

        async def is_silent() -> bool:
            return await state_of(world, "host-a") != "up"

        await eventually(is_silent, timeout_s=120)
        await world.client.forget("host-a")
        assert await world.client.forgotten() == [rows.ForgottenAgent(name="host-a")]
        world.net.heal()
        await until(lambda: world.registry.presence.inventories.is_empty("host-a"))
        assert not running(world.host)

    play(scenario)


def test_a_resource_deleted_by_force_ends_when_its_machine_returns():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web", "db")
        world.net.cut("host-a")
        await asyncio.sleep(30.0)
        await world.client.delete("web", force=True)
        world.net.heal()
        await until(lambda: running(world.host) == {"db"})

    play(scenario)


def test_what_is_created_again_meanwhile_is_not_deleted():
    """The command is fenced: it does not concern what was assigned after it."""

    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        epoch = world.host.hosted["web"].record.epoch
        await world.host._delete_orphan("web", epoch - 1)
        assert running(world.host) == {"web"}
        await world.host._delete_orphan("web", epoch)
        assert running(world.host) == set()

    play(scenario)


def test_what_is_claimed_again_while_it_is_deleted_is_created_again(monkeypatch):
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        began, may_end = asyncio.Event(), asyncio.Event()
        delete = memory.MemoryAdapter.delete

        async def slow(self: memory.MemoryAdapter) -> None:
            began.set()
            await may_end.wait()
            await delete(self)

        monkeypatch.setattr(memory.MemoryAdapter, "delete", slow)
        await world.client.delete("web", force=True)
        await began.wait()
        await world.apply("web")  # it still runs, and its new manager has nothing to do
        may_end.set()
        await until(lambda: not running(world.host))
        await until(lambda: running(world.host) == {"web"}, within_s=10.0)

    play(scenario)


def test_a_live_agent_that_is_forgotten_by_force_deletes_its_resources():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web", "db")
        assert (await world.client.forget("host-a", force=True)).count == 2
        await until(lambda: not running(world.host), within_s=10.0)
        await until(lambda: not world.registry.processor.resources)
        await until(lambda: world.registry.presence.inventories.is_empty("host-a"), within_s=10.0)

    play(scenario)


def test_an_inventory_of_many_resources_is_sent_in_pages(monkeypatch):
    monkeypatch.setattr(protocol, "INVENTORY_PAGE", 2)

    async def scenario(world: RegistryWorld) -> None:
        names = [f"web-{number}" for number in range(5)]
        await world.apply(*names)
        world.net.cut("host-a")
        await asyncio.sleep(40.0)
        await world.client.delete("web-1", "web-4", force=True)
        world.net.heal()
        await until(lambda: running(world.host) == {"web-0", "web-2", "web-3"})

    play(scenario)


def test_what_is_deleted_between_two_pages_is_not_reported(monkeypatch):
    monkeypatch.setattr(protocol, "INVENTORY_PAGE", 1)

    async def scenario(world: RegistryWorld) -> None:
        await world.apply("a", "b", "c")
        exchange, pages = client.exchange_once, list[list[str]]()

        async def slow(bus: Any, subject: str, data: bytes, **options: Any) -> Any:
            hello = messages.decode(data, protocol.AgentHello)
            pages.append([item.name for item in hello.hosted or ()])
            world.host.hosted.pop("b", None)  # deleted, and its record was dropped
            return await exchange(bus, subject, data, **options)

        monkeypatch.setattr(client, "exchange_once", slow)
        await world.host._announce()
        assert pages == [["a"], ["c"]]

    play(scenario)


def test_a_restored_registry_deletes_nothing_that_it_cannot_know():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("old")
        copied = log_copies.copy_log(world.net)
        await world.apply("new")
        await world.registry.stop()
        await log_copies.restore_log(world.net, copied)
        for name in ("registry-2", "registry-3"):  # the second one reads the same log
            world.registry = await world.start_registry(name)
            await world.registry.acting.wait()
            await until(lambda: world.registry.presence.inventories.count("host-a") == 1)
            (orphan,) = await world.client.orphans()
            assert (orphan.name, orphan.is_deleted, orphan.reason) == ("new", False, inventory.RESTORED)
            assert running(world.host) == {"old", "new"}
            if name == "registry-2":
                await world.registry.stop()
        await world.apply("new")  # as the reason says
        assert running(world.host) == {"old", "new"}
        await until(lambda: world.registry.presence.inventories.count("host-a") == 0)

    play(scenario)


def test_a_registry_that_is_restored_again_still_deletes_nothing_that_it_cannot_know():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("old")
        copied = log_copies.copy_log(world.net)
        await world.apply("new")
        for number in range(2):  # the second backup is one of the restored log
            await world.registry.stop()
            await log_copies.restore_log(world.net, copied)
            world.registry = await world.start_registry(f"registry-{number}")
            await world.registry.acting.wait()
            await until(lambda: world.registry.presence.inventories.count("host-a") == 1)
            copied = log_copies.copy_log(world.net)
        (orphan,) = await world.client.orphans()
        assert (orphan.name, orphan.is_deleted) == ("new", False)
        assert running(world.host) == {"old", "new"}

    play(scenario)


# Records of an agent


def test_records_of_deleted_resources_are_dropped_and_stay_fenced(tmp_path, monkeypatch):
    from muster.manage.agent import resource_host

    monkeypatch.setattr(resource_host, "EMPTY_MAX", 4)

    def operation(verb: protocol.Verb, name: str, epoch: int, **more: Any) -> protocol.Operation:
        id = f"{verb.value}-{name}-{epoch}"
        return protocol.Operation(
            id=id, verb=verb, resource=name, epoch=epoch, manager="m", type="memory", **more
        )

    async def scenario(world: RegistryWorld) -> None:
        folder = tmp_path / "agent"
        host = agent.Agent(await world.net.connect("host-c"), folder)
        async with host:
            await host.execute(operation(protocol.Verb.CREATE, "kept", 1))
            for number in range(2, 22):
                await host.execute(operation(protocol.Verb.CREATE, f"job-{number}", number))
                (folder / f"job-{number}").mkdir()
                await host.execute(operation(protocol.Verb.DELETE, f"job-{number}", number))
            assert len(host.hosted) <= 6
            assert len(list(folder.iterdir())) <= 8, "records, and the files of boot and floor"
            refused = await host.execute(operation(protocol.Verb.CREATE, "job-2", 2, config={"value": 2}))
            assert refused.code == errors.StaleEpoch.code, "a late message of an earlier manager"
        again = agent.Agent(await world.net.connect("host-c"), folder)
        async with again:
            assert again.hosted["kept"].record.config is not None
            refused = await again.execute(operation(protocol.Verb.CREATE, "job-2", 2))
            assert refused.code == errors.StaleEpoch.code
            await again.execute(operation(protocol.Verb.CREATE, "job-2", 30))
            assert running(again) >= {"job-2"}

    play(scenario, starts=False)


def test_a_resource_that_is_created_while_its_old_record_is_dropped_keeps_its_new_one(tmp_path, monkeypatch):
    from muster.manage.agent import resource_host

    monkeypatch.setattr(resource_host, "EMPTY_MAX", 2)
    began, may_end, drop = threading.Event(), threading.Event(), resource_host._drop

    def slow(*arguments: Any) -> None:
        began.set()
        may_end.wait(10.0)
        drop(*arguments)

    monkeypatch.setattr(resource_host, "_drop", slow)

    async def scenario() -> None:
        host = agent.Agent(await network.SimulatedNetwork(1).connect("host-c"), tmp_path)

        async def act(verb: protocol.Verb, name: str, epoch: int) -> None:
            operation = protocol.Operation(
                id=f"{name}-{epoch}", verb=verb, resource=name, epoch=epoch, manager="m", type="memory"
            )
            assert (await host.execute(operation)).outcome is messages.DecisionOutcome.DONE

        for number in range(2):
            await act(protocol.Verb.DELETE, f"job-{number}", 1)
        dropping = asyncio.create_task(act(protocol.Verb.DELETE, "job-2", 1))
        await asyncio.to_thread(began.wait, 10.0)
        await act(protocol.Verb.CREATE, "job-0", 2)
        may_end.set()
        await dropping
        assert [record.epoch for record in resource_host._load(tmp_path)[1] if record.name == "job-0"] == [2]

    asyncio.run(scenario())
