"""A connection to one broker, from its socket to its loss: the handshake, pings, and the parser.

Whatever belongs to one socket is here and ends with it, so nothing of an old connection is mistaken for
something of the next one. There is one end, `fail`: the socket was closed, an error line of the broker, a
reply that is not a broker's, a broker that is silent.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import muster
from muster.bus import silence
from muster.bus.client import broker_errors, parser, reconnection, transports
from muster.core.telemetry import log

if TYPE_CHECKING:
    from muster.bus.client import connection

events = log.EventLog("bus")

PING = b"PING\r\n"
SMALL_BYTES = 8 << 10  # a block below it is no part of a flood
MAX_PAYLOAD = 1 << 20  # until the broker reports its own


@dataclass(frozen=True, slots=True)
class SessionOptions:
    name: str
    tls: ssl.SSLContext | None
    proxy: str | None
    echo: bool
    connect_timeout_s: float


class BrokerSession:
    """It notifies ``owner`` of its end only if it was open."""

    def __init__(
        self,
        owner: connection.NatsConnection,
        options: SessionOptions,
        login: Callable[[Mapping[str, Any]], dict[str, str]],
        subscriptions: parser.WireSubscriptions,
    ) -> None:
        self._owner = owner
        self._options = options
        self._login = login  # fields of CONNECT for the INFO of a broker
        self._parser = parser.BrokerParser(self, subscriptions)
        self._subscriptions = subscriptions
        self._transport: transports.TcpTransport | transports.WebSocketTransport | None = None
        self._informed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pongs: deque[asyncio.Future[bool]] = deque()
        self._watch_timer: asyncio.TimerHandle | None = None
        self._silence = silence.SilenceWatch()
        self.info: dict[str, Any] = {}
        self.error: Exception | None = None  # the reason of its end
        self.is_open = False
        self.subscribed: set[int] = set()  # during the handshake

    # Opening and closing.

    async def open(self, server: reconnection.ServerAddress, handshake_s: float) -> None:
        """Connect, log in and subscribe. ``handshake_s`` is the time for each reply of the broker."""
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                self._transport = transport = await transports.connect(
                    server, self._options.tls, self._options.proxy, self
                )
            async with asyncio.timeout(handshake_s):
                await self._informed
            needs_tls = bool(self.info.get("tls_required")) or server.demands_tls(self._options.tls)
            if isinstance(transport, transports.TcpTransport) and needs_tls:
                async with asyncio.timeout(handshake_s):
                    context = self._options.tls or ssl.create_default_context()
                    name = server.tls_name or server.host
                    await transport.start_tls(context, name)
                # Anyone may have sent what arrived before.
                self._parser = parser.BrokerParser(self, self._subscriptions)
            self._parser.reads_messages = True
            active = self._subscriptions.active()
            self.subscribed = set(active)
            for held in active.values():
                held.is_refused = False
            transport.write(
                b"".join([self._connect_command(), *(held.command for held in active.values()), PING])
            )
            async with asyncio.timeout(handshake_s):
                if not await self.expect_pong() or self.error is not None:
                    raise self.error or ConnectionError("it was closed")
        except TimeoutError as error:
            self.abort()
            raise self.error or ConnectionError("it does not respond in time") from error
        except BaseException:
            self.abort()
            raise
        self.is_open = True
        self._watch()

    def _connect_command(self) -> bytes:
        has_headers = bool(self.info.get("headers"))
        fields = {
            "verbose": False,
            "pedantic": False,
            "lang": "python-muster",
            "version": muster.__version__,
            "protocol": 1,
            "headers": has_headers,
            "no_responders": has_headers,
            "name": self._options.name,
            "echo": self._options.echo,
            **self._login(self.info),
        }
        return f"CONNECT {json.dumps(fields)}\r\n".encode()

    def fail(self, error: Exception) -> None:
        """End it, for this reason."""
        if self.error is None:
            self.error = error
            was_open = self.is_open
            self.abort()
            if was_open:
                self._owner.on_session_lost(self)

    def abort(self) -> None:
        self._end()
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Send what is unsent, and close."""
        self._end()
        if self._transport is not None:
            await self._transport.close()

    def _end(self) -> None:
        self.is_open = False
        self._parser.has_ended = True
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        if not self._informed.done():
            self._informed.set_exception(self.error or ConnectionError("closed"))
            self._informed.exception()
        while self._pongs:
            _settle(self._pongs.popleft(), False)

    # Sending.

    @property
    def is_writable(self) -> bool:
        return self._transport is not None and self._transport.is_writable

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def expect_pong(self) -> asyncio.Future[bool]:
        """True with the reply to the `PING` that the caller sends; False if the session ends before."""
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pongs.append(pong)
        return pong

    # Called by the transport.

    def on_data(self, data: bytes) -> None:
        """Nothing that arrives raises an error here: the event loop would close the socket."""
        try:
            self._parser.feed(data)
            if len(data) < SMALL_BYTES and self.is_open:
                self._owner.on_small_block()
        except Exception as error:  # noqa: BLE001
            self.fail(error)

    def on_writable(self) -> None:
        if self.is_open:
            self._owner.on_writable()

    def on_lost(self, error: BaseException | None) -> None:
        self.fail(
            error if isinstance(error, Exception) else ConnectionError("the broker closed the connection")
        )

    # Called by the parser.

    def on_ping(self) -> None:
        self.write(b"PONG\r\n")  # at once: a busy process must not look frozen to its broker

    def on_pong(self) -> None:
        if self._pongs:
            _settle(self._pongs.popleft(), True)

    def on_info(self, info: dict[str, Any]) -> None:
        self.info.update(info)
        self._owner.on_broker_info(self.info)
        _settle(self._informed, None)

    def on_error(self, text: str) -> None:
        """An error line of the broker, as it was sent: subjects differ by case."""
        violation = broker_errors.VIOLATION.search(text)
        if violation is not None:
            self._owner.on_violation(violation[1].lower(), violation[2])
            return
        if self.is_open:
            events.warning("broker-error", reason=text)
        if not broker_errors.is_harmless(text):  # the broker closes the connection after it
            self.fail(broker_errors.BrokerError(text))

    # A broker that is silent.

    def _watch(self) -> None:
        """Ping a broker from which nothing arrives. Without a reply, end the session."""
        self._watch_timer = asyncio.get_running_loop().call_later(silence.INTERVAL_S, self._watch)
        self._silence.observe(self._parser.blocks, self._owner.unsent_bytes())
        if self._silence.is_lost:
            events.warning("broker-silent", broker=self.info.get("server_name"))
            self.fail(ConnectionError("the broker is silent"))
        elif self._silence.intervals:
            self._owner.on_silence()

    def unsent_bytes(self) -> int:
        return self._transport.unsent_bytes() if self._transport is not None else 0


def _settle(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)
