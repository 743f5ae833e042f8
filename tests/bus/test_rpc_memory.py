"""`bus/rpc` on the in-memory twin, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from muster.bus.memory import network
from muster.bus.rpc import request_audit, server
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
