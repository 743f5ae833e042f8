"""Handlers of programs: functions that are called with messages, queued messages and events.

A handler is a coroutine function, which runs in the event loop, or a plain function, which runs in a thread.
The type of its parameter selects what it receives: the message itself (also without a type), its text
(`str`), its data (`bytes`), or its JSON as any other type.

A handler of a queue ends its message by returning, by raising, or with the message's ``ack``, ``nack`` or
``retry``. What fails is repeated as `muster.Retry` says, and then it is a dead letter.  A request whose
handler fails is answered with the error; a handler annotated ``-> None`` answers no requests.  Every failure
is logged with the handler, the topic and the traceback.

Around each call are the middlewares of the program: functions that take the `HandlerCall` and return a
context manager, or generator functions with one ``yield``.

A handler that calls `sys.exit` ends `run` with that exit status.  The end of a program waits `END_S` for the
plain functions that are running; their threads do not keep the process alive.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import threading
import types
import typing
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from muster.bus import spans
from muster.bus.rpc import error_replies
from muster.client import messages
from muster.core import errors
from muster.core.telemetry import log, trace
from muster.inform import protocol
from muster.message import messages as jms
from muster.message import retries
from muster.message.client import consumers
from muster.notify import client

events = log.EventLog("client")

Handler = Callable[..., Any]
Reader = Callable[[Any], tuple[Any, ...]]
END_S = 5.0


@dataclass(frozen=True, slots=True)
class HandlerCall:
    """A call of a handler, for middlewares."""

    handler: str  # its name
    topic: str  # of the message; or ``queue:NAME``, ``event:TYPE``, ``context:KEY``
    message: Any  # a `muster.Message`, a `muster.QueueMessage`, an event or a change
    attempt: int = 1  # deliveries of a message of a queue, with this one


Middleware = Callable[
    [HandlerCall], contextlib.AbstractContextManager[Any] | contextlib.AbstractAsyncContextManager[Any]
]


class HandlerExit(BaseException):
    """A handler called `sys.exit`. Not a SystemExit, which would end the event loop of all handlers."""

    def __init__(self, code: Any) -> None:
        super().__init__(code)
        self.code = code


def reader(handler: Handler) -> Reader:
    """A function that returns the arguments of the handler for a message."""
    parameters = [
        parameter
        for parameter in inspect.signature(handler).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(parameters) > 1:
        raise errors.InvalidInput(
            f"{name_of(handler)} has {len(parameters)} parameters without a default; use one"
        )
    if not parameters:
        return lambda message: ()
    kind = _type_of(parameters[0], handler)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kinds = set(typing.get_args(kind)) - {types.NoneType}
        if len(kinds) == 1:
            (kind,) = kinds  # the value of a change may be None
    return lambda message: (_argument(message, kind),)


def _type_of(parameter: inspect.Parameter, handler: Handler) -> Any:
    """The declared type of a parameter; Any if it has none, or if it cannot be found."""
    if parameter.annotation is parameter.empty:
        return Any
    function = handler.func if isinstance(handler, functools.partial) else handler
    function = inspect.unwrap(function if hasattr(function, "__code__") else type(function).__call__)
    declared = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    enclosing = {**getattr(function, "__globals__", {}), **inspect.getclosurevars(function).nonlocals}
    try:
        return typing.get_type_hints(declared, enclosing)[parameter.name]
    except NameError:
        warnings.warn(
            f"{name_of(handler)} receives messages as they are: its type {parameter.annotation} is not known "
            "where messages arrive; define or import it at the top of its module",
            stacklevel=2,
        )
        return Any


def _argument(message: Any, kind: Any) -> Any:
    if kind is Any or (isinstance(kind, type) and isinstance(message, kind)):
        return message
    if isinstance(message, messages.PublishedMessage):
        return message.text if kind is str else message.data if kind is bytes else message.json(kind)
    body: Any
    if isinstance(message, protocol.ContextChange):
        body = message.value
        if body is None or kind is str:
            return None if body is None else body.decode()
    else:
        body = message.body() if isinstance(message, jms.JmsMessage) else dict(message.content)
    if isinstance(kind, type) and isinstance(body, kind):
        return body
    try:
        if isinstance(body, str | bytes):
            return msgspec.json.decode(body, type=kind)
        return msgspec.convert(body, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidInput(str(error)) from error


def middleware(made: Callable[[HandlerCall], Any]) -> Middleware:
    """The middleware that a program declares: it may be a generator function."""
    if inspect.isasyncgenfunction(made):
        return contextlib.asynccontextmanager(made)
    return contextlib.contextmanager(made) if inspect.isgeneratorfunction(made) else made


class Caller:
    """Calls one handler inside the middlewares."""

    def __init__(self, handler: Handler, around: list[Middleware]) -> None:
        self.handler = handler
        self._arguments = reader(handler)
        self._around = around

    async def __call__(
        self, message: Any, topic: str, working_for: trace.TraceContext | None = None, attempt: int = 1
    ) -> Any:
        trace.current.set(working_for)
        name = name_of(self.handler)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(spans.span(f"handle {name}", spans.SpanKind.SERVER, topic=topic))
            for make in self._around:
                made = make(HandlerCall(name, topic, message, attempt))
                if isinstance(made, contextlib.AbstractAsyncContextManager):
                    await stack.enter_async_context(made)
                else:
                    stack.enter_context(made)
            return await call(self.handler, self._arguments(message))


async def in_parallel(count: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do the work ``count`` times. The first failure ends all."""
    if count < 1:
        raise errors.InvalidInput(f"concurrency is at least 1, not {count}")
    if count == 1:
        await work()
        return
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def call(handler: Handler, arguments: tuple[Any, ...]) -> Any:
    try:
        if inspect.iscoroutinefunction(handler):
            return await handler(*arguments)
        result = await _in_thread(handler, arguments)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        raise HandlerExit(error.code) from error


class _DaemonThread(concurrent.futures.Executor):
    def __init__(self, name: str) -> None:
        self._name = name

    def submit(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        ended: concurrent.futures.Future[Any] = concurrent.futures.Future()
        ended.set_running_or_notify_cancel()

        def work() -> None:
            try:
                ended.set_result(function(*args, **kwargs))
            except StopIteration as error:  # which no future can pass on
                unexpected = RuntimeError("the handler raised StopIteration")
                unexpected.__cause__ = error
                ended.set_exception(unexpected)
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                ended.set_exception(error)

        threading.Thread(target=work, name=f"handler {self._name}", daemon=True).start()
        return ended


async def _in_thread(handler: Handler, arguments: tuple[Any, ...]) -> Any:
    """As `asyncio.to_thread`, but the end of the process does not wait for the thread."""
    context, loop = contextvars.copy_context(), asyncio.get_running_loop()
    waiting = loop.run_in_executor(_DaemonThread(name_of(handler)), context.run, handler, *arguments)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait((waiting,), timeout=END_S)
        if waiting.cancel():
            events.warning("handler-abandoned", handler=name_of(handler), after_s=END_S)
        raise


def name_of(handler: Handler) -> str:
    return str(getattr(handler, "__name__", handler))


def failed(handler: Handler, error: BaseException, topic: str, **facts: Any) -> None:
    error.add_note(f"in the handler {name_of(handler)}, for a message of {topic}")
    events.error("handler-failed", error=error, stack=True, handler=name_of(handler), topic=topic, **facts)


async def serve_topic(subscription: messages.AsyncSubscription, caller: Caller, concurrency: int) -> None:
    """Call the handler for each message; what it returns is the reply, if the sender requested one."""
    replies = inspect.signature(caller.handler).return_annotation not in (None, "None")

    async def work() -> None:
        async for message in subscription:
            received = message.received
            assert received is not None  # it is of a subscription
            try:
                result = await caller(message, message.topic, received.trace)
                if result is not None and message.wants_reply:
                    await received.respond(messages.encode(result))
            except (Exception, HandlerExit) as error:
                if replies and message.wants_reply:
                    with contextlib.suppress(errors.MusterError):  # the connection is lost
                        data, headers = messages.error_reply(_fault(caller.handler, error))
                        await received.respond(data, headers=headers)
                if isinstance(error, HandlerExit):
                    raise
                failed(caller.handler, error, message.topic)  # and the next message is handled

    async with subscription:
        await in_parallel(concurrency, work)


def _fault(handler: Handler, error: BaseException) -> error_replies.ErrorReply:
    if isinstance(error, errors.MusterError):
        return error_replies.to_error_reply(error)
    kind = "SystemExit" if isinstance(error, HandlerExit) else type(error).__name__
    text = retries.described(f"{name_of(handler)} failed: {kind}: {error}")
    return error_replies.ErrorReply(code="handler-failed", message=text)


async def serve_queue(
    consumer: consumers.Consumer, caller: Caller, concurrency: int, retry: retries.Retry
) -> None:
    """Call the handler for each message of a queue."""

    @functools.wraps(caller.handler)
    async def handle(message: jms.JmsMessage) -> None:
        working_for = None
        if isinstance(parent := message.properties.get(trace.PARENT_HEADER), str):
            working_for = trace.extract({trace.PARENT_HEADER: parent})
        await caller(message, str(consumer.destination), working_for, message.delivery_count)

    await in_parallel(concurrency, lambda: consumer.listen(handle, retry=retry))


async def serve_changes(changes: AsyncIterator[protocol.ContextChange], caller: Caller, only: str) -> None:
    """Call the handler for each change; ``only``: of this key."""
    async for change in changes:
        if not only or change.key == only:
            try:
                await caller(change, f"context:{change.key}")
            except Exception as error:  # noqa: BLE001 - the next change is handled
                failed(caller.handler, error, f"context:{change.key}", version=change.version)


async def serve_receiver(receiver: client.ReceiverHandle, caller: Caller) -> None:
    """Call the handler for each event. A durable event is acknowledged when the handler has ended."""
    async for event in receiver:
        try:
            await caller(event, f"event:{event.type}")
        except Exception as error:  # noqa: BLE001 - the next event is handled
            failed(caller.handler, error, f"event:{event.type}", id=event.id)
