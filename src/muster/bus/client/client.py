"""The real bus: a connection to a broker, and to another one when that fails.

A connection reconnects with jitter to another known broker and subscribes again. Every `audit_s` it requests
from its broker the list of its subscriptions, and repeats those that the broker has lost
(docs/decisions/0009).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import secrets
import ssl
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from muster.bus import api, message_format
from muster.bus.client import (
    connection,
    counters,
    credential_source,
    received,
    reconnection,
    requests,
    session,
    state_listeners,
    subscriptions,
)
from muster.bus.streams import jetstream
from muster.bus.streams import key_value as streams_key_value
from muster.bus.streams import stream as streams_stream
from muster.core import errors, lifecycle, subjects
from muster.core.telemetry import log, metrics
from muster.supervision import tasks

events = log.EventLog("bus")

T = TypeVar("T")

AUDIT_S = 30.0
AUDIT_TIMEOUT_S = 2.0
AUDIT_MAX = 5_000  # with more subscriptions the reply would be too large: all are repeated without a request
AUDIT_SUBJECT = "$SYS.REQ.ACCOUNT.PING.CONNZ"
CONNECT_TIMEOUT_S = 3.0
CLOSE_TIMEOUT_S = 5.0


class NatsBus(lifecycle.ClosingContext):
    """See `api.Bus`; made by `connect`."""

    def __init__(self, identity: str, *, audit_s: float, counts: counters.ConnectionCounters) -> None:
        self._identity = identity
        self._audit_s = audit_s
        self._counts = counts
        self._login: Hashable = None
        self._wire: connection.NatsConnection
        self._state = api.ConnectionState.CLOSED
        self._listeners = state_listeners.StateListeners()
        self._subscriptions: dict[int, subscriptions.BoundedSubscription] = {}
        self._may_list_subscriptions = True  # of this identity, from the brokers
        self.peer_access: credential_source.PeerAccess | None = None
        self._tasks = tasks.TaskSupervisor("connection")
        self._durable: streams_stream.StreamFactory

    def __repr__(self) -> str:
        return f"<bus {self._identity!r} {self._state.value} at {self.broker}>"

    async def _open(
        self,
        servers: Sequence[str],
        creds: Callable[[], credential_source.CredentialSource] | None,
        options: session.SessionOptions,
        in_order: bool,
    ) -> None:
        source = creds() if creds is not None else None
        self._may_list_subscriptions = source is None or source.sees_connections
        self._login = (self._identity, source and source.user_jwt, frozenset(servers))
        if creds is not None and options.proxy is None:  # behind a proxy nothing else is reachable
            self.peer_access = credential_source.PeerAccess(creds, options.tls)
        order = list(servers)
        if not in_order:
            random.shuffle(order)
        failure: errors.MusterError | None = None
        for server in order:
            reconnection.parse_server(server)  # all of them, before a connection is open
        for server in order:
            self._wire = connection.NatsConnection(self._identity, self._changed, self._refused, self._counts)
            try:
                await self._wire.open(server, creds, options)
            except errors.Unavailable as error:
                failure = error
                continue
            break
        else:
            if len(order) > 1 and failure is not None:
                raise errors.NotConnected(
                    f"none of {len(order)} brokers responds; the last error: {failure}"
                ) from failure
            raise failure or errors.InvalidInput("no address of a broker was given")
        self._wire.add_servers(order)
        self._durable = streams_stream.StreamFactory(self._wire, self._counts)
        self._changed(api.ConnectionState.CONNECTED)
        if self._audit_s > 0:
            self._tasks.loop("audit of subscriptions", self._audit_always)

    # State.

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def login(self) -> Hashable:
        return self._login

    @property
    def state(self) -> api.ConnectionState:
        return self._state

    @property
    def broker(self) -> str | None:
        return self._wire.server_name if self._state is api.ConnectionState.CONNECTED else None

    @property
    def connection(self) -> api.ConnectionId | None:
        if self._state is not api.ConnectionState.CONNECTED or self._wire.client_id is None:
            return None
        return api.ConnectionId(self._wire.server_id, self._wire.client_id, self._wire.server_name or "")

    @property
    def payload_bytes_max(self) -> int:
        """Of a message, as the brokers limit it."""
        return self._wire.payload_bytes_max

    def on_state(self, listener: Callable[[api.ConnectionState], None]) -> Callable[[], None]:
        return self._listeners.add(listener)

    def on_little(self, act: Callable[[], None]) -> None:
        self._wire.on_little.append(act)

    def statistics(self) -> api.BusStatistics:
        return self._counts.statistics()

    def _changed(self, state: api.ConnectionState) -> None:
        if state is self._state:
            return
        self._state = state
        events.info("connection", identity=self._identity, state=state.value, broker=self.broker)
        if state is api.ConnectionState.CLOSED:
            for subscription in self._subscriptions.values():
                subscription.end(self._wire.cause)
        self._listeners.notify(state)

    def _refused(self, subject: str) -> None:
        """The broker refused a subscription: after a reconnection, one that we may not have any more."""
        for subscription in self._subscriptions.values():
            if subscription.subject == subject:
                subscription.end(errors.Forbidden(f"this identity may not subscribe to {subject!r} any more"))

    # Messages.

    async def publish(
        self, subject: str, data: bytes, *, headers: api.Headers | None = None, reply: str | None = None
    ) -> None:
        message_format.check_subject(subject)
        if reply is not None:
            message_format.check_subject(reply)
        raw_headers = message_format.raw_headers(headers)
        if self._wire.send(subject, data, reply or "", raw_headers):
            await self._wire.ease()

    def publish_now(self, messages: Sequence[tuple[str, bytes, api.Headers]]) -> bool:
        if not self._wire.has_room:
            return False
        commands = []
        for subject, data, headers in messages:
            message_format.check_subject(subject)
            commands.append((subject, data, message_format.raw_headers(headers)))
        self._wire.send_all(commands)
        return True

    async def publish_frames(self, frames: bytes) -> None:
        """Publish messages that are in the form of the protocol already (`message_format.publish_parts`)."""
        if self._wire.send_frames(frames):
            await self._wire.ease()

    async def subscribe(
        self,
        subject: str,
        *,
        group: str | None = None,
        handler: api.Handler | None = None,
        bulk: api.BulkHandler | None = None,
        max_pending: int = 65_536,
        max_pending_bytes: int = 64 << 20,
        overflow: api.OverflowPolicy = api.OverflowPolicy.DROP_OLDEST,
    ) -> subscriptions.BoundedSubscription:
        subscription = subscriptions.BoundedSubscription(
            subject,
            handler=handler,
            bulk=bulk,
            max_pending=max_pending,
            max_pending_bytes=max_pending_bytes,
            overflow=overflow,
            counts=self._counts,
        )
        accept, message, over = subscription.accept, received.ReceivedMessage, self._wire

        def read(subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
            accept(message(subject.decode(), reply.decode() or None, data, headers, over))

        number = await over.listen(
            subject,
            group or "",
            read if bulk is None else None,
            subscription.accept_all,
            timeout_s=api.DEFAULT_TIMEOUT_S,
        )
        self._subscriptions[number] = subscription

        async def unsubscribe() -> None:
            if self._subscriptions.pop(number, None) is not None:
                over.forget(number)

        subscription.started(unsubscribe)
        return subscription

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        headers: api.Headers | None = None,
        timeout_s: float = api.DEFAULT_TIMEOUT_S,
        repeat: api.Repetition | None = None,
    ) -> received.ReceivedMessage:
        message_format.check_subject(subject)
        raw_headers = message_format.raw_headers(headers)
        answer = await self._wire.requests.exchange(
            subject, data, raw_headers, timeout_s=timeout_s, repeat=repeat
        )
        return self._message(answer)

    def _message(self, answer: requests.InboxReply) -> received.ReceivedMessage:
        return received.ReceivedMessage(
            answer.subject.decode(),
            answer.reply.decode() or None,
            answer.data,
            answer.raw_headers,
            self._wire,
        )

    async def gather(
        self,
        subject: str,
        data: bytes,
        *,
        enough: int | None = None,
        timeout_s: float = api.DEFAULT_TIMEOUT_S,
        headers: api.Headers | None = None,
    ) -> list[api.Message]:
        message_format.check_subject(subject)
        raw_headers = message_format.raw_headers(headers)
        answers: list[api.Message] = []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(answer: requests.InboxReply) -> None:
            if done.done():
                return
            unheard = requests.is_no_responders(answer)
            if not unheard:
                answers.append(self._message(answer))
            if unheard or len(answers) == enough:
                done.set_result(None)

        def fail(error: errors.MusterError) -> None:
            if not done.done():
                done.set_exception(error)

        reply, end = self._wire.requests.expect((subject,), take, fail)
        try:
            self._wire.send(subject, data, reply, raw_headers)
            async with asyncio.timeout(timeout_s):
                await done
        except TimeoutError:
            pass
        finally:
            end()
        return answers

    # Streams and buckets.

    async def stream(self, settings: api.StreamSettings) -> streams_stream.NatsStream:
        return await self._durable.ensure(settings)

    async def open_stream(self, name: str) -> streams_stream.NatsStream:
        return await self._durable.open(name)

    async def streams(self) -> list[str]:
        return await self._durable.names()

    async def delete_stream(self, name: str) -> None:
        await self._durable.remove(name)

    async def key_value(self, settings: api.KeyValueSettings) -> streams_key_value.StreamKeyValue:
        return await self._durable.bucket(settings)

    @property
    def storage(self) -> jetstream.JetStreamApi:
        """The JetStream interface, for functions that `api.Bus` does not have
        (`muster.bus.streams.snapshots`)."""
        return self._durable.api

    async def budgets(self) -> list[api.StreamBudget]:
        return await self._durable.budgets()

    async def limit(
        self, stream: str, *, max_bytes: int, max_age_s: float, on_full: api.FullPolicy, replicas: int
    ) -> None:
        await self._durable.limit(stream, streams_stream.budget(max_bytes, max_age_s, on_full, replicas))

    # Looking after itself.

    async def _audit_always(self) -> None:
        while True:
            await asyncio.sleep(self._audit_s * (0.75 + random.random() / 2))
            if self._state is api.ConnectionState.CONNECTED:
                try:
                    await self.audit()
                except errors.MusterError as error:
                    events.debug("audit-failed", error=error)

    async def audit(self) -> int:
        """Renew the subscriptions that the broker does not hold any more. Returns how many it had lost."""
        requested, generation = self._wire.numbers(), self._wire.generation
        held = await self._held_by_broker() if len(requested) <= AUDIT_MAX else None
        if self._wire.generation != generation:
            return 0  # another connection: everything has just been subscribed again
        if held is None:
            # The request is not permitted, or there is no reply: repeat all of them. The broker ignores those
            # that it has.
            for number in requested:
                self._wire.listen_again(number)
            return 0
        # Subscriptions made after the request may be missing from the reply.
        lost = [number for number in requested if number not in held and number in self._wire.numbers()]
        for number in lost:
            self._wire.listen_again(number)
            subscription = self._subscriptions.get(number)
            if subscription is not None:
                subscription.renewed += 1
                events.warning("subscription-renewed", subject=subscription.subject, broker=self.broker)
        self._counts.add(counters.ConnectionCounter.RENEWED, len(lost))
        return len(lost)

    async def _held_by_broker(self) -> set[int] | None:
        """The numbers of the subscriptions that the broker has; None if there is no result."""
        number, server_id = self._wire.client_id, self._wire.server_id

        def read(server: dict[str, str], connections: list[Any]) -> tuple[set[int] | None] | None:
            if server.get("id") != server_id:
                return None
            return (_numbers(connections) if connections else None,)

        return await self._ask_brokers({"cid": number, "subscriptions_detail": True}, read)

    async def is_closed(self, connection: api.ConnectionId) -> bool:
        """A broker that does not reply may be cut off, with connections that are open. One of the same name
        with another id replaces one that has ended.
        """

        def read(server: dict[str, str], connections: list[Any]) -> tuple[bool] | None:
            if server.get("id") == connection.broker:
                return (not connections,)
            return (True,) if server.get("name") == connection.broker_name else None

        return await self._ask_brokers({"cid": connection.number}, read) or False

    async def _ask_brokers(
        self,
        question: dict[str, Any],
        read: Callable[[dict[str, str], list[Any]], tuple[T | None] | None],
    ) -> T | None:
        """Ask every broker of the domain for connections: the first result of ``read``, None without one."""
        result: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()

        def take(answer: requests.InboxReply) -> None:
            report = json.loads(answer.data) if answer.data else {}
            taken = read(report.get("server", {}), report.get("data", {}).get("connections") or [])
            if (taken is not None or not answer.data) and not result.done():
                result.set_result(taken[0] if taken is not None else None)

        def fail(error: errors.MusterError) -> None:
            if isinstance(error, errors.Forbidden):
                self._may_list_subscriptions = False
            if not result.done():
                result.set_result(None)

        if not self._may_list_subscriptions:
            return None
        reply, end = self._wire.requests.expect((AUDIT_SUBJECT,), take, fail)
        try:
            self._wire.send(AUDIT_SUBJECT, json.dumps(question).encode(), reply)
            async with asyncio.timeout(AUDIT_TIMEOUT_S):
                return await result
        except TimeoutError:
            return None
        finally:
            end()

    async def flush(self, *, timeout_s: float = api.DEFAULT_TIMEOUT_S) -> None:
        await self._wire.round_trip(timeout_s)

    async def close(self) -> None:
        connected = self._state is api.ConnectionState.CONNECTED
        mine = list(self._subscriptions.items())
        try:
            await self._tasks.close()
            for number, _ in mine:
                self._wire.forget(number, still_read=True)
            with contextlib.suppress(errors.Unavailable):
                if connected:
                    # Once the broker has read the last line, everything it sent before has been accepted.
                    await self._wire.round_trip(CLOSE_TIMEOUT_S)
            for _, subscription in mine:
                subscription.end()
            with contextlib.suppress(TimeoutError, errors.Unavailable):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    for _, subscription in mine:
                        await subscription.drained()
                    if connected:
                        await self._durable.drained()
                        await self._wire.round_trip(CLOSE_TIMEOUT_S)
        finally:
            await self._wire.close()


def _numbers(connections: list[dict[str, list[dict[str, str]]]]) -> set[int]:
    return {
        int(held["sid"])
        for connection in connections
        for held in connection.get("subscriptions_list_detail", [])
    }


async def connect(
    servers: Iterable[str],
    *,
    identity: str | None = None,
    creds: credential_source.CredentialSource
    | Callable[[], credential_source.CredentialSource]
    | None = None,
    tls: ssl.SSLContext | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    audit_s: float = AUDIT_S,
    measure: metrics.Metrics | None = None,
    in_order: bool = False,
    proxy: str | None = None,
    echo: bool = True,
) -> NatsBus:
    """Connect to one of ``servers``. Without ``identity``, the credentials' own name, or a random one.

    They are tried in random order, so that clients spread, or ``in_order`` if they are ranked. ``creds`` may
    be a function, which is called again for each new connection. ``proxy`` is the URL of an HTTP proxy
    (``http://HOST:PORT``) for all connections. Without ``echo`` its subscriptions do not receive its own
    messages.
    """
    load_creds = creds if callable(creds) or creds is None else functools.partial(_given, creds)
    if identity is None:
        identity = load_creds().identity if load_creds is not None else f"anonymous-{secrets.token_hex(4)}"
    client = NatsBus(
        subjects.identity(identity), audit_s=audit_s, counts=counters.ConnectionCounters(measure)
    )
    options = session.SessionOptions(client.identity, tls, proxy, echo, connect_timeout_s)
    await client._open(list(servers), load_creds, options, in_order)
    return client


def _given(creds: credential_source.CredentialSource) -> credential_source.CredentialSource:
    return creds
