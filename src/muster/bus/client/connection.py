"""A connection to the brokers: one session at a time, and another one, to another broker, when that is lost.

Subscriptions and unsent messages belong to the connection; a `session` has the socket. Sending never waits:
what the socket does not take is kept, up to `MAX_UNSENT_BYTES`, and then the caller waits in `ease`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muster.bus import api, message_format
from muster.bus.client import (
    broker_errors,
    counters,
    credential_source,
    parser,
    reconnection,
    requests,
    session,
)
from muster.core import errors, subjects
from muster.core.telemetry import log
from muster.supervision import tasks

events = log.EventLog("bus")

MAX_UNSENT_BYTES = 2 << 20


class NatsConnection:
    """It notifies its owner of state changes and of rejected subscriptions."""

    def __init__(
        self,
        identity: str,
        on_change: Callable[[api.ConnectionState], None],
        on_refused: Callable[[str], None],
        counts: counters.ConnectionCounters,
    ) -> None:
        self.is_connected = False
        self.is_closed = False
        self.cause: errors.MusterError | None = None  # the reason of an unrequested close
        self.generation = 0  # grows with each session
        self.info: dict[str, Any] = {}  # of the last broker
        self.on_little: list[Callable[[], None]] = []  # called when a small block has been read
        self.on_state_change: set[Callable[[], object]] = set()  # called after each reconnection and close
        self._inbox = subjects.inbox(identity)
        self._on_change = on_change
        self._on_refused_subscription = on_refused
        self._counts = counts
        self._options: session.SessionOptions
        self._login: Callable[[Mapping[str, Any]], dict[str, str]]
        self._servers: reconnection.ServerPool
        self._session: session.BrokerSession | None = None
        self._subscriptions = parser.WireSubscriptions(counts)
        self._numbers = itertools.count(1)
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._eased = asyncio.Event()
        self._in_burst = False
        self._plan = reconnection.ReconnectionPlan()
        self._refused_logins = 0
        self._tasks = tasks.TaskSupervisor("connection")
        self.requests = requests.RequestInbox(self, identity)

    # Connecting.

    async def open(
        self,
        server: str,
        creds: Callable[[], credential_source.CredentialSource] | None,
        options: session.SessionOptions,
    ) -> None:
        """Connect to ``server``. After that the connection reconnects by itself, to other brokers too."""
        address = reconnection.parse_server(server)
        self._login, self._options = credential_source.login(server, creds), options
        self._servers = reconnection.ServerPool(address)
        try:
            self._begin(await self._open_session(address))
        except errors.MusterError:
            raise
        except Exception as error:
            raise broker_errors.connection_error(error, server) from error

    async def _open_session(self, address: reconnection.ServerAddress) -> session.BrokerSession:
        self._servers.current = address
        opened = session.BrokerSession(self, self._options, self._login, self._subscriptions)
        await opened.open(address, self._plan.handshake_s(self._options.connect_timeout_s))
        return opened

    def _begin(self, opened: session.BrokerSession) -> None:
        self._session = opened
        self.is_connected = True
        self.generation += 1
        self._refused_logins = 0
        # What changed during the handshake.
        active = self._subscriptions.active()
        changes = [b"UNSUB %d\r\n" % number for number in opened.subscribed - active.keys()]
        changes += [held.command for number, held in active.items() if number not in opened.subscribed]
        self._unsent[:0] = changes
        self._unsent_bytes += sum(map(len, changes))
        self._flush()

    def on_session_lost(self, lost: session.BrokerSession) -> None:
        if lost is not self._session or self.is_closed:
            return
        self._session, self.is_connected = None, False
        # Subscriptions are sent by the next handshake, and a ping would take the place of a later one.
        self._unsent = [command for command in self._unsent if command.startswith((b"PUB ", b"HPUB "))]
        self._unsent_bytes = sum(map(len, self._unsent))
        self._eased.set()
        self._tasks.spawn("reconnection", self._reconnect())

    async def _reconnect(self) -> None:
        self._on_change(api.ConnectionState.RECONNECTING)
        loop = asyncio.get_running_loop()
        while not self.is_connected:
            address = random.choice(self._servers.candidates())
            await asyncio.sleep(self._plan.next_delay_s(loop.time(), random.random()))
            release_slot = await reconnection.AttemptSlots.of_loop().take()
            try:
                self._begin(await self._open_session(address))
            except Exception as error:  # noqa: BLE001 - another attempt may succeed
                events.debug("connection-trouble", error=error)
                self._refused_logins += broker_errors.is_credential_error(error)
                if self._refused_logins >= 2:
                    self.cause = broker_errors.connection_error(error)
                    self._end()
                    return
            finally:
                release_slot()
        self._plan.connected(loop.time())
        self._counts.add(counters.ConnectionCounter.RECONNECTED)
        self._on_change(api.ConnectionState.CONNECTED)
        self._notify_listeners()

    def on_broker_info(self, info: dict[str, Any]) -> None:
        self.info = info
        self._servers.discover(info)

    def on_violation(self, kind: str, subject: str) -> None:
        self._counts.add(counters.ConnectionCounter.FORBIDDEN)
        if kind == "subscription":
            for held in self._subscriptions.active().values():
                held.is_refused |= held.subject == subject
            self._on_refused_subscription(subject)
        if self.requests.fail(subject) and kind == "publish":
            return
        events.warning("forbidden", what=kind, subject=subject)

    def _notify_listeners(self) -> None:
        for listener in list(self.on_state_change):
            listener()

    async def close(self) -> None:
        """Send what is unsent, for a limited time, and close."""
        if self.is_closed:
            return
        if self._session is not None and self._unsent:
            self._session.write(b"".join(self._unsent))
        self.is_closed, self.is_connected = True, False
        try:
            await self._tasks.close()
            if self._session is not None:
                await self._session.close()
        finally:
            if self._session is not None:
                self._session.abort()
            self._end()

    def _end(self) -> None:
        self.is_closed, self.is_connected = True, False
        self._session = None
        self.cause = self.why_closed()
        self._eased.set()
        self._on_change(api.ConnectionState.CLOSED)
        self._notify_listeners()

    def add_servers(self, urls: Sequence[str]) -> None:
        """Add brokers for reconnection."""
        self._servers.add(map(reconnection.parse_server, urls))

    @property
    def server_name(self) -> str | None:
        return self.info.get("server_name")

    @property
    def server_id(self) -> str:
        return str(self.info.get("server_id", ""))

    @property
    def client_id(self) -> int | None:
        return self.info.get("client_id")

    @property
    def payload_bytes_max(self) -> int:
        size: int = self.info.get("max_payload", session.MAX_PAYLOAD)
        return size

    # Receiving.

    def on_small_block(self) -> None:
        for act in self.on_little:
            act()

    def count_bad_trace(self, _: str) -> None:
        self._counts.add(counters.ConnectionCounter.BAD_TRACE)

    def subscribe_soon(
        self,
        subject: str,
        group: str,
        read: parser.Reader | None,
        read_all: api.BulkHandler | None = None,
        *,
        stored: bool = False,
    ) -> parser.WireSubscription:
        """Subscribe, without waiting for the broker: it has it before it reads what is sent after this."""
        number = next(self._numbers)
        made = parser.WireSubscription(number, subject, group, read, read_all, stored=stored)
        self._subscriptions.by_number[b"%d" % number] = made
        if self.is_connected:
            self._append(made.command)
        return made

    async def listen(
        self,
        subject: str,
        group: str,
        read: parser.Reader | None,
        read_all: api.BulkHandler | None = None,
        *,
        timeout_s: float,
        stored: bool = False,
    ) -> int:
        """Subscribe, and return the subscription's number once the broker has it. The arguments are those of
        `parser.WireSubscription`."""
        message_format.check_subject(subject, wildcards=True)
        message_format.check_group(group)
        self.check_open()
        made = self.subscribe_soon(subject, group, read, read_all, stored=stored)
        try:
            await self.round_trip(timeout_s)
            if made.is_refused:
                raise errors.Forbidden(f"this identity may not subscribe to {subject!r}")
        except BaseException:
            self.forget(made.number)
            raise
        return made.number

    def forget(self, number: int, *, still_read: bool = False) -> None:
        """Unsubscribe. The broker is notified soon; ``still_read``: messages that arrive before are read."""
        held = self._subscriptions.by_number.get(b"%d" % number)
        if held is None:
            return
        if held.is_active and self.is_connected:
            self._append(b"UNSUB %d\r\n" % number)
        held.is_active = False
        if not still_read:
            del self._subscriptions.by_number[b"%d" % number]

    def listen_again(self, number: int) -> None:
        """Send SUB again under the same number: no change if the broker still has it."""
        held = self._subscriptions.by_number.get(b"%d" % number)
        if held is not None and held.is_active and self.is_connected:
            self._append(held.command)

    def numbers(self) -> list[int]:
        return list(self._subscriptions.active())

    def fresh_inbox(self) -> str:
        return f"{self._inbox}.{secrets.token_hex(11)}"

    # Sending.

    def check_open(self) -> None:
        if self.is_closed:
            raise self.why_closed()

    def why_closed(self) -> errors.MusterError:
        return self.cause or errors.NotConnected("the connection is closed")

    def _append(self, command: bytes) -> None:
        over = self._session
        if over is not None and not self._in_burst and not self._unsent and over.is_writable:
            # The first command of a loop iteration is written at once: a caller that waits for a reply saves
            # an iteration. Further commands of the same iteration are written together.
            self._in_burst = True
            asyncio.get_running_loop().call_soon(self._end_burst)
            over.write(command)
            return
        self._unsent.append(command)
        self._unsent_bytes += len(command)

    def _end_burst(self) -> None:
        self._in_burst = False
        self._flush()

    def _flush(self) -> None:
        over = self._session
        if self._unsent and over is not None and over.is_writable:
            commands, self._unsent, self._unsent_bytes = self._unsent, [], 0
            over.write(b"".join(commands))
            self._eased.set()

    on_writable = _flush

    def on_silence(self) -> None:
        if self._session is not None:
            self._session.expect_pong()
            self._append(session.PING)

    def unsent_bytes(self) -> int:
        return self._unsent_bytes + (self._session.unsent_bytes() if self._session is not None else 0)

    def send(self, subject: str, data: bytes, reply: str = "", raw_headers: bytes | None = None) -> bool:
        """Queue a message for the socket. True when so much is queued that the caller should `ease`."""
        return self.send_frames(b"".join(self._parts(subject, data, reply, raw_headers)))

    def send_all(self, messages: Sequence[tuple[str, bytes, bytes | None]], reply: str = "") -> None:
        """Several (subject, data, raw headers) as one. ``reply``: the last one's."""
        parts: list[bytes] = []
        for place, (subject, data, raw_headers) in enumerate(messages, 1):
            parts += self._parts(subject, data, reply if place == len(messages) else "", raw_headers)
        self.send_frames(b"".join(parts))

    def _parts(self, subject: str, data: bytes, reply: str, raw_headers: bytes | None) -> tuple[bytes, ...]:
        size = len(data) if raw_headers is None else len(data) + len(raw_headers)
        size_max = self.payload_bytes_max
        if size > size_max:
            raise errors.LimitExceeded(f"a message of {size} bytes: the maximum of the broker is {size_max}")
        return message_format.publish_parts(subject, data, reply, raw_headers)

    def send_frames(self, frames: bytes) -> bool:
        """As `send`, for messages that are in the form of the protocol already."""
        if not self.is_connected:
            self.check_open()
            if self._unsent_bytes + len(frames) > MAX_UNSENT_BYTES:
                raise errors.NotConnected("not connected, and the send buffer is full")
        self._append(frames)
        return self._unsent_bytes > MAX_UNSENT_BYTES

    @property
    def has_room(self) -> bool:
        """Whether a message can be sent without waiting: connected, and little is queued."""
        return self.is_connected and self._unsent_bytes < MAX_UNSENT_BYTES // 2

    async def ease(self) -> None:
        """Wait until the queue has been written to the socket: a slow network slows a publisher down here."""
        if self._unsent and self.is_connected:
            self._eased.clear()
            await self._eased.wait()

    async def round_trip(self, timeout_s: float) -> None:
        """When this returns, the broker has read everything sent so far, unless a connection was lost."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._pong():
                    pass
        except TimeoutError:
            raise errors.TimedOut(f"the broker did not respond within {timeout_s:g} s") from None

    async def _pong(self) -> bool:
        """Send a ping and wait for the pong; False if there was a reconnection before that."""
        await self.connected()
        over = self._session
        if over is None:
            return False
        pong = over.expect_pong()
        self._append(session.PING)
        return await pong

    async def connected(self, timeout_s: float | None = None) -> None:
        """Return when there is a connection; `errors.NotConnected` if there is none within ``timeout_s``."""
        self.check_open()
        while not self.is_connected:
            news = asyncio.Event()
            self.on_state_change.add(news.set)
            try:
                async with asyncio.timeout(timeout_s):
                    await news.wait()
            except TimeoutError:
                raise errors.NotConnected(f"no broker could be reached for {timeout_s:g} s") from None
            finally:
                self.on_state_change.discard(news.set)
            self.check_open()
