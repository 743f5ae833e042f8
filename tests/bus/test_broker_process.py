"""One real broker: it starts, is supervised, is changed, and ends."""

from __future__ import annotations

import nats
import pytest

from muster.bus.brokers import broker, config


@pytest.fixture
def settings(tmp_path):
    return config.BrokerConfig(name="one", directory=tmp_path / "one")


async def test_starts_on_free_ports_and_stops(settings):
    states = []
    async with broker.Broker(settings, listener=lambda one: states.append(one.state.value)) as one:
        client = await nats.connect(one.url)
        assert client.connected_server_version.major == 2
        await client.close()
        assert int(settings.pid_path.read_text()) == one.pid
    assert states == ["starting", "running", "stopped"]
