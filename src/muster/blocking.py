"""The bus for programs without an event loop: the same interface with blocking calls.

    with muster.blocking.connect("nats://127.0.0.1:4222") as bus:
        bus.publish("news.today", b"hello")
        print(bus.request("time.now", b"").data)

A small part of `muster.bus.api`: messages, streams and key/value.  Behind it one thread runs an event loop
with the real connection; any number of threads may call.  Handlers, leases and consumers need a loop of their
own anyway: use `muster.connect` for those.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar

from muster import connection
from muster.bus import api
from muster.core import errors
from muster.core.telemetry import trace

T = TypeVar("T")


class EventLoopThread:
    """An event loop in a separate thread, for callers that have none or must not block their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="muster-blocking", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise errors.NotConnected("the connection is closed")
        if threading.current_thread() is self._thread:
            work.close()
            raise errors.InvalidInput(
                "a blocking call in the event loop would never return",
                hint="use a plain function as the handler, or `muster.open_async`",
            )
        future = asyncio.run_coroutine_threadsafe(_under(trace.current.get(), work), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # for an interrupt; does nothing where the work itself failed
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The items of an asynchronous iterator, which is closed when the iteration ends."""
        try:
            while True:
                try:
                    yield self.wait(_anext(items))
                except _Ended:
                    return
        finally:
            if isinstance(items, AsyncGenerator) and not self._loop.is_closed():
                self.wait(items.aclose())

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the loop, soon; also from a signal handler."""
        self._loop.call_soon_threadsafe(function)

    @property
    def is_stopped(self) -> bool:
        return self._loop.is_closed()

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class _Ended(Exception):
    """The end of an iterator: a future cannot hold `StopAsyncIteration`."""


async def _anext(items: AsyncIterator[T]) -> T:
    try:
        return await anext(items)
    except StopAsyncIteration:
        raise _Ended from None


async def _under(working_for: trace.TraceContext | None, work: Coroutine[Any, Any, T]) -> T:
    trace.current.set(working_for)
    return await work


class BlockingMessage:
    """See `api.Message`."""

    def __init__(self, message: api.Message, loop: EventLoopThread) -> None:
        self._message = message
        self._loop = loop
        self.subject = message.subject
        self.data = message.data
        self.headers = message.headers
        self.reply = message.reply
        self.trace = message.trace

    def respond(self, data: bytes, *, headers: api.Headers | None = None) -> None:
        self._loop.wait(self._message.respond(data, headers=headers))


class BlockingSubscription:
    """Iterate over it until it is closed, or read the `next` message with a timeout."""

    def __init__(self, subscription: api.Subscription, loop: EventLoopThread) -> None:
        self._subscription = subscription
        self._loop = loop

    def next(self, *, timeout_s: float | None = None) -> BlockingMessage:
        return BlockingMessage(self._loop.wait(self._subscription.next(timeout_s=timeout_s)), self._loop)

    def messages(self, *, timeout_s: float | None = None) -> Iterator[BlockingMessage]:
        """Yield messages until none arrives within ``timeout_s`` or the subscription has ended."""
        while True:
            try:
                yield self.next(timeout_s=timeout_s)
            except (errors.TimedOut, errors.NotConnected):
                return

    def __iter__(self) -> Iterator[BlockingMessage]:
        return self.messages()

    def close(self) -> None:
        self._loop.wait(self._subscription.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BlockingStream:
    """See `api.Stream`."""

    def __init__(self, stream: api.Stream, loop: EventLoopThread) -> None:
        self._stream = stream
        self._loop = loop
        self.name = stream.name

    def publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: api.Headers | None = None,
        message_id: str | None = None,
        timeout_s: float = api.DURABLE_TIMEOUT_S,
    ) -> int:
        return self._loop.wait(
            self._stream.publish(subject, data, headers=headers, message_id=message_id, timeout_s=timeout_s)
        )

    def publish_batch(
        self, messages: Sequence[api.OutgoingMessage], *, timeout_s: float = api.DURABLE_TIMEOUT_S
    ) -> int:
        return self._loop.wait(self._stream.publish_batch(messages, timeout_s=timeout_s))

    def get(self, sequence: int) -> api.StoredMessage:
        return self._loop.wait(self._stream.get(sequence))

    def read(
        self, first: int, last: int | None = None, *, subject: str | None = None, gaps: bool = False
    ) -> Iterator[api.StoredMessage]:
        return self._loop.iterate(self._stream.read(first, last, subject=subject, gaps=gaps))

    def state(self) -> api.StreamState:
        return self._loop.wait(self._stream.state())


class BlockingKeyValue:
    """See `api.KeyValue`."""

    def __init__(self, bucket: api.KeyValue, loop: EventLoopThread) -> None:
        self._bucket = bucket
        self._loop = loop

    def get(self, key: str) -> api.KeyValueEntry | None:
        return self._loop.wait(self._bucket.get(key))

    def create(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        return self._loop.wait(self._bucket.create(key, value, ttl_s=ttl_s))

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        return self._loop.wait(self._bucket.put(key, value, ttl_s=ttl_s))

    def update(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        return self._loop.wait(self._bucket.update(key, value, revision=revision, ttl_s=ttl_s))

    def delete(self, key: str, *, revision: int | None = None) -> None:
        self._loop.wait(self._bucket.delete(key, revision=revision))

    def keys(self, pattern: str = ">") -> list[str]:
        return self._loop.wait(self._bucket.keys(pattern))


class BlockingBus:
    """See `api.Bus`; made by `connect`."""

    def __init__(self, bus: api.Bus, loop: EventLoopThread) -> None:
        self._bus = bus
        self._loop = loop

    @property
    def identity(self) -> str:
        return self._bus.identity

    @property
    def state(self) -> api.ConnectionState:
        return self._bus.state

    def publish(
        self, subject: str, data: bytes, *, headers: api.Headers | None = None, reply: str | None = None
    ) -> None:
        self._loop.wait(self._bus.publish(subject, data, headers=headers, reply=reply))

    def subscribe(
        self,
        subject: str,
        *,
        group: str | None = None,
        max_pending: int = 65_536,
        overflow: api.OverflowPolicy = api.OverflowPolicy.DROP_OLDEST,
    ) -> BlockingSubscription:
        made = self._bus.subscribe(subject, group=group, max_pending=max_pending, overflow=overflow)
        return BlockingSubscription(self._loop.wait(made), self._loop)

    def request(
        self,
        subject: str,
        data: bytes,
        *,
        headers: api.Headers | None = None,
        timeout_s: float = api.DEFAULT_TIMEOUT_S,
    ) -> BlockingMessage:
        answer = self._bus.request(subject, data, headers=headers, timeout_s=timeout_s)
        return BlockingMessage(self._loop.wait(answer), self._loop)

    def gather(
        self,
        subject: str,
        data: bytes,
        *,
        enough: int | None = None,
        timeout_s: float = api.DEFAULT_TIMEOUT_S,
    ) -> list[BlockingMessage]:
        answers = self._loop.wait(self._bus.gather(subject, data, enough=enough, timeout_s=timeout_s))
        return [BlockingMessage(answer, self._loop) for answer in answers]

    def stream(self, settings: api.StreamSettings) -> BlockingStream:
        return BlockingStream(self._loop.wait(self._bus.stream(settings)), self._loop)

    def open_stream(self, name: str) -> BlockingStream:
        return BlockingStream(self._loop.wait(self._bus.open_stream(name)), self._loop)

    def key_value(self, settings: api.KeyValueSettings) -> BlockingKeyValue:
        return BlockingKeyValue(self._loop.wait(self._bus.key_value(settings)), self._loop)

    def flush(self, *, timeout_s: float = api.DEFAULT_TIMEOUT_S) -> None:
        self._loop.wait(self._bus.flush(timeout_s=timeout_s))

    def close(self) -> None:
        if self._bus.state is not api.ConnectionState.CLOSED:
            self._loop.wait(self._bus.close())
        self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(servers: str | Iterable[str] | None = None, **options: Any) -> BlockingBus:
    """`muster.connect` for blocking programs, with the same options."""
    loop = EventLoopThread()
    try:
        return BlockingBus(loop.wait(connection.connect(servers, **options)), loop)
    except BaseException:
        loop.stop()
        raise
