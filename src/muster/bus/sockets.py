"""nats-py's transports, mended where they would hang, leak or warn."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

from nats.aio import transport

CLOSE_TIMEOUT_S = 1.0


class Tcp(transport.TcpTransport):
    """nats-py's, but it can be closed after a failed TLS handshake too, where waiting would never end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __bool__(self) -> bool:
        return True  # false until it is connected, and then nats-py would put one of its own in its place

    async def connect(self, uri: Any, buffer_size: int, connect_timeout: int) -> None:
        self._abort()  # what is left of an attempt that the broker refused
        await super().connect(uri, buffer_size, connect_timeout)

    async def wait_closed(self) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await super().wait_closed()  # type: ignore[no-untyped-call]
        self._abort()

    def _abort(self) -> None:
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                writer.transport.abort()


class WebSocket(transport.WebSocketTransport):
    """nats-py's, with a limit to the time that connecting takes, said in a form that aiohttp still likes."""

    async def connect(self, uri: Any, buffer_size: int, connect_timeout: Any) -> None:
        async with asyncio.timeout(connect_timeout):
            await super().connect(uri, buffer_size, _limit(connect_timeout))

    async def connect_tls(
        self, uri: Any, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: Any
    ) -> None:
        async with asyncio.timeout(connect_timeout):
            await super().connect_tls(uri, ssl_context, buffer_size, _limit(connect_timeout))


def _limit(seconds: float) -> Any:
    return transport.aiohttp.ClientWSTimeout(ws_close=seconds)  # type: ignore[attr-defined]
