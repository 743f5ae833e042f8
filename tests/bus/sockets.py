"""What happens to the socket of a connection."""

from __future__ import annotations

from typing import Any, cast

from muster.bus import api
from muster.bus.client import client


def _wire(bus: api.Bus) -> Any:
    return cast(client.NatsBus, bus)._wire


def cut(bus: api.Bus) -> None:
    """The socket is gone, as when the network or the broker dies."""
    session = _wire(bus)._session
    if session is not None:  # otherwise it is gone already
        session._transport._transport.abort()


def kill(bus: api.Bus) -> None:
    """As when its process is killed: the socket is gone, and it does not connect again."""
    _wire(bus)._plan.next_delay_s = lambda *_: 3600.0
    cut(bus)


def feed(bus: api.Bus, data: bytes) -> None:
    """The broker sends this."""
    _wire(bus)._session.on_data(data)
