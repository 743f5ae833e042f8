"""The bus for programs without an event loop: the same interface with blocking calls.

    with muster.blocking.connect("nats://127.0.0.1:4222") as bus:
        bus.publish("news.today", b"hello")
        print(bus.request("time.now", b"").data)

A small part of `muster.bus.api`: messages, streams and key/value.  Behind it one thread runs an event loop
with the real connection; any number of threads may call.  Handlers and leases need a loop of their own
anyway: use `muster.connect` for those.

Users write `muster.blocking`.  A blocking class is a `BlockingTwin`: `sync`, `sync_iterator` and `sync_twin`
make its methods from the asynchronous ones, with the same parameters, types and documentation.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import inspect
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from muster import connection
from muster.bus import api
from muster.core import errors
from muster.core.telemetry import trace

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")

_ASYNC = re.compile(r"\basync (?=with|for|def)|\bawait ")


class EventLoopThread:
    """An event loop in a separate thread, for callers that have none or must not block their own."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="muster-blocking", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Run the loop until `stop`. A task that calls `sys.exit` does not end the loop of all callers."""
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                return self._loop.run_forever()

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
        turn = asyncio.Lock()  # after an interrupt, it is closed when its step has ended
        stepping: asyncio.Task[Any] | None = None

        async def step() -> T:
            nonlocal stepping
            stepping = asyncio.current_task()
            async with turn:
                try:
                    return await anext(items)
                except StopAsyncIteration:
                    raise _Ended from None

        async def close() -> None:
            if stepping is not None and not stepping.cancelling():  # a second time would end its clean-up
                stepping.cancel()
            async with turn:
                if isinstance(items, AsyncGenerator):
                    await items.aclose()

        try:
            while True:
                try:
                    yield self.wait(step())
                except _Ended:
                    return
        finally:
            if not self._loop.is_closed():
                self.wait(close())

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


async def _under(working_for: trace.TraceContext | None, work: Coroutine[Any, Any, T]) -> T:
    trace.current.set(working_for)
    return await work


def _wrap(method: Callable[..., Any], wrapper: Callable[..., Any], returns: str = "") -> Any:
    functools.update_wrapper(wrapper, method)
    wrapper.__doc__ = _ASYNC.sub("", (method.__doc__ or "").replace("_async", ""))
    del wrapper.__wrapped__  # type: ignore[attr-defined]  # else it counts as a coroutine function
    signature = inspect.signature(method)
    returns = returns or str(signature.return_annotation).replace("Async", "")
    wrapper.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
    return wrapper


def sync(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The coroutine method as a blocking one."""
    name = method.__name__

    def call(self: BlockingTwin[A], *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._loop.wait(getattr(self._async, name)(*args, **kwargs))
        return result

    wrapped: Callable[Concatenate[Any, P], T] = _wrap(method, call)
    return wrapped


def sync_iterator(
    method: Callable[Concatenate[A, P], AsyncIterator[T]],
) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """The asynchronous generator as a plain one."""
    name = method.__name__

    def call(self: BlockingTwin[A], *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items: Iterator[T] = self._loop.iterate(getattr(self._async, name)(*args, **kwargs))
        return items

    wrapped: Callable[Concatenate[Any, P], Iterator[T]] = _wrap(method, call)
    return wrapped


def sync_twin(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]], twin: Callable[[T, EventLoopThread], W]
) -> Callable[Concatenate[Any, P], W]:
    """The coroutine method as a blocking one that returns the blocking ``twin`` of its result."""
    name = method.__name__

    def call(self: BlockingTwin[A], *args: P.args, **kwargs: P.kwargs) -> W:
        return twin(self._loop.wait(getattr(self._async, name)(*args, **kwargs)), self._loop)

    wrapped: Callable[Concatenate[Any, P], W] = _wrap(method, call, getattr(twin, "__name__", ""))
    return wrapped


def sync_decorator(
    method: Callable[Concatenate[A, P], Callable[[T], T]], serve: Callable[..., Coroutine[Any, Any, None]]
) -> Callable[Concatenate[Any, P], Callable[[T], T]]:
    """The method that makes a decorator; when that returns, ``serve`` has started to serve the function."""
    name = serve.__name__

    def call(self: BlockingTwin[A], *args: P.args, **kwargs: P.kwargs) -> Callable[[T], T]:
        def decorate(handler: T) -> T:
            self._loop.wait(getattr(self._async, name)(handler, *args, **kwargs))
            return handler

        return decorate

    wrapped: Callable[Concatenate[Any, P], Callable[[T], T]] = _wrap(method, call)
    return wrapped


def documented_as(cls: type[Any]) -> Callable[[type[T]], type[T]]:
    """Take over the documentation of the asynchronous class, and of its methods."""

    def decorate(twin: type[T]) -> type[T]:
        twin.__doc__ = _ASYNC.sub("", cls.__doc__ or "")
        for name, member in vars(twin).items():
            if not name.startswith("_") and not member.__doc__ and (source := getattr(cls, name, None)):
                member.__doc__ = _ASYNC.sub("", source.__doc__ or "")
        return twin

    return decorate


class BlockingTwin(Generic[A]):
    """``_async``: the asynchronous object; ``_loop``: where it runs."""

    def __init__(self, asynchronous: A, loop: EventLoopThread) -> None:
        self._async = asynchronous
        self._loop = loop

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]

    def __repr__(self) -> str:
        return repr(self._async)


class ClosingTwin(BlockingTwin[A], abc.ABC):
    """``with`` closes it."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BlockingMessage(BlockingTwin[api.Message]):
    """See `api.Message`."""

    respond = sync(api.Message.respond)

    def __init__(self, message: api.Message, loop: EventLoopThread) -> None:
        super().__init__(message, loop)
        self.subject = message.subject
        self.data = message.data
        self.headers = message.headers
        self.reply = message.reply
        self.size = message.size
        self.trace = message.trace


class BlockingSubscription(ClosingTwin[api.Subscription]):
    """Iterate over it until it is closed, or read the `next` message with a timeout."""

    next = sync_twin(api.Subscription.next, BlockingMessage)
    close = sync(api.Subscription.close)

    def messages(self, *, timeout_s: float | None = None) -> Iterator[BlockingMessage]:
        """Yield messages until none arrives within ``timeout_s`` or the subscription has ended."""
        while True:
            try:
                yield self.next(timeout_s=timeout_s)
            except (errors.TimedOut, errors.NotConnected):
                return

    def __iter__(self) -> Iterator[BlockingMessage]:
        return self.messages()


class BlockingStream(BlockingTwin[api.Stream]):
    """See `api.Stream`."""

    publish = sync(api.Stream.publish)
    publish_batch = sync(api.Stream.publish_batch)
    get = sync(api.Stream.get)
    read = sync_iterator(api.Stream.read)
    state = sync(api.Stream.state)

    @property
    def name(self) -> str:
        return self._async.name


class BlockingKeyValue(BlockingTwin[api.KeyValue]):
    """See `api.KeyValue`."""

    get = sync(api.KeyValue.get)
    create = sync(api.KeyValue.create)
    put = sync(api.KeyValue.put)
    update = sync(api.KeyValue.update)
    delete = sync(api.KeyValue.delete)
    keys = sync(api.KeyValue.keys)


class BlockingBus(ClosingTwin[api.Bus]):
    """See `api.Bus`; made by `connect`."""

    publish = sync(api.Bus.publish)
    subscribe = sync_twin(api.Bus.subscribe, BlockingSubscription)
    request = sync_twin(api.Bus.request, BlockingMessage)
    stream = sync_twin(api.Bus.stream, BlockingStream)
    open_stream = sync_twin(api.Bus.open_stream, BlockingStream)
    key_value = sync_twin(api.Bus.key_value, BlockingKeyValue)
    flush = sync(api.Bus.flush)
    _gather = sync(api.Bus.gather)

    @property
    def identity(self) -> str:
        return self._async.identity

    @property
    def state(self) -> api.ConnectionState:
        return self._async.state

    def gather(
        self,
        subject: str,
        data: bytes,
        *,
        enough: int | None = None,
        timeout_s: float = api.DEFAULT_TIMEOUT_S,
    ) -> list[BlockingMessage]:
        replies = self._gather(subject, data, enough=enough, timeout_s=timeout_s)
        return [BlockingMessage(reply, self._loop) for reply in replies]

    def close(self) -> None:
        if self.state is not api.ConnectionState.CLOSED:
            self._loop.wait(self._async.close())
        self._loop.stop()


def connect(servers: str | Iterable[str] | None = None, **options: Any) -> BlockingBus:
    """`muster.connect` for blocking programs, with the same options."""
    loop = EventLoopThread()
    try:
        return BlockingBus(loop.wait(connection.connect(servers, **options)), loop)
    except BaseException:
        loop.stop()
        raise
