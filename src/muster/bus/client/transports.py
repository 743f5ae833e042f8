"""The sockets of a connection: TCP, with TLS after the first line of the broker, and WebSocket; both also
through an HTTP proxy, which receives a CONNECT request and forwards bytes: TLS is end to end with the broker.

A transport calls `BrokerSession.on_data` with each block that arrives, `on_writable` when it is so again, and
`on_lost` once, when it has ended; not after `close` or `abort`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
import urllib.parse
from typing import TYPE_CHECKING, Any, cast

from muster.bus.client import reconnection
from muster.core import errors
from muster.supervision import tasks

if TYPE_CHECKING:
    from muster.bus.client import session

CLOSE_TIMEOUT_S = 1.0
UNSENT_BYTES_MAX = 64 << 10  # with more, a WebSocket is not writable; TCP has the limit of asyncio
PROXY_PORT = 3128


async def connect(
    server: reconnection.ServerAddress,
    tls: ssl.SSLContext | None,
    proxy: str | None,
    owner: session.BrokerSession,
) -> TcpTransport | WebSocketTransport:
    if server.is_websocket:
        websocket = WebSocketTransport(owner)
        await websocket.connect(server, tls, proxy)
        return websocket
    transport = TcpTransport(owner)
    try:
        await transport.connect(server, proxy)
    except BaseException:
        transport.abort()
        raise
    return transport


class TcpTransport(asyncio.Protocol):
    def __init__(self, owner: session.BrokerSession) -> None:
        self.is_writable = False
        self._owner = owner
        self._receive = owner.on_data
        self._transport: asyncio.Transport | None = None
        self._ended = asyncio.get_running_loop().create_future()
        self._is_closing = False

    async def connect(self, server: reconnection.ServerAddress, proxy: str | None) -> None:
        loop = asyncio.get_running_loop()
        if proxy is None:
            await loop.create_connection(lambda: self, server.host, server.port)
        else:
            await self._connect_through(proxy, server.place)

    async def _connect_through(self, proxy: str, place: str) -> None:
        """Connect to ``place`` through an HTTP proxy (``http://[USER:PASSWORD@]HOST:PORT``)."""
        try:
            where = urllib.parse.urlsplit(proxy)
            port = where.port or PROXY_PORT
        except ValueError as error:
            raise errors.InvalidInput(f"{proxy[:200]!r} is not the URL of a proxy: {error}") from error
        loop = asyncio.get_running_loop()
        received, answered = bytearray(), loop.create_future()

        def collect(data: bytes) -> None:
            received.extend(data)
            if b"\r\n\r\n" in received and not answered.done():
                answered.set_result(None)

        self._receive = collect
        await loop.create_connection(lambda: self, where.hostname or "", port)
        lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}"]
        if where.username is not None:
            pair = f"{urllib.parse.unquote(where.username)}:{urllib.parse.unquote(where.password or '')}"
            lines.append(f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}")
        self.write("\r\n".join([*lines, "", ""]).encode())
        await asyncio.wait([answered, self._ended], return_when=asyncio.FIRST_COMPLETED)
        self._receive = self._owner.on_data
        if not answered.done():
            raise ConnectionError(f"the proxy {where.hostname}:{port} does not respond")
        head, _, rest = bytes(received).partition(b"\r\n\r\n")
        status_line = head.split(b"\r\n", 1)[0].decode("latin-1")
        status = status_line.split(" ")[1:2]
        if status != ["200"]:
            reason = (
                "it requires a user name and a password"
                if status == ["407"]
                else f"its response is {status_line[:100]!r}"
            )
            raise ConnectionError(f"the proxy {where.hostname}:{port} refuses {place}: {reason}")
        if rest:
            self._owner.on_data(rest)

    async def start_tls(self, context: ssl.SSLContext, hostname: str) -> None:
        assert self._transport is not None
        transport = await asyncio.get_running_loop().start_tls(
            self._transport, self, context, server_hostname=hostname
        )
        if transport is None:
            raise ConnectionError("the connection was closed during the TLS handshake")
        self._transport = transport

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is of another class
        self.is_writable = True

    def data_received(self, data: bytes) -> None:
        self._receive(data)

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        self._owner.on_writable()

    def connection_lost(self, error: BaseException | None) -> None:
        self.is_writable = False
        if not self._ended.done():
            self._ended.set_result(None)
        if not self._is_closing:
            self._owner.on_lost(error)

    # Called by the session.

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def abort(self) -> None:
        """Close at once. What is unsent is lost."""
        self._is_closing = True
        self.is_writable = False
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Send what is unsent, for a limited time, and close."""
        self._is_closing = True
        try:
            if self._transport is not None:
                self._transport.close()
                await asyncio.wait([self._ended], timeout=CLOSE_TIMEOUT_S)
        finally:
            self.abort()


class WebSocketTransport:
    def __init__(self, owner: session.BrokerSession) -> None:
        self.is_writable = False
        self._owner = owner
        self._session: Any = None
        self._socket: Any = None
        self._tasks = tasks.TaskSupervisor("websocket")
        self._work: asyncio.Task[None] | None = None
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._news = asyncio.Event()  # something to send, or the end
        self._is_closing = False

    async def connect(
        self, server: reconnection.ServerAddress, tls: ssl.SSLContext | None, proxy: str | None
    ) -> None:
        import aiohttp

        self._session = aiohttp.ClientSession()
        try:
            self._socket = await self._session.ws_connect(
                f"{'wss' if server.demands_tls(tls) else 'ws'}://{server.place}{server.path}",
                ssl=tls or True,
                proxy=proxy,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S),
                max_msg_size=0,
            )
        except BaseException as error:
            await self._session.close()
            if isinstance(error, aiohttp.ClientSSLError):
                raise ssl.SSLError(str(error)) from error
            raise
        self.is_writable = True
        self._work = self._tasks.spawn("transfer", self._transfer())

    async def _transfer(self) -> None:
        works = [self._tasks.spawn("read", self._read()), self._tasks.spawn("write", self._write())]
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            if not self._is_closing:
                self._owner.on_lost(None)
            await self._socket.close()
        finally:
            self.is_writable = False
            for work in works:
                work.cancel()
            await self._session.close()

    async def _read(self) -> None:
        import aiohttp

        while (message := await self._socket.receive()).type is aiohttp.WSMsgType.BINARY:
            self._owner.on_data(message.data)

    async def _write(self) -> None:
        with contextlib.suppress(OSError):  # the connection is lost
            while self._unsent or not self._is_closing:
                if not self._unsent:
                    self._news.clear()
                    await self._news.wait()
                data, self._unsent = b"".join(self._unsent), []
                await self._socket.send_bytes(data)
                self._unsent_bytes -= len(data)
                if not self.is_writable and self._unsent_bytes < UNSENT_BYTES_MAX:
                    self.is_writable = True
                    self._owner.on_writable()

    def write(self, data: bytes) -> None:
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        self.is_writable = self._unsent_bytes < UNSENT_BYTES_MAX
        self._news.set()

    def unsent_bytes(self) -> int:
        return self._unsent_bytes

    def abort(self) -> None:
        self._is_closing = True
        self.is_writable = False
        if self._work is not None:
            self._work.cancel()

    async def close(self) -> None:
        self._is_closing = True
        self._news.set()
        try:
            if self._work is not None:
                await asyncio.wait([self._work], timeout=CLOSE_TIMEOUT_S)
        finally:
            self.abort()
