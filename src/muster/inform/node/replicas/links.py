"""Requests from node to node."""

from __future__ import annotations

import asyncio

from muster.bus import api
from muster.bus.client import requests
from muster.bus.rpc import client
from muster.core import errors
from muster.inform import protocol

PING_AFTER_S = 1.5  # a node that has not replied for so long is pinged
PING_TIMEOUT_S = 3.0


class Silent(errors.TimedOut):
    """Another node did not reply. (A node that replies "timed out" is not silent.) ``is_gone``: its broker
    reported that it is not connected."""

    code = "silent"
    is_gone = False


class NodeLinks:
    def __init__(self, bus: api.Bus, timeout_s: float) -> None:
        self._bus = bus
        self._timeout_s = timeout_s

    async def request(self, node: str, kind: str, message: object, result: type[protocol.T]) -> protocol.T:
        """Send a request to another node. `Silent` if it does not reply.

        A node that waits for the log replies late, but to a ping at once; a frozen one replies to neither.
        """
        subject, data = protocol.to_node(node, kind), protocol.encode(message)
        try:
            reply = await self._exchange(node, subject, data)
        except (errors.NotConnected, errors.Overloaded):  # an error of this node's own connection
            raise
        except errors.Unavailable as error:
            silent = Silent(f"no reply from {node}: {error}")
            silent.is_gone = isinstance(error, requests.NoResponders)
            raise silent from error
        return protocol.result_of(reply.data, result)

    async def _exchange(self, node: str, subject: str, data: bytes) -> api.Message:
        """Without a task of its own, because most replies come before the ping."""
        loop = asyncio.get_running_loop()
        pings: list[asyncio.Task[errors.Unavailable | None]] = []
        try:
            async with asyncio.timeout(None) as limit:
                timer = loop.call_later(
                    PING_AFTER_S, lambda: pings.append(loop.create_task(self._ping(node, limit)))
                )
                try:
                    return await client.exchange_once(self._bus, subject, data, timeout_s=self._timeout_s)
                finally:
                    timer.cancel()
                    for ping in pings:
                        ping.cancel()
        except TimeoutError:
            failure = pings[0].result()
            assert failure is not None
            raise failure from None

    async def _ping(self, node: str, limit: asyncio.Timeout) -> errors.Unavailable | None:
        """If the node does not reply to a ping, end ``limit`` and return the error."""
        try:
            await client.exchange_once(
                self._bus, protocol.to_node(node, protocol.PING), b"", timeout_s=PING_TIMEOUT_S
            )
        except errors.Unavailable as error:
            limit.reschedule(asyncio.get_running_loop().time())
            return error
        return None
