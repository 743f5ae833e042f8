"""`bus/rpc` on a real broker."""

from __future__ import annotations

import asyncio
import time

import pytest

from muster.bus.rpc import admission, server
from muster.core import errors, subjects
from muster.testing.eventually import eventually
from tests.bus import rpc_contract


class TestRpcOnNats(rpc_contract.RpcContract):
    async def test_an_identity_pays_for_the_time_that_its_requests_take(self, connect):
        """In the simulation, requests take no time."""
        service, ann, bob = [await connect(name) for name in ("service", "ann", "bob")]

        async def reckon(call: server.RpcCall) -> str:
            await asyncio.sleep(0)
            until = time.thread_time() + 0.1
            while time.thread_time() < until:
                pass
            return call.identity

        operations = [server.RpcOperation("read.reckon", reckon)]
        admission.of_loop(asyncio.get_running_loop()).share = 0.05
        async with server.RpcServer(service, rpc_contract.PART, operations):
            assert await rpc_contract.ask(ann, "read.reckon") == "ann"
            with pytest.raises(errors.Throttled, match="too much of the service"):
                await rpc_contract.ask(ann, "read.reckon", timeout_s=0.5)
            assert await rpc_contract.ask(bob, "read.reckon") == "bob"
            assert await rpc_contract.ask(ann, "read.reckon") == "ann", "a client waits for its turn"

    async def test_the_requests_of_others_pass_those_of_an_identity_that_sends_many(self, connect):
        """Those of one identity are executed in the order in which it sent them."""
        service, ann, bob = [await connect(name) for name in ("service", "ann", "bob")]
        done: list[int] = []
        begun = asyncio.Event()

        async def reckon(call: server.RpcCall, number: int) -> None:
            begun.set()
            until = time.thread_time() + 0.0005
            while time.thread_time() < until:
                pass
            done.append(number)

        async def count(call: server.RpcCall) -> int:
            return len(done)

        operations = [server.RpcOperation("read.reckon", reckon), server.RpcOperation("read.count", count)]
        async with server.RpcServer(service, rpc_contract.PART, operations) as serving:
            assert await rpc_contract.ask(bob, "read.count") == 0  # ann is not alone
            at = subjects.from_identity(rpc_contract.PART, "ann", "read.reckon")
            for number in range(300):
                await ann.publish(at, b'{"number":%d}' % number, reply="_R.@manage.ann.1.1")
            await begun.wait()
            assert await rpc_contract.ask(bob, "read.count") < 150
            await eventually(lambda: len(done) == 300)
        assert done == sorted(done)
        assert not serving.refused
