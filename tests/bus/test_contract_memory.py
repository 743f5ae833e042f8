"""The contract on the in-memory twin, in virtual time."""

from __future__ import annotations

import pytest

from muster.bus import api
from muster.bus.client import client
from muster.bus.memory import connection, network
from tests.bus import contract

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def net():
    return network.SimulatedNetwork(seed=1)


@pytest.fixture
def now_ns(net):
    return net.now_ns


@pytest.fixture
async def connect(net):
    opened = []

    async def make(identity: str):
        opened.append(await net.connect(identity))
        return opened[-1]

    yield make
    for bus in opened:
        await bus.close()


class TestBusInMemory(contract.BusContract):
    pass


def both_speak_the_words(real: client.NatsBus, twin: connection.SimulatedBus) -> tuple[api.Bus, api.Bus]:
    """For the type checker: neither has drifted from the protocols."""
    return real, twin
