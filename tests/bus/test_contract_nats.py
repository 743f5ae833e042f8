"""The contract on a real broker."""

from __future__ import annotations

import time

import pytest

from muster.bus.brokers import broker, config
from muster.bus.client import client
from tests.bus import contract


@pytest.fixture
def now_ns():
    return time.time_ns


@pytest.fixture
async def connect(tmp_path):
    opened: list[client.NatsBus] = []
    async with broker.Broker(config.BrokerConfig(name="b", directory=tmp_path)) as running:

        async def make(identity: str) -> client.NatsBus:
            bus = await client.connect([running.url], identity=identity)
            opened.append(bus)
            return bus

        yield make
        for bus in opened:
            await bus.close()


class TestBusOnNats(contract.BusContract):
    pass
