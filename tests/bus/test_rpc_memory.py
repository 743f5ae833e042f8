"""`bus/rpc` on the in-memory twin, in virtual time."""

from __future__ import annotations

import pytest

from muster.bus.memory import network
from tests.bus import rpc_contract

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def connect():
    net, opened = network.Network(seed=1), []

    async def make(identity: str):
        opened.append(await net.connect(identity))
        return opened[-1]

    yield make
    for bus in opened:
        await bus.close()


class TestMemory(rpc_contract.Contract):
    pass
