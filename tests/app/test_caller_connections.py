"""Connections of a gateway's callers: shared, closed after a while, limited in number."""

from __future__ import annotations

import pytest

from muster.app.gateways import caller_connections
from muster.bus import api
from muster.core import errors
from muster.testing.eventually import eventually
from muster.trust.permissions import roles


def is_open(bus: api.Bus) -> bool:
    return bus.state is api.ConnectionState.CONNECTED


def is_closed(bus: api.Bus) -> bool:
    return bus.state is api.ConnectionState.CLOSED


async def test_visits_share_a_connection_which_ends_after_a_while(connect, monkeypatch):
    monkeypatch.setattr(caller_connections, "IDLE_S", 0.05)
    opened: list[tuple[str, roles.Role]] = []

    async def as_(name: str, role: roles.Role) -> api.Bus:
        opened.append((name, role))
        bus: api.Bus = await connect(name)
        return bus

    here = caller_connections.CallerConnections(as_)
    async with here.connect("ann", "user") as first, here.connect("ann", "user") as second:
        assert first is second
        async with here.connect("bob", "viewer") as other:
            assert other is not first
        await eventually(lambda: is_closed(other))
        assert is_open(first)  # as long as it is held
    await eventually(lambda: is_closed(first) and len(here) == 0)
    async with here.connect("ann", "user") as third:
        assert is_open(third)
        await third.close()  # by the broker, say: the next use opens another
        async with here.connect("ann", "user") as fourth:
            assert is_open(fourth)
    assert opened == [("ann", roles.Role.USER), ("bob", roles.Role.VIEWER)] + [("ann", roles.Role.USER)] * 2
    await here.close()
    assert is_closed(fourth)


async def test_bounded_and_failures_are_not_kept(connect, monkeypatch):
    monkeypatch.setattr(caller_connections, "CONNECTIONS_MAX", 1)

    async def refused(name: str, role: roles.Role) -> api.Bus:
        raise errors.Unauthorized(f"{name} was revoked")

    here = caller_connections.CallerConnections(refused)
    with pytest.raises(errors.Unauthorized):
        async with here.connect("eve", "user"):
            pass
    await eventually(lambda: len(here) == 0)

    async def as_(name: str, role: roles.Role) -> api.Bus:
        bus: api.Bus = await connect(name)
        return bus

    here = caller_connections.CallerConnections(as_)
    async with here.connect("ann", "user"):
        with pytest.raises(errors.Overloaded):
            async with here.connect("bob", "user"):
                pass
    await here.close()
