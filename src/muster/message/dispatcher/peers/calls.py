"""Requests to the dispatchers of other partitions."""

from __future__ import annotations

from typing import Final

from muster.bus import api
from muster.bus.rpc import client
from muster.message import peer_protocol, protocol

REQUEST_S: Final = 5.0


async def call(bus: api.Bus, partition: int, request: peer_protocol.PeerRequest) -> protocol.DispatcherReply:
    """Raises the error of the reply, or `errors.Unavailable` if there is none."""
    response = await client.exchange_once(
        bus,
        peer_protocol.peer_subject(bus.identity, partition),
        peer_protocol.encode(request),
        timeout_s=REQUEST_S,
    )
    return protocol.read_reply(response.data)
