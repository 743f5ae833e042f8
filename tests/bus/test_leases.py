"""Leases on a real broker, with the trust of a real domain: each holder under credentials of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal

import pytest

from muster.bus import api, lease_state, leases
from muster.bus.brokers import broker, config
from muster.bus.client import client
from muster.core import errors
from muster.testing.eventually import eventually, throughout
from muster.trust import keyring
from muster.trust.permissions import roles
from tests.bus import sockets

NAME = "manage.registry"


@pytest.fixture
async def server(tmp_path):
    """A broker with trust, and the keys of its domain."""
    trust = keyring.Keyring.create(tmp_path / "trust", "fleet")
    known = trust.broker()
    believed = config.OperatorTrust(
        operator_jwt=known.operator_jwt, system_account=known.system_account, accounts=known.accounts
    )
    settings = config.BrokerConfig(name="b", directory=tmp_path / "b", trust=believed)
    async with broker.Broker(settings) as running:
        yield running, trust


@pytest.fixture
async def join(server):
    """Connect under an identity that may hold leases: the bus, and its leases with this time to live."""
    running, trust = server
    async with contextlib.AsyncExitStack() as stack:

        async def make(identity: str, *, ttl_s: float = 30.0) -> tuple[client.NatsBus, leases.Leases]:
            trust.issue(identity, roles.Role.REGISTRY)
            bus = await client.connect([running.url], creds=trust.credentials(identity))
            stack.push_async_callback(bus.close)
            return bus, await stack.enter_async_context(await leases.Leases.open(bus, ttl_s=ttl_s))

        yield make


async def test_one_holds_it_and_the_next_gets_it_when_released(join):
    _, first = await join("m1")
    _, second = await join("m2")
    lease = await first.acquire(NAME)
    assert lease.held
    assert await second.try_acquire(NAME) is None
    assert await second.holder(NAME) == ("m1", lease.epoch)
    with pytest.raises(errors.TimedOut):
        await second.acquire(NAME, timeout_s=0.2)
    waiting = asyncio.create_task(second.acquire(NAME))
    await throughout(lambda: not waiting.done(), for_s=0.05)
    await lease.release()
    async with asyncio.timeout(30):
        other = await waiting
    assert lease.lost.is_set()
    assert not lease.held
    assert other.epoch > lease.epoch


async def test_closing_ends_those_that_wait(join):
    _, first = await join("m1")
    _, second = await join("m2")
    await first.acquire(NAME)
    waiting = asyncio.create_task(second.acquire(NAME))
    await eventually(lambda: any(run._watching for run in second._runs))
    await second.close()
    with pytest.raises(errors.NotConnected):
        async with asyncio.timeout(10):
            await waiting


async def test_time_goes_on_while_the_machine_is_suspended(join, monkeypatch):
    """The loop's clock stops; the lease of a machine that wakes up later has ended before it acts."""
    _, first = await join("m1")
    lease = await first.acquire(NAME)
    assert lease.held
    slept_s = 0.0
    monkeypatch.setattr(leases, "suspended_s", lambda: slept_s)
    before = lease.remaining_s
    slept_s = 20.0
    assert 0 < lease.remaining_s <= before - 20
    slept_s = 31.0
    assert not lease.held
    assert lease.remaining_s <= 0


async def test_a_release_between_the_first_look_and_the_watch_is_not_missed(join, monkeypatch):
    _, first = await join("m1")
    _, second = await join("m2")
    lease = await first.acquire(NAME)
    watch = second._bucket.watch

    async def late(name: str) -> api.KeyWatch:
        (run,) = second._runs
        await eventually(lambda: run.candidate._record is not None)
        await lease.release()
        begun: api.KeyWatch = await watch(name)
        return begun

    monkeypatch.setattr(second._bucket, "watch", late)
    async with asyncio.timeout(30):
        assert (await second.acquire(NAME)).epoch > lease.epoch


async def test_one_of_many_candidates_holds_the_lease(join):
    everyone = [(await join(f"m{n}"))[1] for n in range(4)]
    held: list[leases.Lease] = []

    async def turn(candidate: leases.Leases) -> None:
        async with await candidate.acquire(NAME, timeout_s=30) as lease:
            assert not any(other.held for other in held)
            held.append(lease)

    await asyncio.gather(*(turn(candidate) for candidate in everyone))
    epochs = [lease.epoch for lease in held]
    assert epochs == sorted(epochs)
    assert len(set(epochs)) == 4


async def test_a_dead_holder_is_replaced_at_once(join):
    dying, first = await join("m1")
    _, second = await join("m2")
    lease = await first.acquire(NAME)
    waiting = asyncio.create_task(second.acquire(NAME))
    await throughout(lambda: not waiting.done(), for_s=0.1)
    started = asyncio.get_running_loop().time()
    sockets.kill(dying)
    async with asyncio.timeout(30):
        other = await waiting
    assert asyncio.get_running_loop().time() - started < 20, "before its 30 s are over"
    assert other.epoch > lease.epoch
    await eventually(lambda: not lease.held)
    fence = leases.EpochFence()
    fence.check(other.epoch)
    with pytest.raises(errors.StaleEpoch) as caught:
        fence.check(lease.epoch)
    assert (caught.value.epoch, caught.value.current) == (lease.epoch, other.epoch)


@pytest.mark.parametrize("broker_ended", [False, True])
async def test_a_process_that_starts_after_its_predecessor_died_does_not_wait(join, server, broker_ended):
    dying, first = await join("m1", ttl_s=120)
    lease = await first.acquire(NAME)
    sockets.kill(dying)
    await eventually(lambda: not lease.held)
    if broker_ended:
        running, _ = server
        before = running.pid
        os.kill(before, signal.SIGKILL)  # it is started again, and knows no earlier connection
        await eventually(lambda: running.state is broker.BrokerState.RUNNING and running.pid != before)
    async with asyncio.timeout(30):
        _, second = await join("m2", ttl_s=120)
        other = await second.acquire(NAME)
    assert other.epoch > lease.epoch


async def test_a_living_holder_is_not_taken_for_dead_by_one_that_starts_later(join):
    _, first = await join("m1")
    lease = await first.acquire(NAME)
    bus, second = await join("m2")
    assert not await bus.is_closed(first._bus.connection)
    with pytest.raises(errors.TimedOut):
        await second.acquire(NAME, timeout_s=0.5)
    assert lease.held
    gone = dataclasses.replace(first._bus.connection, broker="another", broker_name="another")
    assert not await bus.is_closed(gone), "of an unknown broker"


async def test_a_holder_that_lost_its_connection_continues_without_a_takeover(join):
    bus, mine = await join("m1")
    lease = await mine.acquire(NAME)
    before = bus.connection
    held_at: list[tuple[api.ConnectionState, bool]] = []
    bus.on_state(lambda state: held_at.append((state, lease.held)))
    sockets.cut(bus)
    await eventually(lambda: bus.connection not in (None, before) and lease.held)
    assert held_at[0] == (api.ConnectionState.RECONNECTING, False)
    assert not lease.lost.is_set()
    assert await mine.holder(NAME) == ("m1", lease.epoch)


async def test_a_silent_holder_is_replaced_when_its_time_is_over(join):
    bus, first = await join("m1", ttl_s=2)
    _, second = await join("m2", ttl_s=2)
    lease = await first.acquire(NAME)
    bus._wire.send = lambda *_: False  # nothing leaves this process any more, and it gets no error
    waiting = asyncio.create_task(second.acquire(NAME))
    async with asyncio.timeout(30):
        await eventually(lambda: not lease.held)
        assert not waiting.done(), "it stops to act before another can have it"
        other = await waiting
    assert other.epoch > lease.epoch
    del bus._wire.send
    await eventually(lease.lost.is_set)
    assert lease.lost_because == "another process has taken over"


async def test_renewal_keeps_it(join):
    _, first = await join("m1", ttl_s=2)
    _, second = await join("m2", ttl_s=2)
    lease = await first.acquire(NAME)
    with pytest.raises(errors.TimedOut):
        await second.acquire(NAME, timeout_s=3)
    assert lease.held
    assert await second.holder(NAME) == ("m1", lease.epoch)


async def test_bad_names_and_times(join):
    bus, mine = await join("m1")
    for name in ("", "a..b", "a b", "manage.*"):
        with pytest.raises(errors.InvalidInput):
            await mine.acquire(name)
    with pytest.raises(errors.InvalidInput):
        await leases.Leases.open(bus, ttl_s=0.5)


async def test_a_record_of_another_version_is_left_alone(join):
    _, mine = await join("m1", ttl_s=1)
    await mine._bucket.put(NAME, b'{"holder": "m2", "since": 1}')
    assert await mine.try_acquire(NAME) is None
    with pytest.raises(errors.TimedOut):
        await mine.acquire(NAME, timeout_s=3)


@pytest.mark.parametrize("value", [b"", b"report", b'{"stream":"reports", "seq":7}'])
async def test_a_value_that_is_no_record_ends_the_lease_and_expires(join, value):
    """The broker stores its replies wherever a client names. The former holder acts no longer when another
    process takes over, and no process has to remove the value."""
    _, first = await join("m1", ttl_s=1)
    _, second = await join("m2", ttl_s=1)
    lease = await first.acquire(NAME)
    waiting = asyncio.create_task(second.acquire(NAME))
    await first._bucket.put(NAME, value)
    async with asyncio.timeout(30):
        other = await waiting
    assert not lease.held
    assert lease.lost.is_set()
    assert other.epoch > lease.epoch


def test_the_record_is_readable_by_others():
    assert lease_state.LeaseRecord.__struct_fields__ == (
        "holder",
        "claim",
        "broker",
        "connection",
        "ttl_s",
        "epoch",
        "broker_name",
    )
