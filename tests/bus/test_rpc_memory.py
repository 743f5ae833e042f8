"""`bus/rpc` on the in-memory twin, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from muster.bus.memory import network
from muster.bus.rpc import admission, request_audit, server
from muster.core import errors, leaky_buckets
from tests.bus import rpc_contract

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def connect():
    net, opened = network.SimulatedNetwork(seed=1), []

    async def make(identity: str):
        opened.append(await net.connect(identity))
        return opened[-1]

    yield make
    for bus in opened:
        await bus.close()


class TestRpcInMemory(rpc_contract.RpcContract):
    pass


async def test_the_count_of_suppressed_records_is_stored_during_the_attack(connect):
    service, eve = await connect("service"), await connect("eve")
    audit = request_audit.RequestAudit(
        service, rpc_contract.PART, refused=leaky_buckets.BucketBudget(1, 3600.0)
    )
    async with server.RpcServer(
        service, rpc_contract.PART, rpc_contract.LampState().operations(), audit=audit
    ):
        for _ in range(2):
            for _ in range(5):
                with pytest.raises(errors.InvalidInput):
                    await rpc_contract.ask(eve, "request.switch", {"name": 1})
            await asyncio.sleep(request_audit.SUMMARY_S + 1.0)
        actual = [decision.details.get("count") for decision in await rpc_contract.decisions(service)]
    assert actual == [None, "4", "5"]


async def test_a_waiting_request_begins_when_the_earlier_ones_are_paid(connect):
    """Many were received before it was known what each costs."""
    service, ann, bob = [await connect(name) for name in ("service", "ann", "bob")]
    loop, begun_s = asyncio.get_running_loop(), []

    async def expensive(call: server.RpcCall) -> None:
        begun_s.append(loop.time())
        await asyncio.sleep(0.01)
        serving.charge(call.identity, 50.0)

    async def cheap(call: server.RpcCall) -> float:
        return loop.time()

    operations = [server.RpcOperation("read.much", expensive), server.RpcOperation("read.little", cheap)]
    admission.of_loop(loop).share = 0.1
    async with server.RpcServer(service, rpc_contract.PART, operations, each_at_once=2) as serving:
        began_s = loop.time()
        asking = [
            asyncio.ensure_future(rpc_contract.ask(ann, "read.much", timeout_s=60, try_s=60))
            for _ in range(10)
        ]
        assert await rpc_contract.ask(bob, "read.little") == pytest.approx(began_s, abs=0.1)
        await asyncio.gather(*asking)
    assert len(begun_s) == 10, "none was refused"
    for number, at_s in enumerate(begun_s):
        assert 50.0 * (number - 2) <= 100.0 + 100.0 * (at_s - began_s), "two began before the first is known"
