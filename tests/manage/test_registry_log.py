"""The registry's records in a log: written by the owner, read by a standby and after a restore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from muster.bus.log import journal, owned_log
from muster.bus.memory import network
from muster.core import health
from muster.manage import protocol
from muster.manage.registry import records, registry_log
from muster.testing import fixtures
from muster.testing.eventually import eventually
from tests.manage import assignment_cases

Open = Callable[..., Awaitable[registry_log.RegistryLog]]
RESOURCES, OWNERS, STATUSES = registry_log.RESOURCES, registry_log.OWNERS, registry_log.STATUSES


@pytest.fixture(params=["broker", "simulated"])
async def opened(
    request: pytest.FixtureRequest,
    connect: fixtures.Connect,
    simulated_network: network.SimulatedNetwork,
) -> AsyncIterator[Open]:
    logs: list[registry_log.RegistryLog] = []
    connect_to = connect if request.param == "broker" else simulated_network.connect

    async def make(epoch: int = 0) -> registry_log.RegistryLog:
        log = await registry_log.RegistryLog.open(await connect_to(f"registry-{len(logs)}"), ttl_s=5.0)
        await log.start()
        logs.append(log)
        if epoch:
            await log.own(epoch)
        return log

    yield make
    for log in logs:
        await log.stop()


def resource(name: str, agent: str = "host-a", **more: object) -> tuple[str, str, bytes]:
    spec = protocol.ResourceSpec(name=name, type="memory", agent=agent)
    record = records.ResourceRecord(spec=spec, generation=1, **more)  # type: ignore[arg-type]
    return RESOURCES, name, msgspec.json.encode(record)


def owner(name: str, epoch: int) -> tuple[str, str, bytes]:
    return OWNERS, name, msgspec.json.encode(records.ResourceOwner(manager="m", epoch=epoch))


def status(name: str) -> tuple[str, str, bytes]:
    return STATUSES, name, msgspec.json.encode(protocol.ResourceStatus(state=health.HealthState.UP))


def content(log: registry_log.RegistryLog, collection: str, **options: Any) -> list[tuple[str, bytes]]:
    return [(record.key, record.value) for record in log.scan(collection, **options)]


async def test_a_standby_has_what_was_written(opened: Open):
    log = await opened(1)
    standby = await opened()
    await log.write([resource("a"), resource("b"), owner("a", 3), status("a"), ("x", "k", b"1")])
    assert log.take_touched() == {"m"}
    assert not log.take_touched()
    await log.write([("x", "k", b"2"), ("x", "j", b"3"), (registry_log.META, registry_log.EPOCH, b"7")])
    await eventually(lambda: standby.fleet.epoch == 7)
    for each in (log, standby, await opened()):
        assert set(each.fleet.resources) == {"a", "b"}
        assert each.fleet.owners["a"].epoch == 3
        assert each.fleet.statuses["a"].state is health.HealthState.UP
        assert content(each, "x") == [("j", b"3"), ("k", b"2")]
        assignment_cases.check(each.fleet)
    await log.write([(collection, "a", None) for collection in (RESOURCES, OWNERS, STATUSES)])
    await standby.own(2)
    assert set(standby.fleet.resources) == {"b"}
    assert not standby.fleet.owners
    with pytest.raises(owned_log.NotOwner):
        await log.write([("x", "k", b"stale")])
    assert log.lost.is_set()
    assert content(standby, "x") == [("j", b"3"), ("k", b"2")]


async def test_records_are_listed_in_pages(opened: Open):
    log = await opened(1)
    await log.write([("steps", f"{rollout}/{n}", b"%d" % n) for rollout in "ab" for n in range(5)])
    assert content(log, "steps", prefix="a/", limit=2) == [("a/0", b"0"), ("a/1", b"1")]
    assert [record.key for record in log.scan("steps", prefix="a/", after="a/1")] == ["a/2", "a/3", "a/4"]
    assert [record.key for record in log.scan("steps", after="b/3")] == ["b/4"]
    await log.write([("steps", "a/2", None), ("steps", "a/22", b"22"), ("steps", "a/3", b"changed")])
    assert content(log, "steps", prefix="a/", after="a/1", limit=2) == [("a/22", b"22"), ("a/3", b"changed")]
    assert log.scan("other") == []


async def test_a_request_is_known_to_the_next_owner(opened: Open):
    log = await opened(1)
    await log.write([("x", "k", b"1")], request="ann/1")
    assert log.executed("ann/1")
    assert not log.executed("ann/2")
    other = await opened(2)
    assert other.executed("ann/1")


async def test_a_restored_log_gives_epochs_beyond_all_that_were_given_since(opened: Open):
    log = await opened(1)
    await log.write(
        [resource("a"), owner("a", 7), status("a"), (registry_log.META, registry_log.EPOCH, b"7")]
    )
    restored = await opened()
    await restored.mark_restored(clock=lambda: 1_000.0)
    epoch = 1_000 * registry_log.EPOCHS_A_SECOND
    await restored.mark_restored(clock=lambda: 2_000.0)
    for each in (restored, await opened(5)):
        assert each.fleet.epoch == 2_000 * registry_log.EPOCHS_A_SECOND
        assert each.fleet.lost_epochs == [(7, epoch), (epoch, 2 * epoch)]
        assert not each.fleet.owners
        assert set(each.fleet.resources) == set(each.fleet.statuses) == {"a"}


async def test_leases_that_count_from_a_lower_number_again_do_not_stop_the_registry(opened: Open):
    log = await opened(50)
    other = await opened()
    with pytest.raises(owned_log.NotOwner):
        await other.own(3, is_held=lambda: False)
    assert await other.own(3) == 51
    with pytest.raises(owned_log.NotOwner):
        await log.write([("x", "k", b"stale")])


async def test_a_log_that_is_written_again_keeps_its_records(opened: Open, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal, "TRIM_BYTES_MIN", 20_000)
    log = await opened(1)
    standby = await opened()
    await log.write([resource("a"), owner("a", 1), ("x", "kept", b"k")])
    for n in range(300):
        await log.write([("x", f"hot-{n % 7}", b"%d" % n * 100)])
    assert log._log.stored_bytes < 60_000
    await eventually(lambda: standby.get("x", "hot-5") == log.get("x", "hot-5"))
    for each in (log, standby, await opened()):
        assert set(each.fleet.resources) == set(each.fleet.owners) == {"a"}
        assert each.scan("x") == log.scan("x")
        assignment_cases.check(each.fleet)
    await asyncio.gather(*(log.write([("x", f"{n}", b"")]) for n in range(20)))
