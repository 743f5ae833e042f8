"""The layer on nats-py: one connection that reconnects, with its own reading and writing.

nats-py provides the socket, TLS, WebSocket, the handshake and resubscription. Replaced are the parts that run
for every message (its parser, its queue and task for each subscription, its message class) and its error
handling where an error of the broker would close the client permanently. All uses of its private names are
here, in `parser` and in `transports`; ``tests/bus/test_nats_py_internals.py`` lists them.

Subscriptions here are *readers*: a plain function called for each message while the socket is read.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Callable, Sequence
from typing import Any

import nats.errors
from nats.aio import client as nats_client

from muster.bus import message_format, subject_patterns
from muster.bus.client import (
    broker_errors,
    cancellation,
    counters,
    credential_source,
    parser,
    reconnection,
    transports,
)
from muster.core import errors
from muster.core.telemetry import log

events = log.EventLog("bus")

Reader = Callable[[bytes, bytes, bytes, bytes | None], None]  # subject, reply, data, raw headers

CLOSE_S = 2.0  # maximum wait for attempts to reconnect when the connection is closed
PING_INTERVAL_S = 2.0  # shorter than a broker's own interval: it then does not ping this client
SILENT_INTERVALS_MAX = 2  # a broker from which nothing arrives for longer is given up
MAX_UNSENT_BYTES = 2 << 20
AT_ONCE_BYTES_MAX = 64 << 10  # with more unsent bytes, nothing is written ahead of the flusher


class NatsConnection(nats_client.Client):
    """One connection. It notifies its owner of state changes and of rejected subscriptions."""

    def __init__(
        self,
        inbox: str,
        on_change: Callable[[str], None],
        on_refused: Callable[[str], None],
        counts: counters.ConnectionCounters,
    ) -> None:
        super().__init__()
        self._ps = self._parser = parser.NatsParser(self)
        self._readers: dict[int, tuple[parser.Matches | None, Reader]] = {}
        self._inbox = inbox
        self._refused_subjects: set[str] = set()
        self._on_change = on_change
        self._on_refused = on_refused
        self._counts = counts
        self._proxy: str | None = None
        self._in_burst = False
        self._connect_timeout_s = 0.0
        self._plan = reconnection.ReconnectionPlan()
        self._release_slot: Callable[[], None] = _nothing
        self._auth_failures = 0
        self.cause: errors.MusterError | None = None  # the reason of an unrequested close
        self.generation = 0  # grows with each connection made
        self.on_little: list[Callable[[], None]] = []  # called when a small block has been read
        self._reconnecting: set[asyncio.Task[Any]] = set()
        self.on_state_change: set[Callable[[], object]] = set()  # called after each reconnection and close

    # Connecting.

    async def open(
        self,
        server: str,
        *,
        name: str,
        creds: Callable[[], credential_source.CredentialSource] | None,
        tls: ssl.SSLContext | None,
        tls_hostname: str | None,
        connect_timeout_s: float,
        proxy: str | None = None,
        echo: bool = True,
    ) -> None:
        """Connect to ``server``. After that the connection reconnects by itself, to other brokers too."""
        self._proxy, self._connect_timeout_s = proxy, connect_timeout_s
        complaints: list[Exception] = []

        async def failed(error: Exception) -> None:
            complaints.append(error)

        async def nothing() -> None:
            return

        options = credential_source.login_options(server, creds)
        if tls is not None:
            options["tls"] = tls
        if tls_hostname is not None:
            options["tls_hostname"] = tls_hostname
        try:
            with cancellation.cancellable():
                await super().connect(
                    [server],
                    name=name,
                    inbox_prefix=self._inbox,
                    error_cb=failed,
                    disconnected_cb=nothing,
                    closed_cb=nothing,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=connect_timeout_s,  # type: ignore[arg-type]
                    pending_size=MAX_UNSENT_BYTES,
                    reconnect_to_server_handler=self._next_server,
                    no_echo=not echo,
                    **options,
                )
        except (OSError, nats.errors.Error, ImportError) as error:
            await self._abandon()
            # The last error of nats-py is often "no servers available": the reason is the error before it.
            telling = (
                complaints[-1] if isinstance(error, nats.errors.NoServersError) and complaints else error
            )
            raise broker_errors.connection_error(telling, server) from error
        except BaseException:
            await self._abandon()
            raise
        self.options.update(allow_reconnect=True, max_reconnect_attempts=-1)
        self._error_cb = self._failed
        self._disconnected_cb = self._disconnected
        self._reconnected_cb = self._reconnected
        self._closed_cb = self._closed_for_good
        self.generation = 1

    async def _abandon(self) -> None:
        if self._flush_queue is not None:
            await super().close()

    async def _connect_to_server(self, s: Any) -> None:
        if not self._transport:
            made = transports.WebSocketTransport if s.uri.scheme in ("ws", "wss") else transports.TcpTransport
            self._transport = made(self._proxy)
        if self.options["allow_reconnect"]:
            self._cancel_tasks()
            self._release_slot = await reconnection.AttemptSlots.of_loop().take()
        self.options["connect_timeout"] = self._connect_timeout_s
        with broker_errors.failed_attempt():
            await super()._connect_to_server(s)
        self.options["connect_timeout"] = self._plan.handshake_s(self._connect_timeout_s)

    async def _process_connect_init(self) -> None:
        with broker_errors.failed_attempt():
            await super()._process_connect_init()

    def _cancel_tasks(self) -> None:
        """Those of an attempt that failed after its handshake: nats-py replaces them and lets them run."""
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None:
                task.cancel()

    def _next_server(
        self, servers: list[nats_client.Server], info: dict[str, Any]
    ) -> tuple[nats_client.Server, float]:
        """Another broker than the last, and the delay before the attempt."""
        self._release_slot()
        here = self._current_server.uri.netloc if self._current_server else None
        others = [server for server in servers if server.uri.netloc != here] or servers
        now_s = asyncio.get_running_loop().time()
        return random.choice(others), self._plan.next_delay_s(now_s, random.random())

    async def _attempt_reconnect(self) -> None:
        if (task := asyncio.current_task()) is not None:
            self._reconnecting.add(task)
            task.add_done_callback(self._reconnecting.discard)
        try:
            await super()._attempt_reconnect()
        except asyncio.InvalidStateError:
            pass  # when it is cancelled, nats-py completes a future twice, as its last step
        finally:
            self._release_slot()

    async def _failed(self, error: Exception) -> None:
        if broker_errors.is_credential_error(str(error)) and not self.is_connected:
            self._auth_failures += 1
            if self._auth_failures >= 2:
                self.cause = broker_errors.connection_error(error)
                self._giving_up = asyncio.create_task(super().close())
                return
        events.debug("connection-trouble", error=error)

    async def _disconnected(self) -> None:
        if not self.is_closed:
            self._on_change("disconnected")

    async def _reconnected(self) -> None:
        self._release_slot()
        self._plan.connected(asyncio.get_running_loop().time())
        self._auth_failures = 0
        self.generation += 1
        self._counts.add(counters.ConnectionCounter.RECONNECTED)
        self._on_change("connected")
        self._notify_listeners()

    async def _closed_for_good(self) -> None:
        self.cause = self.why_closed()
        self._on_change("closed")
        self._notify_listeners()

    def _notify_listeners(self) -> None:
        for listener in list(self.on_state_change):
            listener()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        if not self.is_connected:  # it cannot be sent, and nats-py would fail in the attempt
            self._pending, self._pending_data_size = [], 0
        try:
            await super()._close(status, do_cbs)
        except OSError:  # the socket was closed while the last bytes were being sent
            if self._transport is not None:
                self._transport.close()  # type: ignore[no-untyped-call]
                await self._transport.wait_closed()  # type: ignore[no-untyped-call]
            if do_cbs and self._closed_cb is not None:
                await self._closed_cb()
        # nats-py waits for the last attempt to reconnect only, and for a moment.
        if attempts := self._reconnecting - {asyncio.current_task()}:
            for attempt in attempts:
                if not attempt.cancelling():  # else it cleans up
                    attempt.cancel()
            await asyncio.wait(attempts, timeout=CLOSE_S)

    async def _process_err(self, err_msg: str) -> None:
        """An error line of the broker, as it was sent: subjects differ by case."""
        violation = broker_errors.VIOLATION.search(err_msg)
        if violation is None:
            events.warning("broker-error", reason=err_msg.strip("'"))
            if not broker_errors.is_harmless(err_msg):
                # The broker closes the connection after it: reconnect, possibly to another broker.
                await self._process_op_err(nats.errors.Error(f"nats: {err_msg}"))
            return
        kind, subject = violation.groups()
        self._counts.add(counters.ConnectionCounter.FORBIDDEN)
        if kind.lower() == "subscription":
            self._refused_subjects.add(subject)
            self._on_refused(subject)
        elif self._fail_requests(subject):
            return
        events.warning("forbidden", what=kind.lower(), subject=subject)

    def _fail_requests(self, subject: str) -> bool:
        """Whether a request was waiting for the rejected publish, and has been failed."""
        return False

    def add_servers(self, servers: list[str]) -> None:
        """Add brokers for reconnection. Those that the broker reported are known already."""
        known = [server.uri.geturl() for server in self._server_pool]
        self.set_server_pool(list(dict.fromkeys([*known, *servers])))

    def count_bad_trace(self, _: str) -> None:
        self._counts.add(counters.ConnectionCounter.BAD_TRACE)

    @property
    def server_name(self) -> str | None:
        return self._server_info.get("server_name")

    @property
    def server_id(self) -> str:
        return str(self._server_info.get("server_id", ""))

    # Receiving.

    def dispatch(self, number: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        """A message for the subscription of this number."""
        listener = self._readers.get(number)
        if listener is not None:
            matches, reader = listener
            if matches is not None and matches(subject) is None:
                self.refuse(counters.ConnectionCounter.MISROUTED, subject)
                return
            try:
                reader(subject, reply, data, headers)
            except Exception as error:  # noqa: BLE001 - an error of one reader must not stop the others
                events.event("unreadable", level=logging.ERROR, error=error, subject=str(subject))

    def receives_stored(self, number: int) -> bool:
        return number in self._readers and self._readers[number][0] is None

    def refuse(self, why: counters.ConnectionCounter, subject: bytes) -> None:
        """Count a message that no handler receives."""
        if self._counts.add(why) == 1:  # one line for a connection: others only count
            events.warning("message-refused", reason=why.value[2], subject=str(subject))

    def _take(self, data: bytes) -> bytes:
        return self._parser.take(data) if self.is_connected else data

    async def _read_loop(self) -> None:
        if isinstance(self._transport, transports.TcpTransport):
            self._transport.hand_over(self._take)
        await super()._read_loop()
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return  # the event loop ends, and would not wait for an attempt to reconnect
        if self.is_connected:  # it ended without a reason: a socket that is not read must not look alive
            await self._process_op_err(nats.errors.Error("nats: reading ended"))

    def answer_ping(self) -> None:
        self._append(nats_client.PONG_PROTO)

    async def _process_pong(self) -> None:
        if self._pongs:
            future = self._pongs.pop(0)
            if not future.done():  # nats-py's own trips over a flush that timed out
                future.set_result(True)

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        # In line with what waits to be sent: nats-py's own overtakes it, and a flush would promise too much.
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        self._append(nats_client.PING_PROTO)

    async def _ping_interval(self) -> None:
        """Ping a broker from which nothing arrives. Without a reply, reconnect to another broker.

        A frozen broker keeps its sockets open, so only its silence shows. Progress with a backlog of unsent
        data counts as a reply: a ping waits behind it, and a slow network is not a frozen broker.
        """
        silent, blocks, unsent = 0, self._parser.blocks, 0
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            if not self.is_connected:
                continue
            blocks_before, blocks = blocks, self._parser.blocks
            unsent_before, unsent = unsent, self._unsent_bytes()
            silent = 0 if blocks != blocks_before or unsent < unsent_before else silent + 1
            if silent > SILENT_INTERVALS_MAX:
                events.warning("broker-silent", broker=self.server_name)
                await self._process_op_err(nats.errors.StaleConnectionError())
                return
            if silent:
                await self._send_ping()

    def _unsent_bytes(self) -> int:
        on_socket = (
            self._transport.unsent_bytes() if isinstance(self._transport, transports.TcpTransport) else 0
        )
        return on_socket + self._pending_data_size

    async def listen(
        self,
        subject: str,
        group: str,
        reader: Reader | parser.BulkReader,
        *,
        timeout_s: float,
        stored: bool = False,
    ) -> int:
        """Subscribe, and return the subscription's number once the broker has it.

        ``stored``: it also receives messages of a stream, under the subjects that they are stored on; the
        subject of one that is malformed is empty.
        """
        message_format.check_subject(subject, wildcards=True)
        message_format.check_group(group)
        self.check_open()
        self._refused_subjects.discard(subject)
        number = 0
        try:
            with cancellation.cancellable():
                number = (await super().subscribe(subject, queue=group))._id
                matches = None if stored else subject_patterns.compiled_for_bytes(subject).match
                if callable(reader):
                    self._readers[number] = matches, reader
                else:
                    reader.matches = matches
                    self._parser.bulk[b"%d" % number] = reader
            await self.round_trip(timeout_s)
            if subject in self._refused_subjects:
                raise errors.Forbidden(f"this identity may not subscribe to {subject!r}")
        except BaseException:
            self.forget(number)
            raise
        return number

    def forget(self, number: int, *, still_read: bool = False) -> None:
        """Unsubscribe. The broker is notified soon; ``still_read``: messages that arrive before are read."""
        if not still_read:
            self._readers.pop(number, None)
            self._parser.bulk.pop(b"%d" % number, None)
        if self._subs.pop(number, None) is not None and self.is_connected:
            self._append(b"UNSUB %d\r\n" % number)

    def listen_again(self, number: int) -> None:
        """Send SUB again under the same number: no change if the broker still has it."""
        subscription = self._subs.get(number)
        if subscription is not None and self.is_connected:
            group = f" {subscription._queue}" if subscription._queue else ""
            self._append(f"SUB {subscription._subject}{group} {number}\r\n".encode())

    def numbers(self) -> list[int]:
        return list(self._subs)

    def fresh_inbox(self) -> str:
        return f"{self._inbox}.{self._nuid.next().decode()}"

    # Sending.

    def check_open(self) -> None:
        if self.is_closed:
            raise self.why_closed()

    def why_closed(self) -> errors.MusterError:
        return self.cause or errors.NotConnected("the connection is closed")

    def _append(self, command: bytes) -> None:
        if not self._in_burst and not self._pending and self._writes_at_once():
            # The first command of a loop iteration is written at once: a caller that waits for a reply saves
            # the iteration that the flusher would need. Further commands of the same iteration are written
            # together.
            self._in_burst = True
            asyncio.get_running_loop().call_soon(self._end_burst)
            self._transport.write(command)  # type: ignore[union-attr]
            return
        self._pending.append(command)
        self._pending_data_size += len(command)
        queue = self._flush_queue
        if queue is not None and queue.empty() and self.is_connected:
            queue.put_nowait(asyncio.get_running_loop().create_future())

    def _writes_at_once(self) -> bool:
        return (
            self.is_connected
            and isinstance(self._transport, transports.TcpTransport)
            and self._transport.unsent_bytes() < AT_ONCE_BYTES_MAX
        )

    def _end_burst(self) -> None:
        self._in_burst = False

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
        if size > self._max_payload:
            raise errors.LimitExceeded(
                f"a message of {size} bytes: the maximum of the broker is {self._max_payload}"
            )
        return message_format.publish_parts(subject, data, reply, raw_headers)

    def send_frames(self, frames: bytes) -> bool:
        """As `send`, for messages that are in the form of the protocol already."""
        if not self.is_connected:
            self.check_open()
            if self._pending_data_size + len(frames) > MAX_UNSENT_BYTES:
                raise errors.NotConnected("not connected, and the send buffer is full")
        self._append(frames)
        return self._pending_data_size > MAX_UNSENT_BYTES

    @property
    def has_room(self) -> bool:
        """Whether a message can be sent without waiting: connected, and little is queued."""
        return self.is_connected and self._pending_data_size < MAX_UNSENT_BYTES // 2

    async def ease(self) -> None:
        """Wait until the queue has been written to the socket: a slow network slows a publisher down here."""
        with cancellation.cancellable():
            await self._flush_pending(force_flush=True)

    async def round_trip(self, timeout_s: float) -> None:
        """When this returns, the broker has read everything sent so far."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._pong():
                    pass
        except TimeoutError:
            raise errors.TimedOut(f"the broker did not respond within {timeout_s:g} s") from None

    async def _pong(self) -> bool:
        """Send a ping and wait for the pong; False if there was a reconnection before that."""
        await self.connected()
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def another_connection() -> None:
            if not answered.done():
                answered.set_result(False)

        self.on_state_change.add(another_connection)
        try:
            await self._send_ping(answered)
            return await answered
        finally:
            self.on_state_change.discard(another_connection)

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


def _nothing() -> None:
    return
