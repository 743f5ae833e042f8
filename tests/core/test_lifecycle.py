"""Services that are started and stopped by ``async with``."""

from __future__ import annotations

from typing import Any

import pytest

from muster.core import errors, lifecycle
from muster.manage.agent import agent
from muster.manage.manager import manager


class _Service(lifecycle.ServiceContext):
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.calls: list[str] = []

    async def start(self) -> None:
        self.calls.append("start")
        if self.fails:
            raise errors.Unavailable("no broker")

    async def stop(self) -> None:
        self.calls.append("stop")


@pytest.mark.asyncio
async def test_a_service_is_started_and_stopped():
    async with _Service() as service:
        assert service.calls == ["start"]
    assert service.calls == ["start", "stop"]


@pytest.mark.asyncio
async def test_a_failed_start_is_undone():
    service = _Service(fails=True)
    with pytest.raises(errors.Unavailable):
        async with service:
            pass
    assert service.calls == ["start", "stop"]


@pytest.mark.asyncio
@pytest.mark.virtual_time
@pytest.mark.parametrize("service", [agent.Agent, manager.Manager])
async def test_a_start_that_fails_at_its_second_subscription_leaves_none(
    simulated_network, monkeypatch, service
):
    bus = await simulated_network.connect("host-a")
    subscribe, opened = bus.subscribe, list[Any]()

    async def subscribe_once(subject, **options):
        if opened:
            raise errors.Unavailable("the broker has gone")
        opened.append(await subscribe(subject, **options))
        return opened[0]

    monkeypatch.setattr(bus, "subscribe", subscribe_once)
    async with bus:
        with pytest.raises(errors.Unavailable):
            async with service(bus):
                pass
        assert not bus._subscriptions
    assert len(opened) == 1
