"""uvicorn with the bounds that a server on an open network needs; REST and the dashboard use it too.

It adds: limits on connections, in total and for each address, that apply before the TLS handshake; a short
deadline for the handshake; rejection of requests with an ambiguous end (`muster.core.net.http1`); a deadline
for the head of a request; the end of connections whose client does not read the response. Signals are left to
the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http import h11_impl

from muster.core.net import connection_limits, http1
from muster.supervision import tasks

HEAD_TIMEOUT_S = 10.0
HANDSHAKE_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 20.0
_MALFORMED = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/problem+json\r\nConnection: close\r\n\r\n%s\n"
)


class AsgiServer(uvicorn.Server):
    """``connections_max`` bounds the connections, those in a TLS handshake included, and
    ``of_address_max`` those of one client address (None where a proxy connects for all clients)."""

    def __init__(
        self, config: uvicorn.Config, *, connections_max: int, of_address_max: int | None = None
    ) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self.open = connection_limits.ConnectionLimits(connections_max, of_address_max)
        self._tls: ssl.SSLContext | None = None
        self._handshakes = tasks.TaskSupervisor("TLS")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn would have the event loop do the handshakes, where they cannot be counted.
        self._tls, self.config.ssl = self.config.ssl, None
        self.config.http_protocol_class = self._accept  # type: ignore[assignment]
        await super().startup(sockets)
        self.ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._handshakes.cancel()
        await super().shutdown(sockets)

    def _accept(self, **parts: Any) -> asyncio.Protocol:
        return _Gate(self, AsgiProtocol(self, **parts))

    def accepted(self, transport: asyncio.Transport, protocol: AsgiProtocol) -> None:
        if not self.open.add(protocol, str((transport.get_extra_info("peername") or ("-",))[0])):
            transport.abort()
            return
        if self._tls is None:
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
            return
        transport.pause_reading()
        self._handshakes.spawn("handshake", self._secure(transport, protocol, self._tls))

    async def _secure(
        self, transport: asyncio.Transport, protocol: AsgiProtocol, tls: ssl.SSLContext
    ) -> None:
        secured = None
        with contextlib.suppress(OSError):  # among them all of TLS, and of lost connections
            secured = await asyncio.get_running_loop().start_tls(
                transport, protocol, tls, server_side=True, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )
        if secured is None:
            transport.abort()
            self.open.discard(protocol)
        else:
            protocol.connection_made(secured)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Gate(asyncio.Protocol):
    """The protocol of a connection until it is counted and secured."""

    def __init__(self, server: AsgiServer, protocol: AsgiProtocol) -> None:
        self._server = server
        self._protocol = protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._server.accepted(transport, self._protocol)


class AsgiProtocol(h11_impl.H11Protocol):
    def __init__(self, server: AsgiServer, **parts: Any) -> None:
        super().__init__(**parts)
        self._server_of = server
        self._framing = http1.HttpFraming()
        self._connected = False
        self._early = b""
        self._refused = False
        self._waiting: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._connected = True
        super().connection_made(transport)
        self._wait()
        early, self._early = self._early, b""
        if early:
            self.data_received(early)

    def data_received(self, data: bytes) -> None:
        if not self._connected:  # it arrived with the end of the TLS handshake
            self._early += data
            return
        if self._refused:
            return
        try:
            self._framing.feed(data)
        except http1.MalformedHttp as error:
            self._refuse(error)
            return
        super().data_received(data)
        cycle: h11_impl.RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._stop_waiting()
        elif self._waiting is None:
            self._wait()

    def _refuse(self, error: http1.MalformedHttp) -> None:
        self._refused = True
        cycle: h11_impl.RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            problem = {
                "type": f"urn:muster:error:{error.code}",
                "title": error.code.replace("-", " "),
                "status": 400,
                "detail": error.message,
                "code": error.code,
            }
            self.transport.write(_MALFORMED % json.dumps(problem).encode())
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_of.open.discard(self)
        self._stop_waiting()
        self._stop_writing()
        if self._connected:
            super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A connection that is closed stays open until all is sent, and uvicorn sets no deadline for that.
        if self.transport.get_write_buffer_size():
            self._start_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_writing()

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        self.transport.close()
        self._start_writing()

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _start_writing(self) -> None:
        if self._writing is None:
            self._writing = self.loop.call_later(WRITE_TIMEOUT_S, self._abort_unread)

    def _abort_unread(self) -> None:
        self._writing = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
