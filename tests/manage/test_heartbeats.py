"""Heartbeats of an agent that loses its connection."""

from __future__ import annotations

from typing import Any

import pytest

from muster.bus import api
from muster.core import errors
from muster.manage.agent import agent


class RecordingTransport:
    identity = "host-a"

    def __init__(self) -> None:
        self.state = api.ConnectionState.CONNECTED
        self.published: list[str] = []

    async def publish(self, subject: str, data: bytes) -> None:
        self.published.append(subject)

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> Any:
        raise NotImplementedError

    async def subscribe(self, subject: str, *, handler: api.Handler) -> Any:
        raise NotImplementedError


async def test_heartbeats_do_not_queue_up_without_a_connection():
    """After a broker restart, a whole fleet would send all its outdated heartbeats at once."""
    transport: Any = RecordingTransport()
    host = agent.Agent(transport)
    host._get_or_create("a").check(1, "manager-1")
    for state in (api.ConnectionState.RECONNECTING, api.ConnectionState.CONNECTED):
        transport.state = state
        await host.send_heartbeats()
    assert transport.published == ["muster.manage.from.host-a.beat.manager-1"]


async def test_a_manager_without_a_link_does_not_cost_the_others_their_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
):
    """An agent with direct links has one for each manager."""
    transport: Any = RecordingTransport()
    transport.state = api.ConnectionState.CONNECTED
    publish = transport.publish

    async def publish_to_others(subject: str, data: bytes) -> None:
        if subject.endswith(".manager-1"):
            raise errors.NotConnected("no link")
        await publish(subject, data)

    monkeypatch.setattr(transport, "publish", publish_to_others)
    host = agent.Agent(transport)
    for number, name in enumerate(("a", "b"), 1):
        host._get_or_create(name).check(1, f"manager-{number}")
    await host.send_heartbeats()
    assert transport.published == ["muster.manage.from.host-a.beat.manager-2"]
