"""The transports of nats-py, corrected where they would hang, leak or warn, with support for an HTTP proxy.

The proxy receives a CONNECT request and forwards bytes: TLS is end to end with the broker.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
import urllib.parse
from collections.abc import Callable
from typing import Any

from nats.aio import transport

from muster.core import errors

CLOSE_TIMEOUT_S = 1.0


class TcpTransport(transport.TcpTransport):
    """nats-py's, but it can be closed after a failed TLS handshake too, where waiting would never end."""

    def __init__(self, proxy: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._proxy = proxy

    def __bool__(self) -> bool:
        return True  # otherwise false until it is connected, and nats-py would replace it

    async def connect(self, uri: Any, buffer_size: int, connect_timeout: int) -> None:
        self._abort()  # the rest of an attempt that the broker rejected
        if self._proxy is None:
            await super().connect(uri, buffer_size, connect_timeout)
            return
        async with asyncio.timeout(connect_timeout):
            reader, writer = await _through(self._proxy, uri.hostname, uri.port, buffer_size)
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = writer

    async def connect_tls(
        self, uri: Any, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        # Like the streams of asyncio: otherwise there is a warning about a half-closed TLS connection at the
        # end.
        self._io_writer._protocol._over_ssl = True  # type: ignore[union-attr]

    async def wait_closed(self) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await super().wait_closed()  # type: ignore[no-untyped-call]
        self._abort()

    def unsent_bytes(self) -> int:
        return self._io_writer.transport.get_write_buffer_size() if self._io_writer is not None else 0

    def hand_over(self, take: Callable[[bytes], bytes]) -> None:
        """Pass received data to ``take`` directly, and queue the data it returns: no task has to wake up for
        a message."""
        reader = self._io_reader
        assert reader is not None
        wait = reader.feed_data

        def feed(data: bytes) -> None:
            rest = data if reader._buffer or type(data) is not bytes else take(data)  # type: ignore[attr-defined]
            if rest:
                wait(rest)

        reader.feed_data = feed  # type: ignore[method-assign, assignment]

    def _abort(self) -> None:
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                writer.transport.abort()


class WebSocketTransport(transport.WebSocketTransport):
    """The transport of nats-py with a connect timeout, in the form that current aiohttp accepts."""

    def __init__(self, proxy: str | None = None) -> None:
        super().__init__()
        self._proxy = proxy

    async def connect(self, uri: Any, buffer_size: int, connect_timeout: Any) -> None:
        async with asyncio.timeout(connect_timeout):
            if self._proxy is None:
                await super().connect(uri, buffer_size, _limit(connect_timeout))
            else:
                await self._connect_through(uri.geturl(), True, connect_timeout)

    async def connect_tls(
        self, uri: Any, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: Any
    ) -> None:
        async with asyncio.timeout(connect_timeout):
            if self._proxy is None or self._ws is not None:
                await super().connect_tls(uri, ssl_context, buffer_size, _limit(connect_timeout))
            else:
                url = uri if isinstance(uri, str) else uri.geturl()
                await self._connect_through(url, ssl_context, connect_timeout)

    async def _connect_through(self, url: str, tls: ssl.SSLContext | bool, connect_timeout: float) -> None:
        self._ws = await self._client.ws_connect(
            url, ssl=tls, proxy=self._proxy, timeout=_limit(connect_timeout), max_msg_size=0
        )
        self._using_tls = not isinstance(tls, bool)


async def _through(
    proxy: str, host: str, port: int, buffer_size: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to ``host`` through an HTTP proxy (``http://[USER:PASSWORD@]HOST:PORT``)."""
    try:
        where = urllib.parse.urlsplit(proxy)
        port_of_proxy = where.port or 3128
    except ValueError as error:
        raise errors.InvalidInput(f"{proxy[:200]!r} is not the URL of a proxy: {error}") from error
    reader, writer = await asyncio.open_connection(where.hostname, port_of_proxy, limit=buffer_size)
    try:
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {name} HTTP/1.1", f"Host: {name}"]
        if where.username is not None:
            pair = f"{urllib.parse.unquote(where.username)}:{urllib.parse.unquote(where.password or '')}"
            lines.append(f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}")
        writer.write("\r\n".join([*lines, "", ""]).encode())
        status_line = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0].decode("latin-1")
        status = status_line.split(" ")[1:2]
        if status != ["200"]:
            reason = (
                "it requires a user name and a password"
                if status == ["407"]
                else f"its response is {status_line[:100]!r}"
            )
            raise ConnectionError(f"the proxy {where.hostname}:{where.port} refuses {name}: {reason}")
    except asyncio.IncompleteReadError as error:
        writer.transport.abort()
        raise ConnectionError(f"the proxy {where.hostname}:{where.port} does not respond") from error
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


def _limit(seconds: float) -> Any:
    return transport.aiohttp.ClientWSTimeout(ws_close=seconds)  # type: ignore[attr-defined]
