"""Handlers of programs: functions that are called with messages, queued messages and events.

A handler is a coroutine function, which runs in the event loop, or a plain function, which runs in a thread.
The type of its parameter selects what it receives: the message itself (also without a type), its text
(`str`), its data (`bytes`), or its JSON as any other type.  A handler is called with one message at a time.

A handler that calls `sys.exit` ends `run` with that exit status.  The end of a program waits `END_S` for the
plain functions that are running; their threads do not keep the process alive.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import threading
import typing
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from muster.client import messages
from muster.core import errors
from muster.core.telemetry import log
from muster.message import messages as jms
from muster.notify import client

events = log.EventLog("client")

Handler = Callable[..., Any]
Reader = Callable[[Any], tuple[Any, ...]]
END_S = 5.0


class HandlerExit(BaseException):
    """A handler called `sys.exit`. Not a SystemExit, which would end the event loop of all handlers."""

    def __init__(self, code: Any) -> None:
        super().__init__(code)
        self.code = code


def reader(handler: Handler) -> Reader:
    """A function that returns the arguments of the handler for a message."""
    try:
        hints = typing.get_type_hints(handler)
    except NameError:  # a type that exists for type checkers only
        hints = {}
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
    kind = hints.get(parameters[0].name, Any)
    return lambda message: (_argument(message, kind),)


def _argument(message: Any, kind: Any) -> Any:
    if kind is Any or (isinstance(kind, type) and isinstance(message, kind)):
        return message
    if isinstance(message, messages.PublishedMessage):
        return message.text if kind is str else message.data if kind is bytes else message.json(kind)
    body = message.body() if isinstance(message, jms.JmsMessage) else dict(message.content)
    if isinstance(kind, type) and isinstance(body, kind):
        return body
    try:
        if isinstance(body, str | bytes):
            return msgspec.json.decode(body, type=kind)
        return msgspec.convert(body, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidInput(str(error)) from error


async def call(handler: Handler, arguments: tuple[Any, ...]) -> Any:
    try:
        if inspect.iscoroutinefunction(handler):
            return await handler(*arguments)
        result = await _in_thread(handler, arguments)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        raise HandlerExit(error.code) from error


async def _in_thread(handler: Handler, arguments: tuple[Any, ...]) -> Any:
    """As `asyncio.to_thread`, but the end of the process does not wait for the thread."""
    ended: concurrent.futures.Future[Any] = concurrent.futures.Future()
    ended.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            ended.set_result(context.run(handler, *arguments))
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            ended.set_exception(error)

    threading.Thread(target=work, name=f"handler {name_of(handler)}", daemon=True).start()
    waiting = asyncio.wrap_future(ended)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait((waiting,), timeout=END_S)
        if waiting.cancel():
            events.warning("handler-abandoned", handler=name_of(handler), after_s=END_S)
        raise


def name_of(handler: Handler) -> str:
    return str(getattr(handler, "__name__", handler))


def failed(handler: Handler, error: BaseException, **facts: Any) -> None:
    events.error("handler-failed", handler=name_of(handler), error=error, **facts)


async def serve_topic(
    subscription: messages.AsyncSubscription,
    handler: Handler,
    reply: Callable[[messages.PublishedMessage, Any], Awaitable[None]],
) -> None:
    """Call the handler for each message; what it returns is the reply, if the sender requested one."""
    arguments = reader(handler)
    async with subscription:
        async for message in subscription:
            try:
                result = await call(handler, arguments(message))
                if result is not None and message.wants_reply:
                    await reply(message, result)
            except Exception as error:  # noqa: BLE001 - the next message is handled
                failed(handler, error, topic=message.topic)


async def serve_receiver(receiver: client.ReceiverHandle, handler: Handler) -> None:
    """Call the handler for each event. A durable event is acknowledged when the handler has ended."""
    arguments = reader(handler)
    async for event in receiver:
        try:
            await call(handler, arguments(event))
        except Exception as error:  # noqa: BLE001 - the next event is handled
            failed(handler, error, event=event.type, id=event.id)
