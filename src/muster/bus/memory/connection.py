"""The bus as one identity has it, over the simulated network."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from muster.bus import api, message_format
from muster.bus.client import counters, requests, state_listeners, subscriptions
from muster.bus.memory import storage, streams
from muster.bus.streams import key_value as streams_key_value
from muster.core import errors, lifecycle, subjects
from muster.core.telemetry import trace

if TYPE_CHECKING:
    from muster.bus.memory import network

T = TypeVar("T")

MAX_UNSENT = 1000  # messages buffered while not connected
TRY_S = 3.0


class SimulatedMessage:
    """See `api.Message`."""

    __slots__ = ("_bus", "data", "headers", "reply", "subject")

    def __init__(
        self, subject: str, data: bytes, headers: api.Headers, reply: str | None, bus: SimulatedBus
    ) -> None:
        self.subject = subject
        self.data = data
        self.headers = headers
        self.reply = reply
        self._bus = bus

    @property
    def size(self) -> int:
        return len(self.data) + (len(message_format.encode_headers(self.headers)) if self.headers else 0)

    def header(self, name: str) -> str | None:
        return self.headers.get(name)

    @property
    def trace(self) -> trace.TraceContext | None:
        return trace.extract(self.headers, self._bus.count_bad_trace)

    async def respond(self, data: bytes, *, headers: api.Headers | None = None) -> None:
        await self._bus.publish(message_format.reply_subject(self.subject, self.reply), data, headers=headers)

    def respond_now(self, data: bytes) -> bool:
        del data
        return False  # in the simulation every message takes time


@dataclass(slots=True, eq=False)
class SimulatedSubscription:
    """A subscription on the side of the brokers."""

    subject: str
    group: str
    bus: SimulatedBus
    accept: Callable[[SimulatedMessage], None]
    listening: bool = False


class SimulatedBus(lifecycle.ClosingContext):
    """See `api.Bus`; made by `network.SimulatedNetwork.connect`."""

    def __init__(self, net: network.SimulatedNetwork, identity: str, node: str, session: int) -> None:
        self.net = net
        self.node = node
        self.context = contextvars.copy_context()  # of its process
        self.severed = False  # the brokers have closed the connection, and the process does not know it
        self._identity = identity
        self._connection: api.ConnectionId | None = None
        self._state = api.ConnectionState.CLOSED
        self._listeners = state_listeners.StateListeners()
        self._counts = counters.ConnectionCounters(None)
        self._subscriptions: dict[subscriptions.BoundedSubscription, SimulatedSubscription] = {}
        self._unsent: list[Callable[[], None]] = []
        self._session = session
        self._replies = itertools.count(1)
        self._cause: errors.MusterError | None = None
        self._waiting: dict[asyncio.Future[Any], None] = {}  # in the order in which they began

    def __repr__(self) -> str:
        return f"<simulated bus {self._identity!r} {self._state.value}>"

    # State.

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def login(self) -> Hashable:
        return (self.net, self.node, self._identity)

    @property
    def state(self) -> api.ConnectionState:
        return self._state

    @property
    def broker(self) -> str | None:
        return self._connection.broker if self._connection else None

    @property
    def connection(self) -> api.ConnectionId | None:
        return self._connection

    async def is_closed(self, connection: api.ConnectionId) -> bool:
        return self.net.is_closed(self.node, connection)

    def on_state(self, listener: Callable[[api.ConnectionState], None]) -> Callable[[], None]:
        return self._listeners.add(listener)

    def on_little(self, act: Callable[[], None]) -> None:
        del act  # messages arrive one by one here

    def statistics(self) -> api.BusStatistics:
        return self._counts.statistics()

    def count_bad_trace(self, _: str) -> None:
        self._counts.add(counters.ConnectionCounter.BAD_TRACE)

    def count_full(self) -> None:
        self._counts.add(counters.ConnectionCounter.FULL)

    # Called by the network.

    def gain_connection(self, connection: api.ConnectionId) -> None:
        again = self._state is api.ConnectionState.RECONNECTING
        self._connection = connection
        self.severed = False
        if again:
            self._counts.add(counters.ConnectionCounter.RECONNECTED)
        unsent, self._unsent = self._unsent, []
        for action in unsent:
            self.net.hop(self.node, "up", action)
        self._change(api.ConnectionState.CONNECTED)

    def lose_connection(self) -> None:
        if self._state is api.ConnectionState.CONNECTED:
            self._connection = None
            self._change(api.ConnectionState.RECONNECTING)

    def end(self, cause: errors.MusterError | None) -> None:
        """Closed permanently: by its owner, or because the process ended."""
        self._cause = cause or errors.NotConnected("the connection is closed")
        self._connection = None
        self.net.forget_bus(self)
        for subscription in self._subscriptions:
            subscription.end(cause)
        for future in list(self._waiting):
            if not future.done():  # what it waits for may have been done
                future.set_exception(errors.TimedOut(str(self._cause)))
        self._change(api.ConnectionState.CLOSED)

    def _change(self, state: api.ConnectionState) -> None:
        if state is not self._state:
            first = self._state is api.ConnectionState.CLOSED
            self._state = state
            if not first:
                self._listeners.notify(state)

    def check_open(self) -> None:
        if self._state is api.ConnectionState.CLOSED:
            raise self._cause or errors.NotConnected("the connection is closed")

    # Messages.

    def _send(self, action: Callable[[], None]) -> None:
        """To the brokers, where ``action`` happens, if it gets there."""
        self.check_open()
        over = self._connection

        def arrive() -> None:
            if not self.severed and self.net.sends(self.node) and (over is None or over == self._connection):
                action()

        if over is not None:
            self.net.hop(self.node, "up", arrive)
        elif len(self._unsent) < MAX_UNSENT:
            self._unsent.append(arrive)
        else:
            raise errors.NotConnected("not connected, and the send buffer is full")

    async def publish(
        self, subject: str, data: bytes, *, headers: api.Headers | None = None, reply: str | None = None
    ) -> None:
        message_format.check_subject(subject)
        if reply is not None:
            message_format.check_subject(reply)
        self._say(subject, data, headers, reply, lambda _: None)

    def publish_now(self, messages: Sequence[tuple[str, bytes, api.Headers]]) -> bool:
        del messages
        return False  # in the simulation every message takes time

    def _say(
        self,
        subject: str,
        data: bytes,
        headers: api.Headers | None,
        reply: str | None,
        heard_by: Callable[[int], None],
    ) -> None:
        """Publish, and get the number of receivers from the brokers."""
        with_trace = dict(message_format.with_trace_headers(headers))
        size = len(data) + (len(message_format.encode_headers(with_trace)) if with_trace else 0)
        if size > api.PAYLOAD_BYTES_MAX:
            maximum = api.PAYLOAD_BYTES_MAX
            raise errors.LimitExceeded(f"a message of {size} bytes: the broker's maximum is {maximum}")

        def arrive() -> None:
            stored = self.net.capture(self.node, subject, data, with_trace)
            heard_by(self.net.route(self.node, subject, data, with_trace, reply) + stored)

        self._send(arrive)

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
        message_format.check_subject(subject, wildcards=True)
        message_format.check_group(group or "")
        subscription = subscriptions.BoundedSubscription(
            subject,
            handler=handler,
            bulk=bulk,
            max_pending=max_pending,
            max_pending_bytes=max_pending_bytes,
            overflow=overflow,
            counts=self._counts,
        )
        listener = SimulatedSubscription(subject, group or "", self, subscription.accept)
        self._subscriptions[subscription] = listener

        async def unsubscribe() -> None:
            self._subscriptions.pop(subscription, None)
            self.net.forget(listener)

        def listen() -> None:
            if subscription in self._subscriptions:
                self.net.listen(listener)

        try:
            await self._round_trip(listen)  # in one step: within a connection, nothing overtakes
        except BaseException:
            await unsubscribe()
            raise
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
    ) -> SimulatedMessage:
        answers, no_subscriber = await self._exchange(subject, data, headers, 1, timeout_s, repeat)
        if no_subscriber:
            raise requests.NoResponders(f"no subscriber on {subject!r}")
        if not answers:
            raise errors.TimedOut(f"no reply from {subject!r} within {timeout_s:g} s")
        return answers[0]

    async def gather(
        self,
        subject: str,
        data: bytes,
        *,
        enough: int | None = None,
        timeout_s: float = api.DEFAULT_TIMEOUT_S,
        headers: api.Headers | None = None,
    ) -> list[api.Message]:
        answers, _ = await self._exchange(subject, data, headers, enough, timeout_s)
        return list(answers)

    async def _exchange(
        self,
        subject: str,
        data: bytes,
        headers: api.Headers | None,
        enough: int | None,
        timeout_s: float,
        repeat: api.Repetition | None = None,
    ) -> tuple[list[SimulatedMessage], bool]:
        """The replies, and whether there is no subscriber."""
        message_format.check_subject(subject)
        answers: list[SimulatedMessage] = []
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def take(message: SimulatedMessage) -> None:
            if not done.done():
                answers.append(message)
                if len(answers) == enough:
                    done.set_result(False)

        repeated = False

        def heard_by(count: int) -> None:
            if count == 0 and not repeated:
                self.net.hop(
                    self.node, "down", lambda: None if done.done() else done.set_result(True), self.context
                )

        requester = f"{self._identity}.{self._session}"
        reply = subjects.reply_subject(subjects.responder(subject), requester, str(next(self._replies)))
        listener = SimulatedSubscription(reply, "", self, take)
        self.net.listen(listener)
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def send_again(interval_s: float) -> None:
            nonlocal repeated, timer
            assert repeat is not None
            repeated = True
            with contextlib.suppress(errors.Unavailable):
                again = data if repeat.data is None else repeat.data
                self._say(repeat.subject or subject, again, headers, reply, heard_by)
            timer = loop.call_later(interval_s, send_again, min(api.REPEAT_S_MAX, 2 * interval_s))

        if repeat is not None:
            timer = loop.call_later(repeat.after_s, send_again, min(api.REPEAT_S_MAX, 2 * repeat.after_s))
        try:
            self._say(subject, data, headers, reply, heard_by)
            return answers, await self.wait(done, timeout_s) or False
        finally:
            if timer is not None:
                timer.cancel()
            self.net.forget(listener)

    async def wait(self, future: asyncio.Future[T], timeout_s: float) -> T | None:
        """Its result; None after the timeout. Ends with the connection."""
        self._waiting[future] = None
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return None
        finally:
            self._waiting.pop(future, None)

    async def flush(self, *, timeout_s: float = api.DEFAULT_TIMEOUT_S) -> None:
        await self._round_trip(lambda: None, timeout_s)

    async def _round_trip(self, action: Callable[[], None], timeout_s: float = api.DEFAULT_TIMEOUT_S) -> None:
        """Do something at the brokers, and wait for the reply."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def pong() -> None:
            if not done.done():
                done.set_result(True)

        def arrive() -> None:
            action()
            self.net.hop(self.node, "down", pong, self.context)

        self._send(arrive)
        if await self.wait(done, timeout_s) is None:
            raise errors.TimedOut(f"the broker did not respond within {timeout_s} s")

    # Streams and buckets.

    async def call(
        self,
        operation: Callable[[], T],
        *,
        timeout_s: float = api.DURABLE_TIMEOUT_S,
        repeat: bool = True,
    ) -> T:
        """Execute ``operation`` at the storage. ``repeat``: until there is a reply."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (left_s := deadline - loop.time()) > 0:
            future: asyncio.Future[tuple[T | errors.MusterError]] = loop.create_future()
            self._send(functools.partial(self._operate, operation, future))
            answered = await self.wait(future, min(left_s, TRY_S) if repeat else left_s)
            if answered is not None:
                (outcome,) = answered
                if isinstance(outcome, errors.MusterError):
                    raise outcome
                return outcome
        raise errors.TimedOut(f"the brokers' storage did not respond within {timeout_s:g} s")

    def _reaches_storage(self) -> bool:
        return self.net.reaches_storage(self.node) and not self.net.chance(self.net.faults.loss)

    def _operate(
        self, operation: Callable[[], T], future: asyncio.Future[tuple[T | errors.MusterError]]
    ) -> None:
        """At the brokers."""
        if not self._reaches_storage():
            return
        outcome: T | errors.MusterError
        try:
            outcome = operation()
        except errors.MusterError as error:
            outcome = error
        if self.net.chance(self.net.faults.loss):
            return

        def answer() -> None:
            if self.net.receives(self.node) and not future.done():
                future.set_result((outcome,))

        self.net.after_storage(lambda: self.net.hop(self.node, "down", answer, self.context))

    async def stream(self, settings: api.StreamSettings) -> streams.SimulatedStream:
        return await self._ensure(settings, markers=False)

    async def _ensure(self, settings: api.StreamSettings, *, markers: bool) -> streams.SimulatedStream:
        storage.check_settings(settings)

        def operation() -> None:
            there = self.net.logs.get(settings.name)
            if there is None:
                self.net.logs[settings.name] = storage.SimulatedLog(
                    settings, self.net.now_ns(), markers=markers
                )
            else:
                there.reconfigure(settings)

        await self.call(operation)
        return streams.SimulatedStream(self, settings.name)

    async def open_stream(self, name: str) -> streams.SimulatedStream:
        subjects.token(name)
        await self.call(lambda: self.net.log(name))
        return streams.SimulatedStream(self, name)

    async def streams(self) -> list[str]:
        return await self.call(lambda: sorted(self.net.logs))

    async def delete_stream(self, name: str) -> None:
        def operation() -> None:
            self.net.log(name)
            del self.net.logs[name]

        await self.call(operation)

    async def key_value(self, settings: api.KeyValueSettings) -> streams_key_value.StreamKeyValue:
        stream = await self._ensure(streams_key_value.stream_settings(settings), markers=True)
        return streams_key_value.StreamKeyValue(settings.bucket, stream)

    async def budgets(self) -> list[api.StreamBudget]:
        def operation() -> list[api.StreamBudget]:
            return [self.net.log(name).budget() for name in self.net.logs]

        return sorted(await self.call(operation), key=lambda budget: -budget.used_ratio)

    async def limit(
        self, stream: str, *, max_bytes: int, max_age_s: float, on_full: api.FullPolicy, replicas: int
    ) -> None:
        await self.call(
            lambda: self.net.log(stream).limit(
                max_bytes=max_bytes, max_age_s=max_age_s, on_full=on_full, replicas=replicas
            )
        )

    # The end.

    async def close(self) -> None:
        if self._state is api.ConnectionState.CLOSED:
            return
        mine: Sequence[subscriptions.BoundedSubscription] = list(self._subscriptions)
        with contextlib.suppress(errors.Unavailable):
            await self.flush()
        for subscription in mine:
            subscription.end()
            await subscription.drained()
        self.net.report_closed(self)
        self.end(None)
