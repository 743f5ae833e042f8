"""The client side: `call` sends a request, waits for its reply, and raises the error of the reply.

A request without a reply is sent again: the request, or its reply, is lost with a broker that restarts, and a
frozen server does not reply until another one has its place. A request that changes something has an id: a
server that has executed it sends the same reply and does not execute it again. A request that was sent, but
has no reply, raises `errors.TimedOut`: its outcome is unknown. Any other `errors.Unavailable` means that it
was not executed.

`exchange_once` is for protocols that have these properties themselves, because they need others: it sends a
request without an id, once. They are

- the dispatcher's (`message.client.partition_link`, `message.dispatcher.peers`): works are numbered, and a
  request is repeated to the same epoch only;
- operations, claims, renewals and checkpoints between managers, agents and the registry: the operation's id
  and the epoch make a repetition harmless, and a manager that may not act any more stops repeating;
- an agent's hello and its request for a secret, which a manager may forward;
- an information node's requests to others: a ping distinguishes a slow node from a frozen one, and the client
  sends a repetition to another node;
- requests to the brokers (system account, JetStream), which do not speak this protocol.

No service calls `api.Bus.request` itself; a test compares. It is for users' own topics.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from muster.bus import api, spans
from muster.bus.rpc import error_replies, origin, requests, server
from muster.core import errors

T = TypeVar("T")

TIMEOUT_S = 30.0
RETRY_S = 0.2  # between attempts while no process serves
REPEAT_S = 2.0  # after this time without a reply a request is sent again


class _Reply(msgspec.Struct):
    result: Any = None
    error: error_replies.ErrorReply | None = None


_decode = msgspec.json.Decoder(_Reply).decode


async def call(
    bus: api.Bus,
    subject: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    try_s: float | None = None,
    waits: bool = True,
    absent: errors.Unavailable | None = None,
    on_behalf_of: str = "",
) -> Any:
    """The result of the operation; raises the error that it ended with. See `exchange`."""
    data = _encoded(arguments or {})
    headers = {requests.ON_BEHALF_OF: on_behalf_of} if on_behalf_of else {}
    reads, in_doubt = _reads(subject), False
    if not reads:
        headers[requests.REQUEST_ID] = secrets.token_hex(16)  # of all attempts
    options: dict[str, Any] = {"try_s": try_s, "waits": waits, "absent": absent, "headers": headers}
    now_s = asyncio.get_running_loop().time

    async def attempt(left_s: float) -> Any:
        nonlocal in_doubt
        sent_at_s = now_s()
        with spans.span(_span_name(subject), spans.SpanKind.CLIENT, identity=bus.identity):
            message = await exchange(bus, subject, data, timeout_s=left_s, **options)
            try:
                return result_of(message.data)
            except errors.Overloaded:
                # If a repetition was refused, a server that is lost meanwhile may have executed the first.
                in_doubt |= not reads and now_s() - sent_at_s >= (REPEAT_S if try_s is None else try_s)
                raise

    try:
        return await unthrottled(attempt, timeout_s)
    except errors.Unavailable as error:
        if not in_doubt or isinstance(error, errors.TimedOut):
            raise
        raise errors.TimedOut(f"{error}; it may have been done") from error


async def unthrottled(attempt: Callable[[float], Awaitable[T]], timeout_s: float) -> T:
    """The result of ``attempt``, which gets the time that is left. It is made again while the service refuses
    it because this identity sends too much: then it was not executed."""
    now_s = asyncio.get_running_loop().time
    deadline_s = now_s() + timeout_s
    while True:
        try:
            return await attempt(max(0.1, deadline_s - now_s()))
        except errors.Throttled as error:
            wait_s = error.retry_after_s or RETRY_S
            if now_s() + wait_s >= deadline_s:
                raise
            await asyncio.sleep(wait_s)


def _encoded(arguments: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(arguments)
    except (
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
    ) as error:  # half of a surrogate pair, a cycle
        raise errors.InvalidInput(f"the arguments cannot be sent as JSON: {error}") from error


@functools.lru_cache(maxsize=8192)
def _span_name(subject: str) -> str:
    """``manage request.apply`` of ``muster.manage.from.ann.request.apply``."""
    _, part, _, _, *operation = subject.split(".")
    return f"{part} {'.'.join(operation)}"


def result_of(data: bytes) -> Any:
    try:
        reply = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.MusterError(f"the reply cannot be decoded: {error}") from error
    if reply.error is not None:
        raise error_replies.from_error_reply(reply.error)
    return reply.result


async def exchange(
    bus: api.Bus,
    subject: str,
    data: bytes,
    *,
    timeout_s: float = TIMEOUT_S,
    try_s: float | None = None,
    waits: bool = True,
    absent: errors.Unavailable | None = None,
    headers: Mapping[str, str] | None = None,
) -> api.Message:
    """The encoded reply to a request.

    After ``try_s`` without a reply (`REPEAT_S`) it is sent again, to the process that serves then, and so on
    (`api.Repetition`). While there is none, it ``waits`` for one, or raises ``absent`` at once.
    """
    reads = _reads(subject)
    if not reads:
        headers = {requests.REQUEST_ID: secrets.token_hex(16), **origin.headers(), **(headers or {})}
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    left_s = timeout_s
    repeat = api.Repetition(REPEAT_S if try_s is None else try_s)
    while True:
        try:
            reply = await bus.request(subject, data, headers=headers, timeout_s=left_s, repeat=repeat)
            if not reads:
                origin.answered()
            return reply
        except errors.TimedOut:
            raise _no_answer(timeout_s, reads) from None
        except errors.Unavailable as error:
            if not waits or loop.time() + RETRY_S > deadline:
                raise copy.copy(absent) or error from error  # it may be shared by all calls
            await asyncio.sleep(RETRY_S)
        left_s = max(0.1, deadline - loop.time())


class RequestSender(Protocol):
    """A connection to the bus, or a direct one."""

    def request(self, subject: str, data: bytes, *, timeout_s: float) -> Coroutine[Any, Any, api.Message]: ...


def exchange_once(
    sender: RequestSender,
    subject: str,
    data: bytes,
    *,
    timeout_s: float = api.DEFAULT_TIMEOUT_S,
    **options: Any,
) -> Coroutine[Any, Any, api.Message]:
    """The encoded reply to a request that is sent once, without an id. Other options as `api.Bus.request`."""
    return sender.request(subject, data, timeout_s=timeout_s, **options)


def exchange_repeated(
    bus: api.Bus, subject: str, data: bytes, *, timeout_s: float, repeat: api.Repetition
) -> Coroutine[Any, Any, api.Message]:
    """As `exchange_once`, but repeated as the protocol demands. It is on the path of each read of a context,
    so it has no other options."""
    return bus.request(subject, data, timeout_s=timeout_s, repeat=repeat)


@functools.lru_cache(maxsize=8192)
def _reads(subject: str) -> bool:
    return subject.split(".", 5)[4:5] == [server.READ]


def _no_answer(timeout_s: float, reads: bool) -> errors.TimedOut:
    doubt = "" if reads else "; it may have been done"
    return errors.TimedOut(f"no reply within {timeout_s:g} s{doubt}")


async def pages(
    bus: api.Bus, subject: str, arguments: Mapping[str, Any] | None = None, **options: Any
) -> AsyncIterator[Any]:
    """The items of a list that is returned in pages (`server.page`); accepts the options of `call`."""
    after: str | None = ""
    while after is not None:
        page = await call(bus, subject, {**(arguments or {}), "after": after}, **options)
        for item in page["items"]:
            yield item
        after = page["next"]
